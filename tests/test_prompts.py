"""Prompts: what lies between blanks is given, blanks and the rest are drawn."""

import numpy as np
import pytest

from aogpt_jax.data import tokenizers
from aogpt_jax.sampling import prompts

BYTES = tokenizers.load("bytes")


@pytest.mark.parametrize("text, length, given", [
    ("", 0, "????????"), ("", 3, "???"), ("ab", 0, "ab??????"), ("ab", 3, "ab?"), ("a[[2]]b", 0, "a??b"),
    ("[[1]]a[[2]]", 0, "?a??"), ("a[[2]]b", 6, "a??b??"), ("[[8]]", 0, "????????"), ("a[[0]]b", 0, "ab"),
    ("abcdefgh", 0, "abcdefgh"), ("[[x]]", 0, "[[x]]???"),
])
def test_a_prompt_is_given_tokens_and_blanks(text, length, given):
  tokens, known = prompts.parse(text, BYTES, length, 8)
  assert "".join(chr(t) if k else "?" for t, k in zip(tokens, known)) == given
  assert tokens.dtype == np.int32 and (tokens[~known] == 0).all()


@pytest.mark.parametrize("text, length", [("abcdefghi", 0), ("a[[8]]", 0), ("[[99999999999]]", 0), ("abc", 2)])
def test_a_prompt_that_is_too_long_is_named_with_the_numbers(text, length):
  with pytest.raises(ValueError, match="config.sample.prompt: has .* tokens"):
    prompts.parse(text, BYTES, length, 8)
