"""The training loop: batches go in; checkpoints, metrics, evaluations and samples come out."""

import collections
from collections.abc import Iterator
import logging
import statistics
import time
from typing import Any
import zlib

import jax
from jax.sharding import Mesh
import ml_collections
import numpy as np

from aogpt_jax import cluster
from aogpt_jax import config as config_lib
from aogpt_jax import console
from aogpt_jax import memory
from aogpt_jax import sharding
from aogpt_jax.data import loader
from aogpt_jax.evaluation import held_out
from aogpt_jax.run import Run
from aogpt_jax.sampling import texts
from aogpt_jax.training import checkpoints
from aogpt_jax.training import flops
from aogpt_jax.training import metrics
from aogpt_jax.training import profile
from aogpt_jax.training import provenance
from aogpt_jax.training import start as start_lib
from aogpt_jax.training import step as step_lib


# Steps before a step with which its gradient is compared, and the least number of them.
_SPIKE_WINDOW, _SPIKE_LEAST = 100, 20
# Seconds after the end of a program on a CPU in which XLA has freed its memory. A program that is called before then gets another
# piece, and the process keeps both.
FREED_AFTER = 2e-4


def train(run: Run) -> step_lib.TrainState:
  """Trains to `config.steps` updates, from the newest checkpoint in the workdir where there is one.

  Returns:
    The state, which is also the newest checkpoint.

  Raises:
    ConfigError: the workdir holds a run with another config, or one that was trained on another text.
    FloatingPointError: the loss or the gradient of more than config.optimizer.skip_nonfinite updates was not finite; the state
      before the last of them is saved.
    OSError: a checkpoint or a record can't be written; the checkpoints before are whole.
    cluster.Terminated: a process of the run got SIGTERM or SIGINT; all have saved the state after the same step.
  """
  config = run.config
  trainer = step_lib.make_trainer(config, run.model, run.mesh)
  saver = checkpoints.Checkpoints(run.workdir, config)
  state = saver.restore(trainer.shapes)
  is_new = state is None
  if is_new:
    state = start_lib.state(config, run.model, run.tokenizer, trainer)
  else:
    provenance.check_text(run.workdir, config, run.packed)
  start = int(jax.device_get(state.step))
  if jax.process_index() == 0:  # for commands that evaluate and sample with the same config
    command = f"python -m aogpt_jax.main --config={run.workdir}/{config_lib.FILE} --mode=sample"
    config_lib.write_file(config, run.workdir, f"Of the run {run.workdir.name}", command)
  parameters = sum(x.size for x in jax.tree.leaves(trainer.shapes.params))
  console.say(f"model: {parameters:,} parameters; {config.steps:,} steps of {config.batch_size} x "
              f"{config.model.block_size} tokens; {run.mesh.size} x {run.mesh.devices.flat[0].device_kind}")
  if start:
    console.say(f"going on from the checkpoint of step {start:,}" if start < config.steps else
                f"step {start:,} of {config.steps:,} is in the workdir already: nothing to train")
  writer = metrics.MetricWriter(run.workdir, -1 if is_new else start, config)
  if start < config.steps:
    provenance.record(run.workdir, start, config, run.packed)
  trace = profile.Trace(run.workdir, config.log.profile)
  waiting, on_cpu = None, run.mesh.devices.flat[0].platform == "cpu"
  batches = loader.train_batches(
      run.packed, seed=config.seed, batch_size=config.batch_size, start_step=start,
      local=sharding.local_rows(run.mesh, config.batch_size), prefetch=config.data.prefetch)
  log = _StepLog(config, writer, start, batches)
  try:
    if is_new and config.init_from:
      console.say(f"starting from {config.init_from}")
    # A signal has the state saved at once, without the evaluation that was due.
    if config.init_from and is_new or _is_due(start, config.eval.every_steps, config) and not metrics.is_evaluated(run.workdir, start):
      _evaluate(run, state, start, writer)
      log.resume_clock(start)
    with cluster.Termination() as termination:
      for step, (tokens, batch_hash) in enumerate(_to_device(batches, run.mesh), start + 1):
        if step > config.steps:
          break
        last, terminated = step == config.steps, termination.reached()
        trace.before(step)
        if step == start + 1:
          compiled = trainer.step.lower(state, tokens).compile()
          memory.give_back()  # what starting and compiling took; a step may need as much again
        state, step_metrics = compiled(state, tokens)
        trace.after(step, step_metrics)
        log.note(step, step_metrics)
        # One step may wait while another runs. On a CPU none does: XLA gives a program its memory when it is called, and to
        # prepare a batch takes from the step before what it would gain.
        jax.block_until_ready(step_metrics if on_cpu else waiting)
        waiting = step_metrics
        if on_cpu:
          time.sleep(FREED_AFTER)
        if step == start + 1:
          jax.block_until_ready(step_metrics)
          log.first_step_done(step)
        log.read()  # of the step before, while this one runs
        if last or step % config.log.every_steps == 0:
          log.push(step, batch_hash)
        else:
          log.glance(step)
        evaluate = _is_due(step, config.eval.every_steps, config) and not terminated
        save = _is_due(step, config.checkpoint.every_steps, config) or terminated
        if evaluate or save:
          log.push(step, batch_hash)
          log.read()
        if evaluate:
          _evaluate(run, state, step, writer)
        if save:
          saver.save(state)
        if terminated:
          saver.wait()
          raise cluster.Terminated(f"step {step:,} is saved, and the same command goes on from it", terminated)
        if evaluate or save:
          log.resume_clock(step)
      saver.wait()
      if start < config.steps and (terminated := termination.reached()):
        raise cluster.Terminated(f"step {config.steps:,} is saved, and the same command goes on from it", terminated)
  except _Stopped as e:
    raise FloatingPointError(f"{e} {_keep_last_good(saver, state)} To leave out such updates, set config.optimizer.skip_nonfinite "
                             "to how many; else lower config.optimizer.learning_rate or raise its warmup_steps.") from None
  finally:
    console.clear()
    batches.close()
    trace.close()
    writer.close()
    saver.close()
  return state


