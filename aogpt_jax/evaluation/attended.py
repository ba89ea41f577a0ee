"""How much the queries of a decoder attend to what they see: by age in the order, and by distance in the text.

Entry i of an order sees the entries 0..i, and predicts the token at orders[i]. Entry 0 is the start; entry j > 0 holds the token
at orders[j-1], and its age to the query of entry i is i - j: 0 is the token that has just become known.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from aogpt_jax import attention
from aogpt_jax import orders as orders_lib
from aogpt_jax.models import layers


@dataclasses.dataclass(frozen=True)
class Attended:
  """Attention weights, means over the heads, the sequences and the queries; those of a query add up to 1.

  Attributes:
    by_age: [L, T-1], the weight of the entry of each age, over the queries that have one.
    even_by_age: [T-1], what it would be if attention were spread evenly over all that a query sees.
    by_distance: [L, T-1], the weight of an entry whose token is 1, 2, ... positions from the target in the text; nan where there
      is none.
    even_by_distance: [T-1], likewise.
    start: [L], the weight of the start entry.
    even_start: float, likewise.
    sequences: of which these are the means.
  """

  by_age: np.ndarray
  even_by_age: np.ndarray
  by_distance: np.ndarray
  even_by_distance: np.ndarray
  start: np.ndarray
  even_start: float
  sequences: int


def evaluate(
    model: nn.Module, params: Any, tokens: np.ndarray, spec: str, *, seed: int = 0,
    progress: Callable[[int], None] = lambda sequences: None,
) -> Attended:
  """The attention of a decoder on sequences in an order of a distribution, one sequence after another.

  Args:
    model: a decoder.
    params: its parameters, on one device.
    tokens: int [N, T].
    spec: see `orders.parse`.
    seed: of the orders.
    progress: called with the number of sequences that are done.

  Raises:
    ValueError: a sequence of fewer than two tokens.
  """
  count, length = tokens.shape
  if length < 2:
    raise ValueError(f"sequences of {length} token have no context to attend to; give two or more.")
  drawn = orders_lib.draw(spec, orders_lib.root_key(seed), 0, jnp.arange(count), length)
  totals = None
  for row in range(count):
    found = jax.device_get(_sums(model, params, jnp.asarray(tokens[row : row + 1], jnp.int32), drawn[row : row + 1]))
    found = jax.tree.map(lambda x: np.asarray(x, np.float64), found)
    totals = found if totals is None else jax.tree.map(np.add, totals, found)
    progress(row + 1)
  (age, distance, start), (age_even, distance_even, start_even), (age_pairs, distance_pairs) = totals
  queries = count * length
  with np.errstate(invalid="ignore"):  # a distance that no pair has
    return Attended(
        by_age=age / age_pairs, even_by_age=age_even / age_pairs, by_distance=distance / distance_pairs,
        even_by_distance=distance_even / distance_pairs, start=start / queries, even_start=float(start_even / queries),
        sequences=count)


@functools.partial(jax.jit, static_argnums=0)
def _sums(model: nn.Module, params: Any, tokens_1T: jax.Array, orders_1T: jax.Array):
  """Weights of a sequence summed over its pairs of query and entry: of each layer, of an even spread, and the number of pairs."""
  projected = lambda module, method: isinstance(module, layers.Attention) and method == "_project"
  _, state = model.apply({"params": params}, tokens_1T, orders_1T, capture_intermediates=projected, mutable=["intermediates"])
  (q, k, _), = state["intermediates"]["blocks"]["attention"]["_project"]  # [L, 1, T, H, K]
  order_T = orders_1T[0]
  length = order_T.shape[0]
  index = jnp.arange(length)
  seen = index[:, None] >= index  # [queries, entries]
  is_token = seen & (index > 0)
  # What is not counted goes to a bin of its own, the last one, which is dropped.
  age = jnp.where(is_token, index[:, None] - index, length - 1)
  held = jnp.roll(order_T, 1)
  distance = jnp.where(is_token, jnp.abs(order_T[:, None] - held) - 1, length - 1)

  def sums(weights_TT):
    by = lambda bins: jnp.zeros(length).at[bins].add(weights_TT)[:-1]
    return by(age), by(distance), weights_TT[:, 0].sum()

  def of_layer(qk):
    q_THK, k_THK = (x[0] for x in qk)
    return sums(attention.weights(q_THK[None], k_THK[None], attention.causal_mask(length))[0].mean(axis=0))

  even = jnp.where(seen, 1 / (index[:, None] + 1), 0.0)
  return jax.lax.map(of_layer, (q, k)), sums(even), sums(seen.astype(jnp.float32))[:2]
