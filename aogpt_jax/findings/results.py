"""What the page of findings needs of each unit that is finished."""

import hashlib
import json
import pathlib
from typing import Any

import jax
import ml_collections

from aogpt_jax import config as config_lib
from aogpt_jax import models
from aogpt_jax import records
from aogpt_jax import sweep
from aogpt_jax.evaluation import held_out
from aogpt_jax.training import step as step_lib


def read(path: pathlib.Path) -> dict[str, Any]:
  """The results that are kept beside a page, `about` and `units`.

  Raises:
    ValueError: they are not as they were written.
  """
  record = records.read(path)
  try:
    are_there = record["about"]["core_seconds"] >= 0 and {*map(type, record["units"])} <= {dict} and all(
        type(unit["arm"]) is str and type(unit["seed"]) is int and type(unit.get("config", "")) is str for unit in record["units"])
  except (TypeError, KeyError, AttributeError):
    are_there = False
  if not are_there:
    raise ValueError(f"{path}: is not as it was written; restore it, or move it away to train all units again.")
  return record


def digest(config: ml_collections.ConfigDict) -> str:
  """Of what a config sets otherwise than `default_config()`: the same when fields are added there later."""
  default = config_lib.flat(config_lib.default_config())
  changed = {field: value for field, value in config_lib.flat(config).items() if value != default[field]}
  return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:16]


def key(unit: sweep.Unit) -> tuple[str, int, str]:
  """Arm, seed and config, by which a kept result is known."""
  arm, _, seed = unit.name.rpartition("-")
  return arm, int(seed), digest(unit.config)


def collect(unit: sweep.Unit) -> dict[str, Any]:
  """What the page needs of a finished unit: its curves, and the figures of its last evaluation; nats per token."""
  arm, seed, config = key(unit)
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
