"""The any-order decoder: a causal transformer over entries in generation order.

Entry i holds what is known before step i: the start embedding for i = 0, else the token at orders[i-1] with its position.
It is told its target position orders[i], and its logits predict the token there (Xue et al., arXiv 2506.19935). How it is
told is `config.model.target`: by adaLN; by a row of a table that is added to the input (sigma-GPT, Pannatier et al., arXiv
2404.09562) or before every layer; or by rows of another table for each layer.

One set of weights, two ways to run: `__call__` takes all entries at once (training, scoring), `extend` takes entries
against a cache (sampling). Both run the same `Block`.
"""

from typing import Any

import flax
from flax import linen as nn
import jax
import jax.numpy as jnp

from aogpt_jax import attention
from aogpt_jax import sharding
from aogpt_jax.models import layers

# By `config.model.position_init`, and from what all other tables start from: what the tables of positions and targets that are
# added to entries start from, and that of the targets of adaLN. From random rows a model has to find out which positions are
# neighbours, pair by pair; sinusoids tell it, which shortens that for small models: the positions stand out from the tokens they
# are added to, and the targets reach the modulation at full size.
POSITION_INITS = {
    "normal": lambda normal: (normal, normal),
    "sinusoid": lambda normal: (layers.sinusoids(3 * layers.INIT_STD), layers.sinusoids(1.0)),
}


def _norm(kind: str, bias: bool, **kw: Any) -> nn.Module:
  return layers.LayerNorm("embed", bias=bias, **kw) if kind == "layer" else layers.RMSNorm("embed", **kw)


class Modulation(nn.Module):
  """adaLN: `parts` vectors of the model's width from a conditioning vector c, as Dense(SiLU(c))."""

  parts: int
  width: int
  dtype: Any
  param_dtype: Any
  gates: tuple[int, ...] = ()  # which of the parts are gates,
  gate_init: float = 0.0  # and what their biases start from
  bias: bool = True
  weight_init: str = "truncated_normal"

  @nn.compact
  def __call__(self, cond: jax.Array) -> list[jax.Array]:
    """`parts` arrays [..., D] from cond [..., C]."""

    def bias_init(key, shape, dtype):
      return jnp.zeros(shape, dtype).at[jnp.array(self.gates, int)].set(self.gate_init)

    modulation = layers.Dense(
        (self.parts, self.width), ("condition", "modulation", "embed"), bias=self.bias, bias_init=bias_init,
        weight_init=self.weight_init, dtype=self.dtype, param_dtype=self.param_dtype, name="dense",
    )(jax.nn.silu(cond))
    return [jnp.squeeze(x, -2) for x in jnp.split(modulation, self.parts, axis=-2)]


