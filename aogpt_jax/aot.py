"""Compiles a run's programs for devices that are not there, and prints the memory that they need.

    python -m aogpt_jax.aot --config=configs/medium.py --target=v5e:1x1,v5e:2x4 --batch_size=32,512 [--config.KEY=VALUE ...]

A target is a TPU topology, such as v5e:2x4, or "cuda". For a TPU, its compiler runs on the CPU (it comes with libtpu). For CUDA,
whose compiler needs a GPU, programs are lowered to StableHLO, and their memory is counted from the shapes of what they are given.

The programs are those that sampling runs at the end of a text, where the cache is longest, along config.sample without a prompt,
on the mesh of config.mesh over the target's devices. Each target and batch size is a process of its own, since the compiler may
abort.
"""

from collections.abc import Sequence
import dataclasses
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import time
from typing import Any

from absl import flags
from flax import linen as nn
import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh
from ml_collections import config_flags
import ml_collections
import numpy as np

from aogpt_jax import config as config_lib
from aogpt_jax import models
from aogpt_jax import sharding
from aogpt_jax.data import tokenizers
from aogpt_jax.sampling import decode
from aogpt_jax.sampling import filters as filters_lib
from aogpt_jax.sampling import plan as plan_lib
from aogpt_jax.training import step as step_lib

GIB = 2**30
# TPU -> (libtpu's name of the configuration in which a chip is one device, HBM of a device that programs can use, in bytes).
TPUS = {
    "v4": ("megacore", int(30.75 * GIB)),
    "v5e": ("default", int(15.75 * GIB)),
    "v5p": ("default", int(95.73 * GIB)),
    "v6e": ("default", int(31.24 * GIB)),
}
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # a device that is there stays free
    "TPU_SKIP_MDS_QUERY": "1",  # do not ask the cloud which TPU this machine has
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True)
class Memory:
  """What one program needs on each device, in bytes.

  Attributes:
    program: its name.
    arguments: of what it is given.
    outputs: of what it returns,
    aliased: and of that, what takes the place of donated arguments.
    temporaries: of what lives while it runs; where it is not compiled, of the logits alone.
    code: of the program itself.
    beside: of what sampling keeps meanwhile that is no argument of the program.
    seconds: that it took to compile, or to lower.
    compiled: whether a compiler counted; else the numbers are from the shapes of what is large.
    error: why it did not compile, in a line.
  """

  program: str
  arguments: int
  outputs: int
  aliased: int
  temporaries: int
  code: int
  beside: int
  seconds: float
  compiled: bool
  error: str = ""

  @property
  def total(self) -> int:
    return self.arguments + self.outputs - self.aliased + self.temporaries + self.code + self.beside


@dataclasses.dataclass(frozen=True)
class Report:
  """What sampling a batch needs on each device of a target.

  Attributes:
    target: its name.
    devices: how many it has.
    batch_size: texts in all.
    shapes: bytes on each device, counted from shapes: "parameters", "prepared" (their copies for decoding), "cache", "logits".
    programs: in the order in which they are run.
    error: why there are no programs, in a line.
  """

  target: str
  batch_size: int
  devices: int = 0
  shapes: dict[str, int] = dataclasses.field(default_factory=dict)
  programs: tuple[Memory, ...] = ()
  error: str = ""

  @property
  def fits(self) -> bool | None:
    """Whether the device's memory is enough; None where that is not known."""
    if self.error or self.target == "cuda":
      return None
    memory = TPUS[self.target.split(":")[0]][1]
    if any(m.total > memory or "RESOURCE_EXHAUSTED" in m.error for m in self.programs):
      return False
    return None if any(m.error for m in self.programs) else True


def check_target(target: str) -> None:
  """Raises ValueError for a target that is not known, ImportError where its compiler is not installed."""
  if target == "cuda":
    return
  if not re.fullmatch(rf"({'|'.join(TPUS)}):[1-9]\d*(x[1-9]\d*)+", target):
    raise ValueError(f"target {target!r} is not known; give cuda, or a TPU and its topology, as v5e:1x1, v5e:4x4 or v5p:2x2x1 "
                     f"({', '.join(TPUS)}).")
  if importlib.util.find_spec("libtpu") is None:
    raise ImportError(f"target {target} needs the TPU compiler: pip install 'aogpt_jax[aot]'")


