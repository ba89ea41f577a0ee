"""A sweep over samplers: generative perplexity of a run's texts by steps, top-p and temperature, beside the seconds they take.

It has the shape of table 2 of the paper (Xue et al., arXiv 2506.19935). Each cell is kept as soon as it is done.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import time
from typing import Any

import jax
import numpy as np

from aogpt_jax import cluster
from aogpt_jax import console
from aogpt_jax import pictures
from aogpt_jax import records as records_lib
from aogpt_jax.evaluation import held_out
from aogpt_jax.evaluation import judge as judge_lib
from aogpt_jax.evaluation import published
from aogpt_jax.run import Run
from aogpt_jax.sampling import texts as texts_lib


def evaluate(run: Run, judge: judge_lib.Judge, params: Any, step: int) -> list[pathlib.Path]:
  """Draws and scores the texts of each cell that an earlier call has not left in generative_sweep.jsonl, and shows the table.

  Args:
    run: its config.eval.generative has steps, filters and seeds.
    judge: scores the texts.
    params: of the run's model, sharded over its mesh.
    step: of the checkpoint that they are from.

  Returns:
    The files: generative_sweep.json, .jsonl with a line for each cell, and .png.
  """
  options, sample = run.config.eval.generative, run.config.sample
  path = run.workdir / "generative_sweep.jsonl"
  shared = texts_lib.options(sample) | {"order": options.order, "num_samples": options.num_samples}
  about = {"judge": judge.record, "dtype": run.config.model.dtype, "weights": run.config.eval.weights, "checkpoint_step": step,
           "devices": f"{run.mesh.size} x {run.mesh.devices.flat[0].device_kind}"}
  # Seed by seed, so that a whole table is there as soon as can be.
  cells = [shared | {"seed": sample.seed + seed, "top_p": top_p, "temperature": temperature, "steps": steps}
           for seed in range(options.seeds) for top_p, temperature in options.filters for steps in options.steps]
  key = lambda cell: json.dumps(cell | about, sort_keys=True)
  kept = {json.dumps(record["settings"], sort_keys=True): record for record in _records(path)}
  left = [cell for cell in cells if key(cell) not in kept]
  if len(left) < len(cells):
    console.say(f"{len(cells) - len(left)} of {len(cells)} cells are in {path} already")
  steps = console.Progress("sweep", sum(cell["steps"] for cell in left), "steps")
  done = 0
  for cell in left:
    drawn, seconds, _ = timed(functools.partial(texts_lib.generate, run.model, params, run.tokenizer, mesh=run.mesh, **cell))
    texts = [judge.encode(text.text) for text in drawn]
    names = [f"sample {text.sample_index + 1}" for text in drawn]
    score = judge.score(texts, progress(judge, texts))
    record = {"settings": cell | about, **fields(score), "seconds_per_text": seconds / len(drawn),
              "evaluations": float(np.mean([text.evaluations for text in drawn])),
              "warnings": judge_lib.warnings(texts, names, judge.model.block_size)}
    kept[key(cell)] = record
    write(path, json.dumps(record) + "\n", "a")
    done += cell["steps"]
    what = f"{_name(cell['top_p'], cell['temperature'])}, {cell['steps']} steps, seed {cell['seed']}"
    number = lambda x: "-" if x is None else f"{x:.2f}"
    console.say("\n".join([
        f"{what}: perplexity {number(record['perplexity'])}, entropy {number(record['statistics']['entropy'])}, "
        f"{record['seconds_per_text']:.3g} s a text; {steps.line(done)}", *(f"  {line}" for line in record["warnings"])]))
  records = [kept[key(cell)] for cell in cells]
  rows = summary(records)
  console.say(f"\nperplexity under {judge.name} of {options.num_samples} texts, {options.order}, step {step:,}, "
              f"{about['weights']} weights, {about['dtype']}, by steps\n{table(rows)}\n")
  result = run.workdir / "generative_sweep.json"
  write(result, json.dumps({"table": rows, "cells": records, "generative": options.to_dict()}, indent=2) + "\n")
  return [result, path, *draw(run.workdir / "generative_sweep.png", rows)]


def timed(generate: Callable[[], list[texts_lib.Text]]) -> tuple[list[texts_lib.Text], float, float]:
  """What was drawn, and what it took without compiling: where a process compiled something, all draw again.

  Returns:
    The texts; seconds; and those of all cores of this process together, which other work on the machine does not make more.
  """
  for _ in range(2):
    with _compilations() as compiled:
      start, core_start = time.perf_counter(), time.process_time()
      drawn = generate()
      seconds, core_seconds = time.perf_counter() - start, time.process_time() - core_start
    if not any(cluster.gather(bool(compiled))):
      break
  return drawn, seconds, core_seconds


@contextlib.contextmanager
def _compilations() -> Iterator[list[str]]:
  """A list that each compilation of a program enters."""
  events = []

  def listen(event: str, seconds: float, **_: Any) -> None:
    del seconds
    if event == "/jax/core/compile/backend_compile_duration":
      events.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield events
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


def _records(path: pathlib.Path) -> Iterator[dict[str, Any]]:
  """The cells in a file; a line that an interrupt has cut off is none."""
  for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else ():
    with contextlib.suppress(ValueError):
      record = records_lib.value(line)
      if isinstance(record, dict) and "settings" in record:
        yield record


def summary(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
  """Means over the seeds of a sweep's cells, one for each filter and number of steps, beside what was published for it."""
  group = lambda record: tuple(record["settings"][name] for name in ("top_p", "temperature", "steps"))
  rows = []
  for (top_p, temperature, steps), cells in itertools.groupby(sorted(records, key=group), group):
    cells = [cell | cell["statistics"] for cell in cells]
    row = {"top_p": top_p, "temperature": temperature, "steps": steps, "seeds": len(cells)}
    for name in ("perplexity", "token_perplexity", "entropy", "repetition", "seconds_per_text"):
      x = np.array([cell[name] for cell in cells], float)  # null is nan
      row |= {name: float(x.mean()), f"{name}_std": float(x.std(ddof=1)) if len(x) > 1 else math.nan}
    models = published.GENERATIVE_PERPLEXITY.get((top_p, temperature), {})
    rows.append(held_out.finite(row) | {"published": {name: of[steps] for name, of in models.items() if steps in of}})
  return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
  """The shape of the paper's table: filters down, steps across; +- is the standard deviation over seeds."""
  steps = sorted({row["steps"] for row in rows})
  cells = {(row["top_p"], row["temperature"], row["steps"]): row for row in rows}
  lines = [("top_p, temperature", "", *(f"S = {s}" for s in steps))]

  def number(row, name, digits):
    spread = row[f"{name}_std"]
    return "-" if row[name] is None else f"{row[name]:{digits}}" + ("" if spread is None else f" +- {spread:{digits}}")

  for top_p, temperature in sorted({(row["top_p"], row["temperature"]) for row in rows}, reverse=True):
    own = [cells[top_p, temperature, s] for s in steps]
    lines.append((_name(top_p, temperature), "perplexity", *(number(row, "perplexity", ".2f") for row in own)))
    lines.append(("", "token entropy", *(number(row, "entropy", ".3f") for row in own)))
    lines.append(("", "repetition", *(number(row, "repetition", ".3f") for row in own)))
    lines.append(("", "seconds a text", *(number(row, "seconds_per_text", ".2g") for row in own)))
    for name in published.GENERATIVE_PERPLEXITY.get((top_p, temperature), {}):
      numbers = [f"{row['published'][name]:.2f}" if name in row["published"] else "" for row in own]
      if any(numbers):
        lines.append(("", f"{name} medium, published", *numbers))
  return "\n".join(held_out.aligned(lines))


