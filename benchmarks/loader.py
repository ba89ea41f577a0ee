"""Tokens per second of the training loader, beside plain TFDS and Grain on the same files.

  python benchmarks/loader.py [--block_size=1024] [--batch_size=64] [--megatokens=16] [--repeats=5] [--json]

Peer: `tfds.data_source` (which decodes every example) batched by Grain, with the same threads and prefetch. Both
read random rows of the same packed array_record files. The runs alternate; medians are reported.
"""

import argparse
import json
import pathlib
import random
import statistics
import tempfile
import time

import grain
import ml_collections
import tensorflow_datasets as tfds

from aogpt_jax.data import loader
from aogpt_jax.data import packing
from aogpt_jax.data import tokenizers

PREFETCH, THREADS = 4, 2


def corpus(directory: str, megatokens: int) -> ml_collections.ConfigDict:
  """Writes random words, a token per byte, and returns the data section of a config for them."""
  rng = random.Random(0)
  words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(1, 12))) for _ in range(20000)]
  for i in range(megatokens * 10):
    text = " ".join(rng.choices(words, k=16000))[:100_000 - 1]
    (pathlib.Path(directory) / f"{i:05d}.txt").write_text(text)
  return ml_collections.ConfigDict(dict(
      source=f"files:{directory}/*.txt", text_field="text", prompt_field="", train_split="train", validation_split="", test_split="",
      validation_fraction=0.05, test_fraction=0.0, tfds_data_dir="", cache_dir=f"{directory}/cache", workers=0))


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


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--block_size", type=int, default=1024, help="T, tokens")
  parser.add_argument("--batch_size", type=int, default=64, help="rows")
  parser.add_argument("--megatokens", type=int, default=16, help="size of the corpus; each run reads it about once")
  parser.add_argument("--repeats", type=int, default=5, help="runs of each")
  parser.add_argument("--json", action="store_true", help="print one JSON object")
  args = parser.parse_args()
  per_batch = args.block_size * args.batch_size
  count = max(args.megatokens * 1_000_000 // per_batch, 1)
  rates = {"ours": [], "peer": []}
  with tempfile.TemporaryDirectory() as directory:
    packed = packing.prepare(corpus(directory, args.megatokens), tokenizers.load("bytes"), args.block_size)
    for seed in range(args.repeats):
      for name, start in (("ours", ours), ("peer", peer)):
        rates[name].append(rate(start(packed, args.batch_size, seed), per_batch, count))
  median = {name: statistics.median(values) for name, values in rates.items()}
  ratio = statistics.median(a / b for a, b in zip(rates["ours"], rates["peer"]))
  if args.json:
    print(json.dumps(dict(vars(args), tokens_per_second=median, ratio=ratio, runs=rates)))
  else:
    print(f"aogpt_jax.data.loader        {median['ours'] / 1e6:6.1f} M tokens/s (median of {args.repeats})")
    print(f"tfds.data_source + Grain     {median['peer'] / 1e6:6.1f} M tokens/s")
    print(f"ratio                        {ratio:6.2f}")


if __name__ == "__main__":
  main()
