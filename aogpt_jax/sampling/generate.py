"""Generation of one token a step in any order, with a KV cache, in one jitted scan."""

import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp


@functools.partial(jax.jit, static_argnames=("model", "vocab_size"))
def generate(
    model: nn.Module, params: Any, key: jax.Array, orders: jax.Array, *, temperature: jax.Array | float, vocab_size: int
) -> jax.Array:
  """Draws sequences token by token in the given orders; ascending orders make it ordinary autoregression.

  Args:
    model: a decoder.
    params: its parameters.
    key: of the draws.
    orders: int [B, S], each a permutation of 0..S-1, S <= T.
    temperature: divides the logits; 0 takes the most probable token.
    vocab_size: V'; ids from there on are padding of the model's table and are never drawn.

  Returns:
    int32 [B, S], the tokens in their natural order.
  """
  batch, length = orders.shape
  temperature = jnp.asarray(temperature, jnp.float32)

  def draw(logits_BV, step):
    # float32 before anything else: in bfloat16 the noise would change the distribution.
    logits_BV = jnp.where(jnp.arange(logits_BV.shape[-1]) < vocab_size, logits_BV.astype(jnp.float32), -jnp.inf)
    noise = jax.random.gumbel(jax.random.fold_in(key, step), logits_BV.shape, jnp.float32, mode="high")
    # At temperature 0 the noise vanishes, and what is left is the largest logit.
    return jnp.argmax(logits_BV + temperature * noise, axis=-1).astype(jnp.int32)

  def step(carry, i):
    tokens, slots, cache = carry
    targets = jax.lax.dynamic_slice_in_dim(orders, i, 1, axis=1)
    logits, cache = model.apply({"params": params}, tokens, slots, targets, cache, i, method="extend")
    tokens = draw(logits[:, 0], i)[:, None]
    return (tokens, targets + 1, cache), tokens[:, 0]

  start = jnp.zeros((batch, 1), jnp.int32)  # the start entry has slot 0 and needs no token
  cache = model.init_cache(batch, length)
  _, drawn = jax.lax.scan(step, (start, start, cache), jnp.arange(length))
  return jnp.zeros_like(orders).at[jnp.arange(batch)[:, None], orders].set(drawn.T)
