"""Likelihood of continuations: the sum of single passes, whatever the batches, in windows where a block is too short."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import random_models
from aogpt_jax import config as config_lib
from aogpt_jax import sharding
from aogpt_jax.evaluation import continuations

LENGTH, VOCAB, IDS = 48, 24, 21


@pytest.fixture(scope="module")
def model_and_params():
  return random_models.make(LENGTH, VOCAB)


def direct(model, params, context, continuation):
  """log p and whether it is greedy, from one pass over these tokens alone."""
  tokens, logits = logits_of(model, params, [*context, *continuation])
  log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
  places = range(len(context), len(context) + len(continuation))
  return sum(log_probs[i, tokens[i]] for i in places), all(log_probs[i, :IDS].argmax() == tokens[i] for i in places)


def logits_of(model, params, tokens):
  """The tokens, with some behind them that they do not see, and the logits of all."""
  tokens = [*tokens] + [0] * (LENGTH - len(tokens))
  return tokens, np.asarray(_logits(model, params, jnp.array([tokens])), np.float64)


@functools.partial(jax.jit, static_argnums=0)
def _logits(model, params, tokens):
  return model.apply({"params": params}, tokens, jnp.arange(LENGTH)[None])[0]


def found(model, params, pairs, batch_size=4):
  config = config_lib.default_config()
  return continuations.score(model, params, pairs, num_tokens=IDS, mesh=sharding.make_mesh(config), batch_size=batch_size)


def test_pairs_of_any_lengths_have_their_log_probability_and_greedy_ones_are_known(model_and_params):
  model, params = model_and_params
  rng = np.random.default_rng(0)
  pairs = [(rng.integers(IDS, size=c).tolist(), rng.integers(IDS, size=n).tolist())
           for c, n in ((5, 3), (0, 4), (40, 8), (47, 1), (3, 0), (12, 30))]
  greedy = [3, 1]
  for _ in range(6):  # by one pass for each token
    greedy.append(int(logits_of(model, params, greedy)[1][len(greedy), :IDS].argmax()))
  pairs += [(greedy[:2], greedy[2:]), (greedy[:2], [*greedy[2:-1], (greedy[-1] + 1) % IDS])]
  answers = found(model, params, pairs)
  expected = [direct(model, params, *pair) for pair in pairs]
  np.testing.assert_allclose([nats for nats, _ in answers], [nats for nats, _ in expected], atol=1e-4)
  assert [is_greedy for _, is_greedy in answers] == [is_greedy for _, is_greedy in expected]
  assert answers[-2][1] and not answers[-1][1] and answers[4] == (0.0, True)


def test_a_context_loses_its_beginning_and_a_long_text_goes_in_windows(model_and_params):
  assert list(continuations.windows([1, 2, 3, 4], [5, 6], 4)) == [([3, 4], [5, 6])]
  assert list(continuations.windows([9], list(range(8)), 4)) == [([9], [0, 1, 2]), ([2], [3, 4, 5]), ([4, 5], [6, 7])]
  assert list(continuations.windows([], [1, 2], 4)) == [([], [1, 2])]
  model, params = model_and_params
  text = np.random.default_rng(1).integers(IDS, size=100).tolist()
  parts = list(continuations.windows([7], text, LENGTH))
  assert len(parts) == 3 and sum((part for _, part in parts), []) == text
  (nats, _), = found(model, params, [([7], text)])
  assert nats == pytest.approx(sum(direct(model, params, *pair)[0] for pair in parts), abs=1e-4)


def test_few_programs_score_texts_of_many_lengths(model_and_params, compilations):
  model, params = model_and_params
  pairs = [([1] * c, [2]) for c in range(1, 47)]
  found(model, params, pairs, batch_size=5)
  assert compilations["_score"] <= 2


def test_an_encoder_is_refused():
  with pytest.raises(ValueError, match="is an encoder"):
    found(*random_models.make(LENGTH, VOCAB, objective="ao"), [([1], [2])])
