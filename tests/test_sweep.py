"""Sweeps: units run one after another as real processes, killed and started again; every variant of the decoder among them."""

import importlib.util
import json
import os
import shlex
import signal
import time

import numpy as np
import pytest

from aogpt_jax import config as config_lib
from aogpt_jax import models
from aogpt_jax import sharding
from aogpt_jax import sweep
from aogpt_jax.evaluation import held_out
from aogpt_jax.training import checkpoints
from aogpt_jax.training import step as step_lib
from conftest import ROOT, make_command

VARIANTS = str(ROOT / "tests" / "configs" / "words_variants.py")
CHANGES = ("steps=8", "micro_batches=1", "eval.every_steps=8", "eval.distributions=('uniform',)", "checkpoint.every_steps=2",
           "sample.orders=('uniform',)", "sample.length=4")


def base_config(path):
  spec = importlib.util.spec_from_file_location("config_file", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config()


def units_of(name):
  path = ROOT / "configs" / f"{name}.py"
  return {unit.name: unit for unit in sweep.units(str(path), base_config(path), "runs/here")}


@pytest.mark.parametrize("name, field, values", [
    ("small_targets", "model.target", ["adaln", "input", "layer_shared", "layer_distinct"]),
    ("small_ema", "optimizer.ema_decay", [0.0, 0.99, 0.999, 0.9999]),
    ("small_left_to_right_share", "orders", ["mix(0)", "mix(0.01)", "mix(0.1)", "mix(0.25)", "mix(0.5)", "mix(1)"]),
])
def test_the_papers_ablations_change_one_field_of_small(name, field, values):
  small = config_lib.flat(base_config(ROOT / "configs" / "small.py")) | {"steps": 20_000, "batch_size": 512}
  units = units_of(name)
  assert len(units) == len(values)
  for unit, value in zip(units.values(), values):
    assert config_lib.flat(unit.config) == small | {field: value}
    assert unit.arguments == (f"--config={ROOT}/configs/{name}.py", f"--workdir=runs/here/{unit.name}", f"--config.{field}={value}")


@pytest.mark.parametrize("text, expected", [
    ("", "has no function sweep(); see configs/small_targets.py"),
    ("def sweep():\n  yield 'a', {'modle.width': 64}\n", "unit a: config.modle: there is no such field; did you mean config.model?"),
    ("def sweep():\n  yield 'a', {'model.width': '64'}\n", "unit a: config.model.width: '64' is of type str; give a int"),
    ("def sweep():\n  yield 'a', {'model.heads': 7}\n", "unit a: config.model.heads: 7 does not divide"),
    ("def sweep():\n  yield 'a', {}\n  yield 'a', {}\n", "unit 'a': is no new name"),
    ("def sweep():\n  yield '../a', {}\n", "unit '../a': is no new name of a directory"),
    ("def sweep():\n  yield 'a', {'seed': 3}\n", "unit a: the sweep sets config.seed itself; leave it out of the command line."),
])
def test_what_is_wrong_with_a_sweep_is_said_with_its_unit(tmp_path, text, expected):
  (tmp_path / "mine.py").write_text(
      f"from aogpt_jax import config as config_lib\ndef get_config():\n  return config_lib.default_config()\n{text}")
  config = config_lib.default_config()
  config.seed = 2  # as the command line would
  with pytest.raises(config_lib.ConfigError) as error:
    sweep.units(str(tmp_path / "mine.py"), config, "runs/mine")
  assert expected in str(error.value) and "\n" not in str(error.value)


def evaluation(workdir):
  return json.loads((workdir / "eval_validation.json").read_text())


@pytest.fixture(scope="module")
def swept(words, tmp_path_factory):
  """A sweep over all variants that was killed in its third unit and started again: where, and what the second start said."""
  directory = tmp_path_factory.mktemp("sweep")
  command = make_command(words, directory)
  with open(directory / "first.txt", "w", encoding="utf-8") as f:
    process = command(*CHANGES, config=VARIANTS, module="aogpt_jax.sweep", own_group=True, wait=False, stdout=f)
    runs = directory / "runs" / "words_variants"
    deadline = time.monotonic() + 300
    while not (runs / "layer_shared/checkpoints/2").is_dir():
      assert process.poll() is None and time.monotonic() < deadline, (directory / "first.txt").read_text()
      time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
  first = (runs / "sigma_gpt/eval_validation.json").stat().st_mtime_ns
  assert not (runs / "layer_shared/eval_validation.json").exists()
  again = command(*CHANGES, config=VARIANTS, module="aogpt_jax.sweep")
  assert (runs / "sigma_gpt/eval_validation.json").stat().st_mtime_ns == first
  return runs, again, command


def test_a_sweep_that_was_killed_passes_over_what_is_finished_and_goes_on_in_the_unit_where_it_was(swept):
  _, again, _ = swept
  said = [line for line in again.stdout.splitlines() if line.startswith(("sweep: ", "going on"))]
  assert said[0] == "sweep: 1 of 4 units are finished in runs/words_variants"
  assert said[1] == "sweep: fails, 1 of 3"
  assert said[2].startswith("sweep: fails failed with status 1; why is above")
  assert said[3].startswith("sweep: layer_shared, 2 of 3, ") and said[3].endswith(" left")
  assert said[4].startswith("going on from the checkpoint of step ")
  assert said[5].startswith("sweep: layer_distinct, 3 of 3, ") and len(said) == 6


def test_a_unit_that_fails_does_not_stop_the_others_and_is_named_at_the_end(swept):
  _, again, _ = swept
  assert again.returncode == 1
  assert "nowhere.tiktoken" in again.stderr and "Traceback" not in again.stderr
  assert again.stderr.splitlines()[-1] == "error: 1 of 4 units failed: fails; the same command tries them again"


@pytest.mark.parametrize("name", ["sigma_gpt", "layer_shared", "layer_distinct"])
def test_every_variant_trains_is_restored_evaluates_and_samples_from_the_command_line(swept, name):
  workdir = swept[0] / name
  losses = [record["loss"] for record in map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines()) if "loss" in record]
  assert len(losses) == 8 and losses[-1] < losses[0] - 0.1
  result = evaluation(workdir)
  config = config_lib.from_dict(result["config"])
  assert result["step"] == 8 and held_out.is_done(workdir, config)
  assert np.isfinite(result["any_order"]["nats_per_token"])
  samples = [json.loads(line) for line in (workdir / "samples.jsonl").read_text().splitlines()]
  assert [(len(sample["ids"]), sample["order"]) for sample in samples] == [(4, "uniform")]
  mesh = sharding.make_mesh(config)
  saver = checkpoints.Checkpoints(workdir, config)
  state = saver.restore(step_lib.make_trainer(config, models.build_model(config), mesh).shapes)
  saver.close()
  assert state.step == 8


