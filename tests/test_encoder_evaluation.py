"""Evaluation of an encoder: exact in a named order, estimated from masks, and no gap to masked diffusion on any triple."""

import itertools
import math

import numpy as np
import pytest

import random_models
from aogpt_jax import sharding
from aogpt_jax.evaluation import contexts
from aogpt_jax.evaluation import draws
from aogpt_jax.evaluation import likelihood
from aogpt_jax.evaluation import mdm_gap

TOKENS = np.random.default_rng(0).integers(0, 4, (6, 4)).astype(np.int32)


@pytest.fixture(scope="module")
def encoder():
  return random_models.make(4, 5, "ao")


def evaluate(encoder, tokens, batch_size, masks=0, lengths=None, **repeats):
  model, params = encoder
  return likelihood.evaluate(
      model, params, random_models.batches(tokens, batch_size, lengths), mesh=sharding.mesh_of(params),
      token_bytes=np.ones(4, int), repeats=repeats, masks=masks)


@pytest.fixture(scope="module")
def in_order(encoder):
  """(order) -> nats of each token of TOKENS after those before it, by a pass for each over what is known; float64 [6, 4]."""
  log_probs = random_models.log_probs_of(*encoder)

  def of(order):
    nll = np.zeros(TOKENS.shape)
    for i, position in enumerate(order):
      at = log_probs(np.where(np.isin(np.arange(4), order[:i]), TOKENS, 4))[:, position]
      nll[:, i] = -np.take_along_axis(at, TOKENS[:, position, None], 1)[:, 0]
    return nll

  return of


def test_the_likelihood_in_a_named_order_is_exact_whatever_the_batch_size(encoder, in_order):
  expected = {"left_to_right": in_order([0, 1, 2, 3]), "right_to_left": in_order([3, 2, 1, 0])}
  for batch_size in (4, 6):
    results = evaluate(encoder, TOKENS, batch_size, left_to_right=1, right_to_left=1)
    for name, nll in expected.items():
      np.testing.assert_allclose(results[name].nats_per_token, nll.mean(), rtol=1e-6)
      np.testing.assert_allclose(results[name].stderr_sequences, nll.mean(axis=1).std(ddof=1) / 6**0.5, rtol=1e-5)
      assert (results[name].tokens, results[name].orders, results[name].masks) == (24, 1, 0)


def test_masks_estimate_the_bound_of_all_orders_with_an_honest_standard_error(encoder, in_order):
  every = np.array([in_order(order).mean(axis=1) for order in itertools.permutations(range(4))])
  exact = every.mean()
  many = np.tile(TOKENS, (50, 1))
  result = evaluate(encoder, many, 100, masks=3, uniform=2, left_to_right=1)["uniform"]
  within = result.stderr_sequences  # that of sequences that differ is in it
  assert abs(result.nats_per_token - exact) < 4 * within < 0.1
  assert (result.masks, result.orders, result.sequences) == (3, 0, 300)
  assert math.isnan(result.iw_nats_per_token) and math.isnan(result.stderr_orders)
  # The same numbers in other batches; and strata of sizes, which leave less to chance than as many masks of any size.
  again = evaluate(encoder, many, 60, masks=3, uniform=2)["uniform"]
  np.testing.assert_allclose(again.nats_per_token, result.nats_per_token, rtol=1e-6)
  exact_of = np.tile(every.mean(axis=0), 50)
  one = evaluate(encoder, many, 100, masks=1, uniform=2)["uniform"]
  assert abs(one.nats_per_token - exact_of.mean()) < 4 * one.stderr_sequences and one.stderr_sequences > 1.2 * within


def test_what_lies_past_the_end_of_a_text_is_not_known_and_not_counted(encoder, in_order):
  lengths = np.array([4, 2, 3, 1, 4, 2])
  is_text = np.arange(4) < lengths[:, None]
  results = evaluate(encoder, TOKENS, 6, masks=3, lengths=lengths, left_to_right=1, uniform=1)
  assert results["left_to_right"].tokens == results["uniform"].tokens == 16
  np.testing.assert_allclose(results["left_to_right"].nats_per_token, in_order([0, 1, 2, 3])[is_text].mean(), rtol=1e-6)
  others = evaluate(encoder, np.where(is_text, TOKENS, 3 - TOKENS), 6, masks=3, lengths=lengths, left_to_right=1, uniform=1)
  for name in results:
    np.testing.assert_allclose(others[name].nats_per_token, results[name].nats_per_token, rtol=1e-6)
  # Of one token there is one mask, whose noise level is the same however a text is scored.
  told = random_models.make(4, 5, "score_entropy")
  single = evaluate(told, TOKENS, 6, masks=3, lengths=np.ones(6, int), left_to_right=1, uniform=1)
  np.testing.assert_allclose(single["uniform"].nats_per_token, single["left_to_right"].nats_per_token, rtol=1e-6)


def test_an_encoder_has_no_gap_on_any_triple(encoder):
  model, params = encoder
  mesh = sharding.mesh_of(params)
  drawn, = draws.draw(model, params, random_models.batches(TOKENS, 6), mesh=mesh, num_visits=5, num_targets=0)
  nll = draws.score(model, params, drawn, mesh=mesh, lanes=7)
  assert nll.shape == (6, 4, 5) and np.ptp(drawn.nll) > 1
  np.testing.assert_allclose(nll, np.repeat(drawn.nll[..., None], 5, axis=2), rtol=0, atol=1e-5)
  result = mdm_gap.evaluate(model, params, random_models.batches(TOKENS, 4), mesh=mesh, mixture_size=4, num_targets=2, lanes=32)
  for gap in result.rules.values():
    assert abs(gap.difference) < 1e-5 and gap.stderr < 1e-5
  decoder = random_models.make(4, 5)
  drawn, = draws.draw(*decoder, random_models.batches(TOKENS, 6), mesh=mesh, num_visits=5, num_targets=0)
  assert np.abs(draws.score(*decoder, drawn, mesh=mesh, lanes=7) - drawn.nll[..., None]).max() > 1e-2  # a decoder has one


def test_contexts_are_scored_as_by_a_pass_over_what_is_known(encoder, in_order):
  targets = np.array([[2, 0]] * 6)
  orders = np.array([[[[1, 3, 0], [3, 1, 0]], [[2, 0, 1], [2, 1, 3]]]] * 6)  # of the first, 2 is in none
  nll = contexts.nll(*encoder, TOKENS, targets, orders, lanes=5)
  for i, m in itertools.product(range(2), range(2)):
    place = targets[0, i]
    order = orders[0, i, m]
    expected = in_order([*order, *set(range(4)).difference(order)])[:, place]
    np.testing.assert_allclose(nll[:, i, m], expected, rtol=0, atol=1e-5)
