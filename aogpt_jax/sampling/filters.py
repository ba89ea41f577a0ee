"""From logits to the distribution that a token is drawn from: temperature, top-k, top-p; all in float32.

Exact draws want float32 before the temperature, the filters and the noise: in bfloat16, equal logits are many and the noise is
coarse, which gives another distribution.
"""

from collections.abc import Callable
import dataclasses
import math

import jax
import jax.numpy as jnp

TOP_P_RULES = ("standard", "reference")
_OFF = {"temperature": 0, "top_p": 1, "top_k": 0}  # at these, no distribution is needed, or nothing is filtered


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Filters:
  """How logits are filtered. For jit, the numbers are data, and which filters there are is static.

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

  def tree_flatten(self):
    # A filter that is off is static, so that it costs nothing; a number that is traced is of one that is on.
    fields = {name: (getattr(self, name), off) for name, off in _OFF.items()}
    on = {name: x for name, (x, off) in fields.items() if not isinstance(x, (int, float)) or x != off}
    return tuple(on.values()), (self.vocab_size, self.top_p_rule, tuple(on))

  @classmethod
  def tree_unflatten(cls, static, values):
    self = object.__new__(cls)  # without the checks, which traced values can't pass
    vocab_size, top_p_rule, on = static
    for name, value in (_OFF | dict(zip(on, values), vocab_size=vocab_size, top_p_rule=top_p_rule)).items():
      object.__setattr__(self, name, value)
    return self

  def __call__(self, logits: jax.Array) -> jax.Array:
    """Filtered logits, float32 [..., V], -inf where the probability is 0; at temperature 0, 0 at one token alone."""
    _, (*_, on) = self.tree_flatten()
    logits = logits.astype(jnp.float32)
    logits = jnp.where(jnp.arange(logits.shape[-1]) < self.vocab_size, logits, -jnp.inf)
    if "temperature" not in on:
      best = jnp.argmax(logits, axis=-1, keepdims=True)
      return jnp.where(jnp.arange(logits.shape[-1]) == best, 0.0, -jnp.inf)
    logits = logits / self.temperature
    if "top_k" in on:
      above = lambda threshold: jnp.sum(logits > threshold, axis=-1, keepdims=True)
      logits = jnp.where(logits >= _smallest(lambda threshold: above(threshold) < self.top_k, logits), logits, -jnp.inf)
    if "top_p" in on:
      logits = jnp.where(_nucleus(jax.nn.softmax(logits), self.top_p, self.top_p_rule), logits, -jnp.inf)
    return logits
def _nucleus(probs: jax.Array, top_p: jax.Array | float, rule: str) -> jax.Array:
  """Which tokens top-p keeps, bool [..., V]: those whose probability reaches a threshold."""

  def keeps(threshold):
    mass = lambda counted: jnp.sum(jnp.where(counted, probs, 0.0), axis=-1, keepdims=True)
    if rule == "standard":
      return mass(probs > threshold) < top_p  # the mass before the tokens at the threshold
    return mass(probs >= threshold) <= top_p  # and with them

  return probs >= jnp.minimum(_smallest(keeps, probs), probs.max(axis=-1, keepdims=True))


def _smallest(keeps: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
  """The smallest threshold [..., 1] for x [..., V] that `keeps` says yes to, as it does to all above it.

  Found by bisection on the bits of the float: 32 passes over the vocabulary, where sorting it takes many times as long.
  """
  # Integers in the order of the floats whose bits they are: the negative ones the other way round. Its own inverse.
  turn = lambda bits: jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

  def halve(_, bounds):
    low, high = bounds  # high is kept, or infinity
    middle = (low & high) + ((low ^ high) >> 1)  # their mean, without overflow
    kept = keeps(jax.lax.bitcast_convert_type(turn(middle), jnp.float32))
    return jnp.where(kept, low, middle), jnp.where(kept, middle, high)

  high = jnp.full((*x.shape[:-1], 1), 0x7F800000, jnp.int32)  # infinity
  low = jnp.full_like(high, -0x7F800001)  # minus infinity
  _, high = jax.lax.fori_loop(0, 32, halve, (low, high))
  return jax.lax.bitcast_convert_type(turn(high), jnp.float32)


def draw(keys: jax.Array, logits: jax.Array) -> jax.Array:
  """One token per distribution, int32 [...], by the Gumbel-max trick; keys [...], logits float32 [..., V]."""
  flat = logits.reshape(-1, logits.shape[-1])
  noise = jax.vmap(lambda key: jax.random.gumbel(key, flat.shape[-1:], jnp.float32, mode="high"))(keys.reshape(-1))
  return jnp.argmax(flat + noise, axis=-1).astype(jnp.int32).reshape(keys.shape)