def measure_sampler(config: ml_collections.ConfigDict, target: str, batch_size: int) -> Report:
  """Compiles what draws `batch_size` texts along `config.sample`, in a process of its own.

  Args:
    config: of the run.
    target: "cuda", or a TPU topology.
    batch_size: texts that are drawn at once, over all devices.

  Raises:
    ConfigError: the config is wrong.
    ValueError: the target is not known, or the batch is empty.
    ImportError: libtpu is not installed.
  """
  config_lib.check(config)
  if config.sample.sampler != "plan":
    raise config_lib.ConfigError(f"config.sample.sampler: is {config.sample.sampler}; plan alone is measured, set it to that.")
  check_target(target)
  if batch_size < 1:
    raise ValueError(f"batch_size is {batch_size}; it must be at least 1.")
  request = json.dumps({"config": config.to_dict(), "target": target, "batch_size": batch_size})
  process = subprocess.run(
      [sys.executable, "-c", "from aogpt_jax import aot; aot.answer()"], input=request, text=True, capture_output=True,
      env=os.environ | _ENVIRONMENT, check=False)
  # Only a process that came to its end has written what can be read; libtpu writes to both streams.
  try:
    fields = json.loads(process.stdout.splitlines()[-1])
  except (IndexError, ValueError):
    lines = [line.strip() for line in process.stderr.splitlines() if re.search("error|fail|abort", line, re.IGNORECASE)]
    said = lines[-1][:300] if lines else "without a message"
    return Report(target, batch_size, error=f"the compiler's process ended with code {process.returncode}: {said}")
  return Report(**fields | {"programs": tuple(Memory(**m) for m in fields["programs"])})


def answer() -> None:
  """The other side of `measure_sampler`: reads a request from standard input, writes the report as its last line."""
  request = json.loads(sys.stdin.read())
  config, target, batch_size = config_lib.from_dict(request["config"]), request["target"], request["batch_size"]
  try:
    report = _sampler(config, target, batch_size)
  except (ValueError, jax.errors.JaxRuntimeError) as e:  # a topology or mesh that can't be
    report = Report(target, batch_size, error=_line(e))
  print("\n" + json.dumps(dataclasses.asdict(report)), flush=True)


def _sampler(config: ml_collections.ConfigDict, target: str, batch_size: int) -> Report:
  mesh = _mesh(config, target)
  build = _lower if target == "cuda" else _compile
  model, settings = models.build_model(config), config.sample
  params = _abstract_params(config, model, mesh)
  vocab_size = tokenizers.known_vocab_size(config.data.tokenizer) or model.vocab_size
  filters = filters_lib.Filters(vocab_size, temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k,
                                top_p_rule=settings.top_p_rule)
  length = settings.length or model.block_size
  orders = np.tile(np.arange(length), (batch_size, 1))
  plan = plan_lib.make_plan(orders, np.zeros(orders.shape, bool), settings.steps or length, counts=settings.counts,
                            schedule=settings.schedule, spaced=settings.spaced, rng=np.random.default_rng(settings.seed))

  shapes = {"parameters": _bytes(params)}
  prepare = decode.trace_prepare(model, mesh, params)
  prepared = jax.tree.map(lambda x: x.update(sharding=sharding.replicated(mesh)), prepare.out_info)
  first, prepared = build("prepare", prepare, prepared, dict(arguments=shapes["parameters"], outputs=_bytes(prepared)))
  shapes["prepared"] = _bytes(prepared)
  programs = decode.trace_last(model, mesh, prepared, plan, filters, contexts=settings.contexts)
  in_heads = sharding.heads_sharding(mesh, model.heads)
  drawn, _, cache = programs["run"].out_info
  shapes["cache"] = _bytes(cache, in_heads)
  rows = sharding.batch_sharding(mesh).shard_shape(drawn.shape)[0]
  shapes["logits"] = rows * (drawn.shape[1] - length) * model.vocab_size * 4 // mesh.shape["tensor"]
  measured = [first]
  if "grow" in programs:
    *_, before = programs["grow"].args_info[0]
    layer = _bytes(cache[0], in_heads)
    counted = dict(arguments=_bytes(before, in_heads), outputs=layer,
                   beside=shapes["parameters"] + shapes["prepared"] + shapes["cache"] - layer)  # as before the last layer's turn
    measured.append(build("grow", programs["grow"], None, counted)[0])
  counted = dict(arguments=shapes["prepared"] + shapes["cache"], outputs=shapes["cache"], aliased=shapes["cache"],
                 temporaries=shapes["logits"], beside=shapes["parameters"])
  measured.append(build("run", programs["run"], None, counted)[0])
  return Report(target, batch_size, mesh.size, shapes, tuple(measured))


