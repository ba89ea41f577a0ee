"""The HTML of a report: of a run, or of several. All that comes from the files of a run is text here, hostile text too."""

from collections.abc import Sequence
import html
import math
from typing import Any

import jax
import numpy as np

from aogpt_jax import config as config_lib
from aogpt_jax import console
from aogpt_jax import models
from aogpt_jax import pages
from aogpt_jax.evaluation import attended as attended_lib
from aogpt_jax.evaluation import generative
from aogpt_jax.evaluation import generative_sweep
from aogpt_jax.evaluation import held_out
from aogpt_jax.evaluation import zero_shot
from aogpt_jax.report import charts
from aogpt_jax.report import comparison
from aogpt_jax.report.runs import RunRecord
from aogpt_jax.training import curves
from aogpt_jax.training import step as step_lib

# Of many layers, those that are drawn.
_MOST_LAYERS = 6

# What a page shows of a run's attention: by the name of an order; or why there is none.
Attention = dict[str, attended_lib.Attended] | str


def html_page(records: Sequence[RunRecord], attention: Sequence[Attention], samples: int) -> str:
  """The page of one run, or of several.

  Args:
    records: of the runs.
    attention: of each.
    samples: texts shown of a run, at most.
  """
  if len(records) == 1:
    title, body = records[0].name, _head(records[0], 1) + _sections(records[0], attention[0], samples)
  else:
    title = f"{len(records)} runs"
    body = _comparison(records) + "".join(
        f'<details class="run"><summary>{_text(r.name)}</summary>{_head(r, 2)}{_sections(r, a, samples)}</details>'
        for r, a in zip(records, attention))
  return pages.fill(__package__, title=_text(title), body=body)


def _text(value: Any) -> str:
  """Text as HTML, which does nothing else; control characters are pictures of them."""
  return html.escape(console.printable(str(value).encode(errors="replace").decode()))


def _table(rows: Sequence[Sequence[Any]], text: bool = False, best: int = -1, caption: str = "") -> str:
  """A table that scrolls by itself where it is wide; the first row is its head, where it is not empty. `best`: a row that stands out."""
  head, *others = [[f"<bdi>{_text(cell)}</bdi>" for cell in row] for row in rows]
  row = lambda cells, tag: "".join(f"<{tag}>{cell}</{tag}>" for cell in cells)
  lines = [f'<tr class="best">{row(cells, "td")}</tr>' if i == best else f"<tr>{row(cells, 'td')}</tr>"
           for i, cells in enumerate(others)]
  above = f'<p class="caption">{_text(caption)}</p>' if caption else ""  # where it does not scroll with a wide table
  top = f'<thead><tr>{row(head, "th")}</tr></thead>' if any(rows[0]) else ""
  return (f'{above}<div class="scroll"><table{" class=text" if text else ""} aria-label="{_text(caption)}">{top}<tbody>'
          f'{"".join(lines)}</tbody></table></div>')


def _note(text: str) -> str:
  return f'<p class="note">{_text(text)}</p>' if text else ""


