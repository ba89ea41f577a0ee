"""Line charts as HTML with inline SVG: the lines stretch with the page, the words on them do not.

Colours and dashes are classes of page.html, so that a chart follows the reader's colours, dark or light.
"""

from collections.abc import Callable, Sequence
import dataclasses
import html
import json
import math

import numpy as np

# Of a line, at most: more would be narrower than what a screen can show.
_MOST_POINTS = 600
COLOURS = 8  # classes c0, c1, ... of page.html
DASHES = 4


@dataclasses.dataclass(frozen=True)
class Line:
  """What is drawn of a figure.

  Attributes:
    label: in the legend.
    x: [N], increasing.
    y: [N]; where it is not finite, the line is broken.
    errors: [N], half of the height of a band around the line; None: there is none.
    colour: from 0, modulo COLOURS; -1: grey.
    dash: from 0, unbroken, modulo DASHES.
    thin: whether it stands behind the others.
    marks: whether its points are marked.
  """

  label: str
  x: np.ndarray
  y: np.ndarray
  errors: np.ndarray | None = None
  colour: int = 0
  dash: int = 0
  thin: bool = False
  marks: bool = False

  @property
  def classes(self) -> str:
    colour = "grey" if self.colour < 0 else f"c{self.colour % COLOURS}"
    return f"{colour} d{self.dash % DASHES}" + " thin" * self.thin


def chart(
    title: str, lines: Sequence[Line], x_label: str, y_label: str, *, log_x: bool = False, log_y: bool = False,
    top: float | None = None, bottom: float | None = None, levels: dict[str, float] | None = None, note: str = "",
) -> str:
  """A figure with a legend; the empty text where no line has a point.

  Args:
    title: above it.
    lines: the later ones above the earlier ones.
    x_label: unit of x.
    y_label: and of y.
    log_x: whether x is drawn by its logarithm; points that have none are left out.
    log_y: likewise y.
    top: where the y axis ends, as far as there is something below it; None: where the lines end.
    bottom: where it begins.
    levels: label -> y, horizontal lines.
    note: below it.
  """
  levels = levels or {}
  ok = lambda line: np.isfinite(line.y) & ((line.x > 0) | (not log_x)) & ((line.y > 0) | (not log_y))
  lines = [dataclasses.replace(line, x=line.x[ok(line)], y=line.y[ok(line)],
                               errors=None if line.errors is None else line.errors[ok(line)]) for line in lines]
  lines = [line for line in lines if len(line.x)]
  if not lines:
    return ""
  lines = [_thinned(line) for line in lines]
  low, high = _extent([*(edge for line in lines for edge in _edges(line, log_y)), np.array([*levels.values()])])
  if top is not None and top > low:
    high = min(high, top)
  low = low if bottom is None else min(low, bottom)
  x_axis = _Axis(*_extent([line.x for line in lines]), log_x, 0.02)
  y_axis = _Axis(low, high, log_y, 0.04)
  drawn = [_level(y_axis(value), i) for i, value in enumerate(levels.values())]
  for line in lines:
    drawn += _drawn(line, x_axis, y_axis)
  grid = "".join(f'<path class="grid" d="M0 {_n(1000 - y_axis(t))}H1000"/>' for t in y_axis.ticks())
  described = "; ".join(f"{line.label}: {number(line.y[0])} at {number(line.x[0])}, {number(line.y[-1])} at {number(line.x[-1])}"
                        for line in lines)
  tick = lambda axis, side: "".join(
      f'<span style="{side}:{_n(axis(t) / 10)}%">{html.escape(number(t))}</span>' for t in axis.ticks())
  keys = [(f'<svg class="key" viewBox="0 0 28 10" aria-hidden="true"><path class="{line.classes}" d="M1 5H27"/></svg>', line.label)
          for line in lines]
  keys += [(f'<svg class="key" viewBox="0 0 28 10" aria-hidden="true"><path class="level l{i % 3}" d="M1 5H27"/></svg>',
            f"{label} {number(value)}") for i, (label, value) in enumerate(levels.items())]
  legend = "" if len(keys) == 1 else "".join(f"<li>{key}<bdi>{html.escape(label)}</bdi></li>" for key, label in keys)
  read_out = json.dumps({
      "x": [x_axis.low, x_axis.high, int(log_x)], "unit": x_label,
      "lines": [[line.label, [_short(x) for x in line.x], [_short(y) for y in line.y]] for line in lines]}, separators=(",", ":"))
  return (f'<figure class="chart"><figcaption>{html.escape(title)}</figcaption>'
          f'<div class="y-label">{html.escape(y_label)}</div>'
          f'<div class="plot" tabindex="0" role="img" aria-label="{html.escape(f"{title}, {y_label} by {x_label}. {described}")}" '
          f'data-chart="{html.escape(read_out)}"><div class="y">{tick(y_axis, "bottom")}</div>'
          f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{grid}{"".join(drawn)}</svg>'
          f'<div class="x">{tick(x_axis, "left")}</div></div><div class="x-label">{html.escape(x_label)}</div>'
          + (f'<ul class="legend">{legend}</ul>' if legend else "") + (f'<p class="note">{html.escape(note)}</p>' if note else "") + "</figure>")


