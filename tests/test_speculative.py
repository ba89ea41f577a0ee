"""Speculative decoding: the distribution of one token a step, in fewer passes."""

import jax
import numpy as np
import pytest

import enumerated
from aogpt_jax.sampling import filters
from aogpt_jax.sampling import plan
from aogpt_jax.sampling import speculative


@pytest.fixture(scope="module")
def model():
  return enumerated.make()


@pytest.fixture(scope="module")
def logits(model):
  return enumerated.logits_of(*model)


def draw(model, order, batch, kept, **options):
  made = plan.make_plan(np.tile(order, (batch, 1)), np.zeros((batch, 4), bool), 4)
  return speculative.sample(*model, made, np.zeros((batch, 4)), jax.random.split(jax.random.key(0), batch), kept, **options)


@pytest.mark.parametrize("window, options", [(1, dict(temperature=0.7)), (2, dict(top_p=0.9)), (4, {})])
def test_its_samples_have_exactly_the_distribution_of_one_token_a_step(model, logits, window, options):
  order, kept = np.array([2, 0, 3, 1]), filters.Filters(3, **options)
  out = draw(model, order, 30_000, kept, window=window)
  which = (enumerated.ORDERS == order).all(axis=1).argmax()
  assert enumerated.p_value(out.tokens, enumerated.one_a_step(logits, kept)[which]) > 0.001
  # Some tokens are accepted and some are not.
  assert set(out.evaluations_each) == {3, 4} if window == 1 else {2, 3, 4}
  if "top_p" not in options:  # another order, even one that begins alike, would have been found out
    others = np.delete(enumerated.one_a_step(logits, kept), which, axis=0)
    assert max(enumerated.p_value(out.tokens, other) for other in others) < 1e-9


def test_at_temperature_0_it_draws_what_one_token_a_step_does(model, logits):
  order, kept = np.array([1, 3, 0, 2]), filters.Filters(3, temperature=0)
  out = draw(model, order, 8, kept, window=2)
  best = enumerated.one_a_step(logits, kept)[(enumerated.ORDERS == order).all(axis=1).argmax()]
  assert best.max() == 1 and (out.tokens == enumerated.SEQUENCES[best.argmax()]).all()
