"""Likelihood of held-out text: exact left-to-right perplexity, the any-order bound and the tighter one of several orders at once.

Per-sequence sums come off the device in float32; everything over sequences is kept in float64 and divided once, so that
batch size, padding and number of devices do not change a perplexity.
"""

from collections.abc import Callable, Iterable
import dataclasses
import functools
import math
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from aogpt_jax import objectives
from aogpt_jax import orders
from aogpt_jax import sharding


@dataclasses.dataclass(frozen=True)
class Likelihood:
  """Negative log-likelihood of the scored text under one distribution of orders."""

  nats_per_token: float
  perplexity: float  # exp(nats_per_token)
  bits_per_byte: float  # total bits over the UTF-8 bytes that the scored tokens stand for
  stderr_sequences: float  # of nats_per_token, over the sequences
  stderr_orders: float  # of nats_per_token, over the repeated orders of the same text; nan for one order or none
  # -log of the mean over the orders of p(sequence | order), per token: with K orders, a bound on the likelihood of the mixture
  # of all orders that tightens in expectation with K (Burda et al., arXiv 1509.00519); for one order it is nats_per_token, and
  # from masks it is not known: nan.
  iw_nats_per_token: float
  iw_stderr_sequences: float  # of iw_nats_per_token, over the sequences
  orders: int  # per sequence, R and K; 0 where it is estimated from masks
  masks: int  # per sequence, from which it is estimated; 0 where whole orders are scored
  sequences: int
  tokens: int
  bytes: int
  # Of each sequence, float64 [sequences]: its nats, the mean over the orders or the masks, and its scored tokens. Of two models on
  # the same sequences, the difference of the nats varies far less than either.
  sequence_nats: np.ndarray = dataclasses.field(repr=False, compare=False)
  sequence_tokens: np.ndarray = dataclasses.field(repr=False, compare=False)


def evaluate(
    model: nn.Module, params: Any, batches: Iterable[tuple[np.ndarray, np.ndarray]], *, mesh: Mesh,
    token_bytes: np.ndarray, repeats: dict[str, int], masks: int = 0, seed: int = 0,
    progress: Callable[[int], None] = lambda sequences: None,
) -> dict[str, Likelihood]:
  """Likelihood under every order distribution of `repeats`.

  Args:
    model: a decoder, or an encoder, which needs T passes for an order.
    params: its parameters, sharded over `mesh`.
    batches: this process's rows, as `loader.eval_batches` yields them: tokens int32 [b, T] and lengths int32 [b], how many tokens
      of a row are text; of examples, tokens and parts int32 [b, 2, T], of which what is predicted is scored.
    mesh: from `sharding.make_mesh`.
    token_bytes: int32 [V'], bytes that each token stands for.
    repeats: name of a distribution (see `orders.parse`) -> orders drawn per sequence.
    masks: above 0, the NLL of an encoder in uniform order is estimated from so many passes over a sequence with masks, of sizes
      that are spread evenly over 1..T (the bound of RADD, arXiv 2406.03736); its standard error is over the sequences.
    seed: of the orders; a sequence's orders depend on its index alone, not on the batch size.
    progress: called with the number of sequences scored so far.
  """
  for spec in repeats:
    orders.check_constant(spec)
  masks = masks if "uniform" in repeats else 0
  plan = tuple((spec, count) for spec, count in repeats.items() if not (masks and spec == "uniform"))
  table = jax.device_put(np.asarray(token_bytes, np.int32), sharding.replicated(mesh))
  nll, lengths, size, first_row = [], [], [], 0
  for tokens, length in batches:
    batch = tuple(sharding.place_batch(mesh, np.asarray(x, np.int32)) for x in (tokens, length))
    row = jax.device_put(np.int32(first_row), sharding.replicated(mesh))
    out = jax.device_get(_score(model, mesh, plan, masks, seed, params, *batch, row, table))
    for total, x in zip((nll, lengths, size), out):
      total.append(np.asarray(x, np.float64))
    first_row += batch[0].shape[0]
    progress(int(sum((x > 0).sum() for x in lengths)))
  if not nll:
    raise ValueError("there is nothing to evaluate: the split has no sequences.")
  lengths = np.concatenate(lengths)
  keep = lengths > 0
  nll_RB, lengths, size = np.concatenate(nll, axis=1)[:, keep], lengths[keep], np.concatenate(size)[keep].sum()
  results, start = {}, 0
  for name, count in plan:
    results[name] = summary(nll_RB[start : start + count], lengths, int(size))
    start += count
  if masks:
    results["uniform"] = summary(nll_RB[start:], lengths, int(size), from_masks=True)
  return {name: results[name] for name in repeats}


