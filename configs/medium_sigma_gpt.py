"""sigma-GPT medium, the baseline of the paper: 24 layers x 1024, 355,650,560 parameters, uniformly random orders.

    python -m aogpt_jax.main --config=configs/medium_sigma_gpt.py

Targets are added to the input, pre-LayerNorm, no QK-norm, a head tied to the token table, no biases. 460,000 steps of 1,048,576
tokens, 482B in all, of OpenWebText with GPT-2 BPE, as AO-GPT medium.

To expect (published, arXiv 2506.19935; zero-shot perplexity on LAMBADA / WikiText2 / PTB / WikiText103 / 1BW):
left to right 61.05 / 44.80 / 121.48 / 43.68 / 76.74, any order 57.27 / 43.28 / 126.11 / 41.80 / 74.81. The paper does not say in
which orders it was trained; that left to right is no better than any order speaks for uniform ones.

Measured here: nothing yet. The step needs 2.27e9 FLOPs per token (aogpt_jax/training/flops.py), 1.1e21 for the whole run: at an
assumed 40% of the bfloat16 peak, 60 hours on 64 TPU v5e chips. On fewer or smaller devices raise config.micro_batches until a
micro-batch fits, and config.mesh.fsdp to split the state.
"""

import ml_collections

from aogpt_jax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
  config = config_lib.default_config()
  config.orders = "uniform"
  config.steps = 460_000
  config.model.update(target="input", norm="layer", qk_norm=False, tied_head=True, bias=False, weight_init="normal",
                      layers=24, width=1024, heads=16)
  config.optimizer.learning_rate = 3e-4
  return config
