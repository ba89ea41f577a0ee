"""AO-GPT small as released: 12 layers x 768, 170,605,952 parameters, any-order with 10% left-to-right data.

    python -m aogpt_jax.main --config=configs/small.py

250,000 steps of 1,048,576 tokens, 262B in all, of OpenWebText with GPT-2 BPE.

To expect (published, arXiv 2506.19935; zero-shot perplexity on LAMBADA / WikiText2 / PTB / WikiText103 / 1BW):
left to right 52.46 / 42.10 / 135.96 / 40.97 / 71.73, any order 59.93 / 46.33 / 141.92 / 45.44 / 84.36.

Measured here: nothing yet. The step needs 7.98e8 FLOPs per token (aogpt_jax/training/flops.py), 2.1e20 for the whole run: at an
assumed 40% of the bfloat16 peak, 12 hours on 64 TPU v5e chips. On fewer or smaller devices raise config.micro_batches until a
micro-batch fits, and config.mesh.fsdp to split the state.
"""

import ml_collections

from aogpt_jax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
  config = config_lib.default_config()
  return config
