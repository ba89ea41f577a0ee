"""Training objectives: the negative log-likelihood of every entry, in nats.

An objective is a function (model, params, tokens [B, T], orders [B, T]) -> float32 [B, T]; the training loss is its mean.
"""

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp


def any_order_nll(model: nn.Module, params: Any, tokens: jax.Array, orders: jax.Array) -> jax.Array:
  """-log p(x_sigma(i) | x_sigma(<i)) of each entry i in nats, float32 [B, S] (arXiv 2506.19935).

  Args:
    model: a decoder.
    params: its parameters.
    tokens: int [B, N].
    orders: int [B, S], S <= N.
  """
  logits_BSV = model.apply({"params": params}, tokens, orders)
  return cross_entropy(logits_BSV, jnp.take_along_axis(tokens, orders, axis=1))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """-log softmax(logits)[label] in nats, in float32; logits [..., V], labels int [...]."""
  logits = logits.astype(jnp.float32)
  label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
  return jax.nn.logsumexp(logits, axis=-1) - label_logits
