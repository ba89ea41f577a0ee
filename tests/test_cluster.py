"""Runs of several real processes: the numbers of one process, one line where a process is missing or ends, nothing lost.

Run as a program, this file is one process of a run that compares what it restores of the state, its part, with the whole of it.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from aogpt_jax import cluster
from conftest import PYTHON, ROOT

SETTINGS = ["--mode=train", "--config.micro_batches=1", "--config.model.layers=1", "--config.steps=6",
            "--config.checkpoint.every_steps=3", "--config.eval.every_steps=1000000", "--config.eval.sequences=8",
            "--config.eval.distributions=('left_to_right',)", "--config.sample.orders=('left_to_right',)", "--config.sample.steps=1"]
FOREVER = ["--config.steps=1000000", "--config.checkpoint.every_steps=1000000", "--config.optimizer.decay_steps=1000000"]


def start(count, *arguments, directory, program=("-m", "aogpt_jax.main")) -> subprocess.Popen:
  """A run of so many processes, each with a device, by launch/local.sh."""
  command = [str(ROOT / "launch/local.sh"), f"--processes={count}", "--fake=1", "--", *PYTHON,
             *program, *arguments]
  return subprocess.Popen(command, cwd=directory, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))})


def finish(process) -> tuple[int, str, list[str]]:
  """Status, standard output, and the lines of standard error that are not local.sh's."""
  out, err = process.communicate(timeout=300)
  return process.returncode, out, [line for line in err.splitlines() if not line.startswith("local.sh: ")]


def ids(process) -> list[int]:
  """Of the processes that local.sh says that it has started."""
  return [int(re.search(r"has the id (\d+)", process.stderr.readline())[1]) for _ in range(2)]


def losses(workdir) -> dict[int, float]:
  records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  return {r["step"]: r["loss"] for r in records if "loss" in r}


def wait_for_steps(process, workdir, count):
  """Until so many have been recorded."""
  path, deadline = workdir / "metrics.jsonl", time.monotonic() + 200
  while not path.exists() or path.read_text().count("loss") < count:
    assert process.poll() is None and time.monotonic() < deadline, process.communicate()
    time.sleep(0.05)


