"""Passes: a slow simulation of the cache and of what is known, entry by entry, in which nothing may be seen before it is there."""

import numpy as np
import pytest

from aogpt_jax.sampling import passes
from aogpt_jax.sampling import plan

GARBAGE = -1


def make_counts(groups):
  """int [N, B] from the group sizes of each sample; a 0 is a step in which a sample does nothing."""
  steps = max(len(g) for g in groups)
  return np.array([[*g, *[0] * (steps - len(g))] for g in groups], int).reshape(len(groups), steps).T


def group_starts(known, sizes):
  """How many tokens are known when each of a sample's unknown places is drawn."""
  starts = []
  for size in sizes:
    starts += [known + len(starts)] * size
  return starts


def binomial(known, length, steps, seed=0):
  """A plan's counts when the first `known` positions of each text are given."""
  orders, given = np.tile(np.arange(length), (len(known), 1)), np.arange(length) < np.array(known)[:, None]
  return plan.make_plan(orders, given, steps, rng=np.random.default_rng(seed)).counts


CASES = {  # name -> known and counts
  "one at a time": ([0, 0], make_counts([[1] * 12, [1] * 12])),
  "all at once": ([0, 0, 0], make_counts([[12]] * 3)),
  "all at once, ragged": ([0, 3, 11, 12], make_counts([[12], [9], [1], []])),
  "equal groups": ([0, 0], make_counts([[3] * 4] * 2)),
  "ragged, one at a time": ([0, 5, 12, 1], make_counts([[1] * 12, [1] * 7, [], [1] * 11])),
  "nothing to draw": ([12, 12], np.zeros((0, 2), int)),
  "nothing to draw, in steps": ([12, 12], np.zeros((3, 2), int)),
  "steps without work": ([2, 0], make_counts([[0, 3, 0, 0, 1, 0, 0, 4], [1, 0, 0, 1, 0, 5, 0, 1]])),
  "one wide group among small ones": ([0, 2, 0], make_counts([[1] * 6 + [26], [1] * 30, [1, 1, 25, 1, 1, 1, 1, 1]])),
  "a wide group first": ([0, 0], make_counts([[25] + [1] * 7, [1] * 32])),
  "wide groups after each other": ([0, 0], make_counts([[1, 13, 11, 1, 1, 1, 1, 3], [1] * 32])),
  "binomial": ([0] * 4, binomial([0] * 4, 48, 48)),
  "binomial, few steps": ([0] * 3, binomial([0] * 3, 48, 5)),
  "binomial, ragged": ([0, 20, 47, 48, 3], binomial([0, 20, 47, 48, 3], 48, 30)),
  "binomial, many steps": ([0, 7], binomial([0, 7], 24, 1000)),
  "one sample": ([4], binomial([4], 40, 20)),
}


def simulate(known, counts, made):
  """Runs the passes over caches of marks: slot i holds i when true entry i is in it, else GARBAGE; and checks each entry.

  True entry i is the one that holds the token of place i - 1 and asks for place i; it sees the slots 0..i-1.

  Returns:
    For each sample, pass and number of known tokens with which each place was asked for: dicts place -> (pass, start); and for
    each sample how often every true entry was written.
  """
  batch = len(known)
  ends = known + counts.sum(axis=0)
  asked_for, written = [{} for _ in range(batch)], [np.zeros(max(ends, default=0) + 1, int) for _ in range(batch)]
  # A cache starts with the true entries of what is given, but for the one that holds the last token.
  caches = [list(range(k)) for k in known]
  drawn = [set(range(k)) for k in known]
  for n, row in enumerate(made.table):
    for b, (write, fills, queries, start, place) in enumerate(row.T):
      cache, before = caches[b], frozenset(drawn[b])
      cache += [GARBAGE] * (made.slots[n] - len(cache))
      assert fills + queries <= made.width and queries <= made.asked
      if fills + queries:
        # A write past the end would be moved to before it, over what is true.
        assert write + made.width <= made.slots[n]
      entries = []  # (number of tokens known to it, place asked for) of each entry
      for e in range(made.width):
        slot = write + e
        if e < fills:
          entries.append((slot, slot))
        elif e < fills + queries:
          entries.append((start, place + e - fills))
        else:
          entries.append(None)
        cache[slot] = slot if entries[e] == (slot, slot) else GARBAGE
        written[b][slot : slot + 1] += entries[e] == (slot, slot)
      # In each layer all entries are in the cache before any of them looks.
      for e, entry in enumerate(entries):
        if entry is None:
          continue
        visible, target = entry
        assert cache[:visible] == list(range(visible)), (n, b, e)
        assert before >= set(range(visible)), (n, b, e)  # before: no entry waits for a token of its own pass
        if e >= fills:
          assert target not in asked_for[b] and known[b] <= target < ends[b]
          asked_for[b][target] = n, visible
          drawn[b].add(target)
  return asked_for, written


