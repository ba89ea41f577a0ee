"""Tiny models with random weights."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from aogpt_jax import build_model
from aogpt_jax import config as config_lib
from aogpt_jax import objectives
from aogpt_jax.data import loader
from aogpt_jax.training import step as step_lib


def make(block_size, vocab_size, objective="any_order", **fields):
  """A model and parameters of a size at which every part has an effect, the order of a decoder's context too.

  With an encoder's objective it is an encoder, whose last id is the mask's.
  """
  config = config_lib.default_config()
  config.objective = objective
  config.model.update(layers=2, width=16, heads=2, block_size=block_size, vocab_size=vocab_size, cond_width=8, dtype="float32")
  if objective != "any_order":
    config.model.update(architecture="encoder", num_tokens=vocab_size - 1)
  config.model.update(fields)
  model = build_model(config)
  params = nn.unbox(jax.eval_shape(lambda: step_lib.init_params(model, 0)))
  rng = np.random.default_rng(0)
  return model, jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape, scale=0.3), jnp.float32), params)


def nll_of(model, params):
  """(tokens, orders) -> nats of every entry, by a full forward pass."""
  score = jax.jit(lambda tokens, orders: objectives.any_order_nll(model, params, tokens, orders))
  return lambda tokens, orders: np.asarray(score(jnp.asarray(tokens, jnp.int32), jnp.asarray(orders, jnp.int32)))


def log_probs_of(model, params):
  """(tokens with masks) -> log-probabilities of an encoder's tokens at every position, float64 [B, N, V']."""
  apply = jax.jit(lambda tokens: jax.nn.log_softmax(model.apply({"params": params}, tokens)[..., : model.num_tokens]))
  return lambda tokens: np.asarray(apply(jnp.asarray(tokens, jnp.int32)), np.float64)


def batches(tokens, batch_size, lengths=None):
  """Batches as `loader.eval_batches` yields them: the last one is filled up with rows of no tokens."""
  lengths = np.full(len(tokens), tokens.shape[1], np.int32) if lengths is None else np.asarray(lengths, np.int32)
  return list(loader.batches_of(lambda rows: tokens[rows], lengths, tokens.shape[1], batch_size=batch_size))
