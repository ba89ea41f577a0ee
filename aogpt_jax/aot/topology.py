"""TPU slices by name: what their chips can do, and their devices without the hardware."""

from collections.abc import Sequence
import dataclasses
import importlib.util
import re

import jax
from jax.experimental import topologies

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
  """A TPU chip, which is one device to JAX; its peak of FLOPs is in training/flops.py.

  Attributes:
    config_name: libtpu's name of the configuration in which it is one device.
    memory: bytes of HBM that programs can use, as the compiler says.
    memory_bandwidth: of HBM, in bytes per second.
    link_bandwidth: of all links to other chips together, one way, in bytes per second.
  """

  config_name: str
  memory: int
  memory_bandwidth: float
  link_bandwidth: float


# Bandwidths: Google Cloud's pages on each TPU (cloud.google.com/tpu/docs/v4, v5e, v5p and v6e, read in 2026). Of the links they
# give both ways together, 400, 1200 and 800 GB/s, of which half is here; of v4 the all-reduce bandwidth of a pod, 1.1 PB/s over its
# 4096 chips, which is one way: the same is half of the others' links.
CHIPS = {
    "v4": Chip("megacore", int(30.75 * GIB), 1200e9, 1.1e15 / 4096),
    "v5e": Chip("default", int(15.75 * GIB), 819e9, 200e9),
    "v5p": Chip("default", int(95.73 * GIB), 2765e9, 600e9),
    "v6e": Chip("default", int(31.24 * GIB), 1638e9, 400e9),
}
CUDA = "cuda"  # lowered, not compiled: the compiler for a GPU needs one


def check(name: str) -> None:
  """Raises ValueError for a topology that is not known, ImportError where its compiler is not installed."""
  if name == CUDA:
    return
  if not re.fullmatch(rf"({'|'.join(CHIPS)}):[1-9]\d*(x[1-9]\d*)+", name):
    raise ValueError(f"topology {name!r} is not known; give a TPU and its slice, as v5e:1x1, v5e:4x4 or v5p:2x2x1 "
                     f"({', '.join(CHIPS)}), or cuda.")
  if importlib.util.find_spec("libtpu") is None:
    raise ImportError(f"topology {name} needs the TPU compiler: pip install 'aogpt_jax[aot]'")


def chip(name: str) -> Chip | None:
  """What a topology is made of; None for cuda, which is any GPU."""
  return CHIPS.get(name.split(":")[0])


def devices(name: str) -> Sequence[jax.Device]:
  """The devices of a topology; of cuda one that stands for them, since lowering reads of it no more than that it is one."""
  if name == CUDA:
    return jax.devices()[:1]
  # Hosts have 2 x 2 chips, or those that there are.
  bounds = [min(2, int(n)) for n in name.split(":")[1].split("x")[:2]] + [1]
  return topologies.get_topology_desc(
      platform="tpu", topology_name=name, chip_config_name=chip(name).config_name, chips_per_host_bounds=tuple(bounds),
      num_slices=1).devices
