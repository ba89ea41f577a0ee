"""Texts: what is given comes back, an order is kept, a text does not depend on its batch, and it grows from what was known."""

import dataclasses
import json

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aogpt_jax import build_model
from aogpt_jax import config as config_lib
from aogpt_jax import console
from aogpt_jax import sampling
from aogpt_jax.data import tokenizers
from aogpt_jax.sampling import output
from aogpt_jax.sampling import texts
from aogpt_jax.training import step as step_lib

BYTES = tokenizers.load("bytes")
PROMPTS = ("a[[3]]b", "[[6]]", "c", "[[2]]de[[1]]f")  # of 5, 6, 8 and 6 tokens


@pytest.fixture(scope="module")
def model():
  """A model of blocks of 8 bytes, and random weights of a size at which every part has an effect."""
  config = config_lib.default_config()
  config.model.update(layers=1, width=16, heads=2, block_size=8, vocab_size=320, cond_width=8, dtype="float32",
                      scan_layers=False)
  built = build_model(config)
  shapes = nn.unbox(jax.eval_shape(lambda: step_lib.init_params(built, 0)))
  rng = np.random.default_rng(0)
  return built, jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape, scale=0.3), jnp.float32), shapes)


def generate(model, prompts="", **options):
  return sampling.generate(*model, BYTES, prompts, **options)


@pytest.fixture(scope="module")
def together(model):
  """Three samples for each prompt, in one batch."""
  return generate(model, PROMPTS, num_samples=3, order="uniform", counts="binomial", steps=4, seed=5)


def test_texts_come_in_the_order_of_their_prompts_with_what_is_given_unchanged(together):
  assert [(t.prompt_index, t.sample_index) for t in together] == [(p, s) for p in range(4) for s in range(3)]
  for t in together:
    assert t.prompt == PROMPTS[t.prompt_index] and t.seed == 5 and t.order == "uniform" and t.complete
    given = [(0, "a"), (4, "b")], [], [(0, "c")], [(2, "d"), (3, "e"), (5, "f")]
    length = (5, 6, 8, 6)[t.prompt_index]
    assert len(t.ids) == len(t.steps) == len(t.log_probs) == length and sorted(t.positions) == list(range(length))
    assert {(i, chr(t.ids[i])) for i in range(length) if t.steps[i] == 0} == set(given[t.prompt_index])
    assert all((step > 0) == (log_prob < 0) for step, log_prob in zip(t.steps, t.log_probs))
    assert t.evaluations == len(set(t.steps) - {0}) and max(t.steps) <= 4
    assert t.text == BYTES.decode(t.ids)
    assert t.sampler == dict(dtype="float32", sampler="plan", steps=4, counts="binomial", schedule="linear", spaced=False,
                             contexts=1, temperature=1.0, top_p=1.0, top_p_rule="standard", top_k=0)


def test_samples_and_prompts_all_differ(together):
  assert len({tuple(t.positions) for t in together}) > 8
  assert len({tuple(t.ids) for t in together}) == 12


def test_a_text_does_not_depend_on_the_batch_that_it_is_drawn_in(model, together):
  apart = generate(model, PROMPTS, num_samples=3, order="uniform", counts="binomial", steps=4, seed=5, batch_size=5)
  for a, b in zip(apart, together, strict=True):
    np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)
    assert dataclasses.replace(a, log_probs=b.log_probs) == b


def test_a_text_does_not_depend_on_what_else_is_drawn(model, together):
  alone, = generate(model, PROMPTS[0], order="uniform", counts="binomial", steps=4, seed=5)
  assert (alone.ids, alone.steps) == (together[0].ids, together[0].steps)


def test_tokens_are_given_at_any_positions_and_the_rest_is_drawn_in_an_explicit_order(model):
  known = np.array([False, True, False, False, True, False])
  prompt = sampling.Prompt(np.array([-7, 65, 999, 0, 66, 0]), known)  # what is not given may be anything
  order = [5, 4, 0, 3, 1, 2]
  text, *_ = texts = generate(model, prompt, order=order, num_samples=4)
  assert text.positions == [1, 4, 5, 0, 3, 2]
  assert text.steps == [2, 0, 4, 3, 0, 1]
  assert (text.ids[1], text.ids[4]) == (65, 66) and text.order == "explicit((5, 4, 0, 3, 1, 2))"
  assert generate(model, prompt, order=text.order, num_samples=4) == texts


