"""Training objectives: what is drawn for the examples of a batch, and what these then cost, in nats per token.

The loss is the mean of an objective's `nats` over the batch. What is drawn for a row depends on the key, the step and the row's
number in the global batch, so that it is the same on any number of devices and in any division into micro-batches.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

from flax import linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from aogpt_jax import config as config_lib
from aogpt_jax import orders as orders_lib
from aogpt_jax.models import encoder
from aogpt_jax.models import head

_LEAST_LEVEL = 1e-3  # of score entropy, as SEDD
# Where the draws of noise levels, of masks and of context orders start, apart from those of orders, which are numbered by steps.
_LEVELS, _MASKS, _CONTEXTS = 1 << 30, (1 << 30) + 1, (1 << 30) + 2
CONTEXTS = 4  # K, orders of a context that `context_average` averages over


@dataclasses.dataclass(frozen=True)
class Objective:
  """A training loss as two pure functions.

  Attributes:
    draw: (distribution of orders, key, step, rows int [B], T) -> a tree of arrays [B, ...], for all rows of the global batch.
    nats: (model, params, tokens int [b, T], what was drawn for these rows) -> float32 [b] or [b, T], nats per token.
  """

  draw: Callable[[str, jax.Array, jax.Array | int, jax.Array, int], Any]
  nats: Callable[[nn.Module, Any, jax.Array, Any], jax.Array]


@flax.struct.dataclass
class Contexts:
  orders: jax.Array  # int [B, K, T], which differ in the order of their first positions alone
  known: jax.Array  # int [B], how many those are


@flax.struct.dataclass
class Masks:
  masked: jax.Array  # bool [B, T]
  level: jax.Array  # float32 [B], the noise level t


@flax.struct.dataclass
class Weighted:
  orders: jax.Array  # int [B, T], what is given first and padding last
  weights: jax.Array  # float32 [B, T], in this order: 0 for what is given and padding, else equal and 1 in the mean over all


def unpack(batch: jax.Array) -> tuple[jax.Array, jax.Array | None]:
  """Tokens int [B, T], and of examples what each of them is: see orders.py; from int [B, T], or [B, 2, T] of examples."""
  return (batch, None) if batch.ndim == 2 else (batch[:, 0], batch[:, 1])


def weigh(orders: jax.Array, parts: jax.Array) -> Weighted:
  """Orders of examples, from those drawn for their rows, and the weights with which the mean of nats is over what is predicted.

  A batch of which nothing is predicted has weights of 0.
  """
  orders = orders_lib.by_parts(orders, parts)
  counted = jnp.take_along_axis(parts, orders, axis=1) == orders_lib.PREDICTED
  return Weighted(orders, counted * (counted.size / jnp.maximum(counted.sum(), 1)).astype(jnp.float32))


def weighted_nll(model: nn.Module, params: Any, tokens: jax.Array, drawn: Weighted) -> jax.Array:
  """Weighted nats of each entry, float32 [B, T]."""
  return any_order_nll(model, params, tokens, drawn.orders) * drawn.weights


def any_order_nll(model: nn.Module, params: Any, tokens: jax.Array, orders: jax.Array) -> jax.Array:
  """-log p(x_sigma(i) | x_sigma(<i)) of each entry i in nats, float32 [B, S] (arXiv 2506.19935).

  A decoder has them all in one pass; an encoder needs S.

  Args:
    model: a decoder or an encoder.
    params: its parameters.
    tokens: int [B, N].
    orders: int [B, S], S <= N.
  """
  if isinstance(model, encoder.Encoder):
    places = jnp.arange(orders.shape[1])
    nll = jax.lax.map(lambda i: next_nll(model, params, tokens, orders, jnp.full(len(orders), i)), places)
    return nll.swapaxes(0, 1)
  log_sum, label_logits = _normalizers(model, params, jnp.take_along_axis(tokens, orders, axis=1), tokens, orders)
  return log_sum - label_logits


def context_average_nll(model: nn.Module, params: Any, tokens: jax.Array, contexts: Contexts) -> jax.Array:
  """Nats of each entry with the probability of those after the context averaged over its K orders, float32 [B, T].

  What is averaged in the ensemble of evaluation, trained for; it costs K passes. The entries of the context itself have other
  targets in each order, and count by the mean of their nats.
  """
  batch, count, length = contexts.orders.shape
  nll = any_order_nll(model, params, jnp.repeat(tokens, count, axis=0), contexts.orders.reshape(-1, length))
  nll_BKT = nll.reshape(batch, count, length)
  averaged_BT = math.log(count) - jax.nn.logsumexp(-nll_BKT, axis=1)
  return jnp.where(jnp.arange(length) < contexts.known[:, None], nll_BKT.mean(axis=1), averaged_BT)


def next_nll(model: encoder.Encoder, params: Any, tokens: jax.Array, orders: jax.Array, places: jax.Array) -> jax.Array:
  """-log p(x_sigma(i) | x_sigma(<i)) in nats by an encoder, float32 [B]; int tokens [B, N], orders [B, S] and places i [B]."""
  (_, length), (_, count) = tokens.shape, orders.shape
  place_of = jax.vmap(lambda order: jnp.full(length, count).at[order].set(jnp.arange(count)))(orders)
  target = jnp.take_along_axis(orders, places[:, None], axis=1)
  logits = model.apply({"params": params}, jnp.where(place_of < places[:, None], tokens, model.mask_id), target)
  return cross_entropy(logits, jnp.take_along_axis(tokens, target, axis=1))[:, 0]


def masked_nll(model: encoder.Encoder, params: Any, tokens: jax.Array, masks: Masks) -> jax.Array:
  """(1 / (T t)) * sum over masked of -log p, float32 [B].

  Where m is uniform on 1..T, m of T tokens are masked at random and t = m / T, its mean is a bound on the NLL per token (RADD, Ou
  et al., arXiv 2406.03736). It has the same mean where t is uniform on (0, 1) and each token is masked with probability t
  (lambda-DCE there; MDLM, Sahoo et al., arXiv 2406.07524, and MD4, Shi et al., arXiv 2406.04329, with a linear schedule).
  """
  return _over_masked(masks, nll_given_rest(model, params, tokens, masks.masked, masks.level))


def score_entropy(model: encoder.Encoder, params: Any, tokens: jax.Array, masks: Masks) -> jax.Array:
  """SEDD's loss for the absorbing process, float32 [B] (Lou et al., arXiv 2310.16834).

  With scores s_y = r exp(f_y) / V', f the logits and r = 1 / (exp(sigma) - 1), its loss for a masked token x is
  sigma' * [sum_y s_y - r log s_x + r (log r - 1)]. Since sigma' r = 1/t, this equals (1/t) * [-log p_x + Z - 1 - log Z] with
  p = softmax f and Z = mean_y exp f, and is computed so. It is least where s_y = r p(y | what is not masked), and there Z = 1.
  """
  log_sum, label_logits = _masked_normalizers(model, params, tokens, masks.masked, masks.level)
  log_z = log_sum - math.log(model.num_tokens)
  return _over_masked(masks, log_sum - label_logits + jnp.expm1(log_z) - log_z)


def nll_given_rest(
    model: encoder.Encoder, params: Any, tokens: jax.Array, masked: jax.Array, level: jax.Array | None = None
) -> jax.Array:
  """-log p of each token given those that are not masked, in nats, float32 [B, T]; level as in `Encoder.__call__`."""
  log_sum, label_logits = _masked_normalizers(model, params, tokens, masked, level)
  return log_sum - label_logits


def _masked_normalizers(model, params, tokens, masked, level):
  return _normalizers(model, params, tokens, jnp.where(masked, model.mask_id, tokens), None, level)


def _normalizers(model: nn.Module, params: Any, labels: jax.Array, *inputs: Any) -> tuple[jax.Array, jax.Array]:
  """Log of the sum over the vocabulary and logit of the label, of each entry, float32 [B, S]; `inputs` are those of the model."""
  x_BSD = model.apply({"params": params}, *inputs, method="features")
  return head.normalizers(x_BSD, *model.head_parameters(params), labels, model.head_chunk)


def _over_masked(masks: Masks, values_BT: jax.Array) -> jax.Array:
  return jnp.sum(jnp.where(masks.masked, values_BT, 0.0), axis=1) / (values_BT.shape[1] * masks.level)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """-log softmax(logits)[label] in nats, in float32; logits [..., V], labels int [...]."""
  logits = logits.astype(jnp.float32)
  label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
  return jax.nn.logsumexp(logits, axis=-1) - label_logits


def mask_end(orders: jax.Array, level: jax.Array, lengths: jax.Array | int) -> tuple[jax.Array, jax.Array]:
  """Masks all but the beginning of an order.

  Args:
    orders: int [B, T].
    level: float [B], t in (0, 1].
    lengths: n, of each sequence or of all; what comes later in its order is masked too.

  Returns:
    bool [B, T], and how many of the first n of the order are masked, float32 [B]: ceil(n t), at least 1.
  """
  count = jnp.maximum(jnp.ceil(level * lengths), 1)
  return jnp.argsort(orders, axis=1) >= (lengths - count)[:, None], count


def _draw_contexts(spec: str, key: jax.Array, step: jax.Array | int, rows: jax.Array, length: int) -> Contexts:
  """An order, the size of its context, uniform on 0..T-1, and other orders of that context."""
  order_BT = orders_lib.draw(spec, key, step, rows, length)
  step_key = jax.random.fold_in(jax.random.fold_in(key, _CONTEXTS), step)

  def of_row(row, order):
    size_key, *keys = jax.random.split(jax.random.fold_in(step_key, row), CONTEXTS)
    known, places = jax.random.randint(size_key, (), 0, length), jnp.arange(length)
    shuffled = [order[jnp.argsort(jnp.where(places < known, jax.random.uniform(k, (length,)), 1.0 + places))] for k in keys]
    return Contexts(jnp.stack([order, *shuffled]), known)

  return jax.vmap(of_row)(rows, order_BT)


def _draw_end(spec: str, key: jax.Array, step: jax.Array | int, rows: jax.Array, length: int) -> Masks:
  """All but the beginning of an order, with as many masked tokens as come out uniform on 1..T."""
  masked, count = mask_end(orders_lib.draw(spec, key, step, rows, length), spread_levels(key, step, rows), length)
  return Masks(masked, count / length)


def _draw_each(spec: str, key: jax.Array, step: jax.Array | int, rows: jax.Array, length: int) -> Masks:
  """Each token with probability t ~ U(0, 1); any order of the tokens would do."""
  del spec
  level = spread_levels(key, step, rows)
  return Masks(_coins(key, step, rows, length) < level[:, None], level)


def _draw_noise(spec: str, key: jax.Array, step: jax.Array | int, rows: jax.Array, length: int) -> Masks:
  """Each token with probability (1 - EPS) t, t ~ U(_LEAST_LEVEL, 1)."""
  del spec
  level = _LEAST_LEVEL + (1 - _LEAST_LEVEL) * spread_levels(key, step, rows)
  return Masks(_coins(key, step, rows, length) < (1 - encoder.EPS) * level[:, None], level)


def spread_levels(key: jax.Array, step: jax.Array | int, rows: jax.Array) -> jax.Array:
  """Noise levels uniform on (0, 1], float32 [B], evenly spread over the B rows of a batch (Kingma et al., arXiv 2107.00630)."""
  shift = jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, _LEVELS), step))
  return 1 - jnp.mod(shift + rows / len(rows), 1.0)


def stratum(key: jax.Array, index: int, strata: int, rows: jax.Array) -> jax.Array:
  """Noise levels uniform on one of so many equal parts of (0, 1], float32 [B]; from the key, the part and the row."""
  part_key = jax.random.fold_in(jax.random.fold_in(key, _LEVELS), index)
  return 1 - (index + jax.vmap(lambda row: jax.random.uniform(jax.random.fold_in(part_key, row)))(rows)) / strata


def _coins(key: jax.Array, step: jax.Array | int, rows: jax.Array, length: int) -> jax.Array:
  """Uniform on [0, 1), float32 [B, T]."""
  step_key = jax.random.fold_in(jax.random.fold_in(key, _MASKS), step)
  return jax.vmap(lambda row: jax.random.uniform(jax.random.fold_in(step_key, row), (length,)))(rows)


# By `config.objective`; those of a decoder come first.
OBJECTIVES: dict[str, Objective] = {
    "any_order": Objective(orders_lib.draw, any_order_nll),
    "context_average": Objective(_draw_contexts, context_average_nll),
    "ao": Objective(_draw_end, masked_nll),
    "lambda_dce": Objective(_draw_each, masked_nll),
    "score_entropy": Objective(_draw_noise, score_entropy),
}


def register(name: str, architecture: str, objective: Objective) -> None:
  """Adds an objective that `config.objective` can name, as a config file may do; `architecture` is what it trains."""
  OBJECTIVES[name] = objective
  names = config_lib.OBJECTIVES[architecture]
  config_lib.OBJECTIVES[architecture] = (*(n for n in names if n != name), name)
