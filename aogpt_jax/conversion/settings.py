"""What a checkpoint of the PyTorch code says beside its weights, and a config of this project.

`model_args` are the arguments of the model; `settings`, in a checkpoint `config`, are the variables of the training script.
"""

import math
import re
from typing import Any

import ml_collections

from aogpt_jax import config as config_lib
from aogpt_jax.conversion import names

MODEL_ARGS = {"n_layer": "layers", "n_head": "heads", "n_embd": "width", "block_size": "block_size", "vocab_size": "vocab_size",
              "bias": "bias"}
# A variable of the training script -> a field; eps is only in the optimiser's own state.
_FIELDS = {
    "learning_rate": "optimizer.learning_rate", "min_lr": "optimizer.final_learning_rate", "warmup_iters": "optimizer.warmup_steps",
    "lr_decay_iters": "optimizer.decay_steps", "beta1": "optimizer.beta1", "beta2": "optimizer.beta2", "eps": "optimizer.eps",
    "weight_decay": "optimizer.weight_decay", "grad_clip": "optimizer.clip_norm", "ema_rate": "optimizer.ema_decay",
    "max_iters": "steps"}
_MODES = {"Random": "uniform", "AR": "left_to_right"}
# What the released models were trained with, by (layers, width), where it is not as default_config() has it.
_RELEASED = {(24, 1024): {"learning_rate": 3e-4, "max_iters": 460_000}}


def check_model_args(model_args: Any) -> None:
  """Raises ValueError where an argument is missing or of another type."""
  if not isinstance(model_args, dict):
    raise ValueError(f"model_args is of type {type(model_args).__name__}; it must be a dict of {', '.join(MODEL_ARGS)}.")
  for name in MODEL_ARGS:
    value = model_args.get(name)
    if name == "bias" and type(value) is not bool:
      raise ValueError(f"model_args: bias is {value!r}; it must be True or False.")
    if name != "bias" and (type(value) is not int or value < 1):
      raise ValueError(f"model_args: {name} is {value!r}; it must be a number of at least 1.")
  if model_args["n_embd"] % model_args["n_head"]:
    raise ValueError(f"model_args: n_head = {model_args['n_head']} does not divide n_embd = {model_args['n_embd']}.")


def to_config(
    kind: str, model_args: dict[str, Any], settings: dict[str, Any], step: int, param_dtype: str = "float32"
) -> ml_collections.ConfigDict:
  """The whole config of a run that goes on from such a checkpoint.

  Args:
    kind: one of names.KINDS.
    model_args: checked.
    settings: what is not said there is as the released models were trained.
    step: updates done.
    param_dtype: of the weights.

  Raises:
    ValueError: a setting has no counterpart, or an impossible value.
  """
  config = config_lib.default_config()
  config.model.update({ours: model_args[theirs] for theirs, ours in MODEL_ARGS.items()})
  config.model.update(names.KINDS[kind])
  if kind == "sigma-GPT":
    config.orders, config.model.weight_init = "uniform", "normal"
  settings = _RELEASED.get((config.model.layers, config.model.width), {}) | settings
  for name, path in _FIELDS.items():
    if name in settings:
      _set(config, path, f"config: {name}", settings[name])
  if "min_lr" not in settings:
    config.optimizer.final_learning_rate = min(config.optimizer.final_learning_rate, config.optimizer.learning_rate)
  if settings.get("decay_lr") is False:  # then there is no warm-up either
    config.optimizer.update(final_learning_rate=config.optimizer.learning_rate, warmup_steps=0)
  if settings.get("grad_clip") == 0:
    raise ValueError("config: grad_clip is 0, and training here clips always; set it to a norm that is never reached.")
  if "batch_size" in settings:
    accumulated = settings.get("gradient_accumulation_steps", 1)
    if type(settings["batch_size"]) is not int or type(accumulated) is not int:
      raise ValueError("config: batch_size and gradient_accumulation_steps must be whole numbers.")
    config.batch_size = settings["batch_size"] * accumulated
  config.orders = _orders(settings) or config.orders
  config.steps = max(config.steps, step, 1)
  config.model.param_dtype = param_dtype
  if param_dtype == "bfloat16":
    config.optimizer.ema_decay = 0.0  # an average of bfloat16 does not move
  try:
    check(config)
  except config_lib.ConfigError as e:
    raise ValueError(f"what it says of its training is no recipe that can be gone on with: {str(e).splitlines()[0]}") from None
  return config


