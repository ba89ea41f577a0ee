import math

import ml_collections
import pytest

from aogpt_jax.data import baselines
from aogpt_jax.data import packing
from aogpt_jax.data import tokenizers


def pack(tmp_path, text, block_size):
  """One document and its boundary, which the last block leaves out."""
  (tmp_path / "a.txt").write_text(text)
  config = ml_collections.ConfigDict(dict(
      source=f"files:{tmp_path}/*.txt", text_field="text", prompt_field="", validation_fraction=0.0, test_fraction=0.0,
      train_split="train", validation_split="", test_split="", cache_dir=str(tmp_path / "cache"), workers=0))
  return packing.prepare(config, tokenizers.load("bytes"), block_size)


def test_entropies_of_a_text_counted_by_hand(tmp_path):
  # "aaab" twice: H1 of (3/4, 1/4); pairs inside a block: aa aa ab, after a: b in one of three.
  entropies = baselines.entropies(pack(tmp_path, "aaabaaab", 4), "train")
  assert entropies.tokens == 8
  assert entropies.unigram == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
  assert entropies.bigram == pytest.approx(-(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3)))


def test_text_that_its_last_token_determines_has_no_bigram_entropy(tmp_path):
  entropies = baselines.entropies(pack(tmp_path, "abcd" * 100, 16), "train")
  assert entropies.unigram == pytest.approx(math.log(4))
  assert entropies.bigram == pytest.approx(0, abs=1e-12)


def test_more_tokens_than_the_limit_are_sampled_evenly(tmp_path):
  packed = pack(tmp_path, "abcd" * 100 + "e" * 400, 16)
  entropies = baselines.entropies(packed, "train", max_tokens=160)
  assert entropies.tokens == 160
  assert entropies.unigram == pytest.approx(0.5 * math.log(8) + 0.5 * math.log(2))
