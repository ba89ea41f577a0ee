"""The networks: a config goes in, a Linen module comes out."""

import dataclasses

from flax import linen as nn
import jax.numpy as jnp
from jax.sharding import Mesh
import ml_collections

from aogpt_jax import attention
from aogpt_jax import config as config_lib
from aogpt_jax.data import tokenizers
from aogpt_jax.models.decoder import Decoder
from aogpt_jax.models.encoder import Encoder

# By `config.model.architecture`.
ARCHITECTURES: dict[str, type[nn.Module]] = {"decoder": Decoder, "encoder": Encoder}


def build_model(config: ml_collections.ConfigDict, mesh: Mesh | None = None) -> nn.Module:
  """The Linen module that a config describes.

  A decoder's `init` and `apply` take tokens and orders, int [B, T]; an encoder's take tokens with masks.

  Args:
    config: of a run.
    mesh: of the devices that the module is for, which config.model.attention is chosen by; None: the first local device.

  Raises:
    ConfigError: an encoder without config.model.num_tokens, where data.tokenizer is a file; attention that the devices don't have.
  """
  fields = config.model.to_dict()
  for field in ("dtype", "param_dtype"):
    fields[field] = jnp.dtype(fields[field])
  fields["backend"] = attention.choose(config.model, mesh)
  architecture = ARCHITECTURES[fields["architecture"]]
  if architecture is Encoder:
    fields["num_tokens"] = fields["num_tokens"] or tokenizers.VOCAB_SIZES.get(config.data.tokenizer)
    if not fields["num_tokens"]:
      raise config_lib.ConfigError(
          f"config.model.num_tokens: is 0; set it to the number of ids of config.data.tokenizer = {config.data.tokenizer}.")
    fields["tell_noise"] = config.objective == "score_entropy"
  names = {field.name for field in dataclasses.fields(architecture)}
  return architecture(**{name: value for name, value in fields.items() if name in names})
