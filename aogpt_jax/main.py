"""Trains, evaluates and samples: python -m aogpt_jax.main --config=configs/tiny.py [--mode=...] [--config.KEY=VALUE ...]

Every field of a config, with its meaning, is in aogpt_jax/config.py.

On a TPU pod and under SLURM, the processes of a run find each other; elsewhere, each gets --coordinator=HOST:PORT of process 0,
--num_processes=N and --process_id=I. See launch/README.md.

Exit status: 0 when all is done. 1 after an error or an interrupt, with a line that says what to do; so too on all processes where
one of them has ended. While a run trains, SIGTERM and Ctrl-C have all of its processes save the state after the same step, with
the status 143 or 130, and the same command goes on from it; Ctrl-C a second time stops at once. 2 where absl can't read a flag.
"""

from collections.abc import Callable
import pathlib
import runpy
import signal
import sys
import traceback
from typing import Any

from absl import app
from absl import flags
from absl import logging
import jax
from ml_collections import config_flags

from aogpt_jax import cluster
from aogpt_jax import config as config_lib
from aogpt_jax import console
from aogpt_jax import memory
from aogpt_jax import run as run_lib
from aogpt_jax.aot import report
from aogpt_jax.data import baselines
from aogpt_jax.evaluation import generative
from aogpt_jax.evaluation import held_out
from aogpt_jax.evaluation import zero_shot
from aogpt_jax.sampling import output
from aogpt_jax.sampling import page
from aogpt_jax.sampling import picture
from aogpt_jax.training import checkpoints
from aogpt_jax.training import curves
from aogpt_jax.training import loop
from aogpt_jax.training import provenance

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, e.g. configs/tiny.py.", lock_config=True)
_WORKDIR = flags.DEFINE_string(
    "workdir", "", "Directory of the run; that of the config where a run has written it, else runs/<config name>.")
_MODE = flags.DEFINE_enum(
    "mode", "all", (*run_lib.MODES, "aot"),
    "What to do; all trains, evaluates and samples; aot compiles for the devices of --topology and says what they would need.")
_TOPOLOGY = flags.DEFINE_list("topology", "v5e:4x4", "Of --mode=aot: TPU slices, e.g. v5e:4x4,v4:2x2x4, or cuda.")
_HTML = flags.DEFINE_string("html", "", "File for a page that shows the texts as they were drawn, where the mode draws some.")
_PICTURE = flags.DEFINE_string("picture", "", "The same as a picture, .png, .svg or .pdf: a row for each step.")
_QUIET = flags.DEFINE_bool("quiet", False, "Print nothing but warnings and errors; files are written all the same.")
_COORDINATOR = flags.DEFINE_string("coordinator", "", "HOST:PORT of process 0, in a run of several that is not detected.")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", 0, "Of such a run; 1 is a run of this process alone.", lower_bound=0)
_PROCESS_ID = flags.DEFINE_integer("process_id", -1, "Of this process, from 0.", lower_bound=-1)
_START_TIMEOUT = flags.DEFINE_float(
    "start_timeout", 600.0, "Seconds after the start of the first process in which all of a run must have come.", lower_bound=1.0)

