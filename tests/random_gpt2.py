"""Tiny GPT-2s with random weights, in files as Hugging Face writes them."""

import json
import pathlib

import numpy as np
import pytest

CONFIG = dict(model_type="gpt2", activation_function="gelu_new", n_layer=2, n_embd=8, n_head=2, n_positions=8, vocab_size=320,
              layer_norm_epsilon=1e-5)


def tensors(seed: int = 0, **fields) -> dict[str, np.ndarray]:
  """Name in a file -> float32 array, at which every part has an effect."""
  config = CONFIG | fields
  width = config["n_embd"]
  rng = np.random.default_rng(seed)
  shapes = {"wte.weight": (config["vocab_size"], width), "wpe.weight": (config["n_positions"], width), "ln_f.weight": (width,),
            "ln_f.bias": (width,)}
  for layer in range(config["n_layer"]):
    for name, shape in (("ln_1.weight", (width,)), ("ln_1.bias", (width,)), ("ln_2.weight", (width,)), ("ln_2.bias", (width,)),
                        ("attn.c_attn.weight", (width, 3 * width)), ("attn.c_attn.bias", (3 * width,)),
                        ("attn.c_proj.weight", (width, width)), ("attn.c_proj.bias", (width,)),
                        ("mlp.c_fc.weight", (width, 4 * width)), ("mlp.c_fc.bias", (4 * width,)),
                        ("mlp.c_proj.weight", (4 * width, width)), ("mlp.c_proj.bias", (width,))):
      shapes[f"h.{layer}.{name}"] = shape
  return {name: rng.normal(scale=0.4, size=shape).astype(np.float32) for name, shape in shapes.items()}


def write(directory: pathlib.Path, parameters: dict[str, np.ndarray] | None = None, **fields) -> str:
  """Writes a model and returns the directory; `fields` go into config.json."""
  from safetensors import numpy as safetensors

  directory.mkdir(parents=True, exist_ok=True)
  (directory / "config.json").write_text(json.dumps(CONFIG | fields))
  safetensors.save_file(parameters or tensors(**fields), directory / "model.safetensors")
  return str(directory)


def reference(directory, **fields):
  """transformers' GPT-2 with random weights, norms and biases too, and its files in a directory."""
  torch = pytest.importorskip("torch", reason="the reference runs on torch: pip install torch==2.13.0")
  transformers = pytest.importorskip("transformers", reason="the reference implementation: pip install transformers")
  torch.manual_seed(0)
  config = dict(n_layer=3, n_embd=24, n_head=3, n_positions=16, vocab_size=67) | fields
  model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.normal_(std=0.5)
  model.eval().save_pretrained(directory)
  return model
