"""MDLM and MD4, an encoder by the bound in continuous time: AO-GPT small otherwise.

    python -m aogpt_jax.main --config=configs/small_mdlm.py

250,000 steps of 1,048,576 tokens, 262B in all, of the data and the schedule of configs/small.py; 170,604,416 parameters.

To expect: about what configs/small_radd.py reaches, whose loss has the same mean (arXiv 2406.03736); the paper has no row for it.

Measured here: nothing yet. The step needs 8.55e8 FLOPs per token (aogpt_jax/training/flops.py), 2.2e20 for the whole run: at an
assumed 40% of the bfloat16 peak, 12 hours on 64 TPU v5e chips. On fewer or smaller devices raise config.micro_batches until a
micro-batch fits, and config.mesh.fsdp to split the state.
"""

import ml_collections

from aogpt_jax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
  config = config_lib.default_config()
  config.model.architecture = "encoder"
  config.objective = "lambda_dce"
  config.orders = "uniform"
  config.eval.distributions = ("uniform",)  # left to right takes a pass for each token: better after training
  return config
