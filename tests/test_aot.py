"""Programs compiled for devices that are not there: they are the sampler's own, and need the memory that their shapes say."""

import dataclasses
import importlib.util
import json
import math
import re

from conftest import ALLOWED, ROOT
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aogpt_jax import build_model
from aogpt_jax import config as config_lib
from aogpt_jax import sharding
from aogpt_jax.aot import hlo
from aogpt_jax.aot import processes
from aogpt_jax.aot import programs
from aogpt_jax.aot import report
from aogpt_jax.aot import topology
from aogpt_jax.aot import traffic
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
  config.batch_size = config.sample.batch_size = BATCH
  config.update(changes)
  return config


@pytest.fixture(scope="module", autouse=True)
def environment_of_processes():
  """Warnings are errors in them too."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("PYTHONWARNINGS", ",".join(["error", *ALLOWED]))
    patch.setenv("PYTHONPATH", str(ROOT))
    # Memory is that of the program as it would run: without what conftest.py leaves out to compile faster.
    patch.setenv("XLA_FLAGS", "")
    yield


@pytest.fixture(scope="module")
def one_chip():
  return processes.sampler(small_config(), "v5e:1x1")


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
  sampler = processes.sampler(config, "v5e:2x2")
  assert sampler.fits and sampler.devices == 4 and sampler.shapes["cache"] == CACHE // 4
  *_, run = sampler.programs
  assert CACHE / 4 <= run.aliased <= 1.1 * CACHE / 4 and run.temporaries < CACHE / 4


@needs_libtpu
def test_what_is_too_large_does_not_fit_and_says_by_how_much():
  config = small_config()
  config.model.update(width=64 * WIDTH, heads=64)
  config.sample.batch_size = 32 * BATCH
  sampler = processes.sampler(config, "v5e:1x1")
  assert sampler.fits is False
  *_, run = sampler.programs
  assert "RESOURCE_EXHAUSTED" in run.error and "\n" not in run.error and run.total > 64 * 32 * CACHE
  assert "does not fit: about" in report.table([report.Report(programs.Training("v5e:1x1", 1, error="not asked"), None, sampler)])


def test_the_command_writes_a_table_and_the_same_as_json(command, tmp_path):
  process = command("--mode=aot", "--topology=cuda", "--workdir=run", "sample.batch_size=16")
  assert process.returncode == 0, process.stderr
  found = json.loads((tmp_path / "run" / "aot.json").read_text(encoding="utf-8"))
  training, sampler = found["topologies"][0]["training"], found["topologies"][0]["sampler"]
  assert training["fits"] is None and not training["error"] and not training["program"]["compiled"]
  # Two moments and an average beside the parameters.
  shapes = training["shapes"]
  assert 2 * shapes["parameters"] <= shapes["optimizer"] < 2 * shapes["parameters"] + 100 and shapes["ema"] == shapes["parameters"]
  assert training["program"]["arguments"] == sum(shapes.values())
  model = found["config"]["model"]
  cache = 2 * model["layers"] * 16 * model["block_size"] * model["width"] * 4
  *_, run = sampler["programs"]
  assert run["outputs"] == run["aliased"] == sampler["shapes"]["cache"] == cache
  assert f"lowered; needs about {(sum(shapes.values())) / 2**30:.2f} GiB" in process.stdout
  assert "training step" in process.stdout and "sampling: run" in process.stdout and "run/aot.json" in process.stdout


@pytest.fixture(scope="module")
def step_on_four_chips():
  config = small_config()
  config.micro_batches = 2
  config.mesh.preset = "fsdp"
  return config, processes.training(config, "v5e:2x2")


@needs_libtpu
def test_the_training_step_compiles_for_a_tpu_slice_and_fits(step_on_four_chips):
  _, step = step_on_four_chips
  assert not step.error and not step.program.error and step.fits
  assert step.devices == 4 and step.sequences == BATCH // 2 // 4 and step.attention == "splash"
  counted = sum(step.shapes.values())
  assert counted <= step.program.arguments < 1.5 * counted  # arrays this small are padded
  assert counted - step.shapes["batch"] <= step.program.aliased <= step.program.arguments


@needs_libtpu
def test_its_matrix_products_are_those_of_the_formula_but_for_what_is_computed_again(step_on_four_chips):
  _, step = step_on_four_chips
  r = step.roofline
  # The modulation of each target, which the formula leaves out, is not small in so small a model.
  tables = 3 * 2 * 2 * LENGTH * 32 * (6 * LAYERS + 2) * WIDTH
  assert r.weights == pytest.approx(r.formula_weights + tables, rel=0.01)
  assert r.attention == pytest.approx(1.5 * r.formula_attention, rel=0.01)
  assert r.step == max(r.compute, r.memory, r.communication) and 0 < r.utilisation < 1


@needs_libtpu
def test_fsdp_sends_parameters_and_gradients_and_no_activations(step_on_four_chips):
  config, step = step_on_four_chips
  assert step.collectives
  assert {c.kind for c in step.collectives} <= {"all-gather", "all-reduce", "reduce-scatter", "collective-permute"}
  params = nn.unbox(jax.eval_shape(lambda: step_lib.init_params(build_model(config), 0)))
  whole = {size for x in jax.tree.leaves(params) for size in (x.size, x.size // x.shape[0])}  # all of it, or one layer's

  def elements(shape):
    dims, ways = re.fullmatch(r"\w+\[([\d,]*)\](?: x (\d+))?", shape).groups()
    return math.prod(int(n) for n in dims.split(",") if n) * int(ways or 1)

  others = [c for c in step.collectives if elements(c.shape) not in whole | {n // 4 for n in whole}]
  assert all(elements(c.shape) == 1 for c in others), others  # the loss and the norm of the gradient


@needs_libtpu
def test_it_multiplies_nothing_in_float32(step_on_four_chips):
  _, step = step_on_four_chips
  assert step.float32_products == 0 and step.roofline.float32 == 0


@needs_libtpu
def test_it_reads_and_writes_the_state_and_says_what_of_all_bytes_only_moves(step_on_four_chips):
  _, step = step_on_four_chips
  held = step.shapes["parameters"] + step.shapes["optimizer"] + step.shapes["ema"]
  assert step.accessed > 2 * held  # the state is read and written
  assert sum(m.bytes for m in step.movements) < 0.5 * step.accessed
  assert all(m.bytes >= step.accessed / 1000 and m.count > 0 for m in step.movements)


def test_the_largest_micro_batch_is_found_among_those_that_divide_the_batch():
  memory = topology.chip("v5e:1x1").memory

  def measure(config, name):
    sequences = 24 // config.micro_batches
    m = programs.Memory("step", 0, 0, 0, sequences * memory // 9, 0, 0, 1.0, True)
    if sequences == 12:
      return programs.Training(name, config.micro_batches, sequences, error="the compiler's process ended with code -6: aborted")
    return programs.Training(name, config.micro_batches, sequences, 1, program=m)

  said = []
  for own in (1, 2, 6, 24):  # the second aborts
    config = small_config(batch_size=24, micro_batches=own)
    found = processes.largest(config, measure(config, "v5e:1x1"), said.append, measure)
    assert (found.sequences, found.micro_batches) == (8, 3)
    assert found.tried[8] == "fits" and (found.tried.get(12) or "failed: the compiler's").startswith("failed: the compiler's")
  assert "v5e:1x1, 8 sequences a device ..." in said


HLO = """HloModule step, entry_computation_layout={()->f32[]}

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%fused (p: f32[8,4]) -> f32[8,8] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %product = f32[8,8]{1,0:T(8,128)} convolution(%p, %p), dim_labels=bf_io->bf
}

