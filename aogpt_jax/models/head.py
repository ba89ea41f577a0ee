"""What a loss needs of the logits of all entries, without all of them at once.

The float32 logits [B, S, V] are by far the largest array of a training step. Here a part of the entries has its logits at any time,
in the forward and in the backward pass, which computes them again, unless all entries are one part; and where a mesh splits the
vocabulary, no device has the logits of more than its own rows of it.
"""

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

# Logits that a device holds at a time, at most, where it may choose: 128 MiB, with GPT-2's vocabulary of 667 entries, which is
# enough for a matmul to be worth reading the head for.
_MOST_LOGITS = 1 << 25


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def normalizers(
    x_BSD: jax.Array, kernel_DV: jax.Array, bias_V: jax.Array, labels_BS: jax.Array, chunk: int
) -> tuple[jax.Array, jax.Array]:
  """log(sum_v exp(logits)) and logits[label], with logits = x @ kernel + bias in float32; their difference is the NLL in nats.

  Args:
    x_BSD: what the head is given, in the dtype of the matmuls.
    kernel_DV: the head's parameters.
    bias_V: likewise; -inf for ids that there are none of.
    labels_BS: int.
    chunk: entries of a sequence that have their logits at the same time; 0: all, -1: as many as take a device 128 MiB.

  Returns:
    float32 [B, S] each. The gradient of the kernel is summed in float32, whatever the dtype of the matmuls.
  """
  return _values(x_BSD, kernel_DV, bias_V, labels_BS, chunk, keep=False)[0]


def _forward(x_BSD, kernel_DV, bias_V, labels_BS, chunk):
  # The backward pass begins with what it needs of the logits: to keep all of them until then takes no more memory than to compute
  # them again.
  keep = _axes(kernel_DV).chunks(x_BSD.shape, chunk) == 1
  out, logits = _values(x_BSD, kernel_DV, bias_V, labels_BS, chunk, keep)
  return out, (x_BSD, kernel_DV, bias_V, labels_BS, out[0], logits)


def _values(x_BSD, kernel_DV, bias_V, labels_BS, chunk, keep):
  """What `normalizers` returns, and a list of the logits [B, S, V] where they are to be kept."""
  axes = _axes(kernel_DV)
  rows, vocab, count = P(axes.rows), axes.vocab, axes.chunks(x_BSD.shape, chunk)

  def local(x_BSD, kernel_DV, bias_V, labels_BS):
    def step(_, part):
      x, labels = part
      logits = _logits(x, kernel_DV, bias_V)
      label_logits = jnp.sum(jnp.where(_label_places(labels, kernel_DV, vocab), logits, 0.0), axis=-1)
      return None, (jax.nn.logsumexp(logits, axis=-1), label_logits, *[logits] * keep)

    _, parts = _scan(step, None, count, (x_BSD, labels_BS))
    log_sum, label_logits, *logits = (_joined(part, labels_BS.shape[1]) for part in parts)
    if vocab:
      largest = jax.lax.pmax(log_sum, vocab)
      log_sum = largest + jnp.log(jax.lax.psum(jnp.exp(log_sum - largest), vocab))
      label_logits = jax.lax.psum(label_logits, vocab)
    return (log_sum, label_logits), logits

  return axes.mapped(local, (rows, P(None, vocab), P(vocab), rows), ((rows, rows), [P(axes.rows, None, vocab)] * keep))(
      x_BSD, kernel_DV.astype(x_BSD.dtype), bias_V.astype(jnp.float32), labels_BS)


