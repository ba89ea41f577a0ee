"""The training loop in this process: compilations counted, no hidden transfers, errors that lose nothing."""

import gc
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aogpt_jax
from aogpt_jax import config as config_lib
from aogpt_jax import main as main_lib
from aogpt_jax import run as run_lib
from aogpt_jax.training import checkpoints
from aogpt_jax.training import loop
from aogpt_jax.training import metrics
from aogpt_jax.training import provenance
from aogpt_jax.training import step as step_lib


def test_a_run_compiles_the_step_the_evaluation_and_the_sampler_once_each(words_config, tmp_path, compilations):
  words_config.steps = 7
  words_config.eval.every_steps = 3
  words_config.checkpoint.every_steps = 2
  words_config.sample.orders = ("left_to_right", "uniform")
  words_config.micro_batches = 4  # not the program of another test
  jax.clear_caches()
  loop.train(run_lib.open_run(words_config, str(tmp_path)))
  ours = {name: n for name, n in compilations.items() if name in ("step", "init", "_score", "_run")}
  assert ours == {"step": 1, "init": 1, "_score": 1, "_run": 1}, compilations

  compilations.clear()
  jax.clear_caches()
  words_config.steps = 9  # a restored state looks like a new one
  loop.train(run_lib.open_run(words_config, str(tmp_path)))
  assert compilations["step"] == 1 and compilations["init"] == 0, compilations


def test_training_needs_no_implicit_transfer_between_host_and_device(words_config, tmp_path):
  words_config.steps = 3
  run = run_lib.open_run(words_config, str(tmp_path))
  trainer = step_lib.make_trainer(words_config, run.model, run.mesh)
  state = trainer.init()
  placed = jax.NamedSharding(run.mesh, jax.P(("data", "fsdp")))
  rows = np.zeros((words_config.batch_size, words_config.model.block_size), np.int32)
  with jax.transfer_guard("disallow"):
    for _ in range(3):
      state, metrics = trainer.step(state, jax.make_array_from_process_local_data(placed, rows))
    assert jax.device_get(metrics)["learning_rate"] > 0


def test_a_loss_that_is_not_finite_stops_the_run_and_is_not_saved(words_config, tmp_path):
  words_config.optimizer.update(learning_rate=1e30, final_learning_rate=1e30, warmup_steps=0)
  words_config.checkpoint.every_steps = 1
  words_config.eval.every_steps = 1000
  with pytest.raises(FloatingPointError, match="step .*: the loss is .*lower config.optimizer.learning_rate"):
    loop.train(run_lib.open_run(words_config, str(tmp_path)))
  _, params = aogpt_jax.load_model(tmp_path)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))


def test_load_model_gives_the_model_and_its_ema_parameters(words_config, tmp_path):
  words_config.steps = 3
  state = loop.train(run_lib.open_run(words_config, str(tmp_path)))
  model, params = aogpt_jax.load_model(tmp_path)
  jax.tree.map(np.testing.assert_array_equal, params, state.ema)
  assert any((np.asarray(a) != b).any() for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(state.params)))
  tokens = jnp.zeros((2, 16), jnp.int32)
  orders = jnp.tile(jnp.arange(16), (2, 1))
  assert model.apply({"params": params}, tokens, orders).shape == (2, 16, 320)


def test_a_checkpoint_of_before_a_field_was_added_is_of_the_same_run_and_has_a_model(words_config, tmp_path):
  run = run_lib.open_run(words_config, str(tmp_path), "sample")
  older = words_config.copy_and_resolve_references()
  del older.model["tied_head"], older.model["norm"]
  saver = checkpoints.Checkpoints(tmp_path, older)
  saver.save(step_lib.make_trainer(words_config, run.model, run.mesh).init())
  saver.close()
  _, step = checkpoints.load_params(tmp_path, words_config, run.mesh)
  model, _ = aogpt_jax.load_model(tmp_path)
  assert step == 0 and model == run.model