def _signed(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
  """Rows for the terminal as a page has them: with signs that not every terminal has, and names where they are indented."""
  return [tuple(cell.strip().replace("+- ", "± ") for cell in row) for row in rows]


# --- one run ----------------------------------------------------------------------------------------


def _head(r: RunRecord, level: int) -> str:
  last = max((start["time"] for start in r.starts if isinstance(start.get("time"), str)), default="")
  about = f"{r.workdir}" + (f"; started {last}" if last else "")
  name = f"<h1>{_text(r.name)}</h1>" if level == 1 else ""
  problems = "".join(f"<li>{_text(problem)}</li>" for problem in r.problems)
  return (name + _note(about) + (f'<ul class="problems" aria-label="What is missing">{problems}</ul>' if problems else "")
          + f'<dl class="tiles">{"".join(f"<div><dt>{_text(k)}</dt><dd>{_text(v)}</dd></div>" for k, v in _tiles(r))}</dl>')


def _tiles(r: RunRecord) -> list[tuple[str, str]]:
  """The figures that a reader looks for first."""
  found, config = [], r.config
  if config is not None:
    found.append(("state", f"finished, {r.step:,} steps" if r.is_finished else f"step {r.step:,} of {config.steps:,}"))
    found.append(("tokens seen", charts.number(r.step * config.batch_size * config.model.block_size)))
    if parameters := _parameters(config):
      found.append(("parameters", f"{parameters:,}"))
  elif r.step:
    found.append(("state", f"step {r.step:,}"))
  evaluation = r.evaluations.get("eval_validation") or next(iter(r.evaluations.values()), None)
  if evaluation:
    for name, l in evaluation.found.likelihoods.items():
      found.append((f"{name.replace('_', ' ')}, nats/token, {evaluation.name}", f"{l.nats_per_token:.4f} ± {l.stderr_sequences:.4f}"))
  else:
    for name, c in curves.evaluations(r.records).items():
      found.append((f"{name.replace('_', ' ')}, nats/token, last evaluation", f"{c.values[-1]:.4f} ± {c.errors[-1]:.4f}"))
  if (speed := curves.curve(r.records, "tokens_per_second")) is not None:
    found.append(("tokens a second, median", charts.number(float(np.median(speed.values)))))
  if r.saved:
    found.append(("checkpoints", ", ".join(f"{step:,}" for step in r.saved[-4:])))
  return found


def _parameters(config) -> int:
  """How many a model has, 0 where it can't be built here."""
  config = config.copy_and_resolve_references()
  config.model.attention = "xla"  # the run's devices need not be here
  try:
    shapes = jax.eval_shape(lambda: step_lib.init_params(models.build_model(config), 0))
  except (ValueError, TypeError):
    return 0
  return sum(x.size for x in jax.tree.leaves(shapes))


def _sections(r: RunRecord, attention: Attention, samples: int) -> str:
  parts = [("Curves", _curves(r)), ("Attention", _attention(attention)), ("Samples", _samples(r, samples)),
           ("Evaluation", _evaluations(r)), ("Config", _config(r)), ("Environment", _environment(r))]
  return "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in parts if content)


def _entropies(r: RunRecord) -> dict[str, float]:
  evaluation = r.evaluations.get("eval_validation")
  return {"unigram entropy": evaluation.entropies.unigram, "bigram entropy": evaluation.entropies.bigram} if evaluation else {}


def _curves(r: RunRecord) -> str:
  found = []
  evaluated = curves.evaluations(r.records)
  lines = []
  if (loss := curves.curve(r.records, "loss", "training batch")) is not None:
    lines.append(charts.Line(loss.label, loss.steps, loss.values, colour=-1, thin=True))
    s = curves.smoothed(loss)
    lines.append(charts.Line(s.label, s.steps, s.values, colour=-1))
  lines += [charts.Line(c.label, c.steps, c.values, c.errors, colour=i, marks=True) for i, c in enumerate(evaluated.values())]
  orders = f"Training batches are in the orders of the config, {r.config.orders}. " if r.config is not None else ""
  levels = _entropies(r)
  found.append(charts.chart(
      "Loss", lines, "step", "nats per token", top=curves.top(list(evaluated.values()), list(levels.values())), levels=levels,
      note=orders + "Evaluations are of validation text; bands are standard errors."))
  perplexity = lambda c: np.exp(np.minimum(c.values, 700))
  quality = [charts.Line(c.label, c.steps, perplexity(c), perplexity(c) * c.errors, colour=i, marks=True)
             for i, c in enumerate(evaluated.values())]
  found.append(charts.chart("Quality against steps of training", quality, "step", "perplexity per token", log_y=True))
  for title, field, label, options in (
      ("Learning rate", "learning_rate", "learning rate", {}), ("Throughput", "tokens_per_second", "tokens per second", {"bottom": 0.0}),
      ("Gradient norm", "grad_norm", "before clipping", {"log_y": True}),
      ("Utilisation", "model_flop_utilisation", "share of the devices' peak", {"bottom": 0.0})):
    if (c := curves.curve(r.records, field)) is not None:
      found.append(charts.chart(title, [charts.Line(label, c.steps, c.values)], "step", label, **options))
  if r.sweep:
    found.append(_sweep_chart(r))
  found = [chart for chart in found if chart]
  if not found:
    return _note("There are none: metrics.jsonl has no figures yet.")
  found[0] = found[0].replace('class="chart"', 'class="chart wide"', 1)
  return f'<div class="charts">{"".join(found)}</div>'


def _sweep_chart(r: RunRecord) -> str:
  rows = [row for row in r.sweep.get("table", []) if isinstance(row, dict) and row.get("perplexity")]
  lines = []
  for i, (top_p, temperature) in enumerate(dict.fromkeys((row["top_p"], row["temperature"]) for row in rows)):
    own = sorted((row for row in rows if (row["top_p"], row["temperature"]) == (top_p, temperature)), key=lambda row: row["steps"])
    lines.append(charts.Line(f"top-p {top_p:g}, temperature {temperature:g}", np.array([row["steps"] for row in own], float),
                             np.array([row["perplexity"] for row in own], float), colour=i, marks=True))
  return charts.chart("Quality against steps of sampling", lines, "steps in which a text is drawn", "perplexity under the judge",
                      log_x=True, log_y=True)


def _attention(attention: Attention) -> str:
  if isinstance(attention, str):
    return _note(attention)
  found, start = [], []
  for order, a in attention.items():
    name = order.replace("_", " ")
    chosen = np.unique(np.linspace(0, len(a.by_age) - 1, min(len(a.by_age), _MOST_LAYERS)).round().astype(int))
    views = [("age", "age in the order", a.by_age, a.even_by_age, 0)]
    if order != "left_to_right":  # where the distance is the age and one
      views.append(("distance", "distance in the text from the target", a.by_distance, a.even_by_distance, 1))
    for what, label, weights, even, first in views:
      x = np.arange(len(even)) + first
      lines = [charts.Line("spread evenly", x, even, colour=-1, dash=1)]
      lines += [charts.Line(f"layer {layer + 1}", x, weights[layer], colour=i, dash=i // charts.COLOURS)
                for i, layer in enumerate(chosen)]
      found.append(charts.chart(f"By {what}, {name}", lines, label, "mean weight of an entry", log_y=True))
    start.append((name, f"{100 * a.even_start:.1f}%", *(f"{100 * x:.1f}%" for x in a.start[chosen])))
    head = ("start entry", "spread evenly", *(f"layer {layer + 1}" for layer in chosen))
  some = next(iter(attention.values()))
  return (_note("How much queries attend to the tokens that they see, mean over heads and queries of "
                f"{some.sequences} held-out sequences, EMA weights. Age 0 is the token that has just become known, age 1 the one "
                "before it in the order. A line above the even one is attended to more than its share.")
          + f'<div class="charts">{"".join(found)}</div>'
          + _table([head, *start], caption="Weight of the start entry, which holds no token"))


def _samples(r: RunRecord, most: int) -> str:
  if not r.samples:
    return _note("There are none: --mode=sample draws some into samples.jsonl.")
  by_order = {}
  for sample in r.samples:
    by_order.setdefault(str(sample.get("order")), []).append(sample)
  share, found = max(most // len(by_order), 1), []
  for order, texts in by_order.items():
    found.append(f"<h3><bdi>{_text(order[:80])}</bdi></h3>")
    for sample in texts[:share]:
      sampler = sample["sampler"] if isinstance(sample.get("sampler"), dict) else {}
      about = [f"{sample.get('evaluations', '?')} evaluations"]
      about += [f"{name} {sampler[field]}" for name, field in (
          ("temperature", "temperature"), ("top-p", "top_p"), ("step", "checkpoint_step")) if field in sampler]
      about += [f"prompt: {sample['prompt']}"] if sample.get("prompt") else []
      found.append(f'{_note(", ".join(about))}<pre dir="auto">{_text(sample["text"])}</pre>')
  shown = sum(min(len(texts), share) for texts in by_order.values())
  return "".join(found) + (_note(f"{shown} of {len(r.samples):,} texts of samples.jsonl.") if shown < len(r.samples) else "")


def _evaluations(r: RunRecord) -> str:
  found = []
  for e in r.evaluations.values():
    weights = {"ema": "EMA"}.get(e.record.get("weights"), e.record.get("weights"))
    about = f"{e.name}: {e.record.get('source', '')}, step {e.record.get('step', '?')}, {weights} weights"
    first = next(iter(e.found.likelihoods.values()))
    for i, rows in enumerate(table for table in held_out.rows(e.found, e.entropies) if table):
      found.append(_table(_signed(rows), caption=about if i == 0 else ""))
    found.append(_note(f"± are standard errors over {first.sequences:,} sequences, {first.tokens:,} tokens."))
  if r.zero_shot:
    perplexities, details = zero_shot.tables(r.zero_shot)
    found += [_table(_signed(perplexities), caption="zero-shot perplexity"), _table(_signed(details))]
  if r.generative.get("results"):
    found.append("<h3>Generated texts</h3>" + _pre(lambda: generative.table(r.generative["results"])))
  if r.sweep.get("table"):
    found.append("<h3>Generated texts by steps</h3>" + _pre(lambda: generative_sweep.table(r.sweep["table"])))
  return "".join(found) or _note("There are no tables: --mode=eval, or the end of a run, writes eval_validation.json.")


def _pre(table) -> str:
  try:
    return f'<pre class="table">{_text(table())}</pre>'
  except (KeyError, TypeError, ValueError) as e:
    return _note(f"Its table can't be read ({type(e).__name__}: {e}).")


def _config(r: RunRecord) -> str:
  if r.config is None:
    return ""
  flat, default = config_lib.flat(r.config), config_lib.flat(config_lib.default_config())
  changed = [(field, _value(value), _value(default.get(field))) for field, value in flat.items() if value != default.get(field)]
  whole = _table([("field", "value"), *((field, _value(value)) for field, value in flat.items())], text=True)
  return (_table([("field", "value", "default"), *changed], text=True)
          + f"<details><summary>All {len(flat)} fields</summary>{whole}</details>")


def _value(value: Any) -> str:
  return repr(value)


def _environment(r: RunRecord) -> str:
  starts = [start for start in r.starts if isinstance(start.get("versions"), dict)]
  if not starts:
    return _note("It is not known: the run has no starts.jsonl.")
  last = starts[-1]
  of = lambda field: last.get(field, "?")
  command = of("command")
  rows = [("", ""), ("command", " ".join(map(str, command)) if isinstance(command, list) else command),
          ("devices", f"{of('devices')} x {of('device_kind')} ({of('platform')})"), ("processes", of("processes")),
          ("machine", f"{of('cores')} cores, {of('machine')}, {of('system')}"), ("Python", of("python")),
          *((name, version) for name, version in last["versions"].items()),
          ("commit", of("commit") or "not known: the code is not in a git checkout")]
  devices = lambda start: f"{start.get('devices', '?')} x {start.get('device_kind', '?')}"
  several = [("started", "from step", "devices", "commit")]
  several += [(s.get("time", "?"), f"{s['step']:,}", devices(s), str(s.get("commit", ""))[:12]) for s in starts]
  return _table(rows, text=True) + (_table(several, caption="All starts") if len(starts) > 1 else "")


# --- several runs -----------------------------------------------------------------------------------


def _comparison(records: Sequence[RunRecord]) -> str:
  found = [f"<h1>{len(records)} runs compared</h1>", _note(", ".join(str(r.workdir) for r in records))]
  problems = "".join(f"<li>{_text(f'{r.name}: {problem}')}</li>" for r in records for problem in r.problems)
  found.append(f'<ul class="problems" aria-label="What is missing">{problems}</ul>' if problems else "")
  found.append(f"<section><h2>Which is better</h2>{_verdicts(records)}</section>")
  fields = comparison.differing([r.config for r in records])
  rows = [("field", *(r.name for r in records))]
  rows += [(field, *("not known" if r.config is None else _value(value) for r, value in zip(records, values)))
           for field, values in fields.items()]
  differs = _table(rows, text=True) if fields else _note("No field of their configs differs.")
  found.append(f"<section><h2>What differs</h2>{differs}</section>")
  found.append(f"<section><h2>Curves</h2>{_curves_together(records)}</section><h2>The runs</h2>")
  return "".join(found)


def _verdicts(records: Sequence[RunRecord]) -> str:
  found = comparison.compare(records)
  if not found:
    return _note("Nothing was evaluated in the same way in two of the runs, so that their losses can't be compared.")
  parts = [f'<p class="answer">{_text(c.sentence)}</p>' for c in found]
  for c in found:
    rows = [("run", "step", c.unit, "", "above the lowest", "95%", "")]
    for loss in c.losses:
      is_best = math.isnan(loss.margin) and loss.difference == 0
      rows.append((loss.run, f"{loss.step:,}", f"{loss.value:.4f}", "" if math.isnan(loss.stderr) else f"± {loss.stderr:.4f}",
                   "" if is_best else f"{loss.difference:.4f}", "" if math.isnan(loss.margin) else f"± {loss.margin:.4f}",
                   loss.verdict + (", paired" if loss.paired and not is_best else "")))
    parts.append(_table(rows, best=0, caption=f"{c.distribution.replace('_', ' ')}: {c.source}"))
    parts += [_note(remark) for remark in c.remarks]
  parts.append(_note("± after a loss is its standard error over the sequences; intervals of differences are at 95%, by the same "
                     "sequences where it says paired. They do not know how much another seed would have changed."))
  return "".join(parts)


def _curves_together(records: Sequence[RunRecord]) -> str:
  found = []
  evaluated = {r.name: curves.evaluations(r.records) for r in records}
  for distribution in dict.fromkeys(d for of in evaluated.values() for d in of):
    own = [(i, of[distribution]) for i, of in enumerate(evaluated.values()) if distribution in of]
    lines = [charts.Line(records[i].name, c.steps, c.values, c.errors, colour=i, dash=i // charts.COLOURS, marks=True)
             for i, c in own]
    found.append(charts.chart(f"Validation, {distribution.replace('_', ' ')}", lines, "step", "nats per token",
                              top=curves.top([c for _, c in own])))
  for title, field, label, smooth, options in (
      ("Training batches, smoothed", "loss", "nats per token", True, {}),
      ("Learning rate", "learning_rate", "learning rate", False, {}),
      ("Throughput", "tokens_per_second", "tokens per second", False, {"bottom": 0.0})):
    lines, highest = [], None
    for i, r in enumerate(records):
      if (c := curves.curve(r.records, field)) is not None:
        c = curves.smoothed(c) if smooth else c
        lines.append(charts.Line(r.name, c.steps, c.values, colour=i, dash=i // charts.COLOURS))
    if smooth and lines:  # the first steps are far above all that follows
      highest = max(float(line.y[len(line.y) // 10 :].max()) for line in lines) * 1.02
    found.append(charts.chart(title, lines, "step", label, top=highest, **options))
  found = [chart for chart in found if chart]
  return f'<div class="charts">{"".join(found)}</div>' if found else _note("There are none: no run has figures in metrics.jsonl.")