def _is_due(step: int, every_steps: int, config: ml_collections.ConfigDict) -> bool:
  """Whether something that is done every so many steps, and at the end, is to be done after this one."""
  return step > 0 and (step == config.steps or step % every_steps == 0)


def _to_device(batches: Iterator[np.ndarray], mesh: Mesh) -> Iterator[tuple[jax.Array, int]]:
  """Global batches on the devices, one ahead of the step that uses it, with the hash of this process's rows."""
  ahead = None
  for rows in batches:
    now, ahead = ahead, (sharding.place_batch(mesh, rows), zlib.crc32(rows))
    if now is not None:
      yield now


class _Stopped(Exception):
  """The step stops: an update is not finite, and no more of these may be left out."""


def _keep_last_good(saver: checkpoints.Checkpoints, state: step_lib.TrainState) -> str:
  """Saves the state that an update which is not finite has left as it was; says so."""
  try:
    # The update is not counted: whoever goes on tries it again.
    saver.save(state.replace(skipped=state.skipped - 1))
  except FloatingPointError:  # the update before has made numbers that are not finite of finite gradients
    return "The newest checkpoint is from before this step."
  saver.wait()
  return f"The state before it is saved as step {int(state.step):,}."


def _evaluate(run: Run, state: step_lib.TrainState, step: int, writer: metrics.MetricWriter) -> None:
  results = held_out.evaluate(run, state.ema, "validation", run.config.eval.sequences)
  writer.write(step, held_out.scalars(results))
  parts = (f"{name.replace('_', ' ')} {r.nats_per_token:.4f} +- {r.stderr_sequences:.4f} nats/token"
           for name, r in results.items())
  console.say(f"step {step:,} validation (EMA): " + ", ".join(parts))
  sample = run.config.sample
  drawn = [text for order in sample.orders for text in texts.generate(
      run.model, state.ema, run.tokenizer, order=order, mesh=run.mesh, **texts.options(sample))]
  text = texts.readable(drawn)
  writer.write_text(step, "samples", text)
  console.say(text)