def test_what_is_all_given_comes_back(model):
  text, = generate(model, "abcdefgh")
  assert text.text == "abcdefgh" and text.evaluations == 0 and text.steps == [0] * 8


def test_at_temperature_0_the_samples_of_an_order_are_alike(model):
  alike = generate(model, num_samples=4, order="right_to_left", temperature=0)
  assert len({tuple(t.ids) for t in alike}) == 1


def test_texts_grow_from_what_is_given_until_they_are_complete(model):
  arguments = ["[[7]]x", "y"], dict(num_samples=4, order="uniform", batch_size=4)
  snapshots = list(sampling.stream_generate(*model, BYTES, arguments[0], **arguments[1], parts=4))
  over = [i for i, batch in enumerate(snapshots) if all(t.complete for t in batch)]
  assert len(over) == 2 and over[-1] == len(snapshots) - 1  # eight texts in two batches
  finished = [t for i in over for t in snapshots[i]]
  assert finished == generate(model, arguments[0], **arguments[1])
  assert [(t.prompt_index, t.sample_index) for t in finished] == [(p, s) for p in (0, 1) for s in range(4)]
  assert over[0] > 0 and over[1] > over[0] + 1, "no text was seen before it was complete"
  for batch in snapshots:
    for t in batch:
      whole = finished[4 * t.prompt_index + t.sample_index]
      known = [i for i, token in enumerate(t.ids) if token >= 0]
      assert set(whole.positions[: len(known)]) == set(known)  # those that come first in the order
      for i in range(len(t.ids)):
        now = (t.ids[i], t.steps[i], t.log_probs[i])
        assert now == ((whole.ids[i], whole.steps[i], whole.log_probs[i]) if i in known else (-1, 0, 0.0))


def test_texts_in_other_orders_are_others(model):
  drawn = [generate(model, num_samples=4, order=order)[0].ids for order in ("left_to_right", "right_to_left")]
  assert sorted(drawn[0]) != sorted(drawn[1])  # the same noise would draw nearly the same tokens at other places


@pytest.mark.parametrize("prompts, options, expected", [
    ("", dict(num_samples=0), "num_samples is 0; it must be at least 1"),
    ("", dict(batch_size=0), "batch_size is 0; it must be at least 1"),
    ("", dict(contexts=0), "contexts is 0; it must be at least 1"),
    ("", dict(steps=-1), "steps is -1; it must be at least 0"),
    ("", dict(seed=2**32), "seed is 4294967296; it must be below"),
    ("", dict(length=9), "length is 9; it must be from 0 to 8"),
    ("", dict(counts="many"), "counts is 'many'; it must be"),
    ("", dict(schedule="square"), "schedule is 'square'; it must be"),
    ("", dict(top_p_rule="loose"), "top_p_rule is 'loose'; it must be"),
    ("", dict(temperature=-1.0), "temperature is -1.0; it must be"),
    ("", dict(order="unifrom"), "did you mean uniform?"),
    ("", dict(order=[0, 1]), "the explicit order is of 2 tokens, and the text has 8"),
    (["[[2]]", "[[3]]"], dict(order=[0, 1]), "the explicit order is of 2 tokens, and the text has 3"),
    ("", dict(order=[0, 2, 2]), "an explicit order of 3 tokens must have each .* 1 is missing"),
    ([], {}, "prompts is empty"),
    (["a", "abcdefghi"], {}, r"prompts\[1\]: has 9 tokens"),
    (["\ud800"], {}, r"prompts\[0\]: has '\\ud800', which is no character"),
    ("[[0]]", {}, r"prompts\[0\]: is of no tokens at all"),
    (sampling.Prompt(np.zeros(9, int), np.zeros(9, bool)), {}, r"prompts\[0\]: is of 9 tokens; the model's blocks have 8"),
    (sampling.Prompt(np.array([300]), np.array([True])), {}, r"prompts\[0\]: has tokens from 300 to 300; .* ids are 0 to 256"),
])
def test_what_is_wrong_is_said_before_anything_is_drawn(model, prompts, options, expected):
  with pytest.raises(ValueError, match=expected):
    sampling.stream_generate(*model, BYTES, prompts, **options)  # not even the first batch is asked for


