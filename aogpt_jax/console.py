"""Lines for the person who watches: from process 0, and progress with the time that is left."""

import time

import jax


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


class Progress:
  """Says how far a long piece of work is, at most once every few seconds, and nothing where it is quick."""

  def __init__(self, what: str, total: int, every: float = 5.0):
    self._what, self._total, self._every = what, total, every
    self._start = self._last = time.monotonic()

  def __call__(self, done: int) -> None:
    now = time.monotonic()
    if now - self._last >= self._every and 0 < done < self._total:
      self._last = now
      left = (now - self._start) * (self._total - done) / done
      say(f"{self._what}: {done:,} of {self._total:,}, {duration(left)} left")
