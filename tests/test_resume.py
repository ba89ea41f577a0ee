"""A killed run goes on as if nothing had happened: real processes, real SIGKILL, every bit compared."""

import json
import os
import signal
import subprocess
import time

import jax
import numpy as np
import orbax.checkpoint as ocp

import aogpt_jax
from conftest import PYTHON, ROOT


def arrays(workdir, step):
  """All saved arrays of a checkpoint by name, as they lie on disk."""
  names = {}
  for item in ("params", "ema", "optimizer"):
    tree = ocp.StandardCheckpointer().restore(workdir / "checkpoints" / str(step) / item)
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
      names[item + jax.tree_util.keystr(path)] = np.asarray(x)
  return names


def records(workdir):
  """Step -> what was recorded of it, without the times, which differ from run to run."""
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  timeless = lambda r: {k: v for k, v in r.items() if k not in ("step_seconds", "data_seconds", "tokens_per_second")}
  return [timeless(r) for r in lines]


def test_twenty_steps_equal_ten_then_kill_9_then_ten_more(command, tmp_path):
  whole = command("--mode=train", "--workdir=whole", "steps=20")
  assert whole.returncode == 0, whole.stderr

  process = command("--mode=train", "--workdir=killed", "steps=20", wait=False)
  deadline = time.time() + 120
  while not (tmp_path / "killed/checkpoints/10").is_dir():  # it appears by a rename, when it is complete
    assert process.poll() is None and time.time() < deadline, process.stderr.read()
    time.sleep(0.005)
  process.send_signal(signal.SIGKILL)
  process.communicate()
  assert process.returncode == -signal.SIGKILL
  assert not (tmp_path / "killed/checkpoints/20").exists()

  resumed = command("--mode=train", "--workdir=killed", "steps=20")
  assert resumed.returncode == 0, resumed.stderr
  assert "going on from the checkpoint of step 10" in resumed.stdout
  expected, actual = arrays(tmp_path / "whole", 20), arrays(tmp_path / "killed", 20)
  assert expected.keys() == actual.keys()
  assert any("mu" in name for name in expected) and any("nu" in name for name in expected)
  for name, x in expected.items():
    np.testing.assert_array_equal(x, actual[name], err_msg=name)
  assert records(tmp_path / "whole") == records(tmp_path / "killed")
  steps = [r for r in records(tmp_path / "whole") if "loss" in r]
  assert [r["step"] for r in steps] == list(range(1, 21))
  assert len({r["batch_hash"] for r in steps}) == 20 and len({r["learning_rate"] for r in steps}) > 15


def test_ten_steps_are_ten_updates_and_a_second_start_does_none(command, tmp_path):
  first = command("--mode=train", "--workdir=run", "steps=10")
  assert first.returncode == 0, first.stderr
  assert arrays(tmp_path / "run", 10)["optimizer['step']"] == 10
  assert [p.name for p in (tmp_path / "run/checkpoints").iterdir() if p.name.isdigit()] == ["10"]
  before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run/checkpoints").rglob("*") if p.is_file()}
  again = command("--mode=train", "--workdir=run", "steps=10")
  assert again.returncode == 0, again.stderr
  assert "nothing to train" in again.stdout
  assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "run/checkpoints").rglob("*") if p.is_file()}
  assert len([r for r in records(tmp_path / "run") if "loss" in r]) == 10


def test_a_run_of_another_config_is_refused_with_the_fields_that_differ(command):
  quiet = command("--mode=train", "--workdir=run", "--quiet", "steps=1")
  assert quiet.returncode == 0 and quiet.stdout == "", quiet.stderr
  refused = command("--mode=train", "--workdir=run", "steps=2", "seed=7", "model.layers=3")
  assert refused.returncode != 0
  assert "config.seed: 7, was 0" in refused.stderr and "config.model.layers: 3, was 2" in refused.stderr
  assert "Traceback" not in refused.stderr


LOAD = """
import sys, jax, numpy as np
import aogpt_jax
from aogpt_jax import config, sharding
assert jax.device_count() == 8
settings = config.default_config()
settings.mesh.update(data=2, fsdp=4)
_, here = aogpt_jax.load_model(sys.argv[1])
_, split = aogpt_jax.load_model(sys.argv[1], sharding.make_mesh(settings))
kernel = split["blocks"]["mlp"]["fc"]["kernel"]
assert kernel.addressable_shards[0].data.size * 4 == kernel.size
jax.tree.map(np.testing.assert_array_equal, here, split)
np.save(sys.argv[2], np.asarray(kernel))
"""


def test_a_run_goes_on_and_its_model_loads_on_another_number_of_devices(command, tmp_path):
  assert command("--mode=train", "--workdir=run", "steps=2").returncode == 0
  eight = {"XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"}
  resumed = command("--mode=train", "--workdir=run", "steps=4", "micro_batches=1", "mesh.fsdp=2", environment=eight)
  assert resumed.returncode == 0, resumed.stderr
  assert "going on from the checkpoint of step 2" in resumed.stdout and "8 x cpu" in resumed.stdout
  subprocess.run([*PYTHON, "-c", LOAD, "run", "kernel.npy"], cwd=tmp_path, check=True,
                 env={**os.environ, **eight, "PYTHONPATH": str(ROOT)})
  _, params = aogpt_jax.load_model(tmp_path / "run")  # and on this process's one device
  np.testing.assert_array_equal(params["blocks"]["mlp"]["fc"]["kernel"], np.load(tmp_path / "kernel.npy"))


def test_an_evaluation_that_a_signal_left_out_is_made_up_for(command, tmp_path):
  settings = ["--mode=train", "--workdir=run", "eval.every_steps=1", "eval.sequences=8"]
  process = command(*settings, "steps=100000", wait=False)
  deadline = time.time() + 120
  while not evaluated(tmp_path / "run"):
    assert process.poll() is None and time.time() < deadline, process.stderr.read()
    time.sleep(0.005)
  process.send_signal(signal.SIGTERM)
  process.communicate()
  last = max(r["step"] for r in records(tmp_path / "run"))
  assert process.returncode == 128 + signal.SIGTERM and evaluated(tmp_path / "run") == list(range(1, last))

  resumed = command(*settings, f"steps={last + 1}")
  assert resumed.returncode == 0, resumed.stderr
  assert evaluated(tmp_path / "run") == list(range(1, last + 2))


def evaluated(workdir):
  """The steps of which there is an evaluation."""
  return [r["step"] for r in records(workdir) if "eval/any_order/nats_per_token" in r] if (workdir / "metrics.jsonl").exists() else []


def test_a_sigterm_while_the_last_checkpoint_is_written_waits_for_it(command, tmp_path):
  for attempt in range(10):
    workdir = tmp_path / f"run{attempt}"
    is_being_written = lambda: any(workdir.glob("checkpoints/*orbax-checkpoint-tmp*"))
    process = command("--mode=train", f"--workdir={workdir}", "steps=1", wait=False)
    while process.poll() is None and not is_being_written():
      time.sleep(0.001)
    process.send_signal(signal.SIGSTOP)
    in_time = is_being_written()
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate()
    if in_time:
      break
  assert in_time and process.returncode == 128 + signal.SIGTERM, errors
  assert "step 1 is saved, and the same command goes on from it" in errors
  assert arrays(workdir, 1)["optimizer['step']"] == 1
