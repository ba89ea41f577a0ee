"""One mesh for everything, and which array axis goes along which mesh axis.

Logical axes of the parameters, as the modules name them: layers, vocab, embed (the width D), position, condition,
modulation, qkv, heads, head_dim, mlp. The config maps them to the mesh axes data, fsdp and tensor; an axis without a
rule is not split. Batches are split along data and fsdp.
"""

from typing import Any

from flax import linen as nn
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
import ml_collections
import numpy as np

MESH_AXES = ("data", "fsdp", "tensor")
LOGICAL_AXES = ("layers", "vocab", "embed", "position", "condition", "modulation", "qkv", "heads", "head_dim", "mlp")


def make_mesh(config: ml_collections.ConfigDict) -> Mesh:
  """The mesh of `config.mesh` over all devices; a single device is a mesh of one.

  Raises:
    ValueError: the axes' product is not the number of devices, or does not divide what is split along them.
  """
  sizes = [config.mesh[axis] for axis in MESH_AXES]
  devices = jax.device_count()
  if sizes[0] == -1:
    sizes[0] = max(1, devices // (sizes[1] * sizes[2]))
  if np.prod(sizes) != devices:
    given = " x ".join(f"{a}={config.mesh[a]}" for a in MESH_AXES)
    raise ValueError(f"config.mesh: {given} does not make the {devices} devices that there are; "
                     "set config.mesh.data to -1 and fsdp and tensor to numbers whose product divides that.")
  ways = sizes[0] * sizes[1]
  micro_batch = config.batch_size // config.micro_batches
  for field, size in (("batch_size / micro_batches", micro_batch), ("eval.batch_size", config.eval.batch_size)):
    if size % ways:
      raise ValueError(f"config.{field}: {size} sequences can't be split over the {ways} devices of data x fsdp; "
                       f"make it a multiple of {ways}.")
  return jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def parameter_shardings(boxed: Any, mesh: Mesh, rules: tuple[tuple[str, str], ...]) -> Any:
  """NamedShardings of a tree of parameters with logical axis names (abstract or not).

  Raises:
    ValueError: a rule with an unknown axis, or a mesh axis that does not divide a parameter's.
  """
  for logical, mesh_axis in rules:
    if logical not in LOGICAL_AXES or mesh_axis not in (*MESH_AXES, ""):
      raise ValueError(f"config.sharding_rules: ({logical!r}, {mesh_axis!r}) names an unknown axis; the logical axes are "
                       f"{', '.join(LOGICAL_AXES)}, the mesh axes {', '.join(MESH_AXES)}.")
  rules = [(logical, mesh_axis or None) for logical, mesh_axis in rules]
  shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)

  def divides(path, x, sharding):
    for size, axis in zip(x.shape, sharding.spec):
      if axis is not None and size % mesh.shape[axis]:
        raise ValueError(f"config.mesh.{axis}: {mesh.shape[axis]} does not divide the {size} rows of parameter "
                         f"{jax.tree_util.keystr(path, simple=True, separator='/')} {x.shape}; choose a number that does.")

  jax.tree_util.tree_map_with_path(divides, nn.unbox(boxed), shardings)
  return shardings


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """[B, ...], split over the rows."""
  return NamedSharding(mesh, P(("data", "fsdp")))


def local_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
  """Which of the rows of a batch are on this process's devices, ascending.

  A mesh may spread a process over the batch, and where tensor reaches beyond it, several processes have the same rows.
  """
  indices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
  return np.unique(np.concatenate([np.arange(batch_size)[rows] for rows, in indices]))


def place_batch(mesh: Mesh, local: np.ndarray) -> jax.Array:
  """A batch [G, ...], split over the rows, of what each process has of it: [b, ...], its `local_rows`."""
  ways = mesh.shape["data"] * mesh.shape["fsdp"]
  batch_size = len(local) * ways // len(local_rows(mesh, ways))
  numbers = local_rows(mesh, batch_size)
  part = lambda index: local[np.searchsorted(numbers, np.arange(batch_size)[index[0]])]
  return jax.make_array_from_callback((batch_size, *local.shape[1:]), batch_sharding(mesh), part)


def on_mesh(mesh: Mesh):
  """A context in which a jitted function is traced, for `keep_batch_split`."""
  return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def keep_batch_split(x: Any) -> Any:
  """Ties activations [B, ...] to the devices of their rows; without it, XLA follows the parameters and moves activations.

  Outside of `on_mesh` it does nothing.
  """
  if "fsdp" not in jax.sharding.get_abstract_mesh().axis_names:
    return x
  return jax.lax.with_sharding_constraint(x, P(("data", "fsdp")))


def keep_whole(x: Any) -> Any:
  """Ties a tree of arrays that are looked up row by row to be whole on each device; else the rows looked for are sent around.

  Outside of `on_mesh` it does nothing.
  """
  return x if "fsdp" not in jax.sharding.get_abstract_mesh().axis_names else jax.lax.with_sharding_constraint(x, P())


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
