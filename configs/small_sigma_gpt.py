"""sigma-GPT small, the baseline of the paper: 12 layers x 768, 125,161,728 parameters, uniformly random orders.

    python -m aogpt_jax.main --config=configs/small_sigma_gpt.py

Targets are added to the input, pre-LayerNorm, no QK-norm, a head tied to the token table, no biases. 250,000 steps of 1,048,576
tokens, 262B in all, of OpenWebText with GPT-2 BPE, as AO-GPT small.

To expect (published, arXiv 2506.19935; zero-shot perplexity on LAMBADA / WikiText2 / PTB / WikiText103 / 1BW):
left to right 68.61 / 57.66 / 146.87 / 55.54 / 90.98, any order 65.83 / 53.08 / 138.61 / 50.75 / 87.71. The paper does not say in
which orders it was trained; that left to right is no better than any order speaks for uniform ones.

Measured here: nothing yet. The step needs 7.98e8 FLOPs per token (aogpt_jax/training/flops.py), 2.1e20 for the whole run: at an
assumed 40% of the bfloat16 peak, 12 hours on 64 TPU v5e chips. On fewer or smaller devices raise config.micro_batches until a
micro-batch fits, and config.mesh.fsdp to split the state.
"""

import ml_collections

from aogpt_jax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
  config = config_lib.default_config()
  config.orders = "uniform"
  config.model.update(target="input", norm="layer", qk_norm=False, tied_head=True, bias=False, weight_init="normal")
  return config
