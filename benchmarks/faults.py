"""What can happen to a run, done to real processes again and again; each time it must go on as if nothing had happened.

  python benchmarks/faults.py [--kills=100] [--signals=20] [--disk_full=6] [--read_only=4] [--clocks=6] [--flips=300] [--seed=0]

A tiny run, which saves every 10 steps and evaluates and samples every 20, is first trained undisturbed. Then, each so many times:

  kills      kill -9 at a random moment: a third anywhere from the start of the process on, a third while a checkpoint is being
             written, a third while it evaluates or samples
  signals    SIGTERM or SIGINT at a random moment
  disk_full  the workdir is a small tmpfs, of a random size, which becomes larger when the run has ended; needs the right to mount
  read_only  that file system becomes read-only, at a random moment or before the start, and writable again afterwards
  clocks     the clock is years off, in either direction, or jumps while the run goes on, or all files are from another time.
             Needs libfaketime (apt-get install faketime) but for the files.
  flips      a bit of a random file of the newest checkpoint is flipped; no process is started

After each, all checkpoints that are complete must be there and have their checksums, and the next process must go on from the
newest. A run that has come to its end must have, bit for bit, the parameters, averages, moments and records of the undisturbed one;
then the next begins. Prints a table, or the first thing that is not so, and then its status is 1. Moments depend on the seed, and
on how fast the machine is.
"""

import argparse
import collections
import contextlib
import json
import logging
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import jax
import numpy as np

from aogpt_jax import console
from aogpt_jax.training import checkpoints

ROOT = pathlib.Path(__file__).resolve().parents[1]
FAKETIME = next(pathlib.Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
STEPS, SAVE_EVERY, EVALUATE_EVERY, KEEP = 400, 10, 20, 2
SETTINGS = dict(
    steps=STEPS, batch_size=8, micro_batches=1, orders="mix(0.5)",
    **{f"model.{k}": v for k, v in dict(
        layers=1, width=32, heads=2, block_size=16, vocab_size=320, cond_width=16, dtype="float32").items()},
    **{"optimizer.warmup_steps": 5, "optimizer.decay_steps": STEPS, "optimizer.learning_rate": 1e-2,
       "eval.every_steps": EVALUATE_EVERY, "eval.sequences": 16, "eval.batch_size": 8, "eval.orders": 2, "sample.num_samples": 1,
       "checkpoint.every_steps": SAVE_EVERY, "checkpoint.keep": KEEP, "log.every_steps": 1, "log.tensorboard": False,
       "data.tokenizer": "bytes", "data.validation_fraction": 0.2, "data.test_fraction": 0.2})


class Lost(Exception):
  """Something was lost, or is not as it was."""


def check(is_so: bool, what: str) -> None:
  if not is_so:
    raise Lost(what)


class Life:
  """A process of the run: what it has said so far, and where it is."""

  def __init__(self, directory: pathlib.Path, workdir: pathlib.Path, environment: dict[str, str] | None = None):
    settings = SETTINGS | {"data.source": f"files:{directory}/texts/*.txt", "data.cache_dir": f"{directory}/cache",
                           "compilation_cache": f"{directory}/xla"}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what is started in the background ignores it
    self.workdir, self.begin, self.lines, self.errors = workdir, time.monotonic(), [], []
    self.process = subprocess.Popen(
        [sys.executable, "-m", "aogpt_jax.main", f"--config={ROOT}/configs/tiny.py", "--mode=train", f"--workdir={workdir}",
         *(f"--config.{name}={value}" for name, value in settings.items())],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
             **(environment or {})})
    signal.signal(signal.SIGINT, before)
    self._readers = [threading.Thread(target=lambda f=f, to=to: to.extend(iter(f.readline, "")), daemon=True)
                     for f, to in ((self.process.stdout, self.lines), (self.process.stderr, self.errors))]
    for reader in self._readers:
      reader.start()

  @property
  def has_ended(self) -> bool:
    return self.process.poll() is not None

  def wait(self, until=lambda: False, seconds: float = 3600.0) -> None:
    """Returns when the process has ended, when `until` is so, or after these seconds."""
    deadline = time.monotonic() + seconds
    while not self.has_ended and not until() and time.monotonic() < deadline:
      time.sleep(0.002)

  def end(self, number: int = 0) -> int:
    """Sends a signal, or none, waits for the end, and returns the status."""
    if number:
      self.process.send_signal(number)
    try:
      self.process.wait(timeout=3600)
    except subprocess.TimeoutExpired:
      self.process.kill()
      raise Lost(f"the process does not end: {self.lines[-3:]}, {self.errors[-3:]}") from None
    for reader in self._readers:
      reader.join()
    self.process.stdout.close()
    self.process.stderr.close()
    return self.process.returncode

  @property
  def is_saving(self) -> bool:
    with contextlib.suppress(FileNotFoundError):
      return any("orbax-checkpoint-tmp" in entry.name for entry in os.scandir(self.workdir / "checkpoints"))
    return False

  @property
  def is_evaluating(self) -> bool:
    last = self.lines[-1] if self.lines else ""
    step = last.split("/")[0].removeprefix("step ")
    return "/" in last and step.isdecimal() and not int(step) % EVALUATE_EVERY or "validation (EMA)" in last

  def where(self) -> str:
    if not any(line.startswith("first step") for line in self.lines):
      return "compiling" if any(line.startswith("model:") for line in self.lines) else "starting"
    return "evaluating" if self.is_evaluating else "saving" if self.is_saving else "training"

  def went_on_from(self) -> int | None:
    said = [line for line in self.lines if line.startswith("going on from the checkpoint of step ")]
    return int(said[0].split()[-1].replace(",", "")) if said else None


