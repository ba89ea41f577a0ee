"""AdamW: its learning rate, what decays, clipping, and the moving average of the parameters."""

import math

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import golden_weights
from aogpt_jax import build_model
from aogpt_jax import config as config_lib
from aogpt_jax.training import optimizer
from aogpt_jax.training import step as step_lib

DECAYING = {
    "tokens/embedding", "positions/embedding", "start/embedding", "targets/embedding",
    "blocks/modulation/dense/kernel", "blocks/attention/qkv/kernel", "blocks/attention/out/kernel",
    "blocks/mlp/fc/kernel", "blocks/mlp/out/kernel", "final_modulation/dense/kernel", "head/kernel",
}
NOT_DECAYING = {
    "blocks/modulation/dense/bias", "blocks/norm1/scale", "blocks/norm2/scale", "blocks/attention/q_norm/scale",
    "blocks/attention/k_norm/scale", "blocks/attention/qkv/bias", "blocks/attention/out/bias", "blocks/mlp/fc/bias",
    "blocks/mlp/out/bias", "final_modulation/dense/bias", "final_norm/scale", "head/bias",
}


def model_shapes(**fields):
  config = config_lib.default_config()
  config.model.update(layers=3, width=8, heads=2, block_size=4, vocab_size=10, cond_width=6, **fields)
  return nn.unbox(jax.eval_shape(lambda: step_lib.init_params(build_model(config), 0)))


def leaves_by_path(tree):
  return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf
          for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize("updates_done, rate", [
    (0, 0.0),
    (1, 6e-4 / 2000),
    (500, 1.5e-4),
    (1999, 6e-4 * 1999 / 2000),
    (2000, 6e-4),
    (2000 + 498_000 // 4, 6e-5 + 5.4e-4 * (1 + math.sqrt(0.5)) / 2),
    (2000 + 498_000 // 2, 3.3e-4),
    (2000 + 498_000 * 2 // 3, 6e-5 + 5.4e-4 / 4),
    (500_000, 6e-5),
    (500_001, 6e-5),
    (3_000_000, 6e-5),
])
def test_the_learning_rate_rises_linearly_from_0_falls_by_a_cosine_and_stays(updates_done, rate):
  schedule = optimizer.learning_rate(config_lib.default_config())
  np.testing.assert_allclose(schedule(jnp.int32(updates_done)), rate, rtol=1e-5)


def test_without_a_warm_up_the_first_update_has_the_peak_rate():
  config = config_lib.default_config()
  config.optimizer.update(warmup_steps=0, decay_steps=100)
  schedule = optimizer.learning_rate(config)
  np.testing.assert_allclose([schedule(0), schedule(50), schedule(100)], [6e-4, 3.3e-4, 6e-5], rtol=1e-5)


@pytest.mark.parametrize("name", golden_weights.NAMES)
def test_a_warm_up_of_three_updates_and_no_decay_gives_the_rates_of_the_golden_steps(name):
  arrays, config = golden_weights.load(name)
  config.optimizer.update(learning_rate=1e-3, final_learning_rate=1e-3, warmup_steps=3)
  schedule = optimizer.learning_rate(config)
  np.testing.assert_allclose([schedule(n) for n in range(6)], arrays["train/lr"], rtol=1e-6)


def test_kernels_and_embeddings_decay_and_biases_and_scales_never():
  mask = leaves_by_path(optimizer.decay_mask(model_shapes(), config_lib.default_config().optimizer.weight_decay_rules))
  assert {name for name, decays in mask.items() if decays} == DECAYING
  assert {name for name, decays in mask.items() if not decays} == NOT_DECAYING


@pytest.mark.parametrize("target", ["input", "layer_shared", "layer_distinct"])
def test_so_it_is_with_other_targets_and_with_layer_norms(target):
  shapes = model_shapes(target=target, norm="layer")
  mask = leaves_by_path(optimizer.decay_mask(shapes, config_lib.default_config().optimizer.weight_decay_rules))
  table = "blocks/targets/embedding" if target == "layer_distinct" else "targets/embedding"
  modulated = {name for name in DECAYING | NOT_DECAYING if "modulation" in name}
  assert {name for name, decays in mask.items() if decays} == DECAYING - modulated - {"targets/embedding"} | {table}
  assert {name for name, decays in mask.items() if not decays} == NOT_DECAYING - modulated | {
      "blocks/norm1/bias", "blocks/norm2/bias", "final_norm/bias"}


def test_an_update_with_zero_gradient_shrinks_what_decays_and_leaves_the_rest():
  tx = optimizer.make_optimizer(config_lib.default_config(), schedule=lambda n: 0.1)
  params = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), model_shapes())
  update = jax.jit(lambda: tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)[0])
  for name, x in leaves_by_path(update()).items():
    np.testing.assert_allclose(x, -0.1 * 0.05 if name in DECAYING else 0.0, rtol=1e-6, err_msg=name)


