"""Meshes of eight devices: the same training on each, parameters really split, clear words where one does not fit."""

import json
import os
import pathlib
import re
import sys

import jax
import numpy as np
import pytest

from conftest import run_on_eight_devices
from aogpt_jax import build_model
from aogpt_jax import config as config_lib
from aogpt_jax import sharding
from aogpt_jax.training import step as step_lib

STEPS = 3
MESHES = {  # name -> config.mesh and micro-batches; "one" and "one_variant" are a single device
    "one": ({}, 1),
    "data": (dict(data=8), 1),
    "fsdp": (dict(fsdp=8), 1),
    "all": (dict(data=2, fsdp=2, tensor=2), 2),
    "one_variant": ({}, 1),
    "all_variant": (dict(data=2, fsdp=2, tensor=2), 2),
}
# A model of all that a sigma-GPT has and AO-GPT has not, and with a table of targets in each block.
VARIANT = dict(target="layer_distinct", norm="layer", qk_norm=False, tied_head=True)
MISFITS = {  # name -> what differs from `tiny_config`, and what the message must say
    "product": (dict(mesh=dict(data=3)), r"config\.mesh: data=3 x fsdp=1 x tensor=1 .*8 devices"),
    "remainder": (dict(mesh=dict(fsdp=3)), r"config\.mesh: data=-1 x fsdp=3 x tensor=1 .*8 devices"),
    "too_many": (dict(mesh=dict(tensor=16)), r"config\.mesh: data=-1 x fsdp=1 x tensor=16 .*8 devices"),
    "batch": (dict(batch_size=12), r"config\.batch_size.*: 12 sequences.* 8 devices.*multiple of 8"),
    "micro_batch": (dict(micro_batches=4), r"config\.batch_size / micro_batches: 4 sequences.* 8 devices.* of 8"),
    "eval_batch": (dict(eval=dict(batch_size=20)), r"config\.eval\.batch_size: 20 sequences.* 8 devices.* of 8"),
    "heads": (dict(mesh=dict(tensor=4)), r"config\.mesh\.tensor: 4 does not divide config\.model\.heads = 2; of 8 devices it can be 1, 2, "),
    "vocab": (dict(mesh=dict(tensor=2), model=dict(vocab_size=31)), r"config\.mesh\.tensor: 2 does not divide config\.model\.vocab_size = 31; .* 1, "),
    "width": (dict(mesh=dict(fsdp=8), model=dict(width=12)), r"config\.mesh\.fsdp: 8 does not divide config\.model\.width = 12; .* 1, 2, 4, "),
    "preset": (dict(mesh=dict(preset="tp")), r"config\.mesh\.tensor: 8 does not divide config\.model\.heads = 2; "),
    "preset_ways": (dict(mesh=dict(preset="fsdp_tp", tensor=3)), r"config\.mesh: preset=fsdp_tp with tensor=3 .* 8 devices"),
    "rows": (dict(mesh=dict(tensor=2), sharding_rules=(("position", "tensor"),)),
             r"config\.mesh\.tensor: 2 does not divide the 1 rows of parameter start/embedding"),
    "logical_axis": (dict(sharding_rules=(("embd", "fsdp"),)), r"config\.sharding_rules: .*'embd'.*embed"),
    "mesh_axis": (dict(sharding_rules=(("embed", "fdsp"),)), r"config\.sharding_rules: .*'fdsp'.*data, fsdp, tensor"),
}