@pytest.mark.parametrize("pass_cost", [8, 0, 1000], ids=["", "narrow", "wide"])
@pytest.mark.parametrize("name", CASES)
def test_every_entry_sees_true_entries_alone_and_every_unknown_place_is_asked_for_once(name, pass_cost, monkeypatch):
  monkeypatch.setattr(passes, "_PASS_COST", pass_cost)
  known, counts = np.array(CASES[name][0]), CASES[name][1]
  made = passes.make_passes(known, counts)
  asked_for, written = simulate(known, counts, made)
  for b, (k, sizes) in enumerate(zip(known, counts.T)):
    # The number of known tokens leaves out the whole group, whichever pass its tokens are asked for in.
    assert [asked_for[b][place][1] for place in sorted(asked_for[b])] == group_starts(k, sizes)
    assert sorted(asked_for[b]) == list(range(k, k + sizes.sum()))
    # Once each, from the first query to that of the last group; what comes after is never seen.
    last = max(group_starts(k, sizes), default=k - 1)
    np.testing.assert_array_equal(written[b][k : last + 1], 1)
    assert not written[b][:k].any() and not written[b][last + 1 :].any()


@pytest.mark.parametrize("name", CASES)
def test_a_sample_draws_in_every_pass_until_it_is_finished(name):
  known, counts = CASES[name]
  made = passes.make_passes(np.array(known), counts)
  busy = made.fills + made.queries > 0
  np.testing.assert_array_equal(busy, np.arange(len(made))[:, None] < busy.sum(axis=0))
  assert not len(made) or busy[-1].any()
  # A group can't be asked for before the one before it is known; what more there is are pieces of groups.
  groups = (counts > 0).sum(axis=0)
  entries = [sum(max(before - 1, 0) + size for before, size in zip([0, *sizes], sizes))
             for sizes in (column[column > 0].tolist() for column in counts.T)]
  assert (busy.sum(axis=0) >= groups).all()
  assert (busy.sum(axis=0) <= groups + np.array(entries) // made.width).all()
  np.testing.assert_array_equal((made.fills + made.queries).sum(axis=0), entries)


def test_the_cache_does_not_shrink_and_holds_little_more_than_what_is_written():
  made = passes.make_passes(np.array(CASES["binomial, ragged"][0]), CASES["binomial, ragged"][1])
  assert (np.diff(made.slots) >= 0).all() and made.slots[-1] < 48 + made.width


@pytest.mark.parametrize("size, groups", [(1, 64), (4, 16), (15, 4), (64, 1), (7, 9)])
@pytest.mark.parametrize("batch", [1, 3])
def test_equal_groups_take_one_pass_each_without_padding(size, groups, batch):
  known = np.full(batch, 5)
  made = passes.make_passes(known, np.full((groups, batch), size))
  assert len(made) == groups
  # The others of the last group as well as the next; for a single group there are no others.
  assert (made.width, made.asked) == (size if groups == 1 else 2 * size - 1, size)
  assert made.slots[-1] == 5 + size * groups


@pytest.mark.parametrize("length, steps", [(64, 64), (64, 16), (60, 4), (64, 1), (256, 32), (256, 256), (100, 15)])
def test_fixed_counts_take_as_many_passes_as_evaluations(length, steps):
  made = plan.make_plan(np.arange(length)[None].repeat(2, 0), np.zeros((2, length), bool), steps, counts="fixed")
  assert len(passes.make_passes(made.known, made.counts)) == made.evaluations == steps


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("seed", range(3))
def test_samples_with_binomial_counts_do_not_wait_for_each_other(seed, schedule):
  orders, nothing = np.tile(np.arange(256), (8, 1)), np.zeros((8, 256), bool)
  made = plan.make_plan(orders, nothing, 256, schedule=schedule, rng=np.random.default_rng(seed))
  in_passes = passes.make_passes(made.known, made.counts)
  assert (made.counts > 0).sum(axis=0).max() <= len(in_passes) < made.evaluations
