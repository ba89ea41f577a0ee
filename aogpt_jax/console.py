"""What the person who watches sees: lines from process 0, progress with the time that is left, a part of the terminal redrawn.

On a terminal, progress is the last line, redrawn in place; in a file or a pipe, a line every few seconds. All of it is silent
when that is asked for; errors and warnings, which go to standard error, are not.
"""

import itertools
import logging
import os
import sys
import time

import jax
from rich import cells
from rich import console as rich_console
from rich import live
from rich import text as rich_text


_is_quiet = False


def be_quiet(quiet: bool = True) -> None:
  """From now on, nothing is printed here."""
  global _is_quiet
  _is_quiet = quiet


def is_quiet() -> bool:
  return _is_quiet


def say(line: str = "") -> None:
  """Prints a line on process 0."""
  if jax.process_index() == 0 and not _is_quiet:
    _status.clear()
    print(line, flush=True)


class _Status:
  """The last line of a terminal, in place of which the next one is written.

  The cursor stays as it is, so that a process that is killed leaves a terminal that works.
  """

  def __init__(self):
    self._is_shown = False

  @property
  def is_there(self) -> bool:
    """Whether standard output is a terminal on which a line can be redrawn, of a run of one process."""
    return not _is_quiet and sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb") and jax.process_count() == 1

  def show(self, line: str) -> None:
    columns = os.get_terminal_size(sys.stdout.fileno()).columns or 80  # some terminals do not know theirs
    if not self._is_shown:
      self._clear_before_warnings()
    # The last column is left free: some terminals go to the next line after it.
    sys.stdout.write(f"\r{cells.chop_cells(printable(line), max(columns - 1, 1))[0]}\x1b[K")
    sys.stdout.flush()
    self._is_shown = True

  def clear(self) -> None:
    if self._is_shown:
      sys.stdout.write("\r\x1b[K")
      sys.stdout.flush()
      self._is_shown = False

  def _clear_before_warnings(self) -> None:
    for handler in logging.getLogger().handlers:
      if self._on_record not in handler.filters:
        handler.addFilter(self._on_record)

  def _on_record(self, record: logging.LogRecord) -> bool:
    del record
    self.clear()
    return True


_status = _Status()


def clear() -> None:
  """Takes the line of progress off the terminal, where there is one: to be called before what is not printed here."""
  _status.clear()


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


class Pace:
  """When the next sign of progress is due: on a terminal several times a second, elsewhere every few seconds, or never."""

  # Seconds between two.
  LINES, REDRAWN = 5.0, 0.2

  def __init__(self):
    self._last = time.monotonic()

  @property
  def is_live(self) -> bool:
    """Whether progress is a line that is redrawn."""
    return _status.is_there

  def is_due(self) -> bool:
    """True where the time has come, which starts it again."""
    now = time.monotonic()
    if _is_quiet or now - self._last < (self.REDRAWN if self.is_live else self.LINES):
      return False
    self._last = now
    return True

  def show(self, line: str) -> None:
    """Redraws the last line of a terminal, or prints one."""
    if self.is_live:
      _status.show(line)
    else:
      say(line)


class Progress:
  """Says how far a long piece of work is, and nothing where it is quick.

  The time left is estimated from the first call on: until then, programs were compiled.
  """

  def __init__(self, what: str, total: int, unit: str = ""):
    self._what, self._total, self._unit = what, total, unit and f" {unit}"
    self._pace = Pace()
    self._first: tuple[float, int] | None = None

  def line(self, done: int) -> str:
    """E.g. "sampling: 128 of 1,024 tokens, 20 s left"."""
    return f"{self._what}: {done:,} of {self._total:,}{self._unit}{self._left(done)}"

  def _left(self, done: float) -> str:
    now = time.monotonic()
    if self._first is None and done:
      self._first = now, done
    start, before = self._first or (now, done)
    return f", {duration((now - start) * (self._total - done) / (done - before))} left" if done > before else ""

  def __call__(self, done: float) -> None:
    line = self.line(done)
    if done >= self._total:
      clear()
    elif self._first and (self._first[1] < done or self._pace.is_live) and self._pace.is_due():
      self._pace.show(line)


class Share(Progress):
  """The same of work whose size is known only as the share of it that is done, which is the last argument of a call."""

  def __init__(self, what: str):
    super().__init__(what, 1)

  def line(self, done: float) -> str:
    """E.g. "tokenising stdlib: 40%, 20 s left"."""
    return f"{self._what}: {100 * done:.0f}%{self._left(done)}"


class Screen:
  """The lower part of the terminal, redrawn in place; what is printed while it is not open stays above it."""

  def __init__(self):
    self._console = rich_console.Console(highlight=False, markup=False, emoji=False)
    self._live: live.Live | None = None

  @property
  def is_there(self) -> bool:
    """Whether standard output is a terminal that can be redrawn, of a run of one process."""
    return _status.is_there and not self._console.is_dumb_terminal

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
      _status.clear()
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
