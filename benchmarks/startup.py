"""Seconds until something happens: importing the package, and the first training step without and with kept programs.

  python benchmarks/startup.py [--repeats=5] [--quick] [--json=FILE]

Imports are of fresh processes, bytecode compiled, in turn with those of the packages that aogpt_jax is made of and of torch, where it is
installed. The first step is that of configs/tiny.py, from the start of the process to the end of the step, the text packed already;
"cold" with an empty config.compilation_cache, "warm" with the one that the cold start left.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import paired

ROOT = pathlib.Path(__file__).resolve().parents[1]
IMPORTS = {
    "aogpt_jax": "import aogpt_jax",
    "jax, flax, optax, orbax": "import jax, flax.linen, optax, orbax.checkpoint",
    "torch": "import torch",
}
HEAVY = ("tensorflow", "torch", "transformers", "matplotlib", "tensorboardX")


def seconds_of(code: str) -> float:
  start = time.perf_counter()
  subprocess.run([sys.executable, "-c", code], check=True, env=environment())
  return time.perf_counter() - start


def environment() -> dict[str, str]:
  return os.environ | {"PYTHONPATH": str(ROOT)}


def loaded() -> list[str]:
  """Of the packages that an import should not load, those that it does."""
  code = f"import sys, aogpt_jax; print(*[m for m in {HEAVY} if m in sys.modules])"
  return subprocess.run([sys.executable, "-c", code], check=True, env=environment(), capture_output=True, text=True).stdout.split()


def first_step(directory: str, name: str) -> dict[str, float]:
  """Seconds from the start of a process to its first step, and of the step itself, both with compilation."""
  start = time.perf_counter()
  command = [sys.executable, "-m", "aogpt_jax.main", "--config=configs/tiny.py", "--mode=train", f"--workdir={directory}/{name}",
             f"--config.compilation_cache={directory}/programs",
             f"--config.data.cache_dir={directory}/data"]
  with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True) as process:
    for line in process.stdout:
      if line.startswith("first step: "):
        seconds = time.perf_counter() - start
        process.kill()
        return {"process_seconds": seconds, "step_seconds": float(line.split()[2])}
  sys.exit(f"error: {' '.join(command)} ended without a step.")


def main():
  args = paired.parser(__doc__, repeats=5).parse_args()
  args.repeats = 1 if args.quick else args.repeats
  imports = {name: code for name, code in IMPORTS.items() if name != "torch" or importlib.util.find_spec("torch")}
  for code in imports.values() if not args.quick else ():
    seconds_of(code)  # compiles bytecode
  times = {name: [] for name in imports}
  for _ in range(args.repeats):
    for name, code in imports.items():
      times[name].append(seconds_of(code))
  steps = {"cold": [], "warm": []}
  with tempfile.TemporaryDirectory() as data:
    if not args.quick:
      first_step(data, "packs")
    (pathlib.Path(data) / "data").mkdir(exist_ok=True)
    for i in range(args.repeats):
      with tempfile.TemporaryDirectory() as directory:
        os.symlink(f"{data}/data", f"{directory}/data")
        for name in steps:
          steps[name].append(first_step(directory, f"{name}{i}"))
  results = {"imports": {name: paired.figures(t) for name, t in times.items()}, "not_to_be_loaded": HEAVY, "loaded": loaded(),
             "first_step": {name: {field: paired.figures(a[field] for a in t) for field in t[0]} for name, t in steps.items()}}
  rows = [(f"import {name}", f"{r['median']:.2f}", "") for name, r in results["imports"].items()]
  rows += [(f"first step, {name}", *(f"{r[field]['median']:.2f}" for field in ("process_seconds", "step_seconds")))
           for name, r in results["first_step"].items()]
  paired.report(args, results, f"{paired.table(('', 's from the start', 's of the step'), rows)}\n"
                f"import aogpt_jax loads {', '.join(results['loaded']) or 'none'} of {', '.join(HEAVY)}")


if __name__ == "__main__":
  main()
