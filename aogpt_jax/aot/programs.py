"""A run's programs, compiled for a topology in this process: the training step and the sampler.

They are those that a run jits. For a TPU, its compiler runs on the CPU (it comes with libtpu). For CUDA, whose compiler needs a GPU,
programs are lowered to StableHLO, and their memory is counted from the shapes of what they are given.
"""

from collections.abc import Iterator
import dataclasses
import math
import time
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import ml_collections
import numpy as np

from aogpt_jax import models
from aogpt_jax import sharding
from aogpt_jax.aot import hlo
from aogpt_jax.aot import roofline as roofline_lib
from aogpt_jax.aot import topology
from aogpt_jax.aot import traffic
from aogpt_jax.data import tokenizers
from aogpt_jax.sampling import decode
from aogpt_jax.sampling import filters as filters_lib
from aogpt_jax.sampling import plan as plan_lib
from aogpt_jax.training import flops
from aogpt_jax.training import step as step_lib


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
    beside: of what is kept meanwhile that is no argument of the program.
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
class Training:
  """What a training step needs on each device of a topology.

  Attributes:
    topology: its name.
    devices: how many it has.
    mesh: how many of them are along each axis.
    attention: the implementation that was chosen.
    micro_batches: of a step, one after another,
    sequences: of a micro-batch on each device.
    shapes: bytes on each device, counted from shapes: "parameters", "optimizer", "ema", "batch".
    program: the step.
    collectives: of a step; None where the compiled text can't be read,
    unread: and why.
    float32_products: matrix products of float32 operands in the compiled text.
    accessed: bytes that a step reads and writes in the memory of each device, by the compiled text,
    movements: and which of them are copies and transposes; of each, at least 0.1% of all.
    roofline: of a TPU.
    error: why there is no program, in a line.
  """

  topology: str
  micro_batches: int
  sequences: int = 0
  devices: int = 0
  mesh: dict[str, int] = dataclasses.field(default_factory=dict)
  attention: str = ""
  shapes: dict[str, int] = dataclasses.field(default_factory=dict)
  program: Memory | None = None
  collectives: tuple[hlo.Collective, ...] | None = None
  unread: str = ""
  float32_products: int | None = None
  accessed: int | None = None
  movements: tuple[traffic.Movement, ...] = ()
  roofline: roofline_lib.Roofline | None = None
  error: str = ""

  @property
  def fits(self) -> bool | None:
    """Whether the devices' memory is enough; None where that is not known."""
    return _fit(self.topology, self.error, (self.program,) if self.program else ())


@dataclasses.dataclass(frozen=True)
class Sampler:
  """What sampling a batch needs on each device of a topology.

  Attributes:
    topology: its name.
    batch_size: texts in all.
    devices: how many it has.
    shapes: bytes on each device, counted from shapes: "parameters", "prepared" (their copies for decoding), "cache", "logits".
    programs: in the order in which they are run.
    error: why there are no programs, in a line.
  """

  topology: str
  batch_size: int
  devices: int = 0
  shapes: dict[str, int] = dataclasses.field(default_factory=dict)
  programs: tuple[Memory, ...] = ()
  error: str = ""

  @property
  def fits(self) -> bool | None:
    """Whether the devices' memory is enough; None where that is not known."""
    return _fit(self.topology, self.error, self.programs)


def _fit(name: str, error: str, programs: tuple[Memory, ...]) -> bool | None:
  if error or name == topology.CUDA:
    return None
  if any(m.total > topology.chip(name).memory or "RESOURCE_EXHAUSTED" in m.error for m in programs):
    return False
  return None if any(m.error for m in programs) else True


def training(config: ml_collections.ConfigDict, name: str) -> Iterator[Training]:
  """Compiles the training step of a run, the one that `training/step.make_trainer` makes.

  Yields:
    What is known before, then all: the compiler may abort.
  """
  mesh = sharding.make_mesh(config, topology.devices(name))
  model = models.build_model(config, mesh)
  trainer = step_lib.make_trainer(config, model, mesh)
  tokens = jax.ShapeDtypeStruct((config.batch_size, config.model.block_size), jnp.int32, sharding=sharding.batch_sharding(mesh))
  state = trainer.shapes
  shapes = {"parameters": _bytes(state.params), "optimizer": _bytes(state.opt_state), "ema": _bytes(state.ema),
            "batch": _bytes(tokens)}
  report = Training(
      name, config.micro_batches, config.batch_size // config.micro_batches // (mesh.shape["data"] * mesh.shape["fsdp"]), mesh.size,
      dict(mesh.shape), model.backend.name, shapes)
  yield report
  traced = trainer.step.trace(state, tokens)
  held = sum(shapes.values()) - shapes["batch"]
  counted = dict(arguments=held + shapes["batch"], outputs=held, aliased=held)
  program, _, compiled = (_lower if name == topology.CUDA else _compile)("step", traced, None, counted)
  report = dataclasses.replace(report, program=program)
  if name == topology.CUDA:
    yield report
    return
  found = dict(unread="it was not compiled")
  if compiled is not None:
    try:
      text = compiled.as_text()
      moved, accessed = traffic.movements(text)
      found = dict(collectives=hlo.collectives(text, mesh.size), float32_products=hlo.float32_products(text), accessed=accessed,
                   movements=tuple(m for m in moved if m.bytes >= accessed / 1000))
    except (ValueError, jax.errors.JaxRuntimeError) as e:  # JAX 0.10.2 can't print programs for v5p and v6e
      found = dict(unread=line(e))
  estimate = roofline_lib.estimate(
      topology.chip(name), flops.peak(mesh.devices.flat[0].device_kind), mesh.size, mesh.shape["tensor"], flops.matmuls(traced.jaxpr),
      tuple(part * tokens.size for part in flops.parts_per_token(config)), config.model.architecture == "decoder", held,
      _bytes(state.params), config.micro_batches, jax.tree.leaves(state.params), found.get("collectives"))
  yield dataclasses.replace(report, roofline=estimate, **found)


