"""Tokens per second of the training loader, beside plain TFDS and Grain on the same files; and how long training waits for it.

  python benchmarks/loader.py [--block_size=1024] [--batch_size=64] [--megatokens=16] [--repeats=5] [--quick] [--json=FILE]

Peer: `tfds.data_source` (which decodes every example) batched by Grain, with the same threads and prefetch. Both
read random rows of the same packed array_record files, in processes of their own, in turn; medians are reported.

The share of waiting is that of a run of configs/tiny.py, whose steps are the shortest of all configs: the time that its loop
spends in the loader's next(), `data_seconds` of metrics.jsonl, over that of its steps.
"""

import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

import grain
import ml_collections
import tensorflow_datasets as tfds

import paired
from aogpt_jax.data import loader
from aogpt_jax.data import packing
from aogpt_jax.data import tokenizers

ROOT = pathlib.Path(__file__).resolve().parents[1]
PREFETCH, THREADS = 4, 2


def write_corpus(directory: str, megatokens: int) -> None:
  """Random words, a token per byte."""
  rng = random.Random(0)
  words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(1, 12))) for _ in range(20000)]
  for i in range(megatokens * 10):
    text = " ".join(rng.choices(words, k=16000))[:100_000 - 1]
    (pathlib.Path(directory) / f"{i:05d}.txt").write_text(text)


def prepare(directory: str, block_size: int) -> packing.PackedDataset:
  """Packs the corpus, where that is not done yet."""
  data = ml_collections.ConfigDict(dict(
      source=f"files:{directory}/*.txt", text_field="text", prompt_field="", train_split="train", validation_split="",
      test_split="", validation_fraction=0.05, test_fraction=0.0, tfds_data_dir="", cache_dir=f"{directory}/cache", workers=0))
  return packing.prepare(data, tokenizers.load("bytes"), block_size)


def ours(packed, batch_size, seed):
  return loader.train_batches(packed, seed=seed, batch_size=batch_size, prefetch=PREFETCH, num_threads=THREADS)


def peer(packed, batch_size, seed):
  source = tfds.builder_from_directory(packed.directory).as_data_source(split="train")
  rows = grain.MapDataset.source(source).seed(seed).shuffle().repeat().batch(batch_size)
  return iter(rows.to_iter_dataset(grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=PREFETCH)))


def rate(batches, tokens_per_batch: int, batches_read: int) -> float:
  next(batches)  # Opening files is not throughput.
  start = time.perf_counter()
  for _ in range(batches_read):
    next(batches)
  elapsed = time.perf_counter() - start
  batches.close()
  return batches_read * tokens_per_batch / elapsed


def waiting(steps: int, layers: int) -> dict[str, float]:
  """Seconds of a step of configs/tiny.py, and of those the ones that it waits for data; means over all but the first steps."""
  with tempfile.TemporaryDirectory() as directory:
    command = [sys.executable, "-m", "aogpt_jax.main", "--config=configs/tiny.py", "--mode=train", "--quiet",
               f"--workdir={directory}/run", f"--config.steps={steps}", f"--config.optimizer.decay_steps={steps}",
               "--config.optimizer.warmup_steps=1", f"--config.data.cache_dir={directory}/data",
               f"--config.log.every_steps={min(10, steps // 2)}",
               "--config.log.tensorboard=False",
               "--config.eval.sequences=8", "--config.eval.orders=1", "--config.sample.num_samples=1",
               f"--config.eval.every_steps={steps}", f"--config.checkpoint.every_steps={steps}",
               f"--config.model.layers={layers}", "--config.sample.orders=('uniform',)"]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    lines = (pathlib.Path(directory) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
  records = [r for r in map(json.loads, lines) if "data_seconds" in r]
  step, data = (sum(r[field] for r in records) / len(records) for field in ("step_seconds", "data_seconds"))
  return {"steps": steps, "step_seconds": step, "data_seconds": data, "share": data / step}


def main():
  parser = paired.parser(__doc__, repeats=5)
  parser.add_argument("--block_size", type=int, default=1024, help="T, tokens")
  parser.add_argument("--batch_size", type=int, default=64, help="rows")
  parser.add_argument("--megatokens", type=int, default=16, help="size of the corpus; each run reads it about once")
  parser.add_argument("--steps", type=int, default=300, help="of training, while which is measured how long it waits")
  args = parser.parse_args()
  if args.quick:
    args.megatokens, args.batch_size, args.repeats, args.steps = 4, 8, 1, 10
  per_batch = args.block_size * args.batch_size
  if args.serve:
    start = ours if args.serve == "aogpt_jax" else peer
    count = max(args.megatokens * 1_000_000 // per_batch, 1)
    return paired.serve(lambda directory, seed: {"tokens_per_second": rate(
        start(prepare(directory, args.block_size), args.batch_size, seed), per_batch, count)})
  with tempfile.TemporaryDirectory() as directory:
    write_corpus(directory, args.megatokens)
    prepare(directory, args.block_size)
    with paired.contestants(("aogpt_jax", "tfds.data_source + Grain")) as contestants:
      runs = paired.in_turn(contestants, args.repeats, directory=directory, seed=0)
  own, other = runs.values()
  waited = waiting(args.steps, layers=1 if args.quick else 4)
  found = paired.ratio(own, other, "tokens_per_second")
  listed = paired.table(("loader", "M tokens/s", "peak MiB"), (
      (name, f"{r.median('tokens_per_second') / 1e6:.1f}", f"{r.counted[-1]['peak_mib']:,.0f}") for name, r in runs.items()))
  results = {"block_size": args.block_size, "batch_size": args.batch_size, "ratio": found, "waiting": waited,
             "loaders": {name: r.figures("tokens_per_second") for name, r in runs.items()}}
  paired.report(args, results, f"{listed}\nratio {found['median']:.2f}\ntraining configs/tiny.py: "
                f"{waited['step_seconds'] * 1e3:.1f} ms a step, of which it waits for data {waited['share']:.2%}")


if __name__ == "__main__":
  main()
