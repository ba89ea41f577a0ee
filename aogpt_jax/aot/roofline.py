"""The least time that a training step can take on a slice, and what bounds it.

Three times are computed as if each were all there is, and the largest is the step's at best:

* compute: the matrix products of the program, recomputation and attention's kernels included, at the devices' peak in bfloat16; of
  what is masked in causal attention, half of the scores, nothing counts;
* memory: every matrix product reads its operands from HBM and writes its result once, kernels of attention likewise; the state is
  read and written once in an update, and the gradient once in each micro-batch. What lies between is taken to be fused to these;
* communication: what collectives bring to each device, over all of its links at once, one way.
"""

from collections.abc import Iterable
import dataclasses
import math

import jax

from aogpt_jax.aot import hlo
from aogpt_jax.aot import topology
from aogpt_jax.training import flops


@dataclasses.dataclass(frozen=True)
class Roofline:
  """Seconds of a step, and the FLOPs that they come from.

  Attributes:
    compute: see above; so memory,
    communication: and this, None where the compiled text can't be read.
    peak: FLOP/s of all devices in bfloat16.
    formula_weights: FLOPs of a step by the formula of training/flops.py: of the matmuls with weights,
    formula_attention: and of attention.
    weights: the same counted in the program,
    attention: and this, without what causal masks leave out.
    float32: share of the counted FLOPs whose operands are float32 before XLA simplifies them.
  """

  compute: float
  memory: float
  communication: float | None
  peak: float
  formula_weights: float
  formula_attention: float
  weights: float
  attention: float
  float32: float

  @property
  def step(self) -> float:
    """Seconds of a step, at best."""
    return max(self.compute, self.memory, self.communication or 0.0)

  @property
  def utilisation(self) -> float:
    """Share of the peak that the model's FLOPs are in a step of that time: MFU, at best."""
    return (self.formula_weights + self.formula_attention) / self.step / self.peak


def estimate(
    chip: topology.Chip, peak: float, devices: int, tensor: int, products: Iterable[flops.Matmul], formula: tuple[float, float],
    causal: bool, state_bytes: int, gradient_bytes: int, micro_batches: int, parameters: Iterable[jax.ShapeDtypeStruct],
    collectives: Iterable[hlo.Collective] | None,
) -> Roofline:
  """The roofline of a training step.

  Args:
    chip: what the slice is made of.
    peak: FLOP/s of a chip in bfloat16.
    devices: of the slice.
    tensor: along how many of them parameters are split in use; along all others each has them whole when it multiplies.
    products: from `flops.matmuls`.
    formula: FLOPs of a step by `flops.parts_per_token`.
    causal: whether attention is.
    state_bytes: of parameters, optimiser and EMA on each device.
    gradient_bytes: likewise of the gradient.
    micro_batches: of a step.
    parameters: shapes of all.
    collectives: from `hlo.collectives`; None where they are not known.
  """
  whole = {size for x in parameters for size in (math.prod(x.shape), math.prod(x.shape[1:]))}
  counted = {"weights": 0.0, "attention": 0.0}
  float32 = traffic = 0.0
  for m in products:
    seen = m.flops * m.times * m.devices * (0.5 if causal and m.kind == "kernel" else 1.0)
    counted["weights" if m.kind == "weights" else "attention"] += seen
    float32 += seen if m.float32 else 0.0
    for shape, dtype in m.operands:
      share = 1 if m.devices > 1 else tensor if math.prod(shape) in whole and m.kind == "weights" else devices
      traffic += math.prod(shape) * dtype.itemsize * m.times / share
  total = sum(counted.values())
  traffic += 2 * state_bytes + 2 * micro_batches * gradient_bytes
  return Roofline(
      compute=total / devices / peak, peak=devices * peak, memory=traffic / chip.memory_bandwidth,
      communication=None if collectives is None else sum(c.bytes for c in collectives) / chip.link_bandwidth,
      formula_weights=formula[0], formula_attention=formula[1], float32=float32 / total, **counted)
