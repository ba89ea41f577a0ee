"""Runs a sweep on this machine, its units one after another, or prints the command of each:

    python -m aogpt_jax.sweep --config=configs/small_targets.py [--workdir=DIR] [--print] [--config.KEY=VALUE ...]

A sweep is a function `sweep()` beside `get_config()` in a config file, which yields a name and {field: value} for each unit. A
unit is a process of aogpt_jax.main that trains, evaluates and samples in DIR/NAME; fields on the command line are set in all of
them. Started again, units that have been evaluated at their last step are passed over, and others go on from their newest
checkpoint.
"""

import collections
from collections.abc import Sequence
import dataclasses
import json
import logging
import math
import os
import pathlib
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from typing import Any

from absl import app
from absl import flags
import jax
from ml_collections import config_flags
import ml_collections

from aogpt_jax import config as config_lib
from aogpt_jax import console
from aogpt_jax import main as main_lib
from aogpt_jax import records
from aogpt_jax.evaluation import held_out

JOBS = flags.DEFINE_integer("jobs", 1, "Units that run at the same time, each on its share of the cores.", lower_bound=1)
_PRINT = flags.DEFINE_bool("print", False, "Print a launch command for each unit that is left, and run none.")

_CORE_SECONDS = "core_seconds.json"


@dataclasses.dataclass(frozen=True)
class Unit:
  """One run of a sweep."""

  name: str
  config: ml_collections.ConfigDict
  workdir: pathlib.Path
  arguments: tuple[str, ...]  # of `python -m aogpt_jax.main`


def units(config_flag: str, config: ml_collections.ConfigDict, workdir: str) -> list[Unit]:
  """The units of a sweep, all of whose configs are right.

  Args:
    config_flag: path of a config file with a function `sweep()`; after a colon, the argument of `get_config()`.
    config: its config with what the command line changes.
    workdir: directory of the sweep.

  Raises:
    ConfigError: there is no sweep, or a unit whose name or fields can't be used.
  """
  path, _, argument = config_flag.partition(":")
  file = runpy.run_path(path)
  if "sweep" not in file:
    raise config_lib.ConfigError(f"--config={config_flag}: has no function sweep(); see configs/small_targets.py")
  before, now = config_lib.flat(file["get_config"](*([argument] if argument else []))), config_lib.flat(config)
  given = {field: value for field, value in now.items() if value != before.get(field)}
  found = []
  for name, fields in file["sweep"]():
    if not re.fullmatch(r"[\w.+-]*\w[\w.+-]*", name) or name in [unit.name for unit in found]:
      raise config_lib.ConfigError(
          f"unit {name!r}: is no new name of a directory; give each unit one of letters, digits and . _ + -")
    twice = sorted(given.keys() & fields.keys())
    if twice:
      raise config_lib.ConfigError(f"unit {name}: the sweep sets config.{twice[0]} itself; leave it out of the command line.")
    try:
      own = _changed(config, fields)
      config_lib.check(own)
    except config_lib.ConfigError as e:
      raise config_lib.ConfigError(f"unit {name}: {e}") from None
    directory = pathlib.Path(workdir) / name
    values = {field: value if isinstance(value, str) else repr(value) for field, value in (given | fields).items()}
    found.append(Unit(name, own, directory, (
        f"--config={config_flag}", f"--workdir={directory}", *(f"--config.{field}={value}" for field, value in values.items()))))
  return found


def _changed(config: ml_collections.ConfigDict, fields: dict[str, Any]) -> ml_collections.ConfigDict:
  config = config.copy_and_resolve_references()
  for field in fields:
    config_lib.check_field(field)
  with config.ignore_type():  # the checks of a config say it better
    config.update_from_flattened_dict(fields)
  return config


def run(waiting: Sequence[Unit], jobs: int = 1) -> dict[str, int]:
  """Runs units one after another, or so many at the same time; returns the exit status of those that failed by their names.

  At the same time, each has its share of the cores, and says what it says into log.txt of its workdir.
  """
  failed, stopped, running, left, begin = {}, [], {}, collections.deque(waiting), time.monotonic()
  cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

  def stop(*_):  # raises nothing: a process could be there already and not yet be known
    stopped.append(True)
    for _, process in running.values():
      process.terminate()

  signal.signal(signal.SIGTERM, stop)
  try:
    while (left and not stopped) or running:
      while left and len(running) < jobs and not stopped:
        slot, unit = min(set(range(jobs)).difference(running)), left.popleft()
        finished = len(waiting) - len(left) - len(running) - 1
        per_unit = (time.monotonic() - begin) / max(finished, 1)
        eta = f", {console.duration(per_unit * (len(left) + len(running) + 1))} left" if finished else ""
        console.say(f"\nsweep: {unit.name}, {len(waiting) - len(left)} of {len(waiting)}{eta}")
        share = cores[slot::jobs] if jobs > 1 else cores
        running[slot] = unit, _start(unit, share or cores, to_log=jobs > 1)
        if stopped:
          stop()
      for slot, (unit, process) in list(running.items()):
        if process.poll() is None:
          continue
        del running[slot]
        if process.returncode and not stopped:
          failed[unit.name] = process.returncode
          where = f"{unit.workdir}/log.txt" if jobs > 1 else "above"
          console.say(f"sweep: {unit.name} failed with status {process.returncode}; why is {'in ' * (jobs > 1)}{where}, and "
                      f"{unit.workdir} keeps what it has done")
      time.sleep(0.1)
  except KeyboardInterrupt:  # of the terminal, which has told the processes too
    for _, process in running.values():
      process.wait()
    raise
  if stopped:
    sys.exit("terminated; the same command goes on")
  return failed


