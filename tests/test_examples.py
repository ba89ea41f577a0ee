"""Data of which a part is given: rows of prompts and completions, and a loss and an evaluation of what is predicted alone."""

import json

from flax import linen as nn
import jax
import jax.numpy as jnp
from ml_collections import config_dict
import numpy as np
import pytest

from aogpt_jax import objectives
from aogpt_jax import orders
from aogpt_jax import run as run_lib
from aogpt_jax.data import baselines
from aogpt_jax.data import loader
from aogpt_jax.data import packing
from aogpt_jax.data import sources
from aogpt_jax.data import tokenizers
from aogpt_jax.evaluation import held_out
from aogpt_jax.training import loop
from aogpt_jax.training import metrics
from aogpt_jax.training import step as step_lib

G, P, X = orders.GIVEN, orders.PREDICTED, orders.PADDING
LENGTH = 16


def data_config(path, **fields):
  return config_dict.create(**dict(
      source=f"files:{path}", text_field="text", prompt_field="prompt", completion_field="completion", validation_fraction=0.0,
      test_fraction=0.0, cache_dir=str(path.parent / "cache"), workers=0) | fields)


def write(path, records):
  path.write_text("".join(json.dumps(record) + "\n" for record in records))
  return path


def rows_of(config):
  return loader.Rows(packing.prepare(config, tokenizers.load("bytes"), 8), "train").read(range(2))


def test_rows_are_the_given_text_with_what_is_predicted_and_padding(tmp_path):
  path = write(tmp_path / "a.jsonl", [
      {"prompt": "ab", "completion": "cd"}, {"prompt": "[[3]]x[[]]yz", "completion": ["é", "p"]},
      {"prompt": "too long", "completion": "!"}, {"prompt": "nothing", "completion": ""}])
  packed = packing.prepare(data_config(path), tokenizers.load("bytes"), 8)
  tokens, parts = loader.Rows(packed, "train").read([0, 1]).transpose(1, 0, 2)
  assert tokens.tolist() == [[*b"abcd", 256, 0, 0, 0], [*"éxpyz".encode(), 0, 0]]
  assert parts.tolist() == [[G, G, P, P, P, X, X, X], [P, P, G, P, G, G, X, X]]
  count = packed.metadata["splits"]["train"]
  assert [count[name] for name in ("documents", "long_documents", "empty_documents", "tokens")] == [2, 1, 1, 11]


def test_a_csv_file_has_examples_too_and_parts_of_any_size_and_workers_the_same_rows(tmp_path):
  (tmp_path / "a.csv").write_text("prompt,completion\nab,cd\nef,g\n")
  path = write(tmp_path / "a.jsonl", [{"prompt": "ab", "completion": "cd"}, {"prompt": "ef", "completion": "g"}])
  np.testing.assert_array_equal(rows_of(data_config(path)), rows_of(data_config(tmp_path / "a.csv")))
  packed = packing.prepare(data_config(path, cache_dir=str(tmp_path / "other")), tokenizers.load("bytes"), 8, part_chars=1)
  np.testing.assert_array_equal(loader.Rows(packed, "train").read([0, 1]), rows_of(data_config(path)))


@pytest.mark.parametrize("record, expected", [
    ({"prompt": "a [[2]]", "completion": ["b", "c"]}, "the prompt has 1 blanks and the completion 2 texts"),
    ({"prompt": "a", "completion": []}, "the prompt has 0 blanks and the completion 0 texts"),
    ({"prompt": "a", "completion": 3}, "field 'completion' holds a int, not a string"),
    ({"prompt": ["a"], "completion": "b"}, "field 'prompt' holds a list, not a string"),
    ({"prompt": "a", "answer": "b"}, "no field 'completion'; it has .*: set data.completion_field"),
])
def test_a_malformed_record_is_named_by_its_line(tmp_path, record, expected):
  path = write(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}, record])
  with pytest.raises(ValueError, match=expected) as error:
    rows_of(data_config(path))
  assert "a.jsonl:2" in str(error.value) and "\n" not in str(error.value)


def test_texts_without_records_and_examples_that_are_all_too_long_are_refused(tmp_path):
  (tmp_path / "a.txt").write_text("text")
  with pytest.raises(ValueError, match="a.txt: has no records with the field data.prompt_field='prompt'"):
    sources.documents(data_config(tmp_path / "a.txt"))
  with pytest.raises(ValueError, match="has no examples of at most 8 tokens, and 1 of more"):
    rows_of(data_config(write(tmp_path / "a.jsonl", [{"prompt": "12345", "completion": "678"}])))


