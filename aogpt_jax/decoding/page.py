"""The page of what the samplers do: tables, pictures and what they say, all computed from the results that are kept beside it."""

from collections.abc import Callable, Iterable, Sequence
import itertools
import math
import pathlib
from typing import Any

import numpy as np

from aogpt_jax.decoding import quality
from aogpt_jax.decoding import speed
from aogpt_jax.evaluation import held_out

Cells = list[dict[str, Any]]
# Colours of the pictures' lines, and the order of the tables.
_FAMILIES = {"left to right": "black", "fixed": "C0", "binomial": "C1", "spaced": "C2", "speculative": "C3", "burst": "C4",
             "adaptive, probability": "C5", "adaptive, margin": "C6", "adaptive, entropy": "C7"}
_AIM = 3  # how many times the accuracy of random order the margin's should have


def write(path: pathlib.Path, results: dict[str, Any]) -> list[pathlib.Path]:
  """Writes the page and its pictures beside it, in a directory of the page's name; returns the paths.

  Args:
    path: of the page, in Markdown.
    results: what `__main__` keeps: "about", "units", and cells of "quality", "speed" and "sudoku".
  """
  pictures = path.with_suffix("")
  pictures.mkdir(parents=True, exist_ok=True)
  written, parts = [], ["# Decoding", _introduction(results)]
  for unit, cells in _by(results["quality"], "unit"):
    picture = _draw_quality(pictures / f"quality_{unit}.png", cells)
    written.append(picture)
    timed = [cell for cell in results["speed"] if cell["unit"] == unit]
    parts.append(_model(unit, results, cells, timed, f"{pictures.name}/{picture.name}"))
  if results["sudoku"]:
    written.append(_draw_sudoku(pictures / "sudoku.png", results["sudoku"]))
    parts.append(_sudoku(results, f"{pictures.name}/{written[-1].name}"))
  path.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
  return [path, *written]


def _by(cells: Cells, *names: str) -> Iterable[tuple[Any, Cells]]:
  """Cells of equal fields together, in the order in which they first come; the key is a value where it is one field."""
  groups = {}
  for cell in cells:
    groups.setdefault(tuple(cell[name] for name in names), []).append(cell)
  return [(key[0] if len(names) == 1 else key, group) for key, group in groups.items()]


def _mean(cells: Cells, name: str) -> tuple[float, float]:
  """Over the seeds, and the standard deviation over them; nan for a single one."""
  x = np.array([cell[name] for cell in cells], float)
  return float(x.mean()), float(x.std(ddof=1)) if len(x) > 1 else math.nan


def _cell(cells: Cells, name: str, digits: int, scale: float = 1.0) -> str:
  if any(name not in cell for cell in cells):
    return ""
  mean, spread = _mean(cells, name)
  return f"{scale * mean:.{digits}f}" + (f" ± {scale * spread:.{digits}f}" if math.isfinite(spread) else "")


def _introduction(results: dict[str, Any]) -> str:
  about = results["about"]
  return (
      "What each sampler of `sampling/` takes and gives, measured on models trained here. Made by "
      f"`{about['command']}`; training took {about['core_seconds'] / 3600:.1f} core hours. Measured on {about['machine']}, "
      f"{about['versions']}. Where nothing else is said, temperature is 1 without top-p or top-k, and ± is the standard "
      f"deviation over {about['seeds']} seeds. An evaluation is a forward pass that draws tokens; of a burst, the draft is one "
      "and the check of all orders another. Core seconds are those of all cores together, which other work on the machine does "
      "not make more.")


