"""The decoder: its size, what each entry depends on, its two ways to run, its initialisation."""

import functools
import itertools
import math

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import golden_weights
from aogpt_jax import build_model
from aogpt_jax import config as config_lib
from aogpt_jax import objectives
from aogpt_jax import sharding
from aogpt_jax.models import layers
from aogpt_jax.training import step as step_lib

# Compiling is most of the time of these tests; none of them needs fast code.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
BATCH, LENGTH = 2, 6


def tiny_model(**fields):
  config = config_lib.default_config()
  config.model.update(layers=2, width=16, heads=2, block_size=LENGTH, vocab_size=BATCH * LENGTH, cond_width=8,
                      dtype="float32")
  config.model.update(fields)
  return build_model(config)


def boxed_shapes(model):
  return jax.eval_shape(lambda: step_lib.init_params(model, 0))


def random_params(model):
  """Large values everywhere, gates and biases too, so that no dependence is hidden by a zero."""
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape, scale=0.3), x.dtype),
                      nn.unbox(boxed_shapes(model)))


def leaves_by_path(tree):
  return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf
          for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.fixture(scope="module")
def tokens():
  """Every token of the batch is another one, so that its row of the table stands for the token at one place."""
  return jnp.asarray(np.random.default_rng(1).permutation(BATCH * LENGTH).reshape(BATCH, LENGTH), jnp.int32)


@pytest.fixture(scope="module")
def orders():
  return jnp.asarray([[2, 5, 0, 1, 4, 3], [4, 3, 1, 5, 0, 2]], jnp.int32)


TARGETS = ("adaln", "input", "layer_shared", "layer_distinct")
MEDIUM = dict(layers=24, width=1024, heads=16)
SIGMA_GPT = dict(target="input", norm="layer", qk_norm=False, tied_head=True)


@pytest.mark.parametrize("fields, parameters", [
    (dict(), 170_605_952),
    (MEDIUM, 425_804_928),
    (SIGMA_GPT | dict(bias=False), 125_161_728),
    (SIGMA_GPT | dict(bias=False) | MEDIUM, 355_650_560),
    (SIGMA_GPT, 125_263_872),
    (SIGMA_GPT | MEDIUM, 355_921_920),
], ids=["small", "medium", "small_sigma_gpt", "medium_sigma_gpt", "small_sigma_gpt_biases", "medium_sigma_gpt_biases"])
def test_parameter_counts_are_the_papers(fields, parameters):
  config = config_lib.default_config()
  config.model.update(fields)
  shapes = boxed_shapes(build_model(config))
  assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) == parameters


@pytest.fixture(scope="module", params=TARGETS)
def dependence(request, tokens, orders):
  """{table: bool [B, i, row]}, whether the logits of entry i have a gradient with respect to that row of the table.

  Where there is a table of targets in each block: bool [B, i, layer, row].
  """
  model = tiny_model(target=request.param)
  params = random_params(model)
  direction = jnp.asarray(np.random.default_rng(2).normal(size=model.vocab_size), jnp.float32)
  tables = {name: params[name]["embedding"] for name in ("tokens", "positions", "start")}
  distinct = request.param == "layer_distinct"
  tables["targets"] = (params["blocks"] if distinct else params)["targets"]["embedding"]

  def entries(tables):
    changed = {name: {"embedding": table} for name, table in tables.items()}
    if distinct:
      changed["blocks"] = params["blocks"] | {"targets": changed.pop("targets")}
    return model.apply({"params": params | changed}, tokens, orders) @ direction

  return {name: np.asarray((gradient != 0).any(-1)) for name, gradient in jit(jax.jacrev(entries))(tables).items()}


def expected_dependence(rows, num_rows):
  """[B, i, row] from a function (b, i) -> the rows that entry i of example b may and must depend on."""
  return np.array([[np.isin(np.arange(num_rows), list(rows(b, i))) for i in range(LENGTH)] for b in range(BATCH)])


def test_logits_depend_on_each_known_token_of_their_sequence_and_on_no_other(dependence, tokens, orders):
  known = lambda b, i: {int(tokens[b, p]) for p in orders[b, :i]}
  np.testing.assert_array_equal(dependence["tokens"], expected_dependence(known, BATCH * LENGTH))


def test_logits_depend_on_the_positions_of_the_start_and_of_the_known_tokens_and_on_no_other(dependence, orders):
  known = lambda b, i: {0} | {int(p) + 1 for p in orders[b, :i]}
  np.testing.assert_array_equal(dependence["positions"], expected_dependence(known, LENGTH + 1))
  assert dependence["start"].all()


