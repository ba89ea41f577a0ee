"""Tests the paper's findings again at a small size: trains all models that it takes, and writes a page of what they say.

    python -m aogpt_jax.findings --config=configs/findings.py [--jobs=2] [--workdir=DIR] [--page=docs/findings.md] [--redraw]

The config file has a function `sweep()` whose units are named ARM-SEED; see sweep.py. Started again, it goes on where it was.
What the page needs of each unit is kept beside it in results.json, so that --redraw writes the page again without training, and a
unit that is there with the same config is not trained again where the workdir is gone; without the file, all are.
"""

import json
import os
import pathlib
import platform
import sys
from typing import Any

from absl import app
from absl import flags
import jax
from ml_collections import config_flags

from aogpt_jax import config as config_lib
from aogpt_jax import console
from aogpt_jax import main as main_lib
from aogpt_jax import sweep
from aogpt_jax.evaluation import held_out
from aogpt_jax.findings import page as page_lib
from aogpt_jax.findings import results as results_lib

_PAGE = flags.DEFINE_string("page", "docs/findings.md", "Where the page is written; its pictures and results go beside it.")
_REDRAW = flags.DEFINE_bool("redraw", False, "Write the page from the results beside it, and train nothing.")


def about(config_flag: str, units: list[dict[str, Any]], core_seconds: float) -> dict[str, Any]:
  """How the results were made."""
  return {
      "command": f"python -m aogpt_jax.findings --config={config_flag} --jobs={sweep.JOBS.value}",
      "core_seconds": round(core_seconds),
      "seeds": len({unit["seed"] for unit in units}), "units": len(units),
      "machine": f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores, "
                 f"{platform.machine()}",
      "versions": f"Python {platform.python_version()}, JAX {jax.__version__}"}


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    sys.exit(f"error: unknown arguments: {' '.join(argv[1:])}")
  jax.config.update("jax_platforms", "cpu")  # accelerators are left to the units
  page = pathlib.Path(_PAGE.value)
  kept = page.with_suffix("") / "results.json"
  failed = {}
  if _REDRAW.value:
    if not kept.is_file():
      sys.exit(f"error: --redraw: there is no {kept}; leave it out to train.")
    try:
      record = results_lib.read(kept)
    except ValueError as e:
      sys.exit(f"error: {e}")
  else:
    config_flag = config_flags.get_config_filename(flags.FLAGS["config"])
    workdir = pathlib.Path(flags.FLAGS.workdir or f"runs/{pathlib.Path(config_flag.partition(':')[0]).stem}")
    try:
      units = sweep.units(config_flag, flags.FLAGS.config, str(workdir))
      strange = [unit.name for unit in units if not unit.name.rpartition("-")[2].isdigit()]
      if strange:
        raise config_lib.ConfigError(f"unit {strange[0]!r}: is not named ARM-SEED, as uniform-0.")
      before = results_lib.read(kept) if kept.is_file() else {"about": {"core_seconds": 0}, "units": []}
    except (ValueError, TypeError) as e:
      sys.exit(f"error: {e}")
    results = {(result["arm"], result["seed"], result.get("config")): result for result in before["units"]}
    is_kept = lambda unit: results_lib.key(unit) in results
    waiting = [unit for unit in units if not is_kept(unit) and not held_out.is_done(unit.workdir, unit.config)]
    console.say(f"findings: {len(units) - len(waiting)} of {len(units)} units of {config_flag} are finished in {workdir} or kept in "
                f"{kept}")
    try:
      failed, seconds = sweep.timed(waiting, workdir, before["about"]["core_seconds"], sweep.JOBS.value)
    except KeyboardInterrupt:
      sys.exit("interrupted; the same command goes on")
    found = [results[results_lib.key(unit)] if is_kept(unit) else results_lib.collect(unit) for unit in units
             if is_kept(unit) or held_out.is_done(unit.workdir, unit.config)]
    record = {"about": about(config_flag, found, seconds), "units": found}
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text("{\n" + f'"about": {json.dumps(record["about"])},\n"units": [\n'
                    + ",\n".join(json.dumps(unit) for unit in found) + "\n]}\n", encoding="utf-8")
  written = page_lib.write(page, page_lib.Results(record["units"]), record["about"])
  console.say("\n".join(["written:", *(f"  {path}" for path in (*written, kept))]))
  if failed:
    sys.exit(f"error: {len(failed)} units failed: {', '.join(failed)}; the page is without them, and the same command tries them "
             "again")


if __name__ == "__main__":
  app.run(main, flags_parser=main_lib.parse_flags)
