"""What a model's likelihood owes to the order of its contexts: the gap between the any-order and the masked-diffusion loss.

A triple is a sequence x, an ordered context E = sigma(<k) and a position j outside of it, with k ~ U{0..n-1}, sigma uniform and
j uniform among the rest: sigma(k). L_AO is the mean of nll(E, j) = -log p(x_j | x_E in order E) over triples. A masked diffusion
model sees E as a set, and its loss in the limit of many steps is L_MDM(rule), the mean of nll(rule(E), j), for a rule that
chooses an order for the set:

* random: a uniform one. L_MDM - L_AO is 0 in expectation, for any model;
* sorted: left to right. L_MDM - L_AO may have either sign;
* mixture: p averaged over E and M - 1 permutations of it. L_MDM - L_AO is at most 0 in expectation, and 0 for a model that
  ignores the order of its context, as an encoder does: all of its differences are 0.

These tell formulation from architecture (Xue et al., arXiv 2506.19935); `sorted` is the test that its reviewers asked for.
"""

from collections.abc import Callable, Iterable
import dataclasses
import itertools
import math
from typing import Any

from flax import linen as nn
from jax.sharding import Mesh
import numpy as np

from aogpt_jax.evaluation import contexts
from aogpt_jax.evaluation import draws
from aogpt_jax.evaluation import likelihood

MOST_ENUMERATED = 7  # tokens whose orders, 5,040, are enumerated


@dataclasses.dataclass(frozen=True)
class Gap:
  """L_MDM(rule) - L_AO in nats per token and in percent of L_AO, each with its standard error and 95% interval.

  They are of differences on the same triples, clustered by sequence: triples of a sequence count as one observation.
  """

  loss: float  # L_MDM(rule)
  difference: float
  stderr: float
  interval: tuple[float, float]
  percent: float
  percent_stderr: float  # L_AO is uncertain too (delta method)
  percent_interval: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Gaps:
  ao: float  # L_AO
  ao_stderr: float
  mixture_size: int  # M
  rules: dict[str, Gap]  # random, sorted and mixture
  triples: int  # per sequence
  sequences: int


def evaluate(
    model: nn.Module, params: Any, batches: Iterable[tuple[np.ndarray, np.ndarray]], *, mesh: Mesh, mixture_size: int = 8,
    num_targets: int = 0, seed: int = 0, lanes: int = contexts.LANES, progress: Callable[[int], None] = lambda sequences: None,
) -> Gaps:
  """The gaps of a model on held-out sequences.

  The triples of a sequence have one sigma, and each k at most once.

  Args:
    model: a decoder or an encoder.
    params: its parameters, sharded over `mesh`.
    batches: this process's rows, as `loader.eval_batches` yields them: tokens int32 [b, T] and lengths int32 [b], how many tokens
      of a row are text.
    mesh: from `sharding.make_mesh`.
    mixture_size: M of `mixture`, at least 2.
    num_targets: triples of each sequence, with k drawn without replacement; 0: one for every k.
    seed: of all that is drawn; see `draws.draw`.
    lanes: see `contexts.nll`; memory for speed.
    progress: called with the number of sequences scored so far.

  Raises:
    ValueError: no sequences, sequences that do not fill their row, or numbers out of range.
  """
  if mixture_size < 2 or num_targets < 0:
    raise ValueError(f"mixture_size is {mixture_size} and num_targets is {num_targets}; they must be at least 2 and 0.")
  own, permuted, ascending = [], [], []
  for d in draws.draw(model, params, batches, mesh=mesh, num_visits=mixture_size - 1, num_targets=num_targets, seed=seed):
    if d.lengths.min() < d.tokens.shape[1]:
      raise ValueError(f"a sequence has {d.lengths.min()} tokens; the gap is of whole blocks of {d.tokens.shape[1]}.")
    natural = np.broadcast_to(np.arange(d.tokens.shape[1], dtype=d.visits.dtype), (len(d.tokens), 1, d.tokens.shape[1]))
    d = dataclasses.replace(d, visits=np.concatenate([d.visits, natural], axis=1))
    nll = draws.score(model, params, d, mesh=mesh, lanes=lanes)
    own.append(np.take_along_axis(d.nll, d.targets, axis=1))
    permuted.append(nll[..., :-1])
    ascending.append(nll[..., -1])
    progress(sum(map(len, own)))
  return gaps(*map(np.concatenate, (own, permuted, ascending)))


def gaps(own: np.ndarray, permuted: np.ndarray, ascending: np.ndarray) -> Gaps:
  """The gaps of any model from its nats on K triples of each of B sequences.

  Args:
    own: [B, K], the context in its own order.
    permuted: [B, K, M - 1], in uniformly random orders, all of which estimate `random`.
    ascending: [B, K], from left to right.
  """
  own, permuted = np.asarray(own, np.float64), np.asarray(permuted, np.float64)
  rules = {"random": permuted.mean(axis=2), "sorted": np.asarray(ascending, np.float64),
           "mixture": likelihood.nll_of_mean(np.concatenate([own[..., None], permuted], axis=2))}
  ao, sequences = own.mean(axis=1), len(own)
  return Gaps(ao=float(ao.mean()), ao_stderr=_stderr(ao), mixture_size=permuted.shape[2] + 1,
              rules={name: _gap(ao, loss.mean(axis=1)) for name, loss in rules.items()},
              triples=own.shape[1], sequences=sequences)


