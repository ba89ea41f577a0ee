"""Golden numbers of the PyTorch code (tests/golden/), and its weights in this project's layout."""

import json
import pathlib

import numpy as np

from aogpt_jax import config as config_lib
from aogpt_jax.conversion import names

GOLDEN = pathlib.Path(__file__).parent / "golden"
NAMES = ("aogpt_a", "aogpt_b")
SIGMA_GPT = "sigmagpt_a"


def load(name):
  """All arrays of a golden file and the config of its model, in float32."""
  with np.load(GOLDEN / f"{name}.npz") as f:
    arrays = dict(f)
  dims = json.loads(str(arrays["config"]))
  config = config_lib.default_config()
  config.batch_size, config.micro_batches = len(arrays["tokens"]), 1
  config.model.update(layers=dims["n_layer"], width=dims["n_embd"], heads=dims["n_head"], block_size=dims["block_size"],
                      vocab_size=dims["vocab_size"], dtype="float32", scan_layers=False)
  if name == SIGMA_GPT:
    config.model.update(target="input", norm="layer", qk_norm=False, tied_head=True, bias=dims["bias"], weight_init="normal")
  return arrays, config


def to_tree(arrays, config, prefix="params/"):
  """The PyTorch parameters under a prefix as a tree of this project."""
  return names.to_tree(config.model, lambda name: arrays[f"{prefix}{name}"])
