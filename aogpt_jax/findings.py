"""Tests the paper's findings again at a small size: trains all models that it takes, and writes a page of what they say.

    python -m aogpt_jax.findings --config=configs/findings.py [--jobs=2] [--workdir=DIR] [--page=docs/findings.md] [--redraw]

The config file has a function `sweep()` whose units are named ARM-SEED; see sweep.py. Started again, it goes on where it was.
What the page needs of each unit is kept beside it in results.json, so that --redraw writes the page again without training, and a
unit that is there with the same config is not trained again where the workdir is gone; without the file, all are.
"""

import hashlib
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
import ml_collections

from aogpt_jax import config as config_lib
from aogpt_jax import console
from aogpt_jax import main as main_lib
from aogpt_jax import models
from aogpt_jax import report
from aogpt_jax import sweep
from aogpt_jax.evaluation import held_out
from aogpt_jax.training import step as step_lib

_PAGE = flags.DEFINE_string("page", "docs/findings.md", "Where the page is written; its pictures and results go beside it.")
_REDRAW = flags.DEFINE_bool("redraw", False, "Write the page from the results beside it, and train nothing.")


def digest(config: ml_collections.ConfigDict) -> str:
  """Of what a config sets otherwise than `default_config()`: the same when fields are added there later."""
  default = config_lib.flat(config_lib.default_config())
  changed = {field: value for field, value in config_lib.flat(config).items() if value != default[field]}
  return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:16]


def _key(unit: sweep.Unit) -> tuple[str, int, str]:
  """Arm, seed and config, by which a kept result is known."""
  arm, _, seed = unit.name.rpartition("-")
  return arm, int(seed), digest(unit.config)


def collect(unit: sweep.Unit) -> dict[str, Any]:
  """What the page needs of a finished unit: its curves, and the figures of its last evaluation; nats per token."""
  arm, seed, config = _key(unit)
  evaluation = json.loads((unit.workdir / "eval_validation.json").read_text(encoding="utf-8"))
  labels = [held_out.label(spec) for spec in unit.config.eval.distributions]
  records = [json.loads(line) for line in (unit.workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
  gap = evaluation["mdm_gap"]
  seconds = [record["step_seconds"] for record in records if "step_seconds" in record]
  params = jax.eval_shape(lambda: step_lib.init_params(models.build_model(unit.config), 0))
  return {
      "arm": arm, "seed": seed, "config": config, "steps": unit.config.steps,
      "tokens_per_step": unit.config.batch_size * unit.config.model.block_size,
      "block_size": unit.config.model.block_size, "sequences": evaluation[labels[0]]["sequences"],
      "parameters": sum(x.size for x in jax.tree.leaves(params)), "step_seconds": round(sum(seconds) / len(seconds), 4),
      "curves": {label: [[record["step"], round(record[key], 5)] for record in records if key in record]
                 for label in labels for key in [f"eval/{label}/nats_per_token"]},
      "final": {label: round(evaluation[label]["nats_per_token"], 5) for label in labels},
      "stderr": {label: round(evaluation[label]["stderr_sequences"], 5) for label in labels},
      "ensemble": {size: round(e["nats_per_token"], 5) for size, e in evaluation["ensemble"].items()},
      "gap": {"ao": gap["ao"], **{rule: g["difference"] for rule, g in gap["rules"].items()}} if gap else {}}


def about(config_flag: str, units: list[dict[str, Any]], core_seconds: float) -> dict[str, Any]:
  """How the results were made."""
  return {
      "command": f"python -m aogpt_jax.findings --config={config_flag} --jobs={sweep.JOBS.value}",
      "core_seconds": round(core_seconds),
      "seeds": len({unit["seed"] for unit in units}), "units": len(units),
      "machine": f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores, "
                 f"{platform.machine()}",
      "versions": f"Python {platform.python_version()}, JAX {jax.__version__}"}


def train(waiting: list[sweep.Unit], workdir: pathlib.Path, before: float) -> tuple[dict[str, int], float]:
  """Runs units; returns those that failed, and the CPU seconds that all starts together took, with those of `before` this workdir."""
  workdir.mkdir(parents=True, exist_ok=True)
  path = workdir / "core_seconds.json"
  before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else before
  used = lambda: sum(os.times()[2:4])  # by the units' processes, which is the same beside other work
  begin = used()
  try:
    failed = sweep.run(waiting, sweep.JOBS.value)
  finally:
    seconds = before + used() - begin
    path.write_text(json.dumps(seconds), encoding="utf-8")
  return failed, seconds


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
    record = json.loads(kept.read_text(encoding="utf-8"))
  else:
    config_flag = config_flags.get_config_filename(flags.FLAGS["config"])
    workdir = pathlib.Path(flags.FLAGS.workdir or f"runs/{pathlib.Path(config_flag.partition(':')[0]).stem}")
    try:
      units = sweep.units(config_flag, flags.FLAGS.config, str(workdir))
      strange = [unit.name for unit in units if not unit.name.rpartition("-")[2].isdigit()]
      if strange:
        raise config_lib.ConfigError(f"unit {strange[0]!r}: is not named ARM-SEED, as uniform-0.")
    except (ValueError, TypeError) as e:
      sys.exit(f"error: {e}")
    before = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {"about": {"core_seconds": 0}, "units": []}
    results = {(result["arm"], result["seed"], result.get("config")): result for result in before["units"]}
    is_kept = lambda unit: _key(unit) in results
    waiting = [unit for unit in units if not is_kept(unit) and not held_out.is_done(unit.workdir, unit.config)]
    console.say(f"findings: {len(units) - len(waiting)} of {len(units)} units of {config_flag} are finished in {workdir} or kept in "
                f"{kept}")
    try:
      failed, seconds = train(waiting, workdir, before["about"]["core_seconds"])
    except KeyboardInterrupt:
      sys.exit("interrupted; the same command goes on")
    found = [results[_key(unit)] if is_kept(unit) else collect(unit) for unit in units
             if is_kept(unit) or held_out.is_done(unit.workdir, unit.config)]
    record = {"about": about(config_flag, found, seconds), "units": found}
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text("{\n" + f'"about": {json.dumps(record["about"])},\n"units": [\n'
                    + ",\n".join(json.dumps(unit) for unit in found) + "\n]}\n", encoding="utf-8")
  written = report.write(page, report.Results(record["units"]), record["about"])
  console.say("\n".join(["written:", *(f"  {path}" for path in (*written, kept))]))
  if failed:
    sys.exit(f"error: {len(failed)} units failed: {', '.join(failed)}; the page is without them, and the same command tries them "
             "again")


if __name__ == "__main__":
  app.run(main, flags_parser=main_lib.parse_flags)