def complete(workdir: pathlib.Path) -> list[int]:
  """The steps of the checkpoints that are there, newest first."""
  directory = workdir / "checkpoints"
  return sorted((int(p.name) for p in directory.iterdir() if p.name.isdecimal()), reverse=True) if directory.is_dir() else []


def load(workdir: pathlib.Path, step: int):
  """The state in one checkpoint; raises where it is not whole."""
  with tempfile.TemporaryDirectory() as alone:
    (pathlib.Path(alone) / "checkpoints").mkdir()
    (pathlib.Path(alone) / "checkpoints" / str(step)).symlink_to((workdir / "checkpoints" / str(step)).resolve())
    return checkpoints.load_state(alone, with_optimizer=True)[1]


def records(workdir: pathlib.Path) -> list[dict]:
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
  return [{k: v for k, v in line.items() if k not in ("step_seconds", "data_seconds", "tokens_per_second")} for line in lines]


def same(a, b) -> bool:
  return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


class Soak:
  """A run that is disturbed, begun anew when it has come to its end."""

  def __init__(self, directory: pathlib.Path, seed: int):
    self.directory, self.rng, self.rounds, self.compared = directory, random.Random(seed), 0, 0
    texts = directory / "texts"
    texts.mkdir()
    words = ["any", "order", "masked", "diffusion", "token", "cache", "entry", "step"]
    for i in range(200):
      (texts / f"{i:03}.txt").write_text(" ".join(self.rng.choice(words) for _ in range(self.rng.randrange(5, 30))))
    console.say("the undisturbed run")
    self.whole = directory / "whole"
    life = Life(directory, self.whole)
    life.wait(lambda: any(line.startswith("first step") for line in life.lines))
    self.start_seconds = time.monotonic() - life.begin
    status = life.end()
    check(status == 0, f"the undisturbed run fails: {life.errors}")
    self.seconds = time.monotonic() - life.begin - self.start_seconds
    self.state, self.records = load(self.whole, STEPS), records(self.whole)
    console.say(f"{self.start_seconds:.1f} s to the first step, {self.seconds:.1f} s for {STEPS} steps")
    self.begin_anew()

  def begin_anew(self, workdir: pathlib.Path | None = None) -> None:
    self.rounds += 1
    self.workdir = workdir or self.directory / f"disturbed-{self.rounds}"
    self.steps, self.before = [], None  # complete checkpoints when the last process had ended

  def live(self, environment: dict[str, str] | None = None) -> Life:
    return Life(self.directory, self.workdir, environment)

  def examine(self, life: Life) -> None:
    """After a process has ended: nothing is lost, and where it has begun is where the one before had come to."""
    is_training = any(line.startswith("first step") for line in life.lines)
    began = life.went_on_from()
    check(not is_training or began == (self.steps[0] if self.steps else None), f"it went on from {began}; there were {self.steps}")
    check(not any("can't be restored" in line for line in life.errors), f"a checkpoint was damaged: {life.errors}")
    check(not is_training or not any(line.startswith("Traceback") for line in life.errors), f"a traceback: {''.join(life.errors)}")
    steps = complete(self.workdir)
    check(not self.steps or steps and steps[0] >= self.steps[0], f"there were checkpoints {self.steps}, and now {steps}")
    for step in steps[:KEEP]:  # an older one may have been on its way out
      try:
        check(int(load(self.workdir, step).step) == step, f"checkpoint {step} is of another step")
      except OSError as e:
        raise Lost(f"checkpoint {step} of {steps} is complete and can't be read: {e}") from None
    self.steps = steps

  def finish(self, life: Life) -> None:
    """After a process that has come to the end of the run."""
    check(life.process.returncode == 0, f"it fails with status {life.process.returncode}: {life.errors}")
    check(same(load(self.workdir, STEPS), self.state), "the final state is not that of the undisturbed run")
    check(records(self.workdir) == self.records, "the records are not those of the undisturbed run")
    self.compared += 1
    shutil.rmtree(self.workdir, ignore_errors=True)

  def run_to_the_end(self, environment: dict[str, str] | None = None) -> None:
    life = self.live(environment)
    life.end()
    self.examine(life)
    self.finish(life)
    self.begin_anew()

  def wait_for_a_moment(self, life: Life, kinds: tuple[str, ...]) -> None:
    kind = self.rng.choice(kinds)
    if kind == "anywhere":
      life.wait(seconds=self.rng.uniform(0, self.start_seconds + self.seconds / 2))
    for _ in range(self.rng.randint(1, 5) if kind != "anywhere" else 0):  # the first save or evaluation, or one of the next
      is_so = (lambda: life.is_saving) if kind == "saving" else (lambda: life.is_evaluating)
      life.wait(lambda: not is_so())
      life.wait(is_so)
    if kind != "anywhere":
      life.wait(seconds=self.rng.uniform(0, 0.15))


