"""Orbax checkpoints of a run, and the model in one. The only module that knows Orbax.

WORKDIR/checkpoints/N/ is the state after N updates, in five items: `params`, `ema`, `optimizer` (moments, counts and steps),
`config`, the resolved config as JSON, and `checksums`, JSON too. Nothing else is needed to go on or to use the model. What was
converted from another format may have no `optimizer`: then training can't go on from it. What was saved before there were checksums
has none.

What is read is the newest checkpoint that is whole: its arrays have the names, shapes and dtypes that are wanted, all files can
be read, and all arrays have the checksums that they had in memory when they were saved. A warning names each newer one, and why.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import os
import pathlib
import re
import sys
import tempfile
from typing import Any

from absl import logging as absl_logging
from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, make_single_device_sharding
import ml_collections
import numpy as np
import orbax.checkpoint as ocp

from aogpt_jax import cluster
from aogpt_jax import config as config_lib
from aogpt_jax import models
from aogpt_jax import sharding
from aogpt_jax.data import tokenizers
from aogpt_jax.training import checksums
from aogpt_jax.training import optimizer as optimizer_lib
from aogpt_jax.training import step as step_lib

_policy = ocp.checkpoint_managers

# The parameters that a checkpoint has, by the name that a user gives them: the moving average and the last update's.
WEIGHTS = {"ema": "ema", "raw": "params"}


def _say_once() -> None:
  """Keeps Orbax, asyncio and TensorStore from printing a traceback for each array that fails; one of them is raised."""
  absl_logging.get_absl_logger().addFilter(_is_no_traceback_of_orbax)
  logging.getLogger("asyncio").setLevel(logging.CRITICAL)
  if sys.unraisablehook is not _no_closed_loops:
    _hooks.append(sys.unraisablehook)
    sys.unraisablehook = _no_closed_loops


_hooks = []  # those that stood in our place


def _no_closed_loops(unraisable: Any) -> None:
  # A thread of TensorStore reports to the loop of a save or restore that has already failed.
  if not (unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"):
    _hooks[-1](unraisable)


def _is_no_traceback_of_orbax(record: logging.LogRecord) -> bool:
  return not (record.exc_info and "orbax" in pathlib.Path(record.pathname).parts)


class Checkpoints:
  """Saves asynchronously, restores the newest checkpoint that can be restored."""

  def __init__(self, workdir: str | pathlib.Path, config: ml_collections.ConfigDict):
    self._config = config
    if _directory(workdir).exists() and not _directory(workdir).is_dir():
      raise NotADirectoryError(f"{_directory(workdir)}: is a file; move it away, or give another --workdir.")
    _say_once()
    preserve = [_policy.LatestN(config.checkpoint.keep)]
    if config.checkpoint.keep_every_steps:
      preserve.append(_policy.EveryNSteps(config.checkpoint.keep_every_steps))
    self._manager = ocp.CheckpointManager(
        _directory(workdir),
        options=ocp.CheckpointManagerOptions(
            save_decision_policy=_policy.FixedIntervalPolicy(1),  # the training loop decides when
            preservation_policy=_policy.AnyPreservationPolicy(preserve),
            cleanup_tmp_directories=True,
        ),
        item_handlers=_handlers(),
    )

  def save(self, state: step_lib.TrainState) -> None:
    """Starts to write the state; returns when it may be donated, before the files are complete.

    A state whose opt_state is None is one to use, and not to go on from.

    Raises:
      FloatingPointError: a number in the state is not finite; nothing is written.
      OSError: this checkpoint or the one before can't be written.
    """
    step = int(state.step)
    if step in self._manager.all_steps():
      return
    items = {"params": state.params, "ema": state.ema}
    if state.opt_state is not None:
      items["optimizer"] = _optimizer(state)
    bad = checksums.not_finite(items)
    if bad:
      raise FloatingPointError(f"step {step}: the state has numbers that are not finite in {', '.join(bad[:3])}"
                               f"{f' and {len(bad) - 3} other arrays' if len(bad) > 3 else ''}; it is not saved.")
    sums, config = checksums.compute(items), self._config.to_dict()
    with self._writing(f"step {step}"):
      if jax.process_index() == 0:
        # Where Orbax can't make its directory, its threads wait minutes for it, and keep the process from ending.
        os.rmdir(tempfile.mkdtemp(prefix="can_be_written_to_", dir=self._manager.directory))
      self._manager.save(step, args=ocp.args.Composite(
          **{item: ocp.args.StandardSave(tree) for item, tree in items.items()},
          config=ocp.args.JsonSave(config),
          checksums=ocp.args.JsonSave({"arrays": sums, "config": _hash(config)}),
      ))

  def restore(self, shapes: step_lib.TrainState) -> step_lib.TrainState | None:
    """The newest restorable state, or None where there is no checkpoint.

    Newer ones, which can't be restored, are moved out of the way to checkpoints/damaged-N, or other-N where they are of a run
    with another config.

    Args:
      shapes: ShapeDtypeStructs with the shardings to restore to, on any mesh.

    Raises:
      ConfigError: all that could be read belong to another run; the message names the fields.
      OSError: there are checkpoints, and none can be restored.
    """
    reader = _reader(self._manager.directory)
    if not cluster.gather(bool(reader.all_steps()))[0]:
      return None

    def wanted(step: int, config: ml_collections.ConfigDict) -> dict[str, Any]:
      _check_same_run(reader, step, config, self._config)
      _check_can_go_on(reader, step)
      return {"params": shapes.params, "ema": shapes.ema, "optimizer": _optimizer(shapes)}

    with reader:
      found = _newest_restorable(reader, wanted)
    for step, kind in found.passed_over.items() if jax.process_index() == 0 else ():  # not in the way of a new one, and not lost
      names = itertools.chain([f"{kind}-{step}"], (f"{kind}-{step}-{i}" for i in itertools.count(2)))
      directory = self._manager.directory / next(name for name in names if not (self._manager.directory / name).exists())
      (self._manager.directory / str(step)).rename(directory)
    cluster.gather(None)  # what is out of the way is so for all
    self._manager.reload()
    items = found.items
    return step_lib.TrainState(params=items["params"], ema=items["ema"], **items["optimizer"])

  def wait(self) -> None:
    """Returns when all that was saved is complete on disk.

    Raises:
      OSError: it can't be written.
    """
    with self._writing("the newest step"):
      self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits too, and raises nothing: what is to be known to be complete has been waited for."""
    try:
      self._manager.close()
    except Exception as e:  # pylint: disable=broad-exception-caught  # as of `_writing`
      logging.warning("%s: %s", self._manager.directory, _first_line(e))

  @contextlib.contextmanager
  def _writing(self, what: str) -> Iterator[None]:
    try:
      yield
    except Exception as e:  # pylint: disable=broad-exception-caught  # a full disk raises exceptions of many types
      # Of TensorStore, or of Python where a file beside the arrays comes first.
      number = re.search(r"(?:os_error_code='|\[Errno )([0-9]+)", str(e))
      why = os.strerror(int(number[1])) if number else _first_line(e)
      raise OSError(f"{self._manager.directory}: {what} can't be saved ({why}); see that the disk has room and can be "
                    "written to. The checkpoints before it are whole, and the same command goes on from the newest.") from e


