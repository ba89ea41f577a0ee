"""Zero-shot data sets: rows and detokenisers of the published formats, recipes, and scores from a checkpoint alone."""

import base64
import csv
import json
import math

import jax
import ml_collections
import numpy as np
import pytest
import tensorflow_datasets as tfds

import random_gpt2
from aogpt_jax import config as config_lib
from aogpt_jax.data import tokenizers
from aogpt_jax.data import zero_shot as data
from aogpt_jax.evaluation import zero_shot
from aogpt_jax.models import gpt2

BYTES = tokenizers.load("bytes")


def config_of(**fields) -> ml_collections.ConfigDict:
  config = config_lib.default_config()
  config.eval.zero_shot.update(fields)
  return config


def load(spec, block_size=16, tfds_data_dir="", **fields):
  config = config_of(**fields)
  config.data.tfds_data_dir = tfds_data_dir
  return data.load(spec, config.data, config.eval.zero_shot, BYTES, block_size)


def rows_of(blocks):
  """The rows of the recipe exact with their ends of text."""
  text = np.concatenate([tokens[:length] for tokens, length in zip(blocks.tokens, blocks.lengths)])
  return BYTES.decode(text).split(tokenizers.BOUNDARY)[:-1]


@pytest.mark.parametrize("name, text, expected", [
    ("wikitext2", ' The " Blue " line , 1 @,@ 234 @.@ 5 m @-@ long ; see ( a ) and [ b ] . \n',
     ' The "Blue" line, 1,234.5 m-long; see (a) and [b].\n'),
    ("wikitext103", " = = History = = \n", " == History ==\n"),
    ("wikitext103", " = = = Names of Robert 's = = = \n", " === Names of Robert's ===\n"),
    ("wikitext103", " the boys ' N 20 ° C and { x } ! \n", " the boys' 1 20°C and {x}!\n"),
    ("ptb", "mr. <unk> 's board does n't expect N N N at $ N or the banks ' \\/ share",
     "mr. ?'s board doesn't expect 1 1 1 at $1 or the banks' / share"),
    ("lm1b", 'He said , " It is a ( small ) test . " Really ? Yes', 'He said, "It is a (small) test." Really? Yes'),
    ("lm1b", "It cost $ 5 and £ 3 : see http : / / x / y or [ z ] ; the dog 's tail !",
     "It cost $5 and £3: see http://x/y or [z]; the dog's tail!"),
    ("lm1b", "All is well .", "All is well."),
    ("lambada", "  \u201cyes,\u201d he said \n", '\n"yes," he said'),
])
def test_detokenisers_follow_their_rules(name, text, expected):
  assert data.DATASETS[name].detokenize(text) == expected


def test_each_data_set_is_read_in_its_published_format(tmp_path):
  plain = dict(recipe="exact", detokenize=False)
  (tmp_path / "wiki.raw").write_text(" \n = A = \n \n One . \n")
  for name in ("wikitext2", "wikitext103"):
    assert rows_of(load(f"{name}={tmp_path}/wiki.raw", **plain)) == ["", " = A = \n", "", " One . \n"]
  (tmp_path / "ptb.txt").write_text(" a <unk> b \n c N \n")
  assert rows_of(load(f"ptb={tmp_path}/ptb.txt", **plain)) == ["a <unk> b", "c N"]
  with open(tmp_path / "ptb.csv", "w", newline="", encoding="utf-8") as f:
    csv.writer(f).writerows([["id", "sentence"], [1, 'says "a"'], [2, "c,\nN"]])
  assert rows_of(load(f"ptb={tmp_path}/ptb.csv", **plain)) == ['says "a"', "c,\nN"]
  (tmp_path / "lambada.jsonl").write_text('{"text": "a \\u201cb\\u201d"}\n{"text": "c"}\n')
  assert rows_of(load(f"lambada={tmp_path}/lambada.jsonl", **plain)) == ["a \u201cb\u201d", "c"]
  assert rows_of(load(f"lambada={tmp_path}/lambada.jsonl", recipe="exact")) == ['\na "b"', "\nc"]
  for i in range(2):
    (tmp_path / f"news.en.heldout-0000{i}-of-00050").write_text(f"Line {i} .\nAnother .\n")
  assert rows_of(load(f"lm1b={tmp_path}/news*", **plain)) == ["Line 0 .", "Another .", "Line 1 .", "Another ."]


