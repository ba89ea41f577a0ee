"""One mesh for everything, and which array axis goes along which mesh axis.

Logical axes of the parameters, as the modules name them: layers, vocab, embed (the width D), position, condition,
modulation, qkv, heads, head_dim, mlp. The config maps them to the mesh axes data, fsdp and tensor; an axis without a
rule is not split. Batches are split along data and fsdp.
"""

from collections.abc import Sequence
import functools
import math
from typing import Any

from flax import linen as nn
import jax
import jax.extend
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
import ml_collections
import numpy as np

from aogpt_jax import config as config_lib

MESH_AXES = ("data", "fsdp", "tensor")
LOGICAL_AXES = ("layers", "vocab", "embed", "position", "condition", "modulation", "qkv", "heads", "head_dim", "mlp")
_SPLIT_IN_USE = ("heads", "mlp", "vocab")


def make_mesh(config: ml_collections.ConfigDict, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """The mesh of `config.mesh`; a single device is a mesh of one.

  Args:
    config: a checked config.
    devices: what it is made of, which need not be there; None: all devices.

  Raises:
    ValueError: the axes' product is not the number of devices, or an axis does not divide what is split along it.
  """
  devices = jax.devices() if devices is None else devices
  sizes = _sizes(config, len(devices))
  _check_model(config, dict(zip(MESH_AXES, sizes)), len(devices))
  return jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=devices)


