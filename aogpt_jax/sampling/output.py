"""What --mode=sample shows and keeps: texts on the terminal as they become known, and in files batch by batch."""

from collections.abc import Sequence
import dataclasses
import pathlib
from typing import Any

from flax import linen as nn
import jax
from jax.sharding import Mesh
import ml_collections

from aogpt_jax import console
from aogpt_jax import pages
from aogpt_jax.data import tokenizers
from aogpt_jax.sampling import prompts as prompts_lib
from aogpt_jax.sampling import texts as texts_lib

# How often a batch is looked at while it is drawn: to redraw it on a terminal, and elsewhere to say how long it will take.
_REDRAWN, _COUNTED = 256, 16


def check_file(flag: str, path: str, mode: str, endings: Sequence[str] = ()) -> None:
  """Raises what keeps a file of drawn texts from being written, before there are any; an empty path is none.

  Args:
    flag: that has given the path, e.g. "--html"; for messages.
    path: of the file, whose directory is created.
    mode: one of `run.MODES`.
    endings: of which the name must have one, e.g. (".png",); none: it may have any.

  Raises:
    ValueError: the mode draws no texts, or the name has another ending.
    OSError: the file can't be written.
  """
  if not path:
    return
  if mode not in ("all", "sample"):
    raise ValueError(f"{flag}={path}: --mode={mode} draws no texts to show; give --mode=sample.")
  if endings and pathlib.Path(path).suffix.lower() not in endings:
    raise ValueError(f"{flag}={path}: ends in none of {', '.join(endings)}, which say what it is to be; give such a name.")
  pages.file(flag, path)


def draw(
    workdir: pathlib.Path, model: nn.Module, params: Any, tokenizer: tokenizers.Tokenizer, prompts: Sequence[prompts_lib.Prompt],
    config: ml_collections.ConfigDict, mesh: Mesh, origin: dict[str, Any]
) -> list[pathlib.Path]:
  """Draws the texts of a config's section `sample`, for its orders one after another.

  Each batch is printed and written when it is complete. The first one replaces what an earlier run has left in the files.
  `origin` says which parameters these are, and goes into each text's `sampler`.

  Returns:
    The files: samples.jsonl, an object per text with the fields of `texts.Text`, and samples.txt, for reading.

  Raises:
    KeyboardInterrupt: on Ctrl-C; the message says what is kept, and where.
  """
  files = [workdir / "samples.jsonl", workdir / "samples.txt"]
  several = len(prompts) > 1
  progress = console.Progress(
      "sampling", len(config.orders) * texts_lib.tokens_to_draw(prompts, config.num_samples), "tokens")
  kept, tokens = 0, 0
  try:
    with console.Screen() as screen:
      for order in config.orders:
        for texts in texts_lib.stream_generate(
            model, params, tokenizer, prompts, order=order, mesh=mesh, parts=_REDRAWN if screen.is_there else _COUNTED,
            **texts_lib.options(config)):
          drawn = tokens + texts_lib.tokens_drawn(texts)
          if not all(text.complete for text in texts):
            if screen.is_there:
              screen.show(_frame(screen, texts, tokenizer, several, progress.line(drawn)))
            else:
              progress(drawn)
            continue
          texts = [dataclasses.replace(text, sampler=text.sampler | origin) for text in texts]
          readable = texts_lib.readable(texts, several)
          if jax.process_index() == 0:
            for path, content in zip(files, (texts_lib.json_lines(texts), readable)):
              with path.open("a" if kept else "w", encoding="utf-8") as f:
                f.write(content)
          kept, tokens = kept + len(texts), drawn
          screen.clear()
          console.say(readable)
          if not screen.is_there:
            progress(drawn)
  except KeyboardInterrupt:
    total = len(config.orders) * len(prompts) * config.num_samples
    if kept:  # it may have come between the writing and the counting
      with files[0].open("rb") as f:
        kept = sum(1 for _ in f)
    raise KeyboardInterrupt(f"{kept:,} of {total:,} texts were drawn" + (f" and are in {files[0]}" if kept else "")) from None
  return files


def _frame(screen: console.Screen, texts: Sequence[texts_lib.Text], tokenizer: tokenizers.Tokenizer, name_prompts: bool,
           status: str) -> list:
  """The lines of a screen: as many texts as have room for three lines, and how far the work is."""
  rows = screen.size[1] - 1
  shown = []  # pairs of a heading and a text's lines
  for text in texts:
    lines = screen.wrapped(_styled(text, tokenizer))
    sizes = [1 + min(len(other), 3) for other in (*(other for _, other in shown), lines)]
    if shown and sum(sizes) > rows:
      break
    shown.append((texts_lib.heading(text, name_prompts), lines))
  room = max(rows - len(shown), 0)
  frame = []
  # What the short ones leave, the long ones get: the shortest are served first.
  given = {}
  for left, i in zip(range(len(shown), 0, -1), sorted(range(len(shown)), key=lambda i: len(shown[i][1]))):
    given[i] = min(len(shown[i][1]), room // left)
    room -= given[i]
  for i, (heading, lines) in enumerate(shown):
    # Where the text does not fit: the lines around its first unknown token.
    unknown = next((number for number, line in enumerate(lines) if line.spans), len(lines) - 1)
    start = max(0, min(unknown + 2, len(lines)) - given[i])
    frame += [*screen.wrapped([(heading, "bold")])[:1], *lines[start : start + given[i]]]
  more = f" ({len(shown)} of {len(texts)} texts shown)" if len(shown) < len(texts) else ""
  return frame[:rows] + screen.wrapped([(status + more, "bold")])[:1]


def _styled(text: texts_lib.Text, tokenizer: tokenizers.Tokenizer) -> list[tuple[str, str]]:
  """The pieces of a text with their styles; drawn from left to right, it ends where it has come to."""
  pieces = texts_lib.pieces(text.ids, tokenizer)
  if text.positions == sorted(text.positions):
    known = next((i for i, (_, known) in enumerate(pieces) if not known), len(pieces))
    pieces = pieces[:known] + [(texts_lib.UNKNOWN, False)] * (known < len(pieces))
  return [(piece, "" if known else "dim") for piece, known in pieces]
