"""Everything that the page needs of trained units, measured once and kept."""

from collections.abc import Callable, Iterator
import dataclasses
import json
import pathlib
from typing import Any

import jax

from aogpt_jax import config as config_lib
from aogpt_jax import console
from aogpt_jax import records
from aogpt_jax import run as run_lib
from aogpt_jax import sweep
from aogpt_jax.conversion import fingerprint
from aogpt_jax.decoding import quality
from aogpt_jax.decoding import speed
from aogpt_jax.decoding import sudoku
from aogpt_jax.evaluation import held_out
from aogpt_jax.training import checkpoints

JUDGE = "judge"  # the unit that scores the texts of the others
SECTIONS = ("quality", "speed", "sudoku")


@dataclasses.dataclass(frozen=True)
class Amounts:
  """How much is measured."""

  seeds: int  # of the draws of each sampler
  texts: int  # drawn for each sampler and seed
  repeats: int  # measurements of each window's time
  puzzles: int  # Sudokus that each order is tried on


class Kept:
  """The results of all starts, in a file that is written after each measurement."""

  def __init__(self, path: pathlib.Path):
    self._path = path
    self.results = {"about": {"core_seconds": 0}, "units": {}, **{name: [] for name in SECTIONS}}
    if path.is_file():
      self.results = records.read(path)
      try:
        are_there = self.results["about"]["core_seconds"] >= 0 and isinstance(self.results["units"], dict) and all(
            isinstance(cell, dict) for name in SECTIONS for cell in [*self.results[name]])
      except (TypeError, KeyError, AttributeError):
        are_there = False
      if not are_there:
        raise ValueError(f"{path}: is not as it was written; restore it, or move it away to measure all again.")

  def has(self, section: str, key: dict[str, Any]) -> bool:
    """Whether the cells of a key are there."""
    return any(key.items() <= cell.items() for cell in self.results[section])

  def add(self, section: str, key: dict[str, Any], cells: list[dict[str, Any]]) -> None:
    self.results[section] += [key | cell for cell in cells]
    self._write()

  def begin(self, about: dict[str, Any], units: dict[str, dict[str, Any]]) -> None:
    """Says how the results are made, and forgets cells of other units, or of other parameters of these."""
    self.results |= {"about": about, "units": units}
    for name in SECTIONS:
      self.results[name] = [cell for cell in self.results[name] if cell["unit"] in units and (
          cell["parameters"] == units[cell["unit"]]["fingerprint"])]
    self._write()

  def _write(self) -> None:
    """A line for each cell."""
    self._path.parent.mkdir(parents=True, exist_ok=True)
    lines = lambda cells: "[\n" + ",\n".join(json.dumps(cell) for cell in cells) + "\n]" if cells else "[]"
    fields = {name: lines(value) if isinstance(value, list) else json.dumps(value) for name, value in self.results.items()}
    self._path.write_text("{\n" + ",\n".join(f'"{name}": {value}' for name, value in fields.items()) + "\n}\n", encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class Opened:
  """A trained unit.

  Attributes:
    name: of the unit.
    run: with its data.
    params: the EMA parameters.
    about: what the page says of it; "clues" where its data are Sudokus.
  """

  name: str
  run: run_lib.Run
  params: Any
  about: dict[str, Any]

  @property
  def key(self) -> dict[str, Any]:
    return {"unit": self.name, "parameters": self.about["fingerprint"]}


def opened(unit: sweep.Unit) -> Opened:
  """Opens a unit that is finished.

  Raises:
    ConfigError, OSError: see `run.open_run` and `checkpoints.load_params`.
  """
  run = run_lib.open_run(unit.config, str(unit.workdir), "eval")
  params, step = checkpoints.load_params(unit.workdir, unit.config, run.mesh, "ema")
  evaluation = json.loads((unit.workdir / "eval_validation.json").read_text(encoding="utf-8"))
  labels = [held_out.label(spec) for spec in unit.config.eval.distributions]
  about = {
      "parameters": sum(x.size for x in jax.tree.leaves(params)), "block_size": unit.config.model.block_size, "steps": step,
      "tokens_per_step": unit.config.batch_size * unit.config.model.block_size,
      "nats_per_token": {label: round(evaluation[label]["nats_per_token"], 4) for label in labels},
      "fingerprint": fingerprint.describe(run.model, params)}
  kind, _, clues = unit.config.data.source.partition(":")
  return Opened(unit.name, run, params, about | ({"clues": int(clues)} if kind == "sudoku" else {}))


def check(units: list[sweep.Unit]) -> None:
  """Raises ConfigError where the units are not what can be measured."""
  judge = next((unit.config for unit in units if unit.name == JUDGE), None)
  if judge is None:
    raise config_lib.ConfigError(f"the sweep has no unit {JUDGE}, which scores the texts of the others; yield one, trained left "
                                 "to right.")
  if "left_to_right" not in judge.eval.distributions:
    raise config_lib.ConfigError(f"unit {JUDGE}: scores from left to right, and config.eval.distributions has no left_to_right; "
                                 "name it.")
  for unit in units:
    if unit.config.model.architecture != "decoder":
      raise config_lib.ConfigError(f"unit {unit.name}: is an encoder, which some samplers can't draw from; set "
                                   "config.model.architecture to decoder.")
    if unit.config.data.source.startswith("sudoku:"):
      if not unit.name.rpartition("-")[0] or not unit.name.rpartition("-")[2].isdigit():
        raise config_lib.ConfigError(f"unit {unit.name}: is not named ARM-SEED, as sudoku-0.")
    elif unit.config.model.block_size > judge.model.block_size:
      raise config_lib.ConfigError(
          f"unit {unit.name}: has texts of {unit.config.model.block_size} tokens, longer than config.model.block_size = "
          f"{judge.model.block_size} of unit {JUDGE}; raise that.")
    elif unit.config.data.tokenizer != judge.data.tokenizer:
      raise config_lib.ConfigError(f"unit {unit.name}: has another config.data.tokenizer than unit {JUDGE}; give both the same.")


def measure(units: dict[str, Opened], kept: Kept, amounts: Amounts) -> None:
  """Measures what is not kept yet."""
  waiting = [measurement for measurement in _measurements(units, amounts) if not kept.has(*measurement[:2])]
  progress = console.Progress("measuring", len(waiting), "cells")
  for done, (section, key, find) in enumerate(waiting, 1):
    cells = find()
    kept.add(section, key, cells)
    names = ("unit", "order", "batch", "family", "settings", "method", "temperature", "seed")
    what = [str(key[name]) for name in names if name in key]
    found = [f"{name} {value:.4g}" for name, value in cells[-1].items() if isinstance(value, float)]
    console.say(f"{section}: {', '.join(what)}: {', '.join(found)}; {progress.line(done)}")


def _measurements(
    units: dict[str, Opened], amounts: Amounts
) -> Iterator[tuple[str, dict[str, Any], Callable[[], list[dict[str, Any]]]]]:
  """(section, key, what gives its cells); seed by seed, so that a page without error bars is there as soon as can be."""
  puzzled = [unit for unit in units.values() if "clues" in unit.about]
  of_text = [unit for name, unit in units.items() if name != JUDGE and unit not in puzzled] if JUDGE in units else []
  for unit in of_text:
    for order in speed.ORDERS:
      for batch in speed.BATCHES:
        find = lambda unit=unit, **how: speed.measure(unit.run, unit.params, **how)
        how = {"order": order, "batch": batch, "repeats": amounts.repeats}
        yield "speed", unit.key | how, lambda find=find, how=how: find(**how)
  for unit in puzzled:
    prompts, solutions = sudoku.puzzles(unit.run, amounts.puzzles)
    key = unit.key | {"steps": unit.about["steps"], "seed": int(unit.name.rpartition("-")[2]), "puzzles": len(prompts)}
    for temperature in sudoku.TEMPERATURES:
      for method, settings in sudoku.methods():
        arguments = unit.run, unit.params, prompts, solutions, settings | {"temperature": temperature}
        yield "sudoku", key | {"temperature": temperature, "method": method}, lambda x=arguments: [sudoku.solved(*x)]
  for seed in range(amounts.seeds):
    for unit in of_text:
      scorer = quality.Scorer(unit.run.model, unit.params, units[JUDGE].run.model, units[JUDGE].params)
      key = unit.key | {"judge": units[JUDGE].about["fingerprint"], "texts": amounts.texts, "seed": seed}
      drawn = dict(count=amounts.texts, seed=seed)
      yield "quality", key | {"family": quality.HELD_OUT, "settings": {}}, lambda x=(unit.run, scorer), drawn=drawn: [
          quality.of_held_out(*x, **drawn)]
      for family, settings in quality.methods(unit.about["block_size"]):
        yield "quality", key | {"family": family, "settings": settings}, (
            lambda x=(unit.run, unit.params, scorer, settings), drawn=drawn: [quality.of_texts(*x, **drawn)])
