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


def causal_mask(length: int) -> jax.Array:
  """[1, 1, S, S]: entry i sees the entries 0..i, itself included."""
  return jnp.tril(jnp.ones((1, 1, length, length), dtype=bool))
