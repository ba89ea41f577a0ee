"""GPT-2 small made any-order: its weights, on which an AO-GPT goes on from left to right to random orders.

    python -m aogpt_jax.main --config=configs/small_from_gpt2.py

20,000 steps of 524,288 tokens, 10.5B in all, of OpenWebText with GPT-2 BPE. The weights are GPT-2 small's of the Hugging Face hub; with
--config.init_from=gpt2:DIRECTORY those of a directory with config.json and *.safetensors. The orders go from left to right alone to
AO-GPT's mixture in the first half.

The architecture is AO-GPT's with what GPT-2 has instead of QK-norm and the exact GELU, so that left to right it begins as GPT-2 itself,
each block after <|endoftext|>: the first line of the log says with which loss. With the defaults of these two
(--config.model.qk_norm=True --config.model.activation=gelu) it begins close to it.

To expect: no published figures. Measured here: nothing yet. The step needs as many FLOPs per token as that of configs/small.py. On few
or small devices raise config.micro_batches until a micro-batch fits.
"""

import ml_collections

from aogpt_jax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
  config = config_lib.default_config()
  config.init_from = "gpt2:gpt2"
  config.steps = 20_000
  config.batch_size = 512
  config.orders = "schedule(left_to_right, mix(0.1), linear, 500, 10000)"
  config.model.update(qk_norm=False, activation="gelu_tanh")
  config.optimizer.update(learning_rate=3e-4, final_learning_rate=3e-5, warmup_steps=500, decay_steps=20_000)
  return config