def kills(soak: Soak, times: int) -> str:
  where, done, progress = collections.Counter(), 0, console.Progress("kills", times)
  while done < times:
    life = soak.live()
    soak.wait_for_a_moment(life, ("anywhere", "saving", "evaluating"))
    place = life.where()
    if life.end(signal.SIGKILL) == -signal.SIGKILL:
      done += 1
      where[place] += 1
      soak.examine(life)
    else:
      soak.examine(life)
      soak.finish(life)
      soak.begin_anew()
    progress(done)
  soak.run_to_the_end()
  return ", ".join(f"{n} {place}" for place, n in where.most_common())


def signals(soak: Soak, times: int) -> str:
  saved, done = collections.Counter(), 0
  while done < times:
    number = (signal.SIGTERM, signal.SIGINT)[done % 2]
    life = soak.live()
    soak.wait_for_a_moment(life, ("anywhere", "saving", "evaluating"))
    in_training = any(line.startswith("first step") for line in life.lines)
    status = life.end(number)
    soak.examine(life)
    if status == 0:
      soak.finish(life)
      soak.begin_anew()
      continue
    done += 1
    if status in (-number, 128 + number) and soak.steps[:1] == [STEPS]:  # there is nothing left to save, and it need not say so
      saved[f"{number.name} after training"] += 1
      continue
    if in_training or status == 128 + number:
      check(status == 128 + number, f"status {status} after {number.name}: {life.errors}")
      check(f"step {soak.steps[0]:,} is saved" in life.errors[-1], f"{soak.steps}: {life.errors}")
    saved[f"{number.name} {'saved, status ' + str(status) if status == 128 + number else 'before training'}"] += 1
  soak.run_to_the_end()
  return ", ".join(f"{n} {what}" for what, n in sorted(saved.items()))