def _backward(chunk, saved, cotangents):
  x_BSD, kernel_DV, bias_V, labels_BS, log_sum, kept = saved
  axes = _axes(kernel_DV)
  rows, vocab, embed, count = P(axes.rows), axes.vocab, axes.embed, axes.chunks(x_BSD.shape, chunk)

  def local(x_BSD, kernel_DV, bias_V, kept, *of_entries):
    def step(total, part):
      x, labels, log_sum, of_sum, of_label = part
      logits = kept[0] if kept else _logits(x, kernel_DV, bias_V)
      of_labels = jnp.where(_label_places(labels, kernel_DV, vocab), of_label[..., None], 0.0)
      slope = of_sum[..., None] * jnp.exp(logits - log_sum[..., None]) + of_labels
      of_bias = total[1] + slope.sum(axis=(0, 1))
      slope = slope.astype(x.dtype)
      of_x = jax.lax.dot_general(slope, kernel_DV, (((2,), (1,)), ((), ())), preferred_element_type=x.dtype)
      of_kernel = jax.lax.dot_general(x, slope, (((0, 1), (0, 1)), ((), ())), preferred_element_type=jnp.float32)
      return (total[0] + of_kernel, of_bias), of_x

    zero = (jnp.zeros(kernel_DV.shape, jnp.float32), jnp.zeros(bias_V.shape, jnp.float32))
    (of_kernel, of_bias), of_x = _scan(step, zero, count, (x_BSD, *of_entries))
    of_x = _joined(of_x, x_BSD.shape[1])
    if vocab:
      of_x = jax.lax.psum(of_x, vocab)
    if embed:  # each device gets the sum of the part that it holds
      of_kernel = jax.lax.psum_scatter(of_kernel, embed, scatter_dimension=0, tiled=True)
    for axis in axes.summed:
      of_bias = jax.lax.psum(of_bias, axis)
      of_kernel = of_kernel if axis == embed else jax.lax.psum(of_kernel, axis)
    return of_x, of_kernel, of_bias

  of_x, of_kernel, of_bias = axes.mapped(
      local, (rows, P(None, vocab), P(vocab), P(axes.rows, None, vocab), *[rows] * 4), (rows, P(embed, vocab), P(vocab)))(
          x_BSD, kernel_DV.astype(x_BSD.dtype), bias_V.astype(jnp.float32), kept, labels_BS, log_sum, *cotangents)
  return of_x, of_kernel.astype(kernel_DV.dtype), of_bias.astype(bias_V.dtype), None


normalizers.defvjp(_forward, _backward)


def _logits(x, kernel, bias):
  """float32 [B, C, V] of a chunk over the rows of the vocabulary that the device has."""
  return jax.lax.dot_general(x, kernel, (((2,), (0,)), ((), ())), preferred_element_type=jnp.float32) + bias


def _label_places(labels, kernel, vocab):
  """bool [B, C, V]: where in these its labels are."""
  first = jax.lax.axis_index(vocab) * kernel.shape[1] if vocab else 0
  return labels[..., None] - first == jnp.arange(kernel.shape[1])


def _scan(step: Callable, carry: Any, count: int, arrays: tuple[jax.Array, ...]) -> tuple[Any, Any]:
  """`jax.lax.scan` over `count` parts of arrays [B, S, ...], of equal length; the last one is filled up with zeros."""
  if count == 1:
    carry, out = step(carry, arrays)
    return carry, jax.tree.map(lambda x: x[None], out)

  def split(x):
    size = -(-x.shape[1] // count)
    x = jnp.pad(x, [(0, 0), (0, count * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(x.shape[0], count, size, *x.shape[2:]).swapaxes(0, 1)

  return jax.lax.scan(step, carry, tuple(map(split, arrays)))


def _joined(parts: jax.Array, length: int) -> jax.Array:
  """[B, length, ...] from what the steps of `_scan` return for their parts, [N, B, C, ...]."""
  x = parts.swapaxes(0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


class _axes:
  """Along which axes of the mesh that is traced on the parts of the computation are split; None where along none.

  Attributes:
    rows: the sequences,
    summed: and those of them along which there is something to sum.
    vocab: the vocabulary.
    embed: the width of the gradient of the kernel.
  """

  def __init__(self, kernel_DV: jax.Array):
    mesh = jax.sharding.get_abstract_mesh()
    self._many = "fsdp" in mesh.axis_names and mesh.size > 1
    width, vocab_size = kernel_DV.shape
    splits = lambda axis, size: self._many and mesh.shape[axis] > 1 and size % mesh.shape[axis] == 0
    self.rows = ("data", "fsdp") if self._many else None
    self.summed = [axis for axis in self.rows or () if mesh.shape[axis] > 1]
    self.vocab = "tensor" if splits("tensor", vocab_size) else None
    self.embed = "fsdp" if splits("fsdp", width) else None
    self._row_ways = math.prod(mesh.shape[axis] for axis in self.rows or ())
    self._vocab_size = vocab_size // (mesh.shape["tensor"] if self.vocab else 1)

  def chunks(self, shape: tuple[int, int, int], chunk: int) -> int:
    """Into how many parts the entries of x [B, S, D] go."""
    batch, length, _ = shape
    if chunk == -1:
      return min(math.ceil(batch // self._row_ways * length * self._vocab_size / _MOST_LOGITS), length)
    return math.ceil(length / chunk) if chunk else 1

  def mapped(self, local: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`local`, run by each device on its parts."""
    return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, check_vma=False) if self._many else local
