"""What a published checkpoint holds, in whatever format, and whether it holds together."""

import dataclasses
import re
from typing import Any

import ml_dtypes
import numpy as np

from aogpt_jax import config as config_lib
from aogpt_jax import records
from aogpt_jax.conversion import names
from aogpt_jax.conversion import settings as settings_lib

# Causal masks, which the PyTorch code stores where its PyTorch has no attention of its own.
_MASK = re.compile(r"transformer\.h\.\d+\.attn\.bias")
_DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))


@dataclasses.dataclass(frozen=True)
class Moments:
  """The state of AdamW."""

  count: int  # its updates
  first: dict[str, np.ndarray]  # by the name of a parameter
  second: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Published:
  """A checkpoint of the PyTorch code, with arrays in its layout by its names."""

  kind: str  # one of names.KINDS
  model_args: dict[str, Any]
  settings: dict[str, Any]  # of the training script
  step: int  # updates done
  raw: dict[str, np.ndarray]  # of the last update; {} where there are none
  ema: dict[str, np.ndarray]  # their moving average; {} where there is none
  moments: Moments | None


def model_of(kind: str, model_args: dict[str, Any]):
  """The fields of config.model that such a model has."""
  model = config_lib.default_config().model
  model.update({ours: model_args[theirs] for theirs, ours in settings_lib.MODEL_ARGS.items()})
  model.update(names.KINDS[kind])
  return model


def check_state(state: dict[str, np.ndarray], model_args: dict[str, Any]) -> tuple[str, dict[str, np.ndarray]]:
  """The kind of a model, and its parameters in their order, each of which the state has once and in its shape.

  Raises:
    ValueError: a parameter is missing, unexpected, or of another shape or dtype; or model_args are of another model.
  """
  settings_lib.check_model_args(model_args)
  kind = "AO-GPT" if any(".adaLN" in name for name in state) else "sigma-GPT"
  _check_sizes(kind, state, model_args)
  model = model_of(kind, model_args)
  rest = {name: x for name, x in state.items() if not (_MASK.fullmatch(name) and x.ndim == 4)}
  if model.tied_head and names.HEAD in rest and names.TABLE in rest:
    head, table = rest.pop(names.HEAD), rest[names.TABLE]
    if head.shape != table.shape or not (np.shares_memory(head, table) or np.array_equal(head, table)):
      raise ValueError(f"{names.HEAD} is not the token table {names.TABLE}; a sigma-GPT has a tied head.")
  found, problems = {}, []
  for p in names.parameters(model):
    x = rest.pop(p.name, None)
    if x is None:
      problems.append(f"{p.name} is missing")
    elif x.shape != p.shape:
      problems.append(f"{p.name} is of shape {x.shape} where model_args want {p.shape}")
    else:
      found[p.name] = x
  problems += [f"{records.shown(name)} is unexpected" for name in rest]
  if problems:
    more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
    raise ValueError(f"its weights are not those of the {kind} of its model_args: {', '.join(problems[:4])}{more}.")
  check_dtypes(found)
  return kind, found


def check_dtypes(state: dict[str, np.ndarray]) -> None:
  """Raises ValueError where arrays are not all float32 or all bfloat16."""
  first = next(iter(state.values())).dtype
  for name, x in state.items():
    if x.dtype not in _DTYPES or x.dtype != first:
      raise ValueError(f"{name} is of type {x.dtype}{'' if x.dtype == first else f' beside others of {first}'}; save all weights "
                       "in float32, or all in bfloat16.")


def _check_sizes(kind: str, state: dict[str, np.ndarray], model_args: dict[str, Any]) -> None:
  """Raises ValueError where all tables agree on a size, and model_args say another: then it is these that are wrong."""
  shape = lambda name: state[name].shape if name in state and state[name].ndim == 2 else (None, None)
  tables = {name: shape(f"transformer.{name}.weight") for name in ("wte", "wpe", "wtpe", "wnonee")}
  layers = [int(m[1]) for m in (re.match(r"transformer\.h\.(\d{1,6})\.", name) for name in state) if m]
  # A head's width shows in the norms of queries and keys, and nowhere else.
  head = {state[name].shape[0] for name in state if re.search(r"\.[qk]_norm\.weight$", name) and state[name].ndim == 1}
  qkv = {name.endswith("bias") for name in state if ".attn.c_attn." in name}
  width = {tables[name][1] for name in ("wte", "wpe", "wnonee")}
  found = {
      "n_layer": {len({*layers})}, "n_embd": width, "vocab_size": {tables["wte"][0], shape(names.HEAD)[0]},
      "block_size": {rows and rows - less for rows, less in ((tables["wpe"][0], 1), (tables["wtpe"][0], 0))},
      "n_head": {w // k for w in width for k in head if w and k}, "bias": {True in qkv} if qkv else set()}
  if kind == "sigma-GPT":
    found["vocab_size"] = {tables["wte"][0]}
  for name, sizes in found.items():
    if len(sizes) == 1 and None not in sizes and model_args[name] not in sizes:
      raise ValueError(f"model_args: {name} is {model_args[name]}, and its weights are of a model with {name} = {sizes.pop()}.")
  if kind == "AO-GPT" and not model_args["bias"]:
    raise ValueError("model_args: bias is False; an AO-GPT without biases in part of its layers has no counterpart here.")
