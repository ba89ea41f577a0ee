"""The loss curves of a run: what is drawn of its metrics, and a picture of it."""

from collections.abc import Sequence
import dataclasses
import math
import pathlib
import re
from typing import Any

import jax
import numpy as np

from aogpt_jax import pictures
from aogpt_jax.training import metrics

FILE = "loss.png"
_EVALUATION = re.compile(r"eval/(.+)/nats_per_token")


@dataclasses.dataclass(frozen=True)
class Curve:
  """A figure against steps.

  Attributes:
    label: of it.
    steps: updates done, int [N], increasing.
    values: float [N], finite.
    errors: standard errors, [N], nan where none is known; None: there are none.
  """

  label: str
  steps: np.ndarray
  values: np.ndarray
  errors: np.ndarray | None = None


def curve(records: Sequence[dict[str, Any]], field: str, label: str = "", error: str = "") -> Curve | None:
  """A field of the records that have it as a finite number, and the field of its standard error; None where there is no such one.

  Where a step has several, the last one counts.
  """
  points = {r["step"]: (float(r[field]), r.get(error)) for r in records if is_number(r.get(field))}
  if not points:
    return None
  steps = np.array(sorted(points))
  errors = np.array([points[step][1] if is_number(points[step][1]) else math.nan for step in steps], float) if error else None
  return Curve(label or field, steps, np.array([points[step][0] for step in steps]), errors)


def is_number(value: Any) -> bool:
  """Whether a field of a record is a finite number, which damage, and a loss that is none, may have made something else."""
  return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def evaluations(records: Sequence[dict[str, Any]]) -> dict[str, Curve]:
  """Nats per token at the evaluations during training, by the names of the distributions, left to right and any order first."""
  names = {m[1] for r in records for field in r if (m := _EVALUATION.fullmatch(field))}
  first = [name for name in ("left_to_right", "any_order") if name in names]
  found = {}
  for name in [*first, *sorted(names.difference(first))]:
    label = f"{name.replace('_', ' ')}, EMA"
    if (c := curve(records, f"eval/{name}/nats_per_token", label, f"eval/{name}/stderr_sequences")) is not None:
      found[name] = c
  return found


def smoothed(c: Curve) -> Curve:
  """Exponential average over about a fiftieth of the points, or some of few, without the pull of its start (as Adam's moments)."""
  decay = 1 - 1 / max(len(c.values) / 50, min(len(c.values) / 4, 10), 1)
  values, mean, weight = np.empty(len(c.values)), 0.0, 0.0
  for i, x in enumerate(c.values):
    mean, weight = decay * mean + (1 - decay) * x, decay * weight + (1 - decay)
    values[i] = mean / weight
  return dataclasses.replace(c, label=f"{c.label}, smoothed", values=values)


def top(evaluated: Sequence[Curve], others: Sequence[float] = ()) -> float | None:
  """Where a picture of losses ends: early ones are far above all that follows; None where nothing was evaluated."""
  values = [x for c in evaluated for x in (*c.values[1:], c.values[-1])]
  return max([*values, *others]) * 1.08 if values else None


def draw(workdir: pathlib.Path, baselines: dict[str, float]) -> pathlib.Path | None:
  """Draws WORKDIR/loss.png from the recorded metrics, on process 0, and returns its path; None without matplotlib.

  Args:
    workdir: of the run.
    baselines: label -> nats per token, drawn as horizontal lines.
  """
  path = workdir / FILE
  if jax.process_index() != 0:
    return path
  fig = pictures.new(7, 4.2)
  if fig is None:
    return None
  records = metrics.read(workdir)
  axes = fig.subplots()
  if (loss := curve(records, "loss", "training batch")) is not None:
    axes.plot(loss.steps, loss.values, label=loss.label, color="0.8", linewidth=0.8)
    s = smoothed(loss)
    axes.plot(s.steps, s.values, label=s.label, color="0.5", linewidth=1)
  evaluated = evaluations(records)
  for i, (marker, c) in enumerate(zip("os^vDPX*" * len(evaluated), evaluated.values())):
    axes.plot(c.steps, c.values, label=c.label, color=f"C{i}", marker=marker, markersize=3)
  for style, (label, value) in zip((":", "--", "-."), baselines.items()):
    axes.axhline(value, color="0.35", linewidth=0.8, linestyle=style, label=f"{label} {value:.2f}")
  axes.set(xlabel="step (updates)", ylabel="nats per token")
  axes.legend(fontsize=8)
  axes.grid(alpha=0.25)
  if (highest := top(list(evaluated.values()), list(baselines.values()))) is not None:
    axes.set_ylim(top=highest)
  fig.savefig(path)
  return path
