"""Floating-point operations of a training step, by formula and as its program has them, and what devices can do at most."""

from collections.abc import Iterator
import collections
import dataclasses
import math
from typing import Any

import jax
import ml_collections

# Dense bfloat16 peak per device in FLOP/s, by the beginning of jax.Device.device_kind (vendors' data sheets).
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}


def per_token(config: ml_collections.ConfigDict) -> float:
  """Model FLOPs of forward and backward pass per token: 6 per matmul weight, and attention.

  Embedding look-ups count nothing, nor do the modulation tables, which are computed once per position and not per token;
  of a decoder's attention, the half of the scores counts that its mask leaves. Recomputation counts nothing.
  """
  return sum(parts_per_token(config))


def parts_per_token(config: ml_collections.ConfigDict) -> tuple[float, float]:
  """Those of the matmuls with weights, and those of attention."""
  m = config.model
  weights = m.layers * 12 * m.width**2 + m.width * m.vocab_size
  attention = (6 if m.architecture == "decoder" else 12) * m.layers * m.block_size * m.width
  return 6 * weights, attention


def peak(device_kind: str) -> float | None:
  """Peak FLOP/s of a device in bfloat16, None where it is not known."""
  return next((flops for kind, flops in PEAK_FLOPS.items() if device_kind.startswith(kind)), None)


# Matrix products of a kernel of Splash attention, by a part of its name: of the scores and the outputs; in the backward pass of the
# scores again and of each gradient, in two kernels.
_SPLASH_PRODUCTS = {"_fwd": 2, "_dq": 3, "_dkv": 4}


@dataclasses.dataclass(frozen=True)
class Matmul:
  """One matrix product of a program, or a kernel of attention.

  Attributes:
    kind: "weights"; "attention", whose products are batched over sequences and heads; or "kernel", of attention.
    flops: of one run; of a kernel, with all scores, masked or not.
    times: how often it runs in a step, counting the passes of loops.
    devices: that each run it on parts of their own, which the shapes are of; 1 where the shapes are of the whole.
    operands: shapes and dtypes of what it reads and returns.
    float32: whether it multiplies float32 operands, and is more than a sum of products of vectors.
  """

  kind: str
  flops: float
  times: int
  devices: int
  operands: tuple[tuple[tuple[int, ...], Any], ...]
  float32: bool


def matmuls(jaxpr: Any, times: int = 1, devices: int = 1) -> Iterator[Matmul]:
  """The matrix products of a program, from its jaxpr: what a compiler counts in a loop's body once is counted for each pass."""
  for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
    name, params = equation.primitive.name, equation.params
    arrays = tuple((v.aval.shape, v.aval.dtype) for v in (*equation.invars, *equation.outvars) if hasattr(v.aval, "dtype"))
    if name == "dot_general":
      (contracted, _), (batched, _) = params["dimension_numbers"]
      (left, dtype), (right, _), (out, _) = arrays
      summed = math.prod(left[i] for i in contracted)
      batch = math.prod(left[i] for i in batched)
      is_product = math.prod(left) > batch * summed or math.prod(right) > batch * summed
      yield Matmul("attention" if batched else "weights", 2.0 * math.prod(out) * summed, times, devices, arrays,
                   dtype == "float32" and is_product)
    elif name == "pallas_call":
      yield _splash(str(params.get("name_and_src_info", params.get("name", ""))), arrays, times, devices)
    elif name == "cond":
      yield from max((list(matmuls(branch, times, devices)) for branch in params["branches"]),
                     key=lambda found: sum(m.flops * m.times for m in found))
    else:
      passes = params["length"] if name == "scan" else 1
      inside = params["mesh"].size if name == "shard_map" else devices
      for value in jax.tree.leaves(list(params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
        if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
          yield from matmuls(value, times * passes, inside)


def _splash(name: str, arrays: tuple[tuple[tuple[int, ...], Any], ...], times: int, devices: int) -> Matmul:
  """A kernel of Splash attention; queries, keys and values are what it has most of one shape, [B, H, S, K], or [H, S, K] of one."""
  products = next((n for part, n in _SPLASH_PRODUCTS.items() if part in name), None)
  if products is None:
    raise NotImplementedError(f"the matrix products of the kernel {name} are not known.")
  (shape, _), _ = collections.Counter(a for a in arrays if len(a[0]) >= 3).most_common(1)[0]
  used = tuple(a for a in arrays if a[0] == shape)
  return Matmul("kernel", 2.0 * products * math.prod(shape) * shape[-2], times, devices, used, False)
