"""Likelihood of a run's held-out text: left to right and any order, beside the text's own entropies."""

import dataclasses
import json
import math
import pathlib
from typing import Any

import jax

from aogpt_jax import console
from aogpt_jax.data import baselines
from aogpt_jax.data import loader
from aogpt_jax.evaluation import likelihood
from aogpt_jax.run import Run

# What is reported, under which name: the distribution of the orders.
DISTRIBUTIONS = {"left_to_right": "left_to_right", "any_order": "uniform"}


def evaluate(run: Run, params: Any, split: str, max_sequences: int) -> dict[str, likelihood.Likelihood]:
  """Likelihood under each of DISTRIBUTIONS on at most so many sequences of a split (0: all)."""
  config = run.config.eval
  batches = loader.eval_batches(
      run.packed, split, batch_size=config.batch_size, max_sequences=max_sequences,
      process_index=jax.process_index(), process_count=jax.process_count())
  sequences = run.packed.num_sequences.get(split, 0)
  progress = console.Progress(f"evaluating {split} sequences", min(max_sequences or sequences, sequences))
  results = likelihood.evaluate(
      run.model, params, batches, mesh=run.mesh, token_bytes=run.tokenizer.token_bytes(),
      repeats={"left_to_right": 1, "uniform": config.orders}, progress=progress)
  return {name: results[spec] for name, spec in DISTRIBUTIONS.items()}


def scalars(results: dict[str, likelihood.Likelihood]) -> dict[str, float]:
  """Flat metrics such as "eval/any_order/nats_per_token"."""
  fields = ("nats_per_token", "perplexity", "bits_per_byte", "stderr_sequences", "stderr_orders")
  flat = {f"eval/{name}/{field}": getattr(result, field) for name, result in results.items() for field in fields}
  return {name: value for name, value in flat.items() if math.isfinite(value)}


def table(results: dict[str, likelihood.Likelihood], entropies: baselines.Entropies) -> str:
  """A table for the terminal. Standard errors are over the sequences."""
  first = next(iter(results.values()))
  bits = lambda nats: nats * first.tokens / first.bytes / math.log(2)
  rows = [("", "nats/token", "", "perplexity", "bits/byte")]
  for name, nats in (("unigram entropy of the text", entropies.unigram), ("bigram entropy of the text", entropies.bigram)):
    rows.append((name, f"{nats:.4f}", "", f"{math.exp(nats):.2f}", f"{bits(nats):.4f}"))
  for name, r in results.items():
    label = name.replace("_", " ") + (f", {r.orders} orders a sequence" if r.orders > 1 else "")
    rows.append((label, f"{r.nats_per_token:.4f}", f"+- {r.stderr_sequences:.4f}", f"{r.perplexity:.2f}",
                 f"{r.bits_per_byte:.4f}"))
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  return "\n".join("  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
                   for row in rows)


def write_json(path: pathlib.Path, step: int, split: str, results: dict[str, likelihood.Likelihood],
               entropies: baselines.Entropies) -> None:
  """All figures of an evaluation with what they were computed from."""
  def fields(result):  # JSON has no nan
    return {k: None if v != v else v for k, v in dataclasses.asdict(result).items()}

  record = {"step": step, "split": split, "weights": "ema", "entropies": fields(entropies),
            **{name: fields(result) for name, result in results.items()}}
  path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