def test_logits_depend_on_the_targets_up_to_their_own_and_on_no_later_one(dependence, orders):
  targets = lambda b, i: {int(p) for p in orders[b, : i + 1]}
  found = dependence["targets"].reshape(BATCH, LENGTH, -1, LENGTH)
  for table in range(found.shape[2]):
    np.testing.assert_array_equal(found[:, :, table], expected_dependence(targets, LENGTH))


@pytest.fixture(scope="module", params=TARGETS)
def logits_of(request, tokens):
  model = tiny_model(target=request.param)
  params, apply = random_params(model), jit(model.apply)
  return lambda orders: apply({"params": params}, tokens, orders)


def test_another_target_after_the_same_known_tokens_gives_other_logits(logits_of, orders):
  swapped = orders.at[:, -2:].set(orders[:, :-3:-1])
  logits, other = logits_of(orders), logits_of(swapped)
  np.testing.assert_array_equal(other[:, :-2], logits[:, :-2])
  assert (jnp.abs(other[:, -2] - logits[:, -2]).max(-1) > 0.1).all()


def test_the_beginning_of_the_orders_gives_the_same_first_logits(logits_of, orders):
  np.testing.assert_allclose(logits_of(orders[:, :4]), logits_of(orders)[:, :4], rtol=1e-5, atol=1e-5)


def test_bfloat16_logits_are_float32_and_near_the_pytorch_code():
  arrays, config = golden_weights.load("aogpt_a")
  config.model.dtype = "bfloat16"
  params = jax.tree.map(jnp.asarray, golden_weights.to_tree(arrays, config))
  tokens, orders = (jnp.asarray(arrays[name], jnp.int32) for name in ("tokens", "orders"))
  logits = jit(build_model(config).apply)({"params": params}, tokens, orders)
  assert logits.dtype == jnp.float32
  expected = arrays["random/logits"][:, :-1]
  # bfloat16 keeps 8 bits: a few roundings of 2**-9 each, in units of the logits' size.
  error = np.sqrt(np.mean((logits - expected) ** 2)) / np.std(expected)
  assert 1e-4 < error < 0.02


@pytest.fixture(scope="module")
def gradients(tokens, orders):
  """(remat, scan_layers) -> the loss and its gradient, by parameter."""

  @functools.cache
  def gradients_of(remat, scan_layers):
    model = tiny_model(remat=remat, scan_layers=scan_layers)
    loss = lambda params: objectives.any_order_nll(model, params, tokens, orders).mean()
    return jit(jax.value_and_grad(loss))(random_params(model))

  return gradients_of


@pytest.mark.parametrize("remat, scan_layers", [("full", True), ("full", False), ("dots", True), ("none", True)])
def test_remat_and_scan_layers_do_not_change_the_gradient(gradients, remat, scan_layers):
  (loss, gradient), (plain_loss, plain) = gradients(remat, scan_layers), gradients("none", False)
  np.testing.assert_allclose(loss, plain_loss, rtol=1e-6)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradient, plain)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_remat_alone_recomputes_blocks_in_the_backward_pass(tokens, orders, remat):
  model = tiny_model(remat=remat)
  loss = lambda params: objectives.any_order_nll(model, params, tokens, orders).mean()
  jaxpr = str(jax.make_jaxpr(jax.grad(loss))(nn.unbox(boxed_shapes(model))))
  assert ("remat" in jaxpr or "checkpoint" in jaxpr) == (remat != "none")


@pytest.mark.parametrize("scan_layers", [False, True])
def test_scan_layers_alone_makes_a_loop_over_the_layers(tokens, orders, scan_layers):
  model = tiny_model(scan_layers=scan_layers)
  text = jax.jit(model.apply).lower({"params": nn.unbox(boxed_shapes(model))}, tokens, orders).as_text()
  assert ("stablehlo.while" in text) == scan_layers


@pytest.mark.parametrize("entries", [1, 4], ids=["one_by_one", "four_at_a_time"])
def test_entries_against_a_cache_give_the_logits_of_the_pytorch_code(entries):
  arrays, config = golden_weights.load("aogpt_a")
  model = build_model(config)
  params = jax.tree.map(jnp.asarray, golden_weights.to_tree(arrays, config))
  orders = arrays["orders"].astype(np.int32)
  batch, length = orders.shape
  known = np.take_along_axis(arrays["tokens"], orders[:, :-1], axis=1)
  held = np.pad(known, ((0, 0), (1, 0))).astype(np.int32)
  slots = np.pad(orders[:, :-1] + 1, ((0, 0), (1, 0)))
  prepared, every = jax.jit(model.prepare)(params), jnp.tile(jnp.arange(entries), (batch, 1))
  extend = jit(functools.partial(model.extend, prepared, asked=every))
  cache, logits = model.init_cache(batch, length), []
  for start in range(0, length, entries):
    part = slice(start, start + entries)
    out, cache = extend(held[:, part], slots[:, part], orders[:, part], cache, jnp.full(batch, start), start + every)
    logits.append(out)
  np.testing.assert_allclose(jnp.concatenate(logits, axis=1), arrays["random/logits"][:, :-1], rtol=0, atol=2e-4)


