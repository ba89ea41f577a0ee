"""Orders: each distribution is what its name says; a draw depends on the seed, the step and the global row alone."""

import functools
import itertools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import run_on_eight_devices
from aogpt_jax import build_model
from aogpt_jax import config as config_lib
from aogpt_jax import objectives
from aogpt_jax import orders
from aogpt_jax import sharding
from aogpt_jax.training import step as step_lib

SPECS = ("left_to_right", "right_to_left", "uniform", "mix(0.5)", "fixed_random", "fixed_random(seed=3)", "block_wise",
         "block_wise(3)", "block_wise(block=5, seed=2)", "shuffled_blocks(4)",
         "schedule(left_to_right, block_wise(block=3), cosine, 2, 6)", "growing_blocks(1, 5, linear, 0, 4)", "explicit((12, 3, 0, 2, 1, 11, 10, 9, 4, 8, 5, 7, 6))")
MESH_SIZES = (1, 2, 8)
ROWS, LENGTH = 16, 13
MICRO_BATCHES = (1, 2, 4)


# Compiling is most of the time of these tests; none of them needs fast code.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.partial(jit, static_argnames=("spec", "length"))
def draw(spec, rows, step=0, length=LENGTH, seed=0):
  return orders.draw(spec, orders.root_key(seed), step, rows, length)


def frequencies(sigma):
  """Share of each order among the rows, for all orders of their length in lexicographic sequence."""
  sigma = np.asarray(sigma)
  return np.array([(sigma == order).all(-1).mean() for order in itertools.permutations(range(sigma.shape[1]))])


def assert_shares(observed, expected, draws):
  """Within four standard errors of what independent draws with these probabilities give."""
  expected = np.asarray(expected)
  assert (np.abs(observed - expected) < 4 * np.sqrt(expected * (1 - expected) / draws)).all(), observed


def test_every_registered_distribution_is_tested_here():
  assert {re.match(r"\w+", spec)[0] for spec in SPECS} == set(orders.ORDERS)


@pytest.mark.parametrize("spec", SPECS)
def test_every_row_is_a_permutation(spec):
  for length in (LENGTH,) if spec.startswith("explicit") else (1, 4, LENGTH):  # 13 is no multiple of a block
    sigma = draw(spec, jnp.arange(5), length=length)
    assert sigma.dtype == jnp.int32
    np.testing.assert_array_equal(np.sort(sigma, axis=1), np.tile(np.arange(length), (5, 1)))