# The flags of single processes, which a sweep has no use for.
CLUSTER_FLAGS = ("coordinator", "num_processes", "process_id", "start_timeout")


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    sys.exit(f"error: unknown arguments: {' '.join(argv[1:])}")
  memory.keep_freed()
  sys.stdout.reconfigure(errors="replace")  # texts have characters that not every terminal has
  path = _config_path(config_flags.get_config_filename(flags.FLAGS["config"]))
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)  # the libraries' own lines would bury ours
  if _MODE.value == "aot":
    return _ahead_of_time(path)
  if _CONFIG.value.compilation_cache:
    jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(_CONFIG.value.compilation_cache).expanduser()))
  # A user's error gets one line: what, where and how to fix it. A bug keeps its traceback.
  try:
    config_lib.check(_CONFIG.value)
    place = cluster.find(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
    cluster.join(place, _START_TIMEOUT.value)
  except (config_lib.ConfigError, cluster.ClusterError) as e:
    sys.exit(f"error: {e}")
  except KeyboardInterrupt:
    sys.exit("interrupted; nothing was done yet")
  several = place is not None
  try:
    output.check_file("--html", _HTML.value, _MODE.value)
    output.check_file("--picture", _PICTURE.value, _MODE.value, picture.ENDINGS)
    run = run_lib.open_run(_CONFIG.value, _workdir(path), _MODE.value)
  except (ValueError, OSError, ImportError, RuntimeError) as e:
    cluster.end(f"error: {e}")
  except KeyboardInterrupt:
    cluster.end("interrupted; nothing was done yet but preparing the data")
  try:
    _dispatch(run, _MODE.value)
    cluster.leave()
  except (config_lib.ConfigError, OSError, FloatingPointError) as e:
    cluster.end(f"error: {e}")
  except KeyboardInterrupt as e:
    cluster.end(f"interrupted; {e if str(e) else 'the same command goes on from the newest checkpoint'}")
  except cluster.Terminated as e:
    if jax.process_index() == 0:
      print(f"{'interrupted' if e.number == signal.SIGINT else 'terminated'}; {e}", file=sys.stderr, flush=True)
    cluster.leave()
    sys.exit(128 + e.number)  # what a shell says of a process that the signal has ended
  except Exception:  # pylint: disable=broad-exception-caught  # of a collective without one of its processes, or a bug
    if not several:
      raise
    cluster.wait_for_the_end()
    traceback.print_exc()
    cluster.end("")


def _ahead_of_time(path: pathlib.Path) -> None:
  try:
    if not report.run(_CONFIG.value, _TOPOLOGY.value, pathlib.Path(_workdir(path))):
      sys.exit(1)
  except (ValueError, ImportError, OSError) as e:
    sys.exit("error: " + " ".join(str(e).split()))


def parse_flags(argv: list[str]) -> list[str]:
  """absl's parser, with one line instead of a traceback where the config or one of its fields does not exist."""
  arguments = [argument.lstrip("-").partition("=") for argument in argv[1:]]
  names = [name for name, _, _ in arguments]
  if not {"config", "help", "helpshort", "helpfull"}.intersection(names):
    sys.exit("error: --config is missing; give a config file, e.g. --config=configs/tiny.py")
  for (name, equals, value), after in zip(arguments, [*argv[2:], ""]):
    if name == "config":
      value = value if equals else after
      if not _config_path(value).is_file():
        sys.exit(f"error: --config={value}: there is no such file in {pathlib.Path.cwd()}")
      _try_config(value)
  try:
    for name in names:
      if name.startswith("config."):
        config_lib.check_field(name.removeprefix("config."))
    left = flags.FLAGS(argv)
  except (config_lib.ConfigError, flags.Error) as e:
    sys.exit(f"error: {e}")
  console.be_quiet(_QUIET.value)
  return left


def _try_config(value: str) -> None:
  """Names the file and the line of a mistake in a config, which ml_collections would bury in its own traceback."""
  path, _, argument = value.partition(":")
  try:
    namespace = runpy.run_path(path)
    if "get_config" not in namespace:
      sys.exit(f"error: --config={value}: has no function get_config(); see configs/tiny.py")
    namespace["get_config"](*([argument] if argument else []))
    list(namespace.get("sweep", tuple)())  # of aogpt_jax.sweep
  except Exception as e:  # pylint: disable=broad-exception-caught  # whatever the file does
    lines = [frame.lineno for frame in traceback.extract_tb(e.__traceback__) if frame.filename == path]
    line = e.lineno if isinstance(e, SyntaxError) else lines[-1] if lines else None
    sys.exit(f"error: --config={value}{f', line {line}' if line else ''}: {type(e).__name__}: {e}")


def _config_path(value: str) -> pathlib.Path:
  return pathlib.Path(value.split(":")[0])  # what follows a colon is the argument of get_config()


def _workdir(path: pathlib.Path) -> str:
  if _WORKDIR.value:
    return _WORKDIR.value
  is_of_run = path.name == config_lib.FILE and (path.parent / "checkpoints").is_dir()
  return str(path.parent) if is_of_run else f"runs/{path.stem}"


def _dispatch(run: run_lib.Run, mode: str) -> None:
  if mode in ("all", "train"):
    entropies = baselines.entropies(run.packed, "validation")
    console.say(f"validation text: unigram entropy {entropies.unigram:.4f}, bigram entropy {entropies.bigram:.4f} nats/token")
    state = loop.train(run)
    trained = {"ema": state.ema, "raw": state.params}, int(jax.device_get(state.step))
    load = lambda weights: (trained[0][weights], trained[1])
    written = [run.workdir / "checkpoints", run.workdir / "metrics.jsonl"]
    drawn = curves.draw(run.workdir, {"unigram entropy": entropies.unigram, "bigram entropy": entropies.bigram})
    written += [drawn] if drawn else []
  else:
    load = lambda weights: checkpoints.load_params(run.workdir, run.config, run.mesh, weights)
    written = []
  if mode in ("all", "eval"):
    written += _evaluate(run, load)
  if mode in ("all", "sample"):
    params, step = load("ema")
    console.say(f"sampling from step {step:,}, EMA weights, into {run.workdir}/samples.jsonl")
    written += output.draw(run.workdir, run.model, params, run.tokenizer, run.prompts, run.config.sample, run.mesh,
                           {"weights": "ema", "checkpoint_step": step})
    cluster.gather(None)  # process 0 has written what all read below
    if _HTML.value:
      written.append(page.write(_HTML.value, run.workdir / "samples.jsonl", run.model, params, run.tokenizer))
    if _PICTURE.value:
      written.append(picture.write(_PICTURE.value, run.workdir / "samples.jsonl", run.tokenizer))
  if mode in ("all", "eval") and run.config.eval.generative.judge:  # of the texts that were just drawn, too
    written += generative.evaluate(run, load)
  console.say("\n".join(["written:", *(f"  {path}" for path in written)]))


def _evaluate(run: run_lib.Run, load: Callable[[str], tuple[Any, int]]) -> list[pathlib.Path]:
  """Evaluates the texts that the run was opened for; returns the files. `load` gives parameters and their step."""
  config, written = run.config.eval, []
  name = {"ema": "EMA", "raw": "raw"}[config.weights]
  if run.evaluated:
    params, step = load(config.weights)
    if run.packed:
      provenance.check_text(run.workdir, run.config, run.packed)
    entropies = baselines.entropies(run.evaluated, run.split)
    report = held_out.report(run, params)
    text = config.source or f"{config.split} text"
    console.say(f"\n{text} at step {step:,}, {name} weights\n{held_out.table(report, entropies)}\n")
    written += held_out.write(run, step, report, entropies)
  if config.zero_shot.datasets:
    params, step = load(config.weights) if "run" in config.zero_shot.models else (None, None)
    scores = zero_shot.evaluate(run, params)
    of_run = f" at step {step:,}, {name} weights" if step is not None else ""
    perplexities, details = zero_shot.tables(scores)
    tables = ["\n".join(held_out.aligned(perplexities)), *zero_shot.remarks(run, scores), "\n".join(held_out.aligned(details))]
    console.say("\n\n".join([f"\nzero-shot perplexity{of_run}\n" + tables[0], *tables[1:]]) + "\n")
    written += zero_shot.write(run, step, scores)
  return written


if __name__ == "__main__":
  app.run(main, flags_parser=parse_flags)