def timed(waiting: Sequence[Unit], workdir: pathlib.Path, before: float, jobs: int = 1) -> tuple[dict[str, int], float]:
  """Like `run`; returns too the CPU seconds that all starts in this workdir together took, with those of `before` it was there."""
  workdir.mkdir(parents=True, exist_ok=True)
  before = core_seconds(workdir, before)
  used = lambda: sum(os.times()[2:4])  # by the units' processes, which is the same beside other work
  begin = used()
  try:
    failed = run(waiting, jobs)
  finally:
    seconds = before + used() - begin
    (workdir / _CORE_SECONDS).write_text(json.dumps(seconds), encoding="utf-8")
  return failed, seconds


def core_seconds(workdir: pathlib.Path, before: float) -> float:
  """What `timed` has kept in a workdir; `before` where that is nothing, or nothing that can be read."""
  try:
    seconds = records.read(workdir / _CORE_SECONDS)
  except FileNotFoundError:
    return before
  except ValueError as e:
    logging.warning("%s; it is passed over", e)
    return before
  if type(seconds) not in (int, float) or not 0 <= seconds < math.inf:
    logging.warning("%s: is no number of seconds; it is passed over", workdir / _CORE_SECONDS)
    return before
  return seconds


def _start(unit: Unit, cores: Sequence[int], to_log: bool) -> subprocess.Popen:
  """The process of a unit, on these cores."""
  command = [sys.executable, "-m", "aogpt_jax.main", *unit.arguments, *["--quiet"] * (console.is_quiet() and not to_log)]
  if not to_log:
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)
  unit.workdir.mkdir(parents=True, exist_ok=True)
  before = os.sched_getaffinity(0) if cores else ()
  with open(unit.workdir / "log.txt", "a", encoding="utf-8") as log:
    if cores:
      os.sched_setaffinity(0, cores)  # what the process inherits
    try:
      return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    finally:
      if cores:
        os.sched_setaffinity(0, before)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    sys.exit(f"error: unknown arguments: {' '.join(argv[1:])}")
  if flags.FLAGS["mode"].present:
    sys.exit("error: --mode: the units of a sweep train, evaluate and sample; leave it out.")
  for flag in main_lib.CLUSTER_FLAGS:
    if flags.FLAGS[flag].present:
      sys.exit(f"error: --{flag}: a sweep runs on one machine, each unit in a process of its own; leave it out.")
  if flags.FLAGS["html"].present:
    sys.exit("error: --html: is a page of one run; draw it from a unit that is finished, by aogpt_jax.main and --mode=sample.")
  jax.config.update("jax_platforms", "cpu")  # accelerators are left to the units
  config_flag = config_flags.get_config_filename(flags.FLAGS["config"])
  workdir = flags.FLAGS.workdir or f"runs/{pathlib.Path(config_flag.partition(':')[0]).stem}"
  try:
    everything = units(config_flag, flags.FLAGS.config, workdir)
  except (ValueError, TypeError) as e:
    sys.exit(f"error: {e}")
  waiting = [unit for unit in everything if not held_out.is_done(unit.workdir, unit.config)]
  done = f"{len(everything) - len(waiting)} of {len(everything)} units are finished"
  if _PRINT.value:
    print(f"# {done}", file=sys.stderr)
    for unit in waiting:
      print(shlex.join(["python", "-m", "aogpt_jax.main", *unit.arguments]))
    return
  console.say(f"sweep: {done} in {workdir}")
  try:
    failed = run(waiting, JOBS.value)
  except KeyboardInterrupt:
    sys.exit("interrupted; the same command goes on")
  if failed:
    sys.exit(f"error: {len(failed)} of {len(everything)} units failed: {', '.join(failed)}; the same command tries them again")
  console.say(f"sweep: all {len(everything)} units are finished in {workdir}")


if __name__ == "__main__":
  app.run(main, flags_parser=main_lib.parse_flags)
