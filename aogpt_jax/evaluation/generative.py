"""Generative perplexity of texts, and of a sweep over samplers, beside what their sampler was and how varied they are.

Perplexity alone says little: it falls with the temperature and with top-p, down to one token again and again. So each figure has
the entropy of its texts and the settings that they were drawn with beside it; for texts of other origin these are "unknown".
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import glob
import hashlib
import itertools
import json
import math
import pathlib
import time
from typing import Any

import jax
import numpy as np

from aogpt_jax import config as config_lib
from aogpt_jax import console
from aogpt_jax.data import tokenizers
from aogpt_jax.evaluation import held_out
from aogpt_jax.evaluation import judge as judge_lib
from aogpt_jax.evaluation import published
from aogpt_jax.run import Run
from aogpt_jax.sampling import texts as texts_lib
from aogpt_jax.training import checkpoints

# What is known of the sampler of a text: fields of a line of samples.jsonl, or of its field `sampler`.
SETTINGS = ("order", "seed", "steps", "temperature", "top_p", "top_p_rule", "top_k", "counts", "schedule", "contexts", "dtype",
            "weights", "checkpoint_step")
UNKNOWN = "unknown"
_NAMED = 5  # texts that a warning names


@dataclasses.dataclass(frozen=True)
class Sample:
  """A text, what messages call it, and the SETTINGS that it was drawn with."""

  text: str
  name: str
  settings: dict[str, Any]


def evaluate(run: Run) -> list[pathlib.Path]:
  """Measures and shows what config.eval.generative asks for: texts of files or, where it has steps, of a sweep.

  Returns:
    The files that it has written: results as JSON, and of a sweep its cells and a picture too.

  Raises:
    ConfigError: a field can't be used; the message says which and what to do.
    OSError: files that can't be read or written, or no network.
  """
  options = run.config.eval.generative
  if options.steps:
    params, step = checkpoints.load_ema(run.workdir, run.config, run.mesh)
    return _sweep(run, _judge(run), params, step)
  pattern = options.samples or glob.escape(str(run.workdir / "samples.jsonl"))
  try:
    samples, files = read_samples(pattern)
  except ValueError as e:
    raise config_lib.ConfigError(f"config.eval.generative.samples: {e}") from None
  except FileNotFoundError as e:
    raise FileNotFoundError(f"config.eval.generative.samples: {e}") from None
  return _measure(run, _judge(run), pattern, samples, files)


def read_samples(pattern: str) -> tuple[list[Sample], dict[str, str]]:
  """Texts of files.

  Args:
    pattern: a glob. A file that ends in .jsonl has a text in the field "text" of each line; any other file is one text.

  Returns:
    The texts, and the sha256 hex digest of each file.

  Raises:
    FileNotFoundError: no file matches.
    ValueError: a line is no JSON object with a text, or a file is not UTF-8.
  """
  paths = [pathlib.Path(path) for path in sorted(glob.glob(str(pathlib.Path(pattern).expanduser()), recursive=True))]
  paths = [path for path in paths if path.is_file()]
  if not paths:
    raise FileNotFoundError(f"{pattern} matches no file; give .jsonl files with a field \"text\", or files of a text each.")
  samples, files = [], {}
  for path in paths:
    content = path.read_bytes()
    files[str(path)] = hashlib.sha256(content).hexdigest()
    try:
      text = content.decode("utf-8")
    except UnicodeDecodeError as e:
      raise ValueError(f"{path}: is not UTF-8 (byte {e.start}); convert it.") from None
    if path.suffix != ".jsonl":
      samples.append(Sample(text, str(path), dict.fromkeys(SETTINGS, UNKNOWN)))
      continue
    for number, line in enumerate(text.split("\n"), 1):
      if line.strip():
        samples.append(_sample(line, f"{path}:{number}"))
  return samples, files


def _sample(line: str, name: str) -> Sample:
  try:
    record = json.loads(line)
    record["text"].encode()  # no half of a surrogate pair, which is no text
  except (ValueError, TypeError, KeyError, AttributeError):
    raise ValueError(f'{name}: is no JSON object with a text in the field "text", as {{"text": "Once upon a time"}}.') from None
  sampler = record.get("sampler")
  known = record | (sampler if isinstance(sampler, dict) else {})
  return Sample(record["text"], name, {field: known.get(field, UNKNOWN) for field in SETTINGS})


def _judge(run: Run) -> judge_lib.Judge:
  options = run.config.eval.generative
  try:
    tokenizer = tokenizers.load(options.tokenizer)
  except (OSError, ValueError) as e:
    raise config_lib.ConfigError(str(e).replace("data.tokenizer", "config.eval.generative.tokenizer")) from None
  try:
    return judge_lib.load(options.judge, tokenizer, dtype=options.dtype, mesh=run.mesh, batch_size=options.batch_size)
  except (OSError, ValueError, ImportError) as e:
    raise config_lib.ConfigError(f"config.eval.generative.judge: {e}") from None


def _measure(run, judge, pattern, samples, files) -> list[pathlib.Path]:
  """Scores texts, those of equal settings together."""
  texts = [judge.encode(sample.text) for sample in samples]
  if not any(len(text) > 1 for text in texts):
    raise config_lib.ConfigError(f"config.eval.generative.samples: none of the {len(texts)} texts of {pattern} has two tokens or "
                                 "more, so that there is nothing to score; give others.")
  progress = console.Progress(f"scoring under {judge.name}", sum(max(len(text) - 1, 0) for text in texts), "tokens")
  nats = judge.nll(texts, progress)
  groups = {}
  for i, sample in enumerate(samples):
    # The seed names texts, and does not tell samplers apart.
    key = json.dumps(sample.settings | {"seed": 0})
    groups.setdefault(key, []).append(i)
  found, warnings = [], []
  for members in groups.values():
    of = lambda values: [values[i] for i in members]  # pylint: disable=cell-var-from-loop
    seeds = sorted({sample.settings["seed"] for sample in of(samples)}, key=str)
    score = judge_lib.summarise(of(nats), of(texts), judge.model.block_size)
    warnings += warnings_of(of(texts), [sample.name for sample in of(samples)], judge.model.block_size)
    sampler = samples[members[0]].settings | {"seed": seeds[0] if len(seeds) == 1 else seeds}
    found.append({"sampler": sampler, "samples": len(members), **_fields(score)})
  console.say(f"\n{pattern} under {judge.name}, {judge.record['dtype']}, without the first token of each text\n{table(found)}")
  console.say("\n".join(["", *warnings, ""]) if warnings else "")
  record = {"judge": judge.record, "pattern": pattern, "files": files, "results": found, "warnings": warnings,
            "generative": run.config.eval.generative.to_dict()}
  path = run.workdir / "generative.json"
  _write(path, json.dumps(record, indent=2) + "\n")
  return [path]


def warnings_of(texts: Sequence[np.ndarray], names: Sequence[str], window: int) -> list[str]:
  """What the reader of a figure has to know of its texts of token ids, a line for each kind."""
  kinds = (
      ("warning", "of fewer than two tokens, and not scored", lambda text: len(text) < 2),
      ("warning", "one token again and again, of entropy 0", lambda text: len(text) > 1 and (text == text[0]).all()),
      ("note", f"longer than the judge's window of {window} tokens, and scored in windows {window // 2} tokens apart",
       lambda text: len(text) > window))
  lines = []
  for kind, what, holds in kinds:
    those = [name for text, name in zip(texts, names) if holds(text)]
    if those:
      more = f" and {len(those) - _NAMED} more" if len(those) > _NAMED else ""
      lines.append(f"{kind}: {len(those)} of {len(texts)} texts are {what}: {', '.join(those[:_NAMED])}{more}")
  return lines


def table(found: Sequence[dict[str, Any]]) -> str:
  """Results, a row for each sampler, and below what is known of the samplers. Standard errors are over the texts."""
  rows = [("sampler", "texts", "tokens", "perplexity", "", "exp(mean NLL)", "", "token entropy", "distinct-1", "-2", "-3", "-4",
           "repetition")]
  number = lambda x, digits: "-" if x is None else f"{x:.{digits}f}"
  error = lambda x: "" if x is None else f"+- {x:.2f}"
  for i, r in enumerate(found, 1):
    s = r["statistics"]
    rows.append((
        f"{i}: {r['sampler']['order']}", f"{r['texts']:,}", f"{r['tokens']:,}",
        number(r["perplexity"], 2), error(r["perplexity_stderr"]),
        number(r["token_perplexity"], 2), error(r["token_perplexity_stderr"]), number(s["entropy"], 3),
        *(number(s["distinct"][str(n)], 3) for n in (1, 2, 3, 4)), number(s["repetition"], 3)))
  lines = held_out.aligned(rows)
  for i, r in enumerate(found, 1):
    lines.append(f"{i}: " + ", ".join(f"{name} {value}" for name, value in r["sampler"].items()))
  return "\n".join(lines)


def _sweep(run: Run, judge: judge_lib.Judge, params: Any, step: int) -> list[pathlib.Path]:
  """Draws and scores the texts of each cell that an earlier call has not left in generative_sweep.jsonl."""
  options, sample = run.config.eval.generative, run.config.sample
  path = run.workdir / "generative_sweep.jsonl"
  shared = texts_lib.options(sample) | {"order": options.order, "num_samples": options.num_samples}
  about = {"judge": judge.record, "dtype": run.config.model.dtype, "weights": "ema", "checkpoint_step": step,
           "devices": f"{run.mesh.size} x {run.mesh.devices.flat[0].device_kind}"}
  # Seed by seed, so that a whole table is there as soon as can be.
  cells = [shared | {"seed": sample.seed + seed, "top_p": top_p, "temperature": temperature, "steps": steps}
           for seed in range(options.seeds) for top_p, temperature in options.filters for steps in options.steps]
  key = lambda cell: json.dumps(cell | about, sort_keys=True)
  kept = {json.dumps(record["settings"], sort_keys=True): record for record in _records(path)}
  left = [cell for cell in cells if key(cell) not in kept]
  if len(left) < len(cells):
    console.say(f"{len(cells) - len(left)} of {len(cells)} cells are in {path} already")
  progress = console.Progress("sweep", sum(cell["steps"] for cell in left), "steps")
  done = 0
  for cell in left:
    drawn, seconds = _timed(functools.partial(texts_lib.generate, run.model, params, run.tokenizer, mesh=run.mesh, **cell))
    texts = [judge.encode(text.text) for text in drawn]
    names = [f"sample {text.sample_index + 1}" for text in drawn]
    record = {"settings": cell | about, **_fields(judge.score(texts)), "seconds_per_text": seconds / len(drawn),
              "evaluations": float(np.mean([text.evaluations for text in drawn])),
              "warnings": warnings_of(texts, names, judge.model.block_size)}
    kept[key(cell)] = record
    _write(path, json.dumps(record) + "\n", "a")
    done += cell["steps"]
    what = f"{_name(cell['top_p'], cell['temperature'])}, {cell['steps']} steps, seed {cell['seed']}"
    number = lambda x: "-" if x is None else f"{x:.2f}"
    console.say("\n".join([
        f"{what}: perplexity {number(record['perplexity'])}, entropy {number(record['statistics']['entropy'])}, "
        f"{record['seconds_per_text']:.3g} s a text; {progress.line(done)}", *(f"  {line}" for line in record["warnings"])]))
  records = [kept[key(cell)] for cell in cells]
  rows = summary(records)
  console.say(f"\nperplexity under {judge.name} of {options.num_samples} texts, {options.order}, step {step:,}, EMA weights, "
              f"{about['dtype']}, by steps\n{sweep_table(rows)}\n")
  result = run.workdir / "generative_sweep.json"
  _write(result, json.dumps({"table": rows, "cells": records, "generative": options.to_dict()}, indent=2) + "\n")
  return [result, path, draw(run.workdir / "generative_sweep.png", rows)]


def _timed(generate: Callable[[], list[texts_lib.Text]]) -> tuple[list[texts_lib.Text], float]:
  """What was drawn, and the seconds that it took without compiling: where something was compiled, it is drawn again."""
  for _ in range(2):
    with _compilations() as compiled:
      start = time.perf_counter()
      drawn = generate()
      seconds = time.perf_counter() - start
    if not compiled:
      break
  return drawn, seconds


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
  for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else ():
    with contextlib.suppress(json.JSONDecodeError):
      if line:
        yield json.loads(line)


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


def sweep_table(rows: Sequence[dict[str, Any]]) -> str:
  """The shape of the paper's table: filters down, steps across; +- is the standard deviation over seeds."""
  steps = sorted({row["steps"] for row in rows})
  cells = {(row["top_p"], row["temperature"], row["steps"]): row for row in rows}
  lines = [("top_p, temperature", "", *(f"S = {s}" for s in steps))]

  def number(row, name, digits):
    spread = row[f"{name}_std"]
    return "-" if row[name] is None else f"{row[name]:.{digits}f}" + ("" if spread is None else f" +- {spread:.{digits}f}")

  for top_p, temperature in sorted({(row["top_p"], row["temperature"]) for row in rows}, reverse=True):
    own = [cells[top_p, temperature, s] for s in steps]
    lines.append((_name(top_p, temperature), "perplexity", *(number(row, "perplexity", 2) for row in own)))
    lines.append(("", "token entropy", *(number(row, "entropy", 3) for row in own)))
    lines.append(("", "repetition", *(number(row, "repetition", 3) for row in own)))
    lines.append(("", "seconds a text", *(number(row, "seconds_per_text", 3) for row in own)))
    for name in published.GENERATIVE_PERPLEXITY.get((top_p, temperature), {}):
      if any(name in row["published"] for row in own):
        numbers = [row["published"].get(name) for row in own]
      lines.append(("", f"{name} medium, published", *("" if x is None else f"{x:.2f}" for x in numbers)))
  return "\n".join(held_out.aligned(lines))


