"""tiny."""

from aogpt_jax import config as config_lib


def get_config():
  config = config_lib.default_config()
  config.steps = 2000
  config.batch_size = 32
  config.orders = "mix(0.2)"
  config.model.update(layers=4, width=128, heads=4, block_size=64, vocab_size=320, dtype="float32", scan_layers=False,
                      gate_init=1.0, position_init="sinusoid")
  config.optimizer.update(learning_rate=5e-3, final_learning_rate=3e-4, warmup_steps=50, decay_steps=2000)
  config.data.update(source="stdlib", tokenizer="bytes", validation_fraction=0.05, test_fraction=0.05)
  config.eval.update(every_steps=200, sequences=256)
  config.checkpoint.every_steps = 500
  return config
