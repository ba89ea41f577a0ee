"""A 1.3M-parameter AO-GPT on the English prose of the Python standard library, byte by byte.

    python -m aogpt_jax.main --config=configs/tiny.py

2,500 steps of 1,024 tokens, 2.6M in all, of 2.2 MB of text; four minutes on two CPU cores, everything included.

To expect (measured, Python 3.11.7): 2.01 nats/byte left to right and 2.56 in any order on the validation text, whose own unigram
and bigram entropies are 3.21 and 2.57. Another Python has another library, another machine rounds otherwise: expect differences of
0.1.
"""

import ml_collections

from aogpt_jax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
  config = config_lib.default_config()
  config.steps = 2500
  config.batch_size = 32
  # Far more left-to-right data than the paper's 10%: in minutes it is what teaches a model to spell.
  config.orders = "mix(0.4)"
  # Any-order training first sits on the unigram plateau, until attention has found out which positions are neighbours. Short
  # blocks, sinusoids and open gates shorten that from hours to seconds; the paper's larger runs need none of them.
  config.model.update(layers=4, width=128, heads=4, block_size=32, vocab_size=320, gate_init=1.0,
                      position_init="sinusoid", dtype="float32", scan_layers=False)
  config.optimizer.update(learning_rate=4e-3, final_learning_rate=3e-4, warmup_steps=50, decay_steps=2500)
  config.data.update(source="stdlib", tokenizer="bytes", validation_fraction=0.05, test_fraction=0.05)
  config.eval.update(every_steps=250, sequences=512, orders=4)
  config.sample.update(num_samples=4, temperature=0.8)
  config.checkpoint.every_steps = 500
  config.log.every_steps = 50
  return config
