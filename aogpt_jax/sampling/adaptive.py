"""Orders that adapt: in each step, the open positions are asked, and the tokens that the model is surest of are drawn.

A masked diffusion model that is trained on all orders meets hard ones among them, and can leave those out when it is sampled (Kim
et al., arXiv 2502.06768). How sure it is of a position is read from its logits, before temperature and filters; which token comes
there is drawn from the filtered ones, as ever. The order that comes out is returned.

A decoder asks by queries behind its last known token; what was drawn in the step before enters the cache with them, now that its
order is known. An encoder has all positions in one pass anyway.
"""

from collections.abc import Callable, Iterator
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from aogpt_jax import samplers
from aogpt_jax import sharding
from aogpt_jax.models import encoder
from aogpt_jax.sampling import entries
from aogpt_jax.sampling import filters as filters_lib
from aogpt_jax.sampling import passes as passes_lib
from aogpt_jax.sampling import plan as plan_lib


def _margin(log_probs: jax.Array) -> jax.Array:
  best = jax.lax.top_k(jnp.exp(log_probs), 2)[0]
  return best[..., 0] - best[..., 1]


# By `config.sample.criterion`: log-probabilities [..., V] -> how sure a position is, the largest first.
CRITERIA: dict[str, Callable[[jax.Array], jax.Array]] = {
    "probability": lambda log_probs: log_probs.max(axis=-1),  # its logarithm
    "margin": _margin,  # between the two most probable tokens
    "entropy": lambda log_probs: jnp.where(log_probs == -jnp.inf, 0, jnp.exp(log_probs) * log_probs).sum(axis=-1),  # minus it, nats
}
assert tuple(CRITERIA) == samplers.CRITERIA
# Noise is of a place in the order and of what it is for: a token, the choice of candidates, that among those equally sure, and what is
# added to how sure they are.
_TOKEN, _CANDIDATE, _TIE, _NOISE = range(4)


def sample(
    model: nn.Module, params: Any, plan: plan_lib.Plan, tokens: np.ndarray, keys: jax.Array, filters: filters_lib.Filters, *,
    criterion: str = "margin", noise: float = 0.0, candidates: int = 0, mesh: Mesh | None = None,
) -> entries.Samples:
  """Draws the unknown tokens of a batch, the surest first.

  A sample depends on its own key and counts, not on the batch that it is drawn in. One program is compiled for each batch size,
  length, number of candidates and largest number of tokens in a step, beside that for the given tokens.

  Args:
    model: a decoder or an encoder.
    params: its parameters.
    plan: from `plan.make_plan`, of length L <= T: which tokens to draw, and how many in each step. Its order has no effect.
    tokens: int [B, L], the given tokens at their positions; ignored elsewhere.
    keys: [B], one key for each sample.
    filters: what tokens are drawn from.
    criterion: "probability" of the most probable token (its logarithm), "margin" to the next one, or "entropy" (minus it, in nats).
    noise: the scale of Gumbel noise that is added to that.
    candidates: how many of the open positions are asked, a random subset in each step; 0: all. Where more tokens are drawn in a step
      of any sample, as many as those.
    mesh: splits the samples, any number of them, over its data and fsdp axes; the parameters must be on it. None: their own.

  Returns:
    Samples with the orders chosen, in which the surest token of a step comes first. Their log-probabilities are given the tokens before
    the step.

  Raises:
    ValueError: the plan is longer than the model's blocks, or the arguments do not fit each other.
  """
  *_, last = stream(model, params, plan, tokens, keys, filters, criterion=criterion, noise=noise, candidates=candidates, mesh=mesh)
  return last


def stream(
    model: nn.Module, params: Any, plan: plan_lib.Plan, tokens: np.ndarray, keys: jax.Array, filters: filters_lib.Filters, *,
    criterion: str = "margin", noise: float = 0.0, candidates: int = 0, mesh: Mesh | None = None, parts: int = 1,
) -> Iterator[entries.Samples]:
  """`sample`, which yields what there is about `parts` times on the way; the last is the whole. Its counts are of the whole always."""
  entries.check(model, plan, tokens, keys, filters, parts=parts)
  for name, problem in samplers.problems("adaptive", samplers.DEFAULTS | dict(
      criterion=criterion, noise=noise, candidates=candidates)):
    raise ValueError(f"{name} {problem}")
  return _stream(model, params, plan, np.asarray(tokens), keys, filters, criterion, noise, candidates, mesh, parts)