@pytest.mark.parametrize("tokens_shape, orders_shape, named", [
    ((2, LENGTH + 1), (2, LENGTH + 1), f"{LENGTH + 1} tokens.*block_size = {LENGTH}"),
    ((2, 4), (3, 4), r"orders \(3, 4\).*tokens \(2, 4\)"),
    ((2, 4), (1, 4), r"orders \(1, 4\).*tokens \(2, 4\)"),
    ((2, 4), (2, 5), r"orders \(2, 5\).*tokens \(2, 4\)"),
    ((2, 4), (4,), r"orders \(4,\).*tokens \(2, 4\)"),
    ((4,), (4,), r"tokens \(4,\)"),
    ((2, 4), (2, 4, 1), r"orders \(2, 4, 1\).*tokens \(2, 4\)"),
    ((2, 4), (2, 0), r"orders \(2, 0\).*tokens \(2, 4\)"),
])
def test_shapes_that_do_not_fit_are_named(tokens_shape, orders_shape, named):
  model = tiny_model()
  params = nn.unbox(boxed_shapes(model))
  tokens, orders = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in (tokens_shape, orders_shape))
  with pytest.raises(ValueError, match=named):
    jax.eval_shape(model.apply, {"params": params}, tokens, orders)


def test_every_parameter_names_a_known_logical_axis_for_each_dimension():
  is_boxed = lambda x: isinstance(x, nn.LogicallyPartitioned)
  for target in TARGETS:
    for leaf in jax.tree.leaves(boxed_shapes(tiny_model(target=target, norm="layer")), is_leaf=is_boxed):
      assert is_boxed(leaf)
      assert len(leaf.names) == len(leaf.value.shape)
      assert set(leaf.names) <= set(sharding.LOGICAL_AXES)


@pytest.fixture(scope="module")
def initial():
  model = tiny_model(layers=3, width=128, vocab_size=256, block_size=64, cond_width=64, gate_init=0.5)
  return leaves_by_path(nn.unbox(jit(lambda: step_lib.init_params(model, 0))()))


def test_kernels_and_embeddings_start_truncated_normal(initial):
  density_at_3 = math.exp(-4.5) / math.sqrt(2 * math.pi)
  shrink = math.sqrt(1 - 6 * density_at_3 / math.erf(3 / math.sqrt(2)))  # by which the cut lowers the deviation
  names = [name for name in initial if name.endswith(("kernel", "embedding"))]
  assert len(names) == 11
  for name in names:
    x = np.asarray(initial[name], np.float64)
    # Of 3 layers: 0.02 / sqrt(2 * 3) for the two projections back to the residual stream.
    scale = 0.02 / math.sqrt(6) if name in ("blocks/attention/out/kernel", "blocks/mlp/out/kernel") else 0.02
    # Four standard errors; those of a normal, which are larger.
    assert abs(x.mean()) < 4 * scale / math.sqrt(x.size), name
    assert abs(x.std() / (scale * shrink) - 1) < 4 / math.sqrt(2 * x.size), name
    assert np.abs(x).max() <= 3 * scale * (1 + 1e-6), name
    if x.size > 10_000:
      assert np.abs(x).max() > 2.8 * scale, name


@pytest.fixture(scope="module")
def initial_of_sigma_gpt():
  model = tiny_model(**SIGMA_GPT | dict(layers=3, width=128, vocab_size=256, block_size=64, weight_init="normal"))
  return leaves_by_path(nn.unbox(jit(lambda: step_lib.init_params(model, 0))()))


def test_kernels_and_embeddings_of_sigma_gpt_start_normal_and_are_not_cut(initial_of_sigma_gpt):
  names = [name for name in initial_of_sigma_gpt if name.endswith(("kernel", "embedding"))]
  assert len(names) == 8
  for name in names:
    x = np.asarray(initial_of_sigma_gpt[name], np.float64)
    scale = 0.02 / math.sqrt(6) if name in ("blocks/attention/out/kernel", "blocks/mlp/out/kernel") else 0.02
    assert abs(x.mean()) < 4 * scale / math.sqrt(x.size), name
    assert abs(x.std() / scale - 1) < 4 / math.sqrt(2 * x.size), name
    if x.size > 10_000:  # where 27 values are expected beyond the cut
      assert np.abs(x).max() > 3 * scale, name


