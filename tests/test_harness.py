"""The lm-evaluation-harness on local tasks: its command gives the log-likelihoods and texts of direct computations."""

import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import ROOT
from aogpt_jax import load_model
from aogpt_jax import load_tokenizer
from aogpt_jax import sampling

pytest.importorskip("lm_eval", reason="the harness: pip install 'aogpt_jax[lm-eval]'")

DOCUMENTS = [dict(question="any order", right=" mask", wrong=" token"), dict(question="ste", right="p", wrong="q"),
             dict(question="cache of all entries", right=" any", wrong=" entry step")]
COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
test_split: train
"""
TASKS = {
    "choice": """
task: local_choice
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{[right, wrong]}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "rolling": """
task: local_rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}{{right}}"
metric_list: [{metric: byte_perplexity}]
""",
    "draw": """
task: local_draw
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{right}}"
generation_kwargs: {until: ["\\u0001"], max_gen_toks: 5, do_sample: false}
metric_list: [{metric: exact_match}]
"""}


@pytest.fixture(scope="module")
def samples(untrained, tmp_path_factory):
  """What the harness logs of each task: task -> samples."""
  directory = tmp_path_factory.mktemp("harness")
  data = directory / "data.jsonl"
  data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
  for name, task in TASKS.items():
    (directory / f"{name}.yaml").write_text(COMMON.format(data=data) + task)
  process = subprocess.run(
      [sys.executable, "-m", "aogpt_jax.harness", untrained, "--tasks", "local_choice,local_rolling,local_draw", "--include_path",
       str(directory), "--output_path", str(directory / "out"), "--log_samples", "--batch_size", "4"],
      capture_output=True, text=True, cwd=directory, check=False,
      env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "HF_HOME": str(directory), "HF_HUB_OFFLINE": "1",
           "HF_DATASETS_OFFLINE": "1"})
  assert process.returncode == 0, process.stderr[-3000:]
  found = {}
  for task in ("choice", "rolling", "draw"):
    path, = (directory / "out").rglob(f"samples_local_{task}_*.jsonl")
    found[task] = sorted(map(json.loads, path.read_text().splitlines()), key=lambda sample: sample["doc_id"])
  return found


@pytest.fixture(scope="module")
def model(untrained):
  return load_model(untrained.removeprefix("--workdir="))


@functools.partial(jax.jit, static_argnums=0)
def _logits(module, params, tokens):
  return module.apply({"params": params}, tokens, jnp.arange(16)[None])[0]


def log_prob(model, context, continuation):
  """log p(continuation | context) in nats and whether it is greedy, by one full pass in left-to-right order."""
  module, params = model
  tokens = ([*context, *continuation] + [0] * 16)[:16]
  logits = np.asarray(_logits(module, params, jnp.array([tokens])), np.float64)
  places = range(len(context), len(context) + len(continuation))
  nats = sum(logits[i, tokens[i]] - np.log(np.exp(logits[i]).sum()) for i in places)
  return nats, all(logits[i, :257].argmax() == tokens[i] for i in places)


def test_choices_have_the_log_likelihoods_of_direct_passes(samples, model):
  for sample, document in zip(samples["choice"], DOCUMENTS, strict=True):
    for answer, choice in zip(sample["resps"], (document["right"], document["wrong"]), strict=True):
      continuation = choice.encode()
      context = document["question"].encode()[len(continuation) - 16 :]  # what there is room for
      nats, greedy = answer[0]
      expected, is_greedy = log_prob(model, context, continuation)
      assert float(nats) == pytest.approx(expected, abs=1e-4) and str(greedy) == str(is_greedy)


def test_whole_texts_have_the_log_likelihood_of_direct_passes_after_the_boundary(samples, model):
  for sample, document in zip(samples["rolling"], DOCUMENTS, strict=True):
    text = (document["question"] + document["right"]).encode()
    first, rest = (text, b"") if len(text) < 16 else (text[:15], text[15:])  # blocks have 16 tokens
    expected = log_prob(model, [256], first)[0] + log_prob(model, text[len(text) - 16 : 15] if rest else b"", rest)[0]
    assert float(sample["resps"][0][0]) == pytest.approx(expected, abs=1e-4)


def test_texts_are_the_most_probable_ones_of_the_sampler(samples, model, untrained):
  tokenizer = load_tokenizer(untrained.removeprefix("--workdir="))
  for sample, document in zip(samples["draw"], DOCUMENTS, strict=True):
    context = document["question"][-11:]
    text, = sampling.generate(*model, tokenizer, context, length=len(context) + 5, temperature=0)
    drawn = text.ids[len(context) :]
    drawn = drawn[: drawn.index(256)] if 256 in drawn else drawn
    assert sample["resps"][0][0] == tokenizer.decode(drawn).split("\u0001")[0]