@pytest.mark.parametrize("tokens, known", [([1, 2], [True]), ([[1]], [[True]]), ([1, 2], [1, 0]), ([1.0], [True]), ([], [])])
def test_tokens_that_are_no_prompt_are_refused(tokens, known):
  with pytest.raises(ValueError, match="prompt: "):
    sampling.Prompt(np.array(tokens), np.array(known))


@pytest.mark.parametrize("given, shown", [
    (b"abc", [("abc", True)]),
    (b"a??b", [("a", True), ("··", False), ("b", True)]),
    (b"??", [("··", False)]),
    ("é".encode(), [("é", True)]),
    (b"x\xc3?y", [("x", True), ("·", False), ("·", False), ("y", True)]),  # the first half of é
    (b"x?\xa9y", [("x", True), ("·", False), ("·", False), ("y", True)]),  # the second
    (b"\xa9?", [("\ufffd", True), ("·", False)]),  # nothing can come before it
    (b"?\xa9?", [("·", False), ("·", False), ("·", False)]),
    (b"\xa9a", [("\ufffda", True)]),
])
def test_bytes_that_are_no_character_yet_are_unknown(given, shown):
  ids = [-1 if byte == ord("?") else byte for byte in given]
  pieces = texts.pieces(ids, BYTES)
  if shown[0] == ("\ufffd", True):  # alone beside an unknown token, it may be the first half as well
    shown = [("·", False), *shown[1:]]
  assert pieces == shown


def made_up(ids, order=None):
  positions = list(range(len(ids))) if order is None else order
  steps = [int(i >= 0) for i in ids]
  return texts.Text(0, 0, 0, "", "uniform", "".join(p for p, _ in texts.pieces(ids, BYTES)), ids, positions, steps,
                    [0.0] * len(ids), len(ids), {})


def test_records_have_what_a_text_is_and_escape_nothing_but_what_json_must():
  text = made_up(list("é\n\x1b[2J".encode()))
  record = json.loads(texts.json_lines([text]))
  assert record == dataclasses.asdict(text) and "é" in texts.json_lines([text])
  assert texts.readable([text]) == "--- uniform, 7 evaluations, sample 1 ---\né\n\u241b[2J\n"  # no control sequence


@pytest.mark.parametrize("columns, rows", [(80, 24), (20, 7), (9, 3), (5, 2)])
@pytest.mark.parametrize("count, length", [(1, 3), (1, 500), (3, 70), (40, 4), (40, 90)])
def test_a_screen_is_filled_and_never_more_than_that(monkeypatch, columns, rows, count, length):
  monkeypatch.setenv("COLUMNS", str(columns))
  monkeypatch.setenv("LINES", str(rows))
  screen = console.Screen()
  batch = [made_up([ord("a")] * (length - 2) + [-1, -1]) for _ in range(count)]
  frame = [line.plain for line in output._frame(screen, batch, BYTES, False, "sampling: 1 of 2 tokens")]
  assert len(frame) <= rows - 1 and all(len(line) <= columns for line in frame)
  assert frame[-1].startswith("sampling: 1 of 2 tokens"[:columns])
  whole = count * (1 + -(-(length - 1) // columns))  # headings, and texts with one sign for what is to come
  assert len(frame) >= min(whole, rows - 2) * 0.7
  if rows > 3:
    assert any(line.endswith("a·") for line in frame), "the place where the text grows is not shown"


def test_left_to_right_a_text_ends_where_it_has_come_to_and_in_other_orders_it_has_its_length():
  ids = [97, 98, -1, -1, -1, -1]
  shown = lambda text: "".join(piece for piece, _ in output._styled(text, BYTES))
  assert shown(made_up(ids)) == "ab·" and shown(made_up(ids, [1, 0, 2, 3, 4, 5])) == "ab····"


def test_progress_tells_the_time_left_from_the_second_call_on(monkeypatch, capsys):
  clock = [0.0]
  monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
  progress = console.Progress("sampling", 1000, "tokens")
  for now, done in ((60.0, 200), (70.0, 300), (71.0, 310), (80.0, 400), (140.0, 1000)):  # a minute of compiling
    clock[0] = now
    progress(done)
  assert capsys.readouterr().out == (
      "sampling: 300 of 1,000 tokens, 1 min 10 s left\nsampling: 400 of 1,000 tokens, 1 min 0 s left\n")