def _gap(ao: np.ndarray, loss: np.ndarray) -> Gap:
  """From the mean over the triples of each sequence, [B]."""
  differences = loss - ao
  difference, stderr = float(differences.mean()), _stderr(differences)
  ratio = difference / float(ao.mean())
  percent, percent_stderr = 100 * ratio, 100 * _stderr(differences - ratio * ao) / float(ao.mean())
  interval = lambda value, error: (value - 1.96 * error, value + 1.96 * error)
  return Gap(loss=float(loss.mean()), difference=difference, stderr=stderr, interval=interval(difference, stderr),
             percent=percent, percent_stderr=percent_stderr, percent_interval=interval(percent, percent_stderr))


def _stderr(x: np.ndarray) -> float:
  return float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else math.nan


def all_orders(length: int) -> np.ndarray:
  """int32 [n!, n], every order of n positions, the natural one first.

  Raises:
    ValueError: n is above MOST_ENUMERATED.
  """
  if length > MOST_ENUMERATED:
    raise ValueError(f"{length} tokens have too many orders to enumerate; give sequences of at most {MOST_ENUMERATED}.")
  return np.array(list(itertools.permutations(range(length))), np.int32).reshape(-1, length)


def over_all_orders(
    function: Callable[[np.ndarray, np.ndarray], np.ndarray], tokens: np.ndarray, batch_size: int = 4096
) -> np.ndarray:
  """What a function says about sequences in each of their orders.

  Args:
    function: of tokens and orders, int32 [R, n] both, to [R, n, ...]: for each entry of an order, for example its NLL.
    tokens: int [B, n], n <= MOST_ENUMERATED.
    batch_size: R, at most; it is the same at every call.

  Returns:
    [B, n!, n, ...], in the order of `all_orders`.

  Raises:
    ValueError: n is above MOST_ENUMERATED.
  """
  every = all_orders(np.shape(tokens)[1])
  rows = np.repeat(np.asarray(tokens, np.int32), len(every), axis=0)
  orders = np.tile(every, (len(tokens), 1))
  size = min(batch_size, len(rows))
  out = []
  for start in range(0, len(rows), size):
    index = np.minimum(np.arange(start, start + size), len(rows) - 1)  # the last row again, where the last call is not full
    out.append(np.asarray(function(rows[index], orders[index]))[: len(rows) - start])
  out = np.concatenate(out)
  return out.reshape(len(tokens), len(every), *out.shape[1:])


@dataclasses.dataclass(frozen=True)
class Exact:
  """The losses of each sequence over all of its triples, in nats per token; float64 [B]."""

  ao: np.ndarray
  random: np.ndarray
  sorted: np.ndarray
  mixture: np.ndarray


def exact(nll: np.ndarray, mixture_size: int = 8) -> Exact:
  """The losses by enumeration.

  Args:
    nll: [B, n!, n], nats of every entry of every order, from `over_all_orders`.
    mixture_size: M.
  """
  nll = np.asarray(nll, np.float64)
  length = nll.shape[2]
  losses = {"random": [], "sorted": [], "mixture": []}
  every = all_orders(length)
  for k in range(length):
    for members in _conditionals(every, k):
      values = nll[:, members, k]  # [B, orders of the context, each as often as there are orders of what is not in it]
      # all_orders is lexicographic: a context that ascends comes first.
      losses["random"].append(values.mean(axis=1))
      losses["sorted"].append(values[:, 0])
      losses["mixture"].append(_mean_nll_of_mean(values, mixture_size))
    for name, loss in losses.items():  # from one per conditional to their mean: all those of a k are equally likely
      losses[name] = [*loss[:k], np.mean(loss[k:], axis=0)]
  return Exact(ao=nll.mean(axis=(1, 2)), **{name: np.mean(loss, axis=0) for name, loss in losses.items()})


def _conditionals(every: np.ndarray, k: int) -> list[np.ndarray]:
  """For each set of k positions and target outside of it, which orders have that target right after that set; ascending."""
  key = (1 << every[:, :k]).sum(axis=1) * every.shape[1] + every[:, k]
  return [np.flatnonzero(key == value) for value in np.unique(key)]


def _mean_nll_of_mean(nll: np.ndarray, size: int) -> np.ndarray:
  """E[-log of the mean of M probabilities], each drawn from those of nll [B, G] with equal chances, in nats [B].

  G**M draws are too many to enumerate. With r the probabilities over their mean and S the mean of M of them,
  E log S = integral over s > 0 of (exp(-s) - (E exp(-s r / M))**M) ds / s (Frullani). In u = log s the integrand is smooth and
  dies off on both sides, where the trapezoidal rule is exact to the last digits.
  """
  mean = likelihood.nll_of_mean(nll)
  ratios = np.exp(mean[:, None] - nll)
  total, step = np.zeros(len(nll)), 0.125
  for u in np.arange(-20.0, np.log(50.0 / ratios.min()), step):
    s = np.exp(u)
    total += np.exp(-s) - np.exp(-s / size * ratios).mean(axis=1) ** size
  return mean - total * step


def distinct_conditionals(log_probs: np.ndarray, atol: float = 1e-5) -> int:
  """How many different conditionals p(x_j | x_E) a model has for one sequence (the paper's finding 4).

  A model that reads its context as a set has n * 2**(n-1), one for each set E and j; one that reads it as a sequence has
  sum over k = 1..n of n! / (n-k)!. For n = 4: 32 and 64.

  Args:
    log_probs: [n!, n, V], log p of every token at each entry of every order, from `over_all_orders`.
    atol: log-probabilities that differ by less are equal, in nats.
  """
  every, count = all_orders(log_probs.shape[1]), 0
  for k in range(every.shape[1]):
    for members in _conditionals(every, k):
      rest = log_probs[members, k]
      while len(rest):
        rest = rest[np.abs(rest - rest[0]).max(axis=1) > atol]
        count += 1
  return count
