"""The forward passes of a plan: which entries each of them runs, for each sample.

A group is what a sample reveals in one step. Its tokens are asked for by queries, entries that all hold the last known token, each told
another target. The first query is a true entry of the sequence and stays in the cache. The others of the tokens drawn enter the cache
as true entries ("fills") together with the next group's queries. So a sample is a sequence of entries, group by group first the fills
and then the queries, and its entries of one group lie one slot after another.

Samples do not wait for each other: each takes its own next group in every pass, and a group that is wider than a pass goes on in the
next one, since a query sees the tokens before its group and no others, whenever it is run.
"""

import dataclasses

import numpy as np

# What a pass costs beside its entries, in entries: the parameters and the cache are read once for all of them.
_PASS_COST = 8


@dataclasses.dataclass(frozen=True)
class Passes:
  """N forward passes over up to `width` entries of each sample; int32 [N, B] each.

  Attributes:
    width: entries of a sample in a pass, those that are padding included; 0 where passes run the whole sequence.
    asked: the most queries of a sample in a pass, or more.
    regular: whether most passes use all of `width`; else it is rounded up.
    write: the slot that the first entry enters; the others follow it.
    fills: how many of the entries are fills; the queries come after them.
    queries: how many are queries.
    start: how many tokens are known to the queries.
    place: the place in the order of the token that the first query asks for.
  """

  width: int
  asked: int
  regular: bool
  write: np.ndarray
  fills: np.ndarray
  queries: np.ndarray
  start: np.ndarray
  place: np.ndarray

  def __len__(self) -> int:
    return len(self.write)

  @property
  def table(self) -> np.ndarray:
    """int32 [N, 5, B]: write, fills, queries, start, place."""
    return np.stack([self.write, self.fills, self.queries, self.start, self.place], axis=1)

  @property
  def slots(self) -> np.ndarray:
    """int [N], the length that the cache must have for each pass; it does not shrink."""
    busy = self.fills + self.queries > 0
    return np.maximum.accumulate(np.where(busy, self.write + self.width, 0).max(axis=1, initial=0))


def make_passes(known: np.ndarray, counts: np.ndarray) -> Passes:
  """The passes of a plan.

  Args:
    known: int [B], tokens given.
    counts: int [N, B], tokens of each sample that are revealed at once, group after group.
  """
  batch = len(known)
  sample, step = np.nonzero(counts.T)  # sample by sample, one element for each group
  size = counts[step, sample]
  first = np.r_[True, sample[1:] != sample[:-1]] if len(sample) else np.zeros(0, bool)
  start = (known + np.cumsum(counts, axis=0) - counts)[step, sample]
  fills = np.where(first, 0, np.roll(size, 1) - 1)
  entries = fills + size
  # Where most groups are as wide as the widest, as with fixed counts, a pass fits them exactly. Else sizes are rounded up, so that draws
  # of the counts share few programs.
  widest = int(entries.max(initial=1))
  regular = bool(2 * np.count_nonzero(entries == widest) >= len(entries))
  alike = 2 * np.count_nonzero(entries > 0.9 * widest) >= len(entries)
  width = widest if regular else _rounded_up(widest) if alike else _cheapest_width(entries, sample, batch)

  # A group's entries in pieces of `width`: one element for each piece.
  pieces = -(-entries // width)
  group = np.repeat(np.arange(len(size)), pieces)
  begin = (np.arange(len(group)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * width
  length = np.minimum(entries[group] - begin, width)
  piece_fills = np.clip(fills[group] - begin, 0, length)
  queries = length - piece_fills
  before = np.cumsum(np.bincount(sample[group], minlength=batch)) - np.bincount(sample[group], minlength=batch)
  index = np.arange(len(group)) - before[sample[group]]
  total = int(index.max(initial=-1)) + 1

  def table(values: np.ndarray) -> np.ndarray:
    out = np.zeros((total, batch), np.int32)
    out[index, sample[group]] = values
    return out

  asked = int(queries.max(initial=1))
  return Passes(
      width=width, asked=asked if regular else min(_rounded_up(asked), width) if alike else width, regular=regular,
      write=table((start - fills)[group] + begin), fills=table(piece_fills), queries=table(queries), start=table(start[group]),
      place=table(start[group] + np.maximum(begin - fills[group], 0)))


def make_whole_passes(known: np.ndarray, counts: np.ndarray) -> Passes:
  """The passes of a plan for a model without a cache: each runs the whole sequence and reveals the next group of each sample.

  Args:
    known: int [B], tokens given.
    counts: int [N, B], tokens of each sample that are revealed at once, group after group.
  """
  # The groups that there are of each sample, before those that are empty.
  order = np.argsort(counts == 0, axis=0, kind="stable")
  queries = np.take_along_axis(counts, order, axis=0)[: int((counts > 0).sum(axis=0).max(initial=0))].astype(np.int32)
  start = (known + np.cumsum(queries, axis=0) - queries).astype(np.int32)
  nothing = np.zeros_like(queries)
  # Logits cost less than the pass: rounded up, they need few programs.
  return Passes(width=0, asked=_power_of_two(queries.max(initial=1)), regular=True, write=nothing, fills=nothing, queries=queries,
                start=start, place=start)


def _cheapest_width(entries: np.ndarray, sample: np.ndarray, batch: int) -> int:
  """The power of two of entries in a pass with which all passes together cost least, from the entries of each group."""

  def cost(width: int) -> float:
    passes = np.bincount(sample, weights=-(-entries // width), minlength=batch).max()
    return passes * (_PASS_COST + width)

  return min((1 << i for i in range(_power_of_two(entries.max()).bit_length())), key=cost)


def _power_of_two(n: int) -> int:
  """The smallest power of two that is at least n."""
  return 1 << (int(n) - 1).bit_length()


def _rounded_up(n: int) -> int:
  """At least `n`, by a sixteenth more at most, of which there are few."""
  step = max(_power_of_two(n) // 16, 1)
  return -(-n // step) * step