class Block(nn.Module):
  """Pre-norm transformer block, told the target position of each entry.

  With adaLN, that shifts and scales the norms and gates the branches; with layer_shared and layer_distinct, a row is added to the
  entries first; with input, the block knows nothing of it.
  """

  width: int
  heads: int
  num_layers: int
  gate_init: float
  dtype: Any
  param_dtype: Any
  causal: bool = True
  target: str = "adaln"
  norm: str = "rms"
  qk_norm: bool = True
  bias: bool = True
  weight_init: str = "truncated_normal"
  block_size: int = 0  # T, rows of the block's own table of targets where it has one,
  position_init: str = "normal"  # and what they start from
  backend: attention.Backend = attention.Backend()

  def setup(self):
    kw = dict(dtype=self.dtype, param_dtype=self.param_dtype)
    dense = dict(bias=self.bias, weight_init=self.weight_init, **kw)
    branch = dict(width=self.width, num_layers=self.num_layers, **dense)
    if self.target == "adaln":
      self.modulation = Modulation(6, self.width, gates=(2, 5), gate_init=self.gate_init, **dense)
    if self.target == "layer_distinct":
      init, _ = POSITION_INITS[self.position_init](layers.INITS[self.weight_init](layers.INIT_STD))
      self.targets = layers.Embed(self.block_size, self.width, ("position", "embed"), init=init, **kw)
    self.norm1 = _norm(self.norm, self.bias, **kw)
    self.attention = layers.Attention(
        heads=self.heads, causal=self.causal, qk_norm=self.qk_norm, backend=self.backend, **branch)
    self.norm2 = _norm(self.norm, self.bias, **kw)
    self.mlp = layers.MLP(**branch)

  def __call__(
      self, x_BSD: jax.Array, cond_TC: jax.Array | None, targets: jax.Array | None
  ) -> tuple[jax.Array, None]:
    """The entries [B, S, D] told the targets int [B, S], rows of cond; the None is what `nn.scan` wants.

    Without targets, cond is [S, C] or [B, S, C], a row for each entry.
    """
    # A row goes through the Dense once, not once per example: the modulation depends on the target position alone.
    rows = self.tables(cond_TC)
    if targets is not None:
      rows = [table[targets] for table in sharding.keep_whole(rows)]
    x_BSD, (shift1, scale1, gate1, *second) = self._tell(x_BSD, rows)
    h_BSD = self.attention(self.norm1(x_BSD) * (1 + scale1) + shift1)
    return self._mlp(x_BSD + gate1 * h_BSD, *second), None

  def tables(self, cond_TC: jax.Array | None) -> list[jax.Array]:
    """What every target tells, arrays [T, D]: the six of the modulation, the one whose rows are added, or none."""
    match self.target:
      case "adaln":
        return self.modulation(cond_TC)
      case "layer_shared":
        return [cond_TC]
      case "layer_distinct":
        return [self.targets.table()]
      case _:
        return []

  def extend(
      self, x_BSD: jax.Array, tables: list[jax.Array], targets: jax.Array, cache: layers.Cache, write: jax.Array,
      bias_B1ST: jax.Array, asked: jax.Array | None,
  ) -> tuple[jax.Array, layers.Cache]:
    """The same against a cache, with `tables` made before; see `layers.Attention.extend` for the other arguments."""
    x_BSD, (shift1, scale1, *others) = self._tell(x_BSD, [table[targets] for table in tables])
    h_BSD, cache = self.attention.extend(self.norm1(x_BSD) * (1 + scale1) + shift1, cache, write, bias_B1ST, asked)
    if asked is not None:
      x_BSD, *others = (jnp.take_along_axis(a, asked[..., None], axis=1) if jnp.ndim(a) else a for a in (x_BSD, *others))
    gate1, *second = others
    return self._mlp(x_BSD + gate1 * h_BSD, *second), cache

  def _tell(self, x_BSD: jax.Array, rows: list[jax.Array]) -> tuple[jax.Array, list[jax.Array | int]]:
    """The entries, and the shift, scale and gate of each branch: those that do nothing are plain numbers."""
    return (x_BSD, rows) if self.target == "adaln" else (sum(rows, x_BSD), [0, 0, 1] * 2)

  def _mlp(self, x_BSD: jax.Array, shift: jax.Array | int, scale: jax.Array | int, gate: jax.Array | int) -> jax.Array:
    return x_BSD + gate * self.mlp(self.norm2(x_BSD) * (1 + scale) + shift)


@flax.struct.dataclass
class Prepared:
  """Parameters as cached decoding wants them, made once: per layer, in the dtype of the matmuls, with what depends on the
  target alone computed for every target."""

  params: Any  # without the blocks
  blocks: tuple[Any, ...]  # the parameters of each layer
  tables: tuple[list[jax.Array], ...]  # of each layer's `Block.tables`, [T, D]
  final_tables: list[jax.Array]  # shift and scale of the final norm, with adaLN


