"""The gap to masked diffusion: enumeration, estimates that agree with it, and models that ignore the order of their context."""

import itertools

import jax
import numpy as np
import pytest

import random_models
from aogpt_jax import sharding
from aogpt_jax.evaluation import mdm_gap

TOKENS = np.random.default_rng(0).integers(0, 4, (6, 4)).astype(np.int32)


@pytest.fixture(scope="module")
def model():
  return random_models.make(4, 4)


@pytest.fixture(scope="module")
def enumerated(model):
  """Nats [B, 24, 4] in all orders."""
  return mdm_gap.over_all_orders(random_models.nll_of(*model), TOKENS, batch_size=100)


def of_a_set(tokens, orders):
  """Log-probabilities [R, n, 4] of a model that sees its context as a set: an encoder in miniature, with random weights."""
  rng = np.random.default_rng(1)
  length = tokens.shape[1]
  place = np.argsort(orders, axis=1)
  known = place[:, None, :] < np.arange(length)[None, :, None]  # [R, entry, position]
  masked = np.where(known, tokens[:, None], 4)
  features = rng.normal(size=(length, 5, 16))[np.arange(length), masked].sum(axis=2)
  logits = np.tanh(features + rng.normal(size=(length, 16))[orders]) @ rng.normal(size=(16, 4))
  return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def nll_of_a_set(tokens, orders):
  labels = np.take_along_axis(tokens, orders, axis=1)
  return -np.take_along_axis(of_a_set(tokens, orders), labels[..., None], axis=-1)[..., 0]


def test_enumerated_losses_are_means_over_all_triples_and_the_mixture_over_all_draws(enumerated):
  nll, every = enumerated.astype(np.float64), list(itertools.permutations(range(4)))
  at = {order[: k + 1]: nll[:, n, k] for n, order in enumerate(every) for k in range(4)}
  losses = {"ao": 0, "random": 0, "sorted": 0, "mixture": 0}
  for order in every:
    for k in range(4):
      own, target = order[:k], order[k]
      contexts = [(*c, target) for c in itertools.permutations(own)]
      losses["ao"] += at[*own, target]
      losses["random"] += np.mean([at[c] for c in contexts], axis=0)
      losses["sorted"] += at[*sorted(own), target]
      # Every way to draw two permutations beside the context's own order.
      losses["mixture"] += np.mean([-np.log((np.exp(-at[*own, target]) + np.exp(-at[a]) + np.exp(-at[b])) / 3)
                                    for a in contexts for b in contexts], axis=0)
  exact = mdm_gap.exact(enumerated, mixture_size=3)
  for name, total in losses.items():
    np.testing.assert_allclose(getattr(exact, name), total / 96, rtol=0, atol=1e-9, err_msg=name)


def test_a_decoder_pays_nothing_for_random_orders_and_gains_from_a_mixture(enumerated):
  exact = mdm_gap.exact(enumerated)
  np.testing.assert_allclose(exact.random, exact.ao, rtol=0, atol=1e-6)
  assert (exact.mixture < exact.ao - 5e-4).all() and (np.abs(exact.sorted - exact.ao) > 1e-3).all()


def test_sequences_that_do_not_fill_their_row_are_an_error(model):
  network, params = model
  with pytest.raises(ValueError, match="a sequence has 3 tokens; the gap is of whole blocks of 4"):
    mdm_gap.evaluate(network, params, random_models.batches(TOKENS, 6, [4, 4, 3, 4, 4, 4]), mesh=sharding.mesh_of(params))


