"""Cached decoding along a plan: several tokens a forward pass, in any order, in one jitted loop.

The tokens of a step are predicted in parallel. Each is asked for by a query: the last known entry, told another target; it sees the
cache and itself, not the other queries. The first of them is a true entry of the sequence, and the only one that is cached. In the next
step the tokens just drawn enter the cache as true entries, each told the position of its successor in the order, in the same forward pass
as the next queries. So a whole sequence costs its known entries and at most two entries for each unknown token.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from aogpt_jax.sampling import filters as filters_lib
from aogpt_jax.sampling import plan as plan_lib


@dataclasses.dataclass(frozen=True)
class Samples:
  """What was drawn; all by position, in natural order.

  Attributes:
    tokens: int32 [B, L].
    log_probs: float32 [B, L], log p(token | tokens before it) of the model without filters, in nats; 0 for given tokens.
    steps: int32 [B, L], the step in which a token was drawn, from 1; 0 for given tokens.
    evaluations: forward passes that drew tokens; the one over the given tokens is not counted.
  """

  tokens: jax.Array
  log_probs: jax.Array
  steps: np.ndarray
  evaluations: int


def sample(
    model: nn.Module, params: Any, plan: plan_lib.Plan, tokens: np.ndarray, keys: jax.Array, filters: filters_lib.Filters
) -> Samples:
  """Draws the unknown tokens of a batch along a plan.

  A sample depends on its own key, order and counts, not on the batch that it is drawn in. One program is compiled per batch size,
  length, number of steps, largest group and number of known tokens, the last two rounded up to powers of two.

  Args:
    model: a decoder.
    params: its parameters.
    plan: from `plan.make_plan`, of length L <= T.
    tokens: int [B, L], the given tokens at their positions; ignored elsewhere.
    keys: [B], one key for each sample.
    filters: what is drawn from.

  Raises:
    ValueError: the plan is longer than the model's blocks, or the arguments do not fit each other.
  """
  batch, length = plan.orders.shape
  if length > model.block_size:
    raise ValueError(f"length is {length}; the model's blocks have {model.block_size} tokens.")
  if filters.vocab_size > model.vocab_size:
    raise ValueError(f"vocab_size is {filters.vocab_size}; the model has {model.vocab_size} rows.")
  if np.shape(tokens) != (batch, length) or np.shape(keys) != (batch,):
    raise ValueError(f"tokens {np.shape(tokens)} and keys {np.shape(keys)} must be [{batch}, {length}] and [{batch}].")
  orders = jnp.asarray(plan.orders)
  width = _power_of_two(int(plan.counts.max(initial=1)))
  counts = np.zeros((max(_power_of_two(plan.evaluations), 1), batch), np.int32)
  counts[: plan.evaluations] = plan.counts
  drawn, log_probs = _sample(
      model, width, _power_of_two(int(plan.known.max())), filters, params, orders, jnp.asarray(plan.known),
      jnp.asarray(counts), plan.evaluations, jnp.asarray(tokens, jnp.int32), keys)
  steps = np.zeros((batch, length), np.int32)
  for start, count, step in zip(plan.starts, plan.counts, plan.steps):
    for b in np.flatnonzero(count):
      steps[b, plan.orders[b, start[b] : start[b] + count[b]]] = step
  return Samples(drawn, log_probs, steps, plan.evaluations)


def decode_logits(
    model: nn.Module, params: Any, tokens: jax.Array, orders: jax.Array, groups: Sequence[int]
) -> jax.Array:
  """Teacher-forced cached decoding: the logits that `sample` would draw from, if it drew the true tokens.

  Args:
    model: a decoder.
    params: its parameters.
    tokens: int [B, N], the true tokens in natural order.
    orders: int [B, S], S <= N <= T.
    groups: how many tokens each forward pass reveals; they sum to S.

  Returns:
    float32 [B, S, V] in generation order. With groups of 1 these are the logits of the full forward pass; with larger ones, entry i
    of a group that starts at l does not see the tokens from l on.

  Raises:
    ValueError: groups that do not sum to S.
  """
  groups = tuple(int(g) for g in groups)
  if min(groups, default=0) < 1 or sum(groups) != orders.shape[1]:
    raise ValueError(f"groups {groups} must be at least 1 each and sum to the {orders.shape[1]} entries of orders.")
  return _decode_logits(model, groups, params, jnp.asarray(tokens, jnp.int32), jnp.asarray(orders, jnp.int32))


@functools.partial(jax.jit, static_argnames=("model", "groups"))
def _decode_logits(model, groups, params, tokens, orders):
  batch, length = orders.shape
  width = max(groups)
  forced = jnp.take_along_axis(tokens, orders, axis=1)
  counts = jnp.asarray(groups, jnp.int32)
  starts = jnp.cumsum(counts) - counts

  def step(carry, group):
    logits, previous, cache = carry
    each = tuple(jnp.full(batch, x) for x in group)
    out, cache = _forward(model, params, orders, forced, cache, previous, each, width)
    # What lies past the group is overwritten by the next.
    logits = jax.lax.dynamic_update_slice_in_dim(logits, out, group[0], axis=1)
    return (logits, each, cache), None

  logits = jnp.zeros((batch, length + width, model.vocab_size), jnp.float32)
  nothing = (jnp.zeros(batch, jnp.int32),) * 2
  (logits, _, _), _ = jax.lax.scan(step, (logits, nothing, model.init_cache(batch, length)), (starts, counts))
  return logits[:, :length]


@functools.partial(jax.jit, static_argnames=("model", "width", "prefill", "filters"))
def _sample(model, width, prefill, filters, params, orders, known, counts, evaluations, tokens, keys):
  batch, length = orders.shape
  given = jnp.arange(length) < known[:, None]
  drawn = jnp.where(given, jnp.take_along_axis(tokens, orders, axis=1), 0)
  cache = model.init_cache(batch, length)
  if prefill:
    cache = _prefill(model, params, orders, drawn, cache, known, min(prefill, length))

  def step(carry):
    k, start, previous, drawn, log_probs, cache = carry
    group = (start, counts[k])
    logits, cache = _forward(model, params, orders, drawn, cache, previous, group, width)
    places = start[:, None] + jnp.arange(width)
    # A token's noise comes from its place in the order: neither the step nor the batch has a say in it.
    place_keys = jax.vmap(lambda key, row: jax.vmap(lambda i: jax.random.fold_in(key, i))(row))(keys, places)
    new = filters_lib.draw(place_keys, filters(logits))
    vocabulary = jnp.where(jnp.arange(logits.shape[-1]) < filters.vocab_size, logits, -jnp.inf)
    new_log_probs = jnp.take_along_axis(jax.nn.log_softmax(vocabulary), new[..., None], axis=-1)[..., 0]
    places = jnp.where(jnp.arange(width) < group[1][:, None], places, length)
    rows = jnp.arange(batch)[:, None]
    drawn = drawn.at[rows, places].set(new, mode="drop")
    log_probs = log_probs.at[rows, places].set(new_log_probs, mode="drop")
    return k + 1, start + counts[k], group, drawn, log_probs, cache

  nothing = (known, jnp.zeros_like(known))
  start = (0, known, nothing, drawn, jnp.zeros((batch, length), jnp.float32), cache)
  *_, drawn, log_probs, _ = jax.lax.while_loop(lambda carry: carry[0] < evaluations, step, start)
  by_position = lambda x: jnp.zeros_like(x).at[jnp.arange(batch)[:, None], orders].set(x)
  return by_position(drawn), by_position(log_probs)


def _prefill(model, params, orders, drawn, cache, known, width):
  """The cache with the entries that hold the given tokens but the last, which is the first query: one pass, causal."""
  index = jnp.broadcast_to(jnp.arange(width), (orders.shape[0], width))
  write = jnp.where(index < known[:, None], index, orders.shape[1])
  _, cache = _extend(model, params, orders, drawn, cache, index, index, write, queries=1)
  return cache


def _forward(model, params, orders, drawn, cache, previous, group, width):
  """One forward pass: fills the cache with the previous group's tokens and asks for the next group's logits.

  Args:
    previous: int [B] each, where the previous group started and how many tokens it had.
    group: the same of this one, `previous` start + count being its start.
    width: the largest group.

  Returns:
    float32 [B, width, V], of which the first `count` of each sample count, and the new cache.
  """
  length = orders.shape[1]
  (previous_start, previous_count), (start, _) = previous, group
  # The last token of the previous group is held by the first query.
  fill = previous_start[:, None] + 1 + jnp.arange(width - 1)
  fill_write = jnp.where(jnp.arange(width - 1) < previous_count[:, None] - 1, fill, length)
  query = jnp.broadcast_to(start[:, None], (len(start), width))
  query_write = jnp.where(jnp.arange(width) == 0, query, length)
  held = jnp.concatenate([fill, query], axis=1)
  targets = jnp.concatenate([fill, query + jnp.arange(width)], axis=1)
  write = jnp.concatenate([fill_write, query_write], axis=1)
  return _extend(model, params, orders, drawn, cache, held, targets, write, queries=width)


def _extend(model, params, orders, drawn, cache, held, targets, write, queries):
  """Runs the entries that hold what is known after `held` steps and are told the target of step `targets`, both int [B, S]."""
  # Entries past the end are padding: they are written nowhere, and nobody reads their logits.
  at = lambda x, index: jnp.take_along_axis(x, jnp.clip(index, 0, orders.shape[1] - 1), axis=1)
  slots = jnp.where(held == 0, 0, at(orders, held - 1) + 1)
  return model.apply({"params": params}, at(drawn, held - 1), slots, at(orders, targets), cache, write, held, queries,
                     method="extend")


def _power_of_two(n: int) -> int:
  """The smallest power of two that is at least n; 0 for 0."""
  return 1 << (n - 1).bit_length() if n else 0
