"""The networks: a config goes in, a Linen module comes out."""

import jax.numpy as jnp
import ml_collections

from aogpt_jax.models.decoder import Decoder


def build_model(config: ml_collections.ConfigDict) -> Decoder:
  """The Linen module that `config.model` describes; its `init` and `apply` take tokens and orders, int [B, T]."""
  fields = config.model.to_dict()
  for field in ("dtype", "param_dtype"):
    fields[field] = jnp.dtype(fields[field])
  return Decoder(**fields)
