"""Checkpoints that are damaged in every way that a disk or a killed process can: passed over by name, never used."""

import gc
import json
import logging
import re
import shutil
import subprocess
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aogpt_jax
from conftest import make_words_config
from aogpt_jax import config as config_lib
from aogpt_jax import run as run_lib
from aogpt_jax.training import checkpoints
from aogpt_jax.training import checksums
from aogpt_jax.training import step as step_lib

# A restore that fails leaves Orbax's other reads behind, which complain to nobody when they find their event loop closed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def collected():
  yield
  gc.collect()  # what a failed restore has left complains in the test that has made it


def save(directory, config, *states):
  saver = checkpoints.Checkpoints(directory, config)
  try:
    for state in states:
      saver.save(state)
    saver.wait()
  finally:
    saver.close()


@pytest.fixture(scope="module")
def whole(words, tmp_path_factory):
  """A workdir with the checkpoints 1 and 2, their config, trainer and states."""
  config = make_words_config(words)
  run = run_lib.open_run(config, str(tmp_path_factory.mktemp("whole")), "sample")
  trainer = step_lib.make_trainer(config, run.model, run.mesh)
  state, states = trainer.init(), []
  for i in (1, 2):
    state, _ = trainer.step(state, np.full((config.batch_size, 16), i, np.int32))
    states.append(jax.tree.map(jnp.copy, state))
  save(run.workdir, config, *states)
  return run.workdir, config, trainer, states


@pytest.fixture
def workdir(whole, tmp_path):
  return shutil.copytree(whole[0], tmp_path / "run")


def restore(workdir, config, trainer):
  saver = checkpoints.Checkpoints(workdir, config)
  try:
    return saver.restore(trainer.shapes)
  finally:
    saver.close()


