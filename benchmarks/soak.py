"""What an hour of training leaves behind in memory, in open files, on the disk and in the compiler.

  python benchmarks/soak.py [--minutes=60] [--workdir=DIR] [--json=FILE] [--quick]

Trains configs/tiny.py without an end, with a checkpoint every 100 steps and an evaluation and samples every 200, looks at the process
and its workdir every two seconds, and ends it by SIGTERM. The first quarter of the time is for warming up. After it, the status is 1
where memory (the median of the last quarter over that of the second) has grown by more than 2%, where more files are open than ever
in the second quarter, where anything is compiled, where there are more complete checkpoints than config.checkpoint.keep and the one
that takes the place of another, or where the last state is not saved. Needs /proc.
"""

import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import paired

from aogpt_jax import console

ROOT = pathlib.Path(__file__).resolve().parents[1]
SAVE_EVERY, EVALUATE_EVERY, KEEP = 100, 200, 2
SETTINGS = {"steps": 10**9, "eval.every_steps": EVALUATE_EVERY, "eval.sequences": 256, "checkpoint.every_steps": SAVE_EVERY,
            "checkpoint.keep": KEEP}
PERIOD = 2.0  # seconds between two looks
MOST_GROWTH = 1.02


class Run:
  """A training run in a process of its own, with what it says and when."""

  def __init__(self, workdir: pathlib.Path):
    self.workdir, self.compiled, self.steps, self.said = workdir, [], [], []
    self.process = subprocess.Popen(
        [sys.executable, "-m", "aogpt_jax.main", f"--config={ROOT}/configs/tiny.py", "--mode=train", f"--workdir={workdir}",
         *(f"--config.{name}={value}" for name, value in SETTINGS.items())],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_LOG_COMPILES": "1"})
    self._reader = threading.Thread(target=self._read, daemon=True)
    self._reader.start()

  def _read(self) -> None:
    for line in self.process.stdout:
      if found := re.search(r"Compiling (\S+) with global shapes", line):
        self.compiled.append((time.monotonic(), found[1]))
      elif found := re.match(r"step ([\d,]+)/", line):
        self.steps.append((time.monotonic(), int(found[1].replace(",", ""))))
      else:
        self.said = [*self.said[-30:], line]

  def look(self) -> dict[str, float]:
    process = pathlib.Path(f"/proc/{self.process.pid}")
    kib = int(re.search(r"VmRSS:\s+(\d+)", (process / "status").read_text())[1])
    saved = self.workdir / "checkpoints"
    return {"mib": kib / 1024, "files": len(list((process / "fd").iterdir())), "threads": len(list((process / "task").iterdir())),
            "checkpoints": sum(p.name.isdecimal() for p in saved.iterdir()) if saved.is_dir() else 0,
            "checkpoint_mib": _size(saved) / 2**20, "other_mib": (_size(self.workdir) - _size(saved)) / 2**20}

  def end(self) -> int:
    self.process.send_signal(signal.SIGTERM)
    status = self.process.wait(timeout=600)
    self._reader.join()
    return status


def _size(directory: pathlib.Path) -> int:
  """Bytes of the files below; what goes away meanwhile counts as none."""
  total = 0
  for parent, _, names in os.walk(directory):  # leaves out a directory that is renamed meanwhile, where rglob raises
    for name in names:
      try:
        total += os.stat(os.path.join(parent, name)).st_size
      except FileNotFoundError:
        pass
  return total


def watch(run: Run, seconds: float) -> list[tuple[float, dict[str, float]]]:
  """Looks at a run from its first recorded step on."""
  while not run.steps:
    if run.process.poll() is not None:
      sys.exit(f"error: the run ends before its first step:\n{''.join(run.said)}")
    time.sleep(0.1)
  begin, seen = time.monotonic(), []
  pace = console.Pace()
  while (now := time.monotonic()) < begin + seconds:
    if run.process.poll() is not None:
      sys.exit(f"error: the run ends by itself:\n{''.join(run.said)}")
    seen.append((now, run.look()))
    if pace.is_due():
      pace.show(f"step {run.steps[-1][1]:,}: {seen[-1][1]['mib']:,.0f} MiB, {seen[-1][1]['files']} files  "
                f"{console.duration(begin + seconds - now)} left")
    time.sleep(PERIOD)
  console.clear()
  return seen


def main():
  parser = paired.parser(__doc__, repeats=1)
  parser.add_argument("--minutes", type=float, default=60.0)
  parser.add_argument("--workdir", default="", help="kept afterwards; else a temporary directory")
  args = parser.parse_args()
  if args.quick:
    args.minutes = 0.5
  with tempfile.TemporaryDirectory() as temporary:
    run = Run(pathlib.Path(args.workdir or temporary, "soak"))
    try:
      seen = watch(run, 60 * args.minutes)
    except BaseException:
      run.process.kill()
      raise
    status = run.end()
    quarters = [[look for _, look in seen[i * len(seen) // 4:(i + 1) * len(seen) // 4]] for i in range(4)]
    warm = seen[len(seen) // 4][0]
    late = [name for at, name in run.compiled if at > warm]
    mib = [statistics.median(look["mib"] for look in quarter) for quarter in quarters]
    files = [max(look["files"] for look in quarter) for quarter in quarters]
    threads = [max(look["threads"] for look in quarter) for quarter in quarters]
    most = max(look["checkpoints"] for _, look in seen)
    last_step = run.steps[-1][1]
    saved = sorted(int(p.name) for p in (run.workdir / "checkpoints").iterdir() if p.name.isdecimal())
    results = {"minutes": args.minutes, "steps": last_step, "evaluations": last_step // EVALUATE_EVERY,
               "checkpoints_saved": last_step // SAVE_EVERY, "mib": mib, "peak_mib": max(look["mib"] for _, look in seen),
               "files": files, "threads": threads, "compiled_before": len(run.compiled) - len(late), "compiled_after": late,
               "most_checkpoints": most, "checkpoint_mib": max(look["checkpoint_mib"] for _, look in seen),
               "other_mib": seen[-1][1]["other_mib"], "status": status}
  paired.report(args, results, paired.table(
      ("quarter", "median MiB", "open files", "threads"),
      [(f"{i + 1}", f"{mib[i]:,.1f}", str(files[i]), str(threads[i])) for i in range(4)]) + (
          f"\n{last_step:,} steps, {results['evaluations']:,} evaluations with samples, {results['checkpoints_saved']:,} checkpoints; "
          f"{results['compiled_before']} programs compiled in the first quarter, {len(late)} after; at most {most} complete "
          f"checkpoints, {results['checkpoint_mib']:.0f} MiB; {results['other_mib']:.1f} MiB of records; status {status}"))
  wrong = [what for what, is_wrong in (
      (f"memory has grown from {mib[1]:,.0f} to {mib[3]:,.0f} MiB", mib[3] > MOST_GROWTH * mib[1]),
      (f"{files[3]} files are open, and at most {files[1]} were in the second quarter", files[3] > files[1]),
      (f"compiled after warming up: {', '.join(late)}", bool(late)),
      (f"{most} complete checkpoints, of {KEEP} to be kept", most > KEEP + 1),
      (f"status {status} after SIGTERM, checkpoints {saved}, last step shown {last_step}",
       status != 143 or not saved or saved[-1] < last_step)) if is_wrong]
  if wrong and not args.quick:  # half a minute is over before all has been warmed up
    sys.exit("error: " + "\nerror: ".join(wrong))


if __name__ == "__main__":
  main()
