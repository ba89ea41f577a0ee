"""Texts drawn from a run's model, one batch for each order distribution of its config."""

from typing import Any

import jax

from aogpt_jax import orders
from aogpt_jax import sharding
from aogpt_jax.run import Run
from aogpt_jax.sampling import generate


def draw(run: Run, params: Any) -> str:
  """Draws `config.sample.batch_size` texts for each of `config.sample.orders` and returns them under headings."""
  config = run.config.sample
  length = config.length or run.config.model.block_size
  place = lambda x: jax.device_put(x, sharding.replicated(run.mesh))
  key = orders.root_key(config.seed)
  parts = []
  for spec in config.orders:
    order_key, token_key = jax.random.split(key)
    sigma = orders.draw(spec, order_key, 0, jax.numpy.arange(config.batch_size), length)
    tokens = generate.generate(
        run.model, params, place(token_key), place(sigma), temperature=config.temperature,
        vocab_size=run.tokenizer.vocab_size)
    for i, row in enumerate(jax.device_get(tokens)):
      parts.append(f"--- {spec}, sample {i + 1} ---\n{run.tokenizer.decode(row)}")
  return "\n".join(parts) + "\n"
