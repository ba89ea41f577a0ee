"""SEDD, an encoder by score entropy that is told the noise level: AO-GPT small otherwise.

    python -m aogpt_jax.main --config=configs/small_sedd.py

250,000 steps of 1,048,576 tokens, 262B in all, of the data and the schedule of configs/small.py; 170,637,440 parameters.

To expect (published of SEDD's own training, arXiv 2506.19935; zero-shot perplexity on LAMBADA / WikiText2 / PTB /
WikiText103 / 1BW): left to right 49.41 / 41.19 / 118.74 / 41.70 / 72.60, any order 50.92 / 41.84 / 114.24 /
40.62 / 79.29.

Its scores are normalised where it is sampled or evaluated: it draws in two stages, which is not SEDD's released sampler, and its
likelihood is that of what so is drawn.

Measured here: nothing yet. The step needs 8.55e8 FLOPs per token (aogpt_jax/training/flops.py), 2.2e20 for the whole run: at an
assumed 40% of the bfloat16 peak, 12 hours on 64 TPU v5e chips. On fewer or smaller devices raise config.micro_batches until a
micro-batch fits, and config.mesh.fsdp to split the state.
"""

import ml_collections

from aogpt_jax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
  config = config_lib.default_config()
  config.model.architecture = "encoder"
  config.objective = "score_entropy"
  config.orders = "uniform"
  config.eval.distributions = ("uniform",)  # left to right takes a pass for each token: better after training
  return config
