"""What a run starts from: another run's parameters, and its optimiser where it is kept; what does not fit is named first."""

import jax
import numpy as np
import pytest

import random_gpt2
from aogpt_jax import config as config_lib
from aogpt_jax import run as run_lib
from aogpt_jax.evaluation import held_out
from aogpt_jax.training import checkpoints
from aogpt_jax.training import loop
from aogpt_jax.training import metrics
from aogpt_jax.training import start
from aogpt_jax.training import step as step_lib


@pytest.fixture(scope="module")
def trained(words, tmp_path_factory):
  """The workdir of a run of 3 steps, and its state."""
  import conftest

  config = conftest.make_words_config(words)
  run = run_lib.open_run(config, str(tmp_path_factory.mktemp("trained")), "sample")
  trainer = step_lib.make_trainer(config, run.model, run.mesh)
  state = trainer.init()
  for i in range(3):
    state, _ = trainer.step(state, np.full((config.batch_size, 16), i, np.int32))
  saver = checkpoints.Checkpoints(run.workdir, config)
  saver.save(state)
  saver.close()
  return run.workdir, state


def first_state(config, workdir):
  run = run_lib.open_run(config, str(workdir))
  return start.state(config, run.model, run.tokenizer, step_lib.make_trainer(config, run.model, run.mesh))


def same(a, b):
  return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_parameters_and_their_average_are_those_of_another_run_and_the_optimiser_is_new(words_config, tmp_path, trained, weights):
  workdir, theirs = trained
  words_config.update(init_from=str(workdir), init_weights=weights)
  state = first_state(words_config, tmp_path)
  expected = theirs.ema if weights == "ema" else theirs.params
  assert same(state.params, expected) and same(state.ema, expected) and not same(theirs.ema, theirs.params)
  assert int(state.step) == 0 and not any(np.any(x) for x in jax.tree.leaves(state.opt_state))


def test_a_kept_optimiser_has_its_moments_and_a_schedule_that_starts_anew(words_config, tmp_path, trained):
  workdir, theirs = trained
  words_config.update(init_from=str(workdir), init_optimizer="kept", init_weights="raw")
  state = first_state(words_config, tmp_path)
  assert same(state.opt_state[1], theirs.opt_state[1]) and int(state.opt_state[1].count) == 3
  assert int(state.opt_state[3].count) == 0 and int(theirs.opt_state[3].count) == 3


def test_a_run_says_where_it_starts_and_goes_on_from_its_own_checkpoint(words_config, tmp_path, trained, capsys):
  workdir, theirs = trained
  words_config.update(init_from=str(workdir), steps=1)
  words_config.eval.distributions = words_config.sample.orders = ("left_to_right",)
  run = run_lib.open_run(words_config, str(tmp_path))
  state = loop.train(run)
  assert f"starting from {workdir}" in capsys.readouterr().out
  expected = held_out.evaluate(run, theirs.ema, "validation", words_config.eval.sequences)["left_to_right"].nats_per_token
  record = metrics.read(tmp_path)[0]
  assert record["step"] == 0 and record["eval/left_to_right/nats_per_token"] == pytest.approx(expected, abs=1e-6)
  config, has_optimizer = checkpoints.describe(tmp_path)
  assert config.init_from == str(workdir) and has_optimizer
  (workdir / "checkpoints").rename(workdir / "elsewhere")  # it is not needed any more
  try:
    assert same(loop.train(run_lib.open_run(words_config, str(tmp_path))), state)
    assert "starting from" not in capsys.readouterr().out
    with pytest.raises(OSError, match="there is no checkpoint"):
      run_lib.open_run(words_config, str(tmp_path / "another"))
  finally:
    (workdir / "elsewhere").rename(workdir / "checkpoints")


@pytest.mark.parametrize("fields, named", [
    (dict(width=64, layers=3), ("config.model.layers: is 3, and was 2", "config.model.width: is 64, and was 32")),
    (dict(target="input"), ("config.model.target: is 'input', and was 'adaln'",)),
    (dict(activation="gelu_tanh"), ("config.model.activation: is 'gelu_tanh', and was 'gelu'",)),
    (dict(block_size=8), ("config.model.block_size: is 8, and was 16",)),
])
def test_another_architecture_is_named_before_anything_is_compiled(words_config, tmp_path, trained, fields, named, compilations):
  words_config.init_from = str(trained[0])
  words_config.model.update(fields)
  with pytest.raises(config_lib.ConfigError) as error:
    run_lib.open_run(words_config, str(tmp_path))
  lines = str(error.value).split("\n")
  assert len(lines) == len(named) and all(line.startswith(name) for line, name in zip(lines, named))
  assert not {"step", "init"} & set(compilations)


def test_another_architecture_or_tokenizer_and_an_optimiser_that_is_not_there_are_named(words_config, tmp_path, trained):
  words_config.update(init_from=str(trained[0]), objective="ao")
  words_config.model.architecture = "encoder"
  with pytest.raises(config_lib.ConfigError, match="^config.model.architecture: is encoder, and was decoder there.*$"):
    run_lib.open_run(words_config, str(tmp_path))
  words_config.update(init_from="gpt2:gpt2", init_optimizer="kept", objective="any_order")
  words_config.model.architecture = "decoder"
  with pytest.raises(config_lib.ConfigError, match="config.init_optimizer: is kept, and config.init_from = gpt2:gpt2 has no"):
    run_lib.open_run(words_config, str(tmp_path))


def test_what_does_not_fit_gpt2_is_named_by_field(words_config, tmp_path):
  pytest.importorskip("safetensors", reason="weights are in safetensors: pip install 'aogpt_jax[hf]'")
  directory = random_gpt2.write(tmp_path / "gpt2", vocab_size=400, layer_norm_epsilon=1e-6)
  words_config.init_from = f"gpt2:{directory}"
  words_config.model.update(layers=3, bias=False, tied_head=True)
  with pytest.raises(config_lib.ConfigError) as error:
    run_lib.open_run(words_config, str(tmp_path / "run"))
  lines = str(error.value).split("\n")
  assert [line.split(":")[0] for line in lines] == [
      f"config.{f}" for f in ("model.layers", "model.width", "model.block_size", "model.vocab_size", "model.bias",
                              "model.tied_head", "init_from")]
  assert "set it to 2" in lines[0] and "set it to 8 or less" in lines[2] and "set it to 400 exactly" in lines[3]
