"""Evaluation of a run: likelihoods of a text, ensembles and the gap to masked diffusion, beside the text's own entropies."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import re
from typing import Any

import jax
import ml_collections
import numpy as np

from aogpt_jax import config as config_lib
from aogpt_jax import console
from aogpt_jax import orders
from aogpt_jax import records
from aogpt_jax import sharding
from aogpt_jax.data import baselines
from aogpt_jax.data import loader
from aogpt_jax.data import packing
from aogpt_jax.evaluation import ensemble
from aogpt_jax.evaluation import likelihood
from aogpt_jax.evaluation import mdm_gap
from aogpt_jax.run import Run


# By what it is done for, batches of tokens and lengths, and who is to be told how many sequences are done.
Batches = Callable[[str], tuple[Iterator[tuple[np.ndarray, np.ndarray]], Callable[[int], None]]]


@dataclasses.dataclass(frozen=True)
class Report:
  """What an evaluation finds."""

  likelihoods: dict[str, likelihood.Likelihood]  # by the name of the distribution, see `label`
  ensembles: dict[int, ensemble.Ensemble]  # by M; none where config.eval.ensemble is 1
  gaps: mdm_gap.Gaps | None  # None where config.eval.gap is 0


def label(spec: str) -> str:
  """A distribution's name among the results: any_order for uniform."""
  return "any_order" if spec == "uniform" else spec


def report(run: Run, params: Any) -> Report:
  """All that config.eval asks for, of the text that it names."""
  return score(run, params, functools.partial(_batches, run, run.evaluated, run.split, run.config.eval.limit))


def score(run: Run, params: Any, batches: Batches) -> Report:
  """All that config.eval asks for, of any text."""
  config = run.config.eval
  shared = dict(mesh=run.mesh, num_targets=config.targets, seed=config.seed, lanes=config.lanes)
  likelihoods = _likelihoods(run, params, *batches("evaluating"))
  ensembles, gaps = {}, None
  if config.ensemble > 1:
    rows, progress = batches("averaging over contexts of")
    ensembles = ensemble.evaluate(run.model, params, rows, num_contexts=config.ensemble, progress=progress, **shared)
  if config.gap:
    rows, progress = batches("comparing contexts of")
    gaps = mdm_gap.evaluate(run.model, params, rows, mixture_size=config.gap, progress=progress, **shared)
  return Report(likelihoods, ensembles, gaps)


def evaluate(run: Run, params: Any, split: str, max_sequences: int) -> dict[str, likelihood.Likelihood]:
  """Likelihood under each of config.eval.distributions on at most so many sequences of a split of the run's text (0: all)."""
  return _likelihoods(run, params, *_batches(run, run.packed, split, max_sequences, "evaluating"))


def _batches(
    run: Run, packed: packing.PackedDataset, split: str, max_sequences: int, what: str
) -> tuple[Iterator[tuple[np.ndarray, np.ndarray]], Callable[[int], None]]:
  """This process's rows of a text, and who is to be told how many are done."""
  batches = loader.eval_batches(
      packed, split, batch_size=run.config.eval.batch_size, max_sequences=max_sequences,
      local=sharding.local_rows(run.mesh, run.config.eval.batch_size))
  sequences = packed.num_sequences.get(split, 0)
  return batches, console.Progress(f"{what} {split} sequences", min(max_sequences or sequences, sequences))


def _likelihoods(run, params, batches, progress):
  config = run.config.eval
  repeats = {spec: 1 if orders.is_single(spec) else config.orders for spec in config.distributions}
  masks = config.masks if run.config.model.architecture == "encoder" else 0
  results = likelihood.evaluate(
      run.model, params, batches, mesh=run.mesh, token_bytes=run.tokenizer.token_bytes(), repeats=repeats, masks=masks,
      seed=config.seed, progress=progress)
  return {label(spec): result for spec, result in results.items()}


def scalars(results: dict[str, likelihood.Likelihood]) -> dict[str, float]:
  """Flat metrics such as "eval/any_order/nats_per_token"."""
  fields = ("nats_per_token", "perplexity", "bits_per_byte", "stderr_sequences", "stderr_orders")
  flat = {f"eval/{name}/{field}": getattr(result, field) for name, result in results.items() for field in fields}
  return {name: value for name, value in flat.items() if math.isfinite(value)}


def table(found: Report, entropies: baselines.Entropies) -> str:
  """Tables for the terminal. Standard errors are over the sequences."""
  likelihoods, gaps = rows(found, entropies)
  return "\n".join([*aligned(likelihoods), *(["", *aligned(gaps)] if gaps else [])])


