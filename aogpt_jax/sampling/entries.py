"""What all samplers run on: entries against a model's cache, in programs on a mesh, with the samples of a batch split over it."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import Mesh
import numpy as np

from aogpt_jax import sharding
from aogpt_jax.models import encoder
from aogpt_jax.sampling import filters as filters_lib
from aogpt_jax.sampling import plan as plan_lib


@dataclasses.dataclass(frozen=True)
class Samples:
  """What was drawn; by position, in natural order, where nothing else is said.

  Attributes:
    tokens: int32 [B, L]; -1 where a token is not drawn yet.
    log_probs: float32 [B, L], log p(token | tokens before it) in nats, of the model over the ids that there are, before temperature,
      top-k and top-p; 0 for given tokens.
    steps: int32 [B, L], the step in which a token was drawn, from 1; 0 for given tokens and those not drawn yet.
    orders: int32 [B, L], the order in which tokens are drawn, given ones first; where the sampler chooses it, as far as it has.
    evaluations: steps that drew a token of any sample: the number of function evaluations that papers report.
    evaluations_each: int [B], those that draw a token of this sample; of a sampler that can't know them before, those so far.
    passes: forward passes that were run, the one over the given tokens not counted. Fewer than `evaluations` where samples have
      tokens to draw in different steps, since they don't wait for each other; more where a decoder's groups go through in pieces.
  """

  tokens: np.ndarray
  log_probs: np.ndarray
  steps: np.ndarray
  orders: np.ndarray
  evaluations: int
  evaluations_each: np.ndarray
  passes: int


def extend(
    model: nn.Module, prepared: Any, orders: jax.Array, drawn: jax.Array, cache: Any, held: jax.Array, targets: jax.Array,
    write: jax.Array, asked: jax.Array,
) -> tuple[jax.Array, Any]:
  """Runs S entries that hold what is known after `held` steps and are told the target of step `targets`.

  Args:
    model: a decoder.
    prepared: from `model.prepare`.
    orders: int [B, L].
    drawn: int [B, at least L], the tokens by their place in the order.
    cache: of `model.init_cache`, or what the call before returned.
    held: int [B, S]; an entry sees as many slots of the cache.
    targets: int [B, S]; those past the end are of padding, whose logits nobody reads.
    write: int [B], the slot that the first entry enters; the others follow it.
    asked: int [B, Q], the entries that are asked for their logits.

  Returns:
    float32 [B, Q, V] and the new cache.
  """
  # Entries past the end are padding: nobody reads what they leave.
  at = lambda x, index: jnp.take_along_axis(x, jnp.clip(index, 0, orders.shape[1] - 1), axis=1)
  slots = jnp.where(held == 0, 0, at(orders, held - 1) + 1)
  asked = jnp.minimum(asked, held.shape[1] - 1)
  return model.extend(prepared, at(drawn, held - 1), slots, at(orders, targets), cache, write, held, asked)


def ask(
    model: nn.Module, width: int, asked: int, prepared: Any, orders: jax.Array, drawn: jax.Array, row: jax.Array, cache: Any
) -> tuple[jax.Array, Any]:
  """One pass over fills and queries of each sample, as passes.py has them; an encoder runs the whole block instead.

  Args:
    model: a decoder or an encoder.
    width: entries in the pass.
    asked: queries, at most.
    prepared: from `model.prepare`.
    orders: int [B, L].
    drawn: int [B, at least L], the tokens by their place in the order.
    row: int [5, B]: write, fills, queries, start and place of `passes.Passes`.
    cache: see `extend`.

  Returns:
    float32 [B, asked, V], the logits of the queries, and the new cache.
  """
  if isinstance(model, encoder.Encoder):
    return _ask_encoder(model, asked, prepared, orders, drawn, row), cache
  write, fills, _, start, place = (x[:, None] for x in row)
  entry = jnp.arange(width)
  is_fill = entry < fills
  held = jnp.where(is_fill, write + entry, start)
  targets = jnp.where(is_fill, write + entry, place + entry - fills)
  return extend(model, prepared, orders, drawn, cache, held, targets, write[:, 0], asked=fills + jnp.arange(asked))


def _ask_encoder(model, asked, prepared, orders, drawn, row):
  """Logits [B, asked, V] by an encoder, from the tokens before the group."""
  start, place = row[3][:, None], row[4][:, None]
  place_of = jnp.argsort(orders, axis=1)
  known = jnp.take_along_axis(drawn, place_of, axis=1)
  # Places past the end are padding, which nobody reads.
  targets = jnp.take_along_axis(orders, jnp.minimum(place + jnp.arange(asked), orders.shape[1] - 1), axis=1)
  return model.apply({"params": prepared}, jnp.where(place_of < start, known, model.mask_id), targets)


def prefill(
    model: nn.Module, width: int, slots: int, prepared: Any, orders: jax.Array, drawn: jax.Array
) -> Any:
  """A cache of `slots` with the entries that hold the given tokens but the last, which is the first query: one pass, causal."""
  cache = model.init_cache(len(orders), max(slots, width))
  if width:
    # Slots past a sample's own known tokens are overwritten before an entry sees them.
    index = jnp.broadcast_to(jnp.arange(width), (len(orders), width))
    _, cache = extend(model, prepared, orders, drawn, cache, index, index, jnp.zeros(len(orders), int), asked=index[:, :1])
  return cache


def prefix_width(known: np.ndarray, length: int) -> int:
  """Entries that `prefill` is to run where so many tokens of each sample are given; there are few such numbers."""
  most = int(known.max(initial=0))
  return min(1 << (most - 1).bit_length(), length) if most else 0


def known_logits(logits: jax.Array, filters: filters_lib.Filters) -> jax.Array:
  """The logits with -inf at ids that there are none of."""
  return jnp.where(jnp.arange(logits.shape[-1]) < filters.vocab_size, logits, -jnp.inf)


def log_probs_of(logits: jax.Array, tokens: jax.Array) -> jax.Array:
  """log p of tokens [...] under logits [..., V], in nats."""
  return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)[..., 0]


def fold(keys: jax.Array, data: jax.Array) -> jax.Array:
  """Keys [B, N] from keys [B] and ints [B, N]."""
  return jax.vmap(lambda key, row: jax.vmap(lambda i: jax.random.fold_in(key, i))(row))(keys, data)


def insert(x: jax.Array, values: jax.Array, place: jax.Array) -> jax.Array:
  """x [B, L] with values [B, N] from place [B] on, as many as fit when they begin at most L - N."""
  return jax.vmap(lambda row, new, i: jax.lax.dynamic_update_slice(row, new, (i,)))(x, values, place)


def by_position(orders: np.ndarray, x: np.ndarray) -> np.ndarray:
  """What is by place in the order, by position: both [B, L]."""
  out = np.empty_like(x)
  np.put_along_axis(out, orders, x, axis=1)
  return out


def check(
    model: nn.Module, plan: plan_lib.Plan, tokens: np.ndarray, keys: jax.Array, filters: filters_lib.Filters, **at_least_1: int
) -> None:
  """Raises ValueError where the arguments of a sampler do not fit each other, or a number is below 1."""
  batch, length = plan.orders.shape
  if length > model.block_size:
    raise ValueError(f"length is {length}; the model's blocks have {model.block_size} tokens.")
  if filters.vocab_size > model.vocab_size:
    raise ValueError(f"vocab_size is {filters.vocab_size}; the model has {model.vocab_size} rows.")
  if np.shape(tokens) != (batch, length) or np.shape(keys) != (batch,):
    raise ValueError(f"tokens {np.shape(tokens)} and keys {np.shape(keys)} must be [{batch}, {length}] and [{batch}].")
  for name, value in at_least_1.items():
    if value < 1:
      raise ValueError(f"{name} is {value}; it must be at least 1.")


def check_decoder(model: nn.Module, sampler: str) -> None:
  """Raises ValueError for a model that has no conditionals of a sequence in an order."""
  if isinstance(model, encoder.Encoder):
    raise ValueError(f"sampler is {sampler!r}, which checks several tokens in one causal pass, and the model is an encoder, which "
                     "has none; give 'plan' or 'adaptive', or a decoder.")


@dataclasses.dataclass(frozen=True)
class Rows:
  """The samples of a batch on a mesh: as many as its devices can share evenly, by the last one again.

  Attributes:
    mesh: over whose data and fsdp axes the samples are split.
    batch: how many samples there are.
  """

  mesh: Mesh
  batch: int

  @property
  def missing(self) -> int:
    return -self.batch % (self.mesh.shape["data"] * self.mesh.shape["fsdp"])

  def put(self, x: np.ndarray) -> jax.Array:
    """[B, ...], split over the devices."""
    x = np.concatenate([x, np.repeat(x[-1:], self.missing, axis=0)])
    return jax.device_put(x, sharding.batch_sharding(self.mesh))

  def put_keys(self, keys: jax.Array) -> jax.Array:
    """[B], split over the devices."""
    return jax.random.wrap_key_data(self.put(np.asarray(jax.random.key_data(keys))), impl=jax.random.key_impl(keys))

  def everywhere(self, x: Any) -> Any:
    """A tree that each device has the whole of."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding.replicated(self.mesh)), x)

  def fetch(self, x: jax.Array) -> np.ndarray:
    """The samples that there are, on every host."""
    whole = x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(whole)[: self.batch]


class Program:
  """A jitted function, called and traced on a mesh."""

  def __init__(self, mesh: Mesh, function: Callable, **options: Any):
    self._mesh, self._jitted = mesh, jax.jit(function, **options)

  def __call__(self, *args: Any) -> Any:
    with sharding.on_mesh(self._mesh):
      return self._jitted(*args)

  def trace(self, *args: Any) -> jax.stages.Traced:
    with sharding.on_mesh(self._mesh):
      return self._jitted.trace(*args)


def prepare_program(model: nn.Module, mesh: Mesh) -> Program:
  """`model.prepare`."""
  return _shared_programs(model, mesh)[0]


def prefill_program(model: nn.Module, mesh: Mesh) -> Program:
  """`prefill` of the model, with the arguments after it."""
  return _shared_programs(model, mesh)[1]


@functools.cache
def _shared_programs(model: nn.Module, mesh: Mesh) -> tuple[Program, Program]:
  # What goes from one call to the next keeps one sharding: with another, jit would compile again.
  cache = sharding.heads_sharding(mesh, model.heads)
  return (Program(mesh, model.prepare),
          Program(mesh, functools.partial(prefill, model), static_argnums=(0, 1), out_shardings=cache))
