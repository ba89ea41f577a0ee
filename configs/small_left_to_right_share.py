"""Share of left-to-right data in any-order training: an ablation, AO-GPT small otherwise.

    python -m aogpt_jax.sweep --config=configs/small_left_to_right_share.py          # all, one after another
    python -m aogpt_jax.sweep --config=configs/small_left_to_right_share.py --print  # a command for each
    python -m aogpt_jax.main --config=configs/small_left_to_right_share.py           # AO-GPT itself for as long

20,000 steps of 524,288 tokens, 10.5B in all, of the schedule of configs/small.py, 6 times.

To expect (arXiv 2506.19935): a tenth lowers the losses of both orders.

Measured here: nothing yet. The step needs 7.98e8 FLOPs per token (aogpt_jax/training/flops.py), 8.4e18 for each run: at an assumed
40% of the bfloat16 peak, 0.5 hours on 64 TPU v5e chips. On fewer or smaller devices raise config.micro_batches until a micro-batch
fits, and config.mesh.fsdp to split the state.
"""

from collections.abc import Iterator
from typing import Any

import ml_collections

from aogpt_jax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
  config = config_lib.default_config()
  config.steps = 20_000
  config.batch_size = 512
  return config


def sweep() -> Iterator[tuple[str, dict[str, Any]]]:
  for share in (0.0, 0.01, 0.1, 0.25, 0.5, 1.0):
    yield f"share_{share:g}", {"orders": f"mix({share:g})"}