@contextlib.contextmanager
def tmpfs(directory: pathlib.Path, size: int):
  directory.mkdir()
  subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)], check=True)
  try:
    yield lambda options: subprocess.run(["mount", "-o", f"remount,{options}", str(directory)], check=True)
  finally:
    subprocess.run(["umount", "-l", str(directory)], check=True)
    directory.rmdir()


def can_mount(directory: pathlib.Path) -> bool:
  try:
    with tmpfs(directory / "trial", 1 << 20):
      return True
  except (OSError, subprocess.CalledProcessError):
    return False


def one_line(life: Life) -> None:
  """The process has failed as it should: with one line for the person who has started it."""
  check(life.process.returncode == 1, f"status {life.process.returncode}: {life.errors}")
  check(life.errors and life.errors[-1].startswith("error: ") and len(life.errors) <= 3, f"not a line: {''.join(life.errors)}")


def disk_full(soak: Soak, times: int) -> str:
  step_bytes = sum(p.stat().st_size for p in (soak.whole / f"checkpoints/{STEPS}").rglob("*") if p.is_file())
  failed = 0
  for i in range(times):
    size = int(step_bytes * soak.rng.uniform(0.2, 4.5))
    with tmpfs(soak.directory / f"full-{i}", size) as change:
      soak.begin_anew(soak.directory / f"full-{i}" / "run")
      life = soak.live()
      if life.end():
        one_line(life)
        failed += 1
      soak.examine(life)
      change(f"size={20 * step_bytes}")
      soak.run_to_the_end()
  return f"{failed} of {times} sizes were too small, and ended with status 1 and a line"


def read_only(soak: Soak, times: int) -> str:
  for i in range(times):
    with tmpfs(soak.directory / f"read-only-{i}", 1 << 28) as change:
      soak.begin_anew(soak.directory / f"read-only-{i}" / "run")
      life = soak.live()
      if i % 2:
        life.wait(lambda: any(line.startswith("first step") for line in life.lines))
        soak.wait_for_a_moment(life, ("saving", "evaluating"))
        while not life.has_ended:
          try:
            change("ro")
            break
          except subprocess.CalledProcessError:  # busy, as long as a file is open for writing
            fail_writes(soak.workdir)
            break
      else:
        life.end(signal.SIGKILL)
        soak.examine(life)
        change("ro")
        life = soak.live()
      life.end()
      one_line(life)
      change("rw")
      restore_writes(soak.workdir)
      soak.examine(life)
      soak.run_to_the_end()
  return f"{times} ended with status 1 and a line"


def fail_writes(workdir: pathlib.Path) -> None:
  """What makes a directory read-only for root as well, where its file system has open files."""
  subprocess.run(["chattr", "+i", str(workdir / "checkpoints")], check=True)


def restore_writes(workdir: pathlib.Path) -> None:
  subprocess.run(["chattr", "-i", str(workdir / "checkpoints")], check=False, stderr=subprocess.DEVNULL)


