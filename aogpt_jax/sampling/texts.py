"""Texts drawn from a run's model, one batch for each order distribution of its config."""

from typing import Any

import jax
import numpy as np

from aogpt_jax import orders
from aogpt_jax import sharding
from aogpt_jax.run import Run
from aogpt_jax.sampling import decode
from aogpt_jax.sampling import filters as filters_lib
from aogpt_jax.sampling import plan as plan_lib


def draw(run: Run, params: Any) -> str:
  """Draws `config.sample.batch_size` texts for each of `config.sample.orders` and returns them under headings."""
  config = run.config.sample
  length = config.length or run.config.model.block_size
  filters = filters_lib.Filters(
      run.tokenizer.vocab_size, temperature=config.temperature, top_p=config.top_p, top_k=config.top_k)
  order_key, token_key = jax.random.split(orders.root_key(config.seed))
  keys = jax.device_put(jax.random.split(token_key, config.batch_size), sharding.replicated(run.mesh))
  unknown = np.zeros((config.batch_size, length), bool)
  parts = []
  for spec in config.orders:
    sigma = orders.draw(spec, order_key, 0, jax.numpy.arange(config.batch_size), length)
    plan = plan_lib.make_plan(np.asarray(sigma), unknown, config.steps or length, counts=config.counts,
                              schedule=config.schedule, rng=np.random.default_rng(config.seed))
    samples = decode.sample(run.model, params, plan, np.zeros_like(plan.orders), keys, filters)
    for i, row in enumerate(jax.device_get(samples.tokens)):
      parts.append(f"--- {spec}, {samples.evaluations} evaluations, sample {i + 1} ---\n{run.tokenizer.decode(row)}")
  return "\n".join(parts) + "\n"
