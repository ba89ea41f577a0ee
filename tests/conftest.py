"""Fixtures that several test files share."""

import atexit
import collections
import fcntl
import functools
import gc
import importlib.util
import json
import os
import pathlib
import random
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import termios

import jax
import jaxlib
import pytest


def _has_tpu():
  return importlib.util.find_spec("libtpu") is not None


def _flags():
  """XLA_FLAGS by which programs that run for milliseconds, as nearly all of the tests' do, are compiled fast."""
  flags = ["--xla_backend_optimization_level=0"]
  # A flag that XLA does not know would end the process: a TPU's has none of the CPU's, and the newer ones no longer have this.
  if jaxlib.version.__version_info__ < (0, 11) and (os.environ.get("JAX_PLATFORMS") == "cpu" or not _has_tpu()):
    flags.append("--xla_cpu_use_fusion_emitters=false")  # the emitters of before compile three times as fast
  return " ".join([os.environ.get("XLA_FLAGS", ""), *flags])


# No program is compiled twice, in whichever of the tests' processes. Set before JAX starts; processes inherit it.
os.environ["XLA_FLAGS"] = _flags()
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="aogpt_jax_tests_")
  atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

gc.set_threshold(200_000, 100, 1000)  # JAX makes and keeps many objects: looking for cycles among them takes a tenth of the time

# Warnings that other packages cause by what they use of each other. ml_collections 1.1 loads config files by a function that Python
# 3.12 removes, and has another way there; Orbax 0.12.8 names a class that JAX 0.12.1 deprecates.
ALLOWED = ("ignore:the load_module() method is deprecated:DeprecationWarning",
           "ignore:jax.sharding.SingleDeviceSharding is deprecated:DeprecationWarning")
PYTHON = (sys.executable, "-W", "error", *(f"-W{warning}" for warning in ALLOWED))
ROOT = pathlib.Path(__file__).resolve().parents[1]


_LONGEST = ("test_notebook.py", "test_main.py", "test_cluster.py", "test_zero_shot.py")


def pytest_collection_modifyitems(items):
  """The files that take longest come first: the last one would keep a process alone."""
  rank = {name: i for i, name in enumerate(_LONGEST)}
  items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


@pytest.fixture(scope="session")
def words(tmp_path_factory) -> list[str]:
  """Overrides that give tests/configs/words.py its data: two hundred small documents of seeded random words."""
  directory = tmp_path_factory.mktemp("words")
  rng = random.Random(0)
  vocabulary = ["any", "order", "masked", "diffusion", "token", "cache", "entry", "step"]
  for i in range(200):
    (directory / f"{i:03}.txt").write_text(" ".join(rng.choice(vocabulary) for _ in range(rng.randrange(5, 30))))
  return [f"data.source=files:{directory}/*.txt", f"data.cache_dir={directory}/cache"]


@pytest.fixture
def words_config(words):
  """The config of tests/configs/words.py with its data."""
  return make_words_config(words)