def _mesh(config: ml_collections.ConfigDict, target: str) -> Mesh:
  """The mesh of `config.mesh` over the devices of a target."""
  devices = jax.devices()[:1]  # lowering for CUDA reads of a device no more than that it is one
  if target != "cuda":
    name, _, topology = target.partition(":")
    # Hosts have 2 x 2 chips, or those that there are.
    bounds = [min(2, int(n)) for n in topology.split("x")[:2]] + [1]
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=target, chip_config_name=TPUS[name][0], chips_per_host_bounds=tuple(bounds), num_slices=1,
    ).devices
  sizes = [config.mesh[axis] for axis in sharding.MESH_AXES]
  if sizes[0] == -1:
    sizes[0] = max(1, len(devices) // (sizes[1] * sizes[2]))
  if math.prod(sizes) != len(devices):
    given = " x ".join(f"{axis}={config.mesh[axis]}" for axis in sharding.MESH_AXES)
    raise ValueError(f"config.mesh: {given} does not make the {len(devices)} devices of {target}.")
  return jax.make_mesh(sizes, sharding.MESH_AXES, axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def _abstract_params(config: ml_collections.ConfigDict, model: nn.Module, mesh: Mesh) -> Any:
  """The parameters as ShapeDtypeStructs with the shardings of the config's rules."""
  boxed = jax.eval_shape(lambda: step_lib.init_params(model, config.seed))
  shardings = sharding.parameter_shardings(boxed, mesh, config.sharding_rules)
  return jax.tree.map(lambda x, s: x.update(sharding=s), nn.unbox(boxed), shardings)


def _bytes(tree: Any, where: Any = None) -> int:
  """Bytes on each device of arrays with a sharding, or with that which is given."""
  return sum(math.prod((where or x.sharding).shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _compile(name: str, traced: jax.stages.Traced, outputs: Any, counted: dict[str, int]) -> tuple[Memory, Any]:
  """What the program needs, and its outputs with the shardings that the compiler chose; `counted` stands in where it fails."""
  begin = time.monotonic()
  try:
    compiled = traced.lower().compile()
  except jax.errors.JaxRuntimeError as e:
    return _count(name, counted, begin, _line(e)), outputs
  memory = compiled.memory_analysis()
  outputs = outputs and jax.tree.map(lambda x, s: x.update(sharding=s), outputs, compiled.output_shardings)
  return Memory(
      program=name, arguments=memory.argument_size_in_bytes, outputs=memory.output_size_in_bytes,
      aliased=memory.alias_size_in_bytes, temporaries=memory.temp_size_in_bytes, code=memory.generated_code_size_in_bytes,
      beside=counted.get("beside", 0), seconds=time.monotonic() - begin, compiled=True), outputs


def _lower(name: str, traced: jax.stages.Traced, outputs: Any, counted: dict[str, int]) -> tuple[Memory, Any]:
  begin = time.monotonic()
  traced.lower(lowering_platforms=("cuda",))
  return _count(name, counted, begin), outputs


def _count(name: str, counted: dict[str, int], begin: float, error: str = "") -> Memory:
  """What is known of a program's memory from the shapes of what it is given and returns."""
  nothing = dict(arguments=0, outputs=0, aliased=0, temporaries=0, code=0, beside=0)
  return Memory(program=name, **nothing | counted, seconds=time.monotonic() - begin, compiled=False, error=error)


def _line(e: Exception) -> str:
  return " ".join(str(e).partition("\nSee https://")[0].split())[:300]


def table(reports: Sequence[Report]) -> str:
  """The reports as text, in GiB per device."""
  columns = ("arguments", "outputs", "aliased", "temporaries", "code", "beside", "total")
  head = f"{'target':<10}{'batch':>6}  {'program':<8}" + "".join(f"{c:>12}" for c in columns) + f"{'seconds':>9}"
  lines = ["GiB per device; ~ is counted from shapes", head]
  for r in reports:
    for m in r.programs:
      numbers = "".join(f"{('' if m.compiled else '~') + f'{getattr(m, c) / GIB:.3f}':>12}" for c in columns)
      lines.append(f"{r.target:<10}{r.batch_size:>6}  {m.program:<8}{numbers}{m.seconds:>9.1f}")
    lines += [f"{r.target:<10}{r.batch_size:>6}  {line}" for line in _verdict(r)]
  return "\n".join(lines)


def _verdict(r: Report) -> list[str]:
  if r.error:
    return [f"failed: {r.error}"]
  failed = [f"{m.program} failed: {m.error}" for m in r.programs if m.error]
  from_shapes = ", ".join(f"{name} {size / GIB:.3f}" for name, size in r.shapes.items())
  most = max(m.total for m in r.programs) / GIB
  devices = f"{r.devices} devices" if r.devices > 1 else "1 device"
  if r.target == "cuda":
    return failed + [f"lowered; needs about {most:.2f} (from shapes: {from_shapes})"]
  memory = TPUS[r.target.split(":")[0]][1] / GIB
  says = {True: "fits", False: "does not fit", None: "is not known to fit"}[r.fits]
  about = "" if all(m.compiled for m in r.programs) else "about "
  return failed + [f"{says}: {about}{most:.2f} of {memory:.2f}, {devices} (from shapes: {from_shapes})"]


def main(argv: list[str]) -> None:
  # Flags of its own: main.py has some of the same names.
  values = flags.FlagValues()
  config = config_flags.DEFINE_config_file("config", None, "Config file, e.g. configs/medium.py.", flag_values=values)
  targets = flags.DEFINE_list("target", "v5e:1x1", "cuda, or TPU topologies, e.g. v5e:1x1,v5e:2x4.", flag_values=values)
  sizes = flags.DEFINE_list(
      "batch_size", "", "Texts drawn at once, e.g. 32,512; config.sample.batch_size by default.", flag_values=values)
  try:
    for argument in argv[1:]:
      name = argument.lstrip("-").partition("=")[0]
      if name.startswith("config."):
        config_lib.check_field(name.removeprefix("config."))
    rest = values(argv)[1:]
    if rest or values["config"].value is None:
      raise ValueError(f"unknown arguments: {' '.join(rest)}" if rest else "--config is missing; e.g. --config=configs/medium.py")
    config_lib.check(config.value)
    for target in targets.value:
      check_target(target)
    if not all(re.fullmatch(r"[1-9]\d*", size) for size in sizes.value):
      raise ValueError(f"--batch_size={','.join(sizes.value)}: give numbers from 1, e.g. 32,512.")
    reports = []
    for target in targets.value:
      for size in [int(size) for size in sizes.value] or [config.value.sample.batch_size]:
        print(f"{target}, batch {size} ...", flush=True)
        reports.append(measure_sampler(config.value, target, size))
  except (ValueError, ImportError, OSError, flags.Error) as e:
    sys.exit("error: " + " ".join(str(e).split()))
  print(table(reports))
  if any(r.error or any(m.error and "RESOURCE_EXHAUSTED" not in m.error for m in r.programs) for r in reports):
    sys.exit(1)


if __name__ == "__main__":
  main(sys.argv)
