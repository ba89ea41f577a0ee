"""The encoders' losses: enumerated, in closed form, by finite differences; draws that no division of the batch changes."""

import functools
import itertools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import random_models
from conftest import run_on_eight_devices
from aogpt_jax import build_model
from aogpt_jax import config as config_lib
from aogpt_jax import objectives
from aogpt_jax import orders
from aogpt_jax import sharding
from aogpt_jax.training import step as step_lib

LENGTH, VOCAB = 4, 3
MASKS = np.array([m for m in itertools.product([False, True], repeat=LENGTH) if any(m)])
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (5, LENGTH)).astype(np.int32)
ENCODERS = ("ao", "lambda_dce", "score_entropy")


@pytest.fixture(scope="module")
def encoder():
  return random_models.make(LENGTH, VOCAB + 1, "ao")


def on_masks(model, params, nats, level):
  """The nats of each of TOKENS under each of MASKS at a level, [15, 5], in float64."""
  apply = jax.jit(lambda masked, level: nats(model, params, jnp.asarray(TOKENS), objectives.Masks(masked, level)))
  rows = [apply(np.tile(mask, (len(TOKENS), 1)), np.full(len(TOKENS), level(mask), np.float32)) for mask in MASKS]
  return np.array(rows, np.float64)


@pytest.fixture(scope="module")
def expected(encoder):
  """(1/n) * the sum over masks of (m-1)! (n-m)! / n! times their summed NLL, of each of TOKENS."""
  total, log_probs = np.zeros(len(TOKENS)), random_models.log_probs_of(*encoder)
  for mask in MASKS:
    nll = -np.take_along_axis(log_probs(np.where(mask, VOCAB, TOKENS)), TOKENS[..., None], axis=2)[..., 0]
    m = mask.sum()
    total += math.factorial(m - 1) * math.factorial(LENGTH - m) / math.factorial(LENGTH) * nll[:, mask].sum(axis=1)
  return total / LENGTH


def test_ao_over_all_masks_is_the_enumerated_bound(encoder, expected):
  values = on_masks(*encoder, objectives.OBJECTIVES["ao"].nats, lambda mask: mask.mean())
  probability = [1 / (LENGTH * math.comb(LENGTH, m)) for m in MASKS.sum(axis=1)]
  np.testing.assert_allclose(probability @ values, expected, rtol=0, atol=1e-6)


def test_lambda_dce_integrated_over_the_level_is_the_enumerated_bound(encoder, expected):
  nodes, weights = np.polynomial.legendre.leggauss(4)  # exact: of the levels, the integrand is a polynomial of degree 3
  total = np.zeros(len(TOKENS))
  for t, weight in zip((nodes + 1) / 2, weights / 2):
    values = on_masks(*encoder, objectives.OBJECTIVES["lambda_dce"].nats, lambda mask: t)  # pylint: disable=cell-var-from-loop
    m = MASKS.sum(axis=1)
    total += weight * (t**m * (1 - t) ** (LENGTH - m)) @ values
  np.testing.assert_allclose(total, expected, rtol=0, atol=1e-6)


def test_whole_orders_have_the_same_mean_as_masks(encoder, expected):
  model, params = encoder
  every = np.array(list(itertools.permutations(range(LENGTH))), np.int32)
  nll = random_models.nll_of(model, params)(np.repeat(TOKENS, len(every), axis=0), np.tile(every, (len(TOKENS), 1)))
  np.testing.assert_allclose(nll.reshape(len(TOKENS), -1).mean(axis=1), expected, rtol=0, atol=1e-6)


class Logits:
  """In the place of an encoder: the same logits [V'] at every position, whatever is known."""

  num_tokens = mask_id = VOCAB
  head_chunk = 0

  def apply(self, variables, tokens, asked, level, method):
    del variables, asked, level
    assert method == "features"
    return jnp.ones((*tokens.shape, 1))

  def head_parameters(self, params):
    return jnp.append(params, 0.0)[None], jnp.append(jnp.zeros(VOCAB), -jnp.inf)


def as_published(logits, t, token):
  """sigma' [sum_y s_y - r log s_x + r (log r - 1)] of one masked token x, from the definitions of SEDD; float64."""
  eps = 1e-3
  total = -math.log1p(-(1 - eps) * t)
  rate, r = (1 - eps) / (1 - (1 - eps) * t), 1 / math.expm1(total)
  log_scores = np.asarray(logits, np.float64) - math.log(math.expm1(total)) - math.log(VOCAB)
  return rate * (np.exp(log_scores).sum() - r * log_scores[token] + r * (math.log(r) - 1))


def score_entropy(logits, t, token):
  masks = objectives.Masks(jnp.ones((1, 1), bool), jnp.full(1, t))
  return objectives.score_entropy(Logits(), logits, jnp.full((1, 1), token), masks)[0]


