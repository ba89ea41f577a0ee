"""Burst sampling of sigma-GPT (Pannatier et al., arXiv 2404.09562): several tokens at once, not quite from the model's distribution.

In each round, all open positions are drafted in parallel, as if they were independent. Several random orders of them are checked,
each in one causal pass over the draft; in each, tokens are accepted from the left with probability min(1, q / p), p being what a token
was drafted from and q what it would have been drawn from in that order. The order in which most are accepted is taken, with those
tokens, and the rest is drafted anew. The first token of an order has q = p and is always accepted, so that each round draws at least
one.

It is not exact. A token that is not accepted is not drawn anew from what the draft missed, and the order is chosen by what was
accepted: tokens that agree with the draft come out too often. `speculative` has neither fault. It is here for comparison.
"""

from collections.abc import Iterator
import functools
from typing import Any

import flax
from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from aogpt_jax import sharding
from aogpt_jax.sampling import entries
from aogpt_jax.sampling import filters as filters_lib
from aogpt_jax.sampling import plan as plan_lib

# What noise is for. Rounds are told apart by the number of tokens known, which grows.
_DRAFT, _ORDER, _ACCEPT = range(3)


@flax.struct.dataclass
class _State:
  """What a round goes on from, by place: the first `known` places of a sample have their tokens."""

  rounds: jax.Array  # int32 []
  known: jax.Array  # int32 [B]
  evaluations: jax.Array  # int32 [B]
  orders: jax.Array  # int32 [B, L]
  drawn: jax.Array  # int32 [B, L]
  log_probs: jax.Array  # float32 [B, L]
  steps: jax.Array  # int32 [B, L], the round from 1
  cache: Any


def sample(
    model: nn.Module, params: Any, plan: plan_lib.Plan, tokens: np.ndarray, keys: jax.Array, filters: filters_lib.Filters, *,
    checks: int = 4, mesh: Mesh | None = None,
) -> entries.Samples:
  """Draws the unknown tokens of a batch in bursts; see above for what that does to their distribution.

  A sample depends on its own key, not on the batch that it is drawn in. One program is compiled for each batch size, length and
  number of checks, beside that for the given tokens.

  Args:
    model: a decoder.
    params: its parameters.
    plan: from `plan.make_plan`, of length L <= T: which tokens to draw. Its order of them, and how many in each step, has no effect.
    tokens: int [B, L], the given tokens at their positions; ignored elsewhere.
    keys: [B], one key for each sample.
    filters: what is drawn from; they apply to p and q alike.
    checks: random orders that are checked in a round.
    mesh: splits the samples, any number of them, over its data and fsdp axes; the parameters must be on it. None: their own.

  Returns:
    Samples with the orders that were taken, whose steps are rounds from 1. A round is two evaluations, the draft and the check of all
    orders, which could run side by side; where one token is open it is one, the draft.

  Raises:
    ValueError: the model is an encoder, the plan is longer than its blocks, or the arguments do not fit each other.
  """
  *_, last = stream(model, params, plan, tokens, keys, filters, checks=checks, mesh=mesh)
  return last


def stream(
    model: nn.Module, params: Any, plan: plan_lib.Plan, tokens: np.ndarray, keys: jax.Array, filters: filters_lib.Filters, *,
    checks: int = 4, mesh: Mesh | None = None, parts: int = 1,
) -> Iterator[entries.Samples]:
  """`sample`, which yields what there is up to `parts` times on the way; the last is the whole."""
  entries.check_decoder(model, "burst")
  entries.check(model, plan, tokens, keys, filters, checks=checks, parts=parts)
  return _stream(model, params, plan, np.asarray(tokens), keys, filters, checks, mesh, parts)