def _stream(model, params, plan, tokens, keys, filters, criterion, noise, candidates, mesh, parts):
  (batch, length), rows = plan.orders.shape, entries.Rows(mesh or sharding.mesh_of(params), len(plan.orders))
  passes = passes_lib.make_whole_passes(plan.known, plan.counts)
  most = passes.asked
  asked = min(max(candidates, most) if candidates else length, length)
  # Most tokens of a step enter the cache with the next one's queries; an encoder has no cache.
  width, slots = (0, 0) if isinstance(model, encoder.Encoder) else (most + asked, length + most + asked)
  drawn = np.take_along_axis(tokens, plan.orders, axis=1).astype(np.int32)
  counts = np.pad(passes.queries, ((0, length - len(passes)), (0, rows.missing)))
  prepared = entries.prepare_program(model, rows.mesh)(params)
  orders, drawn, ends = rows.put(plan.orders), rows.put(np.pad(drawn, ((0, 0), (0, most)))), rows.put(plan.ends)
  cache = entries.prefill_program(model, rows.mesh)(
      entries.prefix_width(plan.known, length) if width else 0, slots, prepared, orders, drawn)
  known, before = rows.put(plan.known), rows.put(np.zeros(batch, np.int32))
  log_probs = rows.put(np.zeros((batch, length + most), np.float32))
  counts, noise, filters = rows.everywhere(counts), rows.everywhere(np.float32(noise)), rows.everywhere(filters)
  keys, begin, shown = rows.put_keys(keys), 0, {-(-len(passes) * i // parts) for i in range(1, parts + 1)}
  for end in sorted(shown):
    known, before, orders, drawn, log_probs, cache = _program(model, rows.mesh)(
        width, asked, most, criterion, bool(candidates), prepared, filters, noise, keys, ends, counts,
        rows.everywhere(np.int32(begin)), rows.everywhere(np.int32(end)), known, before, orders, drawn, log_probs, cache)
    begin = end
    yield _samples(plan, passes, *(rows.fetch(x) for x in (known, orders, drawn, log_probs)))


def _samples(plan, passes, known, orders, drawn, log_probs):
  length = orders.shape[1]
  places = np.arange(length)
  there = places < known[:, None]
  new = there & (places >= plan.known[:, None])
  steps = np.zeros(orders.shape, np.int32)
  row, group = np.nonzero(plan.counts.T)
  steps[(places >= plan.known[:, None]) & (places < plan.ends[:, None])] = np.repeat(plan.steps[group], plan.counts[group, row])
  by_position = functools.partial(entries.by_position, orders)
  return entries.Samples(
      tokens=by_position(np.where(there, drawn[:, :length], -1)), log_probs=by_position(np.where(new, log_probs[:, :length], 0)),
      steps=by_position(np.where(new, steps, 0)), orders=orders, evaluations=plan.evaluations,
      evaluations_each=(plan.counts > 0).sum(axis=0), passes=len(passes))


@functools.cache
def _program(model: nn.Module, mesh: Mesh) -> entries.Program:
  rows, cache = sharding.batch_sharding(mesh), sharding.heads_sharding(mesh, model.heads)
  return entries.Program(mesh, functools.partial(_adapt, model), static_argnums=(0, 1, 2, 3, 4),
                         out_shardings=(*[rows] * 5, cache), donate_argnames=("known", "before", "orders", "drawn", "log_probs", "cache"))


def _adapt(model, width, asked, most, criterion, subset, prepared, filters, scale, keys, ends, counts, begin, end, known, before,
           orders, drawn, log_probs, cache):
  """Runs the steps from `begin` to before `end`, in each of which counts[step] tokens are drawn, at most `most`.

  The first `known` places of an order are drawn; the last `before` of those are not in the cache yet.
  """
  length = orders.shape[1]
  every = jnp.arange(length)

  def noise(start, places, purpose, draw):
    """Of the open places, anew in each step."""
    in_step = entries.fold(keys, 4 * start[:, None] + purpose)[:, 0]
    return jax.vmap(jax.vmap(draw))(entries.fold(in_step, places))

  def shuffled(rank, *arrays):
    """Arrays [B, L] by place, by rising rank."""
    index = jnp.argsort(rank, axis=1, stable=True)
    return [jnp.take_along_axis(x, index, axis=1) for x in arrays]

  def step(i, carry):
    known, before, orders, drawn, log_probs, cache = carry
    start, count = known[:, None], counts[i]
    is_open = (every >= start) & (every < ends[:, None])
    # Noise is of positions: how the open ones happen to lie must have no effect on what is chosen.
    of_position = lambda purpose, draw: noise(known, orders, purpose, draw)
    if subset:
      orders, = shuffled(jnp.where(is_open, of_position(_CANDIDATE, jax.random.uniform), jnp.where(every < start, -1, 2)), orders)
    row = jnp.stack([known - before, before, count, known, known])
    logits, cache = entries.ask(model, width, asked, prepared, orders, drawn, row, cache)
    logits = entries.known_logits(logits, filters)
    sure = CRITERIA[criterion](jax.nn.log_softmax(logits))
    places = start + jnp.arange(asked)
    inside = places < ends[:, None]
    positions = jnp.take_along_axis(orders, jnp.minimum(places, length - 1), axis=1)
    drawn_for = lambda purpose, draw: noise(known, positions, purpose, draw)
    # Added even where its scale is 0: it is data.
    sure = sure + scale * drawn_for(_NOISE, jax.random.gumbel)
    keys_of_sort = jnp.where(inside, -sure, jnp.inf), drawn_for(_TIE, jax.random.uniform)
    *_, best = jax.lax.sort((*keys_of_sort, jnp.broadcast_to(jnp.arange(asked), sure.shape)), num_keys=2)
    best = best[:, :most]
    chosen = jnp.take_along_axis(logits, best[..., None], axis=1)
    new = filters_lib.draw(entries.fold(keys, 4 * (start + jnp.arange(best.shape[1])) + _TOKEN), filters(chosen))

    # The chosen ones come next in the order, and the other open ones behind them.
    rank = jnp.where(every < start, -1, every + most)
    taken = jnp.where(jnp.arange(best.shape[1]) < count[:, None], start + best, length)
    rank = jax.vmap(lambda r, places: r.at[places].set(jnp.arange(len(places)), mode="drop"))(rank, taken)
    orders, = shuffled(rank, orders)
    place = jnp.where(count > 0, known, length)
    return (known + count, count, orders, entries.insert(drawn, new, place),
            entries.insert(log_probs, entries.log_probs_of(chosen, new), place), cache)

  return jax.lax.fori_loop(begin, end, step, (known, before, orders, drawn, log_probs, cache))
