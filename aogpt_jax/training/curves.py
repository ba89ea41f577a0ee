"""The loss curves of a run as a picture."""

import pathlib

import jax

from aogpt_jax.training import metrics

FILE = "loss.png"


def draw(workdir: pathlib.Path, baselines: dict[str, float]) -> pathlib.Path:
  """Draws WORKDIR/loss.png from the recorded metrics, on process 0, and returns its path.

  Args:
    workdir: of the run.
    baselines: label -> nats per token, drawn as horizontal lines.
  """
  path = workdir / FILE
  if jax.process_index() != 0:
    return path
  from matplotlib import figure  # Here: it costs half a second. The figure has no global state and needs no display.

  records = metrics.read(workdir)
  fig = figure.Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
  axes = fig.subplots()

  def line(field, label, **style):
    points = [(r["step"], r[field]) for r in records if field in r]
    axes.plot(*zip(*points), label=label, **style) if points else None

  line("loss", "training batch", color="0.75", linewidth=0.8)
  line("eval/left_to_right/nats_per_token", "left to right, EMA", color="C0", marker="o", markersize=3)
  line("eval/any_order/nats_per_token", "any order, EMA", color="C1", marker="s", markersize=3)
  for style, (label, value) in zip((":", "--", "-."), baselines.items()):
    axes.axhline(value, color="0.35", linewidth=0.8, linestyle=style, label=f"{label} {value:.2f}")
  axes.set(xlabel="step (updates)", ylabel="nats per token")
  axes.legend(fontsize=8)
  axes.grid(alpha=0.25)
  # Early values are far above all that follows; the axis ends where the curves have something to say.
  evaluated = [r["eval/any_order/nats_per_token"] for r in records if "eval/any_order/nats_per_token" in r]
  if evaluated:
    top = max([*baselines.values(), *evaluated[1:], evaluated[-1]])
    axes.set_ylim(top=top * 1.08)
  fig.savefig(path)
  return path