def test_completions_of_one_prompt_are_in_one_split(tmp_path):
  path = write(tmp_path / "a.jsonl", [{"prompt": str(i // 4), "completion": str(i)} for i in range(200)])
  config = data_config(path, validation_fraction=0.3, test_fraction=0.2)
  found = {}
  for document in sources.documents(config).stream():
    found.setdefault(document.pieces[0][0], set()).add(document.split)
  assert {len(splits) for splits in found.values()} == {1} and len(set.union(*found.values())) == 3


def test_given_positions_are_first_from_left_to_right_and_padding_is_last():
  found = orders.by_parts(jnp.array([[5, 1, 4, 0, 3, 2]]), jnp.array([[G, P, G, P, P, X]]))
  assert found.tolist() == [[0, 2, 1, 4, 3, 5]]


@pytest.fixture(scope="module")
def some(words, tmp_path_factory):
  """A config of two layers, its trainer and state, and a batch of examples with all kinds of rows."""
  import conftest

  config = conftest.make_words_config(words)
  config.orders, config.batch_size = "uniform", 8
  config.model.gate_init = 1.0
  run = run_lib.open_run(config, str(tmp_path_factory.mktemp("run")), "sample")
  rng = np.random.default_rng(0)
  parts = np.sort(rng.choice([G, P, X], size=(8, LENGTH)), axis=1)
  parts[0], parts[1] = G, P
  parts[2] = np.where(np.arange(LENGTH) % 3 == 0, P, G)
  return config, run, np.stack([rng.integers(256, size=(8, LENGTH)), parts], axis=1).astype(np.int32)


def direct_loss(model, params, batch, sigma):
  """The mean of -log p over what is predicted, of orders made by sorting in Python."""
  arranged = [sorted(i for i in order if part[i] == G) + [i for i in order if part[i] == P] + [i for i in order if part[i] == X]
              for (_, part), order in zip(batch, sigma)]
  scored = np.array([(b, i, batch[b, 0, p]) for b, order in enumerate(arranged) for i, p in enumerate(order)
                     if batch[b, 1, p] == P])
  log_probs = jax.nn.log_softmax(model.apply({"params": params}, batch[:, 0], jnp.array(arranged)))
  return -log_probs[tuple(scored.T)].mean()


def test_the_loss_and_its_gradient_are_of_what_is_predicted_alone(some):
  config, run, batch = some
  trainer = step_lib.make_trainer(config, run.model, run.mesh)  # of two micro-batches
  sigma = np.asarray(orders.draw("uniform", step_lib.order_key(config.seed), 0, jnp.arange(8), LENGTH))
  state = trainer.init()
  loss, gradient = jax.jit(jax.value_and_grad(lambda p: direct_loss(run.model, p, batch, sigma)))(state.params)
  _, found = trainer.step(state, batch)
  assert float(found["loss"]) == pytest.approx(float(loss), abs=1e-5)
  norm = float(jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradient))))
  assert float(found["grad_norm"]) == pytest.approx(norm, rel=1e-5)


def test_prompts_are_no_targets(some):
  _, run, batch = some
  params = jax.tree.map(jnp.zeros_like, nn.unbox(jax.eval_shape(lambda: step_lib.init_params(run.model, 0))))
  tokens, parts = objectives.unpack(jnp.asarray(batch))
  weighted = objectives.weigh(jnp.tile(jnp.arange(LENGTH), (8, 1)), parts)
  logits = jnp.zeros((*tokens.shape, 320))  # of parameters of 0

  def loss(logits, targets):
    nll = objectives.cross_entropy(logits, jnp.take_along_axis(targets, weighted.orders, axis=1))
    return (nll * weighted.weights).mean()

  value, gradient = jax.value_and_grad(loss)(logits, tokens)
  found = jax.jit(lambda p: objectives.weighted_nll(run.model, p, tokens, weighted))(params)
  assert value == pytest.approx(float(found.mean()), rel=1e-6) == np.log(320)
  others = jnp.where(parts == P, tokens, 255 - tokens)
  np.testing.assert_array_equal(jax.grad(loss)(logits, others), gradient)
  is_given = jnp.take_along_axis(parts, weighted.orders, axis=1) != P
  assert not gradient[is_given].any() and (jnp.abs(gradient[~is_given]).sum(axis=-1) > 0).all()


def test_a_run_learns_completions_and_is_evaluated_by_them(words_config, tmp_path):
  rng = np.random.default_rng(0)
  noise = ["".join(map(chr, rng.integers(97, 123, size=6))) for _ in range(150)]
  path = write(tmp_path / "a.jsonl", [{"prompt": text, "completion": "= yes" if text[0] < "n" else "= no"} for text in noise])
  config = words_config
  config.data.update(source=f"files:{path}", prompt_field="prompt", cache_dir=str(tmp_path / "cache"))
  config.eval.update(every_steps=60, distributions=("left_to_right",))
  config.sample.orders = ("left_to_right",)
  config.steps = config.checkpoint.every_steps = config.optimizer.decay_steps = 60
  config.model.gate_init = 1.0
  run = run_lib.open_run(config, str(tmp_path / "run"))
  state = loop.train(run)
  results = held_out.evaluate(run, state.params, "validation", 0)["left_to_right"]
  split = run.packed.metadata["splits"]["validation"]
  assert results.tokens == split["tokens"] - 6 * split["documents"]  # without the prompts
  first = next(r["loss"] for r in metrics.read(run.workdir) if "loss" in r)
  assert first > 5 and results.nats_per_token < 1.0  # of prompts alone, log 26 would be left
  found = baselines.entropies(run.packed, "validation")
  assert found.tokens == results.tokens and found.bigram < found.unigram < 2.5
