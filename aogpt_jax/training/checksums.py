"""A checksum of each array of a state, which does not depend on how the array is spread over devices and processes.

Each element's bits, as a word of 32, are mixed with the element's number in the whole array by MurmurHash3's finaliser (Appleby,
2011), and the mixed words are summed modulo 2^32. Sums of integers do not depend on their order: each device sums its part where
it lies, and one word goes to the host.

To mix is one to one: whatever happens to one element, a flipped bit or all of them, changes the sum. Other damage stays unseen
with a chance of about 2^-32 for each array that it has met. It is no protection against somebody who wants to deceive.
"""

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np

# Arrays of no more bytes, of which this process has all, are done by numpy: a program for each shape takes longer to compile.
_SMALL = 1 << 20


def names(tree: Any) -> dict[str, Any]:
  """The leaves of a tree by their paths, such as "params/blocks/mlp/fc/kernel"."""
  return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def compute(tree: Any) -> dict[str, str]:
  """The checksums of a tree's arrays by their paths, 8 hexadecimal digits each.

  Arrays have at most 32 bits an element. All processes that have a part of one call it together.
  """
  return {name: f"{int(x):08x}" for name, x in _of_each(tree, _sum).items()}


def not_finite(tree: Any) -> list[str]:
  """The paths of those arrays of a tree that hold an infinity or what is no number; called as `compute`."""
  return [name for name, x in _of_each(tree, _has_bad).items() if x]


def _of_each(tree: Any, function: Callable[[Any, Any], Any]) -> dict[str, np.ndarray]:
  """A scalar function, of numpy or jax.numpy and an array, for each array of a tree by its path."""

  def start(x: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    if x.nbytes <= _SMALL and (not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated):
      return function(np, np.atleast_1d(x))  # scalars of numpy would warn of each overflow
    where = NamedSharding(x.sharding.mesh, P()) if isinstance(x.sharding, NamedSharding) else x.sharding
    return _program(function, where)(x)

  return jax.device_get({name: start(x) for name, x in names(tree).items()})


@functools.lru_cache
def _program(function: Callable[[Any, Any], Any], where: jax.sharding.Sharding) -> Any:
  return jax.jit(functools.partial(function, jnp), out_shardings=where)


def _sum(xp: Any, x: Any) -> Any:
  """uint32."""
  u32, word = xp.uint32, f"uint{8 * x.dtype.itemsize}"
  numbers = u32(0)
  for axis, size in enumerate(x.shape):
    stride = math.prod(x.shape[axis + 1:]) % 2**32
    numbers = numbers + (xp.arange(size, dtype=u32) * u32(stride)).reshape(-1, *[1] * (x.ndim - axis - 1))
  if xp is np:
    bits = np.ascontiguousarray(x).view(word)
  else:
    bits = x.astype(word) if x.dtype == bool else jax.lax.bitcast_convert_type(x, word)
  h = bits.astype(u32) ^ (numbers * xp.full((), 0x9E3779B1, u32))  # odd: one to one too
  h = (h ^ (h >> u32(16))) * u32(0x85EBCA6B)
  h = (h ^ (h >> u32(13))) * u32(0xC2B2AE35)
  h = h ^ (h >> u32(16))
  if xp is not np:
    # Of one loop for all, XLA makes no vector instructions on a CPU.
    h = jax.lax.platform_dependent(h, cpu=jax.lax.optimization_barrier, default=lambda h: h)
  return xp.sum(h, dtype=u32)


def _has_bad(xp: Any, x: Any) -> Any:
  """bool."""
  return ~xp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.inexact) else xp.zeros((), bool)