def test_a_unit_is_finished_where_its_last_step_has_been_evaluated_as_its_config_says(swept):
  workdir = swept[0] / "sigma_gpt"
  config = config_lib.from_dict(evaluation(workdir)["config"])
  for field, value, done in (("steps", 8, True), ("log.every_steps", 5, True), ("steps", 9, False), ("seed", 1, False),
                             ("eval.orders", 3, False), ("eval.split", "test", False)):
    changed = config.copy_and_resolve_references()
    changed.update_from_flattened_dict({field: value})
    assert held_out.is_done(workdir, changed) == done, field
  assert not held_out.is_done(swept[0] / "fails", config)


def test_a_terminated_sweep_ends_the_unit_that_it_runs(words, tmp_path):
  process = make_command(words, tmp_path)(*CHANGES, config=VARIANTS, module="aogpt_jax.sweep", wait=False)
  while "sweep: fails, 1 of 4" not in process.stdout.readline():
    assert process.poll() is None
  process.send_signal(signal.SIGTERM)
  rest, errors = process.communicate(timeout=60)  # returns when no process is left that could write
  assert process.returncode == 1 and errors == "terminated; the same command goes on\n" and "sweep" not in rest


def test_with_print_the_command_of_each_unit_that_is_left_is_printed(swept):
  runs, _, command = swept
  done = command(*CHANGES, "--print", "steps=9", config=VARIANTS, module="aogpt_jax.sweep")
  assert done.returncode == 0 and done.stderr == "# 0 of 4 units are finished\n"
  lines = [shlex.split(line) for line in done.stdout.splitlines()]
  assert len(lines) == 4
  assert all(line[:4] == ["python", "-m", "aogpt_jax.main", f"--config={VARIANTS}"] for line in lines)
  assert [line[4] for line in lines] == [f"--workdir=runs/words_variants/{name}" for name in (
      "fails", "sigma_gpt", "layer_shared", "layer_distinct")]
  assert "--config.orders=growing_blocks(1, 16, cosine, 2, 6)" in lines[3] and "--config.steps=9" in lines[3]
