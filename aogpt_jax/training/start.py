"""What a run starts from where its workdir has no checkpoint: random parameters, those of another run, or GPT-2's."""

from typing import Any

from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp
import ml_collections

from aogpt_jax import config as config_lib
from aogpt_jax import models
from aogpt_jax.data import tokenizers
from aogpt_jax.models import from_gpt2
from aogpt_jax.models import gpt2
from aogpt_jax.training import checkpoints
from aogpt_jax.training import optimizer
from aogpt_jax.training import step as step_lib

# Fields of a module that have no say in what it computes from parameters, but for rounding.
_FREE = ("dtype", "param_dtype", "remat", "scan_layers", "head_chunk", "backend", "gate_init", "weight_init", "position_init",
         "parent", "name")


def check(config: ml_collections.ConfigDict, model: nn.Module, tokenizer: tokenizers.Tokenizer) -> None:
  """Raises ConfigError where a model can't start from config.init_from, naming the fields; compiles nothing and reads no weights.

  Raises:
    OSError, ImportError, ValueError: and where that can't be read.
  """
  if not config.init_from:
    return
  kind, name = _source(config)
  found = []
  if kind == "gpt2":
    theirs, _ = gpt2.describe(name)
    found += from_gpt2.problems(theirs, config)
    if tokenizer.vocab_size > theirs.vocab_size:
      found.append(f"config.data.tokenizer: {config.data.tokenizer} has {tokenizer.vocab_size} ids, and this GPT-2 "
                   f"{theirs.vocab_size}; set it to gpt2, or to the rank file of this one.")
  else:
    their_config, has_optimizer = checkpoints.describe(name)
    their_config.model.attention = "auto"  # of devices that need not be here
    theirs = models.build_model(their_config)
    for field in sorted({*vars(model), *vars(theirs)} - {*_FREE}):
      ours, wanted = getattr(model, field, "none"), getattr(theirs, field, "none")
      if not field.startswith("_") and ours != wanted:
        path = "objective" if field == "tell_noise" else f"model.{field}"
        value = lambda c: config_lib.flat(c).get(path)  # pylint: disable=cell-var-from-loop
        found.append(f"config.{path}: is {value(config)!r}, and was {value(their_config)!r} there; set it back.")
    if config.model.architecture != their_config.model.architecture:
      found = [f"config.model.architecture: is {config.model.architecture}, and was {their_config.model.architecture} there; set "
               "it back."]
    if config.data.tokenizer != their_config.data.tokenizer:
      found.append(f"config.data.tokenizer: is {config.data.tokenizer}, and was {their_config.data.tokenizer} there, whose ids its "
                   "rows are of; set it back.")
    if config.init_optimizer == "kept" and not has_optimizer:
      found.append("config.init_optimizer: is kept, and there is none in that checkpoint; set it to reset.")
  if found:
    raise config_lib.ConfigError("\n".join(f"{line} (config.init_from={config.init_from})" for line in found))


def state(
    config: ml_collections.ConfigDict, model: nn.Module, tokenizer: tokenizers.Tokenizer, trainer: step_lib.Trainer
) -> step_lib.TrainState:
  """The state after 0 updates.

  With config.init_from, parameters and their average are what it names. The optimiser is new, or has the moments of that run;
  the schedules of learning rate and orders start anew.
  """
  new = trainer.init()
  if not config.init_from:
    return new
  kind, name = _source(config)
  if kind == "gpt2":
    params = with_gpt2(name, model, new.params, tokenizer.boundary_id)
  else:
    shapes = trainer.shapes if config.init_optimizer == "kept" else trainer.shapes.replace(opt_state=None)
    new = new.replace(params=None, ema=None)  # room for the others
    params, opt_state = checkpoints.load_start(name, shapes, config.init_weights)
    if opt_state is not None:
      # A copy: a state that is donated must not hold a buffer twice.
      new = new.replace(opt_state=optimizer.with_adam(opt_state, optimizer.adam(opt_state), jnp.copy(new.step)))
  return new.replace(params=params, ema=jax.tree.map(jnp.copy, params))


def with_gpt2(name: str, model: nn.Module, params: Any, boundary_id: int) -> Any:
  """A decoder's parameters with those of `gpt2.load(name)` in place of all that GPT-2 has, on the same devices."""
  theirs, weights = gpt2.load(name)
  given = from_gpt2.parameters(theirs, weights, model, params, boundary_id)

  def place(path: str, x: jax.Array) -> jax.Array:
    if path not in given:
      return x
    return jax.make_array_from_callback(x.shape, x.sharding, lambda index: given[path][index])

  flat = traverse_util.flatten_dict(params, sep="/")
  return traverse_util.unflatten_dict({path: place(path, x) for path, x in flat.items()}, sep="/")


def _source(config: ml_collections.ConfigDict) -> tuple[str, str]:
  """What config.init_from is, "gpt2" or "run", and its name or directory."""
  kind, colon, name = config.init_from.partition(":")
  return ("gpt2", name) if colon and kind == "gpt2" else ("run", config.init_from)
