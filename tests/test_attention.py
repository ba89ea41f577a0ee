"""Attention is the same by every implementation, and each is chosen where it runs."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import types

from conftest import PYTHON, ROOT, run_on_eight_devices
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aogpt_jax import attention
from aogpt_jax import build_model
from aogpt_jax import config as config_lib
from aogpt_jax import load_model
from aogpt_jax import sharding
from aogpt_jax.training import checkpoints
from aogpt_jax.training import flops
from aogpt_jax.training import step as step_lib

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed: pip install 'aogpt_jax[aot]'")


def inputs(batch=2, length=384, heads=2, head_dim=16):
  rng = np.random.default_rng(0)
  return [jnp.asarray(rng.normal(size=(batch, length, heads, head_dim)), jnp.float32) for _ in range(4)]


def outputs_and_gradients(backend, causal, q, k, v, weights):
  def weighted(q, k, v):
    y = attention.attend_whole(q, k, v, causal=causal, backend=backend)
    return jnp.sum(y * weights), y

  (_, y), gradients = jax.jit(jax.value_and_grad(weighted, (0, 1, 2), has_aux=True))(q, k, v)
  return y, gradients


def differences(backend, causal, *arrays):
  """Largest absolute differences from plain attention: of the outputs and of the gradients."""
  y, gradients = outputs_and_gradients(backend, causal, *arrays)
  plain, plain_gradients = outputs_and_gradients(attention.Backend(), causal, *arrays)
  return float(abs(y - plain).max()), max(float(abs(a - b).max()) for a, b in zip(gradients, plain_gradients))


@pytest.mark.parametrize("length", [128, 200, 700])  # 2, 3 and 8 parts, not all of one length
@pytest.mark.parametrize("causal", [True, False])
def test_some_queries_at_a_time_attend_as_all_at_once(monkeypatch, causal, length):
  arrays = inputs(length=length)
  y, gradients = outputs_and_gradients(attention.Backend(), causal, *arrays)
  monkeypatch.setattr(attention, "_MOST_PARTS", 1)
  whole, whole_gradients = outputs_and_gradients(attention.Backend(), causal, *arrays)
  assert not np.array_equal(y, whole)
  for found, expected in zip((y, *gradients), (whole, *whole_gradients)):
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_splash_computes_plain_attention_and_its_gradients(causal):
  forward, backward = differences(attention.Backend("splash", interpret=True), causal, *inputs())
  assert forward < 1e-5 and backward < 1e-4


def splash_on_a_mesh(path):
  """In a process with eight devices: differences for batches that the mesh divides and that it does not."""
  config = config_lib.default_config()
  config.mesh.update(fsdp=2, tensor=2)
  mesh, found = sharding.make_mesh(config), {}
  for batch, heads in ((4, 2), (1, 3)):
    found[f"{batch} x {heads}"] = differences(
        attention.Backend("splash", mesh, interpret=True), True, *inputs(batch=batch, length=128, heads=heads))
  pathlib.Path(path).write_text(json.dumps(found), encoding="utf-8")


def test_splash_on_a_mesh_computes_the_same_for_any_batch_and_heads(tmp_path):
  run_on_eight_devices(__file__, tmp_path / "found.json")
  found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
  assert len(found) == 2 and all(forward < 1e-5 and backward < 1e-4 for forward, backward in found.values()), found


@pytest.mark.parametrize("batch", [1, 3])
def test_the_matrix_products_of_splash_and_its_gradients_are_counted(batch):
  arrays = inputs(batch=batch, length=256)
  backend = attention.Backend("splash", interpret=True)
  jaxpr = jax.make_jaxpr(lambda *arrays: outputs_and_gradients(backend, True, *arrays))(*arrays)
  kernels = [m for m in flops.matmuls(jaxpr) if m.kind == "kernel"]
  # Of scores and outputs; of scores, their gradient and that of queries; of scores, their gradient and those of keys and values.
  assert sorted(m.flops / (2 * batch * 2 * 256**2 * 16) for m in kernels) == [2, 3, 4]
  assert all(m.times == 1 and all(array[0][-3:] == (2, 256, 16) for array in m.operands) for m in kernels)


def test_passes_over_parts_of_blocks_are_plain_where_splash_does_not_take_them():
  q, k, v, weights = inputs(length=100)
  y, _ = outputs_and_gradients(attention.Backend("splash"), True, q, k, v, weights)  # on a CPU, Splash itself would fail
  np.testing.assert_array_equal(y, outputs_and_gradients(attention.Backend(), True, q, k, v, weights)[0])


COMPILE_FOR_TPU = """
import functools, json, os
import jax
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import test_attention
from aogpt_jax import attention, config, sharding

os.environ["XLA_FLAGS"] = ""  # those of conftest.py are the CPU's: libtpu does not know them
devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2", chip_config_name="default",
                                       chips_per_host_bounds=(2, 2, 1), num_slices=1).devices