class _Axis:
  """Where a value is, of 0 to 1000."""

  def __init__(self, low: float, high: float, log: bool, margin: float):
    self._f: Callable[[float], float] = math.log10 if log else float
    if high <= low:  # one value: in the middle
      low, high = (low / 1.5, high * 1.5) if log else (low - max(abs(low), 1) * 0.05, high + max(abs(high), 1) * 0.05)
    a, b = self._f(low), self._f(high)
    a, b = a - margin * (b - a), b + margin * (b - a)
    self.low, self.high, self._log = (10**a, 10**b, True) if log else (a, b, False)
    self._a, self._b = a, b

  def __call__(self, value: float) -> float:
    return 1000 * (self._f(value) - self._a) / (self._b - self._a)

  def ticks(self) -> list[float]:
    """Three to seven round numbers, 1, 2 or 5 times a power of ten."""
    if self._log and self._b - self._a > 0.7:
      exponents = range(math.floor(self._a), math.ceil(self._b) + 1)
      for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [m * 10.0**e for e in exponents for m in factors if self._a <= math.log10(m * 10.0**e) <= self._b]
        if len(found) <= 7:
          return found
      return found[:: math.ceil(len(found) / 6)]
    span = self.high - self.low
    step = next(step for e in range(-1, 3) for m in (1, 2, 5)
                if (step := m * 10.0 ** (math.floor(math.log10(span)) - 1 + e)) * 5.5 >= span)
    return [i * step for i in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)]


def _extent(values: Sequence[np.ndarray]) -> tuple[float, float]:
  whole = np.concatenate([np.asarray(v, float) for v in values])
  return float(whole.min()), float(whole.max())


def _edges(line: Line, log_y: bool) -> list[np.ndarray]:
  """A line, and the edges of its band; by logarithms, a lower edge ends where the line does."""
  if line.errors is None:
    return [line.y]
  errors = np.where(np.isfinite(line.errors), line.errors, 0.0)
  lower = line.y - errors
  return [line.y, line.y + errors, np.where(lower > 0, lower, line.y) if log_y else lower]


def _thinned(line: Line) -> Line:
  """Of each stretch of a long line, its first, lowest, highest and last points, in their order."""
  if len(line.x) <= _MOST_POINTS:
    return line
  keep = set()
  for part in np.array_split(np.arange(len(line.x)), _MOST_POINTS // 4):
    keep |= {part[0], part[np.argmin(line.y[part])], part[np.argmax(line.y[part])], part[-1]}
  keep = np.array(sorted(keep))
  return dataclasses.replace(line, x=line.x[keep], y=line.y[keep], errors=None if line.errors is None else line.errors[keep])


def _drawn(line: Line, x_axis: _Axis, y_axis: _Axis) -> list[str]:
  clip = lambda y: min(max(y, -200.0), 1200.0)  # far enough for the slope, and not so far that a browser gives up
  points = [(x_axis(x), 1000 - clip(y_axis(y))) for x, y in zip(line.x, line.y)]
  found = []
  if line.errors is not None and len(points) > 1 and np.isfinite(line.errors).all():
    floor = y_axis.low
    edge = [[(x_axis(x), 1000 - clip(y_axis(max(y + sign * e, floor)))) for x, y, e in zip(line.x, line.y, line.errors)]
            for sign in (1, -1)]
    found.append(f'<path class="band {line.classes}" d="{_path([*edge[0], *edge[1][::-1]])}Z"/>')
  if len(points) > 1:
    found.append(f'<path class="{line.classes}" d="{_path(points)}"/>')
  if line.marks or len(points) == 1:
    found.append(f'<path class="mark {line.classes}" d="{"".join(f"M{_n(x)} {_n(y)}h0" for x, y in points)}"/>')
  return found


def _level(y: float, i: int) -> str:
  return f'<path class="level l{i % 3}" d="M0 {_n(1000 - y)}H1000"/>'


def _path(points: Sequence[tuple[float, float]]) -> str:
  return "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)


def _n(x: float) -> str:
  return f"{x:.1f}".removesuffix(".0")


def _short(x: float) -> float:
  return float(f"{x:.5g}") if not float(x).is_integer() else int(x)


def number(x: float) -> str:
  """1,200, 2.35, 0.0004 or 4e-05."""
  if x == 0:
    return "0"
  if abs(x) >= 1e6:
    return f"{x / 1e6:.4g}M"
  if abs(x) >= 1000:
    return f"{x:,.0f}"
  return f"{x:.4g}"
