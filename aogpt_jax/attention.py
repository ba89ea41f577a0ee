"""Softmax attention, one function; the entries are in generation order."""

import jax
import jax.numpy as jnp


def attend(
    q_BSHK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array, mask: jax.Array
) -> jax.Array:
  """Scaled dot-product attention with the softmax in float32.

  Args:
    q_BSHK: queries.
    k_BTHK: keys.
    v_BTHK: values.
    mask: bool, broadcastable to [B, H, S, T]; True where a query sees a key.
      Every query must see at least one key.

  Returns:
    [B, S, H, K] in the dtype of the values.
  """
  scale = q_BSHK.shape[-1] ** -0.5
  scores_BHST = jnp.einsum(
      "BSHK,BTHK->BHST", q_BSHK * scale, k_BTHK, preferred_element_type=jnp.float32
  )
  scores_BHST = jnp.where(mask, scores_BHST, jnp.finfo(jnp.float32).min)
  weights_BHST = jax.nn.softmax(scores_BHST, axis=-1).astype(v_BTHK.dtype)
  return jnp.einsum("BHST,BTHK->BSHK", weights_BHST, v_BTHK)


def attend_cache(
    q_BSHK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array, cached_k_BTHK: jax.Array, cached_v_BTHK: jax.Array,
    visible_BS: jax.Array,
) -> jax.Array:
  """Attention of each entry to the first `visible` slots of a cache and to itself, not to the other entries.

  Args:
    q_BSHK: queries of the entries.
    k_BSHK: their own keys.
    v_BSHK: their own values.
    cached_k_BTHK: keys in the cache; what lies in invisible slots has no effect.
    cached_v_BTHK: values in the cache.
    visible_BS: int, how many slots each entry sees.

  Returns:
    [B, S, H, K] in the dtype of the values.
  """
  q_BSHK = q_BSHK * q_BSHK.shape[-1] ** -0.5
  cached_BHST = jnp.einsum("BSHK,BTHK->BHST", q_BSHK, cached_k_BTHK, preferred_element_type=jnp.float32)
  mask = jnp.arange(cached_k_BTHK.shape[1]) < visible_BS[:, None, :, None]
  cached_BHST = jnp.where(mask, cached_BHST, jnp.finfo(jnp.float32).min)
  own_BHS = jnp.einsum("BSHK,BSHK->BHS", q_BSHK, k_BSHK, preferred_element_type=jnp.float32)
  weights = jax.nn.softmax(jnp.concatenate([cached_BHST, own_BHS[..., None]], axis=-1), axis=-1).astype(v_BSHK.dtype)
  own = jnp.einsum("BHS,BSHK->BSHK", weights[..., -1], v_BSHK)
  return jnp.einsum("BHST,BTHK->BSHK", weights[..., :-1], cached_v_BTHK) + own


def causal_mask(length: int) -> jax.Array:
  """[1, 1, S, S]: entry i sees the entries 0..i, itself included."""
  return jnp.tril(jnp.ones((1, 1, length, length), dtype=bool))
