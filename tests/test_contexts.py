"""Targets after permuted contexts: the numbers of full forward passes, for any orders, targets and number of lanes."""

import itertools

import numpy as np
import pytest

import golden_weights
import random_models
from aogpt_jax import build_model
from aogpt_jax.evaluation import contexts
from aogpt_jax.evaluation import ensemble


@pytest.fixture(scope="module")
def model():
  return random_models.make(block_size=24, vocab_size=64)


def permutations(rng, *shape, length=24):
  return rng.permuted(np.broadcast_to(np.arange(length), (*shape, length)), axis=-1)


def by_full_passes(model, tokens, targets, orders):
  """[B, I, M], each from a pass over the whole order."""
  batch, count, contexts_, length = orders.shape
  rows = np.repeat(tokens, count * contexts_, axis=0)
  nll = random_models.nll_of(*model)(rows, orders.reshape(-1, length)).reshape(orders.shape)
  return np.take_along_axis(nll, targets[:, :, None, None], axis=-1)[..., 0]


@pytest.mark.parametrize("related, lanes", [(True, 1), (True, 64), (False, 7)], ids=["shared", "many_lanes", "unrelated"])
def test_the_nll_of_targets_is_that_of_full_forward_passes(model, related, lanes):
  rng = np.random.default_rng(0)
  tokens, sigma = rng.integers(0, 64, (3, 24)), permutations(rng, 3)
  targets = permutations(rng, 3)[:, :9]  # in no order; each sequence its own
  if related:
    orders = contexts.in_order_of(sigma, targets, permutations(rng, 3, 4))
  else:
    orders = permutations(rng, 3, 9, 4)
  ours = contexts.nll(*model, tokens, targets, orders, lanes=lanes)
  np.testing.assert_allclose(ours, by_full_passes(model, tokens, targets, orders), rtol=0, atol=1e-5)


def test_all_targets_the_same_one_twice_and_texts_shorter_than_a_block(model):
  rng = np.random.default_rng(1)
  tokens, sigma = rng.integers(0, 64, (2, 13)), permutations(rng, 2, length=13)
  targets = np.tile(np.r_[np.arange(13), 5, 12], (2, 1))
  orders = contexts.in_order_of(sigma, targets, permutations(rng, 2, 3, length=13))
  ours = contexts.nll(*model, tokens, targets, orders)
  np.testing.assert_allclose(ours, by_full_passes(model, tokens, targets, orders), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", golden_weights.NAMES)
def test_permuted_contexts_and_their_ensemble_equal_the_pytorch_code(name):
  arrays, config = golden_weights.load(name)
  model, params = build_model(config), golden_weights.to_tree(arrays, config)
  orders = np.transpose(arrays["ensemble/orders"], (2, 0, 1, 3))  # [I, M, B, T] there
  targets = np.tile(arrays["ensemble/target_index"], (len(orders), 1))
  nll = contexts.nll(model, params, arrays["tokens"], targets, orders)
  np.testing.assert_allclose(nll, arrays["ensemble/nll"], rtol=0, atol=1e-4)
  theirs = np.exp(-np.log(np.exp(-arrays["ensemble/nll"].astype(np.float64)).mean(axis=2)).mean())
  np.testing.assert_allclose(ensemble.perplexity(nll), theirs, rtol=1e-4)


def test_a_context_is_in_every_order_equally_often_and_stays_in_place_itself():
  sigma, visits = np.array([[2, 0, 3, 1]]), np.array([list(itertools.permutations(range(4)))])
  orders = contexts.in_order_of(sigma, np.array([[0, 3, 2]]), visits)[0]
  assert (orders[0] == sigma).all()  # no context
  for row, size in ((1, 3), (2, 2)):
    assert (orders[row, :, size:] == sigma[0, size:]).all()
    seen = [tuple(x) for x in orders[row, :, :size].tolist()]
    every = list(itertools.permutations(sigma[0, :size].tolist()))
    assert {seen.count(order) for order in every} == {24 // len(every)} and len(seen) == 24


def test_the_natural_order_sorts_contexts_and_sigma_leaves_them():
  sigma, targets = np.array([[3, 1, 4, 0, 2]]), np.array([[3]])
  orders = contexts.in_order_of(sigma, targets, np.array([[[0, 1, 2, 3, 4], [3, 1, 4, 0, 2]]]))
  assert orders.tolist() == [[[[1, 3, 4, 0, 2], [3, 1, 4, 0, 2]]]]


def test_a_third_of_the_entries_of_full_passes_is_run_padding_included():
  rng = np.random.default_rng(2)
  targets = np.tile(np.arange(256), (4, 1))
  orders = contexts.in_order_of(permutations(rng, 4, length=256), targets, permutations(rng, 4, 7, length=256))
  chains, ends = orders.swapaxes(1, 2).reshape(28, 256, 256), np.repeat(targets, 7, axis=0)
  work = contexts._deal(ends, contexts._reused(chains, ends), lanes=32, devices=1)
  assert work.answers.sum() == 28 * 256
  assert work.write.size * work.width < 0.36 * 28 * 256**2


@pytest.mark.parametrize("targets, orders, expected", [
    (np.zeros((2, 3), int), np.zeros((2, 4, 1, 24), int), "targets"),
    (np.full((2, 3), 24), np.zeros((2, 3, 1, 24), int), "places from 0 to 23"),
    (np.zeros((2, 3), int), np.zeros((2, 3, 1, 25), int), "do not fit"),
])
def test_shapes_that_do_not_fit_are_an_error(model, targets, orders, expected):
  with pytest.raises(ValueError, match=expected):
    contexts.nll(*model, np.zeros((2, 24), int), targets, orders)