def make_words_config(words):
  spec = importlib.util.spec_from_file_location("words", ROOT / "tests" / "configs" / "words.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  config = module.get_config()
  for override in words:
    field, value = override.split("=", 1)
    config.data[field.removeprefix("data.")] = value
  return config


@pytest.fixture(scope="module")
def untrained(words, tmp_path_factory) -> str:
  """--workdir of a run whose checkpoint holds the initial parameters."""
  from aogpt_jax import run as run_lib  # Here: by this file alone, most tests would not need all that these import.
  from aogpt_jax.training import checkpoints
  from aogpt_jax.training import step as step_lib

  config = make_words_config(words)
  run = run_lib.open_run(config, str(tmp_path_factory.mktemp("untrained")), "sample")
  saver = checkpoints.Checkpoints(run.workdir, config)
  saver.save(step_lib.make_trainer(config, run.model, run.mesh).init())
  saver.wait()
  saver.close()
  return f"--workdir={run.workdir}"


@pytest.fixture
def command(words, tmp_path):
  """See `make_command`; in an empty directory."""
  return make_command(words, tmp_path)


def make_command(words, directory):
  """Starts `python -m aogpt_jax.main` in a directory, as a process of its own.

  `command("--mode=train", "steps=10")` returns the finished process; with wait=False, the running one. What it reads from
  standard input is `stdin`; `stdout` is where its output goes, if not into what is returned. Another command is `module`; with
  own_group, it and what it starts can be killed together. Without a config, the arguments are passed as they are.
  """

  def start(*arguments, config=str(ROOT / "tests" / "configs" / "words.py"), wait=True, environment=(), stdin="",
            stdout=subprocess.PIPE, module="aogpt_jax.main", own_group=False):
    flags = list(arguments)
    if config:
      flags = [f"--config={config}", *(a if a.startswith("--") else f"--config.{a}" for a in (*words, *arguments))]
    variables = _environment() | dict(environment)
    logs = variables.get("JAX_LOG_COMPILES") == "1"
    if wait and stdout == subprocess.PIPE and not own_group and variables == _PREPARED_FOR | ({"JAX_LOG_COMPILES": "1"} if logs else {}):
      return _run_prepared(module, flags, directory, stdin, logs)
    process = subprocess.Popen(
        [*PYTHON, "-m", module, *flags], cwd=directory, text=True, stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.PIPE,
        start_new_session=own_group, env=variables)
    if not wait:
      return process
    out, err = process.communicate(stdin, timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)

  return start


def _environment():
  own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
  return own | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


_PREPARED_FOR = _environment()


@functools.cache
def _prepared():
  """See prepared.py."""
  ours, theirs = socket.socketpair()
  with theirs:
    subprocess.Popen([*PYTHON, str(ROOT / "tests" / "prepared.py"), str(theirs.fileno())], env=_PREPARED_FOR,  # ends with us
                     pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL).returncode = 0
  ours.settimeout(300)
  atexit.register(ours.close)
  return ours


def _run_prepared(module, arguments, directory, stdin, logs_compilations):
  with tempfile.TemporaryDirectory() as streams:
    paths = [pathlib.Path(streams, name) for name in ("stdin", "stdout", "stderr")]
    for path in paths:
      path.write_text(stdin if path.name == "stdin" else "")
    request = {"module": module, "arguments": arguments, "directory": str(directory), "streams": [str(path) for path in paths],
               "logs_compilations": logs_compilations}
    _prepared().sendall(json.dumps(request).encode() + b"\n")
    answer = b""
    while not answer.endswith(b"\n"):
      answer += (received := _prepared().recv(64))
      assert received, "tests/prepared.py has ended"
    return subprocess.CompletedProcess(["python", "-m", module, *arguments], int(answer), *(path.read_text() for path in paths[1:]))


def shown_on_terminal(start, columns, typed=""):
  """Runs a program of `make_command` on a terminal of 24 lines; returns (status, bytes shown, standard error).

  Args:
    start: takes what `stdout` is to be, and returns the running process.
    columns: of the terminal.
    typed: what the process reads from standard input.
  """
  ours, theirs = os.openpty()
  fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
  process = start(theirs)
  os.close(theirs)
  if typed:
    process.stdin.write(typed)
    process.stdin.close()
  seen = b""
  try:
    while read := os.read(ours, 65536):
      seen += read
  except OSError:  # how Linux says that the other end is closed
    pass
  os.close(ours)
  process.stdin.close()
  with process.stderr:
    errors = process.stderr.read()
  return process.wait(timeout=60), seen, errors


_BROWSERS = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def browser():
  """A Chromium, from Playwright."""
  playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; it comes with .[test]")
  found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _BROWSERS)), None)
  with playwright.sync_playwright() as p:
    if not found and not os.path.exists(p.chromium.executable_path):
      pytest.skip("there is no Chromium in $CHROMIUM, on the PATH, or from `playwright install chromium`")
    with p.chromium.launch(executable_path=found or None) as started:
      yield started


def run_on_eight_devices(script: str, path: pathlib.Path) -> None:
  """Runs a test file as a program, in a process with eight devices; `path` is its argument, where it writes what it finds."""
  env = os.environ | {
      "JAX_PLATFORMS": "cpu",
      "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
      "PYTHONPATH": str(ROOT),
  }
  subprocess.run([*PYTHON, script, str(path)], env=env, cwd=ROOT, check=True)


@pytest.fixture
def compilations():
  """Name of a jitted function -> how often XLA compiled it while the test ran."""
  counts = collections.Counter()

  def listen(event, duration, **kwargs):
    if event == "/jax/core/compile/backend_compile_duration":
      counts[kwargs["fun_name"].removeprefix("jit(").removesuffix(")")] += 1

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield counts
  jax.monitoring.unregister_event_duration_listener(listen)
