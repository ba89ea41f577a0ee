"""The judge: nats of the reference implementation's own windows, whatever else is scored, and perplexities in closed form."""

import math

import jax
from jax.sharding import AxisType, Mesh
import numpy as np
import pytest

from aogpt_jax import sharding
from aogpt_jax.data import tokenizers
from aogpt_jax.evaluation import judge as judge_lib
import random_gpt2

BYTES = tokenizers.load("bytes")
MESH = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), sharding.MESH_AXES, axis_types=(AxisType.Auto,) * 3)

pytest.importorskip("safetensors", reason="weights are in safetensors: pip install 'aogpt_jax[hf]'")


def load(directory, **options):
  return judge_lib.load(str(directory), BYTES, **dict(dtype="float32", mesh=MESH, batch_size=8) | options)


def random_texts(lengths, ids=256):
  rng = np.random.default_rng(0)
  return [rng.integers(ids, size=length) for length in lengths]


def test_nats_are_those_of_the_references_own_windows(tmp_path):
  theirs = random_gpt2.reference(tmp_path, vocab_size=257)
  import torch

  texts = random_texts((1, 2, 16, 17, 41))  # the window is of 16 tokens
  for text, nats in zip(texts, load(tmp_path).nll(texts), strict=True):
    assert nats.shape == (max(len(text) - 1, 0),)
    for i, value in enumerate(nats, 1):
      # Windows of 16 begin at 0, 8, 16, ...; a token is scored in the first that has it.
      start = 0 if i < 16 else 8 * math.ceil((i - 15) / 8)
      assert start <= i < start + 16 and (start == 0 or i - start >= 8)
      with torch.no_grad():
        logits = theirs(torch.asarray(text[None, start:i])).logits[0, -1]
      assert value == pytest.approx(-float(torch.log_softmax(logits, -1)[text[i]]), abs=2e-4)


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
  directory = random_gpt2.write(tmp_path_factory.mktemp("judge"), n_positions=64)
  texts = random_texts([*range(2, 80, 5), 300])
  return directory, texts, load(directory).nll(texts)


@pytest.mark.parametrize("count, batch_size", [(1, 8), (8, 8), (17, 8), (17, 3), (17, 1)])
def test_all_texts_are_scored_and_no_batch_changes_one(judged, count, batch_size):
  directory, texts, expected = judged
  assert len(texts) == 17
  found = load(directory, batch_size=batch_size).nll(texts[:count])
  for text, ours, others in zip(texts, found, expected):
    assert len(ours) == len(text) - 1
    np.testing.assert_allclose(ours, others, atol=2e-5)


def test_few_programs_score_texts_of_any_lengths(judged, compilations):
  directory, _, _ = judged
  jax.clear_caches()
  judge = load(directory)
  judge.nll(random_texts(range(2, 200)))
  assert compilations["_nll"] == 3  # windows of 16, 32 and 64 tokens, in batches of 8


def test_progress_counts_scored_tokens(judged):
  directory, texts, _ = judged
  told = []
  load(directory).nll(texts, told.append)
  assert told == sorted(told) and told[-1] == sum(len(text) - 1 for text in texts)


def test_a_judge_without_an_opinion_finds_the_size_of_its_vocabulary(tmp_path):
  tensors = {name: np.zeros_like(x) for name, x in random_gpt2.tensors().items()}
  score = load(random_gpt2.write(tmp_path, tensors)).score(random_texts((2, 5, 30)))
  for value in (score.perplexity, score.token_perplexity, math.exp(score.nats_per_token)):
    assert value == pytest.approx(320, rel=1e-5)
  assert (score.texts, score.tokens, score.longer_than_window) == (3, 34, 1)
  assert score.perplexity_stderr == pytest.approx(0, abs=1e-3)


def test_the_two_perplexities_and_their_standard_errors():
  log2 = math.log(2)
  nats = [np.array([log2, log2]), np.array([3 * log2]), np.zeros(0)]
  score = judge_lib.summarise(nats, [np.array([1, 1, 1]), np.array([1, 2]), np.array([3])], 8)
  assert score.perplexity == pytest.approx((2 + 8) / 2) and score.perplexity_stderr == pytest.approx(3)
  assert score.nats_per_token == pytest.approx(5 / 3 * log2) and score.token_perplexity == pytest.approx(2 ** (5 / 3))
  # Ratio of sums over 2 texts, 3 tokens: residuals -4/3 and 4/3 of log 2.
  assert score.nats_stderr == pytest.approx(8 / 9 * log2)
  assert score.token_perplexity_stderr == pytest.approx(2 ** (5 / 3) * 8 / 9 * log2)
  assert (score.texts, score.too_short, score.tokens) == (2, 1, 3)
  assert score.statistics.constant == 1 and score.statistics.entropy == pytest.approx(log2 / 2)


def test_without_anything_to_score_there_is_no_number():
  score = judge_lib.summarise([np.zeros(0)], [np.array([3])], 8)
  assert math.isnan(score.perplexity) and math.isnan(score.token_perplexity) and score.tokens == 0 and score.too_short == 1


def test_an_end_of_text_in_a_text_is_the_boundary(tmp_path):
  judge = load(random_gpt2.write(tmp_path))
  assert judge.encode("a<|endoftext|>b<|endoftext|>").tolist() == [97, 256, 98, 256]
  assert judge.encode("<|endoftext|>").tolist() == [256] and judge.encode("").tolist() == []
  ids = [256, 104, 105, 256, 256]
  assert judge.encode(BYTES.decode(ids)).tolist() == ids


@pytest.mark.parametrize("fields, expected", [
    (dict(vocab_size=256), "the 257 ids of the tokenizer bytes are not the 256 rows"),
    (dict(vocab_size=385), "the 257 ids of the tokenizer bytes are not the 385 rows"),
    (dict(n_positions=1), "takes texts of 1 token"),
])
def test_a_judge_that_can_not_score_is_refused(tmp_path, fields, expected):
  with pytest.raises(ValueError, match=expected):
    load(random_gpt2.write(tmp_path, **fields))
