"""The zero-shot data sets: their rows as published, detokenised, cut into blocks by a recipe.

The protocol is that of SEDD (Lou et al., arXiv 2310.16834), which later papers follow: each row is a document, detokenised by
rules of its data set and followed by the boundary id, and the rows are packed into blocks of T. What it scores depends on details
that papers don't give, hence the recipes:

  sedd   as the released code: rows in 8 contiguous shards, of which the first `rows mod 8` have a row more, packed within each
         1,000 rows of a shard; what is left of less than a block is dropped, up to T - 1 tokens each time
  exact  all rows in one stream; every token is scored, and the last block is padded
"""

from collections.abc import Callable, Sequence
import dataclasses
import re

import ml_collections
import numpy as np

from aogpt_jax import console
from aogpt_jax.data import sources
from aogpt_jax.data import tokenizers

RECIPES = ("sedd", "exact")

# (what, by what), one after another: a string is replaced as it is, a compiled pattern is a regular expression.
Rules = tuple[tuple[str | re.Pattern[str], str], ...]

_WIKITEXT: Rules = (
    ("s '", "s'"),
    (re.compile(r"/' [0-9]/"), "/'[0-9]/"),  # it was meant otherwise; the protocol has it so
    *((f" @{mark}@ ", mark) for mark in "-,."),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
    (re.compile(r"\(\s*([^)]*?)\s*\)"), r"(\1)"),
    (re.compile(r"\[\s*([^]]*?)\s*\]"), r"[\1]"),
    (re.compile(r"\{\s*([^}]*?)\s*\}"), r"{\1}"),
    (re.compile(r'"\s*([^"]*?)\s*"'), r'"\1"'),
    (re.compile(r"'\s*([^']*?)\s*'"), r"'\1'"),
    *((" ".join("=" * n), "=" * n) for n in (4, 3, 2)),
    (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
    (" \n", "\n"), ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)

_PTB: Rules = (
    (" 's", "'s"), ("s ' ", "s' "), (" n't", "n't"),
    (" \n ", "\n"),
    ("\\/", "/"),
    (re.compile("(?<= )N(?= )"), "1"),
    ("$ 1", "$1"), ("# 1", "#1"),
    ("<unk>", "?"),
)

_LM1B: Rules = (
    ("http : / / ", "http://"), ("https : / / ", "https://"),
    (re.compile(r" '(\w+)"), r"'\1"),
    (re.compile(r" (\w+) \. "), r" \1. "), (re.compile(r" (\w+) \.$"), r" \1."),
    (" ? ", "? "), (re.compile(r" \?$"), "?"),
    (" ! ", "! "), (re.compile(r" !$"), "!"),
    *((f" {mark} ", f"{mark} ") for mark in ",:;"),
    (" / ", "/"),
    (re.compile(r'" ([^"]+) "'), r'"\1"'), (re.compile(r"' ([^']+) '"), r"'\1'"),
    (re.compile(r"\( ([^()]+) \)"), r"(\1)"), (re.compile(r"\[ ([^][]+) \]"), r"[\1]"),
    ("$ ", "$"), ("\N{POUND SIGN} ", "\N{POUND SIGN}"),
)

_LAMBADA: Rules = (
    ("\N{LEFT DOUBLE QUOTATION MARK}", '"'), ("\N{RIGHT DOUBLE QUOTATION MARK}", '"'),
    (re.compile(r"^\s*"), "\n"), (re.compile(r"\s+$"), ""),
)


@dataclasses.dataclass(frozen=True)
class Dataset:
  """One of the data sets.

  Attributes:
    title: as tables have it.
    split: what the protocol scores.
    tfds: its name in the catalogue of TFDS.
    text_field: of a record there, or in JSON lines and CSV.
    kind: what its published files are to sources.py: "lines" or "files".
    row: from a line of it to the row that the protocol's loader yields.
    rules: of its detokeniser.
  """

  title: str
  split: str
  tfds: str
  kind: str
  rules: Rules
  text_field: str = "text"
  row: Callable[[str], str] = str.strip

  def detokenize(self, text: str) -> str:
    for what, by in self.rules:
      text = text.replace(what, by) if isinstance(what, str) else what.sub(by, text)
    return text


def _with_line_end(line: str) -> str:
  """WikiText's rows keep their line end; blank ones are empty."""
  return line.rstrip("\r\n") + "\n" if line.strip() else ""


DATASETS: dict[str, Dataset] = {
    "lambada": Dataset("LAMBADA", "test", "huggingface:eleutherai__lambada_openai", "files", _LAMBADA, row=str),
    "wikitext2": Dataset("WikiText2", "train", "huggingface:wikitext/wikitext-2-raw-v1", "lines", _WIKITEXT, row=_with_line_end),
    "ptb": Dataset("PTB", "test", "huggingface:ptb_text_only", "lines", _PTB, text_field="sentence"),
    "wikitext103": Dataset("WikiText103", "test", "huggingface:wikitext/wikitext-103-raw-v1", "lines", _WIKITEXT,
                           row=_with_line_end),
    "lm1b": Dataset("1BW", "test", "lm1b", "lines", _LM1B),
}


def parse(spec: str) -> tuple[str, str]:
  """The data set's name and where its text is, of NAME or NAME=WHERE; the latter is "" for the catalogue of TFDS.

  Raises:
    ValueError: there is no such data set.
  """
  name, equals, where = spec.partition("=")
  if name not in DATASETS or bool(equals) != bool(where):
    raise ValueError(f"{spec!r} is not NAME or NAME=FILE; the names are {', '.join(DATASETS)}, as 'ptb=ptb.test.txt', and FILE may "
                     "be a pattern, or tfds:NAME of a prepared data set.")
  return name, where


@dataclasses.dataclass(frozen=True)
class Blocks:
  """A data set in blocks.

  Attributes:
    tokens: int32 [N, T]; zeros past the end of a block.
    lengths: int32 [N], tokens of each block.
    words: of the scored tokens: runs of bytes that are no ASCII whitespace, after detokenising.
    rows: of the data set.
    dropped_tokens: that are in no block.
    fingerprint: sha256 of the source.
    is_shuffled: whether the rows are in another order than the published one.
  """

  tokens: np.ndarray
  lengths: np.ndarray
  words: int
  rows: int
  dropped_tokens: int
  fingerprint: str
  is_shuffled: bool


def load(
    spec: str, config: ml_collections.ConfigDict, recipe: ml_collections.ConfigDict, tokenizer: tokenizers.Tokenizer,
    block_size: int,
) -> Blocks:
  """Reads, detokenises, tokenises and packs a data set.

  Args:
    spec: see `parse`.
    config: the section `data` of a config; of it, where prepared TFDS data sets lie.
    recipe: the section `eval.zero_shot`.
    tokenizer: of `tokenizers.load`.
    block_size: T.

  Raises:
    ValueError: the recipe leaves no block, or the files are not what they should be; and what sources.py raises.
  """
  name, _ = parse(spec)
  dataset, texts = DATASETS[name], source(spec, config, recipe)
  boundary = np.array([tokenizer.boundary_id] if recipe.end_of_text else [], tokenizer.dtype)
  documents, words, progress = [], [], console.Share(f"tokenising {name}")
  for document in texts.stream():
    text = dataset.row(document.text)
    ids = tokenizer.encode(dataset.detokenize(text) if recipe.detokenize else text)
    documents.append(np.concatenate([ids, boundary]))
    words.append(tokenizer.word_starts(documents[-1]))
    progress(document.fraction)
  starts, lengths = cut([len(d) for d in documents], block_size, recipe.recipe, recipe.shards, recipe.map_batch)
  stream = np.concatenate([*documents, np.zeros(0, tokenizer.dtype)])
  if not len(starts):
    fix = "; recipe exact scores every token." if recipe.recipe == "sedd" else "."
    raise ValueError(f"{name}: its {len(stream):,} tokens in {len(documents):,} rows leave no block of {block_size} by the recipe "
                     f"{recipe.recipe}{fix}")
  places = starts[:, None] + np.arange(block_size)
  is_text = np.arange(block_size) < lengths[:, None]
  tokens = np.where(is_text, stream[np.minimum(places, len(stream) - 1)], 0).astype(np.int32)
  counted = int(np.concatenate(words)[places[is_text]].sum())
  return Blocks(tokens, lengths, counted, len(documents), len(stream) - int(lengths.sum()), texts.fingerprint,
                texts.is_shuffled)


def split(name: str, recipe: ml_collections.ConfigDict) -> str:
  """The split that a recipe scores: the protocol's, unless it names another."""
  return recipe.split or DATASETS[name].split


def source(spec: str, config: ml_collections.ConfigDict, recipe: ml_collections.ConfigDict) -> sources.Source:
  """Opens a data set, all of whose rows are in the split "train"; arguments as for `load`."""
  name, where = parse(spec)
  dataset = DATASETS[name]
  kind, colon, rest = where.partition(":")
  if not where:
    where = f"tfds:{dataset.tfds}"
  elif not (colon and kind in ("files", "lines", "tfds") and rest):
    where = f"{'files' if sources.is_records(where) else dataset.kind}:{where}"
  data = config.copy_and_resolve_references()
  with data.unlocked():
    data.update(source=where, text_field=dataset.text_field, prompt_field="",
                train_split=split(name, recipe), validation_split="", test_split="",
                validation_fraction=0.0, test_fraction=0.0)
  return sources.documents(data)


def cut(sizes: Sequence[int], block_size: int, recipe: str, shards: int, map_batch: int) -> tuple[np.ndarray, np.ndarray]:
  """Where the blocks of documents of these many tokens begin in the stream of all, and how many tokens each has; int [N] both.

  Args:
    sizes: tokens of each document.
    block_size: T.
    recipe: one of RECIPES.
    shards, map_batch: of the recipe sedd, which has 8 and 1000; exact has neither.
  """
  ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
  if recipe == "exact":
    starts = np.arange(0, ends[-1], block_size)
    return starts, np.minimum(block_size, ends[-1] - starts).astype(np.int32)
  starts = []
  for shard in np.array_split(np.arange(len(sizes)), min(shards, max(len(sizes), 1))):
    for first in range(0, len(shard), map_batch):
      begin, end = ends[shard[first]], ends[shard[min(first + map_batch, len(shard)) - 1] + 1]
      starts.append(np.arange(begin, end - block_size + 1, block_size))
  starts = np.concatenate([*starts, np.zeros(0, np.int64)])
  return starts, np.full(len(starts), block_size, np.int32)
