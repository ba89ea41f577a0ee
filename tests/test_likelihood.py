"""Likelihoods: equal to the golden NLL, whatever the batch size, with honest standard errors."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import golden_weights
import random_models
from aogpt_jax import build_model
from aogpt_jax import orders
from aogpt_jax import sharding
from aogpt_jax.evaluation import likelihood


@pytest.fixture(scope="module")
def golden():
  arrays, config = golden_weights.load("aogpt_b")
  model = build_model(config)
  params = jax.tree.map(jnp.asarray, golden_weights.to_tree(arrays, config))
  return arrays, model, params, sharding.make_mesh(config)


TOKEN_BYTES = np.arange(97) % 3 + 1


def evaluate(golden, tokens, batch_size, lengths=None, **repeats):
  _, model, params, mesh = golden
  batches = random_models.batches(tokens, batch_size, lengths)
  return likelihood.evaluate(model, params, batches, mesh=mesh, token_bytes=TOKEN_BYTES, repeats=repeats)


def test_left_to_right_likelihood_is_the_golden_one_in_nats_perplexity_and_bits_per_byte(golden):
  arrays = golden[0]
  result = evaluate(golden, arrays["tokens"], 2, left_to_right=1)["left_to_right"]
  expected = arrays["ar/nll"].astype(np.float64)
  np.testing.assert_allclose(result.nats_per_token, expected.mean(), rtol=1e-5)
  np.testing.assert_allclose(result.perplexity, math.exp(expected.mean()), rtol=1e-5)
  size = TOKEN_BYTES[arrays["tokens"]].sum()
  assert (result.tokens, result.bytes, result.sequences) == (48, size, 2)
  np.testing.assert_allclose(result.bits_per_byte, expected.sum() / math.log(2) / size, rtol=1e-5)
  means = expected.mean(axis=1)
  np.testing.assert_allclose(result.stderr_sequences, abs(means[0] - means[1]) / 2, rtol=1e-3)
  assert math.isnan(result.stderr_orders)


def test_batch_size_and_padding_change_no_likelihood(golden):
  tokens = np.random.default_rng(0).integers(0, 97, (7, 24))
  one, three, seven = (evaluate(golden, tokens, size, left_to_right=1, uniform=3) for size in (1, 3, 7))
  for name in ("left_to_right", "uniform"):
    for other in (three, seven):
      np.testing.assert_allclose(one[name].nats_per_token, other[name].nats_per_token, rtol=1e-6)
      assert one[name].tokens == other[name].tokens == 7 * 24


def test_texts_that_do_not_fill_their_row_are_scored_as_if_they_were_alone(golden):
  _, model, params, _ = golden
  lengths = np.array([24, 1, 9])
  tokens = np.random.default_rng(2).integers(0, 97, (3, 24)).astype(np.int32)
  padded = np.where(np.arange(24) < lengths[:, None], tokens, 0)
  results = evaluate(golden, padded, 2, lengths, left_to_right=1, uniform=2)
  of = {"left_to_right": np.zeros((1, 3)), "uniform": np.zeros((2, 3))}
  for name, sums in of.items():
    for r in range(len(sums)):
      sigma = np.asarray(orders.draw(name, orders.root_key(0), r, jnp.arange(3), 24))
      for b, n in enumerate(lengths):
        order = sigma[b][sigma[b] < n]
        log_probs = jax.nn.log_softmax(model.apply({"params": params}, tokens[b : b + 1, :n], order[None]))
        sums[r, b] = -np.asarray(log_probs)[0, np.arange(n), tokens[b, order]].sum()
    np.testing.assert_allclose(results[name].nats_per_token, sums.mean(axis=0).sum() / 34, rtol=1e-5)
    size = sum(TOKEN_BYTES[tokens[b, :n]].sum() for b, n in enumerate(lengths))
    assert (results[name].tokens, results[name].sequences, results[name].bytes) == (34, 3, size)
    np.testing.assert_allclose(results[name].bits_per_byte, sums.mean(axis=0).sum() / math.log(2) / size, rtol=1e-5)
  np.testing.assert_allclose(results["uniform"].stderr_orders, np.ptp(of["uniform"].sum(axis=1) / 34) / 2, rtol=1e-3)


def test_the_standard_error_over_texts_of_several_lengths_is_that_of_a_ratio():
  rng = np.random.default_rng(0)
  means, claimed = [], []
  for _ in range(2000):
    lengths = rng.integers(1, 40, 50)
    mean, error = likelihood.per_token(lengths * rng.normal(2, 0.3, 50), lengths)
    means.append(mean)
    claimed.append(error)
  assert abs(np.mean(means) - 2) < 4 * np.std(means) / 2000**0.5
  assert abs(np.mean(claimed) / np.std(means) - 1) < 0.06


def test_standard_errors_are_those_of_means_over_sequences_and_over_orders(golden):
  _, model, params, _ = golden
  tokens = np.random.default_rng(1).integers(0, 97, (5, 24)).astype(np.int32)
  result = evaluate(golden, tokens, 5, uniform=4)["uniform"]
  nll = np.zeros((4, 5))
  for r in range(4):
    sigma = orders.draw("uniform", orders.root_key(0), r, jnp.arange(5), 24)
    logits = model.apply({"params": params}, tokens, sigma)
    shuffled = np.take_along_axis(tokens, np.asarray(sigma), 1)
    chosen = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), shuffled[..., None], -1)
    nll[r] = -chosen[..., 0].mean(axis=1)
  np.testing.assert_allclose(result.nats_per_token, nll.mean(), rtol=1e-5)
  np.testing.assert_allclose(result.stderr_sequences, nll.mean(0).std(ddof=1) / 5**0.5, rtol=1e-3)
  np.testing.assert_allclose(result.stderr_orders, nll.mean(1).std(ddof=1) / 2, rtol=1e-3)


def test_nothing_to_evaluate_is_an_error(golden):
  with pytest.raises(ValueError, match="no sequences"):
    likelihood.evaluate(*golden[1:3], [], mesh=golden[3], token_bytes=TOKEN_BYTES, repeats={"uniform": 1})