%body (arg: (s32[], bf16[64,16])) -> (s32[], bf16[64,16]) {
  %arg = (s32[], bf16[64,16]) parameter(0)
  %part = bf16[16,16]{1,0} get-tuple-element(%arg), index=1
  %gather = (bf16[16,16]{1,0}, bf16[64,16]{1,0:T(8,128)(2,1)}) all-gather-start(%part), replica_groups=[2,4]<=[8], dimensions={0}
  %whole = bf16[64,16]{1,0} all-gather-done(%gather)
  %f = f32[8,8]{1,0} fusion(%q), kind=kOutput, calls=%fused
  %piece.2 = bf16[128,16]{1,0} all-gather(%d), channel_id=7, replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %out = (s32[], bf16[64,16]) tuple(%i, %whole)
}

%condition (arg: (s32[], bf16[64,16])) -> pred[] {
  %n = s32[]{:T(128)} constant(3)
  ROOT %less = pred[]{:T(512)} compare(%i, %n), direction=LT
}

ENTRY %main (a: f32[128]) -> f32[] {
  %a = f32[128]{0} parameter(0)
  %piece.1 = bf16[128,16]{1,0} all-gather(%d), channel_id=7, replica_groups=[1,8]<=[8], dimensions={0}
  %loop = (s32[], bf16[64,16]{1,0}) while(%init), condition=%condition, body=%body
  %sum = (f32[128]{0}, f32[16]{0}) all-reduce(%a, %b), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %scatter = f32[16]{0} reduce-scatter(%a), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}, to_apply=%add
  %sent = bf16[32]{0} collective-permute(%d), source_target_pairs={{0,1},{1,0}}
  ROOT %r = f32[] constant(0)
}
"""


def test_collectives_are_counted_with_the_passes_of_loops_and_what_they_bring_to_a_device():
  found = {(c.kind, c.shape): (c.devices, c.count, c.bytes) for c in hlo.collectives(HLO, 8)}
  assert found == {
      ("all-gather", "bf16[64,16]"): (4, 3, 3 * 64 * 16 * 2 * 3 // 4),
      ("all-gather", "bf16[128,16]"): (8, 1, 128 * 16 * 2 * 7 // 8),  # in pieces
      ("all-reduce", "f32[128]"): (8, 1, 2 * 128 * 4 * 7 // 8),
      ("all-reduce", "f32[16]"): (8, 1, 2 * 16 * 4 * 7 // 8),
      ("reduce-scatter", "f32[16] x 4"): (4, 1, 16 * 4 * 4 * 3 // 4),
      ("collective-permute", "bf16[32]"): (2, 1, 32 * 2),
  }
  assert hlo.float32_products(HLO) == 3


MOVING = """HloModule step, entry_computation_layout={()->f32[]}

