"""Every objective, trained on a distribution whose entropy is known, ends within 2% of it: the losses are what they bound."""

import numpy as np
import pytest

import random_models
from aogpt_jax import build_model
from aogpt_jax import config as config_lib
from aogpt_jax import objectives
from aogpt_jax import sharding
from aogpt_jax.evaluation import likelihood
from aogpt_jax.training import step as step_lib

# A Markov chain on two symbols that stays with this probability; the first one is either.
STAYS, LENGTH = 0.8, 8
NEXT = -(STAYS * np.log(STAYS) + (1 - STAYS) * np.log(1 - STAYS))
ENTROPY = (np.log(2) + (LENGTH - 1) * NEXT) / LENGTH  # nats per token


def chain(rng, batch):
  moves = rng.random((batch, LENGTH)) < np.where(np.arange(LENGTH) == 0, 0.5, 1 - STAYS)
  return (np.cumsum(moves, axis=1) % 2).astype(np.int32)


@pytest.mark.parametrize("objective", objectives.OBJECTIVES)
def test_the_bound_comes_within_two_percent_of_the_entropy(objective):
  config = config_lib.default_config()
  config.orders, config.batch_size, config.objective = "uniform", 128, objective
  config.model.update(layers=1, width=16, heads=2, block_size=LENGTH, vocab_size=4, cond_width=16, gate_init=1.0,
                      position_init="sinusoid", dtype="float32", scan_layers=False)
  if objective not in config_lib.OBJECTIVES["decoder"]:
    config.model.update(architecture="encoder", num_tokens=2)
  config.optimizer.update(learning_rate=2e-2, final_learning_rate=1e-4, warmup_steps=10, decay_steps=600, ema_decay=0.95)
  model, mesh, rng = build_model(config), sharding.make_mesh(config), np.random.default_rng(0)
  trainer = step_lib.make_trainer(config, model, mesh)
  state = trainer.init()
  for _ in range(600):
    state, _ = trainer.step(state, chain(rng, 128))
  # Each symbol is as frequent as the other: a model that knows no more stays at log 2.
  result = likelihood.evaluate(
      model, state.ema, random_models.batches(chain(rng, 4096), 4096), mesh=mesh, token_bytes=np.ones(2, int),
      repeats={"uniform": 2})["uniform"]
  assert abs(result.nats_per_token - ENTROPY) < 0.02 * ENTROPY < 0.1 * (np.log(2) - ENTROPY)
