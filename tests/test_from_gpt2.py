"""A decoder that starts from GPT-2: its logits after <|endoftext|>, and one clear line for what does not fit."""

import jax.numpy as jnp
import numpy as np
import pytest

import random_gpt2
from aogpt_jax import build_model
from aogpt_jax import config as config_lib
from aogpt_jax import objectives
from aogpt_jax.training import start

pytest.importorskip("safetensors", reason="weights are in safetensors: pip install 'aogpt_jax[hf]'")

IDS, BOUNDARY, LENGTH = 257, 256, 12  # bytes
COMPATIBLE = dict(qk_norm=False, activation="gelu_tanh")


def config_for(directory, **fields):
  config = config_lib.default_config()
  config.init_from = f"gpt2:{directory}"
  config.data.update(source="stdlib", tokenizer="bytes")
  config.model.update(layers=3, width=24, heads=3, block_size=LENGTH, vocab_size=320, cond_width=8, dtype="float32")
  config.model.update(fields)
  return config


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
  """transformers' GPT-2 with random weights of the size that trained ones have, and the directory of its files."""
  directory = tmp_path_factory.mktemp("gpt2")
  return random_gpt2.reference(directory, vocab_size=IDS), directory


def reference_logits(model, tokens):
  import torch

  after_boundary = np.pad(tokens, ((0, 0), (1, 0)), constant_values=BOUNDARY)[:, :-1]
  with torch.no_grad():
    return model(torch.asarray(after_boundary)).logits.numpy()


def started(config):
  """The decoder of a config with the parameters that it starts from."""
  model = build_model(config)
  params = start.with_gpt2(config.init_from.removeprefix("gpt2:"), model, initial(config, model), BOUNDARY)
  return model, params


def initial(config, model):
  from flax import linen as nn
  from aogpt_jax.training import step

  return nn.unbox(step.init_params(model, config.seed))


def left_to_right(tokens):
  return jnp.tile(jnp.arange(tokens.shape[1]), (len(tokens), 1))


@pytest.mark.parametrize("fields", [
    {}, dict(block_size=16), dict(target="layer_distinct"), dict(target="input", norm="layer", tied_head=True, vocab_size=IDS)])
def test_the_logits_from_left_to_right_are_those_of_gpt2_after_its_boundary(theirs, fields):
  model, directory = theirs
  config = config_for(directory, **COMPATIBLE, **fields)
  tokens = np.random.default_rng(0).integers(IDS, size=(3, config.model.block_size))
  expected = reference_logits(model, tokens)
  decoder, params = started(config)
  found = decoder.apply({"params": params}, jnp.asarray(tokens), left_to_right(tokens))
  assert np.std(expected) > 1  # a tolerance of 2e-4 means something
  np.testing.assert_allclose(found[..., :IDS], expected, atol=2e-4)
  nll = objectives.cross_entropy(found, jnp.asarray(tokens))  # the rows that are no tokens take nothing
  np.testing.assert_allclose(nll, objectives.cross_entropy(jnp.asarray(expected), jnp.asarray(tokens)), atol=2e-4)


def test_the_default_architecture_starts_nearer_to_gpt2_than_to_a_guess(theirs):
  model, directory = theirs
  import torch

  # A text that this GPT-2 likes: each token drawn from what it predicts.
  torch.manual_seed(1)
  tokens = np.zeros((32, LENGTH), int)
  for i in range(LENGTH):
    logits = torch.asarray(reference_logits(model, tokens)[:, i])
    tokens[:, i] = torch.distributions.Categorical(logits=logits).sample().numpy()
  own = objectives.cross_entropy(jnp.asarray(reference_logits(model, tokens)), jnp.asarray(tokens)).mean()
  loss = {}
  for name, fields in (("compatible", COMPATIBLE), ("default", {})):
    decoder, params = started(config_for(directory, **fields))
    loss[name] = objectives.any_order_nll(decoder, params, jnp.asarray(tokens), left_to_right(tokens)).mean()
  assert loss["compatible"] == pytest.approx(float(own), abs=1e-4)
  assert own < loss["default"] < own + 0.5 * (np.log(IDS) - own)