%sliced (stack: bf16[24,64,16], i: s32[]) -> bf16[16,64] {
  %stack = bf16[24,64,16]{2,1,0:T(8,128)(2,1)} parameter(0)
  %i.1 = s32[]{:T(128)} parameter(1)
  %part = bf16[1,64,16]{2,1,0:T(8,128)(2,1)} dynamic-slice(%stack, %i.1), dynamic_slice_sizes={1,64,16}
  %flat = bf16[64,16]{1,0:T(8,128)(2,1)} bitcast(%part)
  ROOT %turned = bf16[16,64]{1,0:T(8,128)(2,1)} transpose(%flat), dimensions={1,0}, metadata={op_name="jit(step)/turn"}
}

%put (stack: f32[24,8], row: f32[1,8]) -> f32[24,8] {
  %stack.1 = f32[24,8]{1,0} parameter(0)
  %row.1 = f32[1,8]{1,0} parameter(1)
  %twice = f32[1,8]{1,0} add(%row.1, %row.1)
  ROOT %new = f32[24,8]{1,0} dynamic-update-slice(%stack.1, %twice, %zero, %zero)
}

%body (arg: (s32[], bf16[24,64,16])) -> (s32[], bf16[24,64,16]) {
  %arg = (s32[], bf16[24,64,16]) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%arg), index=0
  %weights = bf16[24,64,16]{2,1,0:T(8,128)(2,1)} get-tuple-element(%arg), index=1
  %near = (bf16[24,64,16]{2,1,0:T(8,128)(2,1)S(1)}, bf16[24,64,16]{2,1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%weights)
  %here = bf16[24,64,16]{2,1,0:T(8,128)(2,1)S(1)} copy-done(%near)
  %copied = bf16[16,64]{0,1:T(8,128)(2,1)} copy(%kept), metadata={op_name="jit(step)/keep"}
  %kept = bf16[16,64]{1,0:T(8,128)(2,1)} fusion(%weights, %i), kind=kLoop, calls=%sliced
  %near_copy = bf16[16,64]{0,1:T(8,128)(2,1)S(1)} copy(%here)
  ROOT %out = (s32[], bf16[24,64,16]) tuple(%i, %weights)
}

%condition (arg: (s32[], bf16[24,64,16])) -> pred[] {
  %n = s32[]{:T(128)} constant(3)
  ROOT %less = pred[]{:T(512)} compare(%i, %n), direction=LT
}

ENTRY %main (a: f32[24,8], b: f32[1,8]) -> f32[24,8] {
  %a = f32[24,8]{1,0} parameter(0)
  %b = f32[1,8]{1,0} parameter(1)
  %loop = (s32[], bf16[24,64,16]{2,1,0}) while(%init), condition=%condition, body=%body
  ROOT %r = f32[24,8]{1,0} fusion(%a, %b), kind=kLoop, calls=%put
}
"""


def test_bytes_are_those_in_memory_with_the_passes_of_loops_and_copies_are_told_from_what_computes():
  moved, accessed = traffic.movements(MOVING)
  matrix, passes = 64 * 16 * 2, 3
  assert moved == (
      traffic.Movement("fusion", "bf16[16,64]{1,0}", "jit(step)/turn", passes, passes * (2 * matrix + 4)),  # reads i, too
      traffic.Movement("copy", "bf16[16,64]{0,1}", "jit(step)/keep", passes, passes * 2 * matrix),
  )
  # Of the stack, what comes near; what the loop compares; of the rows, one that is read and one that is written.
  assert accessed == sum(m.bytes for m in moved) + passes * (24 * matrix + 4 + 4 + 1) + 2 * 8 * 4


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


@pytest.mark.parametrize("flag, message", [
    ("--topology=v9:1x1", "error: topology 'v9:1x1' is not known; give a TPU and its slice"),
    ("--config.model.layers=0", "error: config.model.layers: is 0; it must be at least 1"),
])
def test_a_mistake_is_named_in_one_line(command, flag, message):
  process = command("--mode=aot", flag)
  assert process.returncode == 1 and process.stderr.startswith(message) and process.stderr.count("\n") == 1, process.stderr


def test_without_the_tpu_compiler_it_says_what_to_install(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ImportError, match=r"pip install 'aogpt_jax\[aot\]'"):
    topology.check("v5e:1x1")
