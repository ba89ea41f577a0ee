"""Updates whose loss or gradient is not finite: left out or the end of the run, by config; spikes of the gradient are named."""

import dataclasses
import json
import logging

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aogpt_jax import objectives
from aogpt_jax import run as run_lib
from aogpt_jax.data import loader
from aogpt_jax.training import loop
from aogpt_jax.training import step as step_lib

BAD = (5, 8)  # steps


@pytest.fixture
def poisoned(monkeypatch):
  """Training whose loss is not a number at the steps BAD."""
  real = objectives.OBJECTIVES["any_order"]

  def draw(spec, key, step, rows, length):
    is_bad = jnp.isin(step + 1, jnp.array(BAD))
    return real.draw(spec, key, step, rows, length), jnp.full(rows.shape, jnp.where(is_bad, jnp.nan, 1.0))

  def nats(model, params, tokens, drawn):
    return real.nats(model, params, tokens, drawn[0]) * drawn[1][:, None]

  monkeypatch.setitem(objectives.OBJECTIVES, "any_order", dataclasses.replace(real, draw=draw, nats=nats))


def same(a, b):
  return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def train(config, workdir, **changes):
  config.update(steps=9)
  config.optimizer.update(changes)
  config.log.every_steps, config.eval.every_steps, config.checkpoint.every_steps = 3, 100, 100
  config.eval.sequences, config.micro_batches = 8, 1
  return loop.train(run_lib.open_run(config, str(workdir)))


def test_a_run_stops_with_the_state_before_and_goes_on_where_a_budget_is_given(words_config, tmp_path, poisoned, caplog):
  with pytest.raises(FloatingPointError, match="^step 5: the loss is nan and the gradient norm nan. The state before it is saved "
                                               "as step 4. .*config.optimizer.skip_nonfinite"):
    train(words_config, tmp_path / "run")
  assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["4"]
  assert not caplog.records
  with pytest.raises(FloatingPointError, match="^step 8: .* saved as step 7"):
    train(words_config, tmp_path / "run", skip_nonfinite=1)
  assert "step 5: the loss is nan and the gradient norm nan; this update is left out, number 1 of" in caplog.text
  state = train(words_config, tmp_path / "run", skip_nonfinite=2)
  assert int(state.step) == 9 and int(state.skipped) == 2 and int(state.opt_state[1].count) == 7
  assert int(state.opt_state[3].count) == 9  # the schedule goes on
  records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
  assert [r["skipped"] for r in records if "skipped" in r] == [0, 1, 2]
  # Stopped twice and started again, it is as it would have been. Each number is a program of its own, which may round otherwise.
  whole = train(words_config, tmp_path / "whole", skip_nonfinite=2)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), state, whole)


def test_an_update_that_is_left_out_changes_nothing_but_the_counts(words_config, tmp_path, poisoned):
  words_config.optimizer.skip_nonfinite = 1
  words_config.micro_batches = 1
  run = run_lib.open_run(words_config, str(tmp_path), "sample")
  trainer = step_lib.make_trainer(words_config, run.model, run.mesh)
  states, tokens = [trainer.init()], np.zeros((words_config.batch_size, 16), np.int32)
  for _ in range(9):
    states.append(trainer.step(jax.tree.map(jnp.copy, states[-1]), tokens)[0])
  assert [int(s.step) for s in states] == [0, 1, 2, 3, 4, 5, 6, 7, 7, 7]
  assert [int(s.skipped) for s in states] == [0, 0, 0, 0, 0, 1, 1, 1, 2, 2]
  assert same(*((s.params, s.ema, s.opt_state[1]) for s in states[4:6]))
  assert not same(states[5].params, states[6].params) and not same(states[6].params, states[7].params)
  assert same(states[7].replace(skipped=0), states[8].replace(skipped=0)) and same(states[8], states[9])


def test_the_gradients_that_are_far_above_those_before_are_named(words_config, caplog):
  class Writer:
    def write(self, *_):
      pass

  words_config.log.spike = 4.0
  batches = loader.TrainBatches(grain.MapDataset.range(1).to_iter_dataset())
  log = loop._StepLog(words_config, Writer(), 0, batches)
  norms = [0.5, 9.0] + 30 * [1.0] + [3.9, 4.1, 1.0]
  for step, norm in enumerate(norms, 1):
    log.note(step, dict(loss=np.float32(2.5), grad_norm=np.float32(norm), learning_rate=np.float32(1e-3), skipped=np.int32(0)))
    if step % 5 == 0:
      log.push(step, 0)
    log.read()
  line, = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
  assert line == "step 34: the gradient norm 4.1 is 4.1 times the median of the 33 steps before, 1; the loss is 2.5000."
