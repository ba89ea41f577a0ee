"""Order distributions: in which order the tokens of a sequence are predicted.

An order is a permutation of 0..T-1; `orders[b, i]` is the position predicted at step i. A distribution is named by a
string such as "uniform", "mix(0.1)" or "block_wise(block=4)". To add one: a function of its arguments that returns a
`Draw`, and a line in ORDERS. One that changes over training, such as "schedule(left_to_right, uniform, linear, 1000, 20000)",
returns a `Schedule`.
"""

import ast
from collections.abc import Callable
import dataclasses
import difflib
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np

# (key, T) -> one order, int32 [T].
Draw = Callable[[jax.Array, int], jax.Array]


@dataclasses.dataclass(frozen=True)
class Schedule:
  """A distribution that changes over training."""

  at: Callable[[jax.Array | int], Draw]  # updates done -> the distribution then


def left_to_right() -> Draw:
  """0, 1, ..., T-1: ordinary autoregression."""
  return lambda key, length: jnp.arange(length, dtype=jnp.int32)


def right_to_left() -> Draw:
  """T-1, ..., 1, 0."""
  return lambda key, length: jnp.arange(length, dtype=jnp.int32)[::-1]


def uniform() -> Draw:
  """Every permutation with the same probability: any-order training."""
  return lambda key, length: jax.random.permutation(key, length).astype(jnp.int32)


def mix(left_to_right: float) -> Draw:
  """Left to right with this probability, else uniform; AO-GPT's recipe is mix(0.1)."""
  if not 0 <= left_to_right <= 1:
    raise ValueError(f"the share of left-to-right orders is {left_to_right}; it must be from 0 to 1.")

  share = float(left_to_right)

  def draw(key, length):
    coin, order = jax.random.split(key)
    ascending = jnp.arange(length, dtype=jnp.int32)
    return jnp.where(jax.random.bernoulli(coin, share), ascending, uniform()(order, length))

  return draw


def fixed_random(seed: int = 0) -> Draw:
  """One random order, the same for every example and step."""
  _check_seed(seed)
  return lambda key, length: uniform()(root_key(seed), length)


def block_wise(block: int = 4, seed: int = 0) -> Draw:
  """Blocks from left to right; inside each the same permutation, the paper's 0, 2, 3, 1 for 4, else drawn by `seed`."""
  _check_block(block)
  _check_seed(seed)
  inside = np.array([0, 2, 3, 1]) if block == 4 else np.random.default_rng(seed).permutation(block)

  def draw(key, length):
    starts = np.arange(0, length, block)
    order = (starts[:, None] + inside).ravel()
    return jnp.asarray(order[order < length], dtype=jnp.int32)

  return draw


def shuffled_blocks(block: int) -> Draw:
  """Blocks from left to right; inside each every permutation with the same probability, anew for each example."""
  _check_block(block)
  return _shuffled_blocks(block)