class AogptTestSentences(tfds.core.GeneratorBasedBuilder):
  """Sentences in the column that PTB has."""

  VERSION = tfds.core.Version("1.0.0")

  def _info(self):
    return tfds.core.DatasetInfo(
        builder=self, features=tfds.features.FeaturesDict({"sentence": tfds.features.Text()}), disable_shuffling=True)

  def _split_generators(self, dl_manager):
    return {"train": self._generate_examples("train"), "test": self._generate_examples("test")}

  def _generate_examples(self, split):
    for i in range(3):
      yield i, {"sentence": f"{split} {i}"}


def test_a_prepared_tfds_set_gives_the_split_of_the_recipe(tmp_path):
  AogptTestSentences(data_dir=tmp_path, file_format="array_record").download_and_prepare()
  read = lambda **fields: rows_of(
      load("ptb=tfds:aogpt_test_sentences", tfds_data_dir=str(tmp_path), recipe="exact", **fields))
  assert read() == ["test 0", "test 1", "test 2"]
  assert read(split="train[1:]") == ["train 1", "train 2"]
  assert not load("ptb=tfds:aogpt_test_sentences", tfds_data_dir=str(tmp_path), recipe="exact").is_shuffled


def chunks_of_the_released_code(rows, block_size, shards=8, map_batch=1000):
  """SPEC's rule in lists: contiguous shards, the first ones longer; batches of rows; the remainder of each is dropped."""
  chunks, start = [], 0
  for shard in range(shards):
    size = len(rows) // shards + (shard < len(rows) % shards)
    part = rows[start : start + size]
    start += size
    for first in range(0, size, map_batch):
      tokens = [token for row in part[first : first + map_batch] for token in row]
      chunks += [tokens[i : i + block_size] for i in range(0, len(tokens) // block_size * block_size, block_size)]
  return chunks


@pytest.mark.parametrize("count, shards, map_batch", [
    (2345, 8, 1000), (2345, 8, 100), (11, 8, 1000), (2345, 1, 1000), (2000, 1, 1000)])
def test_the_recipe_sedd_gives_the_chunks_of_the_released_code(tmp_path, count, shards, map_batch):
  rng = np.random.default_rng(0)
  rows = ["w" * rng.integers(0, 60) for _ in range(count)]
  (tmp_path / "rows.txt").write_text("".join(f"{row}\n" for row in rows))
  blocks = load(f"ptb={tmp_path}/rows.txt", block_size=64, shards=shards, map_batch=map_batch)
  expected = chunks_of_the_released_code([[*row.encode(), 256] for row in rows], 64, shards, map_batch)
  assert blocks.tokens.tolist() == expected and (blocks.lengths == 64).all() and blocks.rows == count
  assert blocks.dropped_tokens == sum(len(row) + 1 for row in rows) - 64 * len(expected)


def test_fewer_rows_than_shards_have_a_shard_each(tmp_path):
  (tmp_path / "rows.txt").write_text("a" * 20 + "\n" + "b" * 40 + "\n")
  blocks = load(f"ptb={tmp_path}/rows.txt")
  assert [BYTES.decode(row) for row in blocks.tokens] == ["a" * 16, "b" * 16, "b" * 16] and blocks.dropped_tokens == 21 + 41 - 48


def test_the_recipe_exact_scores_every_token_whatever_the_shards(tmp_path):
  rows = [f"row {i} of a file" for i in range(123)]
  (tmp_path / "rows.txt").write_text("\n".join(rows))
  blocks = load(f"ptb={tmp_path}/rows.txt", recipe="exact")
  assert rows_of(blocks) == rows and blocks.dropped_tokens == 0
  assert (blocks.lengths[:-1] == 16).all() and not blocks.tokens[-1, blocks.lengths[-1] :].any()
  other = load(f"ptb={tmp_path}/rows.txt", recipe="exact", shards=3, map_batch=7)
  np.testing.assert_array_equal(other.tokens, blocks.tokens)
  np.testing.assert_array_equal(other.lengths, blocks.lengths)
  of = lambda **fields: zero_shot.recipe(config_of(recipe="exact", **fields), "ptb", BYTES, 16, ("uniform",))
  assert zero_shot.hash_of(of()) == zero_shot.hash_of(of(shards=3, map_batch=7))


def test_a_file_shorter_than_a_block_is_scored_by_exact_and_an_error_by_sedd(tmp_path):
  (tmp_path / "short.txt").write_text("in all\nten words\n")
  blocks = load(f"ptb={tmp_path}/short.txt", block_size=64, recipe="exact")
  assert blocks.lengths.tolist() == [17] and (blocks.words, blocks.rows, blocks.dropped_tokens) == (4, 2, 0)
  with pytest.raises(ValueError, match="its 17 tokens in 2 rows leave no block of 64 by the recipe sedd; recipe exact"):
    load(f"ptb={tmp_path}/short.txt", block_size=64)


def test_words_are_counted_where_they_begin_in_what_is_scored(tmp_path):
  text = ["  one two", "three", "", "four\tfive six  "]
  (tmp_path / "rows.txt").write_text("\n".join(text))
  for end_of_text in (True, False):
    blocks = load(f"ptb={tmp_path}/rows.txt", block_size=4, recipe="exact", end_of_text=end_of_text)
    assert blocks.words == 6 and (256 in blocks.tokens) == end_of_text
  assert load(f"ptb={tmp_path}/rows.txt", block_size=4, shards=1).words == 6
  assert load(f"ptb={tmp_path}/rows.txt", block_size=5, shards=1).words == 5  # "six" and its end are dropped


@pytest.mark.parametrize("spec, message", [
    ("wikitext", "the names are lambada, wikitext2, ptb, wikitext103, lm1b"), ("ptb=", "is not NAME or NAME=FILE"),
    ("=ptb.txt", "is not NAME or NAME=FILE")])
def test_a_data_set_that_is_not_there_is_named_with_those_that_are(spec, message):
  with pytest.raises(config_lib.ConfigError, match=message):
    config_lib.check(config_of(datasets=(spec,)))


@pytest.mark.parametrize("section, field, value", [
    ("zero_shot", "recipe", "exact"), ("zero_shot", "detokenize", False), ("zero_shot", "end_of_text", False),
    ("zero_shot", "split", "validation"), ("zero_shot", "shards", 1), ("zero_shot", "map_batch", 10), ("eval", "seed", 1),
    ("eval", "orders", 5), ("eval", "ensemble", 2), ("eval", "targets", 3)])
def test_every_switch_changes_the_hash_of_the_recipe(section, field, value):
  of = lambda config: zero_shot.hash_of(zero_shot.recipe(config, "ptb", BYTES, 16, ("left_to_right", "uniform")))
  config = config_of()
  before = of(config)
  assert before == of(config_of()) and len(before) == 16
  (config.eval if section == "eval" else config.eval.zero_shot)[field] = value
  assert of(config) != before


def test_data_set_tokenizer_block_size_and_distributions_change_the_hash(tmp_path):
  ranks = tmp_path / "x.tiktoken"
  ranks.write_text("".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256)))
  base = (config_of(), "ptb", BYTES, 16, ("uniform",))
  others = [(*base[:1], "lm1b", *base[2:]), (*base[:2], tokenizers.load(str(ranks)), *base[3:]), (*base[:3], 32, base[4]),
            (*base[:4], ("left_to_right",))]
  assert len({zero_shot.hash_of(zero_shot.recipe(*arguments)) for arguments in (base, *others)}) == 5