def same(a, b):
  return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def largest(directory):
  return max((p for p in directory.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip(path, bit):
  data = bytearray(path.read_bytes())
  data[bit // 8] ^= 1 << bit % 8
  path.write_bytes(data)


def truncate(path):
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change_config(newest):
  path = newest / "config/metadata"
  path.write_text(path.read_text().replace('"seed": 0', '"seed": 1', 1))


def change_checksum(newest):
  path = newest / "checksums/metadata"
  fields = json.loads(path.read_text())
  fields["arrays"]["optimizer/step"] = "0" * 8
  path.write_text(json.dumps(fields))


@pytest.mark.parametrize("damage, reason", [
    (lambda d: truncate(largest(d / "params")), ""),
    (lambda d: truncate(largest(d / "optimizer")), ""),
    (lambda d: flip(largest(d / "ema"), 4 * largest(d / "ema").stat().st_size), ""),
    (lambda d: largest(d / "params").unlink(), ""),
    (lambda d: (d / "params/_METADATA").unlink(), ""),
    (lambda d: (d / "params/manifest.ocdbt").unlink(), ""),
    (lambda d: (d / "config/metadata").unlink(), ""),
    (lambda d: (d / "checksums/metadata").unlink(), ""),
    (lambda d: (d / "config/metadata").write_text("{"), ""),
    (change_config, "its config is not as it was saved"),
    (change_checksum, "the checksums of 1 of [0-9]+ arrays are not those of what was saved, as optimizer/step"),
    (lambda d: shutil.rmtree(d / "ema"), "its ema is missing"),
    (lambda d: shutil.rmtree(d / "optimizer"), "its optimizer is missing"),
    (lambda d: (shutil.rmtree(d), d.mkdir()), ""),
], ids=["params_truncated", "moments_truncated", "flip", "no_array_file", "no_metadata", "no_manifest", "no_config",
        "no_checksums_file", "broken_config", "other_config", "other_checksum", "no_ema", "no_optimizer", "empty"])
def test_a_damaged_checkpoint_is_passed_over_with_the_reason_and_kept(whole, workdir, caplog, damage, reason):
  _, config, trainer, states = whole
  damage(workdir / "checkpoints/2")
  restored = restore(workdir, config, trainer)
  assert same(restored, states[0])
  line, = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "step 2" in r.getMessage()]
  assert "step 2 can't be restored" in line and "\n" not in line and re.search(reason, line)
  assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == ["1", "damaged-2"]


def test_what_a_killed_save_has_left_is_cleared_away_and_no_checkpoint(whole, workdir):
  _, config, trainer, states = whole
  shutil.copytree(workdir / "checkpoints/2", workdir / "checkpoints/3.orbax-checkpoint-tmp")
  (workdir / "checkpoints/3.orbax-checkpoint-tmp/params/_METADATA").unlink()
  assert same(restore(workdir, config, trainer), states[1])
  assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == ["1", "2"]
  aogpt_jax.load_model(workdir)


def test_a_checkpoint_without_metadata_that_orbax_can_do_without_is_used_or_passed_over(whole, workdir):
  _, config, trainer, states = whole
  (workdir / "checkpoints/2/_CHECKPOINT_METADATA").unlink()
  assert any(same(restore(workdir, config, trainer), state) for state in states)


def test_a_flipped_bit_in_any_file_is_noticed_or_of_no_effect(whole, tmp_path, caplog):
  original, config, trainer, states = whole
  rng = np.random.default_rng(0)
  files = sorted(p.relative_to(original) for p in (original / "checkpoints/2").rglob("*") if p.is_file())
  sizes = np.array([(original / path).stat().st_size for path in files], float)
  # Half of the flips fall on bytes, nearly all of which are of arrays, and half on files.
  chosen = [*rng.choice(len(files), 12, p=sizes / sizes.sum()), *rng.choice(np.flatnonzero(sizes), 12)]
  passed_over = 0
  for i, which in enumerate(chosen):
    workdir = shutil.copytree(original, tmp_path / str(i))
    flip(workdir / files[which], int(rng.integers(8 * int(sizes[which]))))
    restored = restore(workdir, config, trainer)
    assert same(restored, states[int(restored.step) - 1]), files[which]
    passed_over += int(restored.step) == 1
  assert passed_over >= 12


def test_a_checkpoint_of_another_config_is_passed_over_where_there_is_one_of_ours(whole, workdir, caplog):
  _, config, trainer, states = whole
  other = config.copy_and_resolve_references()
  other.optimizer.learning_rate, other.checkpoint.keep = 0.5, 3
  save(workdir, other, states[1].replace(step=jnp.int32(3)))
  assert same(restore(workdir, config, trainer), states[1])
  assert "config.optimizer.learning_rate: 0.01, was 0.5" in caplog.text
  assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == ["1", "2", "other-3"]
  with pytest.raises(config_lib.ConfigError, match="step 2 is of a run with another config.*learning_rate: 0.5, was 0.01"):
    restore(workdir, other, trainer)


def test_arrays_of_another_dtype_shape_or_name_are_named_and_not_converted(whole, workdir, caplog):
  _, config, trainer, states = whole
  state = states[1]
  params = {**state.params, "head": {"kernel": state.params["head"]["kernel"].astype(jnp.bfloat16), "bias": jnp.zeros(7)}}
  ema = {**{k: v for k, v in state.ema.items() if k != "start"}, "extra": jnp.zeros(2)}
  save(workdir, config, state.replace(step=jnp.int32(3), params=params, ema=ema))
  assert same(restore(workdir, config, trainer), state)
  for part in ("params/head/kernel is bfloat16[32, 320], not float32[32, 320]",
               "params/head/bias is float32[7], not float32[320]",
               "ema/start/embedding is missing, not float32[1, 32]", "ema/extra is not of this model"):
    assert part in caplog.text


def test_a_checkpoint_of_before_there_were_checksums_and_counts_of_skips_is_used_with_a_note(whole, tmp_path, caplog, monkeypatch):
  _, config, trainer, states = whole
  monkeypatch.setattr(checkpoints, "_optimizer", lambda state: {"step": state.step, "opt_state": state.opt_state})
  save(tmp_path, config, states[1])
  monkeypatch.undo()
  shutil.rmtree(tmp_path / "checkpoints/2/checksums")
  assert same(restore(tmp_path, config, trainer), states[1])
  assert "step 2 is of before there were checksums" in caplog.text and "can't be restored" not in caplog.text


def test_numbers_that_are_not_finite_are_never_saved(whole, tmp_path):
  _, config, _, states = whole
  for bad in (np.nan, np.inf):
    kernel = states[0].params["head"]["kernel"].at[3, 5].set(bad)
    params = {**states[0].params, "head": {**states[0].params["head"], "kernel": kernel}}
    with pytest.raises(FloatingPointError, match="^step 1: the state has .* not finite in params/head/kernel; it is not saved.$"):
      save(tmp_path, config, states[0].replace(params=params))
  assert not [p for p in (tmp_path / "checkpoints").iterdir() if p.name.startswith("1")]


@pytest.fixture
def small_disk(tmp_path):
  """A directory on a file system of 4 MiB, which a function mounts anew with other options."""
  directory = tmp_path / "disk"
  directory.mkdir()
  mount = lambda *options: subprocess.run(["mount", *options, str(directory)], capture_output=True, check=False).returncode
  if not shutil.which("mount") or mount("-t", "tmpfs", "-o", "size=4m", "tmpfs"):
    pytest.skip("nothing can be mounted here")
  yield directory, lambda options: mount("-o", f"remount,{options}")
  subprocess.run(["umount", "-l", str(directory)], check=True)


def test_a_full_disk_and_a_read_only_one_are_said_in_a_line_and_lose_nothing(whole, small_disk):
  _, config, trainer, states = whole
  directory, remount = small_disk
  config = config.copy_and_resolve_references()
  config.checkpoint.keep = 100
  with pytest.raises(OSError, match=r"(step [0-9]+|the newest step) can't be saved \(No space left on device\); see that the disk"):
    save(directory, config, *(states[0].replace(step=jnp.int32(i)) for i in range(1, 20)))
  newest = max(int(p.name) for p in (directory / "checkpoints").iterdir() if p.name.isdecimal())
  assert newest > 1
  assert remount("size=16m") == 0
  assert int(restore(directory, config, trainer).step) == newest  # and what the failed one has left is cleared away
  save(directory, config, states[1].replace(step=jnp.int32(newest + 1)))
  assert same(restore(directory, config, trainer), states[1].replace(step=jnp.int32(newest + 1)))
  assert remount("ro") == 0
  with pytest.raises(OSError, match="Read-only file system"):
    save(directory, config, states[1].replace(step=jnp.int32(newest + 2)))
  waiting = [thread for thread in threading.enumerate() if type(thread).__name__ == "_SignalingThread"]
  assert not waiting, "threads of Orbax would keep the process from ending for minutes"
  assert checkpoints.load_state(directory, with_optimizer=True)[1].step == newest + 1


def arrays():
  rng = np.random.default_rng(1)
  x = rng.normal(size=(7, 30)).astype(np.float32)
  return [x, x.astype(jnp.bfloat16), x.astype(np.float16), (100 * x).astype(np.int32), (x * 50).astype(np.int8), x > 0,
          np.float32(2.5)]


@pytest.mark.parametrize("x", arrays(), ids=lambda x: f"{x.dtype}{list(x.shape)}")
def test_every_flip_changes_a_checksum_which_is_the_same_on_a_device(x, monkeypatch):
  value = checksums.compute({"x": x})["x"]
  monkeypatch.setattr(checksums, "_SMALL", -1)
  assert checksums.compute({"x": jnp.asarray(x)})["x"] == value
  monkeypatch.undo()
  data = np.asarray(x).tobytes()
  bits = range(8 * len(data)) if x.dtype != bool else range(0, 8 * len(data), 8)
  for bit in bits:
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    assert checksums.compute({"x": np.frombuffer(flipped, x.dtype).reshape(x.shape)})["x"] != value


def test_elements_that_change_places_or_signs_change_a_checksum():
  x = np.random.default_rng(0).normal(size=(40, 50)).astype(np.float32)
  swapped, negated, rows = x.copy(), x.copy(), x[::-1]
  swapped[3, 4], swapped[20, 7] = x[20, 7], x[3, 4]
  negated[[1, 30], [2, 8]] *= -1  # two top bits: sums of words times numbers would not see them
  values = [checksums.compute({"x": y})["x"] for y in (x, swapped, negated, rows, x.T, np.zeros_like(x), -x)]
  assert len({*values}) == len(values)