def load_model(directory: str | pathlib.Path, mesh: Mesh | None = None, weights: str = "ema") -> tuple[nn.Module, Any]:
  """The model of a run with its parameters.

  Its attention is chosen for the devices that it is loaded to, as by config.model.attention = auto, whatever the run was set to.

  Args:
    directory: the run's workdir, which holds `checkpoints/`.
    mesh: shard the parameters over it by the rules of the run's config; the default is the first local device.
    weights: one of WEIGHTS.

  Returns:
    The Linen module and its parameters, of the newest checkpoint that can be restored.

  Raises:
    FileNotFoundError: there is no checkpoint.
    OSError: there are checkpoints, and none can be restored.
    ValueError: there are no such weights.
  """
  if weights not in WEIGHTS:
    raise ValueError(f"weights is {weights!r}; it must be one of {', '.join(WEIGHTS)}.")

  def wanted(_: int, config: ml_collections.ConfigDict) -> dict[str, Any]:
    config.model.attention = "auto"
    return {WEIGHTS[weights]: _parameter_shapes(config, mesh)}

  with _open(directory) as manager:
    found = _newest_restorable(manager, wanted)
  return models.build_model(found.config, mesh), found.items[WEIGHTS[weights]]


def load_tokenizer(directory: str | pathlib.Path) -> tokenizers.Tokenizer:
  """The tokenizer of the text that a run's model was trained on.

  Args:
    directory: the run's workdir, which holds `checkpoints/`.

  Raises:
    OSError: there is no checkpoint, none can be read, or the tokenizer's files can't be.
  """
  with _open(directory) as manager:
    found = _newest_restorable(manager, lambda *_: {})
  return tokenizers.load(found.config.data.tokenizer)


