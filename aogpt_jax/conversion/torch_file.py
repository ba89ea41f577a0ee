"""Checkpoint files of the PyTorch code, read without running what is in them, and written.

A file is a dict: `model` (state dict), `ema_model` (the moving average, a list in the order of the parameters), `optimizer`
(AdamW's state in two groups, decayed parameters first), `model_args`, `iter_num` (updates done) and `config` (the variables of
the training script). Of a compiled model, each key of `model` has a prefix.
"""

from collections.abc import Iterator
import contextlib
import pathlib
import re
from typing import Any
import warnings

import ml_dtypes
import numpy as np

from aogpt_jax import records
from aogpt_jax.conversion import names
from aogpt_jax.conversion import published

_COMPILED = "_orig_mod."
_SAFE_FROM = (2, 6)  # in older ones, a file can get around weights_only (CVE-2025-32434)


def read(path: pathlib.Path, weights: str, with_optimizer: bool) -> published.Published:
  """A checkpoint of AO-GPT or sigma-GPT; its arrays are views of the file, which is mapped into memory.

  Args:
    path: of the file.
    weights: "ema" demands the moving average, "raw" leaves it out.
    with_optimizer: demands the state of AdamW, else leaves it out.

  Raises:
    ImportError: torch is not installed, or too old.
    OSError: the file can't be read.
    ValueError: it is damaged, holds anything but data, or is of another model than it says.
  """
  torch = _torch()
  checkpoint = _load(torch, path)
  with _named(path):
    for key in ("model", "model_args", "iter_num"):
      if key not in checkpoint:
        raise ValueError(f"has no {key!r}, but {', '.join(map(repr, list(checkpoint)[:10])) or 'nothing'}; it is no checkpoint of "
                         "the training script.")
    step = checkpoint["iter_num"]
    if type(step) is not int or not 0 <= step < 2**31:
      raise ValueError(f"iter_num is {step!r}; it must be the number of updates done.")
    state = _prefix_removed({name: _array(torch, name, x) for name, x in _dict(checkpoint, "model").items()})
    kind, raw = published.check_state(state, checkpoint["model_args"])
    settings = dict(_dict(checkpoint, "config")) if "config" in checkpoint else {}
    optimizer = checkpoint.get("optimizer")
    groups = _groups(optimizer) if optimizer is not None else {}
    ema = {}
    if weights == "ema":
      ema, decay = _average(torch, checkpoint, raw)
      settings["ema_rate"] = decay
    if with_optimizer and optimizer is None:
      raise ValueError("has no optimizer; leave out --optimizer.")
    moments = _moments(torch, optimizer, raw) if with_optimizer else None
  return published.Published(kind, checkpoint["model_args"], settings | groups, step, raw, ema, moments)


def write(path: pathlib.Path, p: published.Published, learning_rate: float, is_compiled: bool) -> None:
  """Writes a file that `read` and the PyTorch code read.

  Args:
    path: of the file.
    p: what it is to hold; without moments, it has no optimizer.
    learning_rate: of the next update.
    is_compiled: whether the keys are to be those of a compiled model.

  Raises:
    ImportError: torch is not installed.
  """
  torch = _torch()
  state = {name: _tensor(torch, x) for name, x in p.raw.items()}
  order = list(p.raw)
  if names.KINDS[p.kind]["tied_head"]:
    state[names.HEAD] = state[names.TABLE]
  decay = p.settings["ema_rate"]
  checkpoint = {
      "model": {_COMPILED * is_compiled + name: x for name, x in state.items()},
      "ema_model": {"decay": decay, "num_updates": p.step, "shadow_params": [_tensor(torch, p.ema[name]) for name in order]},
      "ema_rate": decay, "model_args": p.model_args, "iter_num": p.step,
      "config": {name: value for name, value in p.settings.items() if name != "eps"}}
  if p.moments:
    groups = _in_groups(p.raw)
    # Of a real optimiser, so that each version of PyTorch finds the fields that it knows.
    optimizer = torch.optim.AdamW(
        [{"params": [torch.zeros(0) for _ in group], "weight_decay": decay}
         for group, decay in zip(groups, (p.settings["weight_decay"], 0.0))],
        lr=learning_rate, betas=(p.settings["beta1"], p.settings["beta2"]), eps=p.settings["eps"])
    moments = {i: {"step": torch.tensor(float(p.moments.count)), "exp_avg": _tensor(torch, p.moments.first[name]),
                   "exp_avg_sq": _tensor(torch, p.moments.second[name])} for i, name in enumerate(sum(groups, []))}
    checkpoint["optimizer"] = {"state": moments, "param_groups": optimizer.state_dict()["param_groups"]}
  torch.save(checkpoint, path)


