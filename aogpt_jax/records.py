"""JSON that another process, version or person has written: a value, or the objects of a file of lines.

Whatever it holds, what is wrong with it is a ValueError of one line.
"""

import json
import pathlib
from typing import Any


def value(text: str | bytes) -> Any:
  """What a JSON text stands for.

  Raises:
    ValueError: it is no JSON; the message says why and where, e.g. "Expecting value at column 7".
  """
  try:
    return json.loads(text)
  except json.JSONDecodeError as e:
    line = f"line {e.lineno}, " if e.lineno > 1 else ""
    raise ValueError(f"{e.msg} at {line}column {e.colno}") from None
  except UnicodeDecodeError as e:
    raise ValueError(f"invalid UTF-8 at byte {e.start}") from None
  except RecursionError:
    raise ValueError("is nested too deeply") from None


def read(path: pathlib.Path) -> Any:
  """What a JSON file holds.

  Raises:
    OSError: it can't be read.
    ValueError: it is no JSON; the message names it.
  """
  try:
    return value(path.read_bytes())
  except ValueError as e:
    raise ValueError(f"{path}: is not JSON ({e})") from None


def shown(text: str) -> str:
  """A name out of a file as a message may have it: of one line, no longer than that, and without control characters."""
  return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:200]) + "..." * (len(text) > 200)


def of_steps(path: pathlib.Path) -> tuple[list[dict[str, Any]], list[int], int]:
  """The objects with a "step" in a file of one a line, the numbers of the lines that are none, and how many lines there are."""
  if not path.exists():
    return [], [], 0
  found, damaged = [], []
  lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
  for number, line in enumerate(lines, 1):
    try:
      record = value(line)
    except ValueError:
      record = None
    if isinstance(record, dict) and type(record.get("step")) is int:
      found.append(record)
    else:
      damaged.append(number)
  return found, damaged, len(lines)
