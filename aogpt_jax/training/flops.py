"""Floating-point operations of a training step, and what devices can do at most."""

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
  m = config.model
  weights = m.layers * 12 * m.width**2 + m.width * m.vocab_size
  attention = (6 if m.architecture == "decoder" else 12) * m.layers * m.block_size * m.width
  return 6 * weights + attention


def peak(device_kind: str) -> float | None:
  """Peak FLOP/s of a device in bfloat16, None where it is not known."""
  return next((flops for kind, flops in PEAK_FLOPS.items() if device_kind.startswith(kind)), None)
