"""Ancestral sampling of an encoder: the distribution enumerated, whatever the batch, given tokens kept, no pass for nothing."""

import itertools

import jax
import numpy as np
import pytest

import random_models
from aogpt_jax import sampling
from aogpt_jax.data import tokenizers
from aogpt_jax.sampling import decode
from aogpt_jax.sampling import filters
from aogpt_jax.sampling import plan
from test_decode import chi_squared

EVERY = np.array(list(itertools.product(range(3), repeat=4)), np.int32)


def keys(n):
  return jax.random.split(jax.random.key(0), n)


@pytest.fixture(scope="module")
def encoder():
  return random_models.make(4, 4, "score_entropy", layers=1)  # it is told the noise level, which the others are not


@pytest.fixture(scope="module")
def log_probs(encoder):
  """(known, position) -> log p of the token there, given those at `known` alone, for every sequence: [V ** L]."""
  score = random_models.log_probs_of(*encoder)

  def of(known, position):
    every = score(np.where(np.isin(np.arange(4), known), EVERY, 3))[:, position]
    return np.take_along_axis(every, EVERY[:, position, None], -1)[:, 0]

  return of


@pytest.mark.parametrize("steps, counts", [(4, "binomial"), (2, "fixed")])
def test_samples_have_the_enumerated_distribution(encoder, log_probs, steps, counts):
  model, params = encoder
  batch, order = 60_000, np.array([2, 0, 3, 1])
  made = plan.make_plan(np.tile(order, (batch, 1)), np.zeros((batch, 4), bool), steps, counts=counts,
                        rng=np.random.default_rng(steps))
  out = decode.sample(model, params, made, np.zeros((batch, 4)), keys(batch), filters.Filters(3))
  patterns, which = np.unique(made.counts, axis=1, return_inverse=True)
  chi2 = freedom = 0
  table = {(start, i): log_probs(order[:start], order[i])
           for start, i in itertools.combinations_with_replacement(range(4), 2)}
  for p, pattern in enumerate(patterns.T):
    mine = out.tokens[which.ravel() == p]
    starts = np.repeat(np.cumsum(pattern) - pattern, pattern)
    expected = len(mine) * np.exp(sum(table[start, i] for i, start in enumerate(starts)))
    np.testing.assert_allclose(expected.sum(), len(mine), rtol=1e-4)
    observed = np.bincount(np.ravel_multi_index(mine.T, (3,) * 4), minlength=81)
    statistic, cells = chi_squared(observed, expected)
    chi2, freedom = chi2 + statistic, freedom + cells
  assert abs(chi2 - freedom) < 4.5 * np.sqrt(2 * freedom), (chi2, freedom)
  # Each sample's own log-probabilities, and each sample's own groups in as few passes as the most that any has.
  index = np.ravel_multi_index(out.tokens.T, (3,) * 4)
  starts = np.zeros((batch, 4), int)
  for p, pattern in enumerate(patterns.T):
    starts[which.ravel() == p] = np.repeat(np.cumsum(pattern) - pattern, pattern)
  for i, position in enumerate(order):
    values = np.stack([table[start, i] for start in range(i + 1)])[starts[:, i], index]
    np.testing.assert_allclose(out.log_probs[:, position], values, rtol=0, atol=1e-5)
  assert out.evaluations == len(made.counts) and out.passes == (made.counts > 0).sum(axis=0).max() <= steps


@pytest.fixture(scope="module")
def larger():
  """A model of blocks of 24 bytes, and a tokenizer."""
  return *random_models.make(24, 258, "ao"), tokenizers.load("bytes")


def test_a_text_depends_on_its_seed_and_number_alone_and_keeps_what_is_given(larger):
  prompts = ["any [[5]]", "[[3]]", "ab [[17]] cd"]
  draw = lambda batch_size: sampling.generate(
      *larger, prompts, num_samples=2, order="uniform", steps=3, counts="binomial", seed=5, batch_size=batch_size)
  alone, together = draw(2), draw(6)
  for a, b in zip(alone, together):
    assert (a.text, a.ids, a.steps, a.positions, a.evaluations) == (b.text, b.ids, b.steps, b.positions, b.evaluations)
    np.testing.assert_allclose(a.log_probs, b.log_probs, rtol=0, atol=1e-5)
    assert a.complete and max(a.ids) < 257
  assert bytes(together[-1].ids[:3] + together[-1].ids[-3:]) == b"ab  cd" and together[-1].steps.count(0) == 6
  assert together[0].ids != together[1].ids


def test_log_probs_are_those_of_the_model_before_filters_and_steps_that_reveal_nothing_have_no_pass(larger):
  model, params, _ = larger
  rng = np.random.default_rng(3)
  known, tokens = rng.random((2, 24)) < 0.3, rng.integers(0, 257, (2, 24))
  made = plan.make_plan(np.stack([rng.permutation(24) for _ in range(2)]), known, 24, counts="fixed")
  made = plan.Plan(made.orders, made.known, np.repeat(made.counts, 2, axis=0) * np.resize([[1], [0]], (2 * len(made.counts), 1)),
                   np.arange(1, 2 * len(made.counts) + 1))  # every other step reveals nothing
  parts = list(decode.stream(model, params, made, tokens, keys(2), filters.Filters(257, temperature=0.5, top_k=5), parts=4))
  out = parts[-1]
  assert len(parts) == 4 and out.passes == (~known).sum(axis=1).max()
  np.testing.assert_array_equal(out.tokens[known], tokens[known])
  nll = random_models.nll_of(model, params)(out.tokens, made.orders)
  expected = np.zeros((2, 24))
  np.put_along_axis(expected, made.orders, -nll, axis=1)
  np.testing.assert_allclose(out.log_probs, np.where(known, 0, expected), rtol=0, atol=1e-5)


def test_draws_of_binomial_counts_share_programs(compilations):
  model, params = random_models.make(40, 10, "ao", layers=1)
  for draw in range(12):
    made = plan.make_plan(np.tile(np.arange(40), (2, 1)), np.zeros((2, 40), bool), 16, rng=np.random.default_rng(draw))
    decode.sample(model, params, made, np.zeros((2, 40)), keys(2), filters.Filters(9))
  assert 1 <= compilations["_run"] <= 2  # up to eight tokens a pass, or up to sixteen


def test_orders_of_the_known_tokens_are_none_of_an_encoder(encoder):
  made = plan.make_plan(np.arange(4)[None], np.zeros((1, 4), bool), 4)
  with pytest.raises(ValueError, match="contexts is 2; .* an encoder"):
    decode.sample(*encoder, made, np.zeros((1, 4)), keys(1), filters.Filters(3), contexts=2)


def test_teacher_forced_logits_are_those_of_the_groups(encoder):
  logits = sampling.decode_logits(*encoder, np.array([[0, 2, 1, 1]]), np.array([[2, 0, 3, 1]]), [1, 3])
  first, others = random_models.log_probs_of(*encoder)([[3, 3, 3, 3], [3, 3, 1, 3]])
  expected = np.concatenate([first[[2]], others[[0, 3, 1]]])
  np.testing.assert_allclose(jax.nn.log_softmax(logits[0, :, :3]), expected, rtol=0, atol=1e-5)
