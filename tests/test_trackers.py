"""TensorBoard and Weights & Biases: one point a step also after a run was killed, and a run that goes on without either."""

import collections
import json
import os
import re
import struct
import subprocess
import sys

import pytest

from aogpt_jax import config as config_lib
from aogpt_jax.training import metrics
from aogpt_jax.training import trackers
from conftest import ROOT, shown_on_terminal


def make_config(**log):
  config = config_lib.default_config()
  config.log.update(log)
  return config


def record(workdir, start, steps, config):
  """What a process that starts after `start` updates writes of these steps."""
  writer = metrics.MetricWriter(workdir, start, config)
  for step in steps:
    writer.write(step, {"loss": step / 10, "batch_hash": "0a"})
    if step % 2 == 0:
      writer.write(step, {"eval/any_order/nats_per_token": step / 100})
      writer.write_text(step, "samples", f"text of step {step}")
  writer.close()


def events(workdir):
  """All that the event files hold, as (tag, step): values."""
  from tensorboardX.proto import event_pb2
  found = collections.defaultdict(list)
  for path in sorted((workdir / trackers.BOARD).iterdir()):
    for data in trackers._records(path.read_bytes()):
      event = event_pb2.Event.FromString(data[12:-4])
      for value in event.summary.value:
        found[value.tag, event.step].append(value)
  return found


def test_a_run_that_was_killed_leaves_no_point_twice(tmp_path):
  pytest.importorskip("tensorboardX")
  config = make_config()
  record(tmp_path, -1, range(1, 8), config)
  (path,) = (tmp_path / trackers.BOARD).iterdir()
  path.write_bytes(path.read_bytes()[:-5])  # killed while it was writing
  record(tmp_path, 4, range(5, 11), config)  # its newest checkpoint is of step 4
  found = events(tmp_path)
  assert {key: len(values) for key, values in found.items() if len(values) > 1} == {}
  for step in range(1, 11):
    assert found["train/loss", step][0].simple_value == pytest.approx(step / 10)
  assert [step for tag, step in sorted(found) if tag == "eval/any_order/nats_per_token"] == [2, 4, 6, 8, 10]
  texts = {step: value.tensor.string_val[0] for (tag, step), (value,) in found.items() if tag.startswith("samples")}
  assert texts == {step: f"    text of step {step}".encode() for step in (2, 4, 6, 8, 10)}
  assert ("train/batch_hash", 1) not in found
  steps = [r["step"] for r in metrics.read(tmp_path) if "loss" in r]
  assert steps == list(range(1, 11))
  record(tmp_path, -1, range(1, 3), config)  # started anew: no checkpoint was left
  assert {step for _, step in events(tmp_path)} <= {0, 1, 2}


def test_event_files_are_written_without_torch(tmp_path):
  pytest.importorskip("tensorboardX")
  (tmp_path / "torch.py").write_text("raise AssertionError('torch is imported, which takes seconds')")
  code = """
import pathlib, sys
from aogpt_jax import config
from aogpt_jax.training import metrics
writer = metrics.MetricWriter(pathlib.Path(sys.argv[1]), -1, config.default_config())
writer.write(1, {"loss": 1.0})
writer.close()
assert "tensorboardX" in sys.modules and "torch" not in sys.modules
"""
  subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env={
      **os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "JAX_PLATFORMS": "cpu"})
  assert ("train/loss", 1) in events(tmp_path)


def test_hyper_parameters_are_those_that_make_the_run_what_it_is(tmp_path):
  pytest.importorskip("tensorboardX")
  from tensorboardX.proto import plugin_hparams_pb2
  config = make_config()
  config.orders, config.steps = "mix(0.5)", 77
  record(tmp_path, -1, [1], config)
  record(tmp_path, 1, [2], config)
  found = [value for (tag, _), values in events(tmp_path).items() for value in values if tag.startswith("_hparams_/")]
  assert sorted(value.tag for value in found) == [
      "_hparams_/experiment", "_hparams_/session_end_info", "_hparams_/session_start_info"]
  of = {value.tag: plugin_hparams_pb2.HParamsPluginData.FromString(value.metadata.plugin_data.content) for value in found}
  hparams = of["_hparams_/session_start_info"].session_start_info.hparams
  assert hparams["orders"].string_value == "mix(0.5)" and hparams["steps"].number_value == 77
  assert hparams["model.qk_norm"].bool_value and "sample.seed" not in hparams and "data.cache_dir" not in hparams
  names = [info.name.tag for info in of["_hparams_/experiment"].experiment.metric_infos]
  assert "eval/any_order/nats_per_token" in names and "train/loss" in names


ABSENT = 'raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)\n'


