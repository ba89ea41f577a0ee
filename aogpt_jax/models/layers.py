"""The layers of the transformer: parameters in `param_dtype`, matmuls in `dtype`, norms in float32.

Every parameter carries logical axis names; sharding.py maps them to mesh axes.
"""

from collections.abc import Callable, Sequence
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from aogpt_jax import attention
from aogpt_jax import sharding

INIT_STD = 0.02
# {"k": [B, H, K, T], "v": [B, H, T, K]}: the layouts in which both products of attention read their operand as it lies.
Cache = dict[str, jax.Array]


def truncated_normal(std: float) -> nn.initializers.Initializer:
  """Normal of standard deviation `std`, cut at 3 `std`."""
  return nn.initializers.truncated_normal(std, lower=-3.0, upper=3.0)


# What kernels and embeddings start from, by `config.model.weight_init`: standard deviation -> initialiser.
INITS: dict[str, Callable[[float], nn.initializers.Initializer]] = {
    "truncated_normal": truncated_normal,
    "normal": nn.initializers.normal,
}


# Of the MLP, by `config.model.activation`.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda h: 0.5 * h * (1 + jax.lax.erf(h * 0.5**0.5)),  # jax.nn.gelu goes by erfc, which takes longer
    "gelu_tanh": lambda h: jax.nn.gelu(h, approximate=True),
}


def sinusoids(rms: float) -> nn.initializers.Initializer:
  """Row p is the sines and cosines of p (Vaswani et al., arXiv 1706.03762, section 3.5), of this root mean square.

  The wavelengths go from 2 pi to twice the number of rows.
  """

  def init(key: jax.Array, shape: tuple[int, int], dtype: Any = jnp.float32) -> jax.Array:
    del key
    rows, width = shape
    frequencies = jnp.geomspace(1.0, jnp.pi / rows, width // 2)
    angles = jnp.arange(rows)[:, None] * frequencies
    return (rms * 2**0.5 * jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)).astype(dtype)

  return init


