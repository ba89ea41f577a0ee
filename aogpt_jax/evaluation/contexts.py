"""NLL of single tokens after their contexts, each context in several orders: what the ensemble and the MDM gap are computed from.

A token at place i of an order has the i tokens before it as its context. To put one context into another order costs a pass over
its tokens, and there are T contexts a sequence. Four things make that cheap:

* only the context and the token asked for are run, and only that token's logits are computed;
* contexts of one sequence share what they can. `in_order_of` visits all of them in the order of one permutation of the sequence,
  so that the next context is the last one with a token inserted at a uniformly random place, and what is cached for the entries
  before that place holds. Each context is in a uniformly random order, and no other choice of such orders leaves fewer entries
  to run: T**2 / 4 a sequence, where full passes run T**2;
* contexts wait for no others: a lane of the cache works through its contexts in chunks of as many entries as a pass has, and in
  any one pass the lanes are at contexts of different lengths;
* the work is dealt to the lanes in pieces of about the same size.
"""

from collections.abc import Iterator
import dataclasses
import functools
import heapq
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import numpy as np

from aogpt_jax import objectives
from aogpt_jax import sharding
from aogpt_jax.models import encoder

# Lanes on each device: with chunks of 32 entries, a thousand entries a pass. Short sequences have short chunks and want more.
LANES = 32
# Pieces that each lane gets, about: more make the lanes' work more equal; each runs its first context from the start.
_PIECES = 4
_PIECE_TARGETS = 16  # in a piece, at least, where there are so many
# What a pass costs a lane beside its entries, in entries: the cache is read once for all of them.
_PASS_COST = 8
# Passes in a call of the compiled loop, at most.
_CALL_PASSES = 64


def in_order_of(orders: np.ndarray, targets: np.ndarray, visits: np.ndarray) -> np.ndarray:
  """Orders in which the contexts of some targets are visited as given permutations of the whole sequence visit them.

  Where a permutation is uniform and independent of the order, so is each context's order; the contexts of different targets are
  related.

  Args:
    orders: int [B, T], sigma.
    targets: int [B, I], places i; the target is sigma(i), its context sigma(<i).
    visits: int [B, M, T], permutations of 0..T-1; the natural order sorts every context, and sigma leaves it as it is.

  Returns:
    int32 [B, I, M, T]: first the context, in the order in which `visits` has its positions, then sigma(i) and the rest of sigma.
  """
  length = orders.shape[1]
  place = np.empty_like(orders)
  np.put_along_axis(place, orders, np.arange(length)[None], axis=1)
  place = np.take_along_axis(place[:, None], visits, axis=2)[:, None]  # [B, 1, M, T], in sigma
  rank = np.where(place < targets[:, :, None, None], np.arange(length), length + place)
  return np.take_along_axis(visits[:, None], np.argsort(rank, axis=-1), axis=-1).astype(np.int32)


def nll(
    model: nn.Module, params: Any, tokens: np.ndarray, targets: np.ndarray, orders: np.ndarray, *, mesh: Mesh | None = None,
    lanes: int = LANES,
) -> np.ndarray:
  """-log p of each target after its context, for each of the orders.

  Any orders will do; those of `in_order_of` cost least.

  Args:
    model: a decoder, or an encoder, which sees a context as a set and runs a full pass for each.
    params: its parameters.
    tokens: int [B, N], in natural order; the same on all hosts.
    targets: int [B, I], places i in the orders.
    orders: int [B, I, M, S]: the first i positions are the context of target i, the next one is the target; the rest is not used.
    mesh: splits the lanes over its data and fsdp axes; the parameters must be on it. None: their own.
    lanes: contexts that are run at the same time on each of those devices; a lane has a cache of a whole sequence.

  Returns:
    float32 [B, I, M], in nats.

  Raises:
    ValueError: shapes that do not fit each other or the model.
  """
  batch, count, permutations, length = np.shape(orders)
  if np.shape(targets) != (batch, count) or len(tokens) != batch:
    raise ValueError(f"tokens {np.shape(tokens)} and targets {np.shape(targets)} do not fit orders {np.shape(orders)}; they "
                     f"must be [{batch}, N] and [{batch}, {count}].")
  if not length <= np.shape(tokens)[1] <= model.block_size:
    raise ValueError(f"orders of {length} and sequences of {np.shape(tokens)[1]} tokens do not fit the model's block_size = "
                     f"{model.block_size}.")
  targets = np.asarray(targets)
  if targets.min(initial=0) < 0 or targets.max(initial=0) >= length:
    raise ValueError(f"targets are places from 0 to {length - 1}, and there is one at {targets.min()} or {targets.max()}.")
  if lanes < 1:
    raise ValueError(f"lanes is {lanes}; it must be at least 1.")
  out = np.zeros((batch * permutations, count), np.float32)
  if not out.size:
    return out.reshape(batch, count, permutations)
  mesh = mesh or sharding.mesh_of(params)
  if isinstance(model, encoder.Encoder):
    return _without_cache(model, params, np.asarray(tokens), targets, np.asarray(orders), mesh, lanes)
  # A chain is a sequence with one permutation for each of its targets, which go from the shortest context to the longest.
  ascending = np.argsort(targets, axis=1, kind="stable")
  chains = np.asarray(orders).swapaxes(1, 2).reshape(-1, count, length)
  rows = np.repeat(np.arange(batch), permutations)
  ends = np.take_along_axis(targets, ascending, axis=1)[rows]
  chains = np.take_along_axis(chains, ascending[rows][..., None], axis=1)
  programs = _programs(model, mesh)
  work = _deal(ends, _reused(chains, ends), lanes, mesh.shape["data"] * mesh.shape["fsdp"])
  prepared, cache = programs.prepare(params), programs.cache(work.write.shape[1], max(length, work.width))
  for begin, entries in _calls(work, np.asarray(tokens), rows, chains):
    entries, passes = jax.device_put(entries, programs.entries), min(_CALL_PASSES, len(work.write) - begin)
    answers, cache = programs.run(prepared, entries, np.int32(passes), cache)
    done = work.answers[begin : begin + passes]
    chain, job = (x[begin : begin + passes][done] for x in (work.chain, work.job))
    out[chain, job] = np.asarray(answers)[:passes][done]
  answers = np.empty_like(out)
  np.put_along_axis(answers, ascending[rows], out, axis=1)
  return answers.reshape(batch, permutations, count).swapaxes(1, 2)