def _model(unit: str, results: dict[str, Any], cells: Cells, timed: Cells, picture: str) -> str:
  about, judge, name = results["units"][unit], results["units"]["judge"], unit.replace("_", " ")
  losses = ", ".join(f"{x:.3f} {'in any order' if label == 'any_order' else label.replace('_', ' ')}"
                     for label, x in about["nats_per_token"].items())
  parts = [
      f"## {name.capitalize()}",
      f"{about['parameters']:,} parameters, blocks of {about['block_size']} bytes of English prose, {about['steps']:,} steps of "
      f"{about['tokens_per_step']:,} tokens. Validation text: {losses} nats a byte.",
      *_equal_distribution(timed),
      f"### Quality against evaluations and seconds: {name}",
      f"{cells[0]['texts']} texts for each seed and row, in batches. NLL is in nats a byte: under the model itself, token by "
      "token, in the order in which the text was drawn and from left to right, and under the judge, a model of "
      f"{judge['parameters']:,} parameters that was trained from left to right alone and has "
      f"{judge['nats_per_token']['left_to_right']:.3f} on validation text. Generative perplexity is the judge's, of a byte, as "
      "the mean over texts. Entropy is of the bytes of a text, in nats; repetition is the share of its 4-grams that were there "
      "before.",
      f"![Judge's nats a byte against evaluations and against core seconds, a line for each sampler, for {name}]({picture})",
      _quality_table(cells),
      "\n".join(f"* {line}" for line in _of_quality(cells))]
  return "\n\n".join(part for part in parts if part)


def _rows(cells: Cells) -> list[tuple[str, str, Cells]]:
  """(family, what tells its cells apart, the cells of all seeds)."""
  keyed = [cell | {"key": repr(sorted(cell["settings"].items()))} for cell in cells]
  found = [(family, _setting(family, group[0]["settings"]), group) for (family, _), group in _by(keyed, "family", "key")]
  rank = {family: i for i, family in enumerate((*_FAMILIES, quality.HELD_OUT))}
  return sorted(found, key=lambda row: rank.get(row[0], len(rank)))


def _setting(family: str, settings: dict[str, Any]) -> str:
  for name in ("window", "checks", "steps"):
    if name in settings:
      return f"{name} {settings[name]}" if name != "steps" else f"{settings[name]} steps"
  return "1 a step" if family == "left to right" else ""


def _quality_table(cells: Cells) -> str:
  # Heading -> figure, digits and scale.
  columns = {"evaluations": ("evaluations", 1), "ms a text": ("seconds", 1, 1000.0),
             "core ms a text": ("core_seconds", 1, 1000.0), "NLL, its order": ("nll", 3),
             "NLL, left to right": ("nll_left_to_right", 3), "judge NLL": ("judge_nll", 3),
             "generative perplexity": ("judge_perplexity", 1), "entropy": ("entropy", 3), "repetition": ("repetition", 3)}
  rows = [("sampler", "", *columns)]
  rows += [(family, setting, *(_cell(group, *column) for column in columns.values())) for family, setting, group in _rows(cells)]
  return held_out.markdown(rows)


def _of_quality(cells: Cells) -> list[str]:
  """What the table says, by its own numbers."""
  rows = {(family, setting): group for family, setting, group in _rows(cells)}
  of = lambda key, name: _mean(rows[key], name)
  whole = max((key for key in rows if key[0] == "fixed"), key=lambda key: of(key, "evaluations")[0], default=None)
  lines = []
  if whole is None:
    return lines
  exact = [key for key in rows if key[0] == "speculative"]
  if exact:
    least = min(exact, key=lambda key: of(key, "evaluations")[0])
    off = max(abs(of(key, "nll")[0] - of(whole, "nll")[0]) for key in exact)
    spread = max(of(key, "nll")[1] for key in (*exact, whole))
    lines.append(
        "Speculative, whatever the window, draws from the distribution of one token a step: NLL in its own order differs from "
        f"that of {whole[1]} by {off:.3f} at most; the largest standard deviation over seeds is {spread:.3f}. With {least[1]} it "
        f"takes {of(least, 'evaluations')[0]:.1f} evaluations instead of {of(whole, 'evaluations')[0]:.0f}.")
  near = lambda key, other: abs(of(key, "evaluations")[0] - of(other, "evaluations")[0]) <= 0.5
  for name in ("spaced", "binomial"):
    pairs = [(key, other) for key in rows if key[0] == name for other in rows if other == ("fixed", key[1]) and other != whole]
    if pairs:
      gains = ", ".join(f"{of(key, 'judge_nll')[0] - of(other, 'judge_nll')[0]:+.3f} in {key[1]}" for key, other in pairs)
      lines.append(f"{name.capitalize()} against fixed, judge NLL: {gains}.")
  bursts = [key for key in rows if key[0] == "burst"]
  if bursts:
    said = ", ".join(f"{of(key, 'nll')[0] - of(whole, 'nll')[0]:+.3f} with {key[1]}, {of(key, 'evaluations')[0]:.1f} evaluations"
                     for key in bursts)
    lines.append(f"Burst against one token a step, NLL in its own order: {said}. It is not exact: what agrees with its draft "
                 "comes too often.")
  adaptive = [key for key in rows if key[0].startswith("adaptive") and near(key, whole)]
  if adaptive:
    said = ", ".join(f"{key[0].removeprefix('adaptive, ')} {of(key, 'judge_nll')[0] - of(whole, 'judge_nll')[0]:+.3f} (entropy "
                     f"{of(key, 'entropy')[0]:.2f} against {of(whole, 'entropy')[0]:.2f})" for key in adaptive)
    lines.append(f"Adaptive orders against random order, one token a step, judge NLL: {said}.")
  return lines