def test_layer_norms_of_sigma_gpt_start_at_scale_1_and_bias_0(initial_of_sigma_gpt):
  for norm in ("blocks/norm1", "blocks/norm2", "final_norm"):
    np.testing.assert_array_equal(initial_of_sigma_gpt[f"{norm}/scale"], 1)
    np.testing.assert_array_equal(initial_of_sigma_gpt[f"{norm}/bias"], 0)


def test_a_layer_norm_takes_mean_and_deviation_out_and_puts_its_own_in():
  x = jnp.asarray(np.random.default_rng(3).normal(5.0, 3.0, size=(4, 64)), jnp.float32)
  norm = layers.LayerNorm("embed", jnp.float32, jnp.float32)
  y = norm.apply({"params": {"scale": jnp.full(64, 2.0), "bias": jnp.full(64, -1.0)}}, x)
  np.testing.assert_allclose(y.mean(axis=1), -1.0, atol=1e-5)
  np.testing.assert_allclose(y.std(axis=1), 2.0, rtol=1e-5)
  np.testing.assert_allclose(np.corrcoef(x[0], y[0])[0, 1], 1.0, rtol=1e-5)


def test_norm_scales_start_at_1(initial):
  names = [name for name in initial if name.endswith("scale")]
  assert len(names) == 5
  for name in names:
    np.testing.assert_array_equal(initial[name], 1, err_msg=name)


def test_biases_start_at_0_and_those_of_the_gates_alone_at_gate_init(initial):
  names = [name for name in initial if name.endswith("bias")]
  assert len(names) == 7
  for name in names:
    expected = np.zeros(initial[name].shape)
    if name == "blocks/modulation/dense/bias":  # [L, part, D]: shift, scale and gate of one branch, then of the other
      expected[:, [2, 5]] = 0.5
    np.testing.assert_array_equal(initial[name], expected, err_msg=name)


@pytest.mark.parametrize("target", ["input", "layer_distinct"])
def test_tables_of_targets_that_are_added_may_be_sinusoids_of_the_size_of_positions(target):
  model = tiny_model(target=target, position_init="sinusoid", width=8, block_size=9)
  params = nn.unbox(jit(lambda: step_lib.init_params(model, 0))())
  tables = params["blocks"]["targets"]["embedding"] if target == "layer_distinct" else params["targets"]["embedding"][None]
  for table in tables:
    np.testing.assert_allclose(table[4, 0], 0.06 * math.sqrt(2) * math.sin(4), atol=1e-6)


def test_sinusoid_tables_are_sines_and_cosines_of_the_position():
  model = tiny_model(position_init="sinusoid", width=8, cond_width=4, block_size=9)
  params = nn.unbox(step_lib.init_params(model, 0))
  for name, rows, width, rms in (("positions", 10, 8, 0.06), ("targets", 9, 4, 1.0)):
    table = np.asarray(params[name]["embedding"]) / (rms * math.sqrt(2))
    wavelengths = np.geomspace(2 * math.pi, 2 * rows, width // 2)
    for column, wavelength in enumerate(wavelengths):
      angles = 2 * math.pi * np.arange(rows) / wavelength
      np.testing.assert_allclose(table[:, column], np.sin(angles), atol=1e-5)
      np.testing.assert_allclose(table[:, column + width // 2], np.cos(angles), atol=1e-5)


def test_layers_start_different_from_each_other(initial):
  kernel = initial["blocks/mlp/fc/kernel"]
  for one, other in itertools.combinations(kernel, 2):
    assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 4 / math.sqrt(one.size)


def test_where_the_token_is_its_position_every_order_reaches_near_zero_loss():
  model = tiny_model(layers=1, block_size=4, vocab_size=4, gate_init=1.0)
  orders = jnp.asarray(list(itertools.permutations(range(4))), jnp.int32)
  tokens = jnp.tile(jnp.arange(4), (len(orders), 1))
  loss = lambda params: objectives.any_order_nll(model, params, tokens, orders)
  adam = optax.adam(1e-2)

  def update(carry, _):
    params, state = carry
    updates, state = adam.update(jax.grad(lambda p: loss(p).mean())(params), state)
    return (optax.apply_updates(params, updates), state), None

  @jit
  def train(params):
    (params, _), _ = jax.lax.scan(update, (params, adam.init(params)), None, length=150)
    return loss(params)

  assert train(random_params(model)).max() < 0.02
