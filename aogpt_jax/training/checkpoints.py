"""Orbax checkpoints of a run, and the model in one. The only module that knows Orbax.

WORKDIR/checkpoints/N/ is the state after N updates, in four items: `params`, `ema`, `optimizer` (moments, counts and step)
and `config`, the resolved config as JSON. Nothing else is needed to go on or to use the model.
"""

from collections.abc import Callable
import itertools
import logging
import pathlib
from typing import Any

from flax import linen as nn
import jax
from jax.sharding import Mesh, SingleDeviceSharding
import ml_collections
import orbax.checkpoint as ocp

from aogpt_jax import config as config_lib
from aogpt_jax import models
from aogpt_jax import sharding
from aogpt_jax.data import tokenizers
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
    """Starts to write the state; returns when it may be donated, before the files are complete."""
    step = int(state.step)
    if step in self._manager.all_steps():
      return
    self._manager.save(step, args=ocp.args.Composite(
        params=ocp.args.StandardSave(state.params),
        ema=ocp.args.StandardSave(state.ema),
        optimizer=ocp.args.StandardSave({"step": state.step, "opt_state": state.opt_state}),
        config=ocp.args.JsonSave(self._config.to_dict()),
    ))

  def restore(self, shapes: step_lib.TrainState) -> step_lib.TrainState | None:
    """The newest restorable state, or None where there is no checkpoint.

    Args:
      shapes: ShapeDtypeStructs with the shardings to restore to, on any mesh.

    Raises:
      ConfigError: the newest checkpoint belongs to another run; the message names the fields.
      OSError: there are checkpoints, and none can be restored.
    """
    if not self._manager.all_steps():
      return None

    def attempt(step: int) -> step_lib.TrainState:
      _check_same_run(self._manager, step, self._config)
      restored = self._manager.restore(step, args=ocp.args.Composite(
          params=ocp.args.StandardRestore(shapes.params),
          ema=ocp.args.StandardRestore(shapes.ema),
          optimizer=ocp.args.StandardRestore({"step": shapes.step, "opt_state": shapes.opt_state}),
      ))
      return step_lib.TrainState(step=restored.optimizer["step"], params=restored.params, ema=restored.ema,
                                 opt_state=restored.optimizer["opt_state"])

    _, state, failed = _newest_restorable(self._manager, attempt)
    for step in failed if jax.process_index() == 0 else ():  # out of the way of what will be saved again, not lost
      directory = self._manager.directory / f"damaged-{step}"
      for i in itertools.count(2):
        if not directory.exists():
          break
        directory = self._manager.directory / f"damaged-{step}-{i}"
      (self._manager.directory / str(step)).rename(directory)
    self._manager.reload()
    return state

  def wait(self) -> None:
    """Returns when all that was saved is complete on disk; raises what went wrong."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    self._manager.close()


def load_model(directory: str | pathlib.Path, mesh: Mesh | None = None, weights: str = "ema") -> tuple[nn.Module, Any]:
  """The model of a run with its parameters.

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
    _, loaded, _ = _newest_restorable(
        manager, lambda step: _restore_model(manager, step, _restore_config(manager, step), mesh, weights))
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


def _restore_model(
    manager: ocp.CheckpointManager, step: int, config: ml_collections.ConfigDict, mesh: Mesh | None, weights: str
) -> tuple[nn.Module, Any]:
  model = models.build_model(config)
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
  """The newest step for which `attempt` succeeds, what it returned, and the newer steps for which it failed."""
  failed = []
  for step in sorted(manager.all_steps(), reverse=True):
    try:
      return step, attempt(step), failed
    except config_lib.ConfigError:
      raise
    except Exception as e:  # pylint: disable=broad-exception-caught  # damage raises exceptions of many types
      logging.warning("%s: step %d can't be restored (%s: %s); trying the one before it.",
                      manager.directory, step, type(e).__name__, str(e).split("\n")[0][:200])
      failed.append(step)
      # Orbax reads many arrays at once; those that fail after the first report to nobody, a traceback each.
      logging.getLogger("asyncio").setLevel(logging.CRITICAL)
  raise OSError(f"{manager.directory}: none of the checkpoints {failed} can be restored; the reasons are above. Move the "
                "directory away to start anew.")


def _open(workdir: str | pathlib.Path) -> ocp.CheckpointManager:
  directory = _directory(workdir)
  manager = directory.is_dir() and ocp.CheckpointManager(
      directory, options=ocp.CheckpointManagerOptions(create=False, save_root_metadata=False), item_handlers=_handlers())
  if not manager or manager.latest_step() is None:
    raise FileNotFoundError(f"{directory}: there is no checkpoint; give the workdir of a run that has saved one.")
  return manager


def _directory(workdir: str | pathlib.Path) -> pathlib.Path:
  return pathlib.Path(workdir).expanduser().resolve() / "checkpoints"  # Orbax wants absolute paths


def _handlers() -> dict[str, Any]:
  arrays = {item: ocp.StandardCheckpointHandler() for item in ("params", "ema", "optimizer")}
  return {**arrays, "config": ocp.JsonCheckpointHandler()}


def _check_same_run(manager: ocp.CheckpointManager, step: int, config: ml_collections.ConfigDict) -> None:
  different = config_lib.differences(config, _restore_config(manager, step))
  if different:
    raise config_lib.ConfigError(
        f"{manager.directory}: step {step} is of a run with another config; set these back, or give another --workdir: "
        + "; ".join(different))


def _restore_config(manager: ocp.CheckpointManager, step: int) -> ml_collections.ConfigDict:
  fields = manager.restore(step, args=ocp.args.Composite(config=ocp.args.JsonRestore())).config
  return config_lib.completed(config_lib.from_dict(fields))
