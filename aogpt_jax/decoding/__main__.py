"""Measures how fast and how well the samplers draw: trains the models that it takes, and writes a page of what they do.

    python -m aogpt_jax.decoding --config=configs/decoding.py [--workdir=DIR] [--page=docs/decoding.md] [--redraw]

The config file has a function `sweep()`; see sweep.py. Its unit `judge` scores the texts of the others, but for those whose data
are Sudokus, which are named ARM-SEED. Started again, it goes on where it was: measurements are kept in results.json beside the
page, for as long as parameters and settings are the same. With --redraw, the page is written again from those alone.
"""

import os
import pathlib
import platform
import sys

from absl import app
from absl import flags
from absl import logging
import jax
from ml_collections import config_flags

from aogpt_jax import config as config_lib
from aogpt_jax import console
from aogpt_jax import main as main_lib
from aogpt_jax import sweep
from aogpt_jax.decoding import measurements
from aogpt_jax.decoding import page as page_lib
from aogpt_jax.evaluation import held_out

_PAGE = flags.DEFINE_string("page", "docs/decoding.md", "Where the page is written; its pictures and results go beside it.")
_REDRAW = flags.DEFINE_bool("redraw", False, "Write the page from the results beside it, and train and measure nothing.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Of the draws of each sampler.", lower_bound=1)
_TEXTS = flags.DEFINE_integer("texts", 128, "Drawn for each sampler and seed.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 10, "Measurements of each window's time.", lower_bound=1)
_PUZZLES = flags.DEFINE_integer("puzzles", 512, "Sudokus that each order is tried on.", lower_bound=1)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    sys.exit(f"error: unknown arguments: {' '.join(argv[1:])}")
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)  # the libraries' own lines would bury ours
  page = pathlib.Path(_PAGE.value)
  path = page.with_suffix("") / "results.json"
  if _REDRAW.value and not path.is_file():
    sys.exit(f"error: --redraw: there is no {path}; leave it out to train and to measure.")
  try:
    kept, failed = measurements.Kept(path), {}
  except ValueError as e:
    sys.exit(f"error: {e}")
  if not _REDRAW.value:
    config_flag = config_flags.get_config_filename(flags.FLAGS["config"])
    workdir = pathlib.Path(flags.FLAGS.workdir or f"runs/{pathlib.Path(config_flag.partition(':')[0]).stem}")
    try:
      units = sweep.units(config_flag, flags.FLAGS.config, str(workdir))
      measurements.check(units)
    except (ValueError, TypeError) as e:
      sys.exit(f"error: {e}")
    try:
      failed = _train_and_measure(config_flag, units, workdir, kept)
    except (config_lib.ConfigError, OSError) as e:
      sys.exit(f"error: {e}")
    except KeyboardInterrupt:
      sys.exit("interrupted; the same command goes on")
  written = page_lib.write(page, kept.results)
  console.say("\n".join(["written:", *(f"  {file}" for file in (*written, path))]))
  if failed:
    sys.exit(f"error: {len(failed)} units failed: {', '.join(failed)}; the page is without them, and the same command tries them "
             "again")


def _train_and_measure(
    config_flag: str, units: list[sweep.Unit], workdir: pathlib.Path, kept: measurements.Kept
) -> dict[str, int]:
  """Returns the units that failed."""
  is_done = lambda unit: held_out.is_done(unit.workdir, unit.config)
  waiting = [unit for unit in units if not is_done(unit)]
  console.say(f"decoding: {len(units) - len(waiting)} of {len(units)} units of {config_flag} are finished in {workdir}")
  # Before this process opens a device: the units need them.
  failed, core_seconds = sweep.timed(waiting, workdir, kept.results["about"]["core_seconds"], sweep.JOBS.value)
  if flags.FLAGS.config.compilation_cache:
    jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(flags.FLAGS.config.compilation_cache).expanduser()))
  opened = {unit.name: measurements.opened(unit) for unit in units if is_done(unit)}
  if not opened:
    raise config_lib.ConfigError("no unit is finished, so that there is nothing to measure; why is above.")
  cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
  about = {"command": f"python -m aogpt_jax.decoding --config={config_flag}", "core_seconds": round(core_seconds),
           "seeds": _SEEDS.value, "machine": f"{cores} cores, {platform.machine()}, devices: {jax.devices()[0].device_kind}",
           "versions": f"Python {platform.python_version()}, JAX {jax.__version__}"}
  kept.begin(about, {name: unit.about for name, unit in opened.items()})
  measurements.measure(opened, kept, measurements.Amounts(_SEEDS.value, _TEXTS.value, _REPEATS.value, _PUZZLES.value))
  return failed


if __name__ == "__main__":
  app.run(main, flags_parser=main_lib.parse_flags)
