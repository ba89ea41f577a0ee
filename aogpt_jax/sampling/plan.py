"""The plan of a generation: which positions are drawn in which step, known before the first forward pass.

The reverse process of masked diffusion first tosses a coin for every masked position and then asks the model where it fell
(arXiv 2506.19935, lemma 1). By exchangeability that is a random order, and in the step from noise level t to s a
Binomial(m, (t - s) / t) number of the m positions that are still masked. Neither needs the model.
"""

from collections.abc import Callable
import dataclasses
import math

import numpy as np

# (k, S) -> noise level t_k after step k of S; t_0 = 1, t_S = 0.
SCHEDULES: dict[str, Callable[[int, int], float]] = {
    "linear": lambda k, steps: 1 - k / steps,
    "cosine": lambda k, steps: math.cos(math.pi * k / (2 * steps)),
}


@dataclasses.dataclass(frozen=True)
class Plan:
  """Who is revealed when.

  Attributes:
    orders: int32 [B, L], known positions first.
    known: int32 [B], how many positions are given.
    counts: int32 [N, B], tokens of each sample drawn in each forward pass; steps that reveal nothing in any sample are left out.
    steps: int32 [N], the step, from 1, of each forward pass.
  """

  orders: np.ndarray
  known: np.ndarray
  counts: np.ndarray
  steps: np.ndarray

  @property
  def evaluations(self) -> int:
    """Forward passes that draw tokens."""
    return len(self.counts)

  @property
  def ends(self) -> np.ndarray:
    """int32 [B], how many tokens are known after the last forward pass."""
    return (self.known + self.counts.sum(axis=0)).astype(np.int32)

  @property
  def starts(self) -> np.ndarray:
    """int32 [N, B], how many tokens are known before each forward pass."""
    return (self.known + np.cumsum(self.counts, axis=0) - self.counts).astype(np.int32)


def make_plan(
    orders: np.ndarray, known: np.ndarray, steps: int, *, counts: str = "binomial", schedule: str = "linear",
    spaced: bool = False, rng: np.random.Generator | None = None,
) -> Plan:
  """The plan of a batch.

  Args:
    orders: int [B, L], a permutation of 0..L-1 each: the order in which unknown positions are drawn.
    known: bool [B, L], by position: which tokens are given. They come first, from left to right.
    steps: S; with `counts="fixed"` at most as many as there are unknown positions.
    counts: "binomial" (lemma 1) or "fixed" (as the PyTorch code: the rounded expectation, at least one a step).
    schedule: "linear" or "cosine".
    spaced: whether positions that are revealed together are spread evenly over those that are open: every n-th of them, from the one
      that comes next in the order; else they are those that come next in it. Neighbours depend on each other most.
    rng: of the binomial draws.

  Raises:
    ValueError: an argument out of range, named with what is allowed.
  """
  if schedule not in SCHEDULES:
    raise ValueError(f"schedule is {schedule!r}; it must be one of {', '.join(SCHEDULES)}.")
  if steps < 1:
    raise ValueError(f"steps is {steps}; it must be at least 1.")
  orders, known = np.asarray(orders, np.int32), np.asarray(known, bool)
  if orders.ndim != 2 or known.shape != orders.shape:
    raise ValueError(f"orders {orders.shape} and known {known.shape} must both be [batch, length].")
  if (np.sort(orders, axis=1) != np.arange(orders.shape[1])).any():
    raise ValueError("orders: each row must be a permutation of 0..length-1.")
  given = np.take_along_axis(known, orders, axis=1)
  # A stable sort: the known positions from left to right, then the others in their order.
  rank = np.where(given, orders - orders.shape[1], np.arange(orders.shape[1]))
  orders = np.take_along_axis(orders, np.argsort(rank, axis=1, kind="stable"), axis=1)
  unknown = (~known).sum(axis=1)
  levels = np.array([1.0, *(SCHEDULES[schedule](k, steps) for k in range(1, steps)), 0.0])
  if counts == "binomial":
    table = _binomial(unknown, levels, rng or np.random.default_rng(0))
  elif counts == "fixed":
    table = np.stack([_fixed(int(u), levels) for u in unknown], axis=1)
  else:
    raise ValueError(f"counts is {counts!r}; it must be binomial or fixed.")
  if spaced:
    orders = np.stack([_spaced(*sample) for sample in zip(orders, known.sum(axis=1), table.T)])
  busy = np.flatnonzero(table.any(axis=1))
  return Plan(orders, known.sum(axis=1).astype(np.int32), table[busy].astype(np.int32), (busy + 1).astype(np.int32))


def _spaced(order: np.ndarray, known: int, counts: np.ndarray) -> np.ndarray:
  """int [L]: the order in which each step's positions lie evenly among those that are open, in their order."""
  place = np.argsort(order)
  still, steps = np.sort(order[known:]), [order[:known]]
  for count in counts[counts > 0]:
    first = int(np.argmin(place[still]))
    index = (first + np.arange(count) * len(still) // count) % len(still)
    steps.append(still[index][np.argsort(place[still[index]])])
    still = np.delete(still, index)
  return np.concatenate(steps)


def _binomial(unknown: np.ndarray, levels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """int [S, B]: in the step from t to s each masked position is revealed with probability (t - s) / t."""
  masked, table = unknown.copy(), []
  for t, s in zip(levels, levels[1:]):
    table.append(rng.binomial(masked, (t - s) / t))
    masked = masked - table[-1]
  return np.stack(table)


def _fixed(unknown: int, levels: np.ndarray) -> np.ndarray:
  """int [S]: after step k, c_k = min(U, max(int(U (1 - t_k)), c_{k-1} + 1)) tokens are known, and all after the last."""
  known, table = 0, []
  for k, t in enumerate(levels[1:], 1):
    after = min(unknown, max(int(unknown * (1 - t)), known + 1))
    after = unknown if k == len(levels) - 1 else after
    table.append(after - known)
    known = after
  return np.array(table)
