"""tests/configs/words.py as sigma-GPT, whose target is input, with the other targets, and with schedules of the orders.

The first unit fails.
"""

import pathlib
import runpy

get_config = runpy.run_path(str(pathlib.Path(__file__).with_name("words.py")))["get_config"]


def sweep():
  yield "fails", {"data.tokenizer": "nowhere.tiktoken"}
  yield "sigma_gpt", {"model.target": "input", "model.norm": "layer", "model.qk_norm": False, "model.tied_head": True,
                      "model.bias": False, "model.weight_init": "normal"}
  yield "layer_shared", {"model.target": "layer_shared", "orders": "schedule(left_to_right, mix(0.5), linear, 2, 6)"}
  yield "layer_distinct", {"model.target": "layer_distinct", "orders": "growing_blocks(1, 16, cosine, 2, 6)"}
