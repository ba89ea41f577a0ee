"""GPT-2's weights as the start of a decoder.

The decoder's entries in left-to-right order are GPT-2's after <|endoftext|>: the start embedding is that token's row, and the token
at position p has row p + 1 of the positions in both. What tells the decoder its target starts at nothing: adaLN with kernels at 0
and gates at 1, added tables at 0. With norm=layer the rest is a copy. With norm=rms, what writes to the residual stream (tables and
output projections) loses its mean over the width, so that the root mean square is the standard deviation, and a norm's bias goes
through the Dense behind it. With qk_norm=False and activation=gelu_tanh the logits are then GPT-2's. The defaults of these two make
another function of the same weights: close, not equal.
"""

from collections.abc import Iterator
from typing import Any

from flax import traverse_util
import ml_collections
import numpy as np

from aogpt_jax.models import decoder
from aogpt_jax.models import gpt2

_EPS = 1e-5  # of the decoder's norms
_NEVER = -1e4  # logit of rows that are no tokens; GPT-2's logits may all be far below 0


def problems(theirs: gpt2.GPT2, config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields what keeps a config's model from starting at this GPT-2, each naming field, value and fix."""
  m = config.model
  if m.architecture != "decoder":
    yield f"config.model.architecture: {m.architecture} can't start from GPT-2, which is causal; set it to decoder."
  for field in ("layers", "width", "heads"):
    if m[field] != getattr(theirs, field):
      yield f"config.model.{field}: {m[field]} is not that of this GPT-2; set it to {getattr(theirs, field)}."
  if m.block_size > theirs.block_size:
    yield (f"config.model.block_size: {m.block_size} is above the positions of this GPT-2; set it to {theirs.block_size} or "
           "less.")
  if m.vocab_size < theirs.vocab_size or m.tied_head and m.vocab_size != theirs.vocab_size:
    more = " exactly: a tied head has no bias that could keep other rows from being predicted" if m.tied_head else " or more"
    yield f"config.model.vocab_size: {m.vocab_size} does not fit this GPT-2; set it to {theirs.vocab_size}{more}."
  if not m.bias:
    yield "config.model.bias: is False, and GPT-2 has biases; set it to True."
  if m.tied_head and m.norm == "rms":
    yield ("config.model.tied_head: True has no place for the bias of GPT-2's last norm with config.model.norm = rms; set it to "
           "False, or config.model.norm to layer.")
  if theirs.eps != _EPS:
    yield (f"config.init_from: the norms of this GPT-2 have an epsilon of {theirs.eps}, and the decoder's {_EPS}; give another "
           "one.")


def parameters(theirs: gpt2.GPT2, params: Any, ours: decoder.Decoder, shapes: Any, boundary_id: int) -> dict[str, np.ndarray]:
  """The decoder's parameters that GPT-2 gives.

  Args:
    theirs: a GPT-2 without `problems`.
    params: its parameters, on the host.
    ours: the decoder.
    shapes: of the decoder's parameters, a tree of what has a shape and a dtype.
    boundary_id: of <|endoftext|>.

  Returns:
    Path, such as "blocks/mlp/fc/kernel" -> array of the parameter's shape and dtype. The table of adaLN's targets is not among
    them, and stays as it is initialised.
  """
  shapes = traverse_util.flatten_dict(shapes, sep="/")
  p = {name: np.asarray(x, np.float64) for name, x in traverse_util.flatten_dict(params, sep="/").items()}
  rms = ours.norm == "rms"
  head_dim = ours.width // ours.heads
  centred = lambda x: x - x.mean(axis=-1, keepdims=True) if rms else x

  tokens, positions = p["tokens/embedding"], p["positions/embedding"]
  rows = np.minimum(np.arange(ours.block_size + 1), theirs.block_size - 1)  # the last row has no counterpart, and its neighbour's
  flat = {
      "tokens/embedding": _padded(centred(tokens), ours.vocab_size),
      "positions/embedding": centred(positions[rows]),
      "start/embedding": centred(tokens[boundary_id][None]),
      "blocks/attention/out/kernel": centred(p["blocks/attention_out/kernel"]),
      "blocks/attention/out/bias": centred(p["blocks/attention_out/bias"]),
      "blocks/mlp/out/kernel": centred(p["blocks/mlp_out/kernel"]),
      "blocks/mlp/out/bias": centred(p["blocks/mlp_out/bias"]),
      "final_norm/scale": p["norm/scale"],
  }
  reads = {"blocks/attention/qkv": ("blocks/norm1", p["blocks/qkv/kernel"], p["blocks/qkv/bias"]),
           "blocks/mlp/fc": ("blocks/norm2", p["blocks/fc/kernel"], p["blocks/fc/bias"]),
           "head": ("norm", tokens.T, np.zeros(theirs.vocab_size))}
  for name, (norm, kernel, bias) in reads.items():
    flat[f"{name}/kernel"] = kernel
    flat[f"{name}/bias"] = bias + np.einsum("...d,...df->...f", p[f"{norm}/bias"], kernel) if rms else bias
  for name, norm in (("blocks/norm1", "blocks/norm1"), ("blocks/norm2", "blocks/norm2"), ("final_norm", "norm")):
    flat[f"{name}/scale"] = p[f"{norm}/scale"]
    if not rms:
      flat[f"{name}/bias"] = p[f"{norm}/bias"]
  if ours.tied_head:
    del flat["head/kernel"], flat["head/bias"]
  else:
    flat["head/kernel"] = _padded(flat["head/kernel"].T, ours.vocab_size).T
    flat["head/bias"] = _padded(flat["head/bias"], ours.vocab_size, _NEVER)
  if ours.qk_norm:
    # Their size for entries that a norm leaves with independent coordinates, so that attention starts about as sharp as GPT-2's.
    kernel = flat["blocks/attention/qkv/kernel"] * flat["blocks/norm1/scale"][..., None]
    size = np.square(kernel).sum(axis=1) + np.square(flat["blocks/attention/qkv/bias"])
    for i, name in enumerate(("q_norm", "k_norm")):
      of_layer = np.sqrt(size.reshape(ours.layers, 3, -1)[:, i].mean(axis=1))
      flat[f"blocks/attention/{name}/scale"] = np.repeat(of_layer[:, None], head_dim, axis=1)
  if ours.target == "adaln":
    for name, parts in (("blocks/modulation/dense", (ours.layers, 6, ours.width)), ("final_modulation/dense", (2, ours.width))):
      flat[f"{name}/kernel"] = np.zeros(shapes[f"{name}/kernel"].shape)
      flat[f"{name}/bias"] = np.zeros(parts)
    flat["blocks/modulation/dense/bias"][:, [2, 5]] = 1.0
  else:
    name = "blocks/targets/embedding" if ours.target == "layer_distinct" else "targets/embedding"
    flat[name] = np.zeros(shapes[name].shape)
  return {name: x.reshape(shapes[name].shape).astype(shapes[name].dtype) for name, x in flat.items()}


def _padded(x: np.ndarray, rows: int, value: float = 0.0) -> np.ndarray:
  return np.concatenate([x, np.full((rows - len(x), *x.shape[1:]), value)])
