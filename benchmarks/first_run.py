"""What the first command of the README comes to: seconds from its start to its end, and the losses of what it has trained.

  python benchmarks/first_run.py [--repeats=1] [--quick] [--json=FILE]

The whole of `python -m aogpt_jax.main --config=configs/tiny.py` in a process of its own and an empty workdir: data, compiling,
training, evaluation, samples. It has no peer: it says what a newcomer will wait for, and get.
"""

import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

import paired

ROOT = pathlib.Path(__file__).resolve().parents[1]


def run(settings: list[str]) -> dict[str, float]:
  """Seconds and losses of one."""
  with tempfile.TemporaryDirectory() as workdir:
    command = [sys.executable, "-m", "aogpt_jax.main", "--config=configs/tiny.py", f"--workdir={workdir}", *settings]
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    seconds = time.perf_counter() - start
    found = json.loads((pathlib.Path(workdir) / "eval_validation.json").read_text(encoding="utf-8"))
  losses = {f"{order}.{field}": found[order][field] for order in ("left_to_right", "any_order")
            for field in ("nats_per_token", "stderr_sequences", "bits_per_byte", "orders", "sequences")}
  return {"seconds": seconds, "unigram": found["entropies"]["unigram"], "bigram": found["entropies"]["bigram"], **losses}


def main():
  args = paired.parser(__doc__, repeats=1).parse_args()
  settings = ["--config.steps=20", "--config.eval.sequences=16"] if args.quick else []
  runs = [run(settings) for _ in range(1 if args.quick else args.repeats)]
  results = {name: paired.figures(r[name] for r in runs) for name in runs[0]}
  results["peak_mib"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
  rows = [(name.replace("_", " ").replace(".", ", "), f"{r['median']:.4g}") for name, r in results.items() if name != "peak_mib"]
  paired.report(args, results, paired.table(("", "median"), [*rows, ("peak MiB", f"{results['peak_mib']:,.0f}")]))


if __name__ == "__main__":
  main()
