"""Attention by age and by distance: what must hold of any weights, and what is known of some."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aogpt_jax.evaluation import attended
import random_models

TOKENS = np.random.default_rng(0).integers(0, 50, (3, 8))


@pytest.fixture(scope="module")
def model():
  return random_models.make(8, 64)


@pytest.mark.parametrize("spec", ["left_to_right", "uniform"])
def test_the_weights_of_each_query_add_up_to_one(model, spec):
  found = attended.evaluate(*model, TOKENS, spec)
  pairs = 7 - np.arange(7)  # of 8 queries with an entry of each age that is a token
  for by_age, start in ((found.by_age, found.start), (found.even_by_age[None], np.array([found.even_start]))):
    np.testing.assert_allclose((by_age * pairs).sum(axis=1) + 8 * start, 8, rtol=1e-5)
  assert found.by_age.shape == found.by_distance.shape == (2, 7) and found.sequences == 3
  assert np.isclose(found.even_start, np.mean([1 / i for i in range(1, 9)]))
  assert np.isclose(found.even_by_age[6], 1 / 8)  # the last query alone has so old an entry


def test_left_to_right_the_distance_is_the_age_and_one_more(model):
  found = attended.evaluate(*model, TOKENS, "left_to_right")
  np.testing.assert_allclose(found.by_age, found.by_distance, rtol=1e-5)
  other = attended.evaluate(*model, TOKENS, "uniform")
  assert np.abs(other.by_age - other.by_distance).max() > 1e-3


def test_without_queries_attention_is_even_and_with_other_layers_it_is_not(model):
  module, params = model
  even = attended.evaluate(module, jax.tree.map(jnp.zeros_like, params), TOKENS, "uniform")
  np.testing.assert_allclose(even.by_age, np.tile(even.even_by_age, (2, 1)), rtol=1e-5)
  np.testing.assert_allclose(even.by_distance, np.tile(even.even_by_distance, (2, 1)), rtol=1e-5)
  found = attended.evaluate(module, params, TOKENS, "uniform")
  assert np.abs(found.by_age - even.even_by_age).max() > 1e-3 and np.abs(found.by_age[0] - found.by_age[1]).max() > 1e-4
