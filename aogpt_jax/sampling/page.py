"""A page that shows texts as they were drawn: one HTML file that needs no network, with page.html as its frame.

Texts are data: the order, the steps and the settings of a draw are what its record says, whichever sampler made it. Tokens can be any
text, hostile text too; they reach the page as JSON in which nothing can end the script, and become text nodes there.
"""

from collections.abc import Sequence
import json
import math
import pathlib
from typing import Any
import unicodedata

from flax import linen as nn
import jax

from aogpt_jax import console
from aogpt_jax import pages
from aogpt_jax.data import tokenizers
from aogpt_jax.sampling import alternatives as alternatives_lib
from aogpt_jax.sampling import labels as labels_lib
from aogpt_jax.sampling import texts as texts_lib

# Of all texts of a page together, unless its first one has more; a browser is quick with these, and they take 2 MB or so.
MOST_TOKENS = 1 << 15


def write(path: str, samples: pathlib.Path, model: nn.Module, params: Any, tokenizer: tokenizers.Tokenizer) -> pathlib.Path:
  """Writes the page of the texts that have been drawn, or of as many as it has room for; returns its path.

  Args:
    path: of the file, which is replaced.
    samples: the samples.jsonl of `output.draw`, which every process reads.
    model: that has drawn them.
    params: its parameters.
    tokenizer: of the texts.
  """
  with samples.open(encoding="utf-8") as f:
    texts = [texts_lib.Text(**json.loads(line)) for line in f]
  shown = _with_room(texts)
  if len(shown) < len(texts):
    console.say(f"the page shows {len(shown):,} of the {len(texts):,} texts, {MOST_TOKENS:,} tokens at most")
  file = pathlib.Path(path).expanduser().resolve()
  content = of_texts(model, params, tokenizer, shown)
  if jax.process_index() == 0:
    file.write_text(content, encoding="utf-8")
  return file


def _with_room(texts: list[texts_lib.Text]) -> list[texts_lib.Text]:
  """The first sample of each prompt and order, then the second ones, ... as far as there is room; in their order."""
  chosen, left = [], MOST_TOKENS
  for i in sorted(range(len(texts)), key=lambda i: texts[i].sample_index):
    left -= len(texts[i].ids)
    if chosen and left < 0:
      break
    chosen.append(i)
  return [texts[i] for i in sorted(chosen)]


def of_texts(model: nn.Module, params: Any, tokenizer: tokenizers.Tokenizer, texts: Sequence[texts_lib.Text]) -> str:
  """The page, as HTML, of complete texts that a model has drawn."""
  return html(texts, alternatives_lib.find(model, params, texts, tokenizer.vocab_size), tokenizer)


def html(texts: Sequence[texts_lib.Text], alternatives: Sequence[alternatives_lib.Alternatives],
         tokenizer: tokenizers.Tokenizer) -> str:
  """The page of complete texts, each with what else its tokens could have been."""
  labels = _Labels(tokenizer)
  shown = [_text(text, other, labels, tokenizer) for text, other in zip(texts, alternatives, strict=True)]
  data = json.dumps({"labels": labels.table, "texts": shown}, separators=(",", ":"))  # beyond ASCII, it has escapes
  for character in "<>&":
    data = data.replace(character, f"\\u{ord(character):04x}")
  return pages.fill(__package__, data=data)


class _Labels:
  """What the page calls tokens: a table of those that it needs."""

  def __init__(self, tokenizer: tokenizers.Tokenizer):
    self._tokenizer, self._index = tokenizer, {}
    self.table: list[str | list[str]] = []  # see labels.of_bytes

  def __call__(self, token: int) -> int:
    """The token's place in the table."""
    if token not in self._index:
      self._index[token] = len(self.table)
      self.table.append(labels_lib.of_bytes(self._tokenizer.bytes_of(token)))
    return self._index[token]


def _text(text: texts_lib.Text, other: alternatives_lib.Alternatives, labels: _Labels, tokenizer: tokenizers.Tokenizer) -> dict:
  """What the page knows of a text; probabilities are hundredths of a nat below 1."""
  given = [step == 0 for step in text.steps]
  rows = zip(given, other.ids.tolist(), other.ids_log_probs.tolist())
  others = [[] if g else [x for i, y in zip(ids, values) if y > -math.inf for x in (labels(i), _cost(y))] for g, ids, values in rows]
  return {
      "prompt": [text.prompt_index, console.printable(text.prompt)], "order": text.order, "sample": text.sample_index,
      "tokens": [labels(i) for i in text.ids], "joined": _joined(text.ids, tokenizer), "positions": text.positions, "steps": text.steps,
      "drawn": [0 if g else _cost(x) for g, x in zip(given, other.log_probs.tolist())],
      "model": [0 if g else _cost(x) for g, x in zip(given, text.log_probs)],
      "others": others, "rtl": _is_right_to_left(text.text), "what": _what(text.sampler), "filtered": _filtered(text.sampler),
      "difference": other.difference,
      "settings": {"seed": text.seed, "evaluations": text.evaluations} | text.sampler}


def _cost(log_prob: float) -> int:
  return min(round(-100 * log_prob), 9999) if log_prob > -math.inf else 9999


def _joined(ids: Sequence[int], tokenizer: tokenizers.Tokenizer) -> list[list]:
  """Tokens that are text only together, or none: [first position, how many, the text], and a sign if it needs one.

  Between any others, the text can be cut: the texts of the tokens are that of the whole. What is no UTF-8 reads U+FFFD.
  """
  joined, start = [], 0
  pieces = [tokenizer.bytes_of(i) for i in ids]
  while start < len(ids):
    end, content = start + 1, pieces[start]
    # A character has four bytes at most: what follows further on has no say in how these are read.
    while end < len(ids) and _is_cut(content, b"".join(pieces[end : end + 4])):
      content += pieces[end]
      end += 1
    text = content.decode(errors="replace")
    if end > start + 1 or text.encode() != content:
      label = labels_lib.of_text(text)
      joined.append([start, end - start, *(label if isinstance(label, list) else [label])])
    start = end
  return joined


def _is_cut(before: bytes, after: bytes) -> bool:
  """Whether a character, or what stands for a part of one, goes on from the bytes before to those after."""
  decoded = lambda content: content.decode(errors="replace")
  return decoded(before + after) != decoded(before) + decoded(after)


def _is_right_to_left(text: str) -> bool:
  directions = [unicodedata.bidirectional(c) for c in text if c.isalpha()]
  return sum(d in ("R", "AL") for d in directions) > len(directions) / 2


def _filtered(sampler: dict[str, Any]) -> str:
  """What changes the model's probabilities before a token is drawn; the empty text where nothing does."""
  if not sampler["temperature"]:
    return ""
  changes = [f"{name} {sampler[field]:g}" for name, field, off in (
      ("temperature", "temperature", 1), ("top-k", "top_k", 0), ("top-p", "top_p", 1)) if sampler[field] != off]
  return " and ".join(changes)


def _what(sampler: dict[str, Any]) -> str:
  """Which probability the page shows."""
  if not sampler["temperature"]:
    return "of the model at temperature 1, while the draw took the likeliest token"
  return f"with which it was drawn, after {filtered}" if (filtered := _filtered(sampler)) else "with which it was drawn"