def _equal_distribution(timed: Cells) -> list[str]:
  """Speculative windows against one token a step."""
  if not timed:
    return []
  rows = [("order", "texts at once", "", "evaluations", "ms a text", "core ms a text", "times as fast", "in core time")]
  best = {}
  for (order, batch), cells in _by(timed, "order", "batch"):
    one = next(cell for cell in cells if not cell["window"])
    for cell in cells:
      x = np.array(cell["evaluations"], float)
      evaluations = f"{x.mean():.1f} ± {x.std(ddof=1) / math.sqrt(len(x)):.1f}"
      ratio = [speed.ratios(one[name], cell[name]) for name in ("seconds", "core_seconds")]
      error_of = lambda error: f" ± {error:.2f}" if math.isfinite(error) else ""
      said = [f"{mean:.2f}{error_of(error)}" if cell["window"] else "1" for mean, error in ratio]
      what = f"window {cell['window']}" if cell["window"] else "one token a step"
      times = [f"{1000 * float(np.median(cell[name])):.1f}" for name in ("seconds", "core_seconds")]
      rows.append((order.replace("_", " "), str(batch), what, evaluations, *times, *said))
      if cell["window"]:
        best.setdefault((order, batch), []).append((ratio[1][0], cell["window"], x.mean(), np.mean(one["evaluations"])))
  lines = []
  for (order, batch), found in best.items():
    times, window, evaluations, whole = max(found)
    lines.append(f"{order.replace('_', ' ').capitalize()}, {batch} at once: window {window} is the fastest, {times:.2f} times "
                 f"one token a step in core time, with {evaluations:.1f} evaluations instead of {whole:.0f}.")
  repeats = len(timed[0]["seconds"])
  return [
      "### At equal distribution",
      "Speculative decoding against one token a step in the same order, which draw from the same distribution. Each of "
      f"{repeats} measurements has other texts, and all rows of an order and a batch run in turn; times are medians, how many "
      "times as fast is the geometric mean over the measurements, ± its standard error; of evaluations, ± is the standard error "
      "over the texts.",
      held_out.markdown(rows), "\n".join(f"* {line}" for line in lines)]


def _sudoku(results: dict[str, Any], picture: str) -> str:
  cells = results["sudoku"]
  names = list(dict.fromkeys(cell["method"] for cell in cells))
  rows, ratio_lines = [("steps", "temperature", *names, "margin / random")], []
  for temperature, of_temperature in _by(cells, "temperature"):
    for steps, group in _by(sorted(of_temperature, key=lambda cell: cell["steps"]), "steps"):
      by_name = dict(_by(group, "method"))
      if by_name.keys() != set(names):
        continue  # not measured to the end
      margin, random = (_mean(by_name[name], "solved")[0] for name in ("margin", "random"))
      times = f"{margin / random:.1f}" if random else "-"
      rows.append((f"{steps:,}", f"{temperature:g}", *(_cell(by_name[name], "solved", 1, 100.0) + " %" for name in names), times))
      ratio_lines.append((temperature, steps, margin, random, len(by_name["margin"])))
  if not ratio_lines:
    return ""
  about = next(unit for unit in results["units"].values() if "clues" in unit)
  size = f"{about['parameters']:,} parameters, {about['tokens_per_step'] // about['block_size']} puzzles a step"
  return "\n\n".join([
      "## Sudoku",
      f"4x4 Sudokus with {about['clues']} clues and one solution, `data.source=sudoku:{about['clues']}`: the clues are given, "
      f"the other {16 - about['clues']} digits are drawn one a step. {cells[0]['puzzles']} held-out puzzles, "
      f"{ratio_lines[0][-1]} models for each number of steps ({size}); a puzzle is solved where all digits are right. At "
      "temperature 1 digits are drawn from the model, at 0 the most probable is taken. The order adapts to how sure the model is, "
      "before temperature.",
      f"![Share of puzzles solved against steps of training, a line for each order, at both temperatures]({picture})",
      held_out.markdown(rows), "\n".join(f"* {line}" for line in _of_sudoku(ratio_lines))])


