"""Passes and seconds of speculative decoding against one token a step, at the same distribution of texts.

Everything that is compared runs in turn, again and again, so that whatever else the machine does meets all of it.
"""

from collections.abc import Sequence
import functools
import time
from typing import Any

import numpy as np

from aogpt_jax import console
from aogpt_jax.decoding import quality
from aogpt_jax.run import Run
from aogpt_jax.sampling import texts as texts_lib

ORDERS = ("uniform", "left_to_right")
BATCHES = (1, 32)  # texts that are drawn at once
_ALONE = 4  # texts for a measurement where each is drawn alone


def measure(run: Run, params: Any, *, order: str, batch: int, repeats: int) -> list[dict[str, Any]]:
  """Draws texts one token a step and with every window, `repeats` times in turn, after once for the compilation.

  Args:
    run: whose model draws.
    params: its parameters.
    order: of generation.
    batch: texts drawn at once.
    repeats: measurements, each of other texts.

  Returns:
    For one token a step (window 0) and each window: evaluations of each text, and seconds and core seconds for a text of each
    measurement.
  """
  count = max(batch, _ALONE)
  draw = functools.partial(texts_lib.generate, run.model, params, run.tokenizer, num_samples=count, batch_size=batch, order=order,
                           mesh=run.mesh)
  cells = {0: draw} | {w: functools.partial(draw, sampler="speculative", window=w) for w in quality.WINDOWS}
  found = {w: {"order": order, "batch": batch, "window": w, "evaluations": [], "seconds": [], "core_seconds": []} for w in cells}
  progress = console.Progress(f"timing {order}, {batch} at once", (repeats + 1) * len(cells), "draws")
  for repeat in range(repeats + 1):
    for i, (window, generate) in enumerate(cells.items()):
      start, core_start = time.perf_counter(), time.process_time()
      texts = generate(seed=repeat)
      core_seconds, seconds = time.process_time() - core_start, time.perf_counter() - start
      progress(repeat * len(cells) + i + 1)
      if repeat:
        found[window]["evaluations"] += [text.evaluations for text in texts]
        found[window]["seconds"].append(round(seconds / count, 6))
        found[window]["core_seconds"].append(round(core_seconds / count, 6))
  return list(found.values())


def ratios(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
  """How many times as long one took, of measurements in turn: geometric mean, and its standard error; nan for a single one."""
  logs = np.log(np.asarray(one) / np.asarray(other))
  mean = float(np.exp(logs.mean()))
  return mean, mean * float(logs.std(ddof=1) / np.sqrt(len(logs))) if len(logs) > 1 else float("nan")