@pytest.mark.parametrize("spec, order", [
    ("left_to_right", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ("right_to_left", [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]),
    ("block_wise", [0, 2, 3, 1, 4, 6, 7, 5, 8, 9]),
    ("block_wise(4)", [0, 2, 3, 1, 4, 6, 7, 5, 8, 9]),
    ("block_wise(1)", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ("mix(1)", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ("shuffled_blocks(1)", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ("explicit((9, 0, 2, 1, 8, 7, 6, 5, 4, 3))", [9, 0, 2, 1, 8, 7, 6, 5, 4, 3]),
])
def test_fixed_orders_are_what_their_names_say(spec, order):
  np.testing.assert_array_equal(draw(spec, jnp.arange(3), step=7, length=10), np.tile(order, (3, 1)))


def test_block_wise_repeats_one_permutation_of_a_block_from_left_to_right():
  sigma = np.asarray(draw("block_wise(block=6, seed=1)", jnp.arange(1), length=18))[0]
  inside = sigma[:6]
  assert sorted(inside) == list(range(6)) and list(inside) != list(range(6))
  np.testing.assert_array_equal(sigma, np.concatenate([inside, inside + 6, inside + 12]))


def test_fixed_random_is_one_order_for_all_rows_steps_and_runs():
  order = draw("fixed_random(1)", jnp.arange(1))[0]
  for step, seed in ((0, 0), (5, 0), (0, 1)):
    np.testing.assert_array_equal(draw("fixed_random(1)", jnp.arange(4), step, seed=seed), np.tile(order, (4, 1)))


def test_fixed_random_is_another_order_for_another_seed():
  drawn = {tuple(np.asarray(draw(f"fixed_random({seed})", jnp.arange(1))[0])) for seed in range(3)}
  assert len(drawn | {tuple(range(LENGTH))}) == 4


def test_uniform_gives_every_order_of_three_equally_often():
  assert_shares(frequencies(draw("uniform", jnp.arange(6000), length=3)), [1 / 6] * 6, 6000)


def test_mix_gives_left_to_right_its_share_and_every_order_an_equal_part_of_the_rest():
  assert_shares(frequencies(draw("mix(0.4)", jnp.arange(6000), length=3)), [0.5] + [0.1] * 5, 6000)


def test_mix_of_a_tenth_gives_a_tenth_of_the_rows_left_to_right():
  sigma = np.asarray(draw("mix(0.1)", jnp.arange(8000)))
  assert_shares((sigma == np.arange(LENGTH)).all(-1).mean(), 0.1, 8000)  # the uniform part adds 0.9 / 13!


def test_mix_gives_a_row_its_share_over_the_steps():
  at = lambda step: orders.draw("mix(0.1)", orders.root_key(0), step, jnp.arange(2, 3), LENGTH)
  sigma = np.asarray(jit(jax.vmap(at))(jnp.arange(8000)))
  assert_shares((sigma == np.arange(LENGTH)).all(-1).mean(), 0.1, 8000)


def test_shuffled_blocks_come_from_left_to_right_each_in_any_order():
  sigma = np.asarray(draw("shuffled_blocks(3)", jnp.arange(6000), length=5))
  np.testing.assert_array_equal(np.sort(sigma[:, :3], axis=1), np.tile([0, 1, 2], (6000, 1)))
  np.testing.assert_array_equal(np.sort(sigma[:, 3:], axis=1), np.tile([3, 4], (6000, 1)))
  for first in (3, 4):
    assert_shares(frequencies(sigma[sigma[:, 3] == first, :3]), [1 / 6] * 6, 3000)


@functools.partial(jit, static_argnames=("spec", "length"))
def shares(spec, steps, length=6):
  """For each step, the share of 3000 rows that are left to right, and that are right to left."""
  rows = jnp.arange(3000)
  at = lambda step: orders.draw(spec, orders.root_key(0), step, rows, length)
  sigma = jax.lax.map(at, steps)
  ascending = jnp.arange(length)
  return [(sigma == order).all(-1).mean(-1) for order in (ascending, ascending[::-1])]


@pytest.mark.parametrize("change, expected", [
    ("linear, 100, 500", {0: 0, 100: 0, 200: 0.25, 300: 0.5, 460: 0.9, 500: 1, 10**6: 1}),
    ("cosine, 100, 500", {99: 0, 200: 0.5 - 0.5**1.5, 300: 0.5, 400: 0.5 + 0.5**1.5, 500: 1}),
    ("step, 100", {0: 0, 99: 0, 100: 1, 101: 1}),
    ("step, 0", {0: 1}),
])
def test_a_schedule_mixes_its_distributions_as_it_says_at_every_step(change, expected):
  before, after = shares(f"schedule(left_to_right, right_to_left, {change})", jnp.array(list(expected)))
  share = np.array(list(expected.values()))
  np.testing.assert_allclose(before + after, 1, rtol=1e-6)
  observed = np.asarray(after, np.float64)
  assert (np.abs(observed - share) <= 4 * np.sqrt(share * (1 - share) / 3000) + 1e-7).all(), observed


def test_schedules_may_follow_one_another():
  spec = "schedule(schedule(left_to_right, right_to_left, step, 10), left_to_right, linear, 20, 40)"
  before, after = shares(spec, jnp.array([9, 10, 20, 30, 40]))
  np.testing.assert_array_equal(before[jnp.array([0, 1, 2, 4])], [1, 0, 0, 1])
  assert_shares(np.array(after[3]), 0.5, 3000)


@pytest.mark.parametrize("spec, step, constant", [
    ("schedule(mix(0.5), uniform, linear, 5, 9)", 5, "mix(0.5)"),
    ("schedule(mix(0.5), uniform, linear, 5, 9)", 9, "uniform"),
    ("schedule(mix(0.5), uniform, cosine, 5, 9)", 0, "mix(0.5)"),
    ("schedule(mix(0.5), uniform, cosine, 5, 9)", 12, "uniform"),
    ("schedule(mix(0.5), uniform, step, 5)", 4, "mix(0.5)"),
    ("schedule(mix(0.5), uniform, step, 5)", 5, "uniform"),
    ("growing_blocks(2, 5, cosine, 5, 9)", 5, "shuffled_blocks(2)"),
    ("growing_blocks(2, 5, cosine, 5, 9)", 7, "shuffled_blocks(3)"),  # 3.5
    ("growing_blocks(2, 5, cosine, 5, 9)", 9, "shuffled_blocks(5)"),
    ("growing_blocks(1, 13, linear, 5, 9)", 2, "left_to_right"),
    ("growing_blocks(1, 13, linear, 5, 9)", 9, "uniform"),
])
def test_before_and_after_its_change_a_schedule_draws_what_the_constant_distribution_draws(spec, step, constant):
  rows = jnp.arange(ROWS)
  np.testing.assert_array_equal(draw(spec, rows, jnp.int32(step)), draw(constant, rows, jnp.int32(step)))


def test_the_steps_of_a_schedule_share_one_compilation(compilations):
  @jax.jit
  def scheduled(step):
    return orders.draw("growing_blocks(1, 4, linear, 0, 6)", orders.root_key(0), step, jnp.arange(7), 12)

  assert len({np.asarray(scheduled(jnp.int32(step))).tobytes() for step in range(8)}) == 7  # at 0 and 1 the blocks have one token
  assert compilations["scheduled"] == 1


def test_evaluation_and_sampling_refuse_what_changes_over_training():
  orders.check_constant("mix(0.5)")
  for spec in ("schedule(left_to_right, uniform, step, 5)", "growing_blocks(1, 4, linear, 0, 6)"):
    with pytest.raises(ValueError, match=r"changes over training; name the one distribution"):
      orders.check_constant(spec)


def test_rows_steps_and_seeds_all_draw_differently():
  drawn = {tuple(order) for step in range(6) for seed in range(3)
           for order in np.asarray(draw("uniform", jnp.arange(6), step, seed=seed))}
  assert len(drawn) == 6 * 6 * 3


def test_a_hosts_rows_draw_what_they_draw_in_the_global_batch():
  everything = draw("mix(0.5)", jnp.arange(ROWS), step=3)
  for host in range(4):
    rows = slice(4 * host, 4 * host + 4)
    np.testing.assert_array_equal(draw("mix(0.5)", jnp.arange(ROWS)[rows], step=3), everything[rows])


def test_draws_do_not_depend_on_the_default_random_generator():
  expected = draw("mix(0.5)", jnp.arange(ROWS), step=3)
  with jax.default_prng_impl("rbg"):
    assert str(jax.random.key_impl(jax.random.key(0))) == "rbg"
    jitted = jit(lambda rows: orders.draw("mix(0.5)", orders.root_key(0), 3, rows, LENGTH))
    np.testing.assert_array_equal(jitted(jnp.arange(ROWS)), expected)


@pytest.mark.parametrize("spec, named", [
    ("mix(2)", r"\b2\b.*from 0 to 1"),
    ("mix(-0.1)", r"-0\.1.*from 0 to 1"),
    ("mix", r"write mix\(left_to_right: float\)"),
    ("mix('0.1')", r"write mix\(left_to_right: float\)"),
    ("unifrom", r"'unifrom'.*did you mean uniform\?"),
    ("block_wise(0)", r"\b0\b.*at least 1"),
    ("block_wise(2.0)", r"2\.0.*write block_wise\(block: int = 4, seed: int = 0\)"),
    ("block_wise(size=2)", r"size.*write block_wise\(block: int = 4, seed: int = 0\)"),
    ("uniform(3)", r"write uniform\(\)"),
    ("fixed_random(-1)", r"-1.*0 or more"),
    ("fixed_random(4294967296)", r"4294967296.*2\*\*32"),  # seeds have 32 bits: this one would be that of seed 0
    ("fixed_random(18446744073709551616)", r"18446744073709551616.*2\*\*32"),
    ("schedule(uniform, left_to_right)", r"write schedule\(before: str, after: str, change: str, begin: int, end: int = 0\)"),
    ("schedule(unifrom, left_to_right, linear, 0, 9)", "did you mean uniform"),
    ("schedule(uniform, mix(2), linear, 0, 9)", r"\b2\b.*from 0 to 1"),
    ("schedule(uniform, left_to_right, square, 0, 9)", "no change 'square'; give one of linear, cosine, step"),
    ("schedule(uniform, left_to_right, linear, -1, 9)", "begins at update -1; give 0 or more"),
    ("schedule(uniform, left_to_right, linear, 9)", "from update 9 must end after it, and its end is 0; give both"),
    ("schedule(uniform, left_to_right, cosine, 9, 9)", "from update 9 must end after it, and its end is 9; give both"),
    ("schedule(uniform, left_to_right, step, 0, 9)", "has no end, and 9 is given; leave it out"),
    ("schedule(uniform, left_to_right, linear, 0.5, 9)", "begin is 0.5; write schedule"),
    ("growing_blocks(0, 4, linear, 0, 9)", r"\b0\b.*at least 1"),
    ("shuffled_blocks(0)", r"\b0\b.*at least 1"),
    ("explicit", r"write explicit\(order: tuple\)"),
    ("explicit(3, 0)", r"write explicit\(order: tuple\)"),
    ("explicit([1, 0])", r"write explicit\(order: tuple\)"),
    ("explicit(())", "must be of whole numbers, as explicit"),
    ("explicit((0, 1.0))", "must be of whole numbers, as explicit"),
    ("explicit((0, (1,)))", "must be of whole numbers, as explicit"),
    ("explicit((0, 3, 3))", "of 3 tokens must have each of the numbers from 0 to 2 once; 1 is missing"),
    ("__import__('os')", r"no order '__import__'.*the orders are left_to_right, "),
    ("(lambda: 1)()", "the orders are left_to_right, "),
    ("uniform.x", "the orders are left_to_right, "),
    ("", "the orders are left_to_right, "),
])
def test_a_bad_name_is_refused_in_one_line_that_says_what_to_write(spec, named):
  with pytest.raises(ValueError, match=named) as error:
    orders.parse(spec)
  assert "\n" not in str(error.value)


def test_an_explicit_order_of_another_length_is_refused_with_both():
  orders.check("explicit((1, 0))", 2)
  orders.check("uniform", 1)
  with pytest.raises(ValueError, match="the explicit order is of 2 tokens, and the text has 3; give an order of 3"):
    orders.check("explicit((1, 0))", 3)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
  """What a process with eight devices draws, and what its training step makes of it; see `main`."""
  path = tmp_path_factory.mktemp("orders") / "arrays.npz"
  run_on_eight_devices(__file__, path)
  with np.load(path) as f:
    return dict(f)


@pytest.mark.parametrize("devices", MESH_SIZES)
def test_rows_sharded_over_devices_draw_the_same_bits_without_communication(elsewhere, devices):
  np.testing.assert_array_equal(elsewhere[f"orders/{devices}"], draw("mix(0.5)", jnp.arange(ROWS), step=3))
  assert not elsewhere[f"collectives/{devices}"].size


@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
def test_micro_batches_train_on_the_draws_of_the_global_rows(elsewhere, micro_batches):
  np.testing.assert_allclose(elsewhere[f"loss/{micro_batches}"], elsewhere["loss/expected"], rtol=1e-6)
  gradient, expected = elsewhere[f"gradient/{micro_batches}"], elsewhere["gradient/expected"]
  np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_the_loss_tells_the_draws_of_the_global_rows_from_those_that_micro_batches_share(elsewhere):
  assert abs(elsewhere["loss/shared"] - elsewhere["loss/expected"]) > 1e-3 * elsewhere["loss/expected"]


def main(path):
  """Run in a process of its own, where there are eight devices."""
  arrays = {}
  for devices in MESH_SIZES:
    sharded = sharding.batch_sharding(mesh_of(devices))
    rows = jax.device_put(jnp.arange(ROWS), sharded)
    compiled = jax.jit(functools.partial(orders.draw, "mix(0.5)", length=LENGTH), out_shardings=sharded).lower(
        orders.root_key(0), jnp.int32(3), rows).compile()
    sigma = compiled(orders.root_key(0), jnp.int32(3), rows)
    assert len(sigma.sharding.device_set) == devices
    arrays[f"orders/{devices}"] = sigma
    arrays[f"collectives/{devices}"] = re.findall(
        r"all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+", compiled.as_text())
  np.savez(path, **arrays, **micro_batch_arrays())


def mesh_of(devices):
  return jax.make_mesh((devices, 1, 1), sharding.MESH_AXES, devices=jax.devices()[:devices],
                       axis_types=(jax.sharding.AxisType.Auto,) * 3)


def micro_batch_arrays():
  """Loss and gradient of one training step in 1, 2 and 4 parts, and of the whole batch on given orders."""
  config = config_lib.default_config()
  config.batch_size = 8
  config.orders = "mix(0.5)"
  config.optimizer.clip_norm = 1e9  # so that Adam's first moment is (1 - beta1) times the gradient
  config.model.update(layers=1, width=16, heads=2, block_size=6, vocab_size=32, cond_width=8, dtype="float32")
  model = build_model(config)
  rng = np.random.default_rng(0)
  tokens = jnp.asarray(rng.integers(0, 32, size=(8, 6)), jnp.int32)
  values = lambda x: jnp.asarray(rng.normal(size=x.shape, scale=0.3), x.dtype)
  flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
  arrays = {}
  params = None
  for micro_batches in MICRO_BATCHES:
    config.micro_batches = micro_batches
    trainer = step_lib.make_trainer(config, model, mesh_of(1))
    params = params or jax.tree.map(values, trainer.shapes.params)
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), trainer.shapes)
    state, metrics = trainer.step(state.replace(step=jnp.int32(3), params=jax.tree.map(jnp.copy, params)), tokens)
    arrays[f"loss/{micro_batches}"] = metrics["loss"]
    arrays[f"gradient/{micro_batches}"] = flat(state.opt_state[1].mu) / (1 - config.optimizer.beta1)

  loss_of = jax.jit(jax.value_and_grad(lambda p, sigma: objectives.any_order_nll(model, p, tokens, sigma).mean()))
  orders_of = lambda rows: orders.draw(config.orders, step_lib.order_key(config.seed), 3, rows, 6)
  arrays["loss/expected"], gradient = loss_of(params, orders_of(jnp.arange(8)))
  arrays["gradient/expected"] = flat(gradient)
  arrays["loss/shared"], _ = loss_of(params, orders_of(jnp.arange(8) % 4))
  return arrays


if __name__ == "__main__":
  main(sys.argv[1])


@pytest.mark.parametrize("spec", ["left_to_right", "right_to_left", "fixed_random(3)", "block_wise(block=3)", "explicit((1, 2, 0, 3))",
                                  "uniform", "mix(0.5)", "shuffled_blocks(2)"])
def test_a_distribution_is_single_where_every_row_has_the_same_order(spec):
  drawn = np.asarray(orders.draw(spec, orders.root_key(0), 0, jnp.arange(20), 4))
  assert orders.is_single(spec) == (drawn == drawn[0]).all()