class Decoder(nn.Module):
  """AO-GPT, or sigma-GPT. The fields are those of `config.model`; see aogpt_jax/config.py."""

  layers: int
  width: int
  heads: int
  block_size: int
  vocab_size: int
  cond_width: int
  target: str
  gate_init: float
  norm: str
  qk_norm: bool
  tied_head: bool
  bias: bool
  weight_init: str
  position_init: str
  dtype: Any
  param_dtype: Any
  remat: str
  scan_layers: bool
  head_chunk: int
  backend: attention.Backend  # of the passes over all entries

  def setup(self):
    kw = dict(dtype=self.dtype, param_dtype=self.param_dtype)
    normal = layers.INITS[self.weight_init](layers.INIT_STD)
    position_init, target_init = POSITION_INITS[self.position_init](normal)
    self.tokens = layers.Embed(self.vocab_size, self.width, ("vocab", "embed"), init=normal, **kw)
    # Row 0 belongs to the start entry, row p + 1 to the token at position p.
    self.positions = layers.Embed(self.block_size + 1, self.width, ("position", "embed"), init=position_init, **kw)
    self.start = layers.Embed(1, self.width, ("position", "embed"), init=normal, **kw)
    if self.target == "adaln":
      self.targets = layers.Embed(self.block_size, self.cond_width, ("position", "condition"), init=target_init, **kw)
    elif self.target != "layer_distinct":  # whose tables are in the blocks
      self.targets = layers.Embed(self.block_size, self.width, ("position", "embed"), init=position_init, **kw)
    self.blocks = layers.stack(Block, self.layers, remat=self.remat, scan=self.scan_layers)(**self._block_fields())
    dense = dict(bias=self.bias, weight_init=self.weight_init, **kw)
    if self.target == "adaln":
      self.final_modulation = Modulation(2, self.width, **dense)
    self.final_norm = _norm(self.norm, self.bias, **kw)
    if not self.tied_head:
      self.head = layers.Dense((self.vocab_size,), ("embed", "vocab"), **dense)

  def _block_fields(self) -> dict[str, Any]:
    return dict(num_layers=self.layers) | {name: getattr(self, name) for name in (
        "width", "heads", "gate_init", "target", "norm", "qk_norm", "bias", "weight_init", "block_size", "position_init", "dtype",
        "param_dtype", "backend")}

  def __call__(self, tokens: jax.Array, orders: jax.Array) -> jax.Array:
    """Logits of every entry.

    Args:
      tokens: int [B, N], the sequences in their natural order, N <= T.
      orders: int [B, S], distinct positions below N: a permutation of them, or the beginning of one.

    Returns:
      float32 [B, S, V] in generation order: `logits[b, i]` predicts `tokens[b, orders[b, i]]` from
      `tokens[b, orders[b, :i]]`.

    Raises:
      ValueError: more entries than the block size, or shapes that do not fit.
    """
    return self._head(self.features(tokens, orders))

  def features(self, tokens: jax.Array, orders: jax.Array) -> jax.Array:
    """What the head is given of every entry, [B, S, D]; arguments and errors as those of a call."""
    if tokens.ndim != 2 or orders.ndim != 2:
      raise ValueError(f"orders {orders.shape} and tokens {tokens.shape} must both be [batch, length].")
    if tokens.shape[1] > self.block_size:
      raise ValueError(f"{tokens.shape[1]} tokens do not fit the model's block_size = {self.block_size}.")
    if tokens.shape[0] != orders.shape[0] or not 1 <= orders.shape[1] <= tokens.shape[1]:
      raise ValueError(f"orders {orders.shape} do not fit tokens {tokens.shape}: give each sequence one order, of at least "
                       "one and at most all of its positions.")
    known = orders[:, :-1]
    slots = jnp.pad(known + 1, ((0, 0), (1, 0)))
    known_tokens = jnp.pad(jnp.take_along_axis(tokens, known, axis=1), ((0, 0), (1, 0)))
    x_BSD = sharding.keep_batch_split(self._embed(known_tokens, slots, orders))
    cond = self._cond()
    x_BSD, _ = self.blocks(x_BSD, cond, orders)
    return self._finish(x_BSD, *(table[orders] for table in sharding.keep_whole(self._final_tables(cond))))

  def head_parameters(self, params: Any) -> tuple[jax.Array, jax.Array]:
    """Kernel [D, V] and bias [V] of the head, which is logits = features @ kernel + bias."""
    kernel = params["tokens"]["embedding"].T if self.tied_head else params["head"]["kernel"]
    return kernel, jnp.zeros(self.vocab_size) if self.tied_head or not self.bias else params["head"]["bias"]

  def prepare(self, params: Any) -> Prepared:
    """What `extend` runs with; to be called once, outside of the loop over it."""
    params = layers.cast_for_use(params, self.dtype)
    blocks = tuple(jax.tree.map(lambda p: p[layer], params["blocks"]) for layer in range(self.layers))
    block = Block(parent=None, **self._block_fields())
    cond = self.apply({"params": params}, method="_cond")
    return Prepared(
        params={name: p for name, p in params.items() if name != "blocks"}, blocks=blocks,
        tables=sharding.keep_whole(tuple(block.apply({"params": p}, cond, method="tables") for p in blocks)),
        final_tables=sharding.keep_whole(self.apply({"params": params}, cond, method="_final_tables")))

  def extend(
      self, prepared: Prepared, tokens: jax.Array, slots: jax.Array, targets: jax.Array, cache: tuple[layers.Cache, ...],
      write: jax.Array, visible: jax.Array, asked: jax.Array,
  ) -> tuple[jax.Array, tuple[layers.Cache, ...]]:
    """Runs S entries against the cache.

    An entry sees itself and the first `visible` slots of the cache, in which the entries of this call already are.

    Args:
      prepared: from `prepare`.
      tokens: int [B, S], the token that each entry holds; ignored for the start entry.
      slots: int [B, S], 0 for the start entry, else the token's position + 1.
      targets: int [B, S], the position that each entry predicts.
      cache: from `init_cache` or a previous call.
      write: int [B], at most the cache's length - S: the entries enter the cache there, one slot after another.
      visible: int [B, S], see above; entry i of the full forward pass sees i slots.
      asked: int [B, Q], the entries that are asked for their logits.

    Returns:
      float32 [B, Q, V] and the new cache.
    """
    bound = self.bind({"params": prepared.params})
    block = Block(parent=None, **self._block_fields())
    x_BSD = sharding.keep_batch_split(bound._embed(tokens, slots, targets))
    bias = attention.cache_bias(visible, cache[0]["v"].shape[2])
    new_cache = []
    # A layer's cache is an array of its own, which a loop around this method updates in place; a scan would copy it.
    for layer in range(self.layers):
      last = layer == self.layers - 1
      x_BSD, layer_cache = block.apply(
          {"params": prepared.blocks[layer]}, x_BSD, prepared.tables[layer], targets, cache[layer], write, bias,
          asked if last else None, method="extend")
      new_cache.append(layer_cache)
    targets = jnp.take_along_axis(targets, asked, axis=1)
    x_BSD = bound._finish(x_BSD, *(table[targets] for table in prepared.final_tables))
    return bound._head(x_BSD), tuple(new_cache)

  def init_cache(self, batch: int, length: int) -> tuple[layers.Cache, ...]:
    """An empty cache for `length` entries of each of the layers."""
    head_dim = self.width // self.heads
    shapes = {"k": (batch, self.heads, head_dim, length), "v": (batch, self.heads, length, head_dim)}
    return tuple({name: jnp.zeros(shape, self.dtype) for name, shape in shapes.items()} for _ in range(self.layers))

  def _embed(self, tokens: jax.Array, slots: jax.Array, targets: jax.Array) -> jax.Array:
    start = self.start(jnp.zeros_like(slots[:1, :1]))
    x_BSD = jnp.where((slots == 0)[..., None], start, self.tokens(tokens)) + self.positions(slots)
    return x_BSD + self.targets(targets) if self.target == "input" else x_BSD

  def _cond(self) -> jax.Array | None:
    """The table of targets that all blocks are given."""
    return self.targets.table() if self.target in ("adaln", "layer_shared") else None

  def _final_tables(self, cond: jax.Array | None) -> list[jax.Array]:
    return self.final_modulation(cond) if self.target == "adaln" else []

  def _finish(self, x_BSD: jax.Array, shift: jax.Array | int = 0, scale: jax.Array | int = 0) -> jax.Array:
    return self.final_norm(x_BSD) * (1 + scale) + shift

  def _head(self, x_BSD: jax.Array) -> jax.Array:
    return self.tokens.logits(x_BSD) if self.tied_head else self.head(x_BSD, out_dtype=jnp.float32)
