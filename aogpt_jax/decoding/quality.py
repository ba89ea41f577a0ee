"""Texts of every sampler: how good they are, and what it took to draw them.

Few steps cost quality, since tokens that are drawn together are drawn as if they were independent. So each text is scored twice:

* by the model that has drawn it, token by token, in the order in which it was drawn and from left to right. What was drawn one
  token a step has in its own order the model's own entropy; parallel draws make up what the model finds less likely;
* by a judge, another model of the same kind that was trained from left to right alone.

Low is not good in itself: one token again and again is likely too. Entropy and repetition stand beside it, and so do the figures
of held-out text.
"""

from collections.abc import Iterator
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from aogpt_jax import objectives
from aogpt_jax import orders
from aogpt_jax import samplers
from aogpt_jax.data import loader
from aogpt_jax.evaluation import generative_sweep
from aogpt_jax.evaluation import judge as judge_lib
from aogpt_jax.run import Run
from aogpt_jax.sampling import texts as texts_lib

HELD_OUT = "held-out text"
WINDOWS = (1, 2, 4, 8, 16)
# Tokens a step of samplers that draw several.
_TOGETHER = (2, 4, 8)


def methods(length: int) -> Iterator[tuple[str, dict[str, Any]]]:
  """(name of a line of the picture, arguments of `texts.generate`) of all that is compared, for texts of so many tokens."""
  steps = [length, *(max(length // n, 1) for n in _TOGETHER)]
  yield "left to right", dict(order="left_to_right")
  for family, more in (("fixed", {}), ("binomial", dict(counts="binomial")), ("spaced", dict(spaced=True))):
    for s in steps[family == "spaced" :]:  # one token a step can't be spread
      yield family, dict(order="uniform", steps=s) | more
  for window in WINDOWS:
    yield "speculative", dict(order="uniform", sampler="speculative", window=window)
  for checks in (1, 4):
    yield "burst", dict(order="uniform", sampler="burst", checks=checks)
  for criterion in samplers.CRITERIA:
    for s in steps[:-1]:
      yield f"adaptive, {criterion}", dict(order="uniform", sampler="adaptive", criterion=criterion, steps=s)


class Scorer:
  """Scores texts by the model that has drawn them and by a judge of the same tokens.

  Args:
    model, params: that draw.
    judge: a decoder of blocks at least as long.
    judge_params: its parameters.
  """

  def __init__(self, model: nn.Module, params: Any, judge: nn.Module, judge_params: Any):
    self._own, self._judge = (functools.partial(_nll, *x) for x in ((model, params), (judge, judge_params)))

  def __call__(self, tokens_NL: np.ndarray, orders_NL: np.ndarray) -> dict[str, float]:
    """Of N texts of L tokens and the orders in which they were drawn: nats per token, and statistics of the tokens."""
    in_order = np.broadcast_to(np.arange(tokens_NL.shape[1]), tokens_NL.shape)
    by_judge = judge_lib.summarise(self._judge(tokens_NL, in_order), tokens_NL, tokens_NL.shape[1])
    statistics = by_judge.statistics
    found = {
        "nll": float(self._own(tokens_NL, orders_NL).mean()), "nll_left_to_right": float(self._own(tokens_NL, in_order).mean()),
        "judge_nll": by_judge.nats_per_token, "judge_perplexity": by_judge.perplexity, "entropy": statistics.entropy,
        "distinct_2": statistics.distinct[2], "repetition": statistics.repetition}
    return {name: round(value, 5) for name, value in found.items()}


def of_texts(
    run: Run, params: Any, scorer: Scorer, settings: dict[str, Any], *, count: int, seed: int
) -> dict[str, float]:
  """Draws so many texts and scores them; evaluations and seconds are for each text, the latter in batches of `texts.generate`."""
  drawn, seconds, core_seconds = generative_sweep.timed(functools.partial(
      texts_lib.generate, run.model, params, run.tokenizer, num_samples=count, seed=seed, mesh=run.mesh, **settings))
  tokens, positions = (np.array([getattr(text, name) for text in drawn]) for name in ("ids", "positions"))
  return {"evaluations": float(np.mean([text.evaluations for text in drawn])), "seconds": round(seconds / count, 6),
          "core_seconds": round(core_seconds / count, 6)} | scorer(tokens, positions)


def of_held_out(run: Run, scorer: Scorer, *, count: int, seed: int) -> dict[str, float]:
  """The same of validation text, each row in a random order."""
  rows = loader.Rows(run.packed, "validation")
  # Other rows for each seed, as far as there are any.
  tokens = rows.read((loader.evenly_spread(len(rows), count) + seed) % len(rows))
  drawn = orders.draw("uniform", orders.root_key(seed), 0, jnp.arange(len(tokens)), tokens.shape[1])
  return scorer(tokens, np.asarray(drawn))


def _nll(model, params, tokens_NL, orders_NL) -> np.ndarray:
  """Nats of each entry, float64 [N, L]."""
  return np.asarray(_program(model)(params, jnp.asarray(tokens_NL, jnp.int32), jnp.asarray(orders_NL, jnp.int32)), np.float64)


@functools.cache
def _program(model):
  return jax.jit(functools.partial(objectives.any_order_nll, model))
