"""Golden numbers of the PyTorch code (tests/golden/), and its weights in this project's layout."""

import json
import pathlib

import numpy as np

from aogpt_jax import config as config_lib

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
  """The PyTorch parameters under a prefix as a tree of this project; a Linear weight is [out, in] there."""
  width, heads = config.model.width, config.model.heads
  get = lambda name: arrays[f"{prefix}{name}"]

  def dense(name, *features):
    bias = {"bias": get(f"{name}.bias").reshape(features)} if config.model.bias else {}
    return {"kernel": get(f"{name}.weight").T.reshape(-1, *features)} | bias

  def block(i):
    h = f"transformer.h.{i}"
    tree = {
        "norm1": {"scale": get(f"{h}.ln_1.weight")},
        "attention": {
            "qkv": dense(f"{h}.attn.c_attn", 3, heads, width // heads),
            "out": dense(f"{h}.attn.c_proj", width),
        },
        "norm2": {"scale": get(f"{h}.ln_2.weight")},
        "mlp": {"fc": dense(f"{h}.mlp.c_fc", 4 * width), "out": dense(f"{h}.mlp.c_proj", width)},
    }
    if config.model.target == "adaln":
      tree["modulation"] = {"dense": dense(f"{h}.adaLN.1", 6, width)}
      tree["attention"] |= {name: {"scale": get(f"{h}.attn.{name}.weight")} for name in ("q_norm", "k_norm")}
    return tree

  def stack(*trees):
    return {k: stack(*(t[k] for t in trees)) for k in trees[0]} if isinstance(trees[0], dict) else np.stack(trees)

  tree = {
      "tokens": {"embedding": get("transformer.wte.weight")},
      "positions": {"embedding": get("transformer.wpe.weight")},
      "start": {"embedding": get("transformer.wnonee.weight")},
      "targets": {"embedding": get("transformer.wtpe.weight")},
      "blocks": stack(*(block(i) for i in range(config.model.layers))),
  }
  if config.model.target == "input":
    return tree | {"final_norm": {"scale": get("transformer.ln_f.weight")}}
  return tree | {
      "final_modulation": {"dense": dense("transformer.final_layer.adaLN_final.1", 2, width)},
      "final_norm": {"scale": get("transformer.final_layer.ln_f.weight")},
      "head": dense("lm_head", config.model.vocab_size),
  }