def describe(directory: str | pathlib.Path) -> tuple[ml_collections.ConfigDict, bool]:
  """The config of a run's newest checkpoint, and whether that has an optimiser's state.

  Raises:
    OSError: there is no checkpoint, or none whose config can be read.
  """
  with _open(directory) as manager:
    found = _newest_restorable(manager, lambda *_: {})
    return found.config, (manager.directory / str(found.step) / "optimizer").is_dir()


def load_start(directory: str | pathlib.Path, shapes: step_lib.TrainState, weights: str) -> tuple[Any, Any]:
  """What another run starts from: one of WEIGHTS of a run's newest checkpoint, and its optimiser's state.

  Args:
    directory: the run's workdir.
    shapes: ShapeDtypeStructs with the shardings to restore to; with an `opt_state` of None, the optimiser is left out and None.
    weights: one of WEIGHTS.

  Raises:
    OSError: there is no checkpoint, or none that can be restored.
  """
  item = WEIGHTS[weights]

  def wanted(_: int, config: ml_collections.ConfigDict) -> dict[str, Any]:
    dtype = jnp.dtype(config.model.param_dtype)
    is_real = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    theirs = lambda tree: jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, dtype if is_real(x) else x.dtype, sharding=x.sharding), tree)
    items = {item: theirs(shapes.params)}
    return items if shapes.opt_state is None else items | {"optimizer": theirs(_optimizer(shapes))}

  with _open(directory) as manager:
    items = _newest_restorable(manager, wanted).items
  ours = lambda tree, like: jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)
  return ours(items[item], shapes.params), (
      None if shapes.opt_state is None else ours(items["optimizer"]["opt_state"], shapes.opt_state))


def is_there(directory: str | pathlib.Path) -> bool:
  """Whether a workdir has a checkpoint."""
  try:
    with _open(directory):
      return True
  except FileNotFoundError:
    return False


def load_params(
    directory: str | pathlib.Path, config: ml_collections.ConfigDict, mesh: Mesh, weights: str = "ema"
) -> tuple[Any, int]:
  """One of WEIGHTS of a run, and how many updates they have seen; of the newest checkpoint that can be restored.

  Raises:
    ConfigError: the checkpoint is of a run with another config; the message names the fields.
    OSError: there is no checkpoint, or none that can be restored.
  """
  item = WEIGHTS[weights]
  with _open(directory) as manager:

    def wanted(step: int, theirs: ml_collections.ConfigDict) -> dict[str, Any]:
      _check_same_run(manager, step, theirs, config)
      return {item: _parameter_shapes(config, mesh)}

    found = _newest_restorable(manager, wanted)
  return found.items[item], found.step


def load_state(
    directory: str | pathlib.Path, weights: tuple[str, ...] = tuple(WEIGHTS), with_optimizer: bool = False
) -> tuple[ml_collections.ConfigDict, step_lib.TrainState]:
  """The config of a run and its state, on one CPU; of the newest checkpoint that can be restored.

  Args:
    directory: the run's workdir, which holds `checkpoints/`.
    weights: those of WEIGHTS that are wanted; the others are None.
    with_optimizer: or opt_state is None.

  Raises:
    ConfigError: the checkpoint has no state of an optimizer, which is asked for.
    OSError: there is no checkpoint, or none that can be restored.
  """
  cpu = make_single_device_sharding(jax.local_devices(backend="cpu")[0])

  with _open(directory) as manager:

    def wanted(step: int, config: ml_collections.ConfigDict) -> dict[str, Any]:
      params = jax.eval_shape(lambda: nn.unbox(step_lib.init_params(models.build_model(config), config.seed)))
      shapes = {WEIGHTS[name]: params for name in weights}
      if with_optimizer:
        _check_can_go_on(manager, step)
        count = jax.ShapeDtypeStruct((), jnp.int32)
        shapes["optimizer"] = {
            "step": count, "opt_state": jax.eval_shape(optimizer_lib.make_optimizer(config).init, params), "skipped": count}
      return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cpu), shapes)

    found = _newest_restorable(manager, wanted)
  items = {item: found.items.get(item) for item in WEIGHTS.values()}
  optimizer = found.items.get("optimizer", {"opt_state": None, "skipped": 0})
  return found.config, step_lib.TrainState(
      step=found.step, **items, opt_state=optimizer["opt_state"], skipped=optimizer["skipped"])