def _shuffled_blocks(block: jax.Array | int) -> Draw:
  def draw(key, length):
    order = uniform()(key, length)
    return order[jnp.argsort(order // block, stable=True)]

  return draw


def explicit(order: tuple) -> Draw:
  """This order for every example, e.g. explicit((3, 0, 2, 1)) for texts of four tokens; other lengths raise ValueError."""
  if not order or any(type(i) is not int for i in order):
    raise ValueError("an explicit order must be of whole numbers, as explicit((3, 0, 2, 1)).")
  missing = set(range(len(order))).difference(order)
  if missing:
    raise ValueError(f"an explicit order of {len(order)} tokens must have each of the numbers from 0 to {len(order) - 1} once; "
                     f"{min(missing)} is missing.")

  def draw(key, length):
    if length != len(order):
      raise ValueError(f"the explicit order is of {len(order)} tokens, and the text has {length}; give an order of {length}.")
    return jnp.asarray(order, dtype=jnp.int32)

  return draw


def schedule(before: str, after: str, change: str, begin: int, end: int = 0) -> Schedule:
  """From one distribution to another, each example being drawn from one of them.

  The share of the second is 0 up to `begin` updates and 1 from `end` on; between, it grows by `change`: linear or cosine. With
  `step` it is 1 from `begin` on, and there is no end. Either may be a schedule itself.
  """
  share, first, second = _share(change, begin, end), parse(before), parse(after)

  def at(step):
    one, other, other_share = _at(first, step), _at(second, step), share(step)

    def draw(key, length):
      # The coin has a key of its own, so that at a share of 0 or 1 the draws are those of one distribution alone, bit by bit.
      coin = jax.random.bernoulli(jax.random.fold_in(key, _COIN), other_share)
      return jnp.where(coin, other(key, length), one(key, length))

    return draw

  return Schedule(at)


def growing_blocks(first: int, last: int, change: str, begin: int, end: int = 0) -> Schedule:
  """`shuffled_blocks` of a size that goes from the first to the last as the share in `schedule` does, rounded down."""
  for block in (first, last):
    _check_block(block)
  share = _share(change, begin, end)
  return Schedule(lambda step: _shuffled_blocks(first + jnp.floor((last - first) * share(step)).astype(jnp.int32)))


# How far a change is when a part u of its time is over.
CHANGES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "linear": lambda u: u,
    "cosine": lambda u: (1 - jnp.cos(jnp.pi * u)) / 2,
    "step": jnp.floor,
}
_LARGEST = 1 << 24  # tokens of a block, far above those of a text: a larger one would not be a mistake that memory survives
_COIN = 2**32 - 1  # no split of a key makes so many


def _share(change: str, begin: int, end: int) -> Callable[[jax.Array | int], jax.Array]:
  """Updates done -> how far a change is, from 0 to 1."""
  if change not in CHANGES:
    raise ValueError(f"there is no change {change!r}; give one of {', '.join(CHANGES)}.")
  if begin < 0:
    raise ValueError(f"the change begins at update {begin}; give 0 or more.")
  if max(begin, end) >= 2**31:
    raise ValueError(f"the change is from update {begin} to {end}; give numbers below 2**31.")
  if change == "step":
    if end:
      raise ValueError(f"a step from update {begin} on has no end, and {end} is given; leave it out.")
    begin, end = begin - 1, begin
  elif end <= begin:
    raise ValueError(f"a {change} change from update {begin} must end after it, and its end is {end}; give both, as "
                     f"{change}, {begin}, {begin + 1000}.")
  return lambda step: CHANGES[change](jnp.clip((step - begin) / (end - begin), 0.0, 1.0))


def _at(distribution: Draw | Schedule, step: jax.Array | int) -> Draw:
  return distribution.at(step) if isinstance(distribution, Schedule) else distribution


def _check_block(block: int) -> None:
  if not 1 <= block <= _LARGEST:
    raise ValueError(f"the block is {block} tokens; it must be at least 1, and at most {_LARGEST:,}.")


def _check_seed(seed: int) -> None:
  if not 0 <= seed < 2**32:  # JAX takes larger ones modulo 2**32, in silence
    raise ValueError(f"the seed is {seed}; it must be 0 or more and below 2**32.")


ORDERS: dict[str, Callable[..., Draw | Schedule]] = {
    "left_to_right": left_to_right,
    "right_to_left": right_to_left,
    "uniform": uniform,
    "mix": mix,
    "fixed_random": fixed_random,
    "block_wise": block_wise,
    "shuffled_blocks": shuffled_blocks,
    "explicit": explicit,
    "schedule": schedule,
    "growing_blocks": growing_blocks,
}


# Those that have one order of a length, whatever the key: there is no need to draw several for a sequence.
SINGLE = ("left_to_right", "right_to_left", "fixed_random", "block_wise", "explicit")


def is_single(spec: str) -> bool:
  """Whether a distribution has one order only."""
  return spec.split("(")[0].strip() in SINGLE


def parse(spec: str) -> Draw | Schedule:
  """The distribution that a string names, e.g. "uniform", "mix(0.1)" or "schedule(uniform, mix(0.1), linear, 0, 1000)".

  Raises:
    ValueError: no such distribution, or arguments that it does not take; the message lists what there is.
  """
  try:
    tree = ast.parse(spec, mode="eval").body
    call = tree if isinstance(tree, ast.Call) else ast.Call(func=tree, args=[], keywords=[])
    if not isinstance(call.func, ast.Name):
      raise ValueError("what is called has no name")
    name = call.func.id
    args = [_argument(a) for a in call.args]
    kwargs = {k.arg or "**": _argument(k.value) for k in call.keywords}
  except (SyntaxError, AttributeError, ValueError, TypeError, RecursionError, MemoryError):
    raise ValueError(f"{spec[:200]!r} is not the name of an order; {_choices()}.") from None
  if name not in ORDERS:
    near = difflib.get_close_matches(name, ORDERS, n=1)
    hint = f" did you mean {near[0]}?" if near else ""
    raise ValueError(f"there is no order {name!r};{hint} {_choices()}.")
  signature = inspect.signature(ORDERS[name])
  try:
    bound = signature.bind(*args, **kwargs)
  except TypeError as e:
    raise ValueError(f"{spec!r}: {e}; write {name}{signature_of(name)}.") from None
  for argument, value in bound.arguments.items():
    wanted = signature.parameters[argument].annotation
    if isinstance(value, bool) or not isinstance(value, (int, float) if wanted is float else wanted):
      raise ValueError(f"{spec!r}: {argument} is {value!r}; write {name}{signature_of(name)}.")
  return ORDERS[name](*args, **kwargs)


def _argument(node: ast.expr):
  """The value of a literal; a name or a call, which may be that of another distribution, as it is written."""
  return ast.unparse(node) if isinstance(node, (ast.Name, ast.Call)) else ast.literal_eval(node)


def check_constant(spec: str) -> None:
  """Raises ValueError for a distribution that changes over training, of which there is more than one to evaluate or sample in."""
  if isinstance(parse(spec), Schedule):
    raise ValueError(f"{spec!r} changes over training; name the one distribution that is wanted here.")


def check(spec: str, length: int) -> None:
  """Raises ValueError where a string names no distribution, or one that has no orders of `length`; compiles nothing."""
  parse(spec)
  _trace(spec, length)


@functools.lru_cache
def _trace(spec: str, length: int) -> None:
  jax.eval_shape(lambda: draw(spec, root_key(0), 0, jnp.arange(1), length))


def signature_of(name: str) -> str:
  """The arguments of a distribution as they are written, e.g. "(block: int = 4, seed: int = 0)"."""
  return str(inspect.signature(ORDERS[name]).replace(return_annotation=inspect.Signature.empty))


def _choices() -> str:
  return "the orders are " + ", ".join(n + signature_of(n).replace("()", "") for n in ORDERS)


def root_key(seed: int) -> jax.Array:
  """The key of a seed; threefry, whose draws do not depend on how arrays are sharded, whatever JAX's default is."""
  return jax.random.key(seed, impl="threefry2x32")


def draw(spec: str, key: jax.Array, step: jax.Array | int, rows: jax.Array, length: int) -> jax.Array:
  """One order per example.

  An example's order depends on the key, the step and its *global* row, so that it is the same on any number of devices
  and hosts and in any division into micro-batches.

  Args:
    spec: a distribution, see `parse`.
    key: from `root_key`.
    step: updates done before this one.
    rows: int [B], indices into the global batch.
    length: T.

  Returns:
    int32 [B, T].
  """
  distribution = _at(parse(spec), step)
  step_key = jax.random.fold_in(key, step)
  return jax.vmap(lambda row: distribution(jax.random.fold_in(step_key, row), length))(rows)


# What a token of a row is: given before all others; predicted, and what counts; or padding, which none of the others sees.
GIVEN, PREDICTED, PADDING = 0, 1, 2


def by_parts(orders: jax.Array, parts: jax.Array) -> jax.Array:
  """The same orders with the given positions first, from left to right, and the padding last.

  Args:
    orders: int [B, T].
    parts: int [B, T], by position, each GIVEN, PREDICTED or PADDING.
  """
  length = orders.shape[1]
  part = jnp.take_along_axis(parts, orders, axis=1)
  place = jnp.where(part == GIVEN, orders, jnp.arange(length))
  return jnp.take_along_axis(orders, jnp.argsort(part * length + place, axis=1), axis=1)


def within(orders: jax.Array, lengths: jax.Array) -> jax.Array:
  """The same orders with the positions past the end of each text last, so that no token of the text sees them.

  Args:
    orders: int [B, T].
    lengths: int [B], tokens of each text; its positions are below that.
  """
  return jnp.take_along_axis(orders, jnp.argsort(orders >= lengths[:, None], axis=1, stable=True), axis=1)
