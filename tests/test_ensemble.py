"""Ensembles over context orders: by enumeration, by full passes, whatever the batch size and the number of devices."""

import dataclasses
import itertools
import json
import math
import os
import subprocess

import jax
import numpy as np
import pytest

import random_models
from aogpt_jax import config as config_lib
from aogpt_jax import sharding
from aogpt_jax.evaluation import draws
from aogpt_jax.evaluation import ensemble
from aogpt_jax.evaluation import likelihood
from aogpt_jax.evaluation import mdm_gap
from conftest import PYTHON, ROOT

LENGTH = 12
TOKENS = np.random.default_rng(0).integers(0, 32, (13, LENGTH)).astype(np.int32)


def one_device(params):
  return sharding.mesh_of(params)


@pytest.fixture(scope="module")
def model():
  model, params = random_models.make(LENGTH, 32)
  return model, params, one_device(params)


def evaluate(model, batch_size, lanes=2, **kwargs):
  network, params, mesh = model
  batches = random_models.batches(TOKENS, batch_size)
  return ensemble.evaluate(network, params, batches, mesh=mesh, num_contexts=4, lanes=lanes, **kwargs)


@pytest.fixture(scope="module")
def whole(model):
  return evaluate(model, 13)


def test_an_ensemble_is_the_mean_of_the_probabilities_of_full_passes(model, whole):
  network, params, mesh = model
  (d,) = draws.draw(network, params, random_models.batches(TOKENS, 13), mesh=mesh, num_visits=3, num_targets=0)
  nll_of = random_models.nll_of(network, params)
  p = np.zeros((13, LENGTH, 4))
  for i in range(LENGTH):
    p[:, i, 0] = np.exp(-nll_of(TOKENS, d.orders))[:, i]
    for m in range(3):
      order = [[*(x for x in d.visits[b, m] if x in d.orders[b, :i]), *d.orders[b, i:]] for b in range(13)]
      p[:, i, m + 1] = np.exp(-nll_of(TOKENS, order))[:, i]
  for size in (1, 2, 4):
    expected = -np.log(p[..., :size].mean(axis=2)).mean(axis=1)
    result = whole[size]
    np.testing.assert_allclose(result.nats_per_token, expected.mean(), rtol=1e-5)
    np.testing.assert_allclose(result.perplexity, math.exp(expected.mean()), rtol=1e-5)
    np.testing.assert_allclose(result.stderr_sequences, expected.std(ddof=1) / 13**0.5, rtol=1e-3)
    assert (result.contexts, result.stderr_targets, result.targets, result.tokens) == (size, 0.0, LENGTH, 13 * LENGTH)


def test_an_ensemble_of_one_is_the_any_order_likelihood(model, whole):
  network, params, mesh = model
  result = likelihood.evaluate(network, params, random_models.batches(TOKENS, 13), mesh=mesh,
                               token_bytes=np.ones(32, np.int32), repeats={"uniform": 1})["uniform"]
  np.testing.assert_allclose(whole[1].nats_per_token, result.nats_per_token, rtol=1e-6)
  np.testing.assert_allclose(whole[1].stderr_sequences, result.stderr_sequences, rtol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 4, 5])
def test_the_batch_size_changes_no_ensemble(model, whole, batch_size):
  for size, result in evaluate(model, batch_size).items():
    np.testing.assert_allclose(result.perplexity, whole[size].perplexity, rtol=1e-5)
    assert result.tokens == 13 * LENGTH


def test_texts_that_do_not_fill_their_row_get_the_ensemble_that_they_get_alone(model):
  network, params, mesh = model
  lengths = np.array([LENGTH, 5, 1])
  is_text = np.arange(LENGTH) < lengths[:, None]
  tokens = np.where(is_text, TOKENS[:3], 0)
  run = lambda rows, of, **kwargs: ensemble.evaluate(
      network, params, random_models.batches(rows, 3, of), mesh=mesh, num_contexts=4, lanes=2, **kwargs)[4]
  result = run(tokens, lengths)
  other = run(np.where(is_text, tokens, 7), lengths)  # what the padding holds has no effect
  assert (result.tokens, result.sequences, result.stderr_targets) == (LENGTH + 6, 3, 0.0)
  assert result == other
  (d,) = draws.draw(network, params, random_models.batches(tokens, 3, lengths), mesh=mesh, num_visits=3, num_targets=0)
  nll_of, total = random_models.nll_of(network, params), 0.0
  for b, n in enumerate(lengths):
    sigma = d.orders[b][d.orders[b] < n]
    for i in range(n):
      contexts = [sigma[:i], *([x for x in visit if x in sigma[:i]] for visit in d.visits[b])]
      each = [nll_of(TOKENS[b : b + 1, :n], [[*context, *sigma[i:]]])[0, i] for context in contexts]
      total += likelihood.nll_of_mean(np.array(each))
  np.testing.assert_allclose(result.nats_per_token, total / (LENGTH + 6), rtol=1e-5)
  some = run(tokens, lengths, num_targets=6)
  assert some.tokens == LENGTH + 6 and 0 < some.stderr_targets < 1