def test_without_tensorboardx_matplotlib_and_wandb_a_run_says_so_and_goes_on_with_a_live_line(command, tmp_path):
  (tmp_path / "absent").mkdir()
  for name in ("tensorboardX", "matplotlib", "wandb"):
    (tmp_path / "absent" / f"{name}.py").write_text(ABSENT)
  status, seen, errors = shown_on_terminal(lambda terminal: command(
      "steps=6", "eval.every_steps=3", "log.tensorboard=True", "log.wandb=True", "log.every_steps=2", "--workdir=run", wait=False,
      stdout=terminal, environment={"PYTHONPATH": f"{tmp_path}/absent:{ROOT}", "TERM": "xterm"}), columns=70)
  assert status == 0, errors
  said = seen.decode()
  assert said.count("tensorboardX is not installed (pip install tensorboardX); the run goes on") == 1
  assert said.count("wandb is not installed (pip install 'aogpt_jax[wandb]'); the run goes on") == 1
  assert said.count("matplotlib is not installed") == 1 and "loss.png" not in said
  # The live line: redrawn in place, no wider than the terminal, and not among the lines that stay.
  live = re.findall(r"\r(step [^\r\n]*)\x1b\[K", said)
  assert any(line.startswith("step 6/6  loss ") for line in live) and all(len(line) < 70 for line in live)
  kept = [line.rpartition("\x1b[K")[2] for line in said.replace("\r\n", "\n").split("\n")]
  assert not any(line.startswith("step 6/6") for line in kept)
  assert any(line.startswith("step 6 validation (EMA): left to right") for line in kept)
  written = sorted(p.name for p in (tmp_path / "run").iterdir())
  assert written == ["checkpoints", "config.py", "eval_validation.json", "eval_validation.npz", "metrics.jsonl", "samples.jsonl",
                     "samples.txt", "starts.jsonl"]
  (start,) = (json.loads(line) for line in (tmp_path / "run/starts.jsonl").read_text().splitlines())
  assert start["step"] == 0 and start["config"]["steps"] == 6 and "jax" in start["versions"] and start["devices"] == 1


def test_a_service_that_fails_is_left_out_with_one_line(tmp_path, monkeypatch, capsys):
  class Run:
    step = 0

    def log(self, *_, **__):
      raise RuntimeError("the service is gone\nand more of it")

    def finish(self, **_):
      raise RuntimeError("still gone")

  class Wandb:
    Settings = staticmethod(lambda **_: None)
    login = staticmethod(lambda prompt: False)
    init = staticmethod(lambda **_: Run())
    Html = staticmethod(lambda text, inject: text)

  monkeypatch.setitem(sys.modules, "wandb", Wandb)
  monkeypatch.delenv("WANDB_MODE", raising=False)
  record(tmp_path, -1, range(1, 5), make_config(wandb=True, tensorboard=False))
  lines = capsys.readouterr().out.splitlines()
  assert [line.split(" (")[0] for line in lines] == [
      f"config.log.wandb: offline, since there is no API key; `wandb login` takes one; what it gets is kept in {tmp_path}/wandb, "
      "for `wandb sync`",
      "config.log.wandb: Weights & Biases has failed", "config.log.wandb: Weights & Biases has failed at the end"]
  assert len(metrics.read(tmp_path)) == 6
  monkeypatch.setattr(Wandb, "init", staticmethod(lambda **_: 1 / 0))
  record(tmp_path, 4, [5], make_config(wandb=True, tensorboard=False))
  assert "can't be used (division by zero); the run goes on without it" in capsys.readouterr().out
  assert len(metrics.read(tmp_path)) == 7


def offline_records(content):
  """The records of a .wandb file, which is a log of LevelDB: blocks of 32 KiB with parts of records, after a header of 7 bytes."""
  at, data = 7, b""
  while at + 7 <= len(content):
    if (left := 32768 - at % 32768) < 7:
      at += left
      continue
    length, kind = struct.unpack_from("<HB", content, at + 4)
    data += content[at + 7 : at + 7 + length]
    at += 7 + length
    if kind in (1, 4):  # a whole record, or the last part of one
      yield data
      data = b""


def test_weights_and_biases_gets_scalars_texts_and_the_config_offline(tmp_path, monkeypatch):
  pytest.importorskip("wandb", reason="wandb is not installed; it comes with .[wandb]")
  from wandb.proto import wandb_internal_pb2
  monkeypatch.setenv("WANDB_MODE", "offline")
  config = make_config(wandb=True, tensorboard=False)
  record(tmp_path, -1, range(1, 4), config)
  record(tmp_path, 3, [4], config)
  identity = (tmp_path / "wandb_id.txt").read_text().strip()
  paths = [*(tmp_path / "wandb").glob("offline-run-*/run-*.wandb")]
  assert paths and all(path.name == f"run-{identity}.wandb" for path in paths)
  points = []
  for path in paths:
    for data in offline_records(path.read_bytes()):
      item = wandb_internal_pb2.Record.FromString(data)
      if item.HasField("run"):
        assert item.run.run_id == identity and item.run.project == "aogpt_jax"
        assert {"steps", "model", "orders"} <= {update.key for update in item.run.config.update}
      if item.HasField("history"):
        names = {i.nested_key[0]: i.value_json for i in item.history.item}
        points.append((item.history.step.num, names.get("train/loss"), "samples" in names))
  assert sorted(points) == [(1, "0.1", False), (2, "0.2", True), (3, "0.3", False), (4, "0.4", True)]
