"""Plans: every position once, known ones first, counts by lemma 1 or by the PyTorch code's rule."""

import math

import numpy as np
import pytest

from aogpt_jax.sampling import plan


def nothing_known(batch, length):
  return np.tile(np.arange(length), (batch, 1)), np.zeros((batch, length), bool)


@pytest.mark.parametrize("counts", ["binomial", "fixed"])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("steps", [1, 3, 20, 100])
def test_every_unknown_position_is_revealed_once_and_the_known_come_first_from_left_to_right(counts, schedule, steps):
  rng = np.random.default_rng(0)
  orders = np.stack([rng.permutation(20) for _ in range(5)])
  known = rng.random((5, 20)) < np.linspace(0, 1, 5)[:, None]
  made = plan.make_plan(orders, known, steps, counts=counts, schedule=schedule, rng=rng)
  np.testing.assert_array_equal(np.sort(made.orders, axis=1), np.tile(np.arange(20), (5, 1)))
  np.testing.assert_array_equal(made.known + made.counts.sum(axis=0), 20)
  assert made.counts.any(axis=1).all() and (np.diff(made.steps) > 0).all() and made.evaluations <= steps
  for b in range(5):
    first, rest = made.orders[b, : made.known[b]], made.orders[b, made.known[b] :]
    np.testing.assert_array_equal(first, np.flatnonzero(known[b]))
    np.testing.assert_array_equal(rest, [p for p in orders[b] if not known[b, p]])


def test_binomial_counts_follow_lemma_1():
  batch, length, steps = 20_000, 12, 4
  made = plan.make_plan(*nothing_known(batch, length), steps, rng=np.random.default_rng(1))
  # Each position falls into each step with probability 1 / S: the first count is Binomial(U, 1 / S).
  binomial = [math.comb(length, n) * 0.25**n * 0.75 ** (length - n) for n in range(length + 1)]
  for count in made.counts:
    observed = np.bincount(count, minlength=length + 1)
    expected = batch * np.array(binomial)
    big = expected > 5
    chi2 = ((observed - expected) ** 2 / expected)[big].sum()
    assert chi2 < big.sum() + 4 * math.sqrt(2 * big.sum())


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("batch, length, steps", [(1, 30, 30), (1, 10, 50), (3, 10, 40)])
def test_the_number_of_evaluations_is_the_expected_one(schedule, batch, length, steps):
  rng, draws = np.random.default_rng(2), 2000
  found = [plan.make_plan(*nothing_known(batch, length), steps, schedule=schedule, rng=rng).evaluations for _ in range(draws)]
  level = {"linear": lambda k: 1 - k / steps, "cosine": lambda k: math.cos(math.pi * k / 2 / steps)}[schedule]
  p = [level(k - 1) - level(k) for k in range(1, steps + 1)]
  expected = sum(1 - (1 - q) ** (batch * length) for q in p)
  if schedule == "linear" and batch == 1:
    np.testing.assert_allclose(expected, steps * (1 - (1 - 1 / steps) ** length))
  assert abs(np.mean(found) - expected) < 4 * np.std(found) / math.sqrt(draws)


@pytest.mark.parametrize("length, steps, counts", [
    (8, 4, [2, 2, 2, 2]), (7, 3, [2, 2, 3]), (4, 8, [1, 1, 1, 1]), (5, 1, [5]), (8, 8, [1] * 8)])
def test_fixed_counts_are_those_of_the_rule(length, steps, counts):
  made = plan.make_plan(*nothing_known(2, length), steps, counts="fixed")
  np.testing.assert_array_equal(made.counts, np.array(counts)[:, None].repeat(2, 1))


@pytest.mark.parametrize("counts", ["binomial", "fixed"])
def test_positions_revealed_together_are_spread_evenly_over_those_that_are_open(counts):
  rng = np.random.default_rng(3)
  orders, known = np.stack([rng.permutation(24) for _ in range(4)]), rng.random((4, 24)) < np.array([[0], [0.5], [0.9], [1]])
  made = plan.make_plan(orders, known, 5, counts=counts, spaced=True, rng=rng)
  near = plan.make_plan(orders, known, 5, counts="fixed")
  for b in range(4):
    order, still = made.orders[b], list(range(24))
    place = {p: i for i, p in enumerate(near.orders[b].tolist())}
    starts = np.cumsum([made.known[b], *made.counts[:, b]])
    np.testing.assert_array_equal(order[: starts[0]], np.flatnonzero(known[b]))
    still = sorted(set(still) - set(order[: starts[0]].tolist()))
    for begin, end in zip(starts, starts[1:]):
      group = order[begin:end].tolist()
      assert group == sorted(group, key=place.get)
      if group:
        assert min(still, key=place.get) in group  # the one that comes next in the order
        ranks = sorted(still.index(p) for p in group)
        gaps = np.diff([*ranks, ranks[0] + len(still)])
        assert gaps.max() - gaps.min() <= 1
      still = [p for p in still if p not in group]
    assert not still
  one = plan.make_plan(orders, known, 24, counts="fixed", spaced=True)
  np.testing.assert_array_equal(one.orders, near.orders)  # one at a time, there is nothing to spread


@pytest.mark.parametrize("change, named", [
    (dict(steps=0), "steps is 0"), (dict(counts="poisson"), "counts is 'poisson'"), (dict(schedule="log"), "schedule is 'log'"),
    (dict(orders=np.array([[0, 0, 1]])), "permutation"), (dict(known=np.zeros((1, 2), bool)), r"known \(1, 2\)"),
])
def test_what_is_out_of_range_is_named(change, named):
  arguments = dict(orders=np.array([[2, 0, 1]]), known=np.zeros((1, 3), bool), steps=2) | change
  with pytest.raises(ValueError, match=named):
    plan.make_plan(**arguments)
