"""The encoder: masked diffusion with bidirectional attention, on the decoder's blocks.

Every position holds its token or the mask, and is conditioned on itself as its target; its logits predict the token there from
all positions that are not masked, no matter in what order these were revealed. RADD (Ou et al., arXiv 2406.03736) and MDLM
(Sahoo et al., arXiv 2406.07524) do not tell it the noise level; SEDD (Lou et al., arXiv 2310.16834) does.
"""

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from aogpt_jax import attention
from aogpt_jax import sharding
from aogpt_jax.models import decoder
from aogpt_jax.models import layers

# The noise of level t masks a token with probability 1 - exp(-sigma) = (1 - EPS) t: sigma is finite at t = 1.
EPS = 1e-3


class Encoder(nn.Module):
  """Most fields are those of `config.model`; see aogpt_jax/config.py."""

  layers: int
  width: int
  heads: int
  block_size: int
  vocab_size: int
  num_tokens: int  # V', the ids that are predicted; and the mask's
  cond_width: int
  gate_init: float
  position_init: str
  dtype: Any
  param_dtype: Any
  remat: str
  scan_layers: bool
  head_chunk: int
  tell_noise: bool  # condition on the noise level
  backend: attention.Backend

  def setup(self):
    kw = dict(dtype=self.dtype, param_dtype=self.param_dtype)
    position_init, target_init = decoder.POSITION_INITS[self.position_init](layers.truncated_normal(layers.INIT_STD))
    self.tokens = layers.Embed(self.vocab_size, self.width, ("vocab", "embed"), **kw)
    self.positions = layers.Embed(self.block_size, self.width, ("position", "embed"), init=position_init, **kw)
    self.targets = layers.Embed(self.block_size, self.cond_width, ("position", "condition"), init=target_init, **kw)
    if self.tell_noise:
      self.noise_fc = layers.Dense((self.cond_width,), ("condition", "mlp"), **kw)
      self.noise_out = layers.Dense((self.cond_width,), ("mlp", "condition"), **kw)
    self.blocks = layers.stack(decoder.Block, self.layers, remat=self.remat, scan=self.scan_layers)(
        width=self.width, heads=self.heads, num_layers=self.layers, gate_init=self.gate_init, causal=False,
        backend=self.backend, **kw)
    self.final_modulation = decoder.Modulation(2, self.width, **kw)
    self.final_norm = layers.RMSNorm("embed", **kw)
    self.head = layers.Dense((self.vocab_size,), ("embed", "vocab"), **kw)

  @property
  def mask_id(self) -> int:
    """The id that stands for a masked token: the first one that is no token."""
    return self.num_tokens

  def __call__(self, tokens: jax.Array, asked: jax.Array | None = None, level: jax.Array | None = None) -> jax.Array:
    """Logits of positions.

    Args:
      tokens: int [B, N], in natural order, `mask_id` where masked; N <= T. Positions from N on are masked.
      asked: int [B, Q], the positions that are asked for their logits; None: all N.
      level: float [B], the noise level t in (0, 1], where the model is told it; None: the share of positions that are masked.

    Returns:
      float32 [B, Q or N, V], -inf for ids that are no tokens.

    Raises:
      ValueError: more tokens than the block size, or shapes that do not fit.
    """
    logits = self.head(self.features(tokens, asked, level), out_dtype=jnp.float32)
    return jnp.where(self._is_token(), logits, -jnp.inf)

  def features(self, tokens: jax.Array, asked: jax.Array | None = None, level: jax.Array | None = None) -> jax.Array:
    """What the head is given of the positions, [B, Q or N, D]; arguments and errors as those of a call."""
    if tokens.ndim != 2 or tokens.shape[1] > self.block_size:
      raise ValueError(f"tokens {tokens.shape} must be [batch, length], of at most the model's block_size = {self.block_size}.")
    if asked is not None and (asked.ndim != 2 or asked.shape[0] != tokens.shape[0]):
      raise ValueError(f"asked {asked.shape} does not fit tokens {tokens.shape}: give positions for each sequence.")
    batch, length = tokens.shape
    # Always the whole block, as in training: what is not there is not known.
    tokens = jnp.pad(tokens, ((0, 0), (0, self.block_size - length)), constant_values=self.mask_id)
    x_BTD = sharding.keep_batch_split(self.tokens(tokens) + self.positions.table())
    cond = self.targets.table()
    if self.tell_noise:
      level = jnp.mean(tokens == self.mask_id, axis=1) if level is None else level
      cond = cond + self._noise(level)[:, None]
    x_BTD, _ = self.blocks(x_BTD, cond, None)
    parts = x_BTD, *self.final_modulation(cond)
    if asked is None:
      x, shift, scale = (x[..., :length, :] for x in parts)
    else:
      whole = lambda x: jnp.broadcast_to(x, (batch, self.block_size, self.width))
      x, shift, scale = (jnp.take_along_axis(whole(x), asked[..., None], axis=1) for x in parts)
    return self.final_norm(x) * (1 + scale) + shift

  def head_parameters(self, params: Any) -> tuple[jax.Array, jax.Array]:
    """Kernel [D, V] and bias [V] of the head, which is logits = features @ kernel + bias; -inf for ids that are no tokens."""
    return params["head"]["kernel"], jnp.where(self._is_token(), params["head"]["bias"], -jnp.inf)

  def _is_token(self) -> jax.Array:
    return jnp.arange(self.vocab_size) < self.num_tokens

  def _noise(self, level: jax.Array) -> jax.Array:
    """What is added to the conditioning, [B, C]: an MLP of sines and cosines of sigma, of wavelengths from 2 pi to 20,000 pi."""
    sigma = -jnp.log1p(-(1 - EPS) * level.astype(jnp.float32))
    angles = sigma[:, None] * jnp.geomspace(1.0, 1e-4, -(-self.cond_width // 2))
    features = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=1)[:, : self.cond_width]
    return self.noise_out(jax.nn.silu(self.noise_fc(features)))

  def prepare(self, params: Any) -> Any:
    """The parameters as sampling runs with them; to be called once, outside of the loop over `__call__`."""
    return layers.cast_for_use(params, self.dtype)

  def init_cache(self, batch: int, length: int) -> tuple[()]:
    """Nothing: a new token changes what all positions attend to."""
    del batch, length
    return ()