def _optimizer(state: step_lib.TrainState) -> dict[str, Any]:
  """What goes into the item `optimizer`."""
  return {"step": state.step, "opt_state": state.opt_state, "skipped": state.skipped}


def _parameter_shapes(config: ml_collections.ConfigDict, mesh: Mesh | None) -> Any:
  """Parameters as ShapeDtypeStructs, split over a mesh by the config's rules, or on the first local device."""
  model = models.build_model(config, mesh)
  boxed = jax.eval_shape(lambda: step_lib.init_params(model, config.seed))
  if mesh is None:
    device = make_single_device_sharding(jax.local_devices()[0])
    shardings = jax.tree.map(lambda _: device, nn.unbox(boxed))
  else:
    shardings = sharding.parameter_shardings(boxed, mesh, config.sharding_rules)
  return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), nn.unbox(boxed), shardings)


@dataclasses.dataclass(frozen=True)
class _Found:
  """What was read of a checkpoint."""

  step: int
  config: ml_collections.ConfigDict
  items: dict[str, Any]
  passed_over: dict[int, str]  # newer steps, and what they are: "damaged", or "other" for those of a run with another config


def _newest_restorable(
    manager: ocp.CheckpointManager, wanted: Callable[[int, ml_collections.ConfigDict], dict[str, Any]]
) -> _Found:
  """The newest checkpoint of which all is whole that is wanted.

  It is whole where it is so for all processes: each reads its own part of a state, and only that may be damaged.

  Args:
    manager: of `_reader`.
    wanted: from a step and its config to the items to read, trees of ShapeDtypeStructs with shardings; it may change the config,
      and raises ConfigError where the checkpoint does not fit.

  Raises:
    ConfigError: no checkpoint can be restored, and the newest that could be read does not fit.
    OSError: there are checkpoints, and none can be restored.
  """
  passed_over, misfit, newest = {}, None, ""
  for step in cluster.gather(sorted(manager.all_steps(), reverse=True))[0]:
    problem = None
    with _noted() as own:
      fields, saved = _read_json(manager, step)
      config = config_lib.completed(config_lib.from_dict(fields))
      shapes = wanted(step, config)
      items = _read(manager, step, shapes)
    problem = _first(cluster.gather(own))
    if not problem and saved:  # of all processes together
      with _noted() as own:
        _check_sums(items, saved)
      problem = _first(cluster.gather(own))
    if not problem:
      if not saved and items and jax.process_index() == 0:
        logging.warning("%s: step %d is of before there were checksums; whether it is as it was saved is not known.",
                        manager.directory, step)
      return _Found(step, config, items, passed_over)
    kind, why = problem
    passed_over[step] = kind
    newest = newest or f"step {step}: {why}"
    if kind == "other":
      misfit = misfit or why
    if jax.process_index() == 0:
      logging.warning("%s: step %d can't be restored (%s); trying the one before it.", manager.directory, step, why)
  if misfit:
    raise config_lib.ConfigError(misfit)
  raise OSError(f"{manager.directory}: none of the checkpoints {[*passed_over]} can be restored ({newest}). Move the directory "
                "away to start anew.")


@contextlib.contextmanager
def _noted() -> Iterator[list[str]]:
  """Puts what is wrong into the list that it gives, as its kind and a line, instead of raising it."""
  problem = []
  try:
    yield problem
  except config_lib.ConfigError as e:
    problem += "other", str(e)
  except Exception as e:  # pylint: disable=broad-exception-caught  # damage raises exceptions of many types
    problem += "damaged", str(e) if isinstance(e, _Damaged) else _first_line(e)


class _Damaged(Exception):
  """What was read is not what was saved; the message says how."""


def _first(problems: list[list[str]]) -> list[str] | None:
  return next((problem for problem in problems if problem), None)


def _first_line(e: Exception) -> str:
  return f"{type(e).__name__}: {str(e).splitlines()[0][:200] if str(e) else ''}"