def draw(path: pathlib.Path, rows: Sequence[dict[str, Any]]) -> list[pathlib.Path]:
  """Draws perplexity against seconds a text, a line for each filter; returns the path, or none without matplotlib."""
  fig = pictures.new(7, 4.2)
  if fig is None:
    return []
  from matplotlib import ticker  # Here: see pictures.py.

  axes = fig.subplots()
  for top_p, temperature in sorted({(row["top_p"], row["temperature"]) for row in rows}, reverse=True):
    own = [row for row in rows if (row["top_p"], row["temperature"]) == (top_p, temperature) and row["perplexity"]]
    x, y = ([row[name] for row in own] for name in ("seconds_per_text", "perplexity"))
    spread = lambda name: [row[f"{name}_std"] or 0.0 for row in own]  # pylint: disable=cell-var-from-loop
    axes.errorbar(x, y, xerr=spread("seconds_per_text"), yerr=spread("perplexity"), marker="o", markersize=4, linewidth=1,
                  elinewidth=0.6, label=_name(top_p, temperature))
    for row in own:
      place = row["seconds_per_text"], row["perplexity"]
      axes.annotate(row["steps"], place, textcoords="offset points", xytext=(4, 5), fontsize=7)
  axes.set(xscale="log", yscale="log", xlabel="seconds a text, in batches; the numbers are steps", ylabel="perplexity")
  for axis in (axes.xaxis, axes.yaxis):  # 300 and not 3 x 10^2, also where no power of ten is near
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(ticker.LogFormatter(minor_thresholds=(2, 0.6)))
  axes.tick_params(which="both", labelsize=8)
  fig.legend(fontsize=8, loc="outside upper center", ncols=3)
  axes.grid(alpha=0.25, which="both")
  if jax.process_index() == 0:
    fig.savefig(path)
  return [path]


def _name(top_p: float, temperature: float) -> str:
  return f"top-p {top_p:g}, temperature {temperature:g}"


def progress(judge: judge_lib.Judge, texts: Sequence[np.ndarray]) -> console.Progress:
  """Who is told how many tokens of the texts are scored."""
  return console.Progress(f"scoring under {judge.name}", sum(max(len(text) - 1, 0) for text in texts), "tokens")


def fields(score: judge_lib.Score) -> dict[str, Any]:
  """A score as JSON will give it back: keys are texts, and nan is null."""
  return held_out.finite(json.loads(json.dumps(dataclasses.asdict(score))))


def write(path: pathlib.Path, content: str, mode: str = "w") -> None:
  """Writes or, in mode "a", appends whole lines to a file."""
  if jax.process_index() == 0:
    if mode == "a" and path.exists() and not path.read_bytes()[-1:] in (b"", b"\n"):
      content = "\n" + content  # an interrupt has cut the line before off
    with path.open(mode, encoding="utf-8") as f:
      f.write(content)
