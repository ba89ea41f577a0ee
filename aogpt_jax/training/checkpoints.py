"""Orbax checkpoints of a run, and the model in one. The only module that knows Orbax.

WORKDIR/checkpoints/N/ is the state after N updates, in four items: `params`, `ema`, `optimizer` (moments, counts and step)
and `config`, the resolved config as JSON. Nothing else is needed to go on or to use the model. What was converted from another
format may have no `optimizer`: then training can't go on from it.
"""

from collections.abc import Callable
import itertools
import logging
import pathlib
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding
import ml_collections
import orbax.checkpoint as ocp

from aogpt_jax import cluster
from aogpt_jax import config as config_lib
from aogpt_jax import models
from aogpt_jax import sharding
from aogpt_jax.data import tokenizers
from aogpt_jax.training import optimizer as optimizer_lib
from aogpt_jax.training import step as step_lib

_policy = ocp.checkpoint_managers

# The parameters that a checkpoint has, by the name that a user gives them: the moving average and the last update's.
WEIGHTS = {"ema": "ema", "raw": "params"}


class Checkpoints:
  """Saves asynchronously, restores the newest checkpoint that can be restored."""

  def __init__(self, workdir: str | pathlib.Path, config: ml_collections.ConfigDict):
    self._config = config
    if _directory(workdir).exists() and not _directory(workdir).is_dir():
      raise NotADirectoryError(f"{_directory(workdir)}: is a file; move it away, or give another --workdir.")
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
    """
    step = int(state.step)
    if step in self._manager.all_steps():
      return
    optimizer = {"step": state.step, "opt_state": state.opt_state}
    self._manager.save(step, args=ocp.args.Composite(
        params=ocp.args.StandardSave(state.params),
        ema=ocp.args.StandardSave(state.ema),
        config=ocp.args.JsonSave(self._config.to_dict()),
        **({} if state.opt_state is None else {"optimizer": ocp.args.StandardSave(optimizer)}),
    ))

  def restore(self, shapes: step_lib.TrainState) -> step_lib.TrainState | None:
    """The newest restorable state, or None where there is no checkpoint.

    Args:
      shapes: ShapeDtypeStructs with the shardings to restore to, on any mesh.

    Raises:
      ConfigError: the newest checkpoint belongs to another run; the message names the fields.
      OSError: there are checkpoints, and none can be restored.
    """
    reader = _reader(self._manager.directory)
    if not cluster.gather(bool(reader.all_steps()))[0]:
      return None

    def attempt(step: int) -> step_lib.TrainState:
      _check_same_run(reader, step, self._config)
      _check_can_go_on(reader, step)
      restored = reader.restore(step, args=ocp.args.Composite(
          params=ocp.args.StandardRestore(shapes.params),
          ema=ocp.args.StandardRestore(shapes.ema),
          optimizer=ocp.args.StandardRestore({"step": shapes.step, "opt_state": shapes.opt_state}),
      ))
      return step_lib.TrainState(step=restored.optimizer["step"], params=restored.params, ema=restored.ema,
                                 opt_state=restored.optimizer["opt_state"])

    with reader:
      _, state, failed = _newest_restorable(reader, attempt)
    for step in failed if jax.process_index() == 0 else ():  # out of the way of what will be saved again, not lost
      directory = self._manager.directory / f"damaged-{step}"
      for i in itertools.count(2):
        if not directory.exists():
          break
        directory = self._manager.directory / f"damaged-{step}-{i}"
      (self._manager.directory / str(step)).rename(directory)
    cluster.gather(None)  # what is out of the way is so for all
    self._manager.reload()
    return state

  def wait(self) -> None:
    """Returns when all that was saved is complete on disk; raises what went wrong."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    self._manager.close()


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
  with _open(directory) as manager:

    def attempt(step: int) -> tuple[nn.Module, Any]:
      config = _restore_config(manager, step)
      config.model.attention = "auto"
      return _restore_model(manager, step, config, mesh, weights)

    _, loaded, _ = _newest_restorable(manager, attempt)
  return loaded


def load_tokenizer(directory: str | pathlib.Path) -> tokenizers.Tokenizer:
  """The tokenizer of the text that a run's model was trained on.

  Args:
    directory: the run's workdir, which holds `checkpoints/`.

  Raises:
    OSError: there is no checkpoint, none can be read, or the tokenizer's files can't be.
  """
  with _open(directory) as manager:
    _, config, _ = _newest_restorable(manager, lambda step: _restore_config(manager, step))
  return tokenizers.load(config.data.tokenizer)