def test_the_first_rule_that_matches_the_whole_path_counts():
  params = {"a": {"kernel": 0.0, "kernel2": 0.0}, "b": {"kernel": 0.0}}
  mask = optimizer.decay_mask(params, (("a/kernel", True), (".*/kernel", False), (".*", False)))
  assert mask == {"a": {"kernel": True, "kernel2": False}, "b": {"kernel": False}}


def test_a_parameter_without_a_rule_is_an_error_that_names_it():
  rules = ((r".*/(kernel|embedding)", True), (r".*/bias", False), (r"(blocks/norm1|final_norm|.*/q_norm)/scale", False))
  with pytest.raises(ValueError, match="no rule covers the parameter blocks/attention/k_norm/scale;"):
    optimizer.decay_mask(model_shapes(), rules)


@pytest.mark.parametrize("size, clipped_size", [(10.0, 0.25), (0.3, 0.25), (0.2, 0.2)])
def test_a_gradient_is_scaled_down_to_the_clip_norm_and_never_up(size, clipped_size):
  config = config_lib.default_config()
  config.optimizer.clip_norm = 0.25
  tx = optimizer.make_optimizer(config, schedule=lambda n: 1.0)
  direction = {"a": {"kernel": np.float32([[0.48, -0.36]]), "bias": np.float32([0.8])}}  # of norm 1
  gradient = jax.tree.map(lambda x: size * x, direction)
  _, state = tx.update(gradient, tx.init(direction), direction)
  # Adam's first moment after one update is (1 - beta1) times the clipped gradient.
  expected = jax.tree.map(lambda x: 0.1 * clipped_size * x, direction)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state[1].mu, expected)


def test_the_first_adam_update_is_the_learning_rate_against_the_sign_of_the_gradient():
  tx = optimizer.make_optimizer(config_lib.default_config(), schedule=lambda n: 0.01)
  params = {"a": {"bias": np.zeros(3, np.float32)}}
  updates, _ = tx.update({"a": {"bias": np.float32([1e-3, -0.1, 0.5])}}, tx.init(params), params)
  np.testing.assert_allclose(updates["a"]["bias"], [-0.01, 0.01, -0.01], rtol=1e-4)  # eps / 1e-3 is 1e-5


def averages(values, max_decay, start=0.0):
  """The average after each update, the parameters being `values` in turn."""
  ema, seen = jnp.float32(start), []
  for n, value in enumerate(values, start=1):
    ema = optimizer.update_ema(ema, jnp.float32(value), jnp.int32(n), max_decay)
    seen.append(float(ema))
  return seen


def test_the_average_of_constant_parameters_is_the_parameters():
  assert averages([0.3] * 5, 0.9999, start=0.3) == [np.float32(0.3)] * 5


def test_the_average_forgets_its_start_by_the_product_of_the_early_decays():
  # The product of (1 + k) / (10 + k) over k = 1..n is (n + 1)! 10! / (n + 10)!.
  expected = [math.factorial(n + 1) * math.factorial(10) / math.factorial(n + 10) for n in range(1, 21)]
  np.testing.assert_allclose(averages([0.0] * 20, 0.9999, start=1.0), expected, rtol=1e-5)


def test_the_decay_grows_no_further_than_its_maximum():
  # (1 + n) / (10 + n) is 2/11, 3/12, 4/13 and then above 0.3: from there on 0.3.
  decays = [2 / 11, 3 / 12] + [0.3] * 4
  np.testing.assert_allclose(averages([0.0] * 6, 0.3, start=1.0), np.cumprod(decays), rtol=1e-5)


def test_the_average_of_changing_parameters_weighs_each_by_the_decays_after_it():
  values = [1.0, -2.0, 4.0]
  weights = [9 / 11 * 3 / 12 * 4 / 13, 9 / 12 * 4 / 13, 9 / 13]
  np.testing.assert_allclose(averages(values, 0.9999)[-1], np.dot(weights, values), rtol=1e-6)


def test_without_decay_the_average_is_the_parameters_up_to_rounding():
  ema, params = np.random.default_rng(0).normal(size=(2, 100)).astype(np.float32)
  new = optimizer.update_ema(ema, params, jnp.int32(5), 0.0)
  assert (np.abs(new - params) <= np.spacing(np.abs(ema) + np.abs(params))).all()
