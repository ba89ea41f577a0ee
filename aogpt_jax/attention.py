"""Softmax attention, one function; the entries are in generation order."""

import jax
import jax.numpy as jnp


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
  scale = q_BSHK.shape[-1] ** -0.5
  scores_BHST = jnp.einsum(
      "BSHK,BTHK->BHST", q_BSHK * scale, k_BTHK, preferred_element_type=jnp.float32
  )
  if mask is not None:
    scores_BHST = jnp.where(mask, scores_BHST, jnp.finfo(jnp.float32).min)
  weights_BHST = jax.nn.softmax(scores_BHST, axis=-1).astype(v_BTHK.dtype)
  return jnp.einsum("BHST,BTHK->BSHK", weights_BHST, v_BTHK)


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
