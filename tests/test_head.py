"""The head's losses in parts: those of all logits at once, in less memory and with small matmuls."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aogpt_jax.models import head
from aogpt_jax.training import flops

B, S, D, V = 3, 11, 8, 37


def whole(x, kernel, bias, labels):
  """The same from all logits at once."""
  logits = x.astype(jnp.float32) @ kernel + bias
  return jax.nn.logsumexp(logits, axis=-1), jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]


def arguments(shape=(B, S, D, V), ids=V, dtype="float32"):
  (batch, length, width, vocab), rng = shape, np.random.default_rng(0)
  draw = lambda *size: jnp.asarray(rng.normal(size=size), jnp.float32)
  bias = jnp.where(jnp.arange(vocab) < ids, draw(vocab), -jnp.inf)
  return draw(batch, length, width).astype(dtype), draw(width, vocab), bias, jnp.asarray(rng.integers(0, ids, (batch, length)))


def loss_of(normalizers, labels):
  """A loss to whose gradient each entry and both results contribute in a way of their own."""
  weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, *labels.shape)), jnp.float32)
  return lambda x, kernel, bias: sum(jnp.sum(w * n) for w, n in zip(weights, normalizers(x, kernel, bias, labels)))


@pytest.mark.parametrize("chunk", [-1, 0, 1, 4, 11, 12])
@pytest.mark.parametrize("ids", [V, V - 5])
def test_parts_have_the_values_and_gradients_of_the_whole(chunk, ids):
  x, kernel, bias, labels = arguments(ids=ids)
  in_parts = lambda *args: head.normalizers(*args, chunk)
  for ours, plain in zip(in_parts(x, kernel, bias, labels), whole(x, kernel, bias, labels)):
    np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-5)
  gradients = (jax.jit(jax.grad(loss_of(f, labels), argnums=(0, 1, 2)))(x, kernel, bias) for f in (in_parts, whole))
  for ours, plain in zip(*gradients):
    assert np.abs(plain).max() > 0.1
    np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-5)


def test_no_matmul_in_bfloat16_has_a_float32_operand():
  x, kernel, bias, labels = arguments(dtype="bfloat16")
  text = jax.jit(jax.grad(loss_of(lambda *args: head.normalizers(*args, 4), labels), argnums=(0, 1))).lower(x, kernel, bias).as_text()
  dots = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
  operands = [re.findall(r"tensor<[\dx]*x(\w+)>", line.split(" : ")[-1]) for line in dots]
  assert len(dots) >= 4 and all(types[:2] == ["bf16", "bf16"] for types in operands)


@pytest.mark.parametrize("chunk, computed", [(-1, 1), (0, 1), (11, 1), (4, 2)])
def test_the_logits_are_computed_again_only_where_they_are_in_parts(chunk, computed):
  x, kernel, bias, labels = arguments()
  gradient = jax.make_jaxpr(jax.grad(loss_of(lambda *args: head.normalizers(*args, chunk), labels), argnums=(0, 1)))(x, kernel, bias)
  parts = -(-S // chunk) if chunk > 0 else 1
  size = 2 * B * parts * -(-S // parts) * D * V  # the last part is filled up
  assert sum(m.flops * m.times for m in flops.matmuls(gradient)) == (computed + 2) * size


def test_at_medium_size_the_chosen_parts_take_less_than_half_of_the_memory():
  shape = 4, 1024, 64, 50304
  x, kernel, bias, labels = arguments((1, 1, 1, 1))
  x, kernel, bias, labels = (jax.ShapeDtypeStruct(size, a.dtype) for size, a in zip(
      (shape[:3], shape[2:], shape[3:], shape[:2]), (x, kernel, bias, labels)))

  def temporaries(normalizers):
    def loss(x, kernel, bias, labels):
      log_sum, label_logits = normalizers(x, kernel, bias, labels)
      return jnp.mean(log_sum - label_logits)
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, kernel, bias, labels).compile().memory_analysis().temp_size_in_bytes

  plain, ours = temporaries(whole), temporaries(lambda *args: head.normalizers(*args, -1))
  assert plain > 4 * 4 * 1024 * 50304 and ours < plain / 2  # the logits in float32
