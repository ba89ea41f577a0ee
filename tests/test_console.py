"""What the person who watches sees: one line that is redrawn on a terminal, lines elsewhere, nothing where that is asked for."""

import contextlib
import fcntl
import io
import logging
import os
import struct
import sys
import termios

from aogpt_jax import console


@contextlib.contextmanager
def terminal(monkeypatch):
  """Standard output on a pseudo-terminal of 30 columns, and the clock; reads what was written."""
  ours, theirs = os.openpty()
  fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 30, 0, 0))
  now = [0.0]
  with os.fdopen(theirs, "w") as out:
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])

    def read():
      print("END", end="", file=out, flush=True)  # what is written arrives a little later
      seen = ""
      while not seen.endswith("END"):
        seen += os.read(ours, 65536).decode()
      return seen.removesuffix("END").replace("\r\n", "\n")

    yield now, read
  os.close(ours)


def test_on_a_terminal_progress_is_a_line_that_is_redrawn_and_gives_way(monkeypatch):
  with terminal(monkeypatch) as (now, read):
    progress = console.Progress("evaluating", 1000, "sequences")
    for now[0], done in ((1.0, 0), (1.0, 100), (1.1, 150), (2.0, 200), (3.0, 1000)):  # at 1.1 it is too soon
      progress(done)
    assert read() == (
        "\revaluating: 100 of 1,000 sequ\x1b[K"  # cut to what has room
        "\revaluating: 200 of 1,000 sequ\x1b[K"
        "\r\x1b[K")
    progress = console.Share("packing")
    for now[0], done in ((4.0, 0.1), (5.0, 0.5)):
      progress(done)
    console.say("a line that stays")
    assert read() == "\rpacking: 10%\x1b[K\rpacking: 50%, 1 s left\x1b[K\r\x1b[Ka line that stays\n"
    console.clear()  # nothing is there any more
    handler = logging.StreamHandler(io.StringIO())
    logging.getLogger().addHandler(handler)
    try:
      for now[0], done in ((6.0, 0.6), (7.0, 0.7)):
        progress(done)
      read()
      logging.getLogger().warning("a warning")
      assert read() == "\r\x1b[K"
    finally:
      logging.getLogger().removeHandler(handler)


def test_nothing_is_said_where_that_is_asked_for(monkeypatch):
  with terminal(monkeypatch) as (now, read):
    console.be_quiet()
    try:
      console.say("a line")
      progress = console.Progress("evaluating", 10)
      for now[0], done in ((10.0, 1), (20.0, 2), (30.0, 10)):
        progress(done)
      assert not console.Screen().is_there
    finally:
      console.be_quiet(False)
    console.say("end")
    assert read() == "end\n"
    monkeypatch.setenv("TERM", "dumb")
    progress = console.Progress("evaluating", 10)
    for now[0], done in ((40.0, 1), (50.0, 2)):
      progress(done)
    assert read() == "evaluating: 2 of 10, 1 min 20 s left\n"
