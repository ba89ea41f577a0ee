"""A model as Hugging Face keeps one: model.safetensors by the names of the PyTorch code, config.json and README.md."""

import json
import pathlib
from typing import Any

from aogpt_jax import hugging_face
from aogpt_jax import records
from aogpt_jax.conversion import names
from aogpt_jax.conversion import published

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
_TYPES = {"AO-GPT": "ao_gpt", "sigma-GPT": "sigma_gpt"}


def read(directory: pathlib.Path) -> tuple[published.Published, str]:
  """The model in a directory, and whether its weights are ema or raw; they are `raw` of what is returned.

  Raises:
    ImportError: safetensors is not installed.
    OSError: a file can't be read.
    ValueError: a file is damaged, or its tensors are not those of config.json.
  """
  hugging_face.require_safetensors(str(directory))
  path = directory / CONFIG
  try:
    fields = records.value(path.read_bytes())
  except OSError as e:
    raise OSError(f"{path}: can't be read ({e.strerror}); give a directory with {CONFIG} and {WEIGHTS}.") from None
  except ValueError as e:
    raise ValueError(f"{path}: is not JSON ({e}); download or save it again.") from None
  if not isinstance(fields, dict) or fields.get("model_type") not in _TYPES.values():
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    raise ValueError(f"{path}: model_type is {kind!r}; it must be {' or '.join(_TYPES.values())}.")
  step, weights, settings = (fields.get(name) for name in ("iter_num", "weights", "training"))
  if type(step) is not int or not 0 <= step < 2**31 or weights not in ("ema", "raw") or not isinstance(settings, dict):
    raise ValueError(f"{path}: iter_num is {step!r}, weights {weights!r} and training of type {type(settings).__name__}; they must "
                     "be a number of updates, ema or raw, and the settings of the training script.")
  if not (directory / WEIGHTS).is_file():
    raise FileNotFoundError(f"{directory / WEIGHTS}: there is no such file; it belongs beside {CONFIG}.")
  tensors = dict(hugging_face.tensors(directory / WEIGHTS))
  try:
    kind, state = published.check_state(tensors, fields)
  except ValueError as e:
    raise ValueError(f"{directory}: {e}") from None
  if _TYPES[kind] != fields["model_type"]:
    raise ValueError(f"{path}: model_type is {fields['model_type']}, and the weights are of {_TYPES[kind]}.")
  return published.Published(kind, fields, settings, step, state, {}, None), weights


def write(directory: pathlib.Path, p: published.Published, weights: str, card: str) -> None:
  """Writes `p.raw`, which are the weights that `weights` says, with what it takes to read them and a model card.

  Raises:
    ImportError: safetensors is not installed.
  """
  hugging_face.require_safetensors(str(directory))
  from safetensors import numpy as safetensors

  fields: dict[str, Any] = {
      "model_type": _TYPES[p.kind], "architectures": ["AOGPT"], **p.model_args,
      "tie_word_embeddings": names.KINDS[p.kind]["tied_head"], "dtype": str(next(iter(p.raw.values())).dtype),
      "weights": weights, "iter_num": p.step, "training": p.settings}
  safetensors.save_file(p.raw, directory / WEIGHTS, metadata={"format": "pt"})
  (directory / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
  (directory / CARD).write_text(card, encoding="utf-8")
