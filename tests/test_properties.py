"""Whatever a config, an order, a prompt, a plan or a text is: it is right, or refused in one line."""

import base64
import json
import math
import re
import runpy
import string

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from aogpt_jax import config as config_lib
from aogpt_jax import orders
from aogpt_jax.data import tokenizers
from aogpt_jax.sampling import plan
from aogpt_jax.sampling import prompts


def examples(count):
  """The same ones in each run, and nothing kept on the disk."""
  return settings(max_examples=count, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
                  suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def refused(call, *arguments, names=""):
  """Calls it; returns what it returns, or None where it raises a ValueError whose lines each begin with `names`."""
  try:
    return call(*arguments)
  except ValueError as e:
    lines = str(e).split("\n")
    assert all(re.match(names, line) and len(line) > 10 for line in lines), str(e)
    assert names or len(lines) == 1, str(e)
    return None


# --- configs ---

DEFAULT = config_lib.flat(config_lib.default_config())
WORDS = sorted({x for x in DEFAULT.values() if isinstance(x, str)} | {
    "encoder", "ao", "lambda_dce", "score_entropy", "context_average", "layer", "input", "layer_shared", "bytes", "uniform",
    "burst", "speculative", "adaptive", "fsdp", "fsdp_tp", "splash", "cudnn", "float32", "sudoku:5", "files:a.jsonl", "prompt",
    "gpt2:gpt2", "kept", "binomial", "cosine", "entropy", "block_wise(3)", "schedule(uniform, left_to_right, step, 7)"})
INTS = st.sampled_from([-2**63, -7, -1, 0, 1, 2, 3, 4, 7, 8, 12, 16, 64, 100, 1023, 1024, 10**6, 2**31 - 1, 2**31, 2**32, 10**30])
FLOATS = st.one_of(st.sampled_from([0.0, -0.0, 0.5, 1.0, 1e-300, 1e300]), st.floats())
TEXTS = st.one_of(st.sampled_from(WORDS), st.text(max_size=8))
ANY = st.one_of(INTS, FLOATS, TEXTS, st.booleans(), st.none(), st.tuples(), st.tuples(TEXTS), st.tuples(INTS, INTS),
                st.tuples(st.tuples(FLOATS, FLOATS)), st.tuples(st.tuples(TEXTS, TEXTS)), st.tuples(st.tuples(TEXTS, st.booleans())))
OF_TYPE = {int: INTS, float: FLOATS, str: TEXTS, bool: st.booleans()}


@st.composite
def overrides(draw):
  fields = draw(st.lists(st.sampled_from(sorted(DEFAULT)), min_size=1, max_size=4, unique=True))
  right = lambda field: OF_TYPE.get(type(DEFAULT[field]), ANY)
  return {field: draw(right(field) if draw(st.integers(0, 7)) else ANY) for field in fields}


@examples(80)
@given(changes=overrides())
def test_a_config_is_right_or_each_of_its_problems_has_a_line(tmp_path, changes):
  config = config_lib.default_config()
  with config.ignore_type():
    config.update_from_flattened_dict(changes)
  try:
    config_lib.check(config)
  except config_lib.ConfigError as e:
    assert all(line.startswith("config.") for line in str(e).split("\n")), str(e)
    return
  # What is right stays what it is in a checkpoint and in the file of a run, which is code.
  assert config_lib.flat(config_lib.from_dict(json.loads(json.dumps(config.to_dict())))) == config_lib.flat(config)
  config_lib.write_file(config, tmp_path, "Of a run", "python")
  assert config_lib.flat(runpy.run_path(str(tmp_path / config_lib.FILE))["get_config"]()) == config_lib.flat(config)


# --- orders ---

ARGUMENTS = st.one_of(INTS.map(str), FLOATS.map(repr), st.sampled_from(["uniform", "linear", "step", "(1, 0)", "mix(0.5)", "'a'", ""]))
SPECS = st.recursive(
    st.builds("{}({})".format, st.sampled_from(sorted(orders.ORDERS)), st.lists(ARGUMENTS, max_size=4).map(", ".join)),
    lambda inner: st.builds("schedule({}, {}, {}, {}, {})".format, inner, inner, st.sampled_from(["linear", "cosine", "step"]),
                            INTS, INTS), max_leaves=4)


@examples(60)
@given(spec=st.one_of(SPECS, st.text(max_size=20), st.sampled_from(["-" * 5000 + "1", "(" * 5000, "mix" + "(mix" * 300])),
       length=st.integers(1, 20))
def test_the_name_of_an_order_has_orders_of_a_length_or_is_refused_in_a_line(spec, length):
  refused(orders.check, spec, length)


# --- prompts ---

BYTES = tokenizers.load("bytes")


@examples(100)
@given(pieces=st.lists(st.one_of(st.integers(0, 9), st.text(max_size=6)), max_size=6), length=st.integers(0, 40))
def test_what_a_prompt_gives_is_kept_where_it_stands_and_the_rest_is_drawn(pieces, length):
  written = "".join(f"[[{piece}]]" if isinstance(piece, int) else piece.replace("[", "(") for piece in pieces)
  prompt = refused(prompts.parse, written, BYTES, length, 32)
  expected = [x for piece in pieces
              for x in ([None] * piece if isinstance(piece, int) else piece.replace("[", "(").encode())]
  if prompt is None:
    total = length or len(expected)
    assert len(expected) > (length or 32) or total > 32 or total == 0
    return
  assert [t if k else None for t, k in zip(prompt.tokens.tolist(), prompt.known)] == (
      expected + [None] * (len(prompt.tokens) - len(expected)))
  has_blanks = any(isinstance(piece, int) for piece in pieces)
  assert len(prompt.tokens) == (length or (len(expected) if has_blanks else 32)) and prompt.text == written


@examples(100)
@given(text=st.one_of(st.text(st.characters(), max_size=40), st.text("[]0123456789 ", max_size=40)), length=st.integers(-3, 40))
def test_any_text_is_a_prompt_or_refused_in_a_line(text, length):
  prompt = refused(prompts.parse, text, BYTES, length, 32, names="prompt: ")
  assert prompt is None or 1 <= len(prompt.tokens) <= 32 and (prompt.tokens[prompt.known] < 256).all()


# --- plans ---


@examples(100)
@given(st.integers(1, 4), st.integers(1, 24), st.integers(1, 40), st.sampled_from(["fixed", "binomial"]),
       st.sampled_from(sorted(plan.SCHEDULES)), st.booleans(), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_a_plan_draws_each_unknown_position_once_in_no_more_steps(batch, length, steps, counts, schedule, spaced, seed, share):
  rng = np.random.default_rng(seed)
  wanted = np.stack([rng.permutation(length) for _ in range(batch)])
  known = rng.random((batch, length)) < share
  made = plan.make_plan(wanted, known, steps, counts=counts, schedule=schedule, spaced=spaced, rng=rng)
  np.testing.assert_array_equal(np.sort(made.orders, axis=1), np.tile(np.arange(length), (batch, 1)))
  for order, given_, b in zip(made.orders, known, range(batch)):
    np.testing.assert_array_equal(order[:made.known[b]], np.flatnonzero(given_))
    if not spaced:
      np.testing.assert_array_equal(order[made.known[b]:], [p for p in wanted[b] if not given_[p]])
  assert (made.counts >= 0).all() and made.counts.any(axis=1).all() and (made.ends == length).all()
  assert made.evaluations <= steps and (np.diff(made.steps) > 0).all() and set(made.steps) <= set(range(1, steps + 1))
  if counts == "fixed" and steps <= (~known).sum(axis=1).min():
    assert made.evaluations == steps and made.counts.min() >= 1 and (made.counts.max() - made.counts.min() < length)


# --- tokenizers ---


@pytest.fixture(scope="module")
def merges(tmp_path_factory):
  """A rank file in which each token of more than a byte is made of two before it."""
  rng, tokens = np.random.default_rng(0), [bytes([i]) for i in range(256)]
  letters = [x.encode() for x in string.ascii_letters + " \n"] + [b"\xc3", b"\xa9", b"\xf0\x9f"[:1]]
  while len(tokens) < 600:
    pool = letters + tokens[256:]
    pair = pool[rng.integers(len(pool))] + pool[rng.integers(len(pool))]
    tokens += [pair] if pair not in tokens else []
  path = tmp_path_factory.mktemp("ranks") / "merges.tiktoken"
  path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))
  return tokenizers.load(str(path))


@examples(100)
@given(text=st.one_of(st.text(max_size=60), st.text(string.ascii_letters + " \n\u00e9", max_size=60),
                      st.lists(st.sampled_from(["<|endoftext|>", "'s", " ", "\u2028", "\x00", "1", "ab"]), max_size=9).map("".join)))
def test_a_text_is_that_of_its_tokens(merges, text):
  for tokenizer in (BYTES, merges):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and tokenizer.boundary_id not in ids and ids.dtype == tokenizer.dtype
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode()) == len(b"".join(map(tokenizer.bytes_of, ids)))
    assert tokenizer.word_starts(ids).sum() == len(text.encode().split())


@examples(40)
@given(ids=st.lists(st.integers(-2**63, 2**63 - 1), max_size=9))
def test_any_numbers_have_a_text(merges, ids):
  for tokenizer in (BYTES, merges):
    assert isinstance(tokenizer.decode(ids), str) and math.isfinite(len(tokenizer.decode(ids)))