class _StepLog:
  """Metrics of single steps, read from the device after the next step has been started.

  On a terminal, the last line says where training is, also between the steps that are recorded; elsewhere, each of those has a line.
  """

  def __init__(self, config: ml_collections.ConfigDict, writer: metrics.MetricWriter, start: int, batches: loader.TrainBatches):
    self._config, self._writer, self._batches = config, writer, batches
    self._pending: tuple[int, int | None] | None = None  # the step to be shown, and the hash of its batch where it is recorded
    self._noted: list[tuple[int, dict[str, jax.Array]]] = []  # of all steps that have not been looked at
    self._norms = collections.deque(maxlen=_SPIKE_WINDOW)  # of the gradients before
    self._last_pushed = start
    self._timed_from = start  # the step after which the clock was started
    self._clock, self._waited = time.monotonic(), batches.seconds_waited
    self._device_peak = flops.peak(jax.devices()[0].device_kind)
    self._pace = console.Pace()

  def note(self, step: int, step_metrics: dict[str, jax.Array]) -> None:
    """Keeps the metrics of a step on the device, to be looked at with the next one that is recorded."""
    self._noted.append((step, step_metrics))

  def push(self, step: int, batch_hash: int) -> None:
    """Has `read` record the last step that was noted."""
    if step > self._last_pushed:
      self._last_pushed = step
      self._pending = (step, batch_hash)

  def glance(self, step: int) -> None:
    """The same of a step that is not recorded, where the terminal is to be redrawn."""
    if self._pace.is_live and self._pace.is_due():
      self._pending = (step, None)

  def read(self) -> None:
    """Waits for the pending step, looks at all steps up to it, and records and shows it.

    Raises:
      _Stopped: one of them was not finite, and no more may be left out.
    """
    if self._pending is None:
      return
    (step, batch_hash), self._pending = self._pending, None
    count = sum(noted <= step for noted, _ in self._noted)
    until, self._noted = jax.device_get(self._noted[:count]), self._noted[count:]
    for noted, step_metrics in until:
      self._look_at(int(noted), step_metrics)
    values: dict[str, Any] = {name: float(x) for name, x in until[-1][1].items()}
    values["skipped"] = int(values["skipped"])
    now = time.monotonic()
    line = (f"step {step:,}/{self._config.steps:,}  loss {values['loss']:.4f}  grad {values['grad_norm']:.3f}  "
            f"lr {values['learning_rate']:.2e}")
    if step > self._timed_from:  # not the first one, which was compiled
      seconds = (now - self._clock) / (step - self._timed_from)
      speed = self._config.batch_size * self._config.model.block_size / seconds
      waited = (self._batches.seconds_waited - self._waited) / (step - self._timed_from)
      values |= {"step_seconds": seconds, "data_seconds": waited, "tokens_per_second": speed}
      line += f"  {speed:,.0f} tokens/s"
      if self._device_peak:
        values["model_flop_utilisation"] = flops.per_token(self._config) * speed / (self._device_peak * jax.device_count())
        line += f"  {values['model_flop_utilisation']:.1%} of peak"
      line += f"  {console.duration(seconds * (self._config.steps - step))} left"
    self._pace.show(line)
    if batch_hash is not None:
      self._clock, self._timed_from, self._waited = now, step, self._batches.seconds_waited
      values["batch_hash"] = f"{batch_hash:08x}"
      self._writer.write(step, {name: x for name, x in values.items() if isinstance(x, str) or np.isfinite(x)})

  def _look_at(self, step: int, values: dict[str, np.ndarray]) -> None:
    """Warns of an update that was left out and of a gradient far above those before; raises _Stopped at the last straw."""
    loss, norm, skipped = float(values["loss"]), float(values["grad_norm"]), int(values["skipped"])
    budget = self._config.optimizer.skip_nonfinite
    if skipped > budget:
      raise _Stopped(f"step {step}: the loss is {loss} and the gradient norm {norm}.")
    if not np.isfinite([loss, norm]).all():
      logging.warning("step %d: the loss is %s and the gradient norm %s; this update is left out, number %d of "
                      "config.optimizer.skip_nonfinite = %d.", step, loss, norm, skipped, budget)
      return
    if self._config.log.spike and len(self._norms) >= _SPIKE_LEAST:
      usual = statistics.median(self._norms)
      if norm > self._config.log.spike * usual:
        logging.warning("step %d: the gradient norm %.4g is %.1f times the median of the %d steps before, %.4g; the loss is "
                        "%.4f.", step, norm, norm / usual, len(self._norms), usual, loss)
    self._norms.append(norm)

  def first_step_done(self, step: int) -> None:
    """Keeps the compilation out of the step times."""
    console.say(f"first step: {time.monotonic() - self._clock:.1f} s, with compilation")
    self.resume_clock(step)

  def resume_clock(self, step: int) -> None:
    """Takes the time since the last read, spent on evaluating and saving, out of the next step times."""
    self._clock, self._timed_from, self._waited = time.monotonic(), step, self._batches.seconds_waited
