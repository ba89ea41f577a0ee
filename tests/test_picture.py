"""A picture of how texts were drawn: rows of the steps, every token in its place, whatever it is made of."""

import re

import numpy as np
import pytest

from aogpt_jax.data import tokenizers
from aogpt_jax.sampling import picture
from aogpt_jax.sampling import texts

BYTES = tokenizers.load("bytes")


def record(ids, steps, order="uniform", tokenizer=BYTES, **fields):
  ids, positions = list(ids), sorted(range(len(ids)), key=lambda i: steps[i])
  fields = dict(prompt_index=0, sample_index=0, seed=0, prompt="", log_probs=[0.0] * len(ids), sampler={}) | fields
  return texts.Text(order=order, text=tokenizer.decode(ids), ids=ids, positions=positions, steps=list(steps),
                    evaluations=len({*steps} - {0}), **fields)


def rows(axes):
  """The rows of a picture as texts, from above, with the names of the steps."""
  by_height = {}
  for text in axes.texts:
    x, y = text.get_position()
    by_height.setdefault(-y, []).append((x, text.get_text()))
  return ["".join(part for _, part in sorted(by_height[y])) for y in sorted(by_height)]


def test_each_row_shows_what_is_known_after_a_step():
  axes, = picture.of_texts([record(b"abcdef", [0, 2, 1, 0, 2, 4])], BYTES).axes
  assert rows(axes) == ["givena··d··", "step 1a·cd··", "step 2abcde·", "step 4abcdef"]  # step 3 drew nothing
  assert axes.get_title(loc="left") == "uniform: 4 tokens in 3 forward passes"
  colours = lambda y: {round(p.get_x()): p.get_facecolor()[:3] for p in axes.patches if round(p.get_y() - 0.04) == y}
  assert colours(3).keys() == {0, 3} and colours(3)[0] == colours(3)[3] == (0.87,) * 3
  final = colours(0)
  assert final[1] == final[4] and len({final[i] for i in (0, 1, 2, 5)}) == 4  # a colour for each step
  assert colours(2)[2] == final[2] and colours(1)[2] != final[2] and colours(1)[1] == final[1]  # paler once it is known


def test_long_texts_are_cut_and_many_steps_share_rows():
  rng = np.random.default_rng(0)
  axes, = picture.of_texts([record([ord("x")] * 1000, rng.permutation(1000) + 1, order="explicit(" + "1, " * 60)], BYTES).axes
  shown = rows(axes)
  assert len(shown) == 16 and shown[0].startswith("step 1") and shown[-1] == "step 1000" + "x" * 96
  assert axes.get_title(loc="left").startswith("explicit(1, ") and "..., " not in axes.get_title(loc="left")
  assert axes.get_title(loc="left").endswith("...: 1,000 tokens in 1,000 forward passes, the first 96 of 1,000 tokens")


def test_tokens_of_any_kind_have_glyphs(tmp_path):
  hostile = tokenizers.Tokenizer("hostile", "hostile", [
      b"$x^{", b"\\frac", b"\x1b[2J", b"\n", b" ", b"\xff", "\u202e".encode(), "\U0001f916".encode(), "\u4e2d".encode(), b"a\tb",
      b"w" * 200], None)
  text = record([*range(10)], [1] * 10, tokenizer=hostile)
  fig = picture.of_texts([text, record([10, 0], [1, 2], tokenizer=hostile)], hostile)
  first, second = fig.axes
  assert rows(first) == ["step 1$x^{\\frac\u25a1[2J\u21b5\u2423\\xffU+202E\u25a1\u25a1a\u21e5b"]
  assert rows(second) == ["step 1" + "w" * 96, "step 2" + "w" * 96]
  fig.savefig(tmp_path / "hostile.png")  # a glyph that is not there would be a warning, and those are errors


@pytest.mark.parametrize("ending, begins", [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_the_first_samples_of_a_file_are_drawn(tmp_path, capsys, ending, begins):
  kept = [record(b"ab", [2, 1], sample_index=s, prompt_index=p) for p in range(5) for s in range(2)]
  (tmp_path / "samples.jsonl").write_text(texts.json_lines(kept), encoding="utf-8")
  path = picture.write(str(tmp_path / f"out{ending}"), tmp_path / "samples.jsonl", BYTES)
  assert path == tmp_path / f"out{ending}" and path.read_bytes().startswith(begins)
  assert re.search("the first 4 of 5 prompts and orders", capsys.readouterr().out)
