"""Sampling on meshes of eight devices: what a single one draws, without a word between the devices of a data mesh."""

import collections
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
from aogpt_jax.sampling import adaptive
from aogpt_jax.sampling import burst
from aogpt_jax.sampling import decode
from aogpt_jax.sampling import filters
from aogpt_jax.sampling import plan
from aogpt_jax.sampling import speculative
from aogpt_jax.training import step as step_lib
from flax import linen as nn

MESHES = {"data": dict(data=8), "tensor": dict(data=4, tensor=2), "fsdp": dict(fsdp=8), "all": dict(data=2, fsdp=2, tensor=2)}
BATCHES = (1, 5, 8, 13)
SAMPLERS = {"speculative": (speculative, dict(window=2)), "burst": (burst, dict(checks=2)), "adaptive": (adaptive, {})}
LENGTH = 16
COLLECTIVES = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast"


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
  """What a process with eight devices finds: arrays and texts; see `main`."""
  path = tmp_path_factory.mktemp("decode_mesh")
  run_on_eight_devices(__file__, path)
  with np.load(path / "arrays.npz") as f:
    return dict(f), json.loads((path / "texts.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("mesh", MESHES)
def test_samples_on_a_mesh_are_those_of_one_device(elsewhere, mesh, batch):
  arrays, _ = elsewhere
  np.testing.assert_array_equal(arrays[f"{mesh}/{batch}/tokens"], arrays["one/tokens"][:batch])
  np.testing.assert_array_equal(arrays[f"{mesh}/{batch}/steps"], arrays["one/steps"][:batch])
  np.testing.assert_allclose(arrays[f"{mesh}/{batch}/log_probs"], arrays["one/log_probs"][:batch], rtol=0, atol=1e-5)


def test_so_they_are_of_a_model_whose_targets_are_added_to_its_input(elsewhere):
  arrays, _ = elsewhere
  np.testing.assert_array_equal(arrays["input/all/tokens"], arrays["input/one/tokens"])
  np.testing.assert_allclose(arrays["input/all/log_probs"], arrays["input/one/log_probs"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_so_they_are_by_every_sampler(elsewhere, sampler):
  arrays, _ = elsewhere
  for field in ("tokens", "steps", "orders", "evaluations_each"):
    np.testing.assert_array_equal(arrays[f"{sampler}/all/{field}"], arrays[f"{sampler}/one/{field}"])
  assert arrays[f"{sampler}/one/evaluations_each"].max() > 1


def test_the_samples_compared_differ_from_each_other(elsewhere):
  arrays, _ = elsewhere
  assert len({tuple(row) for row in arrays["one/tokens"]}) == max(BATCHES)


def test_devices_that_share_the_data_alone_send_each_other_nothing(elsewhere):
  _, texts = elsewhere
  assert texts["data/loops"] and texts["data/collectives"] == []
  assert "all-reduce" in texts["tensor/collectives"]  # they are found where there are any


@pytest.mark.parametrize("mesh", MESHES)
def test_texts_in_parts_compile_the_loop_once_for_all_batches_that_fill_up_to_the_same_size(elsewhere, mesh):
  _, texts = elsewhere
  ways = MESHES[mesh].get("data", 1) * MESHES[mesh].get("fsdp", 1)
  sizes = [-(-batch // ways) * ways for batch in BATCHES]
  assert [texts[f"{mesh}/{batch}/parts"] for batch in BATCHES] == [4] * len(BATCHES)
  assert [texts[f"{mesh}/{batch}/compiled"] for batch in BATCHES] == [int(n not in sizes[:i]) for i, n in enumerate(sizes)]
  assert texts[f"{mesh}/loops"] == len(set(sizes))


def test_a_growing_cache_on_a_mesh_compiles_the_loop_once_for_each_new_size(elsewhere):
  arrays, texts = elsewhere
  np.testing.assert_array_equal(arrays["grown/tokens"], arrays["one/tokens"][:1])
  assert texts["grown/compiled"] == 1  # 16 slots; the second size is the one that came before


def model_on(mesh, **fields):
  """A model and random parameters, split over the mesh as the config's rules say."""
  config = config_lib.default_config()
  config.model.update(layers=1, width=16, heads=2, block_size=LENGTH, vocab_size=32, cond_width=8, dtype="float32", **fields)
  model = build_model(config)
  boxed = jax.eval_shape(lambda: step_lib.init_params(model, 0))
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda x: rng.normal(size=x.shape, scale=0.3).astype(np.float32), nn.unbox(boxed))
  return model, jax.device_put(params, sharding.parameter_shardings(boxed, mesh, config.sharding_rules))


def arguments(batch):
  """Plan, tokens, keys and filters of the first `batch` texts; one has nothing to draw."""
  rng = np.random.default_rng(1)
  most = max(BATCHES)
  orders = np.stack([rng.permutation(LENGTH) for _ in range(most)])
  known = rng.random((most, LENGTH)) < np.resize([0.0, 0.5, 1.0], (most, 1))
  tokens = rng.integers(0, 32, (most, LENGTH))
  made = plan.make_plan(orders[:batch], known[:batch], 5, counts="fixed")
  return made, tokens[:batch], jax.random.split(jax.random.key(2), most)[:batch], filters.Filters(30)


def make_mesh(data=1, fsdp=1, tensor=1):
  shape = data, fsdp, tensor
  return jax.make_mesh(shape, sharding.MESH_AXES, devices=jax.devices()[: np.prod(shape)],
                       axis_types=(jax.sharding.AxisType.Auto,) * 3)


def loops():
  """HLO of all compiled loops over passes that there are in this process."""
  modules = [m for e in jax.devices()[0].client.live_executables() for m in e.hlo_modules()]
  return collections.Counter(m.to_string() for m in modules if m.name == "jit__run")


def main(directory):
  """Run in a process of its own, where there are eight devices."""
  arrays, texts, compiled = {}, {}, []

  def listen(event, duration, **kwargs):
    if event == "/jax/core/compile/backend_compile_duration":
      compiled.append(kwargs["fun_name"])

  def record(name, batch, *model_and_params, **options):
    """Keeps what is drawn for a batch, how many parts of it came, and how often the loop was compiled for it."""
    compiled.clear()
    parts = list(decode.stream(*model_and_params, *arguments(batch), **options))
    arrays.update({f"{name}/{field}": getattr(parts[-1], field) for field in ("tokens", "log_probs", "steps")})
    texts[f"{name}/parts"], texts[f"{name}/compiled"] = len(parts), compiled.count("jit(_run)")

  jax.monitoring.register_event_duration_secs_listener(listen)
  record("one", max(BATCHES), *model_on(make_mesh()))
  for name, axes in MESHES.items():
    mesh, before = make_mesh(**axes), loops()
    model, params = model_on(mesh)
    for batch in BATCHES:
      record(f"{name}/{batch}", batch, model, params, mesh=mesh, parts=4)
    found = loops() - before
    texts[f"{name}/loops"], texts[f"{name}/collectives"] = found.total(), re.findall(COLLECTIVES, "".join(found))
    if name == "data":
      decode.CACHE_STEP, step = 16, decode.CACHE_STEP
      record("grown", 1, model, params, mesh=mesh, parts=4)
      decode.CACHE_STEP = step
  for name, axes in (("one", {}), ("all", MESHES["all"])):
    mesh = make_mesh(**axes)
    record(f"input/{name}", 5, *model_on(mesh, target="input", tied_head=True), mesh=mesh)
    for sampler, (module, options) in SAMPLERS.items():
      out = module.sample(*model_on(mesh), *arguments(5), **options, mesh=mesh)
      arrays.update({f"{sampler}/{name}/{field}": getattr(out, field) for field in ("tokens", "steps", "orders", "evaluations_each")})
  np.savez(os.path.join(directory, "arrays.npz"), **arrays)
  pathlib.Path(directory, "texts.json").write_text(json.dumps(texts), encoding="utf-8")


if __name__ == "__main__":
  main(sys.argv[1])
