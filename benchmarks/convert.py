"""Seconds and peak memory of converting a file of the PyTorch code's size, with random weights.

  python benchmarks/convert.py [--layers=24] [--optimizer] [--directory=DIR] [--repeats=1] [--quick] [--json=FILE]

Each conversion is a process of its own: to a workdir, back to a file, to safetensors, and from these. Its peak is that of its
resident set, in which pages of the mapped file count, although the system can take them back; beside it, the same in sizes of the
file that is read or written. What the disk's cache holds has a say in the seconds.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import numpy as np
import paired

from aogpt_jax.conversion import names
from aogpt_jax.conversion import published
from aogpt_jax.conversion import torch_file


def write_random(path: pathlib.Path, args: argparse.Namespace) -> int:
  """Writes a checkpoint of an AO-GPT; returns how many parameters it has."""
  model_args = {"n_layer": args.layers, "n_head": args.width // 64, "n_embd": args.width, "block_size": 1024, "vocab_size": 50304,
                "bias": True, "dropout": 0.0}
  rng = np.random.default_rng(0)
  parameters = names.parameters(published.model_of("AO-GPT", model_args))

  def draw(scale: float) -> dict[str, np.ndarray]:
    return {p.name: rng.standard_normal(p.shape, np.float32) * np.float32(scale) for p in parameters}

  moments = None
  if args.optimizer:
    moments = published.Moments(1000, draw(1e-4), {name: x * x for name, x in draw(1e-4).items()})
  raw = draw(0.02)
  settings = {"ema_rate": 0.9999, "weight_decay": 0.05, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
  ema = {name: x * np.float32(0.99) for name, x in raw.items()}
  torch_file.write(path, published.Published("AO-GPT", model_args, settings, 1000, raw, ema, moments), 1e-4, False)
  return sum(x.size for x in raw.values())


def measured(arguments: list[str], sized: pathlib.Path) -> dict[str, float]:
  """Seconds, peak in GiB, and the peak in sizes of a file, of one conversion."""
  start = time.perf_counter()
  process = subprocess.Popen([sys.executable, "-m", "aogpt_jax.convert", *arguments])
  _, status, usage = os.wait4(process.pid, 0)
  seconds = time.perf_counter() - start
  if status:
    sys.exit(f"error: {' '.join(arguments)} failed; see above")
  size = sized.stat().st_size
  peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
  return {"seconds": seconds, "cpu_seconds": usage.ru_utime + usage.ru_stime, "file_gib": size / 2**30, "peak_gib": peak / 2**30,
          "peak_files": peak / size}


def main():
  parser = paired.parser(__doc__, repeats=1)
  parser.add_argument("--layers", type=int, default=24, help="24 is medium")
  parser.add_argument("--width", type=int, default=1024, help="D; heads are of 64")
  parser.add_argument("--optimizer", action="store_true", help="with the state of AdamW")
  parser.add_argument("--directory", default="", help="where four times the file's size is free; the system's own by default")
  args = parser.parse_args()
  if args.quick:
    args.layers, args.width, args.repeats = 1, 64, 1
  directory = pathlib.Path(tempfile.mkdtemp(dir=args.directory or None))
  try:
    file, run, back, model, again = (directory / name for name in ("ckpt.pt", "run", "back.pt", "model", "again"))
    # The process that writes it is not the one that is measured.
    writer = os.fork()
    if not writer:
      print(f"{write_random(file, args):,} parameters", flush=True)
      os._exit(0)
    if os.waitpid(writer, 0)[1]:
      sys.exit("error: the file can't be written; see above")
    optimizer = ["--optimizer"] * args.optimizer
    steps = {
        "to a workdir": ([f"--torch_checkpoint={file}", f"--output={run}", *optimizer], file),
        "back": ([f"--checkpoint={run}", f"--torch_output={back}", *optimizer], back),
        "to safetensors": ([f"--checkpoint={run}", f"--safetensors={model}"], model / "model.safetensors"),
        "from safetensors": ([f"--safetensors={model}", f"--output={again}"], model / "model.safetensors")}
    measurements = {name: [] for name in steps}
    for _ in range(args.repeats):
      for made in (run, back, model, again):
        shutil.rmtree(made) if made.is_dir() else made.unlink(missing_ok=True)
      for name, (arguments, sized) in steps.items():
        measurements[name].append(measured(arguments, sized))
  finally:
    shutil.rmtree(directory)
  conversions = {name: {field: paired.figures(m[field] for m in runs) for field in runs[0]} for name, runs in measurements.items()}
  results = {"layers": args.layers, "width": args.width, "with_optimizer": args.optimizer, "conversions": conversions}
  rows = [(name, *(f"{r[field]['median']:.{digits}f}" for field, digits in (
      ("file_gib", 2), ("seconds", 1), ("cpu_seconds", 1), ("peak_gib", 2), ("peak_files", 2)))) for name, r in conversions.items()]
  paired.report(args, results, paired.table(("", "file, GiB", "s", "s of CPU", "peak, GiB", "peak, files"), rows))


if __name__ == "__main__":
  main()
