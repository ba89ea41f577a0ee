"""Adaptive orders: the tokens that the model is surest of first, enumerated; ties at random."""

import jax
import numpy as np
import pytest

import enumerated
from aogpt_jax.sampling import adaptive
from aogpt_jax.sampling import filters
from aogpt_jax.sampling import plan

# By criterion: how sure a distribution is, the surest first.
SURE = {
    "probability": lambda p: p.max(),
    "margin": lambda p: np.diff(np.sort(p))[-1],
    "entropy": lambda p: (p * np.log(p)).sum(),
}


@pytest.fixture(scope="module")
def model():
  """Told less about its targets, so that its orders depend on the tokens."""
  model, params = enumerated.make()
  return model, params | {"targets": jax.tree.map(lambda x: 0.5 * x, params["targets"])}


def draw(model, batch, steps=4, **options):
  made = plan.make_plan(np.tile(np.arange(4), (batch, 1)), np.zeros((batch, 4), bool), steps, counts="fixed")
  return adaptive.sample(*model, made, np.zeros((batch, 4)), jax.random.split(jax.random.key(0), batch),
                         filters.Filters(3), **options)


def enumerate_paths(table, sure, size):
  """Sequence -> (its probability, the order it is drawn in), with `size` tokens a step, at temperature 1."""
  found = {}

  def go(order, tokens, probability):
    if len(order) == 4:
      found[tuple(token for _, token in sorted(zip(order, tokens)))] = probability, order
      return
    asked = {p: table[order, tokens, p] for p in range(4) if p not in order}
    chosen = sorted(asked, key=lambda p: -sure(asked[p]))[:size]
    for new in np.ndindex((3,) * len(chosen)):
      p = np.prod([asked[c][token] for c, token in zip(chosen, new)])
      go(order + tuple(chosen), tokens + tuple(new), probability * p)

  go((), (), 1.0)
  return found


@pytest.mark.parametrize("criterion, steps", [("probability", 4), ("margin", 2), ("entropy", 4)])
def test_its_samples_have_the_enumerated_distribution_and_orders(model, criterion, steps):
  out = draw(model, 20_000, steps, criterion=criterion)
  paths = enumerate_paths(enumerated.conditionals(enumerated.logits_of(*model)), SURE[criterion], 4 // steps)
  assert enumerated.p_value(out.tokens, np.array([paths[tuple(s)][0] for s in enumerated.SEQUENCES.tolist()])) > 0.001
  assert all(paths[tuple(tokens)][1] == tuple(order) for tokens, order in zip(out.tokens.tolist(), out.orders.tolist()))
  assert len({tuple(order) for order in out.orders}) > 1 and out.evaluations == steps == out.passes


def is_uniform(orders):
  _, counts = np.unique(orders, axis=0, return_counts=True)
  expected = len(orders) / 24
  return len(counts) == 24 and ((counts - expected) ** 2 / expected).sum() < 60  # 23 degrees of freedom


def test_ties_noise_and_single_candidates_give_every_order_as_often(model):
  nothing = model[0], jax.tree.map(np.zeros_like, model[1])
  assert is_uniform(draw(nothing, 20_000, criterion="entropy").orders)
  assert is_uniform(draw(model, 20_000, criterion="entropy", noise=1e9).orders)
  assert is_uniform(draw(model, 20_000, criterion="entropy", candidates=1).orders)
