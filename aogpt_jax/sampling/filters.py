"""From logits to the distribution that a token is drawn from: temperature, top-k, top-p; all in float32.

Exact draws want float32 before the temperature, the filters and the noise: in bfloat16, equal logits are many and the noise is
coarse, which gives another distribution.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

TOP_P_RULES = ("standard", "reference")


@dataclasses.dataclass(frozen=True)
class Filters:
  """How logits are filtered.

  Attributes:
    vocab_size: V'; ids from there on (padding, the mask id) have probability 0.
    temperature: divides the logits; 0 takes the most probable token.
    top_p: keeps the most probable tokens while the mass before them is below it, at least one; 1 keeps all.
    top_k: keeps the k most probable tokens, and those as probable as the k-th; 0 keeps all.
    top_p_rule: "standard", or "reference" for the PyTorch code, which drops the token that crosses top_p.

  Raises:
    ValueError: a value out of range, named with what is allowed.
  """

  vocab_size: int
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0
  top_p_rule: str = "standard"

  def __post_init__(self):
    if not (math.isfinite(self.temperature) and self.temperature >= 0):
      raise ValueError(f"temperature is {self.temperature}; it must be 0 or more and finite.")
    if not 0 <= self.top_p <= 1:
      raise ValueError(f"top_p is {self.top_p}; it must be from 0 to 1.")
    if self.top_k < 0:
      raise ValueError(f"top_k is {self.top_k}; it must be 0 (all) or more.")
    if self.top_p_rule not in TOP_P_RULES:
      raise ValueError(f"top_p_rule is {self.top_p_rule!r}; it must be one of {', '.join(TOP_P_RULES)}.")
    if self.vocab_size < 1:
      raise ValueError(f"vocab_size is {self.vocab_size}; it must be at least 1.")

  def __call__(self, logits: jax.Array) -> jax.Array:
    """Filtered logits, float32 [..., V], -inf where the probability is 0; at temperature 0, 0 at one token alone."""
    logits = logits.astype(jnp.float32)
    logits = jnp.where(jnp.arange(logits.shape[-1]) < self.vocab_size, logits, -jnp.inf)
    if self.temperature == 0:
      best = jnp.argmax(logits, axis=-1, keepdims=True)
      return jnp.where(jnp.arange(logits.shape[-1]) == best, 0.0, -jnp.inf)
    logits = logits / self.temperature
    if 0 < self.top_k < self.vocab_size:
      smallest = jax.lax.top_k(logits, self.top_k)[0][..., -1:]
      logits = jnp.where(logits >= smallest, logits, -jnp.inf)
    if self.top_p < 1:
      logits = jnp.where(_nucleus(jax.nn.softmax(logits), self.top_p, self.top_p_rule), logits, -jnp.inf)
    return logits


def _nucleus(probs: jax.Array, top_p: float, rule: str) -> jax.Array:
  """Which tokens top-p keeps, bool [..., V].

  The kept tokens are those whose probability reaches a threshold. It is found by bisection on the bits of the float, since
  float32s above 0 are ordered as their bits are: 31 passes over the vocabulary, where sorting it takes many times as long.
  """

  def keeps(threshold):
    mass = lambda counted: jnp.sum(jnp.where(counted, probs, 0.0), axis=-1, keepdims=True)
    if rule == "standard":
      return mass(probs > threshold) < top_p  # the mass before the tokens at the threshold
    return mass(probs >= threshold) <= top_p  # and with them

  def halve(_, bounds):
    low, high = bounds  # high is kept, or the largest float
    middle = low + (high - low) // 2
    kept = keeps(jax.lax.bitcast_convert_type(middle, jnp.float32))
    return jnp.where(kept, low, middle), jnp.where(kept, middle, high)

  low = jnp.full((*probs.shape[:-1], 1), -1, jnp.int32)
  high = jnp.full_like(low, 0x7F800000)  # infinity, which keeps nothing
  _, high = jax.lax.fori_loop(0, 31, halve, (low, high))
  threshold = jax.lax.bitcast_convert_type(high, jnp.float32)
  return probs >= jnp.minimum(threshold, probs.max(axis=-1, keepdims=True))


def draw(keys: jax.Array, logits: jax.Array) -> jax.Array:
  """One token per distribution, int32 [...], by the Gumbel-max trick; keys [...], logits float32 [..., V]."""
  flat = logits.reshape(-1, logits.shape[-1])
  noise = jax.vmap(lambda key: jax.random.gumbel(key, flat.shape[-1:], jnp.float32, mode="high"))(keys.reshape(-1))
  return jnp.argmax(flat + noise, axis=-1).astype(jnp.int32).reshape(keys.shape)
