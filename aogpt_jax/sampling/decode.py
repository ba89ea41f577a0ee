"""Decoding along a plan: several tokens a forward pass, in any order, in a jitted loop over the passes.

passes.py says which entries a pass runs. All that changes from pass to pass is data, so that a loop of one compiled program runs them,
with the cache in place. The cache grows in a few steps, since what a pass costs is soon the reading of it; each size is a program.

An encoder has no cache. Each of its passes runs the whole block, in which what is not drawn yet is masked, and asks for the logits
of what it reveals: ancestral sampling of a masked diffusion model. Steps that reveal nothing have no pass.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from aogpt_jax import sharding
from aogpt_jax.models import encoder
from aogpt_jax.sampling import entries
from aogpt_jax.sampling import filters as filters_lib
from aogpt_jax.sampling import passes as passes_lib
from aogpt_jax.sampling import plan as plan_lib

# The cache has a length of a multiple of this, or all that it needs; below it, one program does everything.
CACHE_STEP = 256
# Passes in a call of the compiled loop, at most: its arguments have one shape, whatever the plan.
CALL_PASSES = 64


def sample(
    model: nn.Module, params: Any, plan: plan_lib.Plan, tokens: np.ndarray, keys: jax.Array, filters: filters_lib.Filters, *,
    contexts: int = 1, mesh: Mesh | None = None,
) -> entries.Samples:
  """Draws the unknown tokens of a batch along a plan.

  A sample depends on its own key, order and counts, not on the batch that it is drawn in. A program is compiled for each batch
  size, number of entries in a pass and length of the cache: one for texts of up to CACHE_STEP tokens, another for each CACHE_STEP
  more; binomial counts need a few numbers of entries, all powers of two.

  Args:
    model: a decoder or an encoder.
    params: its parameters.
    plan: from `plan.make_plan`, of length L <= T.
    tokens: int [B, L], the given tokens at their positions; ignored elsewhere.
    keys: [B], one key for each sample.
    filters: what is drawn from.
    contexts: M; above 1, the probabilities are averaged over M orders of the known tokens, the sample's own and M - 1 that are drawn anew
      in each step (arXiv 2506.19935, the ensemble). Each costs a forward pass over all known tokens, without a cache.
    mesh: splits the samples, any number of them, over its data and fsdp axes; the parameters must be on it. None: their own.

  Raises:
    ValueError: the plan is longer than the model's blocks, or the arguments do not fit each other.
  """
  *_, last = stream(model, params, plan, tokens, keys, filters, contexts=contexts, mesh=mesh)
  return last


def stream(
    model: nn.Module, params: Any, plan: plan_lib.Plan, tokens: np.ndarray, keys: jax.Array, filters: filters_lib.Filters, *,
    contexts: int = 1, mesh: Mesh | None = None, parts: int = 1,
) -> Iterator[entries.Samples]:
  """`sample`, which yields what there is about `parts` times on the way; the last is the whole. Its counts are of the whole always."""
  entries.check(model, plan, tokens, keys, filters, contexts=contexts, parts=parts)
  if contexts > 1 and isinstance(model, encoder.Encoder):
    raise ValueError(f"contexts is {contexts}; the orders of the known tokens are one and the same to an encoder: give 1.")
  return _stream(model, params, plan, np.asarray(tokens), keys, filters, contexts, mesh, parts)


def _stream(model, params, plan, tokens, keys, filters, contexts, mesh, parts):
  passes = _make_passes(model, plan.known, plan.counts)
  (batch, length), orders, known = plan.orders.shape, plan.orders, plan.known
  drawn = np.where(np.arange(length) < known[:, None], np.take_along_axis(tokens, orders, axis=1), 0).astype(np.int32)
  if not len(passes):
    yield _samples(plan, passes, 0, drawn, np.zeros(drawn.shape, np.float32))
    return
  rows = entries.Rows(mesh or sharding.mesh_of(params), batch)
  table = np.pad(passes.table, ((0, CALL_PASSES), (0, 0), (0, rows.missing)))  # samples that fill the batch up have nothing to draw
  keys, filters = rows.put_keys(keys), rows.everywhere(filters)
  orders, drawn = rows.put(orders), rows.put(np.pad(drawn, ((0, 0), (0, passes.asked))))
  log_probs = rows.put(np.zeros((batch, drawn.shape[1]), np.float32))
  shown = {len(passes) * i // parts for i in range(1, parts + 1)}
  programs = _programs(model, rows.mesh)
  prepared = programs.prepare(params)
  begin, cache = 0, None
  for end, slots in _stages(passes, length, shown):
    if cache is None:
      prefix = int(known.max())
      prefix = min(1 << prefix.bit_length(), CACHE_STEP, length) if prefix < CACHE_STEP else _rounded(prefix, length)
      cache = programs.prefill(prefix if known.any() and passes.width else 0, slots, prepared, orders, drawn)
    elif cache and cache[0]["v"].shape[2] < slots:
      shorter, cache = list(cache), ()
      while shorter:  # layer by layer: there is no memory for two whole caches
        cache += (programs.grow(slots, shorter.pop(0)),)
    drawn, log_probs, cache = programs.run(
        passes.width, passes.asked, contexts, prepared, filters, keys, orders, rows.everywhere(table[begin : begin + CALL_PASSES]),
        rows.everywhere(np.int32(end - begin)), drawn, log_probs, cache)
    begin = end
    if end in shown:
      yield _samples(plan, passes, end, *(rows.fetch(x)[:, :length] for x in (drawn, log_probs)))


def _make_passes(model: nn.Module, known: np.ndarray, counts: np.ndarray) -> passes_lib.Passes:
  make = passes_lib.make_whole_passes if isinstance(model, encoder.Encoder) else passes_lib.make_passes
  return make(known, counts)


def _stages(passes: passes_lib.Passes, length: int, shown: set[int]) -> list[tuple[int, int]]:
  """(pass up to which it goes, slots of the cache) for each call of the compiled loop."""
  # The padding of the last passes may go beyond the end.
  most = max(length, int(passes.slots[-1])) if passes.regular else length + passes.width
  slots = np.array([_rounded(n, most) for n in passes.slots.tolist()])
  ends = {*(np.flatnonzero(np.diff(slots)) + 1).tolist(), *shown, *range(CALL_PASSES, len(passes), CALL_PASSES)} - {0}
  calls = []
  for end in sorted(ends):
    begin = calls[-1][0] if calls else 0
    calls += [(e, int(slots[end - 1])) for e in (*range(begin + CALL_PASSES, end, CALL_PASSES), end)]
  return calls


def _rounded(slots: int, most: int) -> int:
  """A length of the cache that is at least `slots`; there are few of them."""
  return min(-(-slots // CACHE_STEP) * CACHE_STEP, most)


def _samples(plan: plan_lib.Plan, passes: passes_lib.Passes, done: int, drawn: np.ndarray, log_probs: np.ndarray) -> entries.Samples:
  """What there is after `done` passes, by position, from what is by place in the order."""
  # The places of a sample are drawn one after another.
  reached = np.maximum(plan.known, (passes.place + passes.queries)[:done].max(axis=0, initial=0))
  places, ends = np.arange(plan.orders.shape[1]), plan.known + plan.counts.sum(axis=0)
  there, given = places < reached[:, None], places < plan.known[:, None]
  steps = np.zeros(plan.orders.shape, np.int32)
  sample_of, group = np.nonzero(plan.counts.T)
  steps[~given & (places < ends[:, None])] = np.repeat(plan.steps[group], plan.counts[group, sample_of])

  by_position = functools.partial(entries.by_position, plan.orders)
  return entries.Samples(
      tokens=by_position(np.where(there, drawn, -1).astype(np.int32)), log_probs=by_position(np.where(there & ~given, log_probs, 0)),
      steps=by_position(np.where(there, steps, 0)), orders=plan.orders, evaluations=plan.evaluations,
      evaluations_each=(plan.counts > 0).sum(axis=0), passes=len(passes))


def decode_logits(
    model: nn.Module, params: Any, tokens: jax.Array, orders: jax.Array, groups: Sequence[int]
) -> jax.Array:
  """Teacher-forced decoding: the logits that `sample` would draw from, if it drew the true tokens.

  Args:
    model: a decoder or an encoder.
    params: its parameters.
    tokens: int [B, N], the true tokens in natural order.
    orders: int [B, S], S <= N <= T.
    groups: how many tokens each step reveals; they sum to S.

  Returns:
    float32 [B, S, V] in generation order. With groups of 1 these are the logits of a decoder's full forward pass; with larger ones, entry
    i of a group that starts at l does not see the tokens from l on.

  Raises:
    ValueError: groups that do not sum to S.
  """
  groups = tuple(int(g) for g in groups)
  batch, length = np.shape(orders)
  if min(groups, default=0) < 1 or sum(groups) != length:
    raise ValueError(f"groups {groups} must be at least 1 each and sum to the {length} entries of orders.")
  passes = _make_passes(model, np.zeros(batch, int), np.array(groups)[:, None].repeat(batch, axis=1))
  slots = max(length, int(passes.slots[-1]))
  return _decode_logits(model, passes.width, passes.asked, slots, params, jnp.asarray(tokens, jnp.int32),
                        jnp.asarray(orders, jnp.int32), jnp.asarray(passes.table))


@functools.partial(jax.jit, static_argnames=("model", "width", "asked", "slots"))
def _decode_logits(model, width, asked, slots, params, tokens, orders, table):
  batch, length = orders.shape
  prepared = model.prepare(params)
  forced = jnp.take_along_axis(tokens, orders, axis=1)

  def step(carry, row):
    logits, cache = carry
    out, cache = entries.ask(model, width, asked, prepared, orders, forced, row, cache)
    # What lies past the queries is overwritten by later passes.
    place = jnp.where(row[2] > 0, row[4], length)
    return (jax.vmap(lambda x, new, i: jax.lax.dynamic_update_slice_in_dim(x, new, i, 0))(logits, out, place), cache), None

  logits = jnp.zeros((batch, length + asked, model.vocab_size), jnp.float32)
  (logits, _), _ = jax.lax.scan(step, (logits, model.init_cache(batch, slots)), table)
  return logits[:, :length]


def trace_prepare(model: nn.Module, mesh: Mesh, params: Any) -> jax.stages.Traced:
  """`model.prepare` as `stream` runs it, to be compiled ahead of time; params are ShapeDtypeStructs with their shardings."""
  return _programs(model, mesh).prepare.trace(params)


def trace_last(
    model: nn.Module, mesh: Mesh, prepared: Any, plan: plan_lib.Plan, filters: filters_lib.Filters, *, contexts: int = 1
) -> dict[str, jax.stages.Traced]:
  """The programs at the end of `stream`, where the cache is longest, to be compiled ahead of time; the devices need not be there.

  Args:
    model: a decoder or an encoder.
    mesh: over whose data and fsdp axes the samples are split.
    prepared: what `trace_prepare` returns, as ShapeDtypeStructs with their shardings.
    plan: from `plan.make_plan`.
    filters: what is drawn from.
    contexts: see `sample`.

  Returns:
    "run", the loop over passes, and, where there are shorter caches before, "grow", the last growth of the cache of a layer.
  """
  programs, passes = _programs(model, mesh), _make_passes(model, plan.known, plan.counts)
  batch, length = plan.orders.shape
  batch += -batch % (mesh.shape["data"] * mesh.shape["fsdp"])
  rows = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.batch_sharding(mesh))
  everywhere = lambda dtype, *shape, **kw: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.replicated(mesh), **kw)

  def cache(slots):
    shapes = jax.eval_shape(lambda: model.init_cache(batch, slots))
    return jax.tree.map(lambda x: x.update(sharding=sharding.heads_sharding(mesh, model.heads)), shapes)

  *_, before, slots = 0, *sorted({slots for _, slots in _stages(passes, length, {len(passes)})})
  traced = {"run": programs.run.trace(
      passes.width, passes.asked, contexts, prepared,
      jax.tree.map(lambda x: everywhere(jax.typeof(x).dtype, weak_type=True), filters),
      rows(jax.random.key(0).dtype, batch), rows(jnp.int32, batch, length), everywhere(jnp.int32, CALL_PASSES, 5, batch),
      everywhere(jnp.int32), rows(jnp.int32, batch, length + passes.asked), rows(jnp.float32, batch, length + passes.asked),
      cache(slots))}
  if before:
    traced["grow"] = programs.grow.trace(slots, cache(before)[0])
  return traced


@dataclasses.dataclass(frozen=True)
class _Programs:
  """The jitted functions of a model on a mesh."""

  prepare: entries.Program
  prefill: entries.Program
  grow: entries.Program
  run: entries.Program


@functools.cache
def _programs(model: nn.Module, mesh: Mesh) -> _Programs:
  # What goes from one call to the next keeps one sharding: with another, jit would compile again.
  rows, cache = sharding.batch_sharding(mesh), sharding.heads_sharding(mesh, model.heads)

  def compiled(function, static=(), out_shardings=None, donate=()):
    return entries.Program(mesh, function, static_argnums=static, out_shardings=out_shardings, donate_argnames=donate)

  return _Programs(
      prepare=entries.prepare_program(model, mesh),
      prefill=entries.prefill_program(model, mesh),
      grow=compiled(_grow, (0,), cache),
      run=compiled(functools.partial(_run, model), (0, 1, 2), (rows, rows, cache), ("drawn", "log_probs", "cache")))


def _grow(slots, layer):
  pad = lambda x, axis: jnp.pad(x, [(0, slots - n if i == axis else 0) for i, n in enumerate(x.shape)])
  return {"k": pad(layer["k"], 3), "v": pad(layer["v"], 2)}


def _run(model, width, asked, contexts, prepared, filters, keys, orders, table, count, drawn, log_probs, cache):
  """Runs the first `count` passes of the table [N, 5, B]."""
  length = orders.shape[1]

  def step(n, carry):
    drawn, log_probs, cache = carry
    row = table[n]
    _, _, queries, start, place = row
    logits, cache = entries.ask(model, width, asked, prepared, orders, drawn, row, cache)
    logits = entries.known_logits(logits, filters)
    if contexts > 1:
      logits = _average(model, asked, contexts, prepared, orders, drawn, start, place, keys, logits, filters.vocab_size)
    places = place[:, None] + jnp.arange(asked)
    # A token's noise comes from its place in the order: neither the step nor the batch has a say in it.
    new = filters_lib.draw(entries.fold(keys, places), filters(logits))
    # What lies past the queries is overwritten later; what a sample that is finished draws goes behind the end.
    place = jnp.where(queries > 0, place, length)
    return entries.insert(drawn, new, place), entries.insert(log_probs, entries.log_probs_of(logits, new), place), cache

  return jax.lax.fori_loop(0, count, step, (drawn, log_probs, cache))


def _average(model, asked, contexts, prepared, orders, drawn, start, place, keys, logits, vocab_size):
  """Log of the probabilities averaged over the `logits` and those after other orders of the known tokens."""
  batch, length = orders.shape
  known = jnp.arange(length) < start[:, None]
  index = jnp.broadcast_to(jnp.arange(length), (batch, length))
  # Apart from the keys of places; the queries of a group get the same orders in whatever pass they are.
  context_keys = entries.fold(keys, length + start[:, None])[:, 0]
  held = jnp.concatenate([index, jnp.broadcast_to(start[:, None], (batch, asked))], axis=1)

  def add(total, m):
    draw = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, m), (length,)))
    shuffle = jnp.argsort(jnp.where(known, draw(context_keys), 1 + index), axis=1)
    permuted = lambda x: jnp.take_along_axis(x, shuffle, axis=1)
    targets = jnp.concatenate([index, place[:, None] + jnp.arange(asked)], axis=1)
    cache = model.init_cache(batch, length + asked)
    out, _ = entries.extend(model, prepared, permuted(orders), permuted(drawn[:, :length]), cache, held, targets,
                     jnp.zeros_like(start), asked=length + index[:, :1] + jnp.arange(asked))
    out = jnp.where(jnp.arange(out.shape[-1]) < vocab_size, out, -jnp.inf)
    return jnp.logaddexp(total, jax.nn.log_softmax(out)), None

  total, _ = jax.lax.scan(add, jax.nn.log_softmax(logits), jnp.arange(contexts - 1))
  return total - jnp.log(contexts)