@pytest.mark.parametrize("t", [1e-3, 0.3, 1.0])
def test_score_entropy_is_as_published(t):
  logits = np.array([0.3, -1.0, 0.8], np.float32)
  for token in range(VOCAB):
    np.testing.assert_allclose(score_entropy(logits, t, token), as_published(logits, t, token), rtol=2e-5)


def test_score_entropy_is_least_at_the_true_scores_where_it_is_the_entropy_over_t():
  probs, t = np.array([0.2, 0.5, 0.3]), 0.4
  mean = lambda logits: sum(p * score_entropy(logits, t, token) for token, p in enumerate(probs))
  best = jnp.asarray(np.log(VOCAB * probs), jnp.float32)  # s_y = r exp(f_y) / V' = r p_y
  np.testing.assert_allclose(mean(best), -(probs * np.log(probs)).sum() / t, rtol=1e-6)
  np.testing.assert_allclose(jax.grad(mean)(best), 0, atol=1e-6)
  for change in np.vstack([np.eye(VOCAB), np.ones(VOCAB)]):
    assert mean(best + 0.1 * change) > mean(best) + 1e-3 and mean(best - 0.1 * change) > mean(best) + 1e-3


def test_the_gradient_of_score_entropy_is_that_of_finite_differences():
  logits, t = np.array([0.3, -1.0, 0.8]), 0.3
  published = lambda x: np.mean([as_published(x, t, token) for token in range(VOCAB)])
  differences = [(published(logits + h) - published(logits - h)) / 2e-5 for h in 1e-5 * np.eye(VOCAB)]
  mean = lambda logits: sum(score_entropy(logits, t, token) for token in range(VOCAB)) / VOCAB
  np.testing.assert_allclose(jax.grad(mean)(jnp.asarray(logits, jnp.float32)), differences, rtol=0, atol=1e-5)


@functools.partial(jax.jit, static_argnames=("objective", "spec", "length"))
def draw(objective, rows, step=0, spec="uniform", length=LENGTH):
  return objectives.OBJECTIVES[objective].draw(spec, orders.root_key(0), step, rows, length)


@pytest.mark.parametrize("objective", ENCODERS)
def test_masks_are_of_every_size_and_place_as_often_as_they_should(objective):
  batch = 24_000
  masks = draw(objective, jnp.arange(batch))
  every = np.array(list(itertools.product([False, True], repeat=LENGTH)))
  observed = np.bincount(np.asarray(masks.masked) @ [8, 4, 2, 1], minlength=16)
  sizes = every.sum(axis=1)
  if objective == "ao":  # m uniform on 1..n
    share = np.where(sizes > 0, [1 / (LENGTH * math.comb(LENGTH, m)) for m in sizes], 0)
    np.testing.assert_array_equal(masks.level, np.asarray(masks.masked).mean(axis=1))
  else:  # t uniform: m uniform on 0..n; sigma of score entropy makes a difference of a thousandth
    share = np.array([1 / ((LENGTH + 1) * math.comb(LENGTH, m)) for m in sizes])
  assert np.abs(observed - batch * share).max() < 4.5 * np.sqrt(batch * share.max()) + 2e-3 * batch
  if objective == "ao":
    assert observed[0] == 0


def test_noise_levels_are_uniform_with_one_in_each_part_of_the_batch():
  key = orders.root_key(0)
  levels = np.stack([objectives.spread_levels(key, step, jnp.arange(8)) for step in range(200)])
  assert levels.min() > 0 and levels.max() <= 1
  np.testing.assert_array_equal(np.sort(np.ceil(levels * 8), axis=1), np.tile(np.arange(1, 9), (200, 1)))
  assert abs((levels[:, 0] * 8 % 1).mean() - 0.5) < 4 * 12**-0.5 / 200**0.5  # and where in its part is up to the step
  parts = np.asarray(jax.vmap(lambda i: objectives.stratum(key, i, 4, jnp.arange(500)))(jnp.arange(4)))
  assert (np.ceil(parts * 4) == [[4], [3], [2], [1]]).all() and abs(parts.mean() - 0.5) < 4 * 12**-0.5 / 4 / 2000**0.5


def test_what_ao_knows_is_the_beginning_of_an_order_of_any_distribution():
  masked = np.asarray(draw("ao", jnp.arange(64), spec="left_to_right").masked)
  assert (np.diff(masked.astype(int), axis=1) >= 0).all() and set(masked.sum(axis=1)) == {1, 2, 3, 4}
  mixed = np.asarray(draw("ao", jnp.arange(4000), spec="mix(0.5)", length=8).masked)
  assert 0.5 < (np.diff(mixed.astype(int), axis=1) >= 0).all(axis=1).mean() < 0.7