mesh = jax.make_mesh((2, 1, 2), sharding.MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)
backend = attention.choose(config.default_config().model, mesh)
x = jax.ShapeDtypeStruct((4, 512, 4, 64), "bfloat16", sharding=NamedSharding(mesh, P("data", None, "tensor")))
# An encoder's; the step that test_aot.py compiles has a decoder's.
function = functools.partial(test_attention.outputs_and_gradients, backend, False)
text = jax.jit(function).trace(x, x, x, x).lower().compile().as_text()
print(json.dumps([backend.name, text.count('custom_call_target="tpu_custom_call"')]))
"""


@needs_libtpu
def test_splash_is_chosen_for_a_tpu_pod_on_a_cpu_and_compiles():
  environment = os.environ | {
      "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1",
      "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
  process = subprocess.run([*PYTHON, "-c", COMPILE_FOR_TPU], env=environment, text=True, capture_output=True,
                           check=False)
  assert process.returncode == 0, process.stderr
  # The forward pass, the gradient of the queries and that of keys and values.
  assert json.loads(process.stdout.splitlines()[-1]) == ["splash", 3]


@pytest.mark.parametrize("causal, mask", [(True, "CAUSAL"), (False, "NO_MASK")])
def test_cudnn_attention_and_its_gradient_lower_for_cuda(monkeypatch, causal, mask):
  from jax._src.cudnn import fused_attention_stablehlo  # asks for a GPU's library, which nothing else here needs

  monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
  x = jax.ShapeDtypeStruct((2, 128, 2, 64), "bfloat16")
  gradient = lambda *arrays: outputs_and_gradients(attention.Backend("cudnn"), causal, *arrays)
  text = jax.jit(gradient).trace(x, x, x, x).lower(lowering_platforms=("cuda",)).as_text()
  assert "@__cudnn$fmhaSoftmax(" in text and "@__cudnn$fmhaSoftmaxBackward(" in text and mask in text


def mesh_of(platform, **properties):
  device = types.SimpleNamespace(platform=platform, device_kind=f"a {platform}", **properties)
  return types.SimpleNamespace(devices=np.array([device]))


@pytest.mark.parametrize("mesh, fields, chosen", [
    (None, {}, "xla"),  # the devices of the tests
    (mesh_of("tpu"), {}, "splash"),
    (mesh_of("tpu"), {"dtype": "float32"}, "splash"),
    (mesh_of("tpu"), {"block_size": 320}, "xla"),
    (mesh_of("gpu", compute_capability="9.0"), {}, "cudnn"),
    (mesh_of("gpu", compute_capability="7.5"), {}, "xla"),
    (mesh_of("gpu", compute_capability="gfx942"), {}, "xla"),
    (mesh_of("gpu", compute_capability="8.0"), {"dtype": "float32"}, "xla"),
    (mesh_of("gpu", compute_capability="10.0"), {"heads": 4}, "xla"),  # of 192
    (mesh_of("tpu"), {"attention": "xla"}, "xla"),
])
def test_auto_takes_what_runs_on_the_devices(mesh, fields, chosen):
  config = config_lib.default_config()
  config.model.update(fields)
  config_lib.check(config)
  assert attention.choose(config.model, mesh).name == chosen


@pytest.mark.parametrize("fields, message", [
    (dict(attention="flash"), r"config.model.attention: is 'flash'; it must be one of auto, xla, cudnn, splash"),
    (dict(attention="cudnn", dtype="float32"), r"cudnn computes in bfloat16, not in config.model.dtype = float32; set it to auto or xla"),
    (dict(attention="cudnn", heads=4), r"cudnn takes heads of a multiple of 8 up to 128, not of 192"),
    (dict(attention="splash", block_size=320), r"splash takes a multiple of 128 entries, not config.model.block_size = 320"),
])
def test_attention_that_can_run_nowhere_is_a_mistake_in_the_config(fields, message):
  config = config_lib.default_config()
  config.model.update(fields)
  with pytest.raises(config_lib.ConfigError, match=message):
    config_lib.check(config)


@pytest.mark.parametrize("name, wants", [("cudnn", "NVIDIA GPUs"), ("splash", "TPUs")])
def test_attention_of_other_devices_is_a_mistake_before_anything_is_compiled(name, wants):
  config = config_lib.default_config()
  config.model.attention = name
  config_lib.check(config)
  with pytest.raises(config_lib.ConfigError, match=f"config.model.attention: {name} is for {wants}.* the devices are cpu; set it to"):
    build_model(config)


def test_a_run_of_other_devices_goes_on_and_loads_on_these(words_config, tmp_path):
  model = build_model(words_config)
  trainer = step_lib.make_trainer(words_config, model, sharding.make_mesh(words_config))
  elsewhere = words_config.copy_and_resolve_references()
  elsewhere.model.attention = "splash"
  saver = checkpoints.Checkpoints(tmp_path, elsewhere)
  saver.save(trainer.init())
  saver.wait()
  saver.close()
  loaded, _ = load_model(tmp_path)
  assert loaded.backend == attention.Backend("xla")
  saver = checkpoints.Checkpoints(tmp_path, words_config)
  assert int(saver.restore(trainer.shapes).step) == 0
  saver.close()


if __name__ == "__main__":
  splash_on_a_mesh(sys.argv[1])
