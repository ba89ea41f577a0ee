"""Published checkpoints to workdirs, and workdirs to what the PyTorch code and Hugging Face's tools read.

    python -m aogpt_jax.convert --torch_checkpoint=ckpt.pt --output=DIR [--weights=ema|raw] [--optimizer]
    python -m aogpt_jax.convert --safetensors=MODEL --output=DIR
    python -m aogpt_jax.convert --checkpoint=WORKDIR --torch_output=ckpt.pt [--optimizer] [--compiled]
    python -m aogpt_jax.convert --checkpoint=WORKDIR --safetensors=MODEL [--weights=ema|raw]

A checkpoint is a local path, or hf:ORGANISATION/NAME/FILE on the Hugging Face hub; MODEL is a directory with model.safetensors and
config.json, to be read or written, or hf:ORGANISATION/NAME. What is not said by the file is set by --config.KEY=VALUE, as for main:
config.data.tokenizer, config.data.source, config.model.dtype. DIR is a workdir like that of a run, with its config in DIR/config.py.
Nothing that a file holds is run, and an output appears when it is complete.

--weights: ema, the moving average, with the parameters of the last update beside it; or raw, these alone, of which the average
  begins anew. Of safetensors, which of them is written.
--optimizer: the state of AdamW too, so that training can go on.
--compiled: keys as those of a compiled model, with the prefix _orig_mod.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import sys
from typing import Any

from absl import flags
from absl import logging
from flax import traverse_util
import jax
import jax.numpy as jnp
import ml_collections
from ml_collections import config_flags
import numpy as np
import optax

from aogpt_jax import config as config_lib
from aogpt_jax import console
from aogpt_jax import hugging_face
from aogpt_jax import models
from aogpt_jax import records
from aogpt_jax.conversion import fingerprint
from aogpt_jax.conversion import model_card
from aogpt_jax.conversion import model_directory
from aogpt_jax.conversion import names
from aogpt_jax.conversion import published
from aogpt_jax.conversion import settings as settings_lib
from aogpt_jax.conversion import torch_file
from aogpt_jax.data import tokenizers
from aogpt_jax.training import checkpoints
from aogpt_jax.training import optimizer
from aogpt_jax.training import step as step_lib

_HUB = "hf:"
_RECORD = "conversion.json"
# What follows from the file, and can't be set.
_GIVEN = ("architecture", "layers", "width", "heads", "block_size", "vocab_size", "cond_width", "target", "norm", "qk_norm",
          "tied_head", "bias", "param_dtype")


@dataclasses.dataclass(frozen=True)
class Origin:
  """Where the weights of a workdir are from, kept in it as conversion.json."""

  source: str  # as the user gave it; of a local file, its name
  step: int
  weights: tuple[str, ...]  # those that the source has, of checkpoints.WEIGHTS; the others are a copy of them
  fingerprint: str


def from_published(
    source: str, output: str, *, weights: str = "ema", with_optimizer: bool = False, overrides: dict[str, Any] | None = None
) -> Origin:
  """Converts a file of the PyTorch code, or a directory with safetensors, to a workdir.

  Args:
    source: a path or a name on the hub; a file or a directory.
    output: the workdir, which does not exist yet.
    weights: of checkpoints.WEIGHTS; of no effect on safetensors, which have one of them.
    with_optimizer: whether training is to go on from it.
    overrides: fields of the config by their dotted paths.

  Raises:
    ImportError: torch, safetensors or huggingface_hub is not installed.
    OSError: a file can't be read or written, or downloaded.
    FloatingPointError: it holds numbers that are not finite; nothing has been written.
    ValueError: the file is damaged or harmful, or does not hold what it says; nothing has been written.
  """
  target = _new(output, "--output")
  path = _local(source)
  is_directory = path.is_dir()
  if is_directory:
    if with_optimizer:
      raise ValueError(f"{source}: safetensors have no state of an optimizer; leave out --optimizer.")
    p, weights = model_directory.read(path)
    has = (weights,)
  else:
    p = torch_file.read(path, weights, with_optimizer)
    has = ("ema", "raw") if weights == "ema" else ("raw",)
  try:
    config = settings_lib.to_config(p.kind, p.model_args, p.settings, p.step, str(next(iter(p.raw.values())).dtype))
  except ValueError as e:
    raise ValueError(f"{path}: {e}") from None
  _override(config, overrides or {})
  if p.model_args.get("dropout"):
    console.say(f"note: it was trained with dropout {p.model_args['dropout']}, which there is none of here.")
  _say_tokenizer(config)
  parameters = sum(x.size for x in p.raw.values())
  console.say(f"{path.name}: {p.kind}, {config.model.layers} layers x {config.model.width}, {parameters:,} parameters, "
              f"step {p.step:,}, weights: {' and '.join(has)}{', state of AdamW' if p.moments else ''}")
  # By what it is: a local path may say more of its owner than a model card should.
  name = source if source.startswith(_HUB) else path.name
  with _beside(target, sum(x.nbytes for x in _arrays(p))) as partial:
    partial.mkdir()
    step, state = p.step, _state(config, p)
    del p  # and with it the file's pages, before Orbax makes buffers of its own
    saver = checkpoints.Checkpoints(partial, config)
    try:
      saver.save(state)
      saver.wait()
    finally:
      saver.close()
    del state
    said = fingerprint.describe(*checkpoints.load_model(partial))
    origin = Origin(name, step, has, said)
    (partial / _RECORD).write_text(json.dumps(dataclasses.asdict(origin), indent=2) + "\n", encoding="utf-8")
    config_lib.write_file(config, partial, f"Converted from {name}, step {step:,}", f"{_command(output)} --mode=sample")
  console.say(f"fingerprint: {said} (nats per token)")
  console.say(f"written: {output}\nto use it: {_command(output)} --mode=sample")
  return origin


def to_torch(workdir: str, output: str, *, with_optimizer: bool = False, is_compiled: bool = False) -> str:
  """Writes the newest checkpoint of a run as a file that the PyTorch code loads; returns the fingerprint of its average.

  Args:
    workdir: of the run.
    output: the file, which does not exist yet.
    with_optimizer: whether training is to go on there.
    is_compiled: whether keys are to be those of a compiled model.

  Raises:
    ImportError: torch is not installed.
    OSError: there is no checkpoint, or the file can't be written.
    ValueError: the PyTorch code has no such model; nothing has been written.
  """
  target = _new(output, "--torch_output")
  config, p, said = _trained(workdir, ("raw", "ema"), "ema", with_optimizer)
  with _beside(target, sum(x.nbytes for x in _arrays(p))) as partial:
    torch_file.write(partial, p, float(optimizer.learning_rate(config)(p.step)), is_compiled)
  console.say(f"fingerprint: {said} (nats per token, of the average)\nwritten: {output}")
  return said


def to_safetensors(workdir: str, output: str, *, weights: str = "ema") -> str:
  """Writes the newest checkpoint of a run as a directory with safetensors and a model card; returns the fingerprint.

  Args:
    workdir: of the run.
    output: the directory, which does not exist yet.
    weights: of checkpoints.WEIGHTS.

  Raises:
    ImportError: safetensors is not installed.
    OSError: there is no checkpoint, or the files can't be written.
    ValueError: the PyTorch code, whose names they have, has no such model, or the checkpoint no such weights.
  """
  target = _new(output, "--safetensors")
  config, p, said = _trained(workdir, (weights,), weights, False)
  origin = _origin(pathlib.Path(workdir).expanduser())
  if origin and origin.step == p.step:
    if weights not in origin.weights:
      raise ValueError(f"{workdir}: was converted from {origin.source}, of which it has the {origin.weights[0]} weights alone; give "
                       f"--weights={origin.weights[0]}.")
    said_origin = f"converted from `{origin.source}`"
  else:
    said_origin = f"trained by aogpt_jax on `{config.data.source}`, tokenizer `{config.data.tokenizer}`" + (
        f", from step {origin.step:,} of `{origin.source}` on" if origin else "")
  parameters = sum(x.size for x in p.raw.values())
  card = model_card.write(p, weights, said_origin, parameters, f"{said} (nats per token)", pathlib.Path(workdir).expanduser())
  with _beside(target, sum(x.nbytes for x in _arrays(p))) as partial:
    partial.mkdir()
    model_directory.write(partial, p, weights, card)
  console.say(f"fingerprint: {said} (nats per token)\nwritten: {output}")
  return said


def _trained(
    workdir: str, wanted: tuple[str, ...], told: str, with_optimizer: bool
) -> tuple[ml_collections.ConfigDict, published.Published, str]:
  """A run's config and newest checkpoint in the layout of the PyTorch code, and the fingerprint of the weights `told`.

  Where only one of checkpoints.WEIGHTS is wanted, it is `raw` of what is returned.
  """
  config, state = checkpoints.load_state(workdir, wanted, with_optimizer)
  kind, model_args, settings = settings_lib.from_config(config)
  trees = {weights: getattr(state, checkpoints.WEIGHTS[weights]) for weights in wanted}
  moments = optimizer.adam(state.opt_state) if with_optimizer else None
  step = state.step
  del state
  if moments:
    _check_decay(config, trees["raw"])
  said = fingerprint.describe(models.build_model(config), trees[told])
  # One after another, so that no more than one of them is held twice.
  states = {weights: names.to_state(config.model, trees.pop(weights)) for weights in wanted}
  if moments:
    count, first, second = int(moments.count), moments.mu, moments.nu
    del moments
    first = names.to_state(config.model, first)
    second = names.to_state(config.model, second)
    moments = published.Moments(count, first, second)
  return config, published.Published(
      kind, model_args, settings, step, states[wanted[0]], states["ema"] if len(wanted) > 1 else {}, moments), said


def _check_decay(config: ml_collections.ConfigDict, params: Any) -> None:
  """Raises ConfigError where other parameters decay than the PyTorch code decays."""
  mask = optimizer.decay_mask(params, config.optimizer.weight_decay_rules)
  decays = {jax.tree_util.keystr(path, simple=True, separator="/"): value for path, value in
            jax.tree_util.tree_leaves_with_path(mask)}
  other = [p.path for p in names.parameters(config.model) if decays[p.path] != p.decays]
  if other:
    raise config_lib.ConfigError(
        f"config.optimizer.weight_decay_rules: the PyTorch code decays all that has two dimensions and nothing else, and here it is "
        f"otherwise for {other[0]}; leave out --optimizer.")


def _state(config: ml_collections.ConfigDict, p: published.Published) -> step_lib.TrainState:
  """The state that goes on from there; without moments, opt_state is None."""

  def tree(arrays: dict[str, np.ndarray]) -> Any:
    flat = traverse_util.flatten_dict(names.to_tree(config.model, arrays.__getitem__), sep="/")
    # Of JAX, one after another: Orbax would copy all that is numpy's once more.
    return traverse_util.unflatten_dict({path: jnp.array(flat.pop(path)).block_until_ready() for path in list(flat)}, sep="/")

  params, opt_state = tree(p.raw), None
  if p.moments:
    opt_state = optimizer.with_adam(
        jax.eval_shape(optimizer.make_optimizer(config).init, params),
        optax.ScaleByAdamState(jnp.int32(p.moments.count), tree(p.moments.first), tree(p.moments.second)), jnp.int32(p.step))
  return step_lib.TrainState(jnp.int32(p.step), params, tree(p.ema) if p.ema else params, opt_state, jnp.int32(0))


def _arrays(p: published.Published) -> Iterator[np.ndarray]:
  yield from p.raw.values()
  yield from (p.ema or p.raw).values()
  if p.moments:
    yield from p.moments.first.values()
    yield from p.moments.second.values()


def _override(config: ml_collections.ConfigDict, overrides: dict[str, Any]) -> None:
  for path, value in overrides.items():
    if path.startswith("model.") and path.removeprefix("model.") in _GIVEN and config_lib.flat(config)[path] != value:
      raise config_lib.ConfigError(f"config.{path}: is {config_lib.flat(config)[path]!r} by the weights; leave out {value!r}.")
  config.update_from_flattened_dict(overrides)
  settings_lib.check(config)


def _say_tokenizer(config: ml_collections.ConfigDict) -> None:
  size = tokenizers.known_vocab_size(config.data.tokenizer)
  if size and size > config.model.vocab_size:
    console.say(f"note: the {config.model.vocab_size:,} rows of its token table are too few for the {size:,} ids of "
                f"config.data.tokenizer = {config.data.tokenizer}; to draw or score texts, convert with "
                "--config.data.tokenizer=FILE, the one that it was trained with.")


def _local(source: str) -> pathlib.Path:
  """The path of a file or directory, downloaded where it is a name on the hub."""
  if not source.startswith(_HUB):
    path = pathlib.Path(source).expanduser()
    if not path.exists():
      raise FileNotFoundError(f"{source}: there is no such file; give a path, or hf:ORGANISATION/NAME/FILE.")
    return path
  owner, _, rest = source.removeprefix(_HUB).partition("/")
  name, _, file = rest.partition("/")
  if not all(re.fullmatch(r"[\w.-]+", part) for part in (owner, name)) or ".." in file.split("/"):
    raise ValueError(f"{source}: is no name on the Hugging Face hub; give hf:ORGANISATION/NAME/FILE.")
  advice = "download it where there is a network, and give its path"
  repository = f"{owner}/{name}"
  if file.endswith((".pt", ".pth", ".ckpt")):
    return hugging_face.download(f"{source}:", advice, lambda hub: hub.hf_hub_download(repository, file))
  inside = f"{file}/" * bool(file)
  wanted = [inside + part for part in (model_directory.CONFIG, model_directory.WEIGHTS)]
  return hugging_face.download(
      f"{source}:", advice, lambda hub: hub.snapshot_download(repository, allow_patterns=wanted)) / file


def _new(output: str, flag: str) -> pathlib.Path:
  """The path of what is to be written, which is not there yet."""
  path = pathlib.Path(output).expanduser().absolute()
  if path.exists() or path.is_symlink():
    raise FileExistsError(f"{flag}={output}: is there already; give another path, or move it away.")
  if not path.parent.is_dir():
    try:
      path.parent.mkdir(parents=True)
    except OSError as e:
      raise OSError(f"{flag}={output}: {path.parent} can't be made ({e.strerror}); give another path.") from None
  return path


@contextlib.contextmanager
def _beside(target: pathlib.Path, size: int) -> Iterator[pathlib.Path]:
  """A path next to the target, which takes its place when the body is done, and is removed where it fails."""
  free = shutil.disk_usage(target.parent).free
  if size > free:
    raise OSError(f"{target}: needs about {size / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free there; give another path.")
  partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
  try:
    yield partial
    partial.rename(target)
  finally:
    if partial.is_dir():
      shutil.rmtree(partial)
    partial.unlink(missing_ok=True)


def _origin(workdir: pathlib.Path) -> Origin | None:
  """Where a workdir's weights are from; None where it was trained from the start."""
  path = workdir / _RECORD
  if not path.exists():
    return None
  try:
    fields = records.read(path)
    return Origin(**fields | {"weights": tuple(fields["weights"])})
  except (OSError, ValueError, TypeError, KeyError):
    raise ValueError(f"{path}: is not as it was written; move it away where the weights are not of another checkpoint.") from None