@pytest.fixture(scope="module")
def settings(words):
  return [f"--config={ROOT / 'tests/configs/words.py'}", *(f"--config.{field}" for field in words), *SETTINGS]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one(settings, directory):
  """The losses of one process."""
  subprocess.run([sys.executable, "-m", "aogpt_jax.main", *settings, "--workdir=one"], cwd=directory, check=True,
                 stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"})
  return losses(directory / "one")


@pytest.fixture(scope="module")
def two(settings, directory):
  """The workdir of two processes, which share the parameters between them."""
  status, out, errors = finish(start(2, *settings, "--config.mesh.fsdp=2", "--workdir=two", directory=directory))
  assert status == 0, errors
  assert not errors and out.count("2 x cpu") == 1 and out.count("step 6/6") == 1  # only process 0 speaks
  return directory / "two"


def close(theirs, ours):
  np.testing.assert_allclose(list(theirs.values()), [ours[step] for step in theirs], rtol=1e-5)


def test_two_processes_have_the_losses_of_one(one, two):
  assert list(losses(two)) == [1, 2, 3, 4, 5, 6]
  close(losses(two), one)


def test_four_processes_go_on_from_the_newest_whole_checkpoint_of_two(one, two, settings, directory):
  workdir = directory / "four"
  shutil.copytree(two, workdir)
  (workdir / "metrics.jsonl").unlink()
  # Of one process's part of the newest checkpoint, which only some of the four may read.
  files = [path for path in (workdir / "checkpoints/6/params").rglob("*") if path.is_file() and "ocdbt.process_1/d" in str(path)]
  assert files
  for path in files:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
  status, out, errors = finish(start(
      4, *settings, "--config.mesh.fsdp=2", f"--workdir={workdir}", directory=directory, program=[__file__]))
  assert status == 0, errors
  assert sorted(re.findall("process (.) restored step 3, bit for bit", out)) == ["0", "1", "2", "3"]
  assert "step 6 can't be restored" in "\n".join(errors)
  assert sorted(p.name for p in (workdir / "checkpoints").iterdir() if p.is_dir()) == ["3", "6", "damaged-6"]
  assert list(losses(workdir)) == [4, 5, 6]
  close(losses(workdir), one)


def test_sigterm_on_one_saves_on_all_and_after_kill_9_on_one_the_others_end_with_a_line(settings, directory):
  workdir = directory / "forever"
  process = start(2, *settings, *FOREVER, f"--workdir={workdir}", directory=directory)
  _, other = ids(process)
  wait_for_steps(process, workdir, 2)
  os.kill(other, signal.SIGTERM)
  status, _, errors = finish(process)
  step, = map(int, re.findall(r"^terminated; step (\d+) is saved, and the same command goes on from it$", "\n".join(errors)))
  assert status == 128 + signal.SIGTERM and len(errors) == 1
  assert [p.name for p in (workdir / "checkpoints").iterdir()] == [str(step)] and max(losses(workdir)) == step

  process = start(2, *settings, *FOREVER, f"--workdir={workdir}", directory=directory)
  first, _ = ids(process)
  wait_for_steps(process, workdir, step + 2)
  os.kill(first, signal.SIGKILL)
  begin = time.monotonic()
  status, out, errors = finish(process)
  assert f"going on from the checkpoint of step {step}" in out
  assert time.monotonic() - begin < 30 and status == 128 + signal.SIGKILL
  line, = errors
  assert line.startswith("process 1: error: process 0 of 2 has ended; start all of them again")


@pytest.mark.parametrize("number, word", [(signal.SIGTERM, "terminated"), (signal.SIGINT, "interrupted")])
def test_one_process_saves_at_a_signal(settings, command, tmp_path, number, word):
  # Where the tests themselves run in the background, SIGINT is ignored, and the process would inherit that.
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  process = command(*settings[3:], *FOREVER, "--workdir=run", wait=False)
  signal.signal(signal.SIGINT, before)
  wait_for_steps(process, tmp_path / "run", 1)
  process.send_signal(number)
  _, errors = process.communicate(timeout=60)
  step = max(losses(tmp_path / "run"))
  assert process.returncode == 128 + number
  assert errors.splitlines()[-1] == f"{word}; step {step} is saved, and the same command goes on from it"
  assert ("interrupt: the state is saved after this step; once more, and it is not" in errors) == (number == signal.SIGINT)
  assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == [str(step)]


def free_port() -> int:
  with socket.create_server(("", 0)) as s:
    return s.getsockname()[1]


def test_where_one_is_missing_each_process_ends_in_time_and_names_it(settings, command):
  flags = [f"--coordinator=localhost:{free_port()}", "--num_processes=3", "--start_timeout=20"]
  begin = time.monotonic()
  started = [command(*settings[3:], *flags, f"--process_id={i}", wait=False) for i in (0, 1)]
  for process in started:
    out, errors = process.communicate(timeout=100)
    assert process.returncode == 1 and out == ""
    assert errors == ("error: process 2 of 3 did not start within --start_timeout=20 seconds of the first; see why there, and start "
                      "all of them again.\n")
  assert 20 < time.monotonic() - begin < 20 + 60  # what is above 20 is the interpreter's start


def join_all(places, timeout=1.0) -> list[str]:
  """What `join` raises on each of several processes, which threads stand for: none of them comes as far as jax."""
  raised = [""] * len(places)

  def run(i):
    try:
      cluster.join(places[i], timeout)
    except cluster.ClusterError as e:
      raised[i] = str(e)

  threads = [threading.Thread(target=run, args=(i,)) for i in range(len(places))]
  for thread in threads:
    thread.start()
    time.sleep(0.1)
  for thread in threads:
    thread.join()
  return raised


def test_what_does_not_fit_is_named_on_all_processes():
  address = f"localhost:{free_port()}"
  twice = join_all([cluster.Place(address, 3, i) for i in (0, 1, 1)])
  assert all("--process_id=1: two processes have it" in line for line in twice)
  other = join_all([cluster.Place(address, 3, 0), cluster.Place(address, 3, 2), cluster.Place(address, 2, 1)])
  assert all("process 1 on" in line and "was started with 2, and process 0 with 3" in line for line in other)
  alone, = join_all([cluster.Place(address, 3, 2)])
  assert f"--coordinator={address}: process 0 of 3 did not start within --start_timeout=1 seconds" in alone
  nowhere, = join_all([cluster.Place("nowhere.invalid:80", 2, 1)])
  assert "--coordinator=nowhere.invalid:80: process 0 of 2 did not start" in nowhere
  with socket.create_server(("", 0)) as taken:
    line, = join_all([cluster.Place(f"localhost:{taken.getsockname()[1]}", 2, 0)])
    assert "process 0 can't listen on port" in line and "in use" in line


def test_the_wait_ends_with_the_time_of_the_process_that_came_first():
  address, begin = f"localhost:{free_port()}", time.monotonic()
  lines = [[], []]
  threads = [threading.Thread(target=lambda i=i, t=t: lines[i].extend(join_all([cluster.Place(address, 3, i)], t)))
             for i, t in ((1, 1.0), (0, 100.0))]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert all("process 2 of 3 did not start" in line for line, in lines) and time.monotonic() - begin < 20


@pytest.mark.parametrize("flags, message", [
    (dict(coordinator="here", num_processes=2, process_id=0), "--coordinator=here: is not HOST:PORT"),
    (dict(coordinator="here:70000", num_processes=2, process_id=0), "with a port from 1 to 65535"),
    (dict(coordinator="here:80", num_processes=2, process_id=2), "--process_id=2: must be below --num_processes=2"),
    (dict(num_processes=2, process_id=1), "--coordinator: is missing"),
    (dict(coordinator="here:80"), "--num_processes, --process_id: is missing"),
])
def test_flags_that_do_not_fit_are_named(flags, message):
  with pytest.raises(cluster.ClusterError, match=re.escape(message)):
    cluster.find(**flags)


def test_slurm_says_where_a_process_is(monkeypatch):
  assert cluster.find() is None
  for name, value in dict(JOB_ID=5000, STEP_NODELIST="gpu[07-09,12]", NTASKS=8, PROCID=3, LOCALID=1).items():
    monkeypatch.setenv(f"SLURM_{name}", str(value))
  place = cluster.find()
  assert (place.host, place.count, place.index, place.local_devices) == ("gpu07", 8, 3, (1,)) and 1024 < place.port < 65536
  assert cluster.find(num_processes=1) is None
  monkeypatch.setenv("SLURM_NTASKS", "1")
  assert cluster.find() is None
  monkeypatch.setenv("SLURM_NTASKS", "many")
  with pytest.raises(cluster.ClusterError, match="the slurm cluster that this process is in can't be read"):
    cluster.find()


def main():
  """A process of the run of four."""
  from aogpt_jax import main as main_lib
  from aogpt_jax.training import checkpoints
  restore = checkpoints.Checkpoints.restore

  def compared(self, shapes):
    state = restore(self, shapes)
    here = jax.sharding.make_single_device_sharding(jax.local_devices()[0])
    whole = restore(self, jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), shapes))
    assert any(not x.is_fully_addressable and x.addressable_shards[0].data.size < x.size for x in jax.tree.leaves(state.opt_state))
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(whole), strict=True):
      for shard in x.addressable_shards:
        np.testing.assert_array_equal(shard.data, np.asarray(y)[shard.index])
    print(f"process {jax.process_index()} restored step {int(state.step)}, bit for bit", flush=True)
    return state

  checkpoints.Checkpoints.restore = compared
  from absl import app
  app.run(main_lib.main, flags_parser=main_lib.parse_flags)


if __name__ == "__main__":
  main()
