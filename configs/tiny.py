"""tiny."""

from aogpt_jax import config as config_lib


def get_config():
  config = config_lib.default_config()
  config.steps = 100
  config.batch_size = 64
  config.orders = "mix(0.3)"
  config.model.update(layers=4, width=128, heads=4, block_size=64, vocab_size=320, dtype="float32", scan_layers=False)
  config.optimizer.update(learning_rate=2e-3, final_learning_rate=1e-4, warmup_steps=50, decay_steps=1000)
  config.data.update(source="stdlib", tokenizer="bytes", validation_fraction=0.05, test_fraction=0.05)
  config.eval.update(every_steps=50, sequences=256)
  config.checkpoint.every_steps = 50
  return config
