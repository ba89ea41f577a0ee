"""Cached decoding: the numbers of the PyTorch code, the distribution enumerated, known tokens kept, whatever the batch."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import golden_weights
from aogpt_jax import build_model
from aogpt_jax import config as config_lib
from aogpt_jax.models import decoder
from aogpt_jax.sampling import decode
from aogpt_jax.sampling import filters
from aogpt_jax.sampling import passes
from aogpt_jax.sampling import plan
from aogpt_jax.training import step as step_lib
from flax import linen as nn


def golden(name):
  arrays, config = golden_weights.load(name)
  return arrays, build_model(config), jax.tree.map(jnp.asarray, golden_weights.to_tree(arrays, config))


def small_model(**fields):
  """A model with random weights of a size at which every part has an effect."""
  config = config_lib.default_config()
  config.model.update(layers=2, width=32, heads=2, block_size=64, vocab_size=64, cond_width=16, dtype="float32")
  config.model.update(fields)
  model = build_model(config)
  params = nn.unbox(jax.eval_shape(lambda: step_lib.init_params(model, 0)))
  rng = np.random.default_rng(0)
  return model, jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape, scale=0.3), jnp.float32), params)


def keys(n, seed=0):
  return jax.random.split(jax.random.key(seed), n)


def uniform_orders(rng, batch, length):
  return np.stack([rng.permutation(length) for _ in range(batch)])


@pytest.mark.parametrize("name", golden_weights.NAMES)
def test_decoding_in_groups_gives_the_logits_of_the_pytorch_code(name):
  arrays, model, params = golden(name)
  logits = decode.decode_logits(model, params, arrays["tokens"], arrays["orders"], arrays["decode/groups"])
  np.testing.assert_allclose(logits, arrays["decode/logits"], rtol=0, atol=2e-4)


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_an_entry_of_a_group_equals_the_full_forward_pass_with_its_target_moved_to_the_groups_start(size):
  model, params = small_model()
  rng = np.random.default_rng(1)
  tokens, orders = rng.integers(0, 64, (2, 64)), uniform_orders(rng, 2, 64)
  groups = [min(size, 64 - start) for start in range(0, 64, size)]
  logits = decode.decode_logits(model, params, tokens, orders, groups)
  forward = jax.jit(lambda o: model.apply({"params": params}, jnp.asarray(tokens, jnp.int32), o))
  if size == 1:
    np.testing.assert_allclose(logits, forward(jnp.asarray(orders)), rtol=0, atol=1e-4)
  for i in rng.choice(64, 6, replace=False):
    start = i // size * size
    moved = [np.concatenate([o[:start], o[i : i + 1], np.delete(o, i)[start:]]) for o in orders]
    np.testing.assert_allclose(logits[:, i], forward(jnp.asarray(np.stack(moved)))[:, start], rtol=0, atol=1e-4)


@pytest.mark.parametrize("fields", [
    dict(target="input"), dict(target="layer_shared"), dict(target="layer_distinct"),
    dict(target="input", norm="layer", qk_norm=False, tied_head=True, bias=False),
], ids=["input", "layer_shared", "layer_distinct", "sigma_gpt"])
def test_so_it_does_however_an_entry_is_told_its_target(fields):
  model, params = small_model(block_size=9, **fields)
  rng = np.random.default_rng(1)
  tokens, orders = rng.integers(0, 64, (2, 9)), uniform_orders(rng, 2, 9)
  logits = decode.decode_logits(model, params, tokens, orders, [1, 1, 3, 4])
  moved = [np.concatenate([o[:5], o[7:8], o[5:7], o[8:]]) for o in orders]
  forward = jax.jit(model.apply)({"params": params}, jnp.asarray([*tokens, *tokens]), jnp.asarray([*orders, *moved]))
  for i, row in ((0, 0), (1, 0), (2, 0), (5, 0), (7, 2)):
    np.testing.assert_allclose(logits[:, i], forward[row : row + 2, 5 if row else i], rtol=0, atol=1e-4)


def test_what_lies_in_unwritten_slots_of_the_cache_changes_nothing(monkeypatch):
  model, params = small_model(block_size=16)
  rng = np.random.default_rng(2)
  tokens, orders, groups = rng.integers(0, 64, (2, 16)), uniform_orders(rng, 2, 16), [3, 1, 5, 7]
  expected = decode.decode_logits(model, params, tokens, orders, groups)
  empty = decoder.Decoder.init_cache
  monkeypatch.setattr(decoder.Decoder, "init_cache", lambda *a: jax.tree.map(lambda x: x + 1e4, empty(*a)))
  jax.clear_caches()
  np.testing.assert_array_equal(decode.decode_logits(model, params, tokens, orders, groups), expected)


def conditionals(model, params, order, vocab_size):
  """(start, i) -> log p of entry i, given the `start` tokens before its group alone, for every sequence: [V ** L].

  By full forward passes in which the entry is the first of its group; no cache.
  """
  length = len(order)
  every = np.array(list(itertools.product(range(vocab_size), repeat=length)), np.int32)
  forward = jax.jit(lambda sigma: model.apply({"params": params}, jnp.asarray(every), jnp.tile(sigma, (len(every), 1))))
  table = {}
  for start, i in itertools.combinations_with_replacement(range(length), 2):
    moved = np.concatenate([order[:start], order[i : i + 1], np.delete(order, i)[start:]])
    log_probs = jax.nn.log_softmax(forward(jnp.asarray(moved))[:, start])
    table[start, i] = np.take_along_axis(np.asarray(log_probs, np.float64), every[:, order[i], None], -1)[:, 0]
  return table


def enumerated(table, groups):
  """The probability of every sequence when `groups` are drawn in parallel, [V ** L]."""
  starts = np.repeat(np.cumsum(groups) - groups, groups)
  return np.exp(sum(table[start, i] for i, start in enumerate(starts)))


def chi_squared(observed, expected):
  """The statistic and the number of cells, the rare ones taken together as one."""
  rare = expected < 5
  observed, expected = (np.append(x[~rare], x[rare].sum()) for x in (observed, expected))
  if expected[-1] < 5:
    observed, expected = observed[:-1], expected[:-1]
  return ((observed - expected) ** 2 / expected).sum(), len(expected)


# Draws, and what a pass costs beside its entries: at 0, as small passes as can be, so that groups go through them in pieces.
@pytest.mark.parametrize("steps, counts, batch, pass_cost", [
    (4, "binomial", 200_000, 8), (4, "fixed", 200_000, 8), (2, "binomial", 200_000, 8), (2, "fixed", 200_000, 8),
    (2, "binomial", 40_000, 0)])
def test_samples_have_the_enumerated_distribution(steps, counts, batch, pass_cost, monkeypatch):
  monkeypatch.setattr(passes, "_PASS_COST", pass_cost)
  model, params = small_model(block_size=4, vocab_size=3, layers=1, width=8, cond_width=8)
  order = np.array([2, 0, 3, 1])
  known = np.zeros((batch, 4), bool)
  made = plan.make_plan(np.tile(order, (batch, 1)), known, steps, counts=counts, rng=np.random.default_rng(steps))
  out = decode.sample(model, params, made, np.zeros((batch, 4)), keys(batch), filters.Filters(3))
  assert (out.passes > len(made.counts)) == (pass_cost == 0)
  table = conditionals(model, params, order, 3)
  # Samples with the same counts share a distribution; the chi-squared statistics of all of them add up.
  patterns, which = np.unique(made.counts, axis=1, return_inverse=True)
  chi2 = freedom = 0
  for p, pattern in enumerate(patterns.T):
    mine = out.tokens[which.ravel() == p]
    expected = len(mine) * enumerated(table, pattern)
    np.testing.assert_allclose(expected.sum(), len(mine), rtol=1e-4)
    observed = np.bincount(np.ravel_multi_index(mine.T, (3,) * 4), minlength=81)
    statistic, cells = chi_squared(observed, expected)
    chi2, freedom = chi2 + statistic, freedom + cells
  assert len(made.counts) <= steps
  assert abs(chi2 - freedom) < 4.5 * np.sqrt(2 * freedom), (chi2, freedom)


@functools.partial(jax.jit, static_argnames="model")
def full_pass(model, params, tokens, orders):
  return jax.nn.log_softmax(model.apply({"params": params}, tokens, orders))


def contexts_of(model, params, order, start, target):
  """log p(token at `target`) after each order of the tokens at order[:start], for every sequence: [start!, V ** L].

  The first is the order itself. By full forward passes; what comes after `start` in the order is not seen.
  """
  every = np.array(list(itertools.product(range(model.vocab_size), repeat=len(order))), np.int32)
  rest = [p for p in order[start:] if p != target]
  rows = []
  for context in itertools.permutations(order[:start]):
    log_probs = full_pass(model, params, every, np.tile([*context, target, *rest], (len(every), 1)).astype(np.int32))
    rows.append(np.take_along_axis(np.asarray(log_probs[:, start], np.float64), every[:, target, None], -1)[:, 0])
  return np.stack(rows)


# With three of four tokens given, one is drawn; with none, the contexts are drawn anew for each.
@pytest.mark.parametrize("known, contexts", [([0, 1, 3], 4), ([], 2)])
def test_an_ensemble_of_contexts_draws_from_the_mean_over_the_orders_of_what_is_known(known, contexts):
  model, params = small_model(block_size=4, vocab_size=3, layers=1, width=8, cond_width=8)
  batch, order = 54_000, [*known, *(p for p in (2, 0, 3, 1) if p not in known)]
  given = np.tile(np.isin(np.arange(4), known), (batch, 1))
  every = np.array(list(itertools.product(range(3), repeat=4)))
  tokens = np.resize(every, (batch, 4))  # each sequence equally often
  made = plan.make_plan(np.tile(order, (batch, 1)), given, 4 - len(known), counts="fixed")
  out = decode.sample(model, params, made, tokens, keys(batch), filters.Filters(3), contexts=contexts)
  np.testing.assert_array_equal(out.tokens[given], tokens[given])
  of_own_order = averaged = np.full(81, batch / 3 ** len(known))
  for i in range(len(known), 4):
    probs = np.exp(contexts_of(model, params, order, i, order[i]))
    of_own_order = of_own_order * probs[0]
    averaged = averaged * (probs[0] / contexts + (1 - 1 / contexts) * probs.mean(axis=0))
  observed = np.bincount(np.ravel_multi_index(out.tokens.T, (3,) * 4), minlength=81)
  chi2, cells = chi_squared(observed, averaged)
  freedom = cells - 3 ** len(known)  # the texts with each known part are as many as they are
  assert abs(chi2 - freedom) < 4.5 * np.sqrt(2 * freedom), (chi2, freedom)
  assert chi_squared(observed, of_own_order)[0] > 10 * freedom  # the contexts matter


def test_log_probs_of_an_ensemble_are_the_averaged_ones_and_a_group_shares_its_contexts():
  model, params = small_model(block_size=5, vocab_size=3, layers=1, width=8, cond_width=8)
  # In the first 40 texts, the tokens at 1 and 3 are drawn in one step, after three that are given. The others, of one token a step,
  # make passes of one entry the cheapest, so that the two are drawn in different passes, which must not matter.
  order = [0, 2, 4, 1, 3]
  known, tokens = np.zeros((60, 5), bool), np.random.default_rng(6).integers(0, 3, (60, 5))
  known[:40, [0, 2, 4]] = True
  counts = np.zeros((5, 60), np.int32)
  counts[0, :40], counts[:, 40:] = 2, 1
  made = plan.Plan(np.tile(order, (60, 1)), known.sum(axis=1), counts, np.arange(1, 6))
  assert passes.make_passes(made.known, made.counts).width == 1
  # The temperature is for the draw alone.
  out = decode.sample(model, params, made, tokens, keys(60), filters.Filters(3, temperature=0.7), contexts=2)
  assert set(out.steps[:40][~known[:40]]) == {1}
  sequences = np.ravel_multi_index(out.tokens.T, (3,) * 5)
  averages = []
  for target in (1, 3):
    probs = contexts_of(model, params, order, 3, target)[:, sequences[:40]]
    averages.append(np.logaddexp(probs[0], probs) - np.log(2))  # [6, 40], with each of the orders of three
  # One and the same of the six explains both tokens.
  off = np.maximum(*(np.abs(average - out.log_probs[:40, target]) for average, target in zip(averages, (1, 3))))
  assert off.min(axis=0).max() < 1e-4
  assert set(off.argmin(axis=0)) == set(range(6)) and (off > 1e-3).mean() > 0.5
  # Up to one token has one order: the average is what it was.
  for place in (0, 1):
    alone = contexts_of(model, params, order, place, order[place])[0, sequences[40:]]
    np.testing.assert_allclose(out.log_probs[40:, order[place]], alone, atol=1e-4)


def test_tokens_do_not_depend_on_the_batch_they_are_drawn_in():
  model, params = small_model()
  rng = np.random.default_rng(3)
  orders, known = uniform_orders(rng, 4, 64), rng.random((4, 64)) < np.array([[0.0], [0.2], [0.9], [1.0]])
  tokens = rng.integers(0, 64, (4, 64))
  together = plan.make_plan(orders, known, 16, counts="fixed")
  all_four = decode.sample(model, params, together, tokens, keys(4), filters.Filters(64))
  for b in range(4):
    alone = plan.make_plan(orders[b : b + 1], known[b : b + 1], 16, counts="fixed")
    one = decode.sample(model, params, alone, tokens[b : b + 1], keys(4)[b : b + 1], filters.Filters(64))
    np.testing.assert_array_equal(one.tokens[0], all_four.tokens[b])
    np.testing.assert_allclose(one.log_probs[0], all_four.log_probs[b], atol=1e-4)


@pytest.mark.parametrize("holes, steps", [
    ([], 4), (range(64), 64), ([20], 1), ([0, 1, 62, 63], 2), (range(5, 15), 256), (range(63), 3)])
def test_known_tokens_come_back_unchanged_and_holes_are_filled(holes, steps):
  model, params = small_model()
  rng = np.random.default_rng(4)
  known = np.ones((2, 64), bool)
  known[:, list(holes)] = False
  tokens = np.where(known, rng.integers(32, 64, (2, 64)), 63)
  for counts in ("binomial", "fixed"):
    made = plan.make_plan(uniform_orders(rng, 2, 64), known, steps, counts=counts)
    out = decode.sample(model, params, made, tokens, keys(2), filters.Filters(32))  # draws ids below 32 alone
    np.testing.assert_array_equal(np.asarray(out.tokens)[known], tokens[known])
    assert (np.asarray(out.tokens)[~known] < 32).all()
    assert ((out.steps > 0) == ~known).all() and ((np.asarray(out.log_probs) < 0) == ~known).all()
    assert out.evaluations <= min(steps, 2 * len(holes))


def test_log_probs_of_one_token_a_step_are_those_of_the_full_forward_pass():
  model, params = small_model()
  rng = np.random.default_rng(5)
  known = rng.random((3, 64)) < 0.3
  tokens = rng.integers(0, 64, (3, 64))
  made = plan.make_plan(uniform_orders(rng, 3, 64), known, 64, counts="fixed")
  out = decode.sample(model, params, made, tokens, keys(3), filters.Filters(64))
  logits = model.apply({"params": params}, out.tokens, jnp.asarray(made.orders))
  chosen = jnp.take_along_axis(out.tokens, made.orders, 1)
  nll = jnp.take_along_axis(jax.nn.log_softmax(logits), chosen[..., None], -1)[..., 0]
  ours = np.take_along_axis(np.asarray(out.log_probs), made.orders, 1)
  unknown = np.arange(64) >= made.known[:, None]
  np.testing.assert_allclose(ours[unknown], np.asarray(nll)[unknown], atol=2e-4)


def full_log_probs(model, params, out, orders, vocab_size):
  """log p of each token of a sample, among the first ids, given those before it in the order; by position. One pass, no cache."""
  log_probs = jax.nn.log_softmax(full_pass(model, params, out.tokens, orders)[..., :vocab_size])
  by_place = np.take_along_axis(np.asarray(log_probs), np.take_along_axis(out.tokens, orders, axis=1)[..., None], -1)[..., 0]
  by_position = np.empty_like(by_place)
  np.put_along_axis(by_position, orders, by_place, axis=1)
  return by_position


@pytest.mark.parametrize("dtype, param_dtype", [("bfloat16", "float32"), ("bfloat16", "bfloat16")])
def test_in_bfloat16_log_probs_are_near_those_of_the_full_forward_pass_in_float32(dtype, param_dtype):
  model, params = small_model(block_size=24, layers=1, dtype=dtype, param_dtype=param_dtype)
  params = jax.tree.map(lambda x: x.astype(param_dtype), params)
  rng = np.random.default_rng(7)
  known, tokens = rng.random((3, 24)) < np.array([[0], [0.3], [0.8]]), rng.integers(0, 50, (3, 24))
  made = plan.make_plan(uniform_orders(rng, 3, 24), known, 24, counts="fixed")  # one at a time
  out = decode.sample(model, params, made, tokens, keys(3), filters.Filters(50))
  assert (out.tokens[known] == tokens[known]).all() and out.log_probs.dtype == np.float32
  assert ((out.tokens >= 0) & (out.tokens < 50)).all()
  exact, _ = small_model(block_size=24, layers=1)
  expected = full_log_probs(exact, jax.tree.map(lambda x: x.astype(jnp.float32), params), out, made.orders, 50)
  off = np.abs(out.log_probs - expected)[~known]
  assert 0 < off.max() < 5e-2 and off.mean() < 1e-2


def ragged(length=16):
  """Model, plan of two texts, of which nothing and some is given, what is given, and tokens."""
  model, params = small_model(block_size=length, layers=1)
  rng = np.random.default_rng(6)
  known = np.stack([np.zeros(length, bool), rng.random(length) < 0.2])
  made = plan.make_plan(uniform_orders(rng, 2, length), known, length // 2, rng=rng)
  return model, params, made, known, rng.integers(0, 64, (2, length))


@pytest.mark.parametrize("changes", [dict(CACHE_STEP=8, CALL_PASSES=3), dict(_PASS_COST=0), dict(_PASS_COST=1000)])
def test_neither_the_width_of_passes_nor_calls_nor_the_growth_of_the_cache_changes_what_is_drawn(changes, monkeypatch):
  model, params, made, _, tokens = ragged()
  whole = passes.make_passes(made.known, made.counts)
  expected = decode.sample(model, params, made, tokens, keys(2), filters.Filters(64))
  for name, value in changes.items():
    monkeypatch.setattr(passes if name == "_PASS_COST" else decode, name, value)
  changed = passes.make_passes(made.known, made.counts)
  sizes = {slots for _, slots in decode._stages(changed, 16, {len(changed)})}
  assert changed.width != whole.width or len(sizes) >= 3  # it is a change
  out = decode.sample(model, params, made, tokens, keys(2), filters.Filters(64))
  np.testing.assert_array_equal(out.tokens, expected.tokens)
  np.testing.assert_array_equal(out.steps, expected.steps)
  np.testing.assert_allclose(out.log_probs, expected.log_probs, atol=1e-5)


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("parts", [1, 4, 1000])
def test_texts_as_they_become_known_agree_with_the_whole(parts, small, monkeypatch):
  if small:
    monkeypatch.setattr(decode, "CACHE_STEP", 8)
    monkeypatch.setattr(decode, "CALL_PASSES", 3)
  model, params, made, known, tokens = ragged()
  whole = decode.sample(model, params, made, tokens, keys(2), filters.Filters(64))
  partial = list(decode.stream(model, params, made, tokens, keys(2), filters.Filters(64), parts=parts))
  assert len(partial) == min(parts, whole.passes)
  before = known
  for part in partial:
    there = part.tokens >= 0
    assert (there >= before).all() and (part.tokens[~there] == -1).all()
    np.testing.assert_array_equal(part.tokens[known], tokens[known])
    for field in ("tokens", "log_probs", "steps"):
      np.testing.assert_array_equal(getattr(part, field), np.where(there, getattr(whole, field), -1 if field == "tokens" else 0))
    # What is there is a beginning of each order.
    in_order = np.take_along_axis(there, made.orders, axis=1)
    assert (np.diff(in_order.astype(int), axis=1) <= 0).all()
    before = there
  assert before.all() and (partial[-1].steps[~known] > 0).all()
  assert parts == 1 or (partial[0].tokens < 0).any()


def test_a_prompt_longer_than_a_step_of_the_cache(monkeypatch):
  monkeypatch.setattr(decode, "CACHE_STEP", 8)
  model, params = small_model(block_size=24, layers=1)
  rng = np.random.default_rng(9)
  known = np.arange(24) < np.array([[21], [3], [16], [22]])
  tokens = rng.integers(0, 64, (4, 24))
  made = plan.make_plan(np.tile(np.arange(24), (4, 1)), known, 24, counts="fixed")  # one at a time
  out = decode.sample(model, params, made, tokens, keys(4), filters.Filters(64))
  np.testing.assert_array_equal(out.tokens[known], tokens[known])
  np.testing.assert_allclose(out.log_probs[~known], full_log_probs(model, params, out, made.orders, 64)[~known], atol=1e-4)


@pytest.mark.parametrize("length", [1, 63, 64])
@pytest.mark.parametrize("steps", [1, 7, 64, 65, 1000])
def test_any_length_up_to_the_block_and_any_number_of_steps(length, steps):
  model, params = small_model(layers=1)
  made = plan.make_plan(np.tile(np.arange(length), (2, 1)), np.zeros((2, length), bool), steps, counts="fixed")
  out = decode.sample(model, params, made, np.zeros((2, length)), keys(2), filters.Filters(50))
  assert out.tokens.shape == (2, length) and out.evaluations == min(steps, length)
  assert ((np.asarray(out.tokens) >= 0) & (np.asarray(out.tokens) < 50)).all()


def test_what_does_not_fit_is_named():
  model, params = small_model()
  too_long = plan.make_plan(np.arange(65)[None], np.zeros((1, 65), bool), 4)
  with pytest.raises(ValueError, match="length is 65; the model's blocks have 64"):
    decode.sample(model, params, too_long, np.zeros((1, 65)), keys(1), filters.Filters(64))
  made = plan.make_plan(np.arange(8)[None], np.zeros((1, 8), bool), 4)
  with pytest.raises(ValueError, match=r"keys \(2,\) must be \[1, 8\] and \[1\]"):
    decode.sample(model, params, made, np.zeros((1, 8)), keys(2), filters.Filters(64))
  with pytest.raises(ValueError, match="vocab_size is 65; the model has 64"):
    decode.sample(model, params, made, np.zeros((1, 8)), keys(1), filters.Filters(65))
  with pytest.raises(ValueError, match="contexts is 0; it must be at least 1"):
    decode.sample(model, params, made, np.zeros((1, 8)), keys(1), filters.Filters(64), contexts=0)
  with pytest.raises(ValueError, match="sum to the 8 entries"):
    decode.decode_logits(model, params, np.zeros((1, 8)), np.arange(8)[None], [3, 4])


def test_twenty_draws_with_binomial_counts_compile_a_small_bounded_set_of_programs(compilations):
  model, params = small_model(layers=1, block_size=48)  # a program of no other test
  for draw in range(20):
    made = plan.make_plan(np.tile(np.arange(48), (2, 1)), np.zeros((2, 48), bool), 48, rng=np.random.default_rng(draw))
    temperature = 1 + draw / 10  # a number that is data, too
    decode.sample(model, params, made, np.zeros((2, 48)), keys(2), filters.Filters(64, temperature=temperature))
  assert 1 <= compilations["_run"] <= 2  # two or four entries in a pass


def test_at_temperature_0_the_key_has_no_effect_and_every_token_is_the_most_probable():
  arrays, model, params = golden("aogpt_a")
  made = plan.make_plan(arrays["orders"], np.zeros_like(arrays["orders"], bool), 16, counts="fixed")
  draw = lambda seed: decode.sample(
      model, params, made, np.zeros_like(made.orders), keys(3, seed), filters.Filters(61, temperature=0.0)).tokens
  np.testing.assert_array_equal(draw(0), draw(1))
  logits = model.apply({"params": params}, draw(0), jnp.asarray(made.orders))  # one pass over the result, without a cache
  np.testing.assert_array_equal(jnp.take_along_axis(draw(0), made.orders, axis=1), logits.argmax(-1))
