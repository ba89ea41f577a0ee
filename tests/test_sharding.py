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
from aogpt_jax.evaluation import likelihood
from aogpt_jax.training import checkpoints
from aogpt_jax.training import checksums
from aogpt_jax.training import step as step_lib

STEPS = 10
# Name -> devices, config.mesh and what else differs: rematerialisation, micro-batches, and in all but "one" the head in parts.
MESHES = {
    "one": (1, {}, {}),
    "fsdp2": (2, dict(preset="fsdp"), dict(model=dict(remat="dots"))),
    "fsdp_tp4": (4, dict(preset="fsdp_tp"), dict(micro_batches=2)),
    **{f"{preset}8": (8, dict(preset=preset), {}) for preset in config_lib.MESH_PRESETS},
    "one_variant": (1, {}, {}),
    "all_variant": (8, dict(data=2, fsdp=2, tensor=2), dict(micro_batches=2)),
}
# A model of all that a sigma-GPT has and AO-GPT has not, and with a table of targets in each block.
VARIANT = dict(gate_init=0.0, target="layer_distinct", norm="layer", qk_norm=False, tied_head=True)
MISFITS = {  # name -> what differs from `tiny_config`, and what the message must say
    "product": (dict(mesh=dict(data=3)), r"config\.mesh: data=3 x fsdp=1 x tensor=1 .*8 devices"),
    "remainder": (dict(mesh=dict(fsdp=3)), r"config\.mesh: data=-1 x fsdp=3 x tensor=1 .*8 devices"),
    "too_many": (dict(mesh=dict(tensor=16)), r"config\.mesh: data=-1 x fsdp=1 x tensor=16 .*8 devices"),
    "batch": (dict(batch_size=12), r"config\.batch_size.*: 12 sequences.* 8 devices.*multiple of 8"),
    "micro_batch": (dict(micro_batches=4), r"config\.batch_size / micro_batches: 4 sequences.* 8 devices.* of 8"),
    "eval_batch": (dict(eval=dict(batch_size=20)), r"config\.eval\.batch_size: 20 sequences.* 8 devices.* of 8"),
    "heads": (dict(mesh=dict(tensor=8), model=dict(heads=4)), r"config\.mesh\.tensor: 8 does not divide config\.model\.heads = 4; of 8 devices it can be 1, 2, 4; "),
    "vocab": (dict(mesh=dict(tensor=2), model=dict(vocab_size=31)), r"config\.mesh\.tensor: 2 does not divide config\.model\.vocab_size = 31; .* 1; "),
    "width": (dict(mesh=dict(fsdp=8), model=dict(width=12)), r"config\.mesh\.fsdp: 8 does not divide config\.model\.width = 12; .* 1, 2, 4; "),
    "preset": (dict(mesh=dict(preset="tp"), model=dict(heads=2)), r"config\.mesh\.tensor: 8 does not divide config\.model\.heads = 2; "),
    "preset_ways": (dict(mesh=dict(preset="fsdp_tp", tensor=3)), r"config\.mesh: preset=fsdp_tp with tensor=3 .* 8 devices"),
    "rows": (dict(mesh=dict(tensor=2), sharding_rules=(("position", "tensor"),)),
             r"config\.mesh\.tensor: 2 does not divide the 7 rows of parameter positions/embedding"),
    "logical_axis": (dict(sharding_rules=(("embd", "fsdp"),)), r"config\.sharding_rules: .*'embd'.*embed"),
    "mesh_axis": (dict(sharding_rules=(("embed", "fdsp"),)), r"config\.sharding_rules: .*'fdsp'.*data, fsdp, tensor"),
}


def tiny_config(**changes):
  config = config_lib.default_config()
  config.batch_size = 16
  config.orders = "mix(0.5)"
  config.eval.batch_size = 16
  config.model.update(layers=2, width=16, heads=8, block_size=6, vocab_size=32, cond_width=12, gate_init=1.0, dtype="float32")
  config.optimizer.update(learning_rate=2e-3, warmup_steps=2, decay_steps=100)
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
  arrays, texts = elsewhere
  one = "one_variant" if mesh.endswith("variant") else "one"
  np.testing.assert_allclose(arrays[f"{mesh}/loss"], arrays[f"{one}/loss"], rtol=1e-5)
  np.testing.assert_allclose(arrays[f"{mesh}/grad_norm"], arrays[f"{one}/grad_norm"], rtol=1e-4)
  # Adam divides by the root of the second moment: where a gradient is near 0, rounding moves a value by more.
  assert len(texts[f"{mesh}/distances"]) > 20 and max(texts[f"{mesh}/distances"].values()) < 1e-3