def rows(found: Report, entropies: baselines.Entropies) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
  """Rows of two tables, headings first: likelihoods, and the gap to masked diffusion, which may be none."""
  first = next(iter(found.likelihoods.values()))
  lines = [("", "nats/token", "", "perplexity", "bits/byte")]

  def add(name, nats, stderr=None):
    bits = nats * first.tokens / max(first.bytes, 1) / math.log(2)
    lines.append((name, f"{nats:.4f}", "" if stderr is None else f"+- {stderr:.4f}", f"{math.exp(min(nats, 700.0)):.2f}",
                  f"{bits:.4f}"))

  add("unigram entropy of the text", entropies.unigram)
  add("bigram entropy of the text", entropies.bigram)
  for name, r in found.likelihoods.items():
    several = f", {r.orders} orders a sequence" if r.orders > 1 else f", {r.masks} masks a sequence" if r.masks else ""
    add(name.replace("_", " ") + several, r.nats_per_token, r.stderr_sequences)
    if r.orders > 1:
      add(f"  bound of {r.orders} orders at once", r.iw_nats_per_token, r.iw_stderr_sequences)
  for size, e in found.ensembles.items():
    some = f", {e.targets} tokens a sequence" if e.stderr_targets else ""
    add(f"ensemble of {size} context order{'s'[: size > 1]}{some}", e.nats_per_token, e.stderr_sequences)
  gaps = []
  if found.gaps:
    g = found.gaps
    gaps = [("masked-diffusion loss - any-order loss", "nats/token", "", "% of any-order loss", "")]
    for name, gap in g.rules.items():
      name = {"random": "random order of the context", "sorted": "context left to right"}.get(
          name, f"mixture of {g.mixture_size} context orders")
      gaps.append((name, f"{gap.difference:+.4f}", f"+- {gap.stderr:.4f}", f"{gap.percent:+.2f}", f"+- {gap.percent_stderr:.2f}"))
  return lines, gaps


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
  """Lines of a table, the first column to the left and the others to the right."""
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  return ["  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
          for row in rows]


def markdown(rows: list[tuple[str, ...]]) -> str:
  """A table in Markdown; the first row is its head."""
  lines = [" | ".join(row) for row in (rows[0], ("---",) * len(rows[0]), *rows[1:])]
  return "\n".join(f"| {line} |" for line in lines)


def finite(value: Any) -> Any:
  """The same with None for each number that JSON does not have."""
  if isinstance(value, dict):
    return {k: finite(v) for k, v in value.items()}
  return None if isinstance(value, float) and not math.isfinite(value) else value


def write(run: Run, step: int, found: Report, entropies: baselines.Entropies) -> list[pathlib.Path]:
  """All figures of an evaluation with what they were computed from, in the run's workdir; returns the paths.

  Beside them, a .npz file of the same name has the nats of each sequence by distribution, and its tokens as `tokens`.
  """
  config = run.config.eval
  fields = lambda result: finite({name: x for name, x in dataclasses.asdict(result).items() if not isinstance(x, np.ndarray)})
  record = {
      "step": step, "split": config.split, "source": config.source or run.config.data.source, "weights": config.weights,
      "text": run.evaluated.directory.parent.name, "limit": config.limit, "seed": config.seed, "config": run.config.to_dict(),
      "entropies": fields(entropies), **{name: fields(result) for name, result in found.likelihoods.items()},
      "ensemble": {size: fields(result) for size, result in found.ensembles.items()},
      "mdm_gap": fields(found.gaps) if found.gaps else None}
  path = _json_path(run.workdir, run.config)
  if jax.process_index() == 0:
    first = next(iter(found.likelihoods.values()))
    np.savez_compressed(path.with_suffix(".npz"), tokens=first.sequence_tokens,
                        **{name: result.sequence_nats for name, result in found.likelihoods.items()})
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")  # last: with it, an evaluation is done
  return [path, path.with_suffix(".npz")]


def read(path: pathlib.Path) -> tuple[dict[str, Any], Report, baselines.Entropies]:
  """What `write` has written: the record, and what it found; without the nats of each sequence where their file is not there.

  Raises:
    ValueError: it is no such file.
    OSError: it can't be read.
  """
  record = records.read(path)
  by_sequence = {}
  with contextlib.suppress(Exception):  # not there, or damaged, which raises exceptions of many types
    with np.load(path.with_suffix(".npz")) as arrays:
      by_sequence = dict(arrays)
  number = lambda value: {name: math.nan if x is None else x for name, x in value.items()}
  try:
    names = [name for name, value in record.items() if isinstance(value, dict) and "stderr_sequences" in value]
    found = Report(
        {name: likelihood.Likelihood(**number(record[name]), sequence_nats=by_sequence.get(name),
                                     sequence_tokens=by_sequence.get("tokens")) for name in names},
        {int(size): ensemble.Ensemble(**number(value)) for size, value in record["ensemble"].items()},
        mdm_gap.Gaps(**record["mdm_gap"] | {"rules": {rule: mdm_gap.Gap(**number(gap))
                                                      for rule, gap in record["mdm_gap"]["rules"].items()}})
        if record["mdm_gap"] else None)
    if not names:
      raise KeyError("a likelihood")
    return record, found, baselines.Entropies(**record["entropies"])
  except (TypeError, KeyError, AttributeError, ValueError) as e:
    raise ValueError(f"{path}: is no evaluation of this version ({records.shown(str(e))})") from None


def is_done(workdir: pathlib.Path, config: ml_collections.ConfigDict) -> bool:
  """Whether a workdir holds the evaluation that a config asks for, of the last step of a run with this config."""
  try:
    record = records.read(_json_path(workdir, config))
    theirs = config_lib.completed(config_lib.from_dict(record["config"]))
    same = not config_lib.differences(config, theirs) and config_lib.flat(theirs.eval) == config_lib.flat(config.eval)
    return same and record["step"] >= config.steps
  except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not there, damaged, or of a version that did not say
    return False


def _json_path(workdir: pathlib.Path, config: ml_collections.ConfigDict) -> pathlib.Path:
  name = re.sub(r"\W+", "_", config.eval.source).strip("_") if config.eval.source else config.eval.split
  return workdir / f"eval_{name[-100:]}.json"
