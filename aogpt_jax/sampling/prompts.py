"""Prompts: what is given of the texts to be drawn, as tokens at any positions or as a text with blanks.

In a text, [[n]] stands for n tokens to be drawn, e.g. "The [[12]] of the library".
"""

from collections.abc import Iterator
import dataclasses
import pathlib
import re
import sys

import jax
import ml_collections
import numpy as np

from aogpt_jax import console
from aogpt_jax import records
from aogpt_jax.data import tokenizers

_BLANK = re.compile(r"\[\[0*(\d+)\]\]")
STANDARD_INPUT = "-"


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
  """What is given of a text of L tokens.

  Attributes:
    tokens: int [L], by position; ignored where a token is not given.
    known: bool [L], which tokens are given.
    text: the prompt as it was written, if it was.
    name: what messages call it.
  """

  tokens: np.ndarray
  known: np.ndarray
  text: str = ""
  name: str = "prompt"

  def __post_init__(self):
    tokens, known = np.asarray(self.tokens), np.asarray(self.known)
    if tokens.ndim != 1 or known.shape != tokens.shape or known.dtype != bool or tokens.dtype.kind not in "iu":
      raise ValueError(f"{self.name}: tokens are {tokens.dtype} {list(tokens.shape)} and known {known.dtype} "
                       f"{list(known.shape)}; they must be int [L] and bool [L].")
    if not tokens.size:
      raise ValueError(f"{self.name}: is of no tokens at all; give at least one, or a blank such as [[8]].")
    object.__setattr__(self, "tokens", np.where(known, tokens, 0).astype(np.int32))
    object.__setattr__(self, "known", known)


def parse(text: str, tokenizer: tokenizers.Tokenizer, length: int, block_size: int, name: str = "prompt") -> Prompt:
  """The prompt that a text stands for.

  Args:
    text: may be empty, and may have blanks.
    tokenizer: encodes what lies between the blanks.
    length: tokens of the whole text; what the prompt leaves is drawn behind it. 0: the prompt's own length where it has blanks,
      else `block_size`.
    block_size: T, the longest text there can be.
    name: what messages call the prompt.

  Raises:
    ValueError: the prompt is longer than the text, or no Unicode text; the message has the numbers.
  """
  tokens, known = [], []
  pieces = _BLANK.split(text)  # text, number, text, number, ..., text
  for i, piece in enumerate(pieces):
    try:
      ids = [0] * min(int(piece[:18]), block_size + 1) if i % 2 else tokenizer.encode(piece).tolist()
    except UnicodeEncodeError as e:
      raise ValueError(f"{name}: has {piece[e.start]!r}, which is no character; write the prompt in UTF-8.") from None
    tokens += ids
    known += [i % 2 == 0] * len(ids)
  length = length or (len(tokens) if len(pieces) > 1 else block_size)
  if len(tokens) > length or length > block_size:
    raise ValueError(f"{name}: has {len(tokens)} tokens, blanks included, and the text {min(length, block_size)}; "
                     "shorten it, or raise the length (config.sample.length) up to the model's block_size.")
  left = length - len(tokens)
  return Prompt(np.array(tokens + [0] * left, np.int32), np.array(known + [False] * left, bool), text, name)


def load(config: ml_collections.ConfigDict, tokenizer: tokenizers.Tokenizer, block_size: int) -> list[Prompt]:
  """The prompts of a config's section `sample`, at least one: those of its `prompt_file`, else its `prompt`.

  Standard input is read to its end, and can't be read again.

  Raises:
    OSError: the file can't be read.
    ValueError: there are no prompts in it, or one that is malformed or too long; the message names its line.
  """
  if config.prompt_file:
    written = list(_written(config.prompt_file))
    if not written:
      raise ValueError(f"config.sample.prompt_file={config.prompt_file}: has no prompts; write one a line.")
  else:
    written = [("config.sample.prompt", config.prompt)]
  return [parse(text, tokenizer, config.length, block_size, name) for name, text in written]


def _written(path: str) -> Iterator[tuple[str, str]]:
  """Names and texts of a file's prompts; lines of white space are passed over."""
  field = f"config.sample.prompt_file={path}"
  content = _read(path, field)
  try:
    lines = content.decode("utf-8-sig").split("\n")
  except UnicodeDecodeError as e:
    number = content.count(b"\n", 0, e.start) + 1
    raise ValueError(f"{field}, line {number}: is not UTF-8; convert the file.") from None
  for number, line in enumerate(lines, 1):
    if line.strip():
      name = f"{field}, line {number}"
      yield name, _field_of_json(line, name) if path.endswith(".jsonl") else line.removesuffix("\r")


def _read(path: str, field: str) -> bytes:
  if path != STANDARD_INPUT:
    try:
      return pathlib.Path(path).expanduser().read_bytes()
    except OSError as e:
      raise OSError(f"{field}: can't be read ({e.strerror}); give a file with a prompt a line, or .jsonl with an object a "
                    "line, or - for standard input.") from None
  if jax.process_count() > 1:
    raise ValueError(f"{field}: standard input reaches one of the {jax.process_count()} processes alone; give a file that all of "
                     "them can read.")
  if sys.stdin is None:
    raise ValueError(f"{field}: standard input is closed; give a file, or a prompt in config.sample.prompt.")
  if sys.stdin.isatty():
    console.say("prompts, one a line; Ctrl-D ends them:")
  return sys.stdin.buffer.read()


def _field_of_json(line: str, name: str) -> str:
  fix = 'write an object such as {"prompt": "The [[9]] of"}.'
  try:
    record = records.value(line)
  except ValueError as e:
    raise ValueError(f"{name}: is not JSON ({e}); {fix}") from None
  if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
    raise ValueError(f'{name}: has no text in a field "prompt"; {fix}')
  return record["prompt"]
