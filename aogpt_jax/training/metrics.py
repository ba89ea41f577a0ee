"""Metrics of a run: one JSON object per line in WORKDIR/metrics.jsonl, and what the trackers of config.log show of them.

Every record has a "step", the updates done; "eval/..." fields are written at evaluations. After a restart from step N,
what was recorded beyond N is dropped, so that there is one record per step.
"""

from collections.abc import Iterator
import contextlib
import json
import logging
import os
import pathlib
from typing import Any

import jax
import ml_collections

from aogpt_jax import cluster
from aogpt_jax import records
from aogpt_jax.training import trackers

FILE = "metrics.jsonl"


class MetricWriter:
  """Writes on process 0, and nothing elsewhere."""

  def __init__(self, workdir: pathlib.Path, step: int, config: ml_collections.ConfigDict):
    """`step`: updates done at the start of this process; -1 where it starts anew, and not even an evaluation at step 0 is left."""
    self._file, self._trackers = None, []
    self._path = workdir / FILE
    if jax.process_index() != 0:
      return
    with self._writing():
      kept = [json.dumps(r) + "\n" for r in read(workdir) if r["step"] <= step]
      temporary = self._path.with_suffix(".tmp")
      temporary.write_text("".join(kept), encoding="utf-8")
      os.replace(temporary, self._path)
      self._file = self._path.open("a", encoding="utf-8")
    self._trackers = trackers.trackers(workdir, step, config)

  def write(self, step: int, values: dict[str, Any]) -> None:
    """Records scalars (and strings, JSON only) of a step; complete on disk when it returns.

    Raises:
      OSError: it can't be written.
    """
    if self._file is None:
      return
    with self._writing():
      self._file.write(json.dumps({"step": step, **values}) + "\n")
      self._file.flush()
    scalars = {name if "/" in name else f"train/{name}": x for name, x in values.items() if isinstance(x, (int, float))}
    for tracker in self._trackers:
      tracker.scalars(step, scalars)

  def write_text(self, step: int, name: str, text: str) -> None:
    """Shows a text in the trackers."""
    for tracker in self._trackers:
      tracker.text(step, name, text)

  def close(self) -> None:
    for writer in (self._file, *self._trackers):
      if writer:
        with contextlib.suppress(OSError):  # again: what could not be written has been said
          writer.close()

  @contextlib.contextmanager
  def _writing(self) -> Iterator[None]:
    try:
      yield
    except OSError as e:
      raise OSError(f"{self._path}: can't be written to ({e.strerror}); see that the disk has room and can be written to. The same "
                    "command goes on from the newest checkpoint.") from e


def is_evaluated(workdir: pathlib.Path, step: int) -> bool:
  """Whether an evaluation of the state after this step is recorded; all processes of a run ask, and get the same answer."""
  here = jax.process_index() == 0 and any(r["step"] == step and any(name.startswith("eval/") for name in r) for r in read(workdir))
  return cluster.gather(here)[0]


def read(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """All records of a run; a line that is none, such as a last one that a killed process left unfinished, is passed over."""
  found, damaged, lines = records.of_steps(workdir / FILE)
  for number in damaged:
    if number < lines:
      logging.warning("%s:%d is no record and is passed over", workdir / FILE, number)
  return found
