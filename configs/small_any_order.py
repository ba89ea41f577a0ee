"""Uniformly random orders only: one of the order ablations, AO-GPT small otherwise.

    python -m aogpt_jax.main --config=configs/small_any_order.py

20,000 steps of 524,288 tokens, 10.5B in all, of the schedule of configs/small.py.

To expect (arXiv 2506.19935, figure 2a, which prints no numbers): a loss that falls more slowly than left to right and stays above it.

Measured here: nothing yet. The step needs 7.98e8 FLOPs per token (aogpt_jax/training/flops.py), 8.4e18 for the whole run: at an
assumed 40% of the bfloat16 peak, 0.5 hours on 64 TPU v5e chips. On fewer or smaller devices raise config.micro_batches until a
micro-batch fits, and config.mesh.fsdp to split the state.
"""

import ml_collections

from aogpt_jax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
  config = config_lib.default_config()
  config.steps = 20_000
  config.batch_size = 512
  config.orders = "uniform"
  return config
