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


def evaluate(
    model: nn.Module, params: Any, batches: Iterable[tuple[np.ndarray, np.ndarray]], *, mesh: Mesh,
    token_bytes: np.ndarray, repeats: dict[str, int], masks: int = 0, seed: int = 0,
    progress: Callable[[int], None] = lambda sequences: None,
) -> dict[str, Likelihood]:
  """Likelihood under every order distribution of `repeats`.

  Args:
    model: a decoder, or an encoder, which needs T passes for an order.
    params: its parameters, sharded over `mesh`.
    batches: this process's rows: tokens int32 [b, T] and weight float32 [b], 0 for a row that is padding.
    mesh: from `sharding.make_mesh`.
    token_bytes: int32 [V'], bytes that each token stands for.
    repeats: name of a distribution (see `orders.parse`) -> orders drawn per sequence.
    masks: above 0, the NLL of an encoder in uniform order is estimated from so many passes over a sequence with masks, of sizes
      that are spread evenly over 1..T (the bound of RADD, arXiv 2406.03736); its standard error is over the sequences.
    seed: of the orders; a sequence's orders depend on its index alone, not on the batch size.
    progress: called with the number of sequences scored so far.
  """
  masks = masks if "uniform" in repeats else 0
  plan = tuple((spec, count) for spec, count in repeats.items() if not (masks and spec == "uniform"))
  batch_sharding = sharding.batch_sharding(mesh)
  to_device = functools.partial(jax.make_array_from_process_local_data, batch_sharding)
  table = jax.device_put(np.asarray(token_bytes, np.int32), sharding.replicated(mesh))
  nll, weights, size, first_row, length = [], [], [], 0, 0
  for tokens, weight in batches:
    length = tokens.shape[1]
    batch = (to_device(np.asarray(tokens, np.int32)), to_device(np.asarray(weight, np.float32)))
    row = jax.device_put(np.int32(first_row), sharding.replicated(mesh))
    out = jax.device_get(_score(model, mesh, plan, masks, seed, params, *batch, row, table))
    for total, x in zip((nll, weights, size), out):
      total.append(np.asarray(x, np.float64))
    first_row += batch[0].shape[0]
    progress(int(sum(w.sum() for w in weights)))
  if not nll:
    raise ValueError("there is nothing to evaluate: the split has no sequences.")
  keep = np.concatenate(weights) > 0
  nll_RB = np.concatenate(nll, axis=1)[:, keep] / length  # nats per token, by order and sequence
  sequences, size = int(keep.sum()), int(np.concatenate(size)[keep].sum())
  results, start = {}, 0
  for name, count in (*plan, *([("uniform", masks)] if masks else [])):
    part, start = nll_RB[start : start + count], start + count
    mean = float(part.mean())
    spread = lambda x: float(np.std(x, ddof=1) / math.sqrt(len(x))) if len(x) > 1 else math.nan
    from_masks = masks > 0 and name == "uniform"
    bounds = np.full(sequences, np.nan) if from_masks else nll_of_mean(part * length, axis=0) / length
    results[name] = Likelihood(
        nats_per_token=mean, perplexity=math.exp(min(mean, 700.0)),
        bits_per_byte=mean * sequences * length / max(size, 1) / math.log(2),
        stderr_sequences=spread(part.mean(axis=0)), stderr_orders=math.nan if from_masks else spread(part.mean(axis=1)),
        iw_nats_per_token=float(bounds.mean()), iw_stderr_sequences=spread(bounds), orders=0 if from_masks else count,
        masks=count if from_masks else 0, sequences=sequences, tokens=sequences * length, bytes=size)
  return {name: results[name] for name in repeats}


def nll_of_mean(nll: np.ndarray, axis: int = -1) -> np.ndarray:
  """-log(mean over an axis of exp(-nll)) in float64; nats in, nats out."""
  nll = np.asarray(nll, np.float64)
  least = nll.min(axis=axis, keepdims=True)
  return np.squeeze(least, axis) - np.log(np.exp(least - nll).mean(axis=axis))


@functools.partial(jax.jit, static_argnames=("model", "mesh", "plan", "masks", "seed"))
def _score(model, mesh, plan, masks, seed, params, tokens, weight, first_row, token_bytes):
  """Summed nats [R, B] over all orders of the plan and then over the masks, weights [B] and bytes [B], on every process."""
  batch, length = tokens.shape
  rows = jax.lax.with_sharding_constraint(first_row + jnp.arange(batch), sharding.batch_sharding(mesh))
  key = orders.root_key(seed)
  sigma = [orders.draw(spec, key, r, rows, length) for spec, count in plan for r in range(count)]

  def score(sigma_BT):
    with sharding.on_mesh(mesh):
      return objectives.any_order_nll(model, params, tokens, sigma_BT).sum(axis=1)

  def estimate(r):
    masked = objectives.mask_end(orders.draw("uniform", key, r, rows, length), objectives.stratum(key, r, masks, rows))
    with sharding.on_mesh(mesh):
      return objectives.masked_nll(model, params, tokens, masked) * length

  nats = [jax.lax.map(score, jnp.stack(sigma))] if sigma else []
  nats += [jax.lax.map(estimate, jnp.arange(masks))] if masks else []
  out = jnp.concatenate(nats), weight, token_bytes[tokens].sum(axis=1)
  return jax.lax.with_sharding_constraint(out, sharding.replicated(mesh))