def _torch() -> Any:
  advice = "pip install 'aogpt_jax[torch]'"
  try:
    import torch  # Here: nothing else needs it.
  except ImportError:
    raise ImportError(f"files of PyTorch are read and written by torch, which is not installed; {advice}.") from None
  version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
  if version < _SAFE_FROM:
    raise ImportError(f"torch {torch.__version__} can be made to run what a file holds; 2.6 is the first that can't: {advice}.")
  return torch


@contextlib.contextmanager
def _named(path: pathlib.Path) -> Iterator[None]:
  try:
    yield
  except ValueError as e:
    raise ValueError(f"{path}: {e}") from None
  except (TypeError, KeyError, AttributeError, RuntimeError, OverflowError) as e:
    raise ValueError(f"{path}: holds something that no checkpoint of the training script holds ({records.shown(str(e))}).") from None


def _load(torch: Any, path: pathlib.Path) -> dict[str, Any]:
  """The dict in a file, of numbers, strings, containers and tensors alone."""
  try:
    with open(path, "rb") as f:
      start = f.read(2)
  except OSError as e:
    raise OSError(f"{path}: can't be read ({e.strerror}); give a file that the PyTorch code saved.") from None
  if start != b"PK":  # what torch.save writes is a zip file; nothing else is given to the unpickler
    raise ValueError(f"{path}: is not a file that torch.save wrote (since version 1.6); download or save it again.")
  try:
    checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
  except Exception as e:  # pylint: disable=broad-exception-caught  # damage raises exceptions of many types
    refused = re.search(r"GLOBAL (\S+)", str(e))
    if refused:
      raise ValueError(
          f"{path}: holds {records.shown(refused[1])}, which is no data and could run anything; nothing of it was run. Where you "
          "trust the file, load it in PyTorch, turn what is of that type into numbers, strings, lists and dicts, and save it again.") from None
    raise ValueError(f"{path}: is damaged or cut off ({records.shown(' '.join(str(e).split())[:120])}); download or save it again.") from None
  if not isinstance(checkpoint, dict):
    raise ValueError(f"{path}: holds a {type(checkpoint).__name__}; it must be a dict with model, model_args and iter_num.")
  return checkpoint


def _dict(checkpoint: dict[str, Any], key: str) -> dict[str, Any]:
  value = checkpoint.get(key)
  if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
    raise ValueError(f"{key!r} is of type {type(value).__name__}; it must be a dict with strings for keys.")
  return value


def _array(torch: Any, name: str, x: Any) -> np.ndarray:
  if not isinstance(x, torch.Tensor) or x.layout != torch.strided or x.is_quantized or x.device.type != "cpu":
    raise ValueError(f"{name} is of type {type(x).__name__}; it must be a dense tensor.")
  x = x.detach()
  return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def _tensor(torch: Any, x: np.ndarray) -> Any:
  with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nor is it written to
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == ml_dtypes.bfloat16 else torch.from_numpy(x)


