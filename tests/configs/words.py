"""A run of seconds: two layers on a few thousand words. Tests give data.source and data.cache_dir."""

import ml_collections

from aogpt_jax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
  config = config_lib.default_config()
  config.steps = 20
  config.batch_size = 8
  config.micro_batches = 2
  config.orders = "mix(0.5)"
  config.model.update(layers=2, width=32, heads=2, block_size=16, vocab_size=320, cond_width=16, dtype="float32",
                      scan_layers=False)
  config.optimizer.update(learning_rate=1e-2, final_learning_rate=1e-3, warmup_steps=5, decay_steps=20)
  config.data.update(tokenizer="bytes", validation_fraction=0.2, test_fraction=0.2)
  config.eval.update(every_steps=10, batch_size=8, sequences=20, orders=2)
  config.sample.update(num_samples=1)
  config.checkpoint.every_steps = 10
  config.log.update(every_steps=1, tensorboard=False)
  config.compilation_cache = ""
  return config
