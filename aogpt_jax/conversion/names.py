"""The parameters of the PyTorch models by name, and the same as a tree of this project.

Xue et al. (arXiv 2506.19935) have two models: AO-GPT, told its targets by adaLN, and sigma-GPT, told them at its input. A list of
`Parameter` is in the order of their model.parameters(), by which moving averages and optimiser states are kept.
"""

from collections.abc import Callable, Iterator
import dataclasses
import math
from typing import Any

from flax import traverse_util
import ml_collections
import numpy as np

# The fields of config.model by which the two differ.
KINDS = {
    "AO-GPT": dict(target="adaln", norm="rms", qk_norm=True, tied_head=False, bias=True),
    "sigma-GPT": dict(target="input", norm="layer", qk_norm=False, tied_head=True),
}
# The only width of conditioning that the PyTorch code has.
COND_WIDTH = 128
# In a state dict, a tied head is the token table once more; it is no parameter of its own.
TABLE, HEAD = "transformer.wte.weight", "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Parameter:
  """One of theirs.

  Attributes:
    name: in a state dict.
    shape: there; a Linear weight is [out, in].
    path: of ours, e.g. "blocks/attention/qkv/kernel".
    layer: the row of ours that it is; -1 where ours is not stacked.
    features: of a Linear, what ours has for out; () where both have one shape.
  """

  name: str
  shape: tuple[int, ...]
  path: str
  layer: int = -1
  features: tuple[int, ...] = ()

  def to_ours(self, x: np.ndarray) -> np.ndarray:
    return x.T.reshape(*self.shape[1:], *self.features) if self.features else x

  def to_theirs(self, x: np.ndarray) -> np.ndarray:
    return x.reshape(*self.shape[1:], -1).T if self.features else x

  @property
  def decays(self) -> bool:
    """Whether the PyTorch code's AdamW decays it, which goes by dimensions."""
    return len(self.shape) >= 2


def parameters(model: ml_collections.ConfigDict) -> list[Parameter]:
  """Of the PyTorch model that config.model describes, in the order of its parameters()."""
  width, heads, bias = model.width, model.heads, model.bias
  adaln = model.target == "adaln"

  def dense(name, path, inputs, *features, layer=-1) -> Iterator[Parameter]:
    out = math.prod(features)
    yield Parameter(f"{name}.weight", (out, inputs), f"{path}/kernel", layer, features)
    if bias:
      yield Parameter(f"{name}.bias", (out,), f"{path}/bias", layer, features)

  def norm(name, path, size=width, layer=-1) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (size,), f"{path}/scale", layer)
    if bias and model.norm == "layer":
      yield Parameter(f"{name}.bias", (size,), f"{path}/bias", layer)

  def table(name, path, *shape) -> Parameter:
    return Parameter(f"transformer.{name}.weight", shape, f"{path}/embedding")

  def block(i) -> Iterator[Parameter]:
    h = f"transformer.h.{i}"
    yield from norm(f"{h}.ln_1", "blocks/norm1", layer=i)
    yield from dense(f"{h}.attn.c_attn", "blocks/attention/qkv", width, 3, heads, width // heads, layer=i)
    yield from dense(f"{h}.attn.c_proj", "blocks/attention/out", width, width, layer=i)
    for name in ("q_norm", "k_norm") if model.qk_norm else ():
      yield Parameter(f"{h}.attn.{name}.weight", (width // heads,), f"blocks/attention/{name}/scale", i)
    yield from norm(f"{h}.ln_2", "blocks/norm2", layer=i)
    yield from dense(f"{h}.mlp.c_fc", "blocks/mlp/fc", width, 4 * width, layer=i)
    yield from dense(f"{h}.mlp.c_proj", "blocks/mlp/out", 4 * width, width, layer=i)
    if adaln:
      yield from dense(f"{h}.adaLN.1", "blocks/modulation/dense", model.cond_width, 6, width, layer=i)

  found = [table("wte", "tokens", model.vocab_size, width), table("wpe", "positions", model.block_size + 1, width),
           table("wtpe", "targets", model.block_size, model.cond_width if adaln else width), table("wnonee", "start", 1, width)]
  for i in range(model.layers):
    found += block(i)
  if not adaln:
    return found + [*norm("transformer.ln_f", "final_norm")]
  return found + [
      *norm("transformer.final_layer.ln_f", "final_norm"),
      *dense("transformer.final_layer.adaLN_final.1", "final_modulation/dense", model.cond_width, 2, width),
      *dense("lm_head", "head", width, model.vocab_size)]


def to_tree(model: ml_collections.ConfigDict, get: Callable[[str], np.ndarray]) -> Any:
  """Our tree of the parameters that `get` gives by name; what need not be stacked or cast stays a view."""
  flat: dict[str, np.ndarray] = {}
  for p in parameters(model):
    x = p.to_ours(get(p.name))
    if p.layer < 0:
      flat[p.path] = x
    else:
      if p.path not in flat:
        flat[p.path] = np.empty((model.layers, *x.shape), x.dtype)
      flat[p.path][p.layer] = x
  return traverse_util.unflatten_dict(flat, sep="/")


def to_state(model: ml_collections.ConfigDict, tree: Any) -> dict[str, np.ndarray]:
  """Inverse of `to_tree`: the parameters of a tree by name, in their order, contiguous."""
  flat = {path: np.asarray(x) for path, x in traverse_util.flatten_dict(tree, sep="/").items()}
  get = lambda p: flat[p.path] if p.layer < 0 else flat[p.path][p.layer]
  return {p.name: np.ascontiguousarray(p.to_theirs(get(p))) for p in parameters(model)}
