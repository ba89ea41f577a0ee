"""A short number by which two people can tell whether they have the same model."""

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from aogpt_jax import objectives

_ENTRIES = 64
_PRIME = 1_000_003


def describe(model: nn.Module, params: Any) -> str:
  """Mean NLL, float32, of fixed tokens in two fixed orders; e.g. "10.8342 left to right, 10.8377 in another order".

  The 64 entries lie all over the block; the tokens are spread over the vocabulary. In nats, rounded to what different machines
  agree on.
  """
  length = model.block_size
  count = min(_ENTRIES, length)
  places = np.arange(count) * length // count
  scattered = places[np.argsort(np.arange(1, count + 1) * 7919 % _PRIME % 211, kind="stable")]
  tokens = (np.arange(length) * 7919 + 104_729) % _PRIME % model.vocab_size
  nll = jax.jit(objectives.any_order_nll, static_argnums=0)(
      model.clone(dtype=jnp.float32), params, jnp.asarray(np.tile(tokens, (2, 1)), jnp.int32),
      jnp.asarray(np.stack([places, scattered]), jnp.int32))
  first, second = np.asarray(nll, np.float64).mean(axis=1)
  return f"{first:.4f} left to right, {second:.4f} in another order"