def test_what_is_drawn_changes_with_the_step(encoder):
  del encoder
  for objective in ENCODERS:
    first, second = (draw(objective, jnp.arange(16), step=step, length=32) for step in (0, 1))
    assert (np.asarray(first.masked) != np.asarray(second.masked)).any(axis=1).all()


def test_averages_over_context_orders_are_those_of_full_passes():
  model, params = random_models.make(LENGTH, VOCAB)
  nll_of = random_models.nll_of(model, params)
  contexts = draw("context_average", jnp.arange(len(TOKENS)))
  nats = np.asarray(objectives.context_average_nll(model, params, jnp.asarray(TOKENS), contexts))
  for b, known in enumerate(np.asarray(contexts.known)):
    each = np.array([nll_of(TOKENS[b : b + 1], [order])[0] for order in np.asarray(contexts.orders[b])])
    expected = np.append(each[:, :known].mean(axis=0), -np.log(np.exp(-each[:, known:]).mean(axis=0)))
    np.testing.assert_allclose(nats[b], expected, rtol=0, atol=1e-5)
  assert len(set(np.asarray(contexts.known))) > 1


def test_context_orders_are_uniform_permutations_of_the_beginning_of_an_order():
  contexts = draw("context_average", jnp.arange(6000))
  orders_BKT, known = np.asarray(contexts.orders), np.asarray(contexts.known)
  np.testing.assert_array_equal(orders_BKT[:, 0], orders.draw("uniform", orders.root_key(0), 0, jnp.arange(6000), LENGTH))
  assert np.abs(np.bincount(known) - 1500).max() < 4 * (6000 * 3 / 16) ** 0.5
  for k in range(LENGTH):
    some = orders_BKT[known == k]
    assert (some[:, :, k:] == some[:, :1, k:]).all()
    assert (np.sort(some[:, :, :k], axis=2) == np.sort(some[:, :1, :k], axis=2)).all()
  three = orders_BKT[known == 3]  # where the first order has its context's positions, in the others
  ranks = np.argmax(three[:, 1:, :3, None] == three[:, :1, None, :3], axis=3).reshape(-1, 3)
  counts = np.unique(ranks, axis=0, return_counts=True)[1]
  assert len(counts) == 6 and np.abs(counts - len(ranks) / 6).max() < 4 * (len(ranks) * 5 / 36) ** 0.5


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
  """What a process with eight devices draws and trains on; see `main`."""
  path = tmp_path_factory.mktemp("objectives") / "arrays.npz"
  run_on_eight_devices(__file__, path)
  with np.load(path) as f:
    return dict(f)


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("objective", ENCODERS)
def test_rows_sharded_over_devices_draw_the_same_bits(elsewhere, objective, devices):
  here = draw(objective, jnp.arange(16), step=3)
  np.testing.assert_array_equal(elsewhere[f"{objective}/{devices}/masked"], here.masked)
  np.testing.assert_array_equal(elsewhere[f"{objective}/{devices}/level"], here.level)


def test_a_step_on_a_mesh_in_micro_batches_is_that_of_one_device(elsewhere):
  np.testing.assert_allclose(elsewhere["all/loss"], elsewhere["one/loss"], rtol=1e-5)
  np.testing.assert_allclose(elsewhere["all/grad_norm"], elsewhere["one/grad_norm"], rtol=1e-4)


def main(path):
  """Run in a process of its own, where there are eight devices."""
  mesh = lambda shape: jax.make_mesh(shape, sharding.MESH_AXES, devices=jax.devices()[: np.prod(shape)],
                                     axis_types=(jax.sharding.AxisType.Auto,) * 3)
  arrays = {}
  for devices in (1, 2, 8):
    sharded = sharding.batch_sharding(mesh((devices, 1, 1)))
    for objective in ENCODERS:
      masks = draw(objective, jax.device_put(jnp.arange(16), sharded), step=3)
      arrays |= {f"{objective}/{devices}/masked": masks.masked, f"{objective}/{devices}/level": masks.level}
  config = config_lib.default_config()
  config.objective, config.batch_size = "score_entropy", 8
  config.model.update(architecture="encoder", num_tokens=30, layers=2, width=16, heads=2, block_size=6, vocab_size=32,
                      cond_width=8, dtype="float32")
  tokens = np.random.default_rng(0).integers(0, 30, (8, 6)).astype(np.int32)
  for name, shape, config.micro_batches in (("one", (1, 1, 1), 1), ("all", (2, 2, 2), 2)):
    trainer = step_lib.make_trainer(config, build_model(config), mesh(shape))
    _, metrics = trainer.step(trainer.init(), jax.device_put(tokens, sharding.batch_sharding(mesh(shape))))
    arrays |= {f"{name}/loss": metrics["loss"], f"{name}/grad_norm": metrics["grad_norm"]}
  np.savez(path, **arrays)


if __name__ == "__main__":
  main(sys.argv[1])