def _command(workdir: str) -> str:
  return f"python -m aogpt_jax.main --config={workdir}/{config_lib.FILE}"


def main(argv: list[str]) -> None:
  # Flags of its own: main.py has some of the same names.
  values = flags.FlagValues()
  text = lambda name, what: flags.DEFINE_string(name, "", what, flag_values=values)
  torch_checkpoint = text("torch_checkpoint", "File of the PyTorch code: a path, or hf:ORGANISATION/NAME/FILE.")
  output = text("output", "Workdir to write.")
  checkpoint = text("checkpoint", "Workdir to read.")
  torch_output = text("torch_output", "File for the PyTorch code to write.")
  safetensors = text("safetensors", "Directory with safetensors: to write with --checkpoint, to read with --output.")
  weights = flags.DEFINE_enum("weights", "ema", list(checkpoints.WEIGHTS), "Which weights.", flag_values=values)
  with_optimizer = flags.DEFINE_bool("optimizer", False, "The state of AdamW too.", flag_values=values)
  compiled = flags.DEFINE_bool("compiled", False, "Keys of a compiled model.", flag_values=values)
  if {"--help", "-help"}.intersection(argv):
    print(__doc__)
    return
  logging.set_verbosity(logging.WARNING)  # the libraries' own lines would bury ours
  try:
    for argument in argv[1:]:
      name = argument.lstrip("-").partition("=")[0]
      if name.startswith("config."):
        config_lib.check_field(name.removeprefix("config."))
    config_flags.DEFINE_config_dict("config", config_lib.default_config(), flag_values=values, sys_argv=argv)
    rest = values(argv)[1:]
    if rest:
      raise ValueError(f"unknown arguments: {' '.join(rest)}")
    overrides = config_flags.get_override_values(values["config"])
    given = {name for name in ("torch_checkpoint", "safetensors", "output", "checkpoint", "torch_output") if values[name].value}
    takes = {"weights": values["weights"].present, "optimizer": with_optimizer.value, "compiled": compiled.value,
             "config": bool(overrides)}

    def only(*allowed: str) -> None:
      for name, present in takes.items():
        if present and name not in allowed:
          raise ValueError(f"--{name}: has no effect with {' and '.join(f'--{flag}' for flag in sorted(given))}; leave it out.")

    if given == {"torch_checkpoint", "output"}:
      only("weights", "optimizer", "config")
      from_published(torch_checkpoint.value, output.value, weights=weights.value, with_optimizer=with_optimizer.value,
                     overrides=overrides)
    elif given == {"safetensors", "output"}:
      only("config")
      from_published(safetensors.value, output.value, overrides=overrides)
    elif given == {"checkpoint", "torch_output"}:
      only("optimizer", "compiled")
      to_torch(checkpoint.value, torch_output.value, with_optimizer=with_optimizer.value, is_compiled=compiled.value)
    elif given == {"checkpoint", "safetensors"}:
      only("weights")
      to_safetensors(checkpoint.value, safetensors.value, weights=weights.value)
    else:
      raise ValueError("give what to read and what to write: --torch_checkpoint=FILE or --safetensors=MODEL with --output=DIR, or "
                       "--checkpoint=WORKDIR with --torch_output=FILE or --safetensors=MODEL.")
  except (ValueError, OSError, ImportError, FloatingPointError, flags.Error) as e:
    sys.exit("error: " + " ".join(str(e).split()))
  except KeyboardInterrupt:
    sys.exit("interrupted; nothing was written")


if __name__ == "__main__":
  jax.config.update("jax_platforms", "cpu")  # nothing here needs an accelerator, and its memory may be smaller than the host's
  main(sys.argv)