def test_a_checkpoint_alone_is_scored_on_data_sets_beside_the_published_figures(command, tmp_path):
  assert command("--mode=train", "--workdir=run", "steps=4").returncode == 0
  (tmp_path / "ptb.txt").write_text("".join(f"the <unk> of N shares fell {i} times\n" for i in range(9)))
  (tmp_path / "lambada.jsonl").write_text('{"text": "a short text"}\n')
  evaluate = lambda *more: command(
      "--mode=eval", "--workdir=run", "steps=4", "eval.zero_shot.datasets=('ptb=ptb.txt', 'lambada=lambada.jsonl')",
      "eval.zero_shot.recipe=exact", "eval.ensemble=2", "data.cache_dir=elsewhere", *more)
  done = evaluate()
  assert done.returncode == 0, done.stderr
  assert not (tmp_path / "elsewhere").exists() and not (tmp_path / "run" / "eval_validation.json").exists()
  with open(tmp_path / "run" / "zero_shot.json", encoding="utf-8") as f:
    result = json.load(f)
  scores = {(s["dataset"], s["order"], s["contexts"]): s for s in result["scores"]}
  assert set(scores) == {(d, *of) for d in ("ptb", "lambada") for of in (("left_to_right", 1), ("any_order", 1), ("any_order", 2))}
  text = "".join(f"the ? of 1 shares fell {i} times" for i in range(9))
  for s in scores.values():
    if s["dataset"] == "ptb":
      assert (s["tokens"], s["bytes"], s["words"], s["rows"], s["dropped_tokens"]) == (len(text) + 9, len(text), 72, 9, 0)
    else:
      assert (s["tokens"], s["bytes"], s["words"], s["blocks"]) == (14, 13, 3, 1)
    total = s["nats_per_token"] * s["tokens"]
    np.testing.assert_allclose(s["perplexity"], math.exp(s["nats_per_token"]), rtol=1e-9)
    np.testing.assert_allclose(s["word_perplexity"], math.exp(min(total / s["words"], 700)), rtol=1e-9)
    np.testing.assert_allclose(s["bits_per_byte"], total / s["bytes"] / math.log(2), rtol=1e-9)
    assert (s["model"], s["weights"], s["dtype"], s["recipe"]["recipe"]) == ("run", "ema", "float32", "exact")
  assert "Not comparable with the published figures" in done.stdout and "SEDD medium, published" in done.stdout
  markdown = (tmp_path / "run" / "zero_shot.md").read_text()
  assert "| any_order | run, M=2 | " in markdown and "| left_to_right | GPT-2 small, published | 45.04 | 138.43 |" in markdown

  raw = evaluate("eval.weights=raw")
  assert raw.returncode == 0, raw.stderr
  with open(tmp_path / "run" / "zero_shot.json", encoding="utf-8") as f:
    raw = json.load(f)["scores"]
  for s in raw:
    ema = scores[s["dataset"], s["order"], s["contexts"]]
    assert s["weights"] == "raw" and s["nats_per_token"] != ema["nats_per_token"]

  missing = evaluate("eval.zero_shot.datasets=('ptb=ptb.txt', 'lm1b=nowhere*')")
  assert missing.returncode != 0 and "lm1b=nowhere*: " in missing.stderr and "matches no file" in missing.stderr
  assert missing.stderr.count("\n") == 1 and not missing.stdout