@pytest.mark.parametrize("preset", config_lib.MESH_PRESETS)
def test_evaluation_on_a_mesh_equals_that_on_one_device(elsewhere, preset):
  arrays, _ = elsewhere
  np.testing.assert_allclose(arrays[f"{preset}8/nats"], arrays["one/nats"], rtol=1e-5)


@pytest.mark.parametrize("mesh", ["one", "data=2 x fsdp=4"])
def test_a_checkpoint_of_eight_devices_has_the_same_logits_on_others(elsewhere, mesh):
  arrays, _ = elsewhere
  assert np.std(arrays["saved/logits"]) > 0.01
  np.testing.assert_allclose(arrays[f"restored/{mesh}/logits"], arrays["saved/logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("preset, sizes", [("dp", (8, 1, 1)), ("fsdp", (1, 8, 1)), ("tp", (1, 1, 8)), ("fsdp_tp", (1, 4, 2))])
def test_a_preset_makes_a_mesh_of_any_number_of_devices(elsewhere, preset, sizes):
  _, texts = elsewhere
  assert tuple(texts[f"{preset}8/mesh"]) == sizes
  assert sharding.make_mesh(tiny_config(mesh=dict(preset=preset)), jax.devices()[:1]).devices.shape == (1, 1, 1)


@pytest.mark.parametrize("preset", config_lib.MESH_PRESETS)
def test_checksums_do_not_depend_on_the_mesh(elsewhere, preset):
  _, texts = elsewhere
  parts, whole = texts[f"{preset}8/checksums"]
  assert len(set(parts.values())) == 3 and parts == whole


def test_the_steps_compared_have_moved_the_parameters(elsewhere):
  arrays, _ = elsewhere
  assert np.median(np.abs(arrays["one/params"] - arrays["initial/one"])) > 1e-3


def test_initial_parameters_do_not_depend_on_the_mesh(elsewhere):
  arrays, _ = elsewhere
  np.testing.assert_array_equal(arrays["initial/fsdp_tp8"], arrays["initial/one"])


# Whole shapes: tokens [32, 16], head [16, 32], qkv [2, 16, 3, 8, 2], mlp/fc [2, 16, 64], mlp/out [2, 64, 16].
@pytest.mark.parametrize("mesh, shards", [
    ("dp8", {"tokens/embedding": [32, 16], "head/kernel": [16, 32], "blocks/attention/qkv/kernel": [2, 16, 3, 8, 2],
             "blocks/mlp/fc/kernel": [2, 16, 64], "blocks/mlp/out/kernel": [2, 64, 16]}),
    ("fsdp8", {"tokens/embedding": [32, 2], "head/kernel": [2, 32], "blocks/attention/qkv/kernel": [2, 2, 3, 8, 2],
               "blocks/mlp/fc/kernel": [2, 2, 64], "blocks/mlp/out/kernel": [2, 64, 2]}),
    ("fsdp_tp8", {"tokens/embedding": [16, 4], "head/kernel": [4, 16], "blocks/attention/qkv/kernel": [2, 4, 3, 4, 2],
                  "blocks/mlp/fc/kernel": [2, 4, 32], "blocks/mlp/out/kernel": [2, 32, 4]}),
    # Tables of targets [2, 6, 16], norms [2, 16].
    ("all_variant", {"tokens/embedding": [16, 8], "blocks/targets/embedding": [2, 6, 8], "blocks/norm1/bias": [2, 8],
                     "final_norm/bias": [8]}),
])
@pytest.mark.parametrize("kind", ["params", "ema", "mu", "nu"])
def test_each_device_holds_its_part_of_the_state(elsewhere, mesh, shards, kind):
  _, texts = elsewhere
  assert {name: texts[f"{mesh}/{kind}"][name] for name in shards} == shards


@pytest.mark.parametrize("what", ["dp8", "fsdp8", "fsdp2", "fsdp8/evaluation"])
def test_devices_exchange_parameters_and_gradients_and_never_what_depends_on_the_batch(elsewhere, what):
  _, texts = elsewhere
  sent = texts[f"{what}/communicated"]
  assert {kind for kind, _ in sent} <= {"all-gather", "all-reduce", "reduce-scatter", "collective-permute"}
  assert ["all-reduce" if what.startswith("dp") else "all-gather", [32, 16]] in sent  # the token table or its gradient
  whole, parts = texts["one/params"], texts[f"{what.split('/')[0]}/params"]
  parameters = [shape[1:] if path.startswith("blocks/") else shape for of in (whole, parts) for path, shape in of.items()]
  tables = [(6, 16)]  # what each target tells, of which the modulation makes rows
  # Of a batch, its results alone: losses, and in evaluation the sums of its 16 sequences in 3 orders.
  results = [(), *([(16,), (3, 16)] if what.endswith("evaluation") else [])]

  def key(shape):
    """Without the axis of a single layer; the gradient of qkv comes in another order of its axes."""
    shape = shape[1:] if len(shape) > 1 and shape[0] == 1 else shape
    return tuple(sorted(shape) if len(shape) > 2 else shape)

  assert {key(shape) for _, shape in sent} <= {*map(key, [*parameters, *tables, *results])}


def test_matmuls_on_a_mesh_have_bfloat16_operands_but_those_of_plain_attention(elsewhere):
  _, texts = elsewhere
  dots = texts["fsdp8/dots"]
  scores = [16, 8, 6, 6]  # [B, H, S, S], whose gradient is in float32
  assert len(dots) > 20
  assert not [dot for dot in dots if scores not in [shape for shape, _ in dot] and {dtype for _, dtype in dot} != {"bf16"}]


@pytest.mark.parametrize("name", MISFITS)
def test_a_mesh_that_does_not_fit_is_refused_in_one_line_with_the_numbers(elsewhere, name):
  _, texts = elsewhere
  message = texts[f"misfit/{name}"]
  assert re.match(MISFITS[name][1], message) and "\n" not in message, message


def flat(tree):
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def by_path(tree):
  return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def shard_shapes(tree):
  return {path: list(x.addressable_shards[0].data.shape) for path, x in by_path(tree).items()}


def distances(ours, theirs):
  """The largest difference of each tensor in its root mean square."""
  ours, theirs = by_path(jax.device_get(ours)), by_path(jax.device_get(theirs))
  return {path: float(np.abs(ours[path] - x).max() / np.sqrt(np.mean(np.square(x)))) for path, x in theirs.items()}


def communicated(hlo):
  """(kind, shape) of all that an HLO module sends between devices."""
  kinds = "all-reduce|all-gather|all-to-all|ragged-all-to-all|reduce-scatter|collective-permute|collective-broadcast"
  found = re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", hlo)
  return [(kind, json.loads(f"[{dims}]")) for line, kind in found for dims in re.findall(r"[a-z]\w*\[([\d,]*)\]", line)]


def operands(stablehlo):
  """((shape, dtype), (shape, dtype)) of the operands of all matmuls."""
  lines = [line.split(" : ")[-1] for line in stablehlo.splitlines() if "stablehlo.dot_general" in line]
  found = [re.findall(r"tensor<((?:\d+x)*)(\w+)>", line)[:2] for line in lines]
  return [[([int(n) for n in dims.split("x") if n], dtype) for dims, dtype in pair] for pair in found]


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
  arrays, states, initial = {}, {}, None
  tokens = np.random.default_rng(0).integers(0, 32, size=(STEPS, 16, 6)).astype(np.int32)
  for name, (devices, axes, changes) in MESHES.items():
    config = tiny_config(mesh=axes, **changes)
    config.model.update(VARIANT if name.endswith("variant") else {}, head_chunk=0 if name == "one" else 4)
    model, mesh = build_model(config), sharding.make_mesh(config, jax.devices()[:devices])
    trainer = step_lib.make_trainer(config, model, mesh)
    one = "one_variant" if name.endswith("variant") else "one"
    if name in ("one", "fsdp_tp8", "one_variant"):  # the others start from the state of the first before them
      state = trainer.init()
      initial = jax.device_get(state) if name == one else initial
      arrays[f"initial/{name}"] = flat(state.params)
    else:
      state = jax.device_put(initial, jax.tree.map(lambda x: x.sharding, trainer.shapes))
    batches = [jax.device_put(batch, sharding.batch_sharding(mesh)) for batch in tokens]
    step = trainer.step.lower(trainer.shapes, batches[0]).compile()
    texts[f"{name}/communicated"], texts[f"{name}/mesh"] = communicated(step.as_text()), mesh.devices.shape
    metrics = []
    for batch in batches:
      state, m = step(state, batch)
      metrics.append(m)
    for key in ("loss", "grad_norm"):
      arrays[f"{name}/{key}"] = np.array([m[key] for m in metrics])
    adam = state.opt_state[1]
    for kind, tree in dict(params=state.params, ema=state.ema, mu=adam.mu, nu=adam.nu).items():
      texts[f"{name}/{kind}"] = shard_shapes(tree)
    arrays[f"{name}/params"] = flat(state.params)
    states[name] = jax.device_get((state.params, state.ema))
    if name in [f"{preset}8" for preset in config_lib.MESH_PRESETS]:
      params = state.params
      some = {"fc": params["blocks"]["mlp"]["fc"]["kernel"], "tokens": params["tokens"]["embedding"], "step": state.step}
      checksums._SMALL = -1  # on the devices, as if they were large
      texts[f"{name}/checksums"] = [checksums.compute(some)]
      checksums._SMALL = 1 << 20
      texts[f"{name}/checksums"].append(checksums.compute(jax.device_get(some)))
    texts[f"{name}/distances"] = {f"{i}/{path}": x for i, (a, b) in enumerate(zip(states[name], states[one]))
                                  for path, x in distances(a, b).items()}
    if name == "one" or name in [f"{preset}8" for preset in config_lib.MESH_PRESETS]:
      arrays[f"{name}/nats"] = evaluate(model, state.ema, mesh, tokens[0])
    if name == "fsdp8":
      restored_logits(config, model, state, mesh, tokens[0], directory, arrays)
      score = likelihood._score.lower(model, mesh, PLAN, 0, 0, state.ema, *on_mesh(mesh, tokens[0])).compile()
      texts["fsdp8/evaluation/communicated"] = communicated(score.as_text())
      config.model.dtype = "bfloat16"
      trainer = step_lib.make_trainer(config, build_model(config), mesh)
      texts["fsdp8/dots"] = operands(trainer.step.lower(trainer.shapes, batches[0]).as_text())
  np.savez(os.path.join(directory, "arrays.npz"), **arrays)
  pathlib.Path(directory, "texts.json").write_text(json.dumps(texts), encoding="utf-8")


PLAN = (("left_to_right", 1), ("uniform", 2))


def on_mesh(mesh, tokens):
  """The arrays that evaluation runs on."""
  rows, everywhere = sharding.batch_sharding(mesh), sharding.replicated(mesh)
  return (jax.device_put(tokens, rows), jax.device_put(np.full(16, 6, np.int32), rows), jax.device_put(np.int32(0), everywhere),
          jax.device_put(np.ones(32, np.int32), everywhere))


def evaluate(model, params, mesh, tokens):
  batches = [(tokens, np.full(16, 6, np.int32))]
  found = likelihood.evaluate(model, params, batches, mesh=mesh, token_bytes=np.ones(32, np.int32), repeats=dict(PLAN))
  return np.array([found[spec].nats_per_token for spec, _ in PLAN])


def restored_logits(config, model, state, mesh, tokens, directory, arrays):
  """Of a state as it is and as it is loaded from its checkpoint, on one device and on another mesh."""
  orders = np.tile(np.arange(6)[::-1], (16, 1))
  saver = checkpoints.Checkpoints(directory, config)
  saver.save(state)
  saver.wait()
  saver.close()
  arrays["saved/logits"] = jax.jit(model.apply)({"params": state.ema}, tokens, orders)
  config = tiny_config(mesh=dict(data=2, fsdp=4))
  for name, where in (("one", None), ("data=2 x fsdp=4", sharding.make_mesh(config))):
    loaded, params = checkpoints.load_model(directory, where)
    arrays[f"restored/{name}/logits"] = jax.jit(loaded.apply)({"params": params}, tokens, orders)


if __name__ == "__main__":
  main(sys.argv[1])