def summary(nll_RB: np.ndarray, lengths: np.ndarray, size: int, from_masks: bool = False) -> Likelihood:
  """From the summed nats of each of B sequences in each of R orders, or from R masks of different sizes.

  Args:
    nll_RB: nats.
    lengths: tokens of each sequence, [B].
    size: bytes of all sequences.
    from_masks: what was summed are estimates from masks.
  """
  count, sequences = nll_RB.shape
  mean, stderr = per_token(nll_RB.mean(axis=0), lengths)
  bound, bound_stderr = (math.nan,) * 2 if from_masks else per_token(nll_of_mean(nll_RB, axis=0), lengths)
  by_order = nll_RB.sum(axis=1) / lengths.sum()
  several = count > 1 and not from_masks
  return Likelihood(
      nats_per_token=mean, perplexity=math.exp(min(mean, 700.0)),
      bits_per_byte=float(nll_RB.mean(axis=0).sum()) / max(size, 1) / math.log(2), stderr_sequences=stderr,
      stderr_orders=float(by_order.std(ddof=1) / math.sqrt(count)) if several else math.nan,
      iw_nats_per_token=bound, iw_stderr_sequences=bound_stderr, orders=0 if from_masks else count,
      masks=count if from_masks else 0, sequences=sequences, tokens=int(lengths.sum()), bytes=size,
      sequence_nats=nll_RB.mean(axis=0), sequence_tokens=lengths)


def per_token(sums: np.ndarray, lengths: np.ndarray) -> tuple[float, float]:
  """Mean over tokens of something summed over each of B sequences of these lengths, and its standard error over the sequences.

  Where lengths differ, the mean is a ratio of two sums, and the error is that of a ratio (delta method).
  """
  count, tokens = len(sums), lengths.sum()
  mean = float(sums.sum() / tokens)
  if count < 2:
    return mean, math.nan
  return mean, float(np.sqrt(np.square(sums - mean * lengths).sum() * count / (count - 1)) / tokens)


def nll_of_mean(nll: np.ndarray, axis: int = -1) -> np.ndarray:
  """-log(mean over an axis of exp(-nll)) in float64; nats in, nats out."""
  nll = np.asarray(nll, np.float64)
  least = nll.min(axis=axis, keepdims=True)
  return np.squeeze(least, axis) - np.log(np.exp(least - nll).mean(axis=axis))


@functools.partial(jax.jit, static_argnames=("model", "mesh", "plan", "masks", "seed"))
def _score(model, mesh, plan, masks, seed, params, tokens, lengths, first_row, token_bytes):
  """Summed nats [R, B] over all orders of the plan and then over the masks, lengths [B] and bytes [B], on every process."""
  tokens, parts = objectives.unpack(tokens)
  batch, length = tokens.shape
  if parts is None:
    is_text = jnp.arange(length) < lengths[:, None]
    arranged = lambda sigma_BT: orders.within(sigma_BT, lengths)
  else:
    is_text = (parts == orders.PREDICTED) & (lengths > 0)[:, None]
    arranged = lambda sigma_BT: orders.by_parts(sigma_BT, parts)
    lengths = is_text.sum(axis=1)
  rows = jax.lax.with_sharding_constraint(first_row + jnp.arange(batch), sharding.batch_sharding(mesh))
  key = orders.root_key(seed)
  sigma = [orders.draw(spec, key, r, rows, length) for spec, count in plan for r in range(count)]

  def score(sigma_BT):
    sigma_BT = arranged(sigma_BT)
    with sharding.on_mesh(mesh):
      nll_BT = objectives.any_order_nll(model, params, tokens, sigma_BT)
    return jnp.where(jnp.take_along_axis(is_text, sigma_BT, axis=1), nll_BT, 0.0).sum(axis=1)

  def estimate(r):
    sigma_BT = orders.within(orders.draw("uniform", key, r, rows, length), lengths)
    masked, count = objectives.mask_end(sigma_BT, objectives.stratum(key, r, masks, rows), lengths)
    with sharding.on_mesh(mesh):
      nll_BT = objectives.nll_given_rest(model, params, tokens, masked)
    return jnp.where(is_text & masked, nll_BT, 0.0).sum(axis=1) * lengths / count

  nats = [jax.lax.map(score, jnp.stack(sigma))] if sigma else []
  nats += [jax.lax.map(estimate, jnp.arange(masks))] if masks else []
  out = jnp.concatenate(nats), lengths, jnp.where(is_text, token_bytes[tokens], 0).sum(axis=1)
  return jax.lax.with_sharding_constraint(out, sharding.replicated(mesh))
