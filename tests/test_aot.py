"""Programs compiled for devices that are not there: they are the sampler's own, and need the memory that their shapes say."""

import dataclasses
import importlib.util
import os
import subprocess
import sys

from conftest import LOAD_MODULE, ROOT
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aogpt_jax import aot
from aogpt_jax import build_model
from aogpt_jax import config as config_lib
from aogpt_jax import sharding
from aogpt_jax.sampling import decode
from aogpt_jax.sampling import filters as filters_lib
from aogpt_jax.sampling import plan as plan_lib
from aogpt_jax.training import step as step_lib

BATCH, LAYERS, WIDTH, LENGTH, VOCABULARY = 32, 2, 128, 512, 512
CACHE = 2 * LAYERS * BATCH * LENGTH * WIDTH * 2  # keys and values, bfloat16

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed: pip install 'aogpt_jax[aot]'")


def small_config(**changes):
  config = config_lib.default_config()
  config.model.update(layers=LAYERS, width=WIDTH, heads=2, block_size=LENGTH, vocab_size=VOCABULARY, cond_width=32)
  config.data.tokenizer = "bytes"
  config.update(changes)
  return config


@pytest.fixture(scope="module", autouse=True)
def environment_of_processes():
  """Warnings are errors in them too."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("PYTHONWARNINGS", f"error,{LOAD_MODULE}")
    patch.setenv("PYTHONPATH", str(ROOT))
    # Memory is that of the program as it would run: without what conftest.py leaves out to compile faster.
    patch.setenv("XLA_FLAGS", "")
    yield


@pytest.fixture(scope="module")
def one_chip():
  return aot.measure_sampler(small_config(), "v5e:1x1", BATCH)


@needs_libtpu
def test_the_sampler_compiles_for_a_tpu_and_fits(one_chip):
  assert not one_chip.error and one_chip.fits and one_chip.devices == 1
  assert [m.program for m in one_chip.programs] == ["prepare", "grow", "run"]
  assert all(m.compiled and not m.error for m in one_chip.programs)


@needs_libtpu
def test_the_cache_is_updated_in_place(one_chip):
  assert one_chip.shapes["cache"] == CACHE
  *_, run = one_chip.programs
  assert CACHE <= run.aliased <= 1.02 * CACHE
  assert run.temporaries < CACHE / 2  # neither a copy of the cache, nor one of its keys or values


@needs_libtpu
def test_the_compiler_counts_what_the_shapes_say(one_chip):
  prepare, grow, run = one_chip.programs
  shapes = one_chip.shapes
  assert shapes["parameters"] <= prepare.arguments <= 1.1 * shapes["parameters"]
  assert shapes["prepared"] <= prepare.outputs <= 1.1 * shapes["prepared"]
  layer = CACHE / LAYERS
  assert grow.arguments == pytest.approx(layer / 2, rel=0.01) and grow.outputs == pytest.approx(layer, rel=0.01)
  assert run.arguments == pytest.approx(shapes["prepared"] + CACHE, rel=0.1)
  assert 0 <= run.outputs - run.aliased < 4096  # the tuple of pointers that is returned
  assert run.beside == shapes["parameters"]


@needs_libtpu
def test_a_mesh_of_chips_shares_the_cache():
  config = small_config()
  config.mesh.tensor = 2
  report = aot.measure_sampler(config, "v5e:2x2", BATCH)
  assert report.fits and report.devices == 4 and report.shapes["cache"] == CACHE // 4
  *_, run = report.programs
  assert CACHE / 4 <= run.aliased <= 1.1 * CACHE / 4 and run.temporaries < CACHE / 4


@needs_libtpu
def test_what_is_too_large_does_not_fit_and_says_by_how_much():
  config = small_config()
  config.model.update(width=64 * WIDTH, heads=64)
  report = aot.measure_sampler(config, "v5e:1x1", 32 * BATCH)
  assert report.fits is False
  *_, run = report.programs
  assert "RESOURCE_EXHAUSTED" in run.error and "\n" not in run.error and run.total > 64 * 32 * CACHE
  assert "does not fit: about" in aot.table([report])


def test_the_sampler_lowers_for_cuda_with_its_memory_from_shapes():
  report = aot.measure_sampler(small_config(), "cuda", BATCH)
  assert not report.error and report.fits is None
  *_, run = report.programs
  assert run.outputs == run.aliased == report.shapes["cache"] == CACHE
  assert run.temporaries == report.shapes["logits"] == BATCH * VOCABULARY * 4
  assert not run.compiled and not run.error and f"logits {BATCH * VOCABULARY * 4 / 2**30:.3f}" in aot.table([report])


def test_the_programs_are_those_that_sampling_runs(monkeypatch):
  config = small_config()
  config.model.update(layers=1, width=16, block_size=300, vocab_size=32, cond_width=8)
  model = build_model(config)
  zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
  params = zeros(nn.unbox(jax.eval_shape(lambda: step_lib.init_params(model, 0))))
  mesh = sharding.mesh_of(params)
  plan = plan_lib.make_plan(np.tile(np.arange(300), (2, 1)), np.zeros((2, 300), bool), 7, counts="fixed")
  filters = filters_lib.Filters(30, temperature=0.7, top_k=5)
  programs, ran = decode._programs(model, mesh), {}

  def arrays(leaves):
    return [(x.shape, x.dtype, x.weak_type) for x in leaves]

  def watched(name):
    def call(*args):
      ran[name] = arrays(map(jax.typeof, jax.tree.leaves([x for x in args if not isinstance(x, int)])))
      return zeros(getattr(programs, name).trace(*args).out_info)  # nothing is compiled for it

    return call

  with monkeypatch.context() as patch:
    replaced = dataclasses.replace(programs, **{name: watched(name) for name in ("prepare", "grow", "run")})
    patch.setattr(decode, "_programs", lambda *_: replaced)
    decode.sample(model, params, plan, np.zeros((2, 300), int), jax.random.split(jax.random.key(0), 2), filters)
  everywhere = sharding.replicated(mesh)
  replicated = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), tree)
  prepare = decode.trace_prepare(model, mesh, replicated(params))
  traced = decode.trace_last(model, mesh, replicated(prepare.out_info), plan, filters) | {"prepare": prepare}
  assert {name: arrays(program.jaxpr.in_avals) for name, program in traced.items()} == ran


@pytest.mark.parametrize("flags, message", [
    (("--target=v9:1x1",), "error: target 'v9:1x1' is not known"),
    (("--batch_size=0",), "error: --batch_size=0: give numbers"),
    (("--config.model.layrs=2",), "error: config.model.layrs: there is no such field; did you mean config.model.layers"),
])
def test_a_mistake_on_the_command_line_is_named_in_one_line(flags, message):
  process = subprocess.run(
      [sys.executable, "-m", "aogpt_jax.aot", f"--config={ROOT / 'configs' / 'tiny.py'}", "--target=cuda", *flags], text=True,
      capture_output=True, cwd=ROOT, env=os.environ, check=False)
  assert process.returncode == 1 and process.stderr.startswith(message) and process.stderr.count("\n") == 1, process.stderr


def test_without_the_tpu_compiler_it_says_what_to_install(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ImportError, match=r"pip install 'aogpt_jax\[aot\]'"):
    aot.check_target("v5e:1x1")
