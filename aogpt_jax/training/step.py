"""The training state and the one jitted step, shared by training and ahead-of-time compilation.

A step is a pure function of state and batch: its token orders or masks come from the seed, the number of updates done and the
global rows, so that nothing random has to be saved.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import flax.struct
from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import ml_collections
import optax

from aogpt_jax import objectives
from aogpt_jax import orders
from aogpt_jax import sharding
from aogpt_jax.training import optimizer


@flax.struct.dataclass
class TrainState:
  """All that an update changes. "Step N" means N updates done, here and everywhere."""

  step: jax.Array  # int32
  params: Any
  ema: Any  # moving average of params; evaluation and sampling use it
  opt_state: Any
  skipped: jax.Array  # int32, updates so far that left all this as it was, since their loss or gradient was not finite


@dataclasses.dataclass(frozen=True)
class Trainer:
  """A run's jitted functions on one mesh; each compiles once, at its first call."""

  shapes: TrainState  # of ShapeDtypeStructs with their shardings
  init: Callable[[], TrainState]
  # (state, tokens int32 [B, T], or tokens and parts int32 [B, 2, T] of examples) -> state, {"loss", "grad_norm", "learning_rate",
  # "skipped"}; the given state is donated. Above config.optimizer.skip_nonfinite, `skipped` stops it: that state, and each later
  # one, is as it was before that update, of which `step` does not count.
  step: Callable[[TrainState, jax.Array], tuple[TrainState, dict[str, jax.Array]]]


def make_trainer(
    config: ml_collections.ConfigDict, model: nn.Module, mesh: Mesh, schedule: optax.Schedule | None = None
) -> Trainer:
  """The jitted init and step of a run.

  Args:
    config: a checked config.
    model: from `build_model(config)`.
    mesh: from `sharding.make_mesh(config)`.
    schedule: replaces the config's learning rate.

  Raises:
    ValueError: the batch, or the sharding or weight-decay rules do not fit the mesh or the model's parameters.
  """
  sharding.check_batch("batch_size / micro_batches", config.batch_size // config.micro_batches, mesh)
  schedule = schedule or optimizer.learning_rate(config)
  tx = optimizer.make_optimizer(config, schedule)
  objective = objectives.OBJECTIVES[config.objective]

  def new(params) -> TrainState:
    # The average is a copy: a state that is donated must not hold a buffer twice.
    return TrainState(jnp.zeros((), jnp.int32), params, jax.tree.map(jnp.copy, params), tx.init(params), jnp.zeros((), jnp.int32))

  def init() -> TrainState:
    return new(nn.unbox(init_params(model, config.seed)))

  def loss_fn(params, tokens, drawn):
    with sharding.on_mesh(mesh):
      nats = objectives.weighted_nll if isinstance(drawn, objectives.Weighted) else objective.nats
      return nats(model, params, tokens, drawn).mean()

  def step(state: TrainState, batch: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
    tokens, parts = objectives.unpack(batch)
    batch_size, length = tokens.shape
    rows = jax.lax.with_sharding_constraint(jnp.arange(batch_size), sharding.batch_sharding(mesh))
    drawn = objective.draw(config.orders, order_key(config.seed), state.step, rows, length)
    if parts is not None:
      drawn = objectives.weigh(drawn, parts)
    loss, grads = mean_gradient(jax.value_and_grad(loss_fn), state.params, tokens, drawn, config.micro_batches, mesh)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    ema = optimizer.update_ema(state.ema, params, state.step + 1, config.optimizer.ema_decay)
    grad_norm = optax.tree.norm(grads)
    stopped = state.skipped > config.optimizer.skip_nonfinite
    is_good = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & ~stopped
    skipped = state.skipped + (~is_good & ~stopped)
    updates_done = state.step + (skipped <= config.optimizer.skip_nonfinite)
    # Chosen element by element where they are written, as clipping waits for the norm anyway: it costs nothing.
    params, ema, opt_state = jax.tree.map(
        lambda new, old: jnp.where(is_good, new, old), (params, ema, opt_state), (state.params, state.ema, state.opt_state))
    opt_state = optimizer.with_schedule(opt_state, updates_done)
    metrics = {"loss": loss, "grad_norm": grad_norm, "learning_rate": schedule(state.step), "skipped": skipped}
    return TrainState(updates_done, params, ema, opt_state, skipped), metrics

  boxed = jax.eval_shape(lambda: init_params(model, config.seed))  # once: to trace a model takes a while
  param_shardings = sharding.parameter_shardings(boxed, mesh, config.sharding_rules)
  replicated = sharding.replicated(mesh)
  shapes = jax.eval_shape(new, nn.unbox(boxed))
  shardings = TrainState(
      step=replicated, params=param_shardings, ema=param_shardings,
      opt_state=optax.tree_map_params(
          tx, lambda _, s: s, shapes.opt_state, param_shardings, transform_non_params=lambda _: replicated),
      skipped=replicated)
  shapes = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
  # All shardings are pinned: a state that came from init, a step or a checkpoint looks the same, and compiles once.
  return Trainer(
      shapes=shapes,
      init=jax.jit(init, out_shardings=shardings),
      step=jax.jit(step, donate_argnums=0, in_shardings=(shardings, sharding.batch_sharding(mesh)),
                   out_shardings=(shardings, replicated)),
  )


def init_params(model: nn.Module, seed: int) -> Any:
  """Initial parameters with their logical axis names (`flax.linen.unbox` takes those off)."""
  sequence = jnp.zeros((1, model.block_size), jnp.int32)
  key, _ = jax.random.split(orders.root_key(seed))
  return model.init(key, sequence, sequence)["params"]


def order_key(seed: int) -> jax.Array:
  """The key of what is drawn in training, for the `draw` of an objective."""
  return jax.random.split(orders.root_key(seed))[1]


def mean_gradient(
    value_and_grad: Callable[..., tuple[jax.Array, Any]], params: Any, tokens: jax.Array, drawn: Any,
    micro_batches: int, mesh: Mesh,
) -> tuple[jax.Array, Any]:
  """Loss and gradient of the whole batch, computed in `micro_batches` equal parts one after another and added up in float32."""
  if micro_batches == 1:
    return value_and_grad(params, tokens, drawn)

  def split(x):
    # Part m takes the rows m, m + M, m + 2M, ...: each device keeps its rows, and no data moves between devices.
    x = x.reshape(-1, micro_batches, *x.shape[1:]).swapaxes(0, 1)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, ("data", "fsdp"))))

  def add(total, part):
    return jax.tree.map(jnp.add, total, value_and_grad(params, *part)), None

  zero = (jnp.zeros(()), jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params))
  (loss, grads), _ = jax.lax.scan(add, zero, jax.tree.map(split, (tokens, drawn)))
  return loss / micro_batches, jax.tree.map(lambda g, p: (g / micro_batches).astype(p.dtype), grads, params)
