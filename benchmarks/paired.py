"""What the benchmarks share: their flags, contestants that run in turn, medians of pairs, and the report as a table and as JSON.

A contestant runs in a process of its own, so that its threads and its peak memory are its own, and waits while another one runs.
The JSON has, for each contestant, the median and all single figures, and apart from them those of the first run, which compiles.
docs/performance.py makes a page of such files.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from typing import Any

THREADS = len(os.sched_getaffinity(0))
_LOAD_BEFORE = os.getloadavg()[0]


def parser(description: str, repeats: int) -> argparse.ArgumentParser:
  """With the flags that all benchmarks have; `repeats` is the default of their number of counted runs."""
  made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
  made.add_argument("--repeats", type=int, default=repeats, help="runs of each that count")
  made.add_argument("--quick", action="store_true", help="the smallest sizes, once: that all of it works")
  made.add_argument("--json", type=_file, default="", metavar="FILE", help="for machine, command, medians and all single figures")
  made.add_argument("--serve", default="", help=argparse.SUPPRESS)
  return made


def _file(path: str) -> str:
  try:
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  except OSError as e:
    raise argparse.ArgumentTypeError(f"{path}: {e.strerror}; give a file whose directory can be made.") from None
  return path


def check_peer(directory: str, file: str) -> None:
  """Exits where --pytorch, if it is given, has not what it should."""
  if directory and not (pathlib.Path(directory) / file).is_file():
    sys.exit(f"error: --pytorch={directory}: has no {file}; give a checkout of scxue/AO-GPT-MDM.")
  if directory and importlib.util.find_spec("torch") is None:
    sys.exit("error: --pytorch: PyTorch is not installed: pip install 'aogpt_jax[torch]'")


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


@contextlib.contextmanager
def contestants(names: Iterable[str], environment: dict[str, str] | None = None) -> Iterator[list[Contestant]]:
  """One of each name, which end with the block."""
  made = [Contestant(name, environment) for name in names]
  try:
    yield made
  finally:
    for contestant in made:
      contestant.close()


def serve(answer: Callable[..., dict[str, Any]]) -> None:
  """The other end of a Contestant; what `answer` prints goes to standard error."""
  for line in sys.stdin:
    with contextlib.redirect_stdout(sys.stderr):
      answered = answer(**json.loads(line))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(answered | {"peak_mib": peak}), flush=True)


@dataclasses.dataclass(frozen=True)
class Runs:
  """What a contestant answered: first, with compilation, and then each time that counts."""

  first: dict[str, Any]
  counted: list[dict[str, Any]]

  def all(self, field: str) -> list[float]:
    return [answer[field] for answer in self.counted]

  def median(self, field: str) -> float:
    return statistics.median(self.all(field))

  def figures(self, field: str = "seconds") -> dict[str, Any]:
    """For JSON."""
    return {field: figures(self.all(field)), f"first_{field}": self.first[field], "peak_mib": self.counted[-1]["peak_mib"]}


def in_turn(contestants: Sequence[Contestant], repeats: int, **request: Any) -> dict[str, Runs]:
  """What each answered, by its name."""
  runs = {c.name: Runs(c(**request), []) for c in contestants}
  for _ in range(repeats):
    for contestant in contestants:
      runs[contestant.name].counted.append(contestant(**request))
  return runs


def figures(values: Iterable[float]) -> dict[str, Any]:
  """The median and all of them, for JSON."""
  values = list(values)
  return {"median": statistics.median(values), "all": values}


def ratio(above: Runs, below: Runs, field: str = "seconds") -> dict[str, Any]:
  """Median, and all, of the ratios of the pairs that ran beside each other."""
  return figures(a / b for a, b in zip(above.all(field), below.all(field), strict=True))


def matmul_rate(rows: int, inner: int, columns: int, runs: int = 20) -> Callable[[], float]:
  """A function that measures this machine's roof: FLOP/s of XLA's float32 product of [rows, inner] and [inner, columns]."""
  import jax  # pylint: disable=import-outside-toplevel  # not in the process that starts the others
  import jax.numpy as jnp  # pylint: disable=import-outside-toplevel
  a, b = jnp.ones((rows, inner), jnp.float32), jnp.ones((inner, columns), jnp.float32)
  product = jax.jit(jnp.matmul)
  product(a, b).block_until_ready()

  def measure() -> float:
    start = time.perf_counter()
    for _ in range(runs):
      product(a, b).block_until_ready()
    return runs * 2.0 * rows * inner * columns / (time.perf_counter() - start)

  return measure


def facts() -> dict[str, Any]:
  """The machine and the versions that a figure belongs to."""
  model = [line.split(":", 1)[1].strip() for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
           if line.startswith("model name")]
  versions = {}
  for name in ("jax", "jaxlib", "torch"):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[name] = importlib.metadata.version(name)
  return {"processor": model[0] if model else platform.machine(), "threads": THREADS, "python": platform.python_version(),
          "load_before": round(_LOAD_BEFORE, 2), **versions}


def command() -> str:
  """How this script was started; for others to type, where DIR is where they have the PyTorch code."""
  given, words = iter(sys.argv[1:]), []
  for word in given:
    if word == "--json":
      next(given)
    elif not word.startswith("--json="):
      words.append(word)
  return shlex.join(["python", f"benchmarks/{pathlib.Path(sys.argv[0]).name}",
                     *("--pytorch=DIR" if word.startswith("--pytorch=") else word for word in words)])


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
  """Aligned columns; all but the first to the right."""
  lines = [[str(cell) for cell in row] for row in (head, *rows)]
  widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
  return "\n".join("  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:]))]).rstrip()
                   for line in lines)


def _rounded(values: Any) -> Any:
  """The same with six digits of each float, so that files can be read."""
  if isinstance(values, dict):
    return {name: _rounded(value) for name, value in values.items()}
  if isinstance(values, (list, tuple)):
    return [_rounded(value) for value in values]
  return float(f"{values:.6g}") if isinstance(values, float) else values


def report(args: argparse.Namespace, results: Any, text: str) -> None:
  """Prints the machine and `text`, which is a table of the results, and writes them to --json where that is given."""
  found = facts()
  print(", ".join(f"{name} {value}" for name, value in found.items()))
  print(text)
  if args.json:
    record = {"command": command(), "date": datetime.date.today().isoformat(), "facts": found, "results": results}
    pathlib.Path(args.json).write_text(json.dumps(_rounded(record), indent=1) + "\n", encoding="utf-8")
