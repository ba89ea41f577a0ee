"""The models of docs/decoding.md: how fast and how well the samplers draw from them, and Sudokus, for which order decides.

    python -m aogpt_jax.decoding --config=configs/decoding.py           # trains what is missing, measures it, and writes the page
    python -m aogpt_jax.decoding --config=configs/decoding.py --redraw  # the page again from docs/decoding/results.json
    python -m aogpt_jax.main --config=configs/decoding.py               # the unit `longer` alone

Units: `tiny`, the model of configs/tiny.py; `longer`, the same for twice as many steps; `judge`, left to right, which scores what
these draw; and `sudoku_STEPS-SEED`, three of each number of steps. Times and figures are in docs/decoding.md.
"""

from collections.abc import Iterator
import pathlib
import runpy
from typing import Any

import ml_collections

from aogpt_jax import config as config_lib

STEPS = 5000
JUDGE_STEPS = 1500
SUDOKU_STEPS = (125, 250, 500, 1000)
SEEDS = (0, 1, 2)


def get_config() -> ml_collections.ConfigDict:
  config = config_lib.default_config()
  config.steps = STEPS
  config.batch_size = 32
  config.orders = "mix(0.4)"
  config.model.update(layers=4, width=128, heads=4, block_size=32, vocab_size=320, gate_init=1.0, position_init="sinusoid",
                      dtype="float32", scan_layers=False)
  config.optimizer.update(learning_rate=4e-3, final_learning_rate=3e-4, warmup_steps=50, decay_steps=STEPS)
  config.data.update(source="stdlib", tokenizer="bytes", validation_fraction=0.05, test_fraction=0.05)
  config.eval.update(every_steps=500, sequences=512, limit=2048, orders=4)
  config.sample.update(num_samples=1)
  config.checkpoint.update(every_steps=500, keep=2)
  config.log.update(every_steps=50, tensorboard=False)
  return config


def sweep() -> Iterator[tuple[str, dict[str, Any]]]:
  of_file = runpy.run_path(str(pathlib.Path(__file__).with_name("tiny.py")))
  base, tiny = (config_lib.flat(get()) for get in (get_config, of_file["get_config"]))
  yield "tiny", {field: value for field, value in tiny.items() if value != base[field]}
  yield "longer", {}
  yield "judge", {"orders": "left_to_right", "steps": JUDGE_STEPS, "optimizer.decay_steps": JUDGE_STEPS,
                  "eval.distributions": ("left_to_right",), "sample.orders": ("left_to_right",)}
  for seed in SEEDS:
    for steps in SUDOKU_STEPS:
      # A grid of 16 digits and 4 line feeds; most puzzles with 5 clues are hard for a person, too.
      yield f"sudoku_{steps}-{seed}", {
          "data.source": "sudoku:5", "seed": seed, "steps": steps, "orders": "uniform", "batch_size": 64, "model.layers": 3,
          "model.width": 96, "model.heads": 3, "model.block_size": 20, "optimizer.decay_steps": steps, "eval.every_steps": steps,
          "eval.limit": 512, "checkpoint.every_steps": steps, "sample.orders": ("uniform",), "sample.sampler": "adaptive",
          "sample.prompt": "1[[3]]\n[[2]]2[[1]]\n[[1]]3[[2]]\n[[1]]4[[1]]2\n"}
