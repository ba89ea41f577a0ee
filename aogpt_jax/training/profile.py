"""A profiler's trace of some steps of training."""

import pathlib
from typing import Any

import jax

from aogpt_jax import console


class Trace:
  """Traces the steps from a to b into WORKDIR/profile, on every process its own devices.

  A run that starts after step a traces from its own first step on, and one that starts after b traces nothing.
  """

  def __init__(self, workdir: pathlib.Path, steps: tuple[int, ...]):
    self._directory, self._steps = workdir / "profile", steps
    self._running = False

  def before(self, step: int) -> None:
    """To be called before a step is started."""
    if self._steps and not self._running and self._steps[0] <= step <= self._steps[1]:
      jax.profiler.start_trace(self._directory)
      self._running = True

  def after(self, step: int, outputs: Any) -> None:
    """To be called with what the step returns; waits for it where it is the last of the trace."""
    if self._running and step == self._steps[1]:
      jax.block_until_ready(outputs)
      self.close()
      console.say(f"steps up to {step:,} are traced in {self._directory}")

  def close(self) -> None:
    """Ends a trace that is running."""
    if self._running:
      jax.profiler.stop_trace()
      self._running = False
