"""Orbax checkpoints of a run, and the model in one. The only module that knows Orbax.

WORKDIR/checkpoints/N/ is the state after N updates, in four items: `params`, `ema`, `optimizer` (moments, counts and step)
and `config`, the resolved config as JSON. Nothing else is needed to go on or to use the model.
"""

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
from aogpt_jax.training import step as step_lib

_policy = ocp.checkpoint_managers


class Checkpoints:
  """Saves asynchronously, restores the newest checkpoint that can be restored."""

  def __init__(self, workdir: str | pathlib.Path, config: ml_collections.ConfigDict):
    self._config = config
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
    failed = []
    for step in sorted(self._manager.all_steps(), reverse=True):
      try:
        _check_same_run(self._manager, step, self._config)
        restored = self._manager.restore(step, args=ocp.args.Composite(
            params=ocp.args.StandardRestore(shapes.params),
            ema=ocp.args.StandardRestore(shapes.ema),
            optimizer=ocp.args.StandardRestore({"step": shapes.step, "opt_state": shapes.opt_state}),
        ))
        state = step_lib.TrainState(step=restored.optimizer["step"], params=restored.params, ema=restored.ema,
                                    opt_state=restored.optimizer["opt_state"])
      except config_lib.ConfigError:
        raise
      except Exception as e:  # pylint: disable=broad-exception-caught  # damage raises exceptions of many types
        logging.warning("%s: step %d can't be restored (%s: %s); trying the one before it.",
                        self._manager.directory, step, type(e).__name__, str(e).split("\n")[0][:200])
        failed.append(step)
        continue
      for step in failed if jax.process_index() == 0 else ():  # out of the way of what will be saved again, not lost
        (self._manager.directory / str(step)).rename(self._manager.directory / f"damaged-{step}")
      self._manager.reload()
      return state
    if failed:
      raise OSError(f"{self._manager.directory}: none of the checkpoints {failed} can be restored; the reasons are "
                         "above. Move the directory away to start anew.")
    return None

  def wait(self) -> None:
    """Returns when all that was saved is complete on disk; raises what went wrong."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    self._manager.close()


def load_model(directory: str | pathlib.Path, mesh: Mesh | None = None) -> tuple[nn.Module, Any]:
  """The model of a run's workdir or a converted checkpoint, with its EMA parameters.

  Args:
    directory: holds `checkpoints/`.
    mesh: shard the parameters over it by the rules of the run's config; the default is the first local device.

  Returns:
    The Linen module and its parameters, of the newest checkpoint.

  Raises:
    FileNotFoundError: there is no checkpoint.
  """
  with _open(directory) as manager:
    step = manager.latest_step()
    config = _restore_config(manager, step)
    model = models.build_model(config)
    boxed = jax.eval_shape(lambda: step_lib.init_params(model, config.seed))
    if mesh is None:
      device = SingleDeviceSharding(jax.local_devices()[0])
      shardings = jax.tree.map(lambda _: device, nn.unbox(boxed))
    else:
      shardings = sharding.parameter_shardings(boxed, mesh, config.sharding_rules)
    shapes = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), nn.unbox(boxed), shardings)
    return model, manager.restore(step, args=ocp.args.Composite(ema=ocp.args.StandardRestore(shapes))).ema


def newest_step(directory: str | pathlib.Path, config: ml_collections.ConfigDict) -> int:
  """The step of a run's newest checkpoint.

  Raises:
    FileNotFoundError: there is no checkpoint.
    ConfigError: it belongs to a run with another config; the message names the fields.
  """
  with _open(directory) as manager:
    _check_same_run(manager, manager.latest_step(), config)
    return manager.latest_step()


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
  return config_lib.from_dict(manager.restore(step, args=ocp.args.Composite(config=ocp.args.JsonRestore())).config)
