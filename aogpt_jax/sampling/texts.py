"""Texts drawn from a run's model, one batch for each order distribution of its config."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np

from aogpt_jax import orders
from aogpt_jax import sharding
from aogpt_jax.run import Run
from aogpt_jax.sampling import decode
from aogpt_jax.sampling import filters as filters_lib
from aogpt_jax.sampling import plan as plan_lib
from aogpt_jax.sampling import prompts


@dataclasses.dataclass(frozen=True)
class Text:
  """One drawn text; the lists are by position."""

  order: str  # the distribution that its generation order was drawn from
  text: str
  ids: list[int]
  positions: list[int]  # in the order in which they were drawn, the given ones first
  steps: list[int]  # in which each token was drawn, from 1; 0 for given tokens
  log_probs: list[float]  # nats, of the model without filters; 0 for given tokens
  evaluations: int  # forward passes of the batch


def draw(run: Run, params: Any, prompt: str = "") -> list[Text]:
  """Draws `config.sample.batch_size` texts for each of `config.sample.orders`.

  Args:
    run: its config says how; the texts are the same at every call with the same parameters.
    params: of the run's model.
    prompt: see prompts.py.

  Raises:
    ValueError: the prompt is too long.
  """
  config = run.config.sample
  tokens, known = prompts.parse(prompt, run.tokenizer, config.length, run.config.model.block_size)
  tokens, known = (np.tile(x, (config.batch_size, 1)) for x in (tokens, known))
  filters = filters_lib.Filters(
      run.tokenizer.vocab_size, temperature=config.temperature, top_p=config.top_p, top_k=config.top_k)
  order_key, token_key = jax.random.split(orders.root_key(config.seed))
  keys = jax.device_put(jax.random.split(token_key, config.batch_size), sharding.replicated(run.mesh))
  texts = []
  for spec in config.orders:
    sigma = orders.draw(spec, order_key, 0, jax.numpy.arange(config.batch_size), tokens.shape[1])
    plan = plan_lib.make_plan(np.asarray(sigma), known, config.steps or tokens.shape[1], counts=config.counts,
                              schedule=config.schedule, rng=np.random.default_rng(config.seed))
    samples = decode.sample(run.model, params, plan, tokens, keys, filters)
    ids, log_probs = jax.device_get((samples.tokens, samples.log_probs))
    for b in range(config.batch_size):
      texts.append(Text(
          order=spec, text=run.tokenizer.decode(ids[b]), ids=ids[b].tolist(), positions=plan.orders[b].tolist(),
          steps=samples.steps[b].tolist(), log_probs=[round(float(x), 6) for x in log_probs[b]],
          evaluations=samples.evaluations))
  return texts


def readable(texts: list[Text]) -> str:
  """The texts under headings."""
  return "".join(f"--- {t.order}, {t.evaluations} evaluations, sample {i} ---\n{t.text}\n"
                 for i, t in zip(_numbers(texts), texts))


def json_lines(texts: list[Text]) -> str:
  """A JSON object per text, with the fields of Text."""
  return "".join(json.dumps(dataclasses.asdict(t), ensure_ascii=False) + "\n" for t in texts)


def _numbers(texts: list[Text]) -> list[int]:
  """1, 2, ... anew for each order."""
  return [sum(s.order == t.order for s in texts[: i + 1]) for i, t in enumerate(texts)]
