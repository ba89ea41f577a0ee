"""AO-GPT medium as released: 24 layers x 1024, 425,804,928 parameters, any-order with 10% left-to-right data.

    python -m aogpt_jax.main --config=configs/medium.py

460,000 steps of 1,048,576 tokens, 482B in all, of OpenWebText with GPT-2 BPE.

To expect (published, arXiv 2506.19935; zero-shot perplexity on LAMBADA / WikiText2 / PTB / WikiText103 / 1BW):
left to right 42.44 / 31.52 / 87.56 / 30.86 / 50.23, any order 49.79 / 33.73 / 101.01 / 32.38 / 65.90.

Measured here: nothing yet. The step needs 2.27e9 FLOPs per token (aogpt_jax/training/flops.py), 1.1e21 for the whole run: at an
assumed 40% of the bfloat16 peak, 60 hours on 64 TPU v5e chips. On fewer or smaller devices raise config.micro_batches until a
micro-batch fits, and config.mesh.fsdp to split the state.
"""

import ml_collections

from aogpt_jax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
  config = config_lib.default_config()
  config.steps = 460_000
  config.model.update(layers=24, width=1024, heads=16)
  config.optimizer.learning_rate = 3e-4
  return config