def _without_cache(
    model: encoder.Encoder, params: Any, tokens: np.ndarray, targets: np.ndarray, orders: np.ndarray, mesh: Mesh, lanes: int
) -> np.ndarray:
  """`nll` by a full pass for each target and order, so many on each device at the same time."""
  batch, count, permutations, _ = orders.shape
  everything = np.arange(batch * count * permutations)
  size = lanes * mesh.shape["data"] * mesh.shape["fsdp"]
  out = []
  for begin in range(0, len(everything), size):
    index = np.minimum(np.arange(begin, begin + size), len(everything) - 1)  # the last one again, where a call is not full
    b, i, m = np.unravel_index(index, (batch, count, permutations))
    rows = jax.device_put(jax.tree.map(np.int32, (tokens[b], orders[b, i, m], targets[b, i])), sharding.batch_sharding(mesh))
    out.append(np.asarray(_next_nll(model, mesh, params, *rows)))
  return np.concatenate(out)[: len(everything)].reshape(batch, count, permutations)


@functools.partial(jax.jit, static_argnames=("model", "mesh"))
def _next_nll(model, mesh, params, tokens, orders, places):
  with sharding.on_mesh(mesh):
    nll = objectives.next_nll(model, params, tokens, orders, places)
  return jax.lax.with_sharding_constraint(nll, sharding.replicated(mesh))


def _reused(chains: np.ndarray, ends: np.ndarray) -> np.ndarray:
  """int [C, I], how many of a context's entries are cached since the one before it; entry e depends on the first e + 1 places."""
  differ = np.diff(chains, axis=1) != 0
  equal = np.where(differ.any(axis=-1), differ.argmax(axis=-1), chains.shape[-1])
  equal = np.minimum(equal, np.minimum(ends[:, :-1] + 1, ends[:, 1:]))
  return np.pad(equal, ((0, 0), (1, 0)))


@dataclasses.dataclass(frozen=True)
class _Work:
  """Chunks of `width` entries, one for each of N passes and L lanes; int [N, L] each."""

  width: int
  chain: np.ndarray
  job: np.ndarray  # which of the chain's contexts
  write: np.ndarray  # slot and number of the first entry
  asked: np.ndarray  # which of the entries is asked for its logits,
  answers: np.ndarray  # bool, and whether that is what was to be found