def _stream(model, params, plan, tokens, keys, filters, checks, mesh, parts):
  (batch, length), rows = plan.orders.shape, entries.Rows(mesh or sharding.mesh_of(params), len(plan.orders))
  prepared = entries.prepare_program(model, rows.mesh)(params)
  orders, drawn = (rows.put(x.astype(np.int32)) for x in (plan.orders, np.take_along_axis(tokens, plan.orders, axis=1)))
  cache = entries.prefill_program(model, rows.mesh)(entries.prefix_width(plan.known, length), 2 * length, prepared, orders, drawn)
  zeros = lambda dtype, *shape: rows.put(np.zeros((batch, *shape), dtype))
  state = _State(rounds=rows.everywhere(np.int32(0)), known=rows.put(plan.known), evaluations=zeros(np.int32), orders=orders,
                 drawn=drawn, log_probs=zeros(np.float32, length), steps=zeros(np.int32, length), cache=cache)
  most = int((plan.ends - plan.known).max(initial=0))
  arguments = prepared, rows.everywhere(filters), rows.put_keys(keys), rows.put(plan.ends)
  for part in range(1, parts + 1):
    state = _program(model, rows.mesh)(checks, *arguments, rows.everywhere(np.int32(-(-most * part // parts))), state)
    known, evaluations, orders, drawn, log_probs, steps = (rows.fetch(x) for x in (
        state.known, state.evaluations, state.orders, state.drawn, state.log_probs, state.steps))
    there = np.arange(length) < known[:, None]
    new = there & (np.arange(length) >= plan.known[:, None])
    by_position = functools.partial(entries.by_position, orders)
    yield entries.Samples(
        tokens=by_position(np.where(there, drawn, -1)), log_probs=by_position(np.where(new, log_probs, 0)),
        steps=by_position(np.where(new, steps, 0)), orders=orders, evaluations=int(evaluations.max()), evaluations_each=evaluations,
        passes=int(state.rounds) * (1 + checks))
    if (known == plan.ends).all():
      break


@functools.cache
def _program(model: nn.Module, mesh: Mesh) -> entries.Program:
  rows = sharding.batch_sharding(mesh)
  shardings = _State(rounds=sharding.replicated(mesh), known=rows, evaluations=rows, orders=rows, drawn=rows, log_probs=rows,
                     steps=rows, cache=sharding.heads_sharding(mesh, model.heads))
  return entries.Program(mesh, functools.partial(_burst, model), static_argnums=(0,), out_shardings=shardings,
                         donate_argnames="state")


def _burst(model, checks, prepared, filters, keys, ends, limit, state):
  """Runs rounds until all samples have their tokens, or there were `limit` rounds in all."""
  length = state.orders.shape[1]
  every = jnp.arange(length)
  uniform = jax.vmap(jax.vmap(jax.random.uniform))

  def one_round(state):
    start = state.known[:, None]
    is_open = (every >= start) & (every < ends[:, None])
    ask = functools.partial(entries.extend, model, prepared, cache=state.cache, write=state.known,
                            asked=jnp.broadcast_to(every, state.orders.shape))
    places = start + every
    # By place from `start` on, as entries are, and by place in the order.
    from_start = lambda x: jnp.take_along_axis(x, jnp.minimum(places, length - 1), axis=1)
    in_round = lambda purpose: entries.fold(keys, 3 * start + purpose)[:, 0]

    # The draft, by position: the orders that are checked differ.
    logits, _ = ask(state.orders, state.drawn, held=jnp.broadcast_to(start, places.shape), targets=places)
    logits = filters(entries.known_logits(logits, filters))
    tokens = filters_lib.draw(entries.fold(in_round(_DRAFT), from_start(state.orders)), logits)
    row = jnp.arange(len(places))[:, None]
    scatter = lambda x: jnp.zeros(state.orders.shape, x.dtype).at[
        row, jnp.where(places < length, from_start(state.orders), length)].set(x, mode="drop")
    draft, p = scatter(tokens), scatter(entries.log_probs_of(logits, tokens))

    def check(carry, number):
      best, orders, drawn, log_probs, cache = carry
      in_check = jax.vmap(jax.random.fold_in, (0, None))
      rank = jnp.where(is_open, uniform(entries.fold(in_check(in_round(_ORDER), number), state.orders)),
                       jnp.where(every < start, -1.0, 2.0))
      mine = jnp.take_along_axis(state.orders, jnp.argsort(rank, axis=1, stable=True), axis=1)
      filled = jnp.where(is_open, jnp.take_along_axis(draft, mine, axis=1), state.drawn)
      logits, extended = ask(mine, filled, held=places, targets=places)
      logits = entries.known_logits(logits, filters)
      new, positions = from_start(filled), from_start(mine)
      log_ratio = entries.log_probs_of(filters(logits), new) - jnp.take_along_axis(p, positions, axis=1)
      coins = uniform(entries.fold(in_check(in_round(_ACCEPT), number), positions))
      # The first is told what the draft was told.
      accepted = ((jnp.log(coins) < log_ratio) | (every == 0)) & (places < ends[:, None])
      count = jnp.cumprod(accepted.astype(jnp.int32), axis=1).sum(axis=1)
      better = count > best
      keep = lambda a, b: jnp.where(jnp.reshape(better, (-1,) + (1,) * (a.ndim - 1)), a, b)
      found = count, mine, filled, entries.log_probs_of(logits, new), extended
      return jax.tree.map(keep, found, (best, orders, drawn, log_probs, cache)), None

    nothing = jnp.zeros_like(state.known), state.orders, state.drawn, jnp.zeros(places.shape, jnp.float32), state.cache
    (count, orders, drawn, log_probs, cache), _ = jax.lax.scan(check, nothing, jnp.arange(checks))
    known = state.known + count
    fresh = (every >= start) & (every < known[:, None])
    log_probs = jnp.take_along_axis(log_probs, jnp.maximum(every - start, 0), axis=1)
    return _State(
        rounds=state.rounds + 1, known=known, evaluations=state.evaluations + jnp.minimum(ends - state.known, 2), orders=orders,
        drawn=drawn, log_probs=jnp.where(fresh, log_probs, state.log_probs),
        steps=jnp.where(fresh, state.rounds + 1, state.steps), cache=cache)

  return jax.lax.while_loop(lambda state: (state.known < ends).any() & (state.rounds < limit), one_round, state)
