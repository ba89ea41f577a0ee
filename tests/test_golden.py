"""The numbers of the PyTorch code, to the last digit that float32 allows. A difference here is a different model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import golden_weights
from aogpt_jax import build_model
from aogpt_jax import objectives
from aogpt_jax import sharding
from aogpt_jax.training import step as step_lib

LOGITS_ATOL, NLL_ATOL = 2e-4, 1e-4


@pytest.fixture(scope="module", params=golden_weights.NAMES)
def golden(request):
  arrays, config = golden_weights.load(request.param)
  return arrays, config, build_model(config), jax.tree.map(jnp.asarray, golden_weights.to_tree(arrays, config))


@pytest.mark.parametrize("scan_layers", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("case", ["random", "ar", "short"])
def test_logits_and_nll_equal_the_pytorch_code(golden, case, scan_layers):
  arrays, _, model, params = golden
  model = model.clone(scan_layers=scan_layers)
  tokens = arrays["tokens"]
  orders = {"random": arrays["orders"], "short": arrays["short/orders"],
            "ar": np.tile(np.arange(tokens.shape[1]), (len(tokens), 1))}[case]
  tokens = jnp.asarray(tokens[:, : orders.shape[1]], jnp.int32)
  orders = jnp.asarray(orders, jnp.int32)
  logits = jax.jit(model.apply)({"params": params}, tokens, orders)
  np.testing.assert_allclose(logits, arrays[f"{case}/logits"][:, :-1], rtol=0, atol=LOGITS_ATOL)
  nll = jax.jit(objectives.any_order_nll, static_argnums=0)(model, params, tokens, orders)
  np.testing.assert_allclose(nll, arrays[f"{case}/nll"], rtol=0, atol=NLL_ATOL)


@pytest.mark.parametrize("micro_batches", [1, "rows"])
def test_six_training_steps_equal_the_pytorch_code(golden, micro_batches, monkeypatch):
  arrays, config, model, params = golden
  config = config.copy_and_resolve_references()
  config.micro_batches = len(arrays["tokens"]) if micro_batches == "rows" else 1
  config.orders = "golden"
  given = objectives.Objective(lambda *_: jnp.asarray(arrays["orders"], jnp.int32), objectives.any_order_nll)
  monkeypatch.setitem(objectives.OBJECTIVES, "any_order", given)
  mesh = sharding.make_mesh(config) if jax.device_count() == 1 else None
  lr = jnp.asarray(arrays["train/lr"], jnp.float32)
  trainer = step_lib.make_trainer(config, model, mesh, schedule=lambda n: lr[n])
  state = trainer.init().replace(params=jax.tree.map(jnp.copy, params), ema=jax.tree.map(jnp.copy, params))
  state = jax.device_put(state, jax.tree.map(lambda x: x.sharding, trainer.shapes))
  for i in range(6):
    state, metrics = trainer.step(state, jnp.asarray(arrays["tokens"], jnp.int32))
    np.testing.assert_allclose(metrics["loss"], arrays["train/loss"][i], rtol=1e-4)
    np.testing.assert_allclose(metrics["grad_norm"], arrays["train/grad_norm"][i], rtol=1e-4)
  for ours, prefix in ((state.params, "train/params/"), (state.ema, "train/ema/")):
    theirs = golden_weights.to_tree(arrays, config, prefix)

    def check(path, a, b):
      np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max(), err_msg=jax.tree_util.keystr(path))

    # Layers are compared one by one: the tolerance is relative to a tensor's own largest value.
    jax.tree_util.tree_map_with_path(check, _per_layer(ours), _per_layer(theirs))
  assert state.step == 6


@pytest.mark.parametrize("scan_layers", [False, True], ids=["unrolled", "scanned"])
def test_logits_and_nll_of_sigma_gpt_equal_the_pytorch_code(scan_layers):
  arrays, config = golden_weights.load(golden_weights.SIGMA_GPT)
  config.model.scan_layers = scan_layers
  model, params = build_model(config), jax.tree.map(jnp.asarray, golden_weights.to_tree(arrays, config))
  tokens, orders = (jnp.asarray(arrays[name], jnp.int32) for name in ("tokens", "orders"))
  logits = jax.jit(model.apply)({"params": params}, tokens, orders)
  np.testing.assert_allclose(logits, arrays["random/logits"][:, :-1], rtol=0, atol=LOGITS_ATOL)
  nll = jax.jit(objectives.any_order_nll, static_argnums=0)(model, params, tokens, orders)
  np.testing.assert_allclose(nll, arrays["random/nll"], rtol=0, atol=NLL_ATOL)


def _per_layer(params):
  blocks = params["blocks"]
  layers = len(jax.tree.leaves(blocks)[0])
  return params | {"blocks": [jax.tree.map(lambda p: p[i], blocks) for i in range(layers)]}