def sampler(config: ml_collections.ConfigDict, name: str) -> Iterator[Sampler]:
  """Compiles what draws a batch of `config.sample` without a prompt: the programs at the end of a text, where the cache is longest.

  Yields:
    What is known before, then all.
  """
  mesh = sharding.make_mesh(config, topology.devices(name))
  build = _lower if name == topology.CUDA else _compile
  model, settings = models.build_model(config, mesh), config.sample
  batch_size = settings.batch_size
  params = _abstract_params(config, model, mesh)
  vocab_size = tokenizers.known_vocab_size(config.data.tokenizer) or model.vocab_size
  filters = filters_lib.Filters(vocab_size, temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k,
                                top_p_rule=settings.top_p_rule)
  length = settings.length or model.block_size
  orders = np.tile(np.arange(length), (batch_size, 1))
  plan = plan_lib.make_plan(orders, np.zeros(orders.shape, bool), settings.steps or length, counts=settings.counts,
                            schedule=settings.schedule, spaced=settings.spaced, rng=np.random.default_rng(settings.seed))

  shapes = {"parameters": _bytes(params)}
  yield Sampler(name, batch_size, mesh.size, shapes)
  prepare = decode.trace_prepare(model, mesh, params)
  prepared = jax.tree.map(lambda x: x.update(sharding=sharding.replicated(mesh)), prepare.out_info)
  first, prepared, _ = build("prepare", prepare, prepared, dict(arguments=shapes["parameters"], outputs=_bytes(prepared)))
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
  yield Sampler(name, batch_size, mesh.size, shapes, tuple(measured))


def _abstract_params(config: ml_collections.ConfigDict, model: nn.Module, mesh: Mesh) -> Any:
  """The parameters as ShapeDtypeStructs with the shardings of the config's rules."""
  boxed = jax.eval_shape(lambda: step_lib.init_params(model, config.seed))
  shardings = sharding.parameter_shardings(boxed, mesh, config.sharding_rules)
  return jax.tree.map(lambda x, s: x.update(sharding=s), nn.unbox(boxed), shardings)


def _bytes(tree: Any, where: Any = None) -> int:
  """Bytes on each device of arrays with a sharding, or with that which is given."""
  return sum(math.prod((where or x.sharding).shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _compile(
    name: str, traced: jax.stages.Traced, outputs: Any, counted: dict[str, int]
) -> tuple[Memory, Any, jax.stages.Compiled | None]:
  """What the program needs, its outputs with the shardings that the compiler chose, and itself.

  Where it does not compile, `counted` stands in.
  """
  begin = time.monotonic()
  try:
    compiled = traced.lower().compile()
  except jax.errors.JaxRuntimeError as e:
    return _count(name, counted, begin, line(e)), outputs, None
  memory = compiled.memory_analysis()
  outputs = outputs and jax.tree.map(lambda x, s: x.update(sharding=s), outputs, compiled.output_shardings)
  return Memory(
      program=name, arguments=memory.argument_size_in_bytes, outputs=memory.output_size_in_bytes,
      aliased=memory.alias_size_in_bytes, temporaries=memory.temp_size_in_bytes, code=memory.generated_code_size_in_bytes,
      beside=counted.get("beside", 0), seconds=time.monotonic() - begin, compiled=True), outputs, compiled


def _lower(name: str, traced: jax.stages.Traced, outputs: Any, counted: dict[str, int]) -> tuple[Memory, Any, None]:
  begin = time.monotonic()
  traced.lower(lowering_platforms=("cuda",))
  return _count(name, counted, begin), outputs, None


def _count(name: str, counted: dict[str, int], begin: float, error: str = "") -> Memory:
  """What is known of a program's memory from the shapes of what it is given and returns."""
  nothing = dict(arguments=0, outputs=0, aliased=0, temporaries=0, code=0, beside=0)
  return Memory(program=name, **nothing | counted, seconds=time.monotonic() - begin, compiled=False, error=error)


def line(e: Exception) -> str:
  """What an exception says, in one line."""
  return " ".join(str(e).partition("\nSee https://")[0].split())[:300]