def tiny_config(**changes):
  config = config_lib.default_config()
  config.batch_size = 16
  config.orders = "mix(0.5)"
  config.eval.batch_size = 16
  config.model.update(layers=2, width=16, heads=2, block_size=6, vocab_size=32, cond_width=8, dtype="float32")
  config.optimizer.update(learning_rate=1e-2, warmup_steps=2, decay_steps=100)
  config.update(changes)
  return config


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
  """What a process with eight devices finds: arrays and texts; see `main`."""
  path = tmp_path_factory.mktemp("sharding")
  run_on_eight_devices(__file__, path)
  with np.load(path / "arrays.npz") as f:
    return dict(f), json.loads((path / "texts.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("mesh", [name for name in MESHES if not name.startswith("one")])
def test_training_on_a_mesh_equals_training_on_one_device(elsewhere, mesh):
  arrays, _ = elsewhere
  one = "one_variant" if mesh.endswith("variant") else "one"
  np.testing.assert_allclose(arrays[f"{mesh}/loss"], arrays[f"{one}/loss"], rtol=1e-5)
  np.testing.assert_allclose(arrays[f"{mesh}/grad_norm"], arrays[f"{one}/grad_norm"], rtol=1e-4)
  for kind in ("params", "ema"):
    # Adam divides by the root of the second moment: where a gradient is near 0, rounding moves a value by more.
    difference = np.abs(arrays[f"{mesh}/{kind}"] - arrays[f"{one}/{kind}"])
    assert difference.max() < 1e-4 and np.median(difference) < 1e-7


def test_the_steps_compared_have_moved_the_parameters(elsewhere):
  arrays, _ = elsewhere
  assert np.median(np.abs(arrays["one/params"] - arrays["initial/one"])) > 1e-3


def test_initial_parameters_do_not_depend_on_the_mesh(elsewhere):
  arrays, _ = elsewhere
  np.testing.assert_array_equal(arrays["initial/all"], arrays["initial/one"])


# Whole shapes: tokens [32, 16], head [16, 32], qkv [2, 16, 3, 2, 8], mlp/fc [2, 16, 64], mlp/out [2, 64, 16].
@pytest.mark.parametrize("mesh, shards", [
    ("data", {"tokens/embedding": [32, 16], "head/kernel": [16, 32], "blocks/attention/qkv/kernel": [2, 16, 3, 2, 8],
              "blocks/mlp/fc/kernel": [2, 16, 64], "blocks/mlp/out/kernel": [2, 64, 16]}),
    ("fsdp", {"tokens/embedding": [32, 2], "head/kernel": [2, 32], "blocks/attention/qkv/kernel": [2, 2, 3, 2, 8],
              "blocks/mlp/fc/kernel": [2, 2, 64], "blocks/mlp/out/kernel": [2, 64, 2]}),
    ("all", {"tokens/embedding": [16, 8], "head/kernel": [8, 16], "blocks/attention/qkv/kernel": [2, 8, 3, 1, 8],
             "blocks/mlp/fc/kernel": [2, 8, 32], "blocks/mlp/out/kernel": [2, 32, 8]}),
    # Tables of targets [2, 6, 16], norms [2, 16].
    ("all_variant", {"tokens/embedding": [16, 8], "blocks/targets/embedding": [2, 6, 8], "blocks/norm1/bias": [2, 8],
                     "final_norm/bias": [8]}),
])
@pytest.mark.parametrize("kind", ["params", "ema", "mu", "nu"])
def test_each_device_holds_its_part_of_the_state(elsewhere, mesh, shards, kind):
  _, texts = elsewhere
  assert {name: texts[f"{mesh}/{kind}"][name] for name in shards} == shards


@pytest.mark.parametrize("mesh", ["data", "fsdp"])
def test_devices_exchange_parameters_and_never_the_activations_of_a_batch(elsewhere, mesh):
  _, texts = elsewhere
  shapes = texts[f"{mesh}/communicated"]
  assert [32, 16] in shapes  # the token table or its gradient
  # [B, T, ...] of the whole batch: the residual stream, queries, keys and values, the MLP, the logits.
  assert not [shape for shape in shapes if shape[:2] == [16, 6] and np.prod(shape[2:]) > 1]


@pytest.mark.parametrize("name", MISFITS)
def test_a_mesh_that_does_not_fit_is_refused_in_one_line_with_the_numbers(elsewhere, name):
  _, texts = elsewhere
  message = texts[f"misfit/{name}"]
  assert re.match(MISFITS[name][1], message) and "\n" not in message, message


def flat(tree):
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def one_device():
  return jax.make_mesh((1, 1, 1), sharding.MESH_AXES, devices=jax.devices()[:1],
                       axis_types=(jax.sharding.AxisType.Auto,) * 3)


def shard_shapes(tree):
  return {jax.tree_util.keystr(path, simple=True, separator="/"): list(x.addressable_shards[0].data.shape)
          for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def communicated(hlo):
  """Shapes of all that an HLO module sends between devices."""
  collectives = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
  lines = re.findall(rf"= (.*?) (?:{collectives})(?:-start)?\(", hlo)
  return [json.loads(f"[{dims}]") for line in lines for dims in re.findall(r"[a-z]\w*\[([\d,]*)\]", line)]


def refusal(changes):
  config = tiny_config(**changes)
  try:
    mesh = sharding.make_mesh(config)
    sharding.check_batch("eval.batch_size", config.eval.batch_size, mesh)
    step_lib.make_trainer(config, build_model(config), mesh)
  except ValueError as e:
    return str(e)
  return "nothing was refused"


def main(directory):
  """Run in a process of its own, where there are eight devices."""
  texts = {f"misfit/{name}": refusal(changes) for name, (changes, _) in MISFITS.items()}
  arrays = {}
  tokens = np.random.default_rng(0).integers(0, 32, size=(STEPS, 16, 6)).astype(np.int32)
  initial = None
  for name, (axes, micro_batches) in MESHES.items():
    config = tiny_config(mesh=axes, micro_batches=micro_batches, model=VARIANT if name.endswith("variant") else {})
    mesh = sharding.make_mesh(config) if axes else one_device()
    trainer = step_lib.make_trainer(config, build_model(config), mesh)
    if name in ("one", "all", "one_variant"):  # the others start from the state of the first before them
      state = trainer.init()
      initial = jax.device_get(state) if name.startswith("one") else initial
      arrays[f"initial/{name}"] = flat(state.params)
    else:
      state = jax.device_put(initial, jax.tree.map(lambda x: x.sharding, trainer.shapes))
    batches = [jax.device_put(batch, sharding.batch_sharding(mesh)) for batch in tokens]
    step = trainer.step.lower(trainer.shapes, batches[0]).compile()
    texts[f"{name}/communicated"] = communicated(step.as_text())
    metrics = []
    for batch in batches:
      state, m = step(state, batch)
      metrics.append(m)
    for key in ("loss", "grad_norm"):
      arrays[f"{name}/{key}"] = np.array([m[key] for m in metrics])
    adam = state.opt_state[1]
    for kind, tree in dict(params=state.params, ema=state.ema, mu=adam.mu, nu=adam.nu).items():
      arrays[f"{name}/{kind}"] = flat(tree)
      texts[f"{name}/{kind}"] = shard_shapes(tree)
  np.savez(os.path.join(directory, "arrays.npz"), **arrays)
  pathlib.Path(directory, "texts.json").write_text(json.dumps(texts), encoding="utf-8")


if __name__ == "__main__":
  main(sys.argv[1])