def draw(path: pathlib.Path, rows: Sequence[dict[str, Any]]) -> pathlib.Path:
  """Draws perplexity against seconds a text, a line for each filter, and returns the path."""
  from matplotlib import figure  # Here: it costs half a second. The figure has no global state and needs no display.

  fig = figure.Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
  axes = fig.subplots()
  for top_p, temperature in sorted({(row["top_p"], row["temperature"]) for row in rows}, reverse=True):
    own = [row for row in rows if (row["top_p"], row["temperature"]) == (top_p, temperature) and row["perplexity"]]
    x, y = ([row[name] for row in own] for name in ("seconds_per_text", "perplexity"))
    spread = lambda name: [row[f"{name}_std"] or 0.0 for row in own]  # pylint: disable=cell-var-from-loop
    axes.errorbar(x, y, xerr=spread("seconds_per_text"), yerr=spread("perplexity"), marker="o", markersize=4, capsize=2,
                  label=_name(top_p, temperature))
    for row in own:
      place = row["seconds_per_text"], row["perplexity"]
      axes.annotate(row["steps"], place, textcoords="offset points", xytext=(4, 5), fontsize=7)
  axes.set(xscale="log", yscale="log", xlabel="seconds a text, in batches; the numbers are steps", ylabel="perplexity")
  axes.legend(fontsize=8)
  axes.grid(alpha=0.25, which="both")
  if jax.process_index() == 0:
    fig.savefig(path)
  return path


def _name(top_p: float, temperature: float) -> str:
  return f"top-p {top_p:g}, temperature {temperature:g}"


def _fields(score: judge_lib.Score) -> dict[str, Any]:
  """A score as JSON will give it back: keys are texts, and nan is null."""
  return held_out.finite(json.loads(json.dumps(dataclasses.asdict(score))))


def _write(path: pathlib.Path, content: str, mode: str = "w") -> None:
  if jax.process_index() == 0:
    if mode == "a" and path.exists() and not path.read_bytes()[-1:] in (b"", b"\n"):
      content = "\n" + content  # an interrupt has cut the line before off
    with path.open(mode, encoding="utf-8") as f:
      f.write(content)
