"""Ensemble over orders of the context: each token's probability averaged over M orders of the tokens that it is predicted from.

p_ens(x_sigma(i)) = mean over M permutations of the drawn prefix sigma(<i); the drawn order is always one of them, so that
M = 1 is the any-order likelihood, and perplexity is exp(mean of -log p_ens) (Xue et al., arXiv 2506.19935).
"""

from collections.abc import Callable, Iterable
import dataclasses
import math
from typing import Any

from flax import linen as nn
from jax.sharding import Mesh
import numpy as np

from aogpt_jax.evaluation import contexts
from aogpt_jax.evaluation import draws
from aogpt_jax.evaluation import likelihood


@dataclasses.dataclass(frozen=True)
class Ensemble:
  """Negative log-likelihood with averages over M orders of each context."""

  contexts: int  # M
  nats_per_token: float
  perplexity: float  # exp(nats_per_token)
  stderr_sequences: float  # of nats_per_token, over the sequences; that of the targets is in it
  stderr_targets: float  # of nats_per_token against that of all targets of these sequences; 0 where all were scored
  targets: int  # per sequence, whose contexts were permuted
  sequences: int
  tokens: int


def perplexity(nll: np.ndarray) -> float:
  """exp(mean of -log p_ens) from the nats of each target under M orders [..., M], in float64."""
  return math.exp(likelihood.nll_of_mean(nll).mean())


def sizes(most: int) -> tuple[int, ...]:
  """1, 2, 4, ... and `most` itself."""
  return tuple(sorted({1 << i for i in range(most.bit_length())} | {most}))


def evaluate(
    model: nn.Module, params: Any, batches: Iterable[tuple[np.ndarray, np.ndarray]], *, mesh: Mesh, num_contexts: int,
    num_targets: int = 0, spec: str = "uniform", seed: int = 0, lanes: int = contexts.LANES,
    progress: Callable[[int], None] = lambda sequences: None,
) -> dict[int, Ensemble]:
  """The ensemble of each size 1, 2, 4, ..., M; the orders of a size are the first of the next one.

  With a subset of targets, the likelihood in the drawn order is still that of all; what is estimated from the subset is how much
  the ensemble takes off it, which varies far less from token to token.

  Args:
    model: a decoder.
    params: its parameters, sharded over `mesh`.
    batches: this process's rows, as `loader.eval_batches` yields them: tokens int32 [b, T] and lengths int32 [b], how many tokens
      of a row are text.
    mesh: from `sharding.make_mesh`.
    num_contexts: M, the drawn order among them.
    num_targets: of each sequence, a random subset; 0: all of them, which is exact.
    spec: distribution of the drawn orders, see `orders.parse`.
    seed: of orders, permutations and subsets; a sequence's depend on its index alone, not on the batch size.
    lanes: see `contexts.nll`; memory for speed.
    progress: called with the number of sequences scored so far.

  Raises:
    ValueError: no sequences, or numbers out of range.
  """
  if num_contexts < 1 or num_targets < 0:
    raise ValueError(f"num_contexts is {num_contexts} and num_targets is {num_targets}; they must be at least 1 and 0.")
  drawn, takes = [], {size: [] for size in sizes(num_contexts)}
  for d in draws.draw(model, params, batches, mesh=mesh, num_visits=num_contexts - 1, num_targets=num_targets, spec=spec,
                      seed=seed):
    nll = draws.score(model, params, d, mesh=mesh, lanes=lanes)
    own = np.take_along_axis(d.nll, d.targets, axis=1)
    nll = np.concatenate([own[..., None], nll], axis=2)
    drawn.append((np.where(np.arange(d.nll.shape[1]) < d.lengths[:, None], d.nll, 0.0).sum(axis=1), d.lengths, d.targets))
    for size, values in takes.items():
      values.append(likelihood.nll_of_mean(nll[..., :size]) - own)
    progress(sum(len(sums) for sums, _, _ in drawn))
  drawn = tuple(map(np.concatenate, zip(*drawn)))
  return {size: _summary(size, *drawn, np.concatenate(values)) for size, values in takes.items()}


def _summary(size: int, sums: np.ndarray, lengths: np.ndarray, targets: np.ndarray, takes: np.ndarray) -> Ensemble:
  """From the nats of B sequences in the drawn order, and what an ensemble adds to those of some targets [B, I]."""
  scored = targets < lengths[:, None]
  counts = scored.sum(axis=1)
  take = np.where(scored, takes, 0.0).sum(axis=1) / counts
  mean, stderr = likelihood.per_token(sums + lengths * take, lengths)
  # Simple random sampling without replacement: there is no error where all are taken.
  rest = np.where(scored, takes - take[:, None], 0.0)
  with np.errstate(divide="ignore", invalid="ignore"):
    variance = np.where(counts == lengths, 0.0, np.square(rest).sum(axis=1) / (counts - 1) / counts * (1 - counts / lengths))
  return Ensemble(
      contexts=size, nats_per_token=mean, perplexity=math.exp(min(mean, 700.0)), stderr_sequences=stderr,
      stderr_targets=float(np.sqrt(np.square(lengths) @ variance) / lengths.sum()), targets=targets.shape[1],
      sequences=len(sums), tokens=int(lengths.sum()))
