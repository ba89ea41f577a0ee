"""Softmax attention; the entries are in generation order.

Attention among the entries of one pass has several implementations, which `config.model.attention` chooses from; they differ in
speed and memory, not in what they compute:

* xla: plain operations, which run everywhere, some queries at a time, so that their scores [B, H, S, S] are never in memory at once;
* cudnn: the flash attention of cuDNN, for NVIDIA GPUs from Ampere on, in bfloat16;
* splash: the block-sparse flash attention of Pallas, for TPUs, for a multiple of 128 entries.

Attention to a cache is plain operations always: it has few queries.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
import ml_collections

from aogpt_jax import config as config_lib

# Splash works on blocks of entries; the larger they are, the fewer steps it takes, and 512 fit the memory of its cores.
_SPLASH_BLOCKS = (512, 256, 128)
# Queries whose scores are in memory at the same time, and into how many such parts a pass goes at most: fewer queries leave too
# little work to a matmul, and each part adds operations to the program.
_LEAST_QUERIES, _MOST_PARTS = 64, 8


@dataclasses.dataclass(frozen=True)
class Backend:
  """What attends among the entries of a pass, and where.

  Attributes:
    name: xla, cudnn or splash.
    mesh: of Splash, over whose data and fsdp axes the sequences are split, and the heads over tensor; None: they are on one device.
    interpret: run Splash without a TPU, operation by operation, as tests do.
  """

  name: str = "xla"
  mesh: Mesh | None = None
  interpret: bool = False


def choose(model: ml_collections.ConfigDict, mesh: Mesh | None = None) -> Backend:
  """What `config.model.attention` stands for on the devices of a mesh, which need not be there; None: the first local device.

  auto takes cudnn or splash where they can run whole blocks, else xla.

  Args:
    model: the checked `config.model`.
    mesh: see `sharding.make_mesh`.

  Raises:
    ConfigError: the implementation that is asked for does not run on these devices.
  """
  device = mesh.devices.flat[0] if mesh is not None else jax.local_devices()[0]
  # The first of these that the devices have and that can run the model's blocks.
  there = {"splash": device.platform == "tpu", "cudnn": _is_nvidia(device), "xla": True}
  name = model.attention
  if name == "auto":
    name = next(n for n, has in there.items() if has and not config_lib.attention_problem(model, n))
  if not there[name]:
    needs = {"splash": "TPUs", "cudnn": "NVIDIA GPUs of compute capability 8.0 or later"}[name]
    raise config_lib.ConfigError(
        f"config.model.attention: {name} is for {needs}, and the devices are {device.device_kind}; set it to auto or xla.")
  return Backend(name, mesh if name == "splash" else None)  # XLA splits the others itself


def _is_nvidia(device: jax.Device) -> bool:
  """Whether a device is one of those that cuDNN has flash attention for; GPUs of other makes have names as gfx90a here."""
  capability = str(getattr(device, "compute_capability", ""))
  return device.platform == "gpu" and bool(re.fullmatch(r"\d+\.\d+", capability)) and float(capability) >= 8


def attend_whole(q_BSHK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array, *, causal: bool, backend: Backend) -> jax.Array:
  """Scaled dot-product attention among the entries of a pass, with the softmax in float32.

  Splash runs a multiple of 128 entries; passes over others, which are parts of texts, are plain operations.

  Args:
    q_BSHK: queries.
    k_BSHK: keys.
    v_BSHK: values.
    causal: entry i sees the entries 0..i; else all.
    backend: see `choose`.

  Returns:
    [B, S, H, K] in the dtype of the values.
  """
  length = q_BSHK.shape[1]
  if backend.name == "cudnn":
    return jax.nn.dot_product_attention(q_BSHK, k_BSHK, v_BSHK, is_causal=causal, implementation="cudnn")
  if backend.name == "splash" and length % _SPLASH_BLOCKS[-1] == 0:
    return _splash(q_BSHK, k_BSHK, v_BSHK, causal, backend)
  parts = min(length // _LEAST_QUERIES, _MOST_PARTS)
  if parts < 2:
    return attend(q_BSHK, k_BSHK, v_BSHK, causal_mask(length) if causal else None)
  y_BHSK = _in_parts(*(x.swapaxes(1, 2) for x in (q_BSHK * q_BSHK.shape[-1] ** -0.5, k_BSHK, v_BSHK)), causal, parts)
  return y_BHSK.swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _in_parts(q_BHSK: jax.Array, k_BHSK: jax.Array, v_BHSK: jax.Array, causal: bool, parts: int) -> jax.Array:
  """Attention, some queries at a time, with the keys that they can see alone.

  The backward pass has the weights again from the logarithms of their sums (Dao et al., arXiv 2205.14135): that is one product more,
  and less to write and read. Products have operands in the dtype of the values and sums in float32, in both passes.
  """
  return _parts_forward(q_BHSK, k_BHSK, v_BHSK, causal, parts)[0]


def _parts_forward(q_BHSK, k_BHSK, v_BHSK, causal, parts):
  outputs, log_sums = [], []
  for rows, keys in _parts(q_BHSK.shape[2], causal, parts):
    scores = _scores(q_BHSK, k_BHSK, rows, keys, causal)
    largest = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    y = jnp.einsum("BHST,BHTK->BHSK", weights.astype(v_BHSK.dtype), v_BHSK[:, :, keys], preferred_element_type=jnp.float32)
    outputs.append((y / total).astype(v_BHSK.dtype))
    log_sums.append(largest + jnp.log(total))
  y_BHSK, log_sum_BHS1 = (jnp.concatenate(x, axis=2) for x in (outputs, log_sums))
  return y_BHSK, (q_BHSK, k_BHSK, v_BHSK, y_BHSK, log_sum_BHS1)


def _parts_backward(causal, parts, saved, of_y_BHSK):
  q_BHSK, k_BHSK, v_BHSK, y_BHSK, log_sum_BHS1 = saved
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  mean_BHS1 = product("BHSK,BHSK->BHS", of_y_BHSK, y_BHSK)[..., None]
  of_q, of_k, of_v = [], jnp.zeros(k_BHSK.shape, jnp.float32), jnp.zeros(v_BHSK.shape, jnp.float32)
  for rows, keys in _parts(q_BHSK.shape[2], causal, parts):
    of_y = of_y_BHSK[:, :, rows]
    weights = jnp.exp(_scores(q_BHSK, k_BHSK, rows, keys, causal) - log_sum_BHS1[:, :, rows])
    of_v = of_v.at[:, :, keys].add(product("BHST,BHSK->BHTK", weights.astype(of_y.dtype), of_y))
    of_scores = weights * (product("BHSK,BHTK->BHST", of_y, v_BHSK[:, :, keys]) - mean_BHS1[:, :, rows])
    of_scores = of_scores.astype(q_BHSK.dtype)
    of_q.append(product("BHST,BHTK->BHSK", of_scores, k_BHSK[:, :, keys]))
    of_k = of_k.at[:, :, keys].add(product("BHST,BHSK->BHTK", of_scores, q_BHSK[:, :, rows]))
  return tuple(g.astype(x.dtype) for g, x in zip((jnp.concatenate(of_q, axis=2), of_k, of_v), saved))


_in_parts.defvjp(_parts_forward, _parts_backward)


def _parts(length: int, causal: bool, parts: int) -> list[tuple[slice, slice]]:
  """Queries of each part, and the keys that they can see."""
  edges = [length * i // parts for i in range(parts + 1)]
  return [(slice(a, b), slice(0, b if causal else length)) for a, b in zip(edges, edges[1:])]


def _scores(q_BHSK: jax.Array, k_BHSK: jax.Array, rows: slice, keys: slice, causal: bool) -> jax.Array:
  scores = jnp.einsum("BHSK,BHTK->BHST", q_BHSK[:, :, rows], k_BHSK[:, :, keys], preferred_element_type=jnp.float32)
  if not causal:
    return scores
  seen = jnp.arange(keys.stop) <= jnp.arange(rows.start, rows.stop)[:, None]
  return jnp.where(seen, scores, jnp.finfo(jnp.float32).min)


def _splash(q_BSHK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array, causal: bool, backend: Backend) -> jax.Array:
  attend_local = functools.partial(_splash_local, causal=causal, interpret=backend.interpret)
  if backend.mesh is None:
    return attend_local(q_BSHK, k_BSHK, v_BSHK)
  # XLA can't split a kernel that it does not know: each device calls it for its own sequences and heads. Where there are too few,
  # as in a single sequence, each computes them all.
  mesh, (batch, _, heads, _) = backend.mesh, q_BSHK.shape
  rows = ("data", "fsdp") if batch % (mesh.shape["data"] * mesh.shape["fsdp"]) == 0 else None
  spec = P(rows, None, "tensor" if heads % mesh.shape["tensor"] == 0 else None)
  return jax.shard_map(attend_local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)(q_BSHK, k_BSHK, v_BSHK)


def _splash_local(q_BSHK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array, *, causal: bool, interpret: bool) -> jax.Array:
  # Here: importing it takes a second, and other devices do not need it.
  from jax.experimental.pallas.ops.tpu import splash_attention  # pylint: disable=import-outside-toplevel

  _, length, heads, head_dim = q_BSHK.shape
  block = next(size for size in _SPLASH_BLOCKS if length % size == 0)
  make_mask = splash_attention.CausalMask if causal else splash_attention.FullMask
  kernel = splash_attention.make_splash_mha(
      splash_attention.MultiHeadMask([make_mask((length, length))] * heads), head_shards=1, q_seq_shards=1, interpret=interpret,
      block_sizes=splash_attention.BlockSizes(
          block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block))
  q, k, v = (x.swapaxes(1, 2) for x in (q_BSHK * head_dim**-0.5, k_BSHK, v_BSHK))
  return jax.vmap(kernel)(q, k, v).swapaxes(1, 2)


def attend(
    q_BSHK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
  """Scaled dot-product attention with the softmax in float32.

  Args:
    q_BSHK: queries.
    k_BTHK: keys.
    v_BTHK: values.
    mask: bool, broadcastable to [B, H, S, T]; True where a query sees a key.
      Every query must see at least one key. None: it sees all.

  Returns:
    [B, S, H, K] in the dtype of the values.
  """
  return jnp.einsum("BHST,BTHK->BSHK", weights(q_BSHK, k_BTHK, mask).astype(v_BTHK.dtype), v_BTHK)


def weights(q_BSHK: jax.Array, k_BTHK: jax.Array, mask: jax.Array | None = None) -> jax.Array:
  """float32 [B, H, S, T], how much each query attends to each key; the arguments are those of `attend`."""
  scale = q_BSHK.shape[-1] ** -0.5
  scores_BHST = jnp.einsum(
      "BSHK,BTHK->BHST", q_BSHK * scale, k_BTHK, preferred_element_type=jnp.float32
  )
  if mask is not None:
    scores_BHST = jnp.where(mask, scores_BHST, jnp.finfo(jnp.float32).min)
  return jax.nn.softmax(scores_BHST, axis=-1)


def attend_cache(
    q_BHSK: jax.Array, k_BHSK: jax.Array, v_BHSK: jax.Array, cached_k_BHKT: jax.Array, cached_v_BHTK: jax.Array,
    bias_B1ST: jax.Array,
) -> jax.Array:
  """Attention of each entry to the slots of a cache that it sees and to itself, not to the other entries.

  Args:
    q_BHSK: queries of the entries.
    k_BHSK: their own keys.
    v_BHSK: their own values.
    cached_k_BHKT: keys in the cache; what lies in invisible slots has no effect as long as it is finite.
    cached_v_BHTK: values in the cache.
    bias_B1ST: from `cache_bias`.

  Returns:
    [B, H, S, K] in the dtype of the values.
  """
  q_BHSK = q_BHSK * q_BHSK.shape[-1] ** -0.5
  scores_BHST = jnp.einsum("BHSK,BHKT->BHST", q_BHSK, cached_k_BHKT, preferred_element_type=jnp.float32)
  scores_BHST = scores_BHST + bias_B1ST
  own_BHS1 = jnp.sum(q_BHSK * k_BHSK, axis=-1, keepdims=True, dtype=jnp.float32)
  largest = jnp.maximum(scores_BHST.max(axis=-1, keepdims=True), own_BHS1)
  weights_BHST, own_BHS1 = jnp.exp(scores_BHST - largest), jnp.exp(own_BHS1 - largest)
  total = weights_BHST.sum(axis=-1, keepdims=True) + own_BHS1
  y_BHSK = jnp.einsum("BHST,BHTK->BHSK", weights_BHST.astype(v_BHSK.dtype), cached_v_BHTK,
                      preferred_element_type=jnp.float32)
  return ((y_BHSK + own_BHS1 * v_BHSK) / total).astype(v_BHSK.dtype)


def cache_bias(visible_BS: jax.Array, slots: int) -> jax.Array:
  """float32 [B, 1, S, T], what is added to the scores of entries that see the first `visible` of T slots; the same in all layers."""
  seen = jnp.arange(slots) < visible_BS[:, None, :, None]
  return jnp.where(seen, 0.0, -1e30)  # added to any finite score, below all that are seen


def causal_mask(length: int) -> jax.Array:
  """[1, 1, S, S]: entry i sees the entries 0..i, itself included."""
  return jnp.tril(jnp.ones((1, 1, length, length), dtype=bool))