def test_estimates_agree_with_enumeration(model, enumerated):
  network, params = model
  tokens = np.tile(TOKENS, (100, 1))
  result = mdm_gap.evaluate(network, params, random_models.batches(tokens, 300), mesh=sharding.mesh_of(params), mixture_size=8)
  exact = mdm_gap.exact(enumerated, mixture_size=8)
  assert (result.sequences, result.triples, result.mixture_size) == (600, 4, 8)
  assert abs(result.ao - exact.ao.mean()) < 4 * result.ao_stderr
  for name, gap in result.rules.items():
    expected = (getattr(exact, name) - exact.ao).mean()
    assert abs(gap.difference - expected) < 4 * gap.stderr, name
    np.testing.assert_allclose(gap.loss, result.ao + gap.difference, rtol=1e-9)
    np.testing.assert_allclose(gap.percent, 100 * gap.difference / result.ao, rtol=1e-9)
    assert gap.interval[0] < gap.difference < gap.interval[1] and gap.percent_interval[0] < gap.percent


def test_some_triples_of_each_sequence_estimate_the_same(model, enumerated):
  network, params = model
  tokens = np.tile(TOKENS, (100, 1))
  result = mdm_gap.evaluate(network, params, random_models.batches(tokens, 300), mesh=sharding.mesh_of(params), num_targets=2)
  exact = mdm_gap.exact(enumerated)
  assert result.triples == 2
  for name, gap in result.rules.items():
    assert abs(gap.difference - (getattr(exact, name) - exact.ao).mean()) < 4 * gap.stderr, name


def test_a_sequences_triples_count_as_one_observation():
  own = np.array([[1.0, 3.0], [2.0, 2.0], [4.0, 6.0]])
  rises = np.array([[0.1, 0.3], [0.0, 0.0], [-0.1, -0.1]])
  gap = mdm_gap.gaps(own, own[..., None], own + rises).rules["sorted"]
  means = np.array([0.2, 0.0, -0.1])
  np.testing.assert_allclose(gap.difference, means.mean())
  np.testing.assert_allclose(gap.stderr, means.std(ddof=1) / 3**0.5)
  ratio = means.mean() / 3
  np.testing.assert_allclose(gap.percent_stderr, 100 * (means - ratio * np.array([2, 2, 5])).std(ddof=1) / 3**0.5 / 3)


def test_a_model_of_sets_has_no_gap_on_any_triple():
  nll = mdm_gap.over_all_orders(nll_of_a_set, TOKENS)
  exact = mdm_gap.exact(nll)
  for name in ("random", "sorted", "mixture"):
    np.testing.assert_allclose(getattr(exact, name), exact.ao, rtol=0, atol=1e-9)
  for members in mdm_gap._conditionals(mdm_gap.all_orders(4), 3):
    assert np.ptp(nll[:, members, 3], axis=1).max() < 1e-9
  result = mdm_gap.gaps(nll[:, :8, 3], nll[:, :8, 3, None], nll[:, :8, 3])
  assert all(gap.difference == gap.percent == gap.stderr == 0 for gap in result.rules.values())


def test_four_tokens_have_32_conditionals_on_sets_and_64_on_sequences(model):
  network, params = model
  apply = jax.jit(lambda t, o: jax.nn.log_softmax(network.apply({"params": params}, t, o)))
  of_sequences = mdm_gap.over_all_orders(apply, TOKENS[:1])[0]
  assert mdm_gap.distinct_conditionals(of_sequences) == 64
  assert mdm_gap.distinct_conditionals(mdm_gap.over_all_orders(of_a_set, TOKENS[:1])[0]) == 32


def test_seven_tokens_are_enumerated_and_eight_are_too_many():
  nll = mdm_gap.over_all_orders(nll_of_a_set, np.random.default_rng(2).integers(0, 4, (1, 7)))
  assert nll.shape == (1, 5040, 7)
  exact = mdm_gap.exact(nll)
  np.testing.assert_allclose(exact.mixture, exact.ao, rtol=0, atol=1e-9)
  with pytest.raises(ValueError, match="at most 7"):
    mdm_gap.over_all_orders(nll_of_a_set, np.zeros((1, 8), int))


def test_a_mixture_of_fewer_than_two_is_an_error(model):
  network, params = model
  with pytest.raises(ValueError, match="mixture_size is 1"):
    mdm_gap.evaluate(network, params, [], mesh=sharding.mesh_of(params), mixture_size=1)
