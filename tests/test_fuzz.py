"""Some damage of each kind of file that we read: it is read, or refused in a line; more of it by benchmarks/fuzz.py."""

import itertools
import logging

import pytest

from benchmarks import fuzz

ATTEMPTS = 20


@pytest.fixture(scope="module")
def watch():
  return fuzz.Watch()


@pytest.mark.parametrize("name", [name for name in fuzz.KINDS if name not in fuzz.SLOW])
def test_whatever_is_damaged_is_read_or_refused_in_a_line_and_nothing_is_executed_or_written_elsewhere(name, tmp_path, watch):
  if name in ("gpt2", "export"):
    pytest.importorskip("safetensors", reason="its files are in the format of safetensors: pip install 'aogpt_jax[hf]'")
  if name == "events":
    pytest.importorskip("tensorboardX", reason="event files are written by tensorboardX")
  logging.disable(logging.WARNING)
  try:
    outcomes = [outcome for outcome, _ in itertools.islice(fuzz.attempts(name, 0, tmp_path, watch), ATTEMPTS)]
  finally:
    logging.disable(logging.NOTSET)
  assert {*outcomes} <= {"read", "refused"}, "\n".join({*outcomes} - {"read", "refused"})


def test_what_must_not_be_is_seen(tmp_path, watch):
  (tmp_path / "whole").mkdir()
  (tmp_path / "whole" / "a").write_bytes(b"a")

  def seen(read):
    kind = fuzz.Kind(lambda directory: None, read, {"a": lambda data, rng: data})
    return fuzz.attempt(kind, tmp_path / "whole", tmp_path / "inside", fuzz.random.Random(0), watch)[0]

  assert seen(lambda directory: (directory / "a").write_bytes(b"b")) == "read"
  assert "open" in seen(lambda directory: (directory / ".." / "outside").write_bytes(b"b"))
  assert "os.mkdir" in seen(lambda directory: (directory / ".." / "outside_directory").mkdir())
  assert "os.system" in seen(lambda directory: fuzz.os.system("true"))
  assert "KeyError: 'x' at" in seen(lambda directory: {}["x"]).replace('"', "")
  assert "no line" in seen(lambda directory: (_ for _ in ()).throw(ValueError("a\nb")))