def test_neither_do_eight_devices(whole):
  env = os.environ | {
      "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT),
      "XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"}
  done = subprocess.run([*PYTHON, __file__], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  results = json.loads(done.stdout)
  assert list(results) == ["1", "2", "4"]
  for size, result in whole.items():
    np.testing.assert_allclose(results[str(size)]["perplexity"], result.perplexity, rtol=1e-5)
    assert results[str(size)]["tokens"] == 13 * LENGTH


def test_held_orders_in_parts_change_no_ensemble(model, whole, monkeypatch):
  monkeypatch.setattr(draws, "_HELD_PLACES", 2 * LENGTH * LENGTH)
  np.testing.assert_allclose(evaluate(model, 13)[4].perplexity, whole[4].perplexity, rtol=1e-5)


def test_a_subset_of_targets_agrees_with_all_of_them_within_its_standard_error(model, whole):
  estimates = [evaluate(model, 13, num_targets=4, seed=seed)[4] for seed in range(8)]
  exact = [evaluate(model, 13, seed=seed)[4].nats_per_token for seed in range(8)]
  errors = np.array([e.nats_per_token - x for e, x in zip(estimates, exact)])
  claimed = np.array([e.stderr_targets for e in estimates])
  assert 0.5 < np.sqrt((errors**2).mean() / (claimed**2).mean()) < 1.6
  assert abs(errors.mean()) < 4 * claimed.mean() / 8**0.5
  assert all(e.targets == 4 and e.tokens == 13 * LENGTH and e.stderr_targets > 0 for e in estimates)


@pytest.fixture(scope="module")
def four():
  """A model of 4 tokens with 4 values, some texts, and their nats in all 24 orders [B, 24, 4]."""
  model, params = random_models.make(4, 4)
  tokens = np.random.default_rng(1).integers(0, 4, (5, 4)).astype(np.int32)
  return model, params, tokens, mdm_gap.over_all_orders(random_models.nll_of(model, params), tokens).astype(np.float64)


def test_the_mean_over_all_orders_is_the_mean_over_masks_with_context_orders_averaged(four):
  """E over m ~ U{1..n} and masks of m tokens of (1/m) * sum over masked of -log p."""
  model, params, tokens, nll = four
  nll_of = random_models.nll_of(model, params)
  total = np.zeros(5)
  for m in range(1, 5):
    masks = list(itertools.combinations(range(4), m))
    for masked in masks:
      known = [i for i in range(4) if i not in masked]
      for target in masked:
        rest = [i for i in masked if i != target]
        orders = [[*context, target, *rest] for context in itertools.permutations(known)]
        values = [nll_of(tokens, np.tile(order, (5, 1)))[:, len(known)] for order in orders]
        total += np.mean(values, axis=0) / m / len(masks) / 4
  np.testing.assert_allclose(nll.mean(axis=(1, 2)), total, rtol=0, atol=1e-5)


def test_the_ensemble_of_all_orders_is_no_worse_than_their_mean(four):
  _, _, _, nll = four
  for n in range(4):
    for members in mdm_gap._conditionals(mdm_gap.all_orders(4), n):
      values = nll[:, members, n]
      assert (likelihood.nll_of_mean(values) <= values.mean(axis=1) + 1e-12).all()
  # The ensemble over the contexts' orders that were drawn, of all targets and with many permutations.
  model, params, tokens, _ = four
  results = ensemble.evaluate(model, params, random_models.batches(tokens, 5), mesh=one_device(params), num_contexts=16,
                              lanes=2)
  assert results[16].nats_per_token < results[1].nats_per_token


def test_the_importance_weighted_bound_of_every_order_is_the_likelihood_of_their_mixture(four, monkeypatch):
  model, params, tokens, nll = four
  every = mdm_gap.all_orders(4)
  monkeypatch.setattr(likelihood.orders, "draw",
                      lambda spec, key, step, rows, length: jax.numpy.broadcast_to(every[step], (len(rows), 4)))
  result = likelihood.evaluate(model, params, random_models.batches(tokens, 5), mesh=one_device(params),
                               token_bytes=np.ones(4, np.int32), repeats={"uniform": 24})["uniform"]
  expected = -np.log(np.exp(-nll.sum(axis=2)).mean(axis=1)) / 4
  np.testing.assert_allclose(result.iw_nats_per_token, expected.mean(), rtol=1e-5)
  np.testing.assert_allclose(result.iw_stderr_sequences, expected.std(ddof=1) / 5**0.5, rtol=1e-4)
  assert result.iw_nats_per_token < result.nats_per_token and result.orders == 24


def test_what_is_out_of_range_is_an_error(model):
  network, params, mesh = model
  call = lambda batches, **kwargs: ensemble.evaluate(network, params, batches, mesh=mesh, **kwargs)
  with pytest.raises(ValueError, match="num_contexts is 0"):
    call([], num_contexts=0)
  with pytest.raises(ValueError, match="no sequences"):
    call([], num_contexts=2)
  with pytest.raises(ValueError, match="num_targets is 13, and sequences have 12"):
    call(random_models.batches(TOKENS, 13), num_contexts=2, num_targets=13)


def main():
  """Run in a process of its own, where there are eight devices: the ensembles as JSON."""
  config = config_lib.default_config()
  config.batch_size = config.eval.batch_size = 16
  mesh = sharding.make_mesh(config)
  model, params = random_models.make(LENGTH, 32)
  params = jax.device_put(params, sharding.replicated(mesh))
  results = evaluate((model, params, mesh), 16, lanes=1)
  print(json.dumps({size: dataclasses.asdict(result) for size, result in results.items()}))


if __name__ == "__main__":
  main()
