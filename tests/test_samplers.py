"""What every sampler keeps: what is given, its counts, its order, and a sample whatever its batch; what does not fit is said."""

import dataclasses
import inspect

import jax
import numpy as np
import pytest

import random_models
from aogpt_jax import config as config_lib
from aogpt_jax import samplers
from aogpt_jax import sampling
from aogpt_jax.data import tokenizers
from aogpt_jax.sampling import adaptive
from aogpt_jax.sampling import burst
from aogpt_jax.sampling import filters
from aogpt_jax.sampling import plan
from aogpt_jax.sampling import speculative

LENGTH, KINDS = 12, 20
CASES = {  # name -> sampler, settings, objective, dtype
    "speculative": (speculative, dict(window=3), "any_order", "float32"),
    "speculative, bfloat16": (speculative, dict(window=3), "any_order", "bfloat16"),
    "burst": (burst, dict(checks=2), "any_order", "float32"),
    "adaptive": (adaptive, dict(criterion="entropy"), "any_order", "float32"),
    "adaptive, some candidates": (adaptive, dict(noise=0.5, candidates=4), "any_order", "float32"),
    "adaptive, encoder": (adaptive, dict(), "ao", "float32"),
}


def batch_of_four():
  """Plan, tokens and keys: texts of 12 and of 9 tokens, of which nothing, something and all is given."""
  rng = np.random.default_rng(0)
  known = rng.random((4, LENGTH)) < np.array([[0.0], [0.4], [1.0], [0.2]])
  lengths = np.array([LENGTH, LENGTH, LENGTH, 9])
  orders = np.stack([rng.permutation(LENGTH) for _ in range(4)])
  whole = plan.make_plan(orders, known | (np.arange(LENGTH) >= lengths[:, None]), LENGTH, counts="fixed")
  # What is past the end of a text comes last, and is neither given nor drawn.
  past = whole.orders >= lengths[:, None]
  made = dataclasses.replace(whole, orders=np.take_along_axis(whole.orders, np.argsort(past, axis=1, kind="stable"), axis=1),
                             known=whole.known - past.sum(axis=1))
  known &= np.arange(LENGTH) < lengths[:, None]
  return made, known, lengths, rng.integers(0, KINDS - 1, (4, LENGTH)), jax.random.split(jax.random.key(1), 4)


@pytest.mark.parametrize("name", CASES)
def test_a_sample_keeps_what_is_given_and_does_not_depend_on_its_batch(name):
  sampler, settings, objective, dtype = CASES[name]
  model, params = random_models.make(LENGTH, KINDS, objective, layers=1, dtype=dtype)
  made, known, lengths, tokens, keys = batch_of_four()
  kept = filters.Filters(KINDS - 1, temperature=0.9)
  draw = lambda plan, rows, **more: sampler.stream(model, params, plan, tokens[rows], keys[rows], kept, **settings, **more)
  out, = draw(made, slice(4))
  inside = np.arange(LENGTH) < lengths[:, None]
  np.testing.assert_array_equal(out.tokens[known], tokens[known])
  np.testing.assert_array_equal(out.tokens >= 0, inside)
  np.testing.assert_array_equal(out.steps > 0, inside & ~known)
  np.testing.assert_array_equal(np.sort(out.orders, axis=1), np.tile(np.arange(LENGTH), (4, 1)))
  assert (out.log_probs[inside & ~known] < 0).all() and not out.log_probs[known].any()

  # Each pass has made a token known; an order is that of the steps; the log-probabilities are of one pass over the result.
  left, steps_by_place = made.ends - made.known, np.take_along_axis(out.steps, out.orders, axis=1)
  if sampler is burst:
    assert (out.evaluations_each <= np.maximum(2 * left - 1, 0)).all()
  else:
    np.testing.assert_array_equal(out.evaluations_each, out.steps.max(axis=1))
    assert (out.evaluations_each <= left).all() and out.passes == out.evaluations <= LENGTH
  for b in range(4):
    own = steps_by_place[b, made.known[b] : made.ends[b]]
    assert (np.diff(own) >= 0).all() and set(own) == set(range(1, own.max(initial=0) + 1))
  if sampler is speculative:
    np.testing.assert_array_equal(out.orders, made.orders)
    assert out.evaluations < LENGTH
  whole = random_models.nll_of(model, params)(np.maximum(out.tokens, 0), out.orders)
  expected = np.zeros((4, LENGTH))
  np.put_along_axis(expected, out.orders, -whole, axis=1)
  # The last id is none: the model's own probabilities are shared by the others.
  if objective == "any_order":
    logits = np.asarray(model.apply({"params": params}, np.maximum(out.tokens, 0), out.orders))
    np.put_along_axis(expected, out.orders, np.take_along_axis(expected, out.orders, axis=1)
                      - np.log1p(-np.asarray(jax.nn.softmax(logits))[..., -1]), axis=1)
  of_tokens = inside & ~known
  np.testing.assert_allclose(out.log_probs[of_tokens], expected[of_tokens], atol=1e-4 if dtype == "float32" else 0.1)

  if dtype == "float32":  # alone, and as it grows
    for b in range(4):
      one = plan.Plan(made.orders[b : b + 1], made.known[b : b + 1], made.counts[:, b : b + 1], made.steps)
      parts = list(draw(one, slice(b, b + 1), parts=3))
      for part in parts:
        there = part.tokens[0] >= 0
        np.testing.assert_array_equal(part.tokens[0], np.where(there, out.tokens[b], -1))
        np.testing.assert_array_equal(part.steps[0], np.where(there, out.steps[b], 0))
      np.testing.assert_array_equal(there, inside[b])
      np.testing.assert_array_equal(parts[-1].orders[0], out.orders[b])
      assert parts[-1].evaluations_each[0] == out.evaluations_each[b]