def test_gpt2_is_a_row_that_needs_no_checkpoint_and_is_scored_on_every_token(command, tmp_path):
  pytest.importorskip("safetensors", reason="weights are in safetensors: pip install 'aogpt_jax[hf]'")
  directory = random_gpt2.write(tmp_path / "judge", n_positions=32)
  text = "one two\nthree four five six seven eight nine\n"
  (tmp_path / "ptb.txt").write_text(text)
  done = command("--mode=eval", "--workdir=new", "eval.zero_shot.datasets=('ptb=ptb.txt',)", "eval.zero_shot.recipe=exact",
                 f"eval.zero_shot.models=('gpt2:{directory}',)", "eval.generative.tokenizer=bytes")
  assert done.returncode == 0, done.stderr
  with open(tmp_path / "new" / "zero_shot.json", encoding="utf-8") as f:
    (score,) = json.load(f)["scores"]
  stream = np.array([256, *(256 if character == "\n" else ord(character) for character in text)])
  model, params = gpt2.load(directory)
  nats = 0.0
  for start in range(0, len(stream) - 1, 32):
    block = stream[start + 1 : start + 33]
    log_probs = jax.nn.log_softmax(model.apply({"params": params}, np.append(256, block[:-1])[None])[0])
    nats -= float(log_probs[np.arange(len(block)), block].sum())
  np.testing.assert_allclose(score["nats_per_token"], nats / len(text), rtol=1e-5)
  assert (score["tokens"], score["words"], score["blocks"], score["order"]) == (len(text), 9, 2, "left_to_right")
  assert score["model"] == "GPT-2 (judge)" and "GPT-2 medium, published" in done.stdout

  missing = command("--mode=eval", "--workdir=new", "eval.zero_shot.datasets=('ptb=ptb.txt',)", "eval.generative.tokenizer=bytes",
                    "eval.zero_shot.models=('gpt2:./nowhere',)")
  assert missing.returncode != 0 and missing.stderr.startswith("error: config.eval.zero_shot.models: gpt2:./nowhere: ")
