"""Speculative decoding in any order: several tokens a forward pass, with exactly the distribution of one token a pass.

A model that predicts any position from any others drafts for itself (idea: Guo and Ermon, arXiv 2504.20456): it draws the next
tokens of the order in parallel, as if they were independent, and then checks them in one causal pass over the draft, whose entries
give what each token would have been drawn from. A token drawn from p is accepted with probability min(1, q / p), where q is that
distribution; the first that is not is drawn anew from the normalised positive part of q - p, and where all are accepted, one more is
drawn from q. What comes out has the distribution q (Leviathan et al., arXiv 2211.17192), with temperature and filters, which
apply to p and q alike.

The draft may come from anything that is known before it is drawn, so that each pass can do both: it checks a draft, and asks for the
next one. With n tokens known and m drafted, m <= w, a pass runs

* the entries n..n+w, which hold the last known token and the draft: they give q, and those up to the first token that is not accepted
  stay in the cache;
* w queries behind the last known token, for the places n+1..n+w: a draft for the case that not all are accepted, which does not
  see the tokens that are;
* w queries behind the whole draft, for the places n+m+1..n+m+w: the draft where all are accepted.

Each pass makes at least one token known, so that there are never more of them than tokens to draw.
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

# A token's noise comes from its place in the order and from what it is for. A draft that no token known depends on is drawn
# again with the same noise, which changes no distribution.
_DRAFT, _ACCEPT, _REDRAW = range(3)


@flax.struct.dataclass
class _State:
  """What a pass goes on from; the first `known` places of a sample have their tokens, the next `drafted` a draft."""

  passes: jax.Array  # int32 []
  known: jax.Array  # int32 [B]
  drafted: jax.Array  # int32 [B]
  drafts: jax.Array  # float32 [B, w, V], what the draft was drawn from
  drawn: jax.Array  # int32 [B, L + w], by place
  log_probs: jax.Array  # float32 [B, L + w + 1], by place
  steps: jax.Array  # int32 [B, L + w + 1], by place, the pass from 1
  cache: Any


def sample(
    model: nn.Module, params: Any, plan: plan_lib.Plan, tokens: np.ndarray, keys: jax.Array, filters: filters_lib.Filters, *,
    window: int = 4, mesh: Mesh | None = None,
) -> entries.Samples:
  """Draws the unknown tokens of a batch, with the distribution of one token a step in the plan's orders.

  A sample depends on its own key and order, not on the batch that it is drawn in. One program is compiled for each batch size,
  length and window, beside that for the given tokens.

  Args:
    model: a decoder.
    params: its parameters.
    plan: from `plan.make_plan`, of length L <= T: which tokens to draw, and in which order. How many in each step has no effect.
    tokens: int [B, L], the given tokens at their positions; ignored elsewhere.
    keys: [B], one key for each sample.
    filters: what is drawn from.
    window: w, tokens drafted at once.
    mesh: splits the samples, any number of them, over its data and fsdp axes; the parameters must be on it. None: their own.

  Returns:
    Samples whose steps are the forward passes, from 1, in which tokens became known.

  Raises:
    ValueError: the model is an encoder, the plan is longer than its blocks, or the arguments do not fit each other.
  """
  *_, last = stream(model, params, plan, tokens, keys, filters, window=window, mesh=mesh)
  return last


def stream(
    model: nn.Module, params: Any, plan: plan_lib.Plan, tokens: np.ndarray, keys: jax.Array, filters: filters_lib.Filters, *,
    window: int = 4, mesh: Mesh | None = None, parts: int = 1,
) -> Iterator[entries.Samples]:
  """`sample`, which yields what there is up to `parts` times on the way; the last is the whole."""
  entries.check_decoder(model, "speculative")
  entries.check(model, plan, tokens, keys, filters, window=window, parts=parts)
  return _stream(model, params, plan, np.asarray(tokens), keys, filters, window, mesh, parts)


def _stream(model, params, plan, tokens, keys, filters, window, mesh, parts):
  (batch, length), rows = plan.orders.shape, entries.Rows(mesh or sharding.mesh_of(params), len(plan.orders))
  drawn, ends = np.take_along_axis(tokens, plan.orders, axis=1).astype(np.int32), plan.ends
  zeros = lambda dtype: rows.put(np.zeros((batch, length + window + 1), dtype))
  prepared = entries.prepare_program(model, rows.mesh)(params)
  orders, width = rows.put(plan.orders), 3 * window + 1
  first = rows.put(np.pad(drawn, ((0, 0), (0, window))))
  cache = entries.prefill_program(model, rows.mesh)(
      entries.prefix_width(plan.known, length), length + width, prepared, orders, first)
  known, nothing = rows.put(plan.known), rows.put(np.zeros(batch, np.int32))
  state = _State(passes=rows.everywhere(np.int32(0)), known=known, drafted=nothing,
                 drafts=rows.put(np.zeros((batch, window, model.vocab_size), np.float32)), drawn=first,
                 log_probs=zeros(np.float32), steps=zeros(np.int32), cache=cache)
  most = int((ends - plan.known).max(initial=0))
  arguments = prepared, rows.everywhere(filters), rows.put_keys(keys), orders, rows.put(ends)
  for part in range(1, parts + 1):
    state = _program(model, rows.mesh)(*arguments, rows.everywhere(np.int32(-(-most * part // parts))), state)
    known = rows.fetch(state.known)
    there = np.arange(length) < known[:, None]
    there_drawn = there & (np.arange(length) >= plan.known[:, None])
    by_place = [rows.fetch(x)[:, :length] for x in (state.drawn, state.log_probs, state.steps)]
    shown = (there, -1), (there_drawn, 0), (there_drawn, 0)
    columns = [entries.by_position(plan.orders, np.where(where, x, other)) for x, (where, other) in zip(by_place, shown)]
    passes = int(state.passes)
    yield entries.Samples(*columns, orders=plan.orders, evaluations=passes, evaluations_each=columns[2].max(axis=1, initial=0),
                          passes=passes)
    if (known == ends).all():
      break


@functools.cache
def _program(model: nn.Module, mesh: Mesh) -> entries.Program:
  rows, whole = sharding.batch_sharding(mesh), sharding.replicated(mesh)
  shardings = _State(passes=whole, known=rows, drafted=rows, drafts=rows, drawn=rows, log_probs=rows, steps=rows,
                     cache=sharding.heads_sharding(mesh, model.heads))
  return entries.Program(mesh, functools.partial(_speculate, model), out_shardings=shardings, donate_argnames="state")


def _speculate(model, prepared, filters, keys, orders, ends, limit, state):
  """Runs passes until all samples have their tokens, or there were `limit` passes in all."""
  window = state.drafts.shape[1]
  ahead, row = jnp.arange(window + 1), jnp.arange(len(orders))
  # A key for each place, sample by sample, and what it is for.
  noise = lambda places, purpose: entries.fold(keys, 3 * places + purpose)

  def one_pass(state):
    start, drafted = state.known[:, None], state.drafted[:, None]
    after = jnp.arange(1, window + 1)
    held = [start + ahead, start + 0 * after, start + drafted + 0 * after]
    targets = [start + ahead, start + after, start + drafted + after]
    held, targets = (jnp.concatenate(x, axis=1) for x in (held, targets))
    asked = jnp.broadcast_to(jnp.arange(held.shape[1]), held.shape)
    logits, cache = entries.extend(model, prepared, orders, state.drawn, state.cache, held, targets, state.known, asked)
    logits = entries.known_logits(logits, filters)
    checks, queries = logits[:, : window + 1], logits[:, window + 1 :]

    # What is beyond the draft has the probability 0 in it: it is not accepted, and drawn from q.
    q = jax.nn.softmax(filters(checks))
    p = jnp.pad(jnp.where((ahead[:-1] < drafted)[..., None], state.drafts, 0.0), ((0, 0), (0, 1), (0, 0)))
    places = start + ahead
    draft = jnp.take_along_axis(jnp.pad(state.drawn, ((0, 0), (0, 1))), places, axis=1)
    of_draft = lambda probs: jnp.take_along_axis(probs, draft[..., None], axis=-1)[..., 0]
    coins = jax.vmap(jax.vmap(jax.random.uniform))(noise(places, _ACCEPT))
    accepted = ((coins * of_draft(p) < of_draft(q)) & (ahead < drafted)).astype(jnp.int32)
    count = jnp.cumprod(accepted, axis=1).sum(axis=1)
    rest = jnp.maximum(q[row, count] - p[row, count], 0.0)
    # Where q and p are equal but for rounding, nothing may be left.
    rest = jnp.where(rest.sum(axis=-1, keepdims=True) > 0, rest, q[row, count])
    redrawn = filters_lib.draw(noise((state.known + count)[:, None], _REDRAW)[:, 0], jnp.log(rest))
    new = jnp.where(ahead == count[:, None], redrawn[:, None], draft)

    # Of those that are drafted next, the queries behind the whole draft or behind the last known token, past those accepted.
    known = jnp.minimum(state.known + count + 1, ends)
    whole = (count == state.drafted)[:, None]
    index = jnp.where(whole, window + ahead[:-1], jnp.minimum(count[:, None] + ahead[:-1], window - 1))
    next_logits = filters(jnp.take_along_axis(queries, index[..., None], axis=1))
    next_places = known[:, None] + ahead[:-1]
    next_draft = filters_lib.draw(noise(next_places, _DRAFT), next_logits)
    next_drafted = jnp.minimum(jnp.where(whole[:, 0], window, window - count), ends - known)

    # What is inserted behind the tokens that are known now is overwritten later.
    drawn = entries.insert(jnp.pad(state.drawn, ((0, 0), (0, 1))), new, state.known)[:, :-1]
    busy = state.known < ends
    keep = lambda old, values: entries.insert(old, values, jnp.where(busy, state.known, orders.shape[1]))
    return _State(
        passes=state.passes + 1, known=known, drafted=next_drafted, drafts=jax.nn.softmax(next_logits),
        drawn=entries.insert(drawn, next_draft, known), log_probs=keep(state.log_probs, entries.log_probs_of(checks, new)),
        steps=keep(state.steps, jnp.broadcast_to(state.passes + 1, new.shape)), cache=cache)

  return jax.lax.while_loop(lambda state: (state.known < ends).any() & (state.passes < limit), one_pass, state)
