"""Metrics of a run: one JSON object per line in WORKDIR/metrics.jsonl, and TensorBoard event files.

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

FILE = "metrics.jsonl"


class MetricWriter:
  """Writes on process 0, and nothing elsewhere."""

  def __init__(self, workdir: pathlib.Path, step: int, tensorboard: bool):
    """`step`: updates done at the start of this process."""
    self._file = self._board = None
    self._path = workdir / FILE
    if jax.process_index() != 0:
      return
    with self._writing():
      kept = [json.dumps(r) + "\n" for r in read(workdir) if r["step"] <= step]
      temporary = self._path.with_suffix(".tmp")
      temporary.write_text("".join(kept), encoding="utf-8")
      os.replace(temporary, self._path)
      self._file = self._path.open("a", encoding="utf-8")
    if tensorboard:
      import tensorboardX  # Here: it costs half a second, which only a run that wants it should pay.
      self._board = tensorboardX.SummaryWriter(str(workdir / "tensorboard"), purge_step=step + 1)

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
    if self._board:
      for name, value in values.items():
        if isinstance(value, (int, float)):
          self._board.add_scalar(name if "/" in name else f"train/{name}", value, step)

  def write_text(self, step: int, name: str, text: str) -> None:
    """Shows a text in TensorBoard."""
    if self._board:
      self._board.add_text(name, "    " + text.replace("\n", "\n    "), step)  # as a Markdown code block

  def close(self) -> None:
    for writer in (self._file, self._board):
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


def read(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """All records of a run; a line that is none, such as a last one that a killed process left unfinished, is passed over."""
  path = workdir / FILE
  if not path.exists():
    return []
  records = []
  lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
  for number, line in enumerate(lines, 1):
    try:
      record = json.loads(line)
    except json.JSONDecodeError:
      record = None
    if isinstance(record, dict) and isinstance(record.get("step"), int):
      records.append(record)
    elif number < len(lines):
      logging.warning("%s:%d is no record and is passed over: %.60s", path, number, line)
  return records