def check(config: ml_collections.ConfigDict) -> None:
  """Raises ConfigError as config.check, but where the model has fewer rows than the tokenizer has ids.

  The tokenizer is not in such files; whether it fits is checked where it is used.
  """
  config = config.copy_and_resolve_references()
  config.model.vocab_size = max(config.model.vocab_size, config_lib.default_config().model.vocab_size)
  config_lib.check(config)


def _set(config: ml_collections.ConfigDict, path: str, name: str, value: Any) -> None:
  *parents, field = path.split(".")
  for parent in parents:
    config = config[parent]
  wanted = type(config[field])
  is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf
  if is_number and abs(value) > 1e300:  # of an integer, no float
    raise ValueError(f"{name} is above 1e300; it must be a number that makes sense.")
  if not is_number or wanted(value) != value:
    raise ValueError(f"{name} is {value!r}; it must be a number{' without a fraction' * (wanted is int)}.")
  config[field] = wanted(value)


def _orders(settings: dict[str, Any]) -> str:
  """The distribution of training orders; "" where it is not said."""
  if "orders" in settings:  # the PyTorch code has no such setting; what was trained here says it so
    return str(settings["orders"])
  mode, ratio = settings.get("train_mode"), settings.get("random_ratio")
  if mode == "Random_CL" and isinstance(ratio, (int, float)):
    return f"mix({round(1 - ratio, 9):g})"
  return _MODES.get(mode, "") if isinstance(mode, str) else ""


def from_config(config: ml_collections.ConfigDict) -> tuple[str, dict[str, Any], dict[str, Any]]:
  """Inverse of `to_config`: the kind, model_args and settings.

  Raises:
    ValueError: the model is neither AO-GPT nor sigma-GPT as the PyTorch code has them.
  """
  m = config.model
  for kind, fields in names.KINDS.items():
    if m.architecture == "decoder" and m.target == fields["target"]:
      break
  else:
    what = f"architecture = {m.architecture}" if m.architecture != "decoder" else f"target = {m.target}"
    raise ValueError(f"config.model.{what}: the PyTorch code has no such model; it has the decoders with target adaln and input.")
  wanted = fields | ({"cond_width": names.COND_WIDTH} if kind == "AO-GPT" else {})
  different = [f"{name} = {m[name]} where it has {value}" for name, value in wanted.items() if m[name] != value]
  if different:
    raise ValueError(f"config.model: the PyTorch code has no such {kind}: {', '.join(different)}.")
  model_args = {theirs: m[ours] for theirs, ours in MODEL_ARGS.items()} | {"dropout": 0.0}
  flat = config_lib.flat(config)
  settings = {name: flat[path] for name, path in _FIELDS.items()}
  settings |= {"batch_size": config.batch_size, "gradient_accumulation_steps": 1, "orders": config.orders, "decay_lr": True}
  mixed = re.fullmatch(r"mix\(([\d.e-]+)\)", config.orders)
  if mixed:
    settings |= {"train_mode": "Random_CL", "random_ratio": round(1 - float(mixed[1]), 9)}
  elif config.orders in _MODES.values():
    settings["train_mode"] = {spec: mode for mode, spec in _MODES.items()}[config.orders]
  settings |= {name: model_args[name] for name in model_args if name != "vocab_size"}
  if kind == "AO-GPT":
    settings["model_type"] = "AdaLN6_NoRep_cond_128_trunc_qknorm"
  return kind, model_args, settings
