"""Prompts: a text in which [[n]] stands for n tokens to be drawn, e.g. "The [[12]] of the library"."""

import re

import numpy as np

from aogpt_jax.data import tokenizers

_BLANK = re.compile(r"\[\[(\d+)\]\]")


def parse(text: str, tokenizer: tokenizers.Tokenizer, length: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
  """The tokens of a prompt and which of them are given.

  Args:
    text: may be empty, and may have blanks.
    tokenizer: encodes what lies between the blanks.
    length: tokens of the whole text; what the prompt leaves is drawn behind it. 0: the prompt's own length where it has blanks,
      else `block_size`.
    block_size: T, the longest text there can be.

  Returns:
    int32 [L], 0 where a token is not given, and bool [L].

  Raises:
    ValueError: the prompt is longer than the text; the message has the numbers.
  """
  tokens, known = [], []
  pieces = _BLANK.split(text)  # text, number, text, number, ..., text
  for i, piece in enumerate(pieces):
    ids = [0] * min(int(piece), block_size + 1) if i % 2 else tokenizer.encode(piece).tolist()
    tokens += ids
    known += [i % 2 == 0] * len(ids)
  length = length or (len(tokens) if len(pieces) > 1 else block_size)
  if len(tokens) > length or length > block_size:
    raise ValueError(f"config.sample.prompt: has {len(tokens)} tokens, blanks included, and the text {min(length, block_size)}; "
                     "shorten it, or raise config.sample.length up to the model's block_size.")
  left = length - len(tokens)
  return np.array(tokens + [0] * left, np.int32), np.array(known + [False] * left, bool)
