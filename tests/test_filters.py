"""Filters: the tokens that they keep, and draws that follow the distribution exactly."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aogpt_jax.sampling import filters


def kept(probs, **options):
  logits = jnp.log(jnp.asarray(probs, jnp.float32))
  return np.flatnonzero(np.isfinite(filters.Filters(len(probs), **options)(logits))).tolist()


def draw_many(logits, draws):
  """Draws from one distribution over a large vocabulary; compiled for speed, since the noise is all the time it takes."""
  draw = lambda keys: jax.lax.map(lambda key: filters.draw(key[None], logits[None])[0], keys, batch_size=50)
  return jax.jit(draw, compiler_options={"xla_backend_optimization_level": 3})(jax.random.split(jax.random.key(0), draws))


@pytest.mark.parametrize("top_p, tokens", [(0.6, [0, 1]), (0.9, [0, 1, 2]), (1.0, [0, 1, 2, 3]), (0.0, [0]), (1e-8, [0])])
def test_top_p_keeps_tokens_while_the_mass_before_them_is_below_it(top_p, tokens):
  assert kept([0.5, 0.3, 0.15, 0.05], top_p=top_p) == tokens


@pytest.mark.parametrize("top_p, tokens", [(0.6, [0]), (0.9, [0, 1]), (1.0, [0, 1, 2, 3]), (0.3, [0])])
def test_the_reference_rule_drops_the_token_that_crosses_top_p(top_p, tokens):
  assert kept([0.5, 0.3, 0.15, 0.05], top_p=top_p, top_p_rule="reference") == tokens


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_set_that_sorting_would(top_p):
  logits = np.random.default_rng(0).normal(0, 3, (4, 5000)).astype(np.float32)
  ours = np.isfinite(filters.Filters(5000, top_p=top_p)(jnp.asarray(logits)))
  for row, mine in zip(logits.astype(np.float64), ours):
    order = np.argsort(-row)
    probs = np.exp(row - row.max())
    probs = probs[order] / probs.sum()
    before = np.cumsum(probs) - probs
    # Sums of thousands of float32s are good to 1e-6: which side of top_p they fall on is open that near to it.
    sure = np.abs(before - top_p) > 1e-5
    np.testing.assert_array_equal(mine[order][sure], (before < top_p)[sure])


def test_top_k_keeps_the_k_most_probable():
  probs = [0.1, 0.4, 0.2, 0.3]
  assert kept(probs, top_k=2) == [1, 3] and kept(probs, top_k=0) == kept(probs, top_k=9) == [0, 1, 2, 3]


def test_temperature_divides_the_logits_and_0_takes_the_largest():
  logits = jnp.asarray([[1.0, 3.0, 2.0, 9.0]])
  np.testing.assert_allclose(filters.Filters(3, temperature=0.5)(logits)[0], [2, 6, 4, -np.inf])
  np.testing.assert_array_equal(filters.Filters(3, temperature=0.0)(logits)[0], [-np.inf, 0, -np.inf, -np.inf])


@pytest.mark.parametrize("options, named", [
    (dict(temperature=-1.0), "temperature is -1.0"), (dict(temperature=math.nan), "temperature"),
    (dict(temperature=math.inf), "temperature"), (dict(top_p=math.nan), "top_p is nan"), (dict(top_p=-0.1), "top_p is -0.1"),
    (dict(top_p=1.1), "top_p is 1.1"), (dict(top_k=-1), "top_k is -1"), (dict(top_p_rule="other"), "top_p_rule is 'other'"),
])
def test_a_value_out_of_range_is_named(options, named):
  with pytest.raises(ValueError, match=named):
    filters.Filters(4, **options)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_mean_surprise_of_draws_is_the_entropy(dtype):
  logits = jnp.asarray(np.random.default_rng(0).normal(0, 3, 50304), dtype)
  log_probs = np.asarray(jax.nn.log_softmax(logits.astype(jnp.float32)), np.float64)
  entropy = -(np.exp(log_probs) * log_probs).sum()
  shaped = filters.Filters(50304)(logits)
  drawn = draw_many(shaped, 4_000)
  assert abs(-log_probs[np.asarray(drawn)].mean() - entropy) < 0.1


def test_the_tail_of_a_sharp_distribution_has_its_share():
  vocab_size, draws = 50304, 10_000
  logits = jnp.full(vocab_size, -16.5).at[7].set(0.0)
  tail = (vocab_size - 1) * math.exp(-16.5)
  share = tail / (1 + tail)
  np.testing.assert_allclose(share, 3.42e-3, rtol=2e-3)
  drawn = np.asarray(draw_many(logits, draws))
  assert abs((drawn != 7).mean() - share) < 4 * math.sqrt(share * (1 - share) / draws)


def test_no_id_beyond_the_vocabulary_is_drawn_at_a_high_temperature():
  logits = jnp.zeros((64, 300)).at[:, 257:].set(50.0)
  keys = jax.random.split(jax.random.key(2), 64)
  drawn = filters.draw(keys, filters.Filters(257, temperature=5.0)(logits))
  assert drawn.max() < 257 and drawn.min() >= 0