def _sizes(config: ml_collections.ConfigDict, devices: int) -> list[int]:
  """How many devices are along each of MESH_AXES."""
  given = {axis: config.mesh[axis] for axis in MESH_AXES}
  preset = config.mesh.preset
  sizes = list(config_lib.MESH_PRESETS.get(preset, given.values()))
  if preset == "fsdp_tp":
    sizes[2] = min(given["tensor"] if given["tensor"] > 1 else sizes[2], devices)
  named = math.prod(n for n in sizes if n != -1)
  sizes = [max(1, devices // named) if n == -1 else n for n in sizes]
  if math.prod(sizes) != devices:
    asked = f"preset={preset} with tensor={sizes[2]}" if preset else " x ".join(f"{a}={n}" for a, n in given.items())
    raise ValueError(f"config.mesh: {asked} does not make {devices} devices; "
                     "set one of data, fsdp and tensor to -1 and the others to numbers whose product divides that.")
  return sizes


def _check_model(config: ml_collections.ConfigDict, mesh: dict[str, int], devices: int) -> None:
  """Raises ValueError where a mesh axis does not divide the part of the model that the rules split along it."""
  m = config.model
  split = {"heads": ("config.model.heads", m.heads), "vocab": ("config.model.vocab_size", m.vocab_size),
           "embed": ("config.model.width", m.width), "mlp": ("4 x config.model.width", 4 * m.width)}
  for axis in MESH_AXES:
    parts = [split[logical] for logical, mesh_axis in _checked(config.sharding_rules) if mesh_axis == axis and logical in split]
    for name, size in parts:
      if size % mesh[axis]:
        fitting = [n for n in range(1, devices + 1) if not devices % n and not any(size % n for _, size in parts)]
        raise ValueError(f"config.mesh.{axis}: {mesh[axis]} does not divide {name} = {size}; of {devices} devices it can be "
                         f"{', '.join(map(str, fitting))}; or change {name.split(' x ')[-1]}.")


def check_batch(field: str, sequences: int, mesh: Mesh) -> None:
  """Raises ValueError where the sequences of `config.FIELD` can't be split evenly over the data and fsdp axes."""
  ways = mesh.shape["data"] * mesh.shape["fsdp"]
  if sequences % ways:
    raise ValueError(f"config.{field}: {sequences} sequences can't be split over the {ways} devices of data x fsdp; "
                     f"make it a multiple of {ways}.")


def parameter_shardings(boxed: Any, mesh: Mesh, rules: tuple[tuple[str, str], ...]) -> Any:
  """NamedShardings of a tree of parameters with logical axis names (abstract or not).

  Raises:
    ValueError: a rule with an unknown axis, or a mesh axis that does not divide a parameter's.
  """
  rules = [(logical, mesh_axis or None) for logical, mesh_axis in _checked(rules)]
  shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)

  def divides(path, x, sharding):
    for size, axis in zip(x.shape, sharding.spec):
      if axis is not None and size % mesh.shape[axis]:
        raise ValueError(f"config.mesh.{axis}: {mesh.shape[axis]} does not divide the {size} rows of parameter "
                         f"{jax.tree_util.keystr(path, simple=True, separator='/')} {x.shape}; choose a number that does.")

  jax.tree_util.tree_map_with_path(divides, nn.unbox(boxed), shardings)
  return shardings


def _checked(rules: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
  """The rules; raises ValueError where one names an unknown axis."""
  for logical, mesh_axis in rules:
    if logical not in LOGICAL_AXES or mesh_axis not in (*MESH_AXES, ""):
      raise ValueError(f"config.sharding_rules: ({logical!r}, {mesh_axis!r}) names an unknown axis; the logical axes are "
                       f"{', '.join(LOGICAL_AXES)}, the mesh axes {', '.join(MESH_AXES)}.")
  return rules


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """[B, ...], split over the rows."""
  return NamedSharding(mesh, P(("data", "fsdp")))


def on_mesh(mesh: Mesh):
  """A context in which a jitted function is traced, for `keep_batch_split`, `gather` and `keep_whole`."""
  return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def keep_batch_split(x: Any) -> Any:
  """Ties activations [B, ...] to the devices of their rows; without it, XLA follows the parameters and moves activations.

  Outside of `on_mesh` it does nothing.
  """
  return jax.lax.with_sharding_constraint(x, P(("data", "fsdp"))) if _axis_sizes() else x


def gather(x: jax.Array, axes: Sequence[str]) -> jax.Array:
  """A parameter with these logical axes as it is used: whole, but for the axes that the results of a matmul keep or sum over.

  Where the batch and the parameters are split along the same devices, one of the two has to be moved; without it, XLA may choose
  the activations. Outside of `on_mesh` it does nothing.
  """
  return _gather(_in_use(axes), x) if _axis_sizes() else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(spec: P, x: jax.Array) -> jax.Array:
  return jax.lax.with_sharding_constraint(x, spec)


# The gradient is tied to nothing: it is to be summed right into the parts of the parameter, and not whole.
_gather.defvjp(lambda spec, x: (_gather(spec, x), None), lambda spec, _, g: (g,))


def is_no_gather(prim: jax.extend.core.Primitive, *_: Any, **params: Any) -> bool:
  """A policy of rematerialisation: all is saved but gathered parameters, which are gathered again.

  Saved, those of all layers would be the whole model on each device.
  """
  inner = params["call_jaxpr"].eqns if prim.name == "custom_vjp_call" else ()
  return [e.primitive.name for e in inner] != ["sharding_constraint"]


def look_up(table: jax.Array, ids: jax.Array, axes: Sequence[str], dtype: Any) -> jax.Array:
  """Rows of a parameter with these logical axes, in `dtype`, [..., width] for ids [...]; their gradients are summed in float32."""
  return _look_up(_in_use(axes), jnp.dtype(dtype), jax.ShapeDtypeStruct(table.shape, table.dtype), table, ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _look_up(spec: P, dtype: jnp.dtype, whole: jax.ShapeDtypeStruct, table: jax.Array, ids: jax.Array) -> jax.Array:
  del whole
  table = table.astype(dtype)
  return (_gather(spec, table) if _axis_sizes() else table)[ids]


def _add_up(spec: P, dtype: jnp.dtype, whole: jax.ShapeDtypeStruct, ids: jax.Array, g: jax.Array) -> tuple[jax.Array, None]:
  del dtype
  total = jnp.zeros(whole.shape, jnp.float32).at[ids].add(g.astype(jnp.float32))
  # Each device adds up its own rows of the batch: else they would be sent to where the parts of the table are.
  total = jax.lax.with_sharding_constraint(total, spec) if _axis_sizes() else total
  return total.astype(whole.dtype), None


_look_up.defvjp(lambda spec, dtype, whole, table, ids: (_look_up(spec, dtype, whole, table, ids), ids), _add_up)


def _in_use(axes: Sequence[str]) -> P:
  return P(*(P.UNCONSTRAINED if axis in _SPLIT_IN_USE else None for axis in axes))


def splits_parameters() -> bool:
  """Whether what is traced runs on a mesh that splits parameters which `gather` makes whole."""
  return _axis_sizes().get("fsdp", 1) > 1


def keep_whole(x: Any) -> Any:
  """Ties a tree of arrays that are looked up row by row to be whole on each device; else the rows looked for are sent around.

  Outside of `on_mesh` it does nothing.
  """
  return jax.lax.with_sharding_constraint(x, P()) if _axis_sizes() else x


def _axis_sizes() -> dict[str, int]:
  """Axis -> devices of the mesh of `on_mesh`; nothing outside of it."""
  mesh = jax.sharding.get_abstract_mesh()
  return dict(mesh.shape) if "fsdp" in mesh.axis_names else {}


def heads_sharding(mesh: Mesh, heads: int) -> NamedSharding:
  """[B, H, ...], split over the rows and, where tensor divides them, over the heads."""
  return NamedSharding(mesh, P(("data", "fsdp"), "tensor" if heads % mesh.shape["tensor"] == 0 else None))


def mesh_of(params: Any) -> Mesh:
  """The mesh that parameters are on; a mesh of one, where they are on one device.

  Raises:
    ValueError: they are on a mesh with other axes.
  """
  leaf = jax.tree.leaves(params)[0]
  where = leaf.sharding if isinstance(leaf, jax.Array) else None
  if isinstance(where, NamedSharding):
    if where.mesh.axis_names != MESH_AXES:
      raise ValueError(f"the parameters are on a mesh of {where.mesh.axis_names}; use one of {MESH_AXES}, as from make_mesh.")
    return where.mesh
  device, *others = where.device_set if where is not None else [jax.local_devices()[0]]
  if others:
    raise ValueError(f"the parameters are on {len(others) + 1} devices without a mesh; load them on one from make_mesh.")
  return Mesh(np.array(device).reshape(1, 1, 1), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, P())