def describe(directory: str | pathlib.Path) -> tuple[ml_collections.ConfigDict, bool]:
  """The config of a run's newest checkpoint, and whether that has an optimiser's state.

  Raises:
    OSError: there is no checkpoint, or none whose config can be read.
  """
  with _open(directory) as manager:
    step, config, _ = _newest_restorable(manager, lambda step: _restore_config(manager, step))
    return config, (manager.directory / str(step) / "optimizer").is_dir()


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
  with _open(directory) as manager:

    def attempt(step: int) -> tuple[Any, Any]:
      wanted = {item: ocp.args.StandardRestore(shapes.params)}
      if shapes.opt_state is not None:
        wanted["optimizer"] = ocp.args.StandardRestore({"step": shapes.step, "opt_state": shapes.opt_state})
      restored = manager.restore(step, args=ocp.args.Composite(**wanted))
      return restored[item], restored["optimizer"]["opt_state"] if shapes.opt_state is not None else None

    _, found, _ = _newest_restorable(manager, attempt)
  return found


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
  with _open(directory) as manager:

    def attempt(step: int) -> Any:
      _check_same_run(manager, step, config)
      return _restore_model(manager, step, config, mesh, weights)[1]

    step, params, _ = _newest_restorable(manager, attempt)
  return params, step


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
  cpu = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])

  def attempt(step: int) -> tuple[ml_collections.ConfigDict, step_lib.TrainState]:
    config = _restore_config(manager, step)
    model = models.build_model(config)
    params = jax.eval_shape(lambda: nn.unbox(step_lib.init_params(model, config.seed)))
    shapes = {WEIGHTS[name]: params for name in weights}
    if with_optimizer:
      _check_can_go_on(manager, step)
      opt_state = jax.eval_shape(optimizer_lib.make_optimizer(config).init, params)
      shapes["optimizer"] = {"step": jax.ShapeDtypeStruct((), jnp.int32), "opt_state": opt_state}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cpu), shapes)
    found = manager.restore(step, args=ocp.args.Composite(
        **{item: ocp.args.StandardRestore(tree) for item, tree in shapes.items()}))
    opt_state = found["optimizer"]["opt_state"] if with_optimizer else None
    return config, step_lib.TrainState(step=step, **{item: found.get(item) for item in WEIGHTS.values()}, opt_state=opt_state)

  with _open(directory) as manager:
    return _newest_restorable(manager, attempt)[1]


def _restore_model(
    manager: ocp.CheckpointManager, step: int, config: ml_collections.ConfigDict, mesh: Mesh | None, weights: str
) -> tuple[nn.Module, Any]:
  model = models.build_model(config, mesh)
  boxed = jax.eval_shape(lambda: step_lib.init_params(model, config.seed))
  if mesh is None:
    device = SingleDeviceSharding(jax.local_devices()[0])
    shardings = jax.tree.map(lambda _: device, nn.unbox(boxed))
  else:
    shardings = sharding.parameter_shardings(boxed, mesh, config.sharding_rules)
  shapes = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), nn.unbox(boxed), shardings)
  item = WEIGHTS[weights]
  return model, manager.restore(step, args=ocp.args.Composite(**{item: ocp.args.StandardRestore(shapes)}))[item]


def _newest_restorable(manager: ocp.CheckpointManager, attempt: Callable[[int], Any]) -> tuple[int, Any, list[int]]:
  """The newest step for which `attempt` succeeds, what it returned, and the newer steps for which it failed.

  It succeeds where it does so on all processes: each reads its own part of a state, and only that may be damaged.
  """
  failed = []
  for step in cluster.gather(sorted(manager.all_steps(), reverse=True))[0]:
    found, why = None, ""
    try:
      found = attempt(step)
    except config_lib.ConfigError:
      raise
    except Exception as e:  # pylint: disable=broad-exception-caught  # damage raises exceptions of many types
      why = f"{type(e).__name__}: {str(e).splitlines()[0][:200] if str(e) else ''}"
      # Orbax reads many arrays at once; those that fail after the first report to nobody, a traceback each.
      logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    reasons = [reason for reason in cluster.gather(why) if reason]
    if not reasons:
      return step, found, failed
    failed.append(step)
    if jax.process_index() == 0:
      logging.warning("%s: step %d can't be restored (%s); trying the one before it.", manager.directory, step, reasons[0])
  raise OSError(f"{manager.directory}: none of the checkpoints {failed} can be restored; the reasons are above. Move the "
                "directory away to start anew.")


def _open(workdir: str | pathlib.Path) -> ocp.CheckpointManager:
  directory = _directory(workdir)
  manager = directory.is_dir() and _reader(directory)
  if not manager or manager.latest_step() is None:
    raise FileNotFoundError(f"{directory}: there is no checkpoint; give the workdir of a run that has saved one.")
  return manager


def _reader(directory: pathlib.Path) -> ocp.CheckpointManager:
  """A manager that restores on this process alone: where it fails, no other process waits for it."""
  own = ocp.options.MultiprocessingOptions(
      primary_host=jax.process_index(), active_processes={jax.process_index()}, barrier_sync_key_prefix=f"{jax.process_index()}")
  return ocp.CheckpointManager(
      directory, item_handlers=_handlers(own), options=ocp.CheckpointManagerOptions(
          create=False, save_root_metadata=False, multiprocessing_options=own))


def _directory(workdir: str | pathlib.Path) -> pathlib.Path:
  return pathlib.Path(workdir).expanduser().resolve() / "checkpoints"  # Orbax wants absolute paths


def _handlers(processes: ocp.options.MultiprocessingOptions = ocp.options.MultiprocessingOptions()) -> dict[str, Any]:
  arrays = {item: ocp.StandardCheckpointHandler(multiprocessing_options=processes) for item in ("params", "ema", "optimizer")}
  return {**arrays, "config": ocp.JsonCheckpointHandler(multiprocessing_options=processes)}


def _check_same_run(manager: ocp.CheckpointManager, step: int, config: ml_collections.ConfigDict) -> None:
  different = config_lib.differences(config, _restore_config(manager, step))
  if different:
    raise config_lib.ConfigError(
        f"{manager.directory}: step {step} is of a run with another config; set these back, or give another --workdir: "
        + "; ".join(different))


def _check_can_go_on(manager: ocp.CheckpointManager, step: int) -> None:
  if not (manager.directory / str(step) / "optimizer").exists():
    raise config_lib.ConfigError(
        f"{manager.directory}: step {step} was converted without the state of its optimizer; convert it again with --optimizer.")


def _restore_config(manager: ocp.CheckpointManager, step: int) -> ml_collections.ConfigDict:
  fields = manager.restore(step, args=ocp.args.Composite(config=ocp.args.JsonRestore())).config
  return config_lib.completed(config_lib.from_dict(fields))
