"""What the benchmarks share: contestants in processes of their own that run in turn, medians of pairs, facts about the machine.

A contestant runs in a process of its own, so that its threads and its peak memory are its own, and waits while another one runs.
"""

from collections.abc import Callable
import contextlib
import importlib.metadata
import json
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
from typing import Any

THREADS = len(os.sched_getaffinity(0))


class Contestant:
  """A process of the same script, started with --serve=NAME: answers each request with one JSON object."""

  def __init__(self, name: str, environment: dict[str, str] | None = None):
    self.name = name
    self._process = subprocess.Popen([sys.executable, sys.argv[0], *sys.argv[1:], f"--serve={name}"], text=True,
                                     env=os.environ | (environment or {}), stdin=subprocess.PIPE, stdout=subprocess.PIPE)

  def __call__(self, **request: Any) -> dict[str, Any]:
    """What `serve` answered, and "peak_mib", the largest resident memory of the process so far."""
    try:
      print(json.dumps(request), file=self._process.stdin, flush=True)
    except BrokenPipeError:
      pass  # what it printed says why
    line = self._process.stdout.readline()
    if not line:
      sys.exit(f"error: {self.name} stopped; what it printed is above.")
    return json.loads(line)

  def close(self) -> None:
    self._process.communicate()


def serve(answer: Callable[..., dict[str, Any]]) -> None:
  """The other end of a Contestant; what `answer` prints goes to standard error."""
  for line in sys.stdin:
    with contextlib.redirect_stdout(sys.stderr):
      answered = answer(**json.loads(line))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(answered | {"peak_mib": peak}), flush=True)


def in_turn(contestants: list[Contestant], repeats: int, **request: Any) -> dict[str, list[dict[str, Any]]]:
  """Answers of each by its name; each has one run before, which does not count."""
  for contestant in contestants:
    contestant(**request)
  answers = {c.name: [] for c in contestants}
  for _ in range(repeats):
    for contestant in contestants:
      answers[contestant.name].append(contestant(**request))
  return answers


def median(answers: list[dict[str, Any]], field: str) -> float:
  return statistics.median(a[field] for a in answers)


def ratio(above: list[dict[str, Any]], below: list[dict[str, Any]], field: str) -> float:
  """Median of the ratios of the pairs that ran beside each other."""
  return statistics.median(a[field] / b[field] for a, b in zip(above, below, strict=True))


def facts() -> dict[str, Any]:
  """The machine and the versions that a figure belongs to."""
  model = [line.split(":", 1)[1].strip() for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
           if line.startswith("model name")]
  versions = {}
  for name in ("jax", "jaxlib", "torch"):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[name] = importlib.metadata.version(name)
  return {"processor": model[0] if model else platform.machine(), "threads": THREADS, "python": platform.python_version(),
          "load_before": round(os.getloadavg()[0], 2), **versions}


def print_facts() -> None:
  print(", ".join(f"{name} {value}" for name, value in facts().items()))
