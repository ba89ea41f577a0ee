"""AdamW with a warm-up and cosine schedule, and the exponential moving average of the parameters."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import optax


def learning_rate(config: ml_collections.ConfigDict) -> optax.Schedule:
  """Updates done -> learning rate of the next: linear from 0 over the warm-up, cosine to the final rate, then constant."""
  o = config.optimizer
  decay = optax.cosine_decay_schedule(
      o.learning_rate, o.decay_steps - o.warmup_steps, alpha=o.final_learning_rate / o.learning_rate)
  if not o.warmup_steps:
    return decay
  return optax.join_schedules([optax.linear_schedule(0.0, o.learning_rate, o.warmup_steps), decay], [o.warmup_steps])


def make_optimizer(config: ml_collections.ConfigDict, schedule: optax.Schedule | None = None) -> optax.GradientTransformation:
  """AdamW behind gradient clipping; `schedule` replaces the config's learning rate."""
  o = config.optimizer
  return optax.chain(
      optax.clip_by_global_norm(o.clip_norm),
      optax.scale_by_adam(o.beta1, o.beta2, o.eps),
      optax.add_decayed_weights(o.weight_decay, mask=lambda params: decay_mask(params, o.weight_decay_rules)),
      optax.scale_by_learning_rate(schedule or learning_rate(config)),
  )


def decay_mask(params: Any, rules: tuple[tuple[str, bool], ...]) -> Any:
  """Whether each parameter decays: the value of the first rule whose regex matches its whole path.

  Raises:
    ValueError: a parameter that no rule covers.
  """

  def decays(path, _):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    for pattern, value in rules:
      if re.fullmatch(pattern, name):
        return value
    raise ValueError(f"config.optimizer.weight_decay_rules: no rule covers the parameter {name}; add one.")

  return jax.tree_util.tree_map_with_path(decays, params)


def update_ema(ema: Any, params: Any, updates_done: jax.Array, max_decay: float) -> Any:
  """The moving average after update n = `updates_done` (from 1), with decay min(max_decay, (1 + n) / (10 + n))."""
  n = updates_done.astype(jnp.float32)
  decay = jnp.minimum(max_decay, (1 + n) / (10 + n))
  return jax.tree.map(lambda e, p: (decay * e + (1 - decay) * p).astype(e.dtype), ema, params)


def adam(opt_state: Any) -> optax.ScaleByAdamState:
  """Count and moments of AdamW in a state of `make_optimizer`."""
  return next(part for part in jax.tree.leaves(opt_state, is_leaf=_is_adam) if _is_adam(part))


def with_adam(opt_state: Any, state: optax.ScaleByAdamState, updates_done: jax.Array) -> Any:
  """The same with other count and moments, and a schedule that so many updates have been done of."""
  replaced = jax.tree.map(lambda part: state if _is_adam(part) else part, opt_state, is_leaf=_is_adam)
  return with_schedule(replaced, updates_done)


def with_schedule(opt_state: Any, updates_done: jax.Array) -> Any:
  """The same with a schedule that so many updates have been done of."""
  return jax.tree.map(lambda part: part._replace(count=updates_done) if _is_schedule(part) else part, opt_state,
                      is_leaf=_is_schedule)


def _is_adam(part: Any) -> bool:
  return isinstance(part, optax.ScaleByAdamState)


def _is_schedule(part: Any) -> bool:
  return isinstance(part, optax.ScaleByScheduleState)
