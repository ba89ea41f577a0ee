"""What the person who watches sees: lines from process 0, progress with the time that is left, a part of the terminal redrawn."""

import itertools
import sys
import time

import jax
from rich import cells
from rich import console as rich_console
from rich import live
from rich import text as rich_text


def say(line: str = "") -> None:
  """Prints a line on process 0."""
  if jax.process_index() == 0:
    print(line, flush=True)


def duration(seconds: float) -> str:
  """12 s, 3 min 20 s, 5 h 12 min or 9 d 4 h."""
  seconds = round(seconds)
  for large, small, name, rest in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
    if seconds >= large:
      return f"{seconds // large} {name} {seconds % large // small} {rest}"
  return f"{seconds} s"


# Control characters but line feed and tab, which could clear the screen or hide text, and the pictures that Unicode has of them.
_PICTURES = {c: chr(0x2400 + c) for c in range(32) if chr(c) not in "\n\t"} | {0x7F: "\u2421"} | dict.fromkeys(
    range(0x80, 0xA0), "\ufffd")


def printable(text: str) -> str:
  """A text that does nothing to a terminal: control characters but line feed and tab are pictures, e.g. U+241B for escape."""
  return text.translate(_PICTURES)


class Progress:
  """Says how far a long piece of work is, at most once every few seconds, and nothing where it is quick.

  The time left is estimated from the first call on: until then, programs were compiled.
  """

  def __init__(self, what: str, total: int, unit: str = "", every: float = 5.0):
    self._what, self._total, self._unit, self._every = what, total, unit and f" {unit}", every
    self._last = time.monotonic()
    self._first: tuple[float, int] | None = None

  def line(self, done: int) -> str:
    """E.g. "sampling: 128 of 1,024 tokens, 20 s left"."""
    now = time.monotonic()
    if self._first is None and done:
      self._first = now, done
    start, before = self._first or (now, done)
    left = f", {duration((now - start) * (self._total - done) / (done - before))} left" if done > before else ""
    return f"{self._what}: {done:,} of {self._total:,}{self._unit}{left}"

  def __call__(self, done: int) -> None:
    line, now = self.line(done), time.monotonic()
    if now - self._last >= self._every and self._first and self._first[1] < done < self._total:
      self._last = now
      say(line)


class Screen:
  """The lower part of the terminal, redrawn in place; what is printed while it is not open stays above it."""

  def __init__(self):
    self._console = rich_console.Console(highlight=False, markup=False, emoji=False)
    self._live: live.Live | None = None

  @property
  def is_there(self) -> bool:
    """Whether standard output is a terminal that can be redrawn, of a run of one process."""
    return sys.stdout.isatty() and not self._console.is_dumb_terminal and jax.process_count() == 1

  @property
  def size(self) -> tuple[int, int]:
    """Columns and rows that can be drawn on."""
    width, height = self._console.size
    return width, max(height - 1, 1)  # the cursor waits on a line of its own

  def wrapped(self, pieces: list[tuple[str, str]]) -> list[rich_text.Text]:
    """Lines as wide as the terminal at most, of (text, style) pieces; broken as a terminal would, not between words."""
    text = rich_text.Text.assemble(*((printable(piece), style) for piece, style in pieces), tab_size=8)
    lines = []
    for line in text.split("\n", allow_blank=True):
      line.expand_tabs()
      ends = itertools.accumulate(map(len, cells.chop_cells(line.plain, self.size[0])))
      lines += line.divide(list(ends)[:-1])
    return lines

  def show(self, lines: list[rich_text.Text]) -> None:
    """Draws these lines in place of the last ones."""
    if self._live is None:
      self._live = live.Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop")
      self._live.start()
    self._live.update(rich_text.Text("\n").join(lines), refresh=True)

  def clear(self) -> None:
    """Removes the lines, and gives the cursor back."""
    if self._live is not None:
      self._live.stop()
      self._live = None

  def __enter__(self) -> "Screen":
    return self

  def __exit__(self, *_) -> None:
    self.clear()