# What the backward pass of a block finds saved, by `config.model.remat`.
_SAVED = {
    "none": sharding.is_no_gather,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def stack(block: type[nn.Module], layers: int, *, remat: str, scan: bool) -> type[nn.Module]:
  """So many of a block one after another: called with the entries and what all of them are given.

  Their parameters are stacked, [L, ...], whether the loop over them is compiled as a loop (`scan`) or unrolled.
  """
  if remat != "none" or sharding.splits_parameters():
    block = nn.remat(block, prevent_cse=not scan, policy=_SAVED[remat])
  return nn.scan(
      block,
      variable_axes={"params": 0, "intermediates": 0},  # the latter where a caller captures them, as evaluation/attended.py does
      split_rngs={"params": True}, in_axes=nn.broadcast, length=layers,
      unroll=1 if scan else layers, metadata_params={nn.PARTITION_NAME: "layers"},
  )


def cast_for_use(params: Any, dtype: Any) -> Any:
  """The parameters, with those that only matmuls and table lookups read cast once, as these would at each call."""

  def cast(path, x):
    kind = path[-1].key
    x = x.astype(dtype) if kind in ("kernel", "embedding") else x
    return sharding.keep_whole(x) if kind == "embedding" else x

  return jax.tree_util.tree_map_with_path(cast, params)


class Embed(nn.Module):
  """A table of learned rows."""

  rows: int
  width: int
  axes: tuple[str, str]  # logical names of (rows, width)
  dtype: Any
  param_dtype: Any
  init: nn.initializers.Initializer = truncated_normal(INIT_STD)

  def setup(self):
    init = nn.with_logical_partitioning(self.init, self.axes)
    self.embedding = self.param("embedding", init, (self.rows, self.width), self.param_dtype)

  def __call__(self, ids: jax.Array) -> jax.Array:
    """[..., width] in `dtype` for ids [...]."""
    return sharding.look_up(self.embedding, ids, self.axes, self.dtype)

  def table(self) -> jax.Array:
    """All rows, [rows, width] in `dtype`."""
    return sharding.gather(self.embedding.astype(self.dtype), self.axes)

  def logits(self, x: jax.Array) -> jax.Array:
    """float32 [..., rows], the products of x [..., width] with the rows: the head of a model that has none of its own."""
    return jax.lax.dot_general(x.astype(self.dtype), self.table(), (((x.ndim - 1,), (1,)), ((), ())),
                               preferred_element_type=jnp.float32)


class RMSNorm(nn.Module):
  """Root-mean-square norm over the last axis with a learned scale, in float32."""

  axis: str  # logical name of the last axis
  dtype: Any
  param_dtype: Any
  eps: float = 1e-5

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    init = nn.with_logical_partitioning(nn.initializers.ones, (self.axis,))
    scale = self.param("scale", init, (x.shape[-1],), self.param_dtype)
    x = x.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
    return (x * scale).astype(self.dtype)


class LayerNorm(nn.Module):
  """Mean and variance norm over the last axis with a learned scale, and a bias where it is wanted, in float32."""

  axis: str  # logical name of the last axis
  dtype: Any
  param_dtype: Any
  bias: bool = True
  eps: float = 1e-5

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    param = lambda name, init: self.param(
        name, nn.with_logical_partitioning(init, (self.axis,)), (x.shape[-1],), self.param_dtype)
    x = x.astype(jnp.float32)
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
    x = x * param("scale", nn.initializers.ones)
    return (x + param("bias", nn.initializers.zeros) if self.bias else x).astype(self.dtype)


class Dense(nn.Module):
  """x[..., in] @ kernel[in, *features] + bias[*features], the bias where it is wanted."""

  features: Sequence[int]
  axes: Sequence[str]  # logical names of (in, *features)
  dtype: Any
  param_dtype: Any
  std: float = INIT_STD
  weight_init: str = "truncated_normal"  # see INITS
  bias: bool = True
  bias_init: nn.initializers.Initializer = nn.initializers.zeros

  @nn.compact
  def __call__(self, x: jax.Array, out_dtype: Any = None) -> jax.Array:
    """`out_dtype` sets what the products are summed to and returned in; the default is `dtype`."""
    shape = (x.shape[-1], *self.features)
    init = nn.with_logical_partitioning(INITS[self.weight_init](self.std), tuple(self.axes))
    kernel = self.param("kernel", init, shape, self.param_dtype)
    y = jax.lax.dot_general(
        x.astype(self.dtype), sharding.gather(kernel.astype(self.dtype), self.axes), (((x.ndim - 1,), (0,)), ((), ())),
        preferred_element_type=out_dtype,
    )
    if not self.bias:
      return y
    init = nn.with_logical_partitioning(self.bias_init, tuple(self.axes[1:]))
    bias = self.param("bias", init, tuple(self.features), self.param_dtype)
    return y + sharding.gather(bias.astype(y.dtype), self.axes[1:])


class Attention(nn.Module):
  """Self-attention with RMSNorm on queries and keys (QK-norm), causal in generation order, unless told otherwise."""

  width: int
  heads: int
  num_layers: int
  dtype: Any
  param_dtype: Any
  causal: bool = True
  qk_norm: bool = True
  bias: bool = True
  weight_init: str = "truncated_normal"
  backend: attention.Backend = attention.Backend()

  def setup(self):
    head_dim = self.width // self.heads
    kw = dict(dtype=self.dtype, param_dtype=self.param_dtype)
    dense = dict(bias=self.bias, weight_init=self.weight_init, **kw)
    self.qkv = Dense((3, self.heads, head_dim), ("embed", "qkv", "heads", "head_dim"), **dense)
    if self.qk_norm:
      self.q_norm = RMSNorm("head_dim", **kw)
      self.k_norm = RMSNorm("head_dim", **kw)
    self.out = Dense((self.width,), ("heads", "embed"), std=INIT_STD / (2 * self.num_layers) ** 0.5, **dense)

  def __call__(self, x_BSD: jax.Array) -> jax.Array:
    """Attends among the S entries."""
    q, k, v = self._project(x_BSD)
    return self._merge(attention.attend_whole(q, k, v, causal=self.causal, backend=self.backend))

  def extend(
      self, x_BSD: jax.Array, cache: Cache, write: jax.Array, bias_B1ST: jax.Array, asked: jax.Array | None
  ) -> tuple[jax.Array, Cache]:
    """Attends to a cache, which the entries enter first.

    Args:
      x_BSD: the entries.
      cache: of this layer.
      write: int [B], the slot that the first entry enters; the others follow it.
      bias_B1ST: from `attention.cache_bias`.
      asked: int [B, Q], the entries that attend; None: all.

    Returns:
      [B, Q or S, D] and the new cache.
    """
    q, k, v = (x.swapaxes(1, 2) for x in self._project(x_BSD))  # [B, H, S, K]
    # Written before attention reads it, so that XLA updates the buffer in place.
    insert = jax.vmap(lambda cached, new, slot: jax.lax.dynamic_update_slice(cached, new, slot))
    zero = jnp.zeros_like(write)
    cache = {"k": insert(cache["k"], k.swapaxes(2, 3), jnp.stack([zero, zero, write], axis=1)),
             "v": insert(cache["v"], v, jnp.stack([zero, write, zero], axis=1))}
    if asked is not None:
      q, k, v = (jnp.take_along_axis(x, asked[:, None, :, None], axis=2) for x in (q, k, v))
      bias_B1ST = jnp.take_along_axis(bias_B1ST, asked[:, None, :, None], axis=2)
    y = attention.attend_cache(q, k, v, cache["k"], cache["v"], bias_B1ST)
    return self._merge(y.swapaxes(1, 2)), cache

  def _project(self, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v = (jnp.squeeze(x, 2) for x in jnp.split(self.qkv(x_BSD), 3, axis=2))  # [B, S, H, K]
    return (self.q_norm(q), self.k_norm(k), v) if self.qk_norm else (q, k, v)

  def _merge(self, y_BSHK: jax.Array) -> jax.Array:
    return self.out(y_BSHK.reshape(*y_BSHK.shape[:2], self.width))


class MLP(nn.Module):
  """D -> 4D -> D with the exact (erf) GELU, or its approximation by tanh, which GPT-2 has."""

  width: int
  num_layers: int
  dtype: Any
  param_dtype: Any
  activation: str = "gelu"
  bias: bool = True
  weight_init: str = "truncated_normal"

  @nn.compact
  def __call__(self, x_BSD: jax.Array) -> jax.Array:
    kw = dict(dtype=self.dtype, param_dtype=self.param_dtype, bias=self.bias, weight_init=self.weight_init)
    h = Dense((4 * self.width,), ("embed", "mlp"), name="fc", **kw)(x_BSD)
    h = ACTIVATIONS[self.activation](h)
    std = INIT_STD / (2 * self.num_layers) ** 0.5
    return Dense((self.width,), ("mlp", "embed"), std=std, name="out", **kw)(h)
