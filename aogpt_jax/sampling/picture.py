"""A picture of how texts were drawn: a row for each step, in which the tokens that it draws have the colour of the step.

For a paper or a README; the page of page.py shows more.
"""

from collections.abc import Sequence
import functools
import json
import pathlib
from typing import Any

import jax
import numpy as np

from aogpt_jax import console
from aogpt_jax.data import tokenizers
from aogpt_jax.sampling import labels
from aogpt_jax.sampling import texts as texts_lib

ENDINGS = (".png", ".svg", ".pdf")
# What can be read at the width of a README: characters of a text, rows of it and texts; of longer ones, the rest is left out.
_CHARACTERS, _ROWS, _TEXTS = 96, 16, 4
_WIDTH, _LEFT, _ROW, _HEADING = 8.4, 0.8, 0.26, 0.36  # inches
_INK, _FAINT, _GIVEN = "0.1", "0.6", "0.87"  # greys, 1 is white
_FONT = "DejaVu Sans Mono"  # comes with matplotlib
_NO_GLYPH = "\u25a1"
_VISIBLE = str.maketrans({" ": "\u2423", "\n": "\u21b5", "\t": "\u21e5"})  # also where a token has them among others


def write(path: str, samples: pathlib.Path, tokenizer: tokenizers.Tokenizer) -> pathlib.Path:
  """Draws the first sample of each prompt and order into a file, on process 0; returns its path.

  Args:
    path: of the file, which is replaced; ends in one of ENDINGS.
    samples: the samples.jsonl of `output.draw`.
    tokenizer: of the texts.
  """
  file = pathlib.Path(path).expanduser().resolve()
  if jax.process_index() == 0:
    with samples.open(encoding="utf-8") as f:
      texts = [texts_lib.Text(**json.loads(line)) for line in f]
    firsts = [text for text in texts if text.sample_index == 0]
    if len(firsts) > _TEXTS:
      console.say(f"the picture shows the first {_TEXTS} of {len(firsts):,} prompts and orders")
    of_texts(firsts[:_TEXTS], tokenizer).savefig(file, dpi=120)
  return file


def of_texts(texts: Sequence[texts_lib.Text], tokenizer: tokenizers.Tokenizer) -> Any:
  """A matplotlib Figure of complete texts, one below the other; a long text is cut, and several of many steps share a row."""
  from matplotlib import figure  # Here: it costs half a second. The figure has no global state and needs no display.

  panels = [_Panel(text, tokenizer) for text in texts]
  heights = [_HEADING + _ROW * len(panel.rows) for panel in panels]
  height = sum(heights) + 0.1
  fig = figure.Figure(figsize=(_WIDTH, height), dpi=100, facecolor="white")
  top = height
  for panel, own in zip(panels, heights):
    rows = _ROW * len(panel.rows)
    panel.draw(fig.add_axes((_LEFT / _WIDTH, (top - own) / height, 1 - (_LEFT + 0.1) / _WIDTH, rows / height)))
    top -= own
  return fig


class _Panel:
  """A text: its tokens in boxes as wide as their labels, and after which step each row is."""

  def __init__(self, text: texts_lib.Text, tokenizer: tokenizers.Tokenizer):
    self._steps = np.array(text.steps)
    self._labels = [_label(tokenizer.bytes_of(i)) for i in text.ids]
    ends = np.cumsum([len(label) for label in self._labels])
    shown = max(int(np.searchsorted(ends, _CHARACTERS, side="right")), 1)
    self._labels[0] = self._labels[0][:_CHARACTERS]
    self._ends = np.minimum(ends[:shown], _CHARACTERS)
    last = int(self._steps.max(initial=0))
    drawing = np.unique(self._steps[self._steps > 0])  # steps that draw nothing have no row
    self._last, given = max(last, 1), (self._steps == 0).any()
    at = np.linspace(0, len(drawing) - 1, min(len(drawing), _ROWS)).round().astype(int) if len(drawing) else []
    self.rows = [0] * bool(given) + [int(step) for step in drawing[at]]
    cut = f", the first {shown:,} of {len(text.ids):,} tokens" if shown < len(text.ids) else ""
    order = text.order if len(text.order) <= 40 else text.order[:37] + "..."
    self._heading = f"{order}: {int((self._steps > 0).sum()):,} tokens in {text.evaluations:,} forward passes{cut}"

  def draw(self, axes) -> None:
    from matplotlib import colormaps  # pylint: disable=import-outside-toplevel
    from matplotlib import patches  # pylint: disable=import-outside-toplevel
    viridis = colormaps["viridis"]  # even for all kinds of colour vision, and lighter and lighter in greys
    width = int(self._ends[-1])
    characters = max(width, 32)
    inches = _WIDTH - _LEFT - 0.1
    size = min(72 * inches / characters / 0.602 * 0.95, 11)  # points; a character of DejaVu Sans Mono is 0.602 of its size wide
    write = dict(family=_FONT, fontsize=size, ha="center", va="center_baseline", parse_math=False)
    before = 0
    for row, step in enumerate(self.rows):
      y = len(self.rows) - row - 1
      start = 0
      for label, drawn_in, end in zip(self._labels, self._steps, self._ends):
        x, box = (start + end) / 2, (start, y + 0.04)
        start = end
        if drawn_in > step:
          axes.text(x, y + 0.5, texts_lib.UNKNOWN, color=_FAINT, **write)
          continue
        new = drawn_in > before or row == len(self.rows) - 1
        colour = np.array(viridis((drawn_in - 1) / max(self._last - 1, 1))[:3]) if drawn_in else np.full(3, float(_GIVEN))
        if drawn_in and not new:
          colour = 0.75 + 0.25 * colour
        light = 0.2126 * colour[0] ** 2.2 + 0.7152 * colour[1] ** 2.2 + 0.0722 * colour[2] ** 2.2
        axes.add_patch(patches.Rectangle(box, end - box[0], 0.92, facecolor=colour, edgecolor="white", linewidth=0.6))
        axes.text(x, y + 0.5, label, color=_INK if light > 0.179 else "white", fontweight="bold" if new and drawn_in else "normal",
                  **write)
      axes.text(-0.15 * characters / inches, y + 0.5, f"step {step}" if step else "given", ha="right", va="center_baseline",
                fontsize=9, color=_INK)
      before = step
    axes.set(xlim=(0, characters), ylim=(0, len(self.rows)))
    axes.axis("off")
    axes.set_title(self._heading, loc="left", fontsize=10, color=_INK, pad=4, parse_math=False)


def _label(content: bytes) -> str:
  """A token's label, every character of which has a glyph."""
  label = labels.of_bytes(content)
  label = label if isinstance(label, str) else label[1]
  return "".join(c if ord(c) in _glyphs() else _NO_GLYPH for c in label.translate(_VISIBLE)) or _NO_GLYPH


@functools.cache
def _glyphs() -> set[int]:
  """The code points that the font has, in both weights."""
  from matplotlib import font_manager  # pylint: disable=import-outside-toplevel
  charmaps = [font_manager.get_font(font_manager.findfont(font_manager.FontProperties(family=_FONT, weight=weight))).get_charmap()
              for weight in ("normal", "bold")]
  return set(charmaps[0]) & set(charmaps[1])