def _read_json(manager: ocp.CheckpointManager, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
  """The config and the checksums of a checkpoint, {} where it has none."""
  wanted = {"config": ocp.args.JsonRestore()}
  has_sums = (manager.directory / str(step) / "checksums").exists()
  if has_sums:
    wanted["checksums"] = ocp.args.JsonRestore()
  found = manager.restore(step, args=ocp.args.Composite(**wanted))
  if not has_sums:
    return found.config, {}
  if _hash(found.config) != found.checksums["config"]:
    raise _Damaged("its config is not as it was saved")
  for item in sorted({name.partition("/")[0] for name in found.checksums["arrays"]}):
    if not (manager.directory / str(step) / item).is_dir():
      raise _Damaged(f"its {item} is missing")
  return found.config, found.checksums


def _hash(config: dict[str, Any]) -> str:
  return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def _read(manager: ocp.CheckpointManager, step: int, shapes: dict[str, Any]) -> dict[str, Any]:
  """Items of a checkpoint, of which Orbax would make any other shape or dtype in silence.

  Raises:
    _Damaged: arrays are missing, too many, or of other shapes or dtypes; the message names them.
  """
  if not shapes:
    return {}
  there = {}
  for item in shapes:
    metadata = ocp.StandardCheckpointHandler().metadata(manager.directory / str(step) / item)
    there |= checksums.names({item: metadata.tree if hasattr(metadata, "tree") else metadata})
  ours = checksums.names(shapes)
  zero = "optimizer/skipped"  # which checkpoints did not have once
  absent = zero in ours and zero not in there
  if absent:
    sharding_of_zero = ours.pop(zero).sharding
    shapes = shapes | {"optimizer": {k: v for k, v in shapes["optimizer"].items() if k != "skipped"}}
  form = lambda x: f"{jnp.dtype(x.dtype).name}{list(x.shape)}"
  problems = [f"{name} is {form(there[name]) if name in there else 'missing'}, not {form(x)}" for name, x in ours.items()
              if name not in there or form(there[name]) != form(x)]
  problems += [f"{name} is not of this model" for name in there if name not in ours]
  if problems:
    raise _Damaged("; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else ""))
  restored = manager.restore(step, args=ocp.args.Composite(
      **{item: ocp.args.StandardRestore(tree) for item, tree in shapes.items()}))
  items = {item: restored[item] for item in shapes}
  if absent:
    items["optimizer"] = items["optimizer"] | {
        "skipped": jax.make_array_from_callback((), sharding_of_zero, lambda _: np.int32(0))}
  return items


def _check_sums(items: dict[str, Any], saved: dict[str, Any]) -> None:
  """Raises _Damaged where arrays are not those that were saved, naming them."""
  sums = checksums.compute(items)
  different = [name for name, value in sums.items() if saved["arrays"].get(name) != value]
  if different:
    raise _Damaged(f"the checksums of {len(different)} of {len(sums)} arrays are not those of what was saved, as {different[0]}")


def _open(workdir: str | pathlib.Path) -> ocp.CheckpointManager:
  directory = _directory(workdir)
  manager = directory.is_dir() and _reader(directory)
  if not manager or manager.latest_step() is None:
    raise FileNotFoundError(f"{directory}: there is no checkpoint; give the workdir of a run that has saved one.")
  return manager


def _reader(directory: pathlib.Path) -> ocp.CheckpointManager:
  """A manager that restores on this process alone: where it fails, no other process waits for it."""
  _say_once()
  own = ocp.options.MultiprocessingOptions(
      primary_host=jax.process_index(), active_processes={jax.process_index()}, barrier_sync_key_prefix=f"{jax.process_index()}")
  return ocp.CheckpointManager(
      directory, item_handlers=_handlers(own), options=ocp.CheckpointManagerOptions(
          create=False, save_root_metadata=False, multiprocessing_options=own))


def _directory(workdir: str | pathlib.Path) -> pathlib.Path:
  return pathlib.Path(workdir).expanduser().resolve() / "checkpoints"  # Orbax wants absolute paths


def _handlers(processes: ocp.options.MultiprocessingOptions = ocp.options.MultiprocessingOptions()) -> dict[str, Any]:
  arrays = {item: ocp.StandardCheckpointHandler(multiprocessing_options=processes) for item in ("params", "ema", "optimizer")}
  return arrays | {item: ocp.JsonCheckpointHandler(multiprocessing_options=processes) for item in ("config", "checksums")}


def _check_same_run(
    manager: ocp.CheckpointManager, step: int, theirs: ml_collections.ConfigDict, ours: ml_collections.ConfigDict
) -> None:
  different = config_lib.differences(ours, theirs)
  if different:
    raise config_lib.ConfigError(
        f"{manager.directory}: step {step} is of a run with another config; set these back, or give another --workdir: "
        + "; ".join(different))


def _check_can_go_on(manager: ocp.CheckpointManager, step: int) -> None:
  if not (manager.directory / str(step) / "optimizer").exists():
    raise config_lib.ConfigError(
        f"{manager.directory}: step {step} was converted without the state of its optimizer; convert it again with --optimizer.")