def clocks(soak: Soak, times: int) -> str:
  what = collections.Counter()
  for i in range(times):
    kind = ("files of another time", "years off", "jumps")[i % 3] if FAKETIME else "files of another time"
    what[kind] += 1
    rc = soak.directory / "faketimerc"
    days = soak.rng.choice((-9000, -30, 400, 4000))
    rc.write_text(f"{days:+}d\n")
    fake = {"LD_PRELOAD": str(FAKETIME), "FAKETIME_TIMESTAMP_FILE": str(rc), "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    life = soak.live(fake if kind != "files of another time" else None)
    for _ in range(2):
      soak.wait_for_a_moment(life, ("saving",))
      if kind == "jumps":
        rc.write_text(f"{soak.rng.choice((-9000, -30, 400, 4000)):+}d\n")
    life.end(signal.SIGKILL)
    soak.examine(life)
    if kind == "files of another time":
      for path in soak.workdir.rglob("*"):
        os.utime(path, (soak.rng.choice((0, 2**32)),) * 2)
    soak.run_to_the_end()
  return ", ".join(f"{n} {kind}" for kind, n in what.items())


def flips(soak: Soak, times: int) -> str:
  found = collections.Counter()
  newest = soak.whole / "checkpoints" / str(STEPS)
  files = [p.relative_to(newest) for p in sorted(newest.rglob("*")) if p.is_file() and p.stat().st_size]
  sizes = [(newest / p).stat().st_size for p in files]
  progress = console.Progress("flips", times)
  for i in range(times):  # half fall on bytes, nearly all of which are of arrays, and half on files
    which = soak.rng.choices(range(len(files)), sizes if i % 2 else None)[0]
    with tempfile.TemporaryDirectory() as alone:
      copy = pathlib.Path(alone) / "checkpoints" / str(STEPS)
      shutil.copytree(newest, copy)
      data = bytearray((copy / files[which]).read_bytes())
      bit = soak.rng.randrange(8 * len(data))
      data[bit // 8] ^= 1 << bit % 8
      (copy / files[which]).write_bytes(data)
      try:
        _, state = checkpoints.load_state(alone, with_optimizer=True)
        check(same(state, soak.state), f"bit {bit} of {files[which]} is not noticed")
        found["without effect"] += 1
      except (OSError, ValueError):
        found["noticed"] += 1
    progress(i + 1)
  return ", ".join(f"{n} {what}" for what, n in found.items())


FAULTS = dict(kills=(kills, 100), signals=(signals, 20), disk_full=(disk_full, 6), read_only=(read_only, 4), clocks=(clocks, 6),
              flips=(flips, 300))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  for name, (_, times) in FAULTS.items():
    parser.add_argument(f"--{name}", type=int, default=times, help="times; 0: not at all")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--keep", action="store_true", help="keep what it has written")
  args = parser.parse_args()
  jax.config.update("jax_platforms", "cpu")
  logging.getLogger().setLevel(logging.ERROR)  # of the checkpoints that are damaged on purpose
  directory = pathlib.Path(tempfile.mkdtemp(prefix="faults-"))
  table, failed = [], False
  try:
    soak = Soak(directory, args.seed)
    for name, (fault, _) in FAULTS.items():
      times = getattr(args, name)
      if not times:
        continue
      if name in ("disk_full", "read_only") and not can_mount(directory):
        table.append((name, 0, "skipped: nothing can be mounted here", 0.0))
        continue
      begin, before = time.monotonic(), soak.compared
      soak.begin_anew()
      result = fault(soak, times)
      finished = soak.compared - before
      table.append((name, times, result + (f"; {finished} finished runs, all equal bit for bit" if finished else ""),
                    time.monotonic() - begin))
      console.say(f"{name}: {times} times; {table[-1][2]}")
  except Lost as e:
    failed = True
    console.say(f"LOST, in {directory}: {str(e)[:3000]}")
  finally:
    if not args.keep and not failed:
      shutil.rmtree(directory)
  console.say("\n| fault | times | result | minutes |\n|---|---|---|---|\n" + "\n".join(
      f"| {name} | {times} | {result} | {seconds / 60:.1f} |" for name, times, result, seconds in table))
  sys.exit(failed)


if __name__ == "__main__":
  main()
