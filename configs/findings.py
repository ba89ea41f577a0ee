"""The paper's findings at a size that two cores train in hours: every model of docs/findings.md, three seeds.

    python -m aogpt_jax.findings --config=configs/findings.py --jobs=2  # trains what is missing, and writes the page
    python -m aogpt_jax.findings --config=configs/findings.py --redraw  # the page again from docs/findings/results.json
    python -m aogpt_jax.main --config=configs/findings.py               # the decoder trained in any order alone

Each unit: 2,000 steps of 1,024 tokens, or 4,000 of them, on the English prose of the Python standard library (2.2 MB), byte by byte; a
decoder or encoder of 3 layers x 96. Times and figures are in docs/findings.md.
"""

from collections.abc import Iterator
from typing import Any

import ml_collections

from aogpt_jax import config as config_lib

SEEDS = (0, 1, 2)
STEPS = 2000
LONG = 4000  # of the arms that after STEPS are still on the plateau, or were not long enough off it to be told apart


def get_config() -> ml_collections.ConfigDict:
  config = config_lib.default_config()
  config.steps = STEPS
  config.batch_size = 64
  config.orders = "uniform"
  # As configs/tiny.py: short blocks, sinusoids and open gates shorten the plateau on which any-order training begins.
  config.model.update(layers=3, width=96, heads=3, block_size=16, vocab_size=320, gate_init=1.0, position_init="sinusoid",
                      dtype="float32", scan_layers=False)
  config.optimizer.update(learning_rate=4e-3, final_learning_rate=3e-4, warmup_steps=50, decay_steps=STEPS)
  config.data.update(source="stdlib", tokenizer="bytes", validation_fraction=0.05, test_fraction=0.05)
  config.eval.update(every_steps=STEPS // 5, sequences=256, limit=1024, orders=2, ensemble=8, gap=8, targets=8, lanes=256)
  config.sample.update(num_samples=1)
  config.checkpoint.update(every_steps=STEPS, keep=1)
  config.log.update(every_steps=50, tensorboard=False)
  return config


def sweep() -> Iterator[tuple[str, dict[str, Any]]]:
  orders = {"eval.distributions": ("left_to_right", "uniform", "right_to_left", "block_wise(4)", "fixed_random(1)")}
  encoder = {"model.architecture": "encoder", "eval.ensemble": 1}
  urn = {"data.source": "urn:15"}
  longer = {"steps": LONG, "optimizer.decay_steps": LONG, "eval.every_steps": LONG // 5, "checkpoint.every_steps": LONG}
  in_order = lambda spec: orders | {"orders": spec}
  units = {
      "uniform": orders,
      "left_to_right": in_order("left_to_right"),
      "fixed_random": in_order("fixed_random(1)"),
      "block_wise": in_order("block_wise(4)"),
      **{f"mix_{r:g}": {"orders": f"mix({r:g})"} for r in (0.1, 0.5)},
      **{f"target_{target}": {"model.target": target, "model.gate_init": 0.0}
         for target in ("input", "layer_shared", "layer_distinct")},
      "sigma_gpt": {"model.target": "input", "model.gate_init": 0.0, "model.norm": "layer", "model.qk_norm": False,
                    "model.tied_head": True, "model.weight_init": "normal"},
      **{f"ema_{decay:g}": {"optimizer.ema_decay": decay} for decay in (0.0, 0.99)},
      "encoder_ao": encoder | {"objective": "ao"},
      "encoder_ao_mix_0.1": encoder | {"objective": "ao", "orders": "mix(0.1)"},
      "encoder_lambda_dce": encoder | {"objective": "lambda_dce"},
      "encoder_score_entropy": encoder | {"objective": "score_entropy"},
      "contexts_4": {"objective": "context_average", "batch_size": 16},
      "urn_left_to_right": urn | {"orders": "left_to_right"},
      "urn_uniform": urn,
      "long_uniform": longer | orders,
      "long_left_to_right": longer | in_order("left_to_right"),
      "long_mix_0.1": longer | {"orders": "mix(0.1)"},
      "long_encoder_ao": longer | encoder | {"objective": "ao"},
      "long_encoder_ao_mix_0.1": longer | encoder | {"objective": "ao", "orders": "mix(0.1)"},
  }
  # Seed by seed, so that a page without error bars is there as soon as can be.
  for seed in SEEDS:
    for name, fields in units.items():
      yield f"{name}-{seed}", fields | {"seed": seed}