def _deal(ends: np.ndarray, reused: np.ndarray, lanes: int, devices: int) -> _Work:
  """Divides the contexts of chains, which end with entries `ends` [C, I], into chunks, and deals these to the lanes."""
  chains, count = ends.shape
  pieces = -(-_PIECES * lanes * devices // chains)
  pieces = min(max(pieces, 1), max(count // _PIECE_TARGETS, 1))
  piece = np.arange(count) * pieces // count
  reused = np.where(np.diff(piece, prepend=-1) > 0, 0, reused)
  fresh = ends + 1 - reused
  widths = [1 << i for i in range(int(ends.max()).bit_length() + 1)]
  width = min(widths, key=lambda w: (-(-fresh // w)).sum() * (_PASS_COST + w))
  chunks = -(-fresh // width)

  # The largest piece goes to the lane with the least to do.
  sizes = np.add.reduceat(chunks, np.flatnonzero(np.diff(piece, prepend=-1)), axis=1)
  lanes = -(-min(lanes * devices, sizes.size) // devices) * devices
  loads = [(0, lane) for lane in range(lanes)]
  first, lane_of = np.zeros_like(sizes), np.zeros_like(sizes)
  for where in np.argsort(-sizes, axis=None, kind="stable"):
    load, lane = heapq.heappop(loads)
    first.flat[where], lane_of.flat[where] = load, lane
    heapq.heappush(loads, (load + int(sizes.flat[where]), lane))

  # From contexts to chunks. A context's chunks end with its last entry: the first of them may run entries that are cached.
  before = np.cumsum(chunks, axis=1) - chunks
  before -= before[:, np.searchsorted(piece, np.arange(pieces))][:, piece]
  context = np.repeat(np.arange(chunks.size), chunks.ravel())
  number = np.arange(len(context)) - np.repeat(np.cumsum(chunks) - chunks.ravel(), chunks.ravel())
  at = lambda x: x.ravel()[context]
  place = at(first[:, piece] + before) + number, at(lane_of[:, piece])
  write = np.maximum(at(ends) + 1 - (at(chunks) - number) * width, 0)

  def table(values: np.ndarray) -> np.ndarray:
    out = np.zeros((max(load for load, _ in loads), lanes), values.dtype)
    out[place] = values
    return out

  return _Work(width=width, chain=table(context // count), job=table(context % count), write=table(write),
               asked=table(np.minimum(at(ends) - write, width - 1)), answers=table(number == at(chunks) - 1))


def _calls(work: _Work, tokens: np.ndarray, rows: np.ndarray, chains: np.ndarray) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
  """The first pass of each call of the compiled loop, and its entries, int32 [N, L, W] or [N, L]; N is the same for all."""
  for begin in range(0, len(work.write), _CALL_PASSES):
    missing = max(begin + _CALL_PASSES - len(work.write), 0)
    chain, job, write, asked = (np.pad(x[begin : begin + _CALL_PASSES], ((0, missing), (0, 0)))
                                for x in (work.chain, work.job, work.write, work.asked))
    numbers = write[..., None] + np.arange(-1, work.width)  # with the entry before, whose target is what an entry holds
    # Entries past the end of a context are padding.
    positions = chains[chain[..., None], job[..., None], np.clip(numbers, 0, chains.shape[-1] - 1)]
    ids = tokens[rows[chain][..., None], positions]
    numbers = numbers[..., 1:]
    answer = np.take_along_axis(ids, asked[..., None] + 1, axis=-1)[..., 0]
    yield begin, jax.tree.map(np.int32, {
        "tokens": ids[..., :-1], "slots": np.where(numbers == 0, 0, positions[..., :-1] + 1), "targets": positions[..., 1:],
        "visible": numbers, "write": write, "asked": asked, "answer": answer})


@dataclasses.dataclass(frozen=True)
class _Programs:
  """The jitted functions of a model on a mesh."""

  prepare: Any
  cache: Any
  run: Any
  entries: NamedSharding  # [N, L, ...]


@functools.cache
def _programs(model: nn.Module, mesh: Mesh) -> _Programs:
  cache = sharding.heads_sharding(mesh, model.heads)

  def traced_on_mesh(function):
    def call(*args):
      with sharding.on_mesh(mesh):
        return function(*args)
    return call

  run = jax.jit(functools.partial(_run, model), out_shardings=(sharding.replicated(mesh), cache), donate_argnums=3)
  return _Programs(
      prepare=traced_on_mesh(jax.jit(model.prepare)), run=traced_on_mesh(run),
      cache=jax.jit(model.init_cache, static_argnums=(0, 1), out_shardings=cache),
      entries=NamedSharding(mesh, P(None, ("data", "fsdp"))))


def _run(model, prepared, entries, count, cache):
  """Runs the first `count` passes: nats [N, L] of what is asked for, and the new cache."""

  def step(n, carry):
    answers, cache = carry
    e = jax.tree.map(lambda x: x[n], entries)
    logits, cache = model.extend(
        prepared, e["tokens"], e["slots"], e["targets"], cache, e["write"], e["visible"], e["asked"][:, None])
    return answers.at[n].set(objectives.cross_entropy(logits[:, 0], e["answer"])), cache

  return jax.lax.fori_loop(0, count, step, (jnp.zeros(entries["write"].shape, jnp.float32), cache))
