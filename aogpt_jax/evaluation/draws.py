"""Held-out sequences with what is drawn for them: an order, some of its targets, other orders of the targets' contexts.

Everything a sequence gets depends on the seed and its index alone, not on the batch size or the number of devices.
"""

from collections.abc import Iterable, Iterator
import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from aogpt_jax import objectives
from aogpt_jax import orders
from aogpt_jax import sharding
from aogpt_jax.evaluation import contexts

# Orders of contexts that are held on the host at once: their number times T.
_HELD_PLACES = 1 << 26


@dataclasses.dataclass(frozen=True)
class Drawn:
  """B sequences with what was drawn for them; on the host, the same on every process."""

  tokens: np.ndarray  # int32 [B, T]
  orders: np.ndarray  # int32 [B, T], sigma
  nll: np.ndarray  # float64 [B, T], nats of sigma(i) after sigma(<i)
  lengths: np.ndarray  # int [B], tokens of each sequence; what is past its end comes last in sigma, and is not to be counted
  targets: np.ndarray  # int [B, I], places i, ascending; those past the length, where a sequence has fewer, are not to be counted
  visits: np.ndarray  # int32 [B, R, T], uniform permutations, independent of each other and of sigma


def draw(
    model: nn.Module, params: Any, batches: Iterable[tuple[np.ndarray, np.ndarray]], *, mesh: Mesh, num_visits: int,
    num_targets: int, spec: str = "uniform", seed: int = 0,
) -> Iterator[Drawn]:
  """What is drawn for each batch, whose padding is left out.

  Args:
    model: a decoder or an encoder.
    params: its parameters, sharded over `mesh`.
    batches: this process's rows, as `loader.eval_batches` yields them: tokens int32 [b, T] and lengths int32 [b], how many tokens
      of a row are text.
    mesh: from `sharding.make_mesh`.
    num_visits: R, permutations of each sequence.
    num_targets: I, of each sequence, drawn without replacement; 0: all.
    spec: distribution of sigma, see `orders.parse`; it is the first order that the likelihood under it draws for this seed.
    seed: of all draws.

  Raises:
    ValueError: there are no sequences, or fewer targets than asked for, or the distribution changes over training.
  """
  orders.check_constant(spec)
  first_row, there_are_some = 0, False
  for tokens, lengths in batches:
    length = tokens.shape[1]
    if num_targets > length:
      raise ValueError(f"num_targets is {num_targets}, and sequences have {length}; give at most that, or 0 for all.")
    row = jax.device_put(np.int32(first_row), sharding.replicated(mesh))
    arrays = (sharding.place_batch(mesh, np.asarray(x, np.int32)) for x in (tokens, lengths))
    tokens, lengths, sigma, nll, visits, lots = jax.device_get(_draw(model, mesh, num_visits, spec, seed, params, *arrays, row))
    keep = lengths > 0
    targets = np.sort(lots[:, : num_targets or length], axis=1)
    first_row += len(lengths)
    if keep.any():
      there_are_some = True
      yield Drawn(tokens[keep], sigma[keep], nll[keep].astype(np.float64), lengths[keep], targets[keep],
                  visits.swapaxes(0, 1)[keep])
  if not there_are_some:
    raise ValueError("there is nothing to evaluate: the split has no sequences.")


@functools.partial(jax.jit, static_argnames=("model", "mesh", "num_visits", "spec", "seed"))
def _draw(model, mesh, num_visits, spec, seed, params, tokens, lengths, first_row):
  batch, length = tokens.shape
  key = orders.root_key(seed)
  rows = jax.lax.with_sharding_constraint(first_row + jnp.arange(batch), sharding.batch_sharding(mesh))
  sigma = orders.within(orders.draw(spec, key, 0, rows, length), lengths)
  uniform = lambda key, n: orders.draw("uniform", key, n, rows, length)
  lots = orders.within(uniform(jax.random.fold_in(key, 1 << 30), 0), lengths)
  visit_key = jax.random.fold_in(key, (1 << 30) + 1)
  visits = jax.lax.map(lambda m: uniform(visit_key, m), jnp.arange(num_visits))
  with sharding.on_mesh(mesh):
    nll = objectives.any_order_nll(model, params, tokens, sigma)
  return jax.lax.with_sharding_constraint((tokens, lengths, sigma, nll, visits, lots), sharding.replicated(mesh))


def score(model: nn.Module, params: Any, drawn: Drawn, *, mesh: Mesh, lanes: int) -> np.ndarray:
  """Nats of the targets with their contexts in the order of each of `visits`, float64 [B, I, R]; a few sequences at a time."""
  batch, visits, length = drawn.visits.shape
  count = drawn.targets.shape[1]
  out = np.zeros((batch, count, visits))
  if out.size:
    rows = max(_HELD_PLACES // (count * visits * length), 1)
    columns = max(_HELD_PLACES // (count * rows * length), 1)
    for b in range(0, batch, rows):
      for m in range(0, visits, columns):
        part, some = slice(b, b + rows), slice(m, m + columns)
        targets = drawn.targets[part]
        permuted = contexts.in_order_of(drawn.orders[part], targets, drawn.visits[part, some])
        out[part, :, some] = contexts.nll(model, params, drawn.tokens[part], targets, permuted, mesh=mesh, lanes=lanes)
  return out