def _of_sudoku(ratios: Sequence[tuple[float, int, float, float, int]]) -> list[str]:
  lines = []
  for temperature, group in itertools.groupby(ratios, key=lambda x: x[0]):
    group = list(group)
    there, not_there = [], []
    for _, steps, margin, random, _ in group:
      if margin > 0 and margin >= _AIM * random:
        there.append(f"{steps:,}")
      else:
        most = ""
        if random * _AIM > 1:
          most = f" (random order solves {100 * random:.0f}%: {1 / random:.1f} times is all there can be)"
        not_there.append(f"{steps:,}{most}")
    lines.append(f"Temperature {temperature:g}: margin order has at least {_AIM} times the accuracy of random order after "
                 f"{' and '.join(there) if there else 'no number of'} steps"
                 + (f"; not after {', '.join(not_there)}." if not_there else "."))
  return lines


def _draw_quality(path: pathlib.Path, cells: Cells) -> pathlib.Path:
  """The judge's nats against evaluations, and against core seconds."""

  def draw(figure):
    rows, given = _rows(cells), [cell for cell in cells if cell["family"] == quality.HELD_OUT]
    for axes, name, label in zip(figure.subplots(1, 2, sharey=True), ("evaluations", "core_seconds"),
                                 ("evaluations a text", "core seconds a text, in batches")):
      for family, group in itertools.groupby((row for row in rows if row[0] in _FAMILIES), key=lambda row: row[0]):
        points = sorted((*_mean(x, name), *_mean(x, "judge_nll")) for _, _, x in group)
        x, dx, y, dy = (np.nan_to_num(column) for column in np.array(points).T)
        axes.errorbar(x, y, xerr=dx, yerr=dy, marker="o", markersize=3, linewidth=1, elinewidth=0.6, color=_FAMILIES[family],
                      label=family if name == "evaluations" else None)
      if given:
        axes.axhline(_mean(given, "judge_nll")[0], color="gray", linewidth=0.8, linestyle=":",
                     label=quality.HELD_OUT if name == "evaluations" else None)
      axes.set(xscale="log", xlabel=label)
      axes.xaxis.set_major_formatter("{x:g}")
      axes.xaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "25" else "")
      axes.tick_params(which="both", labelsize=7)
      axes.grid(alpha=0.25)
    figure.axes[0].set_ylabel("judge, nats a byte")
    figure.legend(fontsize=8, loc="outside upper center", ncols=5)

  return _picture(path, (9, 4.4), draw)


def _draw_sudoku(path: pathlib.Path, cells: Cells) -> pathlib.Path:

  def draw(figure):
    groups = _by(cells, "temperature")
    for axes, (temperature, of_temperature) in zip(np.atleast_1d(figure.subplots(1, len(groups), sharey=True)), groups):
      for name, of_name in _by(of_temperature, "method"):
        points = np.array(sorted((steps, *_mean(group, "solved")) for steps, group in _by(of_name, "steps")))
        steps, share, spread = np.nan_to_num(points).T
        axes.errorbar(steps, 100 * share, yerr=100 * spread, marker="o", markersize=3, linewidth=1, elinewidth=0.6, label=name)
      axes.set(title=f"temperature {temperature:g}", xlabel="steps of training")
      axes.grid(alpha=0.25)
    figure.axes[0].set_ylabel("puzzles solved, %")
    figure.axes[0].legend(fontsize=8)

  return _picture(path, (8, 3.6), draw)


def _picture(path: pathlib.Path, size: tuple[float, float], draw: Callable[[Any], None]) -> pathlib.Path:
  from matplotlib import figure  # Here: it costs half a second. The figure has no global state and needs no display.

  fig = figure.Figure(figsize=size, dpi=120, layout="constrained")
  draw(fig)
  fig.savefig(path)
  return path