def test_other_temperatures_and_prompts_share_a_program(compilations):
  model, params = random_models.make(LENGTH, KINDS, layers=1, width=24)  # a program of no other test
  made, _, _, tokens, keys = batch_of_four()
  for temperature in (0.5, 1.5):
    speculative.sample(model, params, made, tokens, keys, filters.Filters(KINDS, temperature=temperature), window=2)
    made = dataclasses.replace(made, orders=made.orders[::-1], known=made.known[::-1], counts=made.counts[:, ::-1])
  assert compilations["_speculate"] == 1


BYTES = tokenizers.load("bytes")


@pytest.fixture(scope="module")
def of_bytes():
  return random_models.make(8, 258, layers=1)


@pytest.mark.parametrize("options", [
    dict(order="uniform", sampler="speculative", window=2), dict(order="uniform", sampler="burst", checks=2),
    dict(order="uniform", sampler="adaptive", criterion="entropy", steps=3), dict(order="right_to_left", steps=2, spaced=True),
], ids=["speculative", "burst", "adaptive", "spaced"])
def test_texts_of_any_prompts_say_how_they_were_drawn(of_bytes, options):
  texts = sampling.generate(*of_bytes, BYTES, ["a[[3]]b", "[[6]]c"], num_samples=2, seed=3, **options)
  name = options.get("sampler", "plan")
  for text in texts:
    assert text.complete and text.text == BYTES.decode(text.ids) and sorted(text.positions) == list(range(len(text.ids)))
    assert text.ids[-1] == ord("b" if text.prompt_index == 0 else "c") and text.steps[-1] == 0
    assert set(text.sampler) == {"dtype", "sampler", "temperature", "top_p", "top_p_rule", "top_k", *samplers.SAMPLERS[name]}
    assert text.sampler["sampler"] == name and options.items() <= (text.sampler | {"order": options["order"]}).items()
    assert text.order == (name if name in ("burst", "adaptive") else options["order"])
    assert 1 <= text.evaluations <= (3 if "steps" in options else 2 * text.steps.count(0) + 12)
  if "spaced" in options:  # three of the blank's six in each step, from 5 on
    assert [p for p, step in enumerate(texts[-1].steps) if step == 1] == [1, 3, 5]


@pytest.mark.parametrize("options, expected", [
    (dict(sampler="beam"), "sampler is 'beam'; it must be one of plan, speculative, burst, adaptive"),
    (dict(sampler="speculative", window=0), "window is 0; it must be at least 1"),
    (dict(sampler="speculative", steps=4), "steps is 4, which is of sampler plan or adaptive, and sampler is speculative; set it to 0"),
    (dict(window=8), "window is 8, which is of sampler speculative, and sampler is plan; set it to 4"),
    (dict(sampler="adaptive", order="uniform", criterion="mode"), "criterion is 'mode'; it must be one of probability, margin"),
    (dict(sampler="adaptive", order="uniform", noise=float("nan")), "noise is nan; it must be at least 0 and finite"),
    (dict(sampler="burst"), "order is 'left_to_right', and sampler burst chooses it; give 'uniform'"),
])
def test_settings_that_do_not_fit_are_named(of_bytes, options, expected):
  with pytest.raises(ValueError, match=expected):
    sampling.generate(*of_bytes, BYTES, **options)


def test_settings_have_one_default_wherever_they_are_given():
  sample = config_lib.default_config().sample
  arguments = inspect.signature(sampling.generate).parameters
  for name, default in (samplers.DEFAULTS | {"sampler": "plan"}).items():
    assert sample[name] == arguments[name].default == default


@pytest.mark.parametrize("sampler", ["speculative", "burst"])
def test_an_encoder_has_no_causal_pass_to_check_a_draft_in(sampler):
  with pytest.raises(ValueError, match=f"sampler is '{sampler}', which checks .* encoder, which has none; give 'plan' or 'adaptive'"):
    sampling.generate(*random_models.make(8, 258, "ao", layers=1), BYTES, order="uniform", sampler=sampler)