# A restore that fails leaves Orbax's other reads behind, which complain to nobody when they find their event loop closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_newest_restorable_checkpoint_is_used_where_the_newest_is_damaged(words_config, tmp_path, caplog):
  words_config.steps, words_config.checkpoint.every_steps = 4, 2
  run = run_lib.open_run(words_config, str(tmp_path))
  loop.train(run)
  for path in (tmp_path / "checkpoints/4/optimizer").rglob("*"):
    if path.is_file() and path.parent.name == "d":
      path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
  _, params = aogpt_jax.load_model(tmp_path)  # the EMA of step 4 is whole
  _, step = checkpoints.load_params(tmp_path, words_config, run.mesh)
  assert step == 4
  saver = checkpoints.Checkpoints(tmp_path, words_config)
  restored = saver.restore(step_lib.make_trainer(words_config, run.model, run.mesh).shapes)
  saver.close()
  assert int(restored.step) == 2
  assert "step 4 can't be restored" in caplog.text
  assert int(loop.train(run).step) == 4
  assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir() if p.is_dir()) == ["2", "4", "damaged-4"]
  gc.collect()


def test_a_model_is_loaded_from_the_newest_checkpoint_that_has_it(words_config, tmp_path, caplog):
  words_config.steps, words_config.checkpoint.every_steps = 2, 1
  run = run_lib.open_run(words_config, str(tmp_path))
  loop.train(run)
  shutil.rmtree(tmp_path / "checkpoints/2/ema")
  (tmp_path / "checkpoints/999").mkdir()
  _, step = checkpoints.load_params(tmp_path, words_config, run.mesh)
  assert step == 1
  aogpt_jax.load_model(tmp_path)
  assert "step 999 can't be restored" in caplog.text and "step 2 can't be restored" in caplog.text
  shutil.rmtree(tmp_path / "checkpoints/1/ema")
  with pytest.raises(OSError, match=r"none of the checkpoints \[999, 2, 1\] can be restored"):
    aogpt_jax.load_model(tmp_path)


def test_lines_that_are_no_records_are_passed_over_with_a_warning(tmp_path, caplog):
  (tmp_path / "metrics.jsonl").write_bytes(
      b'{"step": 1, "loss": 3.0}\n{"step": 2, garb\n[]\n\xff\xfe\n{"step": 3, "loss": 2.0}\n{"step": 4, "lo')
  assert [r["step"] for r in metrics.read(tmp_path)] == [1, 3]
  assert [f"metrics.jsonl:{n}" in caplog.text for n in range(1, 7)] == [False, True, True, True, False, False]


def test_load_model_where_there_is_nothing_says_so(tmp_path):
  with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
    aogpt_jax.load_model(tmp_path)


def test_a_run_whose_text_has_changed_is_refused_in_one_line(words_config, tmp_path):
  words_config.data.update(source=f"lines:{tmp_path}/text.txt", cache_dir=f"{tmp_path}/cache")
  lines = [f"line {i} of the text" for i in range(300)]
  text = tmp_path / "text.txt"
  text.write_text("\n".join(lines))
  opened = lambda: run_lib.open_run(words_config, f"{tmp_path}/run")
  run = opened()
  saver = checkpoints.Checkpoints(run.workdir, words_config)
  saver.save(step_lib.make_trainer(words_config, run.model, run.mesh).init())
  saver.close()
  provenance.record(run.workdir, 0, words_config, run.packed)
  text.write_text("\n".join([*lines, "one more line"] * 2))
  run = opened()
  for use in (loop.train, lambda run: main_lib._evaluate(run, lambda weights: (None, 0))):
    with pytest.raises(config_lib.ConfigError, match="^config.data.source: lines:.* has changed since .*train.*--workdir") as error:
      use(run)
    assert "\n" not in str(error.value)
  text.write_text("\n".join(lines))
  provenance.check_text(run.workdir, words_config, opened().packed)


def test_a_run_is_the_same_bit_for_bit_however_many_batches_are_read_ahead(words_config, tmp_path):
  words_config.steps, words_config.log.every_steps = 3, 1
  states, hashes = [], []
  for prefetch in (1, 7):
    words_config.data.prefetch = prefetch
    states.append(loop.train(run_lib.open_run(words_config, str(tmp_path / str(prefetch)))))
    hashes.append([record["batch_hash"] for record in metrics.read(tmp_path / str(prefetch)) if "batch_hash" in record])
  jax.tree.map(np.testing.assert_array_equal, *states)
  assert hashes[0] == hashes[1] and len({*hashes[0]}) == 3