def _prefix_removed(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  short = {name.removeprefix(_COMPILED): x for name, x in state.items()}
  if len(short) < len(state):
    twice = next(name for name in state if _COMPILED + name in state)
    raise ValueError(f"model has both {twice} and {_COMPILED}{twice}; keep the weights of one model.")
  return short


def _average(torch: Any, checkpoint: dict[str, Any], raw: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], Any]:
  """The moving average by name, and its decay."""
  if "ema_model" not in checkpoint:
    raise ValueError("has no ema_model, the moving average of the weights; take the weights themselves: --weights=raw.")
  average = _dict(checkpoint, "ema_model")
  shadow = average.get("shadow_params")
  if not isinstance(shadow, (list, tuple)) or len(shadow) != len(raw):
    count = len(shadow) if isinstance(shadow, (list, tuple)) else "no"
    raise ValueError(f"ema_model has {count} shadow_params where the model has {len(raw)} parameters.")
  ema = {name: _array(torch, f"shadow_params[{i}]", x) for i, (name, x) in enumerate(zip(raw, shadow))}
  for i, (name, x) in enumerate(ema.items()):
    if x.shape != raw[name].shape:
      raise ValueError(f"shadow_params[{i}] is of shape {x.shape} where {name} is of {raw[name].shape}.")
  published.check_dtypes({"model": next(iter(raw.values()))} | {f"shadow_params of {name}": x for name, x in ema.items()})
  return ema, average.get("decay")


def _in_groups(raw: dict[str, np.ndarray]) -> tuple[list[str], list[str]]:
  """Names of parameters as AdamW of the PyTorch code has them: those that decay, then those that do not."""
  return [name for name, x in raw.items() if x.ndim >= 2], [name for name, x in raw.items() if x.ndim < 2]


def _groups(optimizer: Any) -> dict[str, Any]:
  """Settings that an optimiser's state says: they are what was used, whatever `config` says."""
  groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
  if not isinstance(groups, list) or len(groups) != 2 or not all(isinstance(group, dict) for group in groups):
    raise ValueError("optimizer has no two param_groups, of parameters that decay and of those that do not.")
  first, second = groups
  betas = first.get("betas")
  if not isinstance(betas, (list, tuple)) or len(betas) != 2 or second.get("weight_decay") != 0:
    raise ValueError("optimizer: its param_groups are not those of AdamW, of which the second does not decay.")
  for name in ("betas", "eps", "amsgrad", "maximize"):
    if list(np.ravel(first.get(name))) != list(np.ravel(second.get(name))) or name[0] in "am" and first.get(name):
      raise ValueError(f"optimizer: {name} is {first.get(name)!r} and {second.get(name)!r} in its two param_groups; AdamW here "
                       "has one value for all parameters, and neither amsgrad nor maximize.")
  return {"weight_decay": first.get("weight_decay"), "beta1": betas[0], "beta2": betas[1], "eps": first.get("eps")}


def _moments(torch: Any, optimizer: dict[str, Any], raw: dict[str, np.ndarray]) -> published.Moments:
  in_groups = _in_groups(raw)
  state = optimizer.get("state")
  order = sum(in_groups, [])
  start = 0
  for group, members in zip(optimizer["param_groups"], in_groups):
    if group.get("params") != list(range(start, start + len(members))):
      raise ValueError(f"optimizer: a group of its parameters is not the {len(members)} that it has in the PyTorch code.")
    start += len(members)
  if not isinstance(state, dict) or {*state} != {*range(len(order))}:
    raise ValueError(f"optimizer has states of {len(state) if isinstance(state, dict) else 'no'} parameters where the model has "
                     f"{len(order)}.")
  steps, first, second = set(), {}, {}
  for i, name in enumerate(order):
    if not isinstance(state[i], dict) or {*state[i]} != {"step", "exp_avg", "exp_avg_sq"}:
      raise ValueError(f"optimizer: the state of {name} is not step, exp_avg and exp_avg_sq.")
    step = state[i]["step"]
    if not isinstance(step, (int, float)) and not (isinstance(step, torch.Tensor) and step.numel() == 1):
      raise ValueError(f"optimizer: step of {name} is {step!r}; it must be a number.")
    steps.add(float(step))
    for moments, key in ((first, "exp_avg"), (second, "exp_avg_sq")):
      moments[name] = _array(torch, f"{key} of {name}", state[i][key])
      if moments[name].shape != raw[name].shape or moments[name].dtype != raw[name].dtype:
        raise ValueError(f"optimizer: {key} of {name} is {moments[name].dtype} {moments[name].shape} where the parameter is "
                         f"{raw[name].dtype} {raw[name].shape}.")
  count = steps.pop()
  if steps or not count.is_integer() or not 0 <= count < 2**31:
    raise ValueError("optimizer: its parameters are not all at one step.")
  return published.Moments(int(count), first, second)
