"""What a workdir says of its run, read with patience: files that are missing or damaged leave a line that says so."""

from collections.abc import Callable, Sequence
import dataclasses
import logging
import pathlib
from typing import Any

import ml_collections

from aogpt_jax import config as config_lib
from aogpt_jax import records as records_lib
from aogpt_jax.data import baselines
from aogpt_jax.evaluation import held_out
from aogpt_jax.evaluation import zero_shot
from aogpt_jax.training import checkpoints
from aogpt_jax.training import metrics
from aogpt_jax.training import provenance


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """An eval_*.json."""

  name: str
  record: dict[str, Any]
  found: held_out.Report
  entropies: baselines.Entropies


@dataclasses.dataclass(frozen=True)
class RunRecord:
  """A run as its files have it.

  Attributes:
    name: for the page; no two runs of a page have the same.
    workdir: of the run.
    config: None where no file has it.
    records: of metrics.jsonl.
    starts: of starts.jsonl, which runs of older versions have none of.
    evaluations: of texts, by the names of their files.
    zero_shot: scores on other data sets.
    generative: the texts' perplexity under a judge, generative.json; {} where there is none.
    sweep: the same over numbers of steps, generative_sweep.json.
    samples: of samples.jsonl.
    saved: steps of the checkpoints that are there.
    problems: what is missing or damaged, a line each.
  """

  name: str
  workdir: pathlib.Path
  config: ml_collections.ConfigDict | None
  records: list[dict[str, Any]]
  starts: list[dict[str, Any]]
  evaluations: dict[str, Evaluation]
  zero_shot: list[zero_shot.Score]
  generative: dict[str, Any]
  sweep: dict[str, Any]
  samples: list[dict[str, Any]]
  saved: list[int]
  problems: list[str]

  @property
  def step(self) -> int:
    """The last update that anything is known of."""
    return max([0, *self.saved, *(r["step"] for r in self.records)])

  @property
  def is_finished(self) -> bool:
    return self.config is not None and self.step >= self.config.steps


def read(workdir: pathlib.Path, name: str) -> RunRecord:
  """Reads a workdir.

  Raises:
    ValueError: it is none: there is no such directory, or nothing of a run in it.
  """
  if not workdir.is_dir():
    raise ValueError(f"{workdir}: there is no such directory; give the --workdir of a run.")
  problems = []
  records = _lines(workdir / metrics.FILE, problems, "it has no curves")
  starts = _lines(workdir / provenance.FILE, problems, "its environment is not known")
  saved = sorted(int(path.name) for path in (workdir / "checkpoints").glob("[0-9]*") if path.name.isdigit())
  evaluations = {}
  for path in sorted(workdir.glob("eval_*.json")):
    if (read_one := _attempt(problems, path, held_out.read)) is not None:
      evaluations[path.stem] = Evaluation(path.stem.removeprefix("eval_"), *read_one)
  scores = _attempt(problems, workdir / "zero_shot.json", lambda path: [zero_shot.Score(**s) for s in _json(path)["scores"]])
  generative, sweep = (_attempt(problems, workdir / f"{file}.json", _json) for file in ("generative", "generative_sweep"))
  samples = _attempt(problems, workdir / "samples.jsonl", _samples)
  if not (records or starts or saved or evaluations or scores or samples or generative or sweep):
    raise ValueError(f"{workdir}: there is nothing of a run in it (no metrics.jsonl, no checkpoints); give the --workdir of a run.")
  config = _config(workdir, starts, [e.record for e in evaluations.values()], saved, problems)
  return RunRecord(name, workdir, config, records, starts, evaluations, scores or [], generative or {}, sweep or {}, samples or [],
                   saved, problems)


def names(workdirs: Sequence[pathlib.Path]) -> list[str]:
  """Names that tell workdirs apart: the ends of their paths, as long as need be."""
  parts = [path.resolve().parts for path in workdirs]
  for length in range(1, max(map(len, parts)) + 1):
    ends = ["/".join(p[-length:]) for p in parts]
    if len({*ends}) == len({*parts}):
      return ends
  return [str(path) for path in workdirs]


def _json(path: pathlib.Path) -> Any:
  return records_lib.read(path)


def _attempt(problems: list[str], path: pathlib.Path, reader: Callable[[pathlib.Path], Any]) -> Any:
  """What the reader makes of a file; None where it is not there or, with a line, where it can't be read."""
  if not path.exists():
    return None
  try:
    return reader(path)
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
    problems.append(f"{path.name} can't be read and is left out ({type(e).__name__}: {(str(e).splitlines() or [''])[0][:200]})")
    return None


def _lines(path: pathlib.Path, problems: list[str], without: str) -> list[dict[str, Any]]:
  """The records of a file; one that is not there, and lines that are none, are problems."""
  if not path.exists():
    problems.append(f"{path.name} is not there: {without}")
    return []
  records, damaged, count = records_lib.of_steps(path)
  if damaged == [count]:
    problems.append(f"{path.name}: the last line is cut off and is passed over, as a process leaves it that is killed, or that is "
                    "writing it")
  elif damaged:
    numbers = ", ".join(map(str, damaged[:8])) + (", ..." if len(damaged) > 8 else "")
    problems.append(f"{path.name}: {len(damaged)} of {count} lines are no records and are passed over: {numbers}")
  if not records:
    problems.append(f"{path.name} has no records: {without}")
  return records


def _samples(path: pathlib.Path) -> list[dict[str, Any]]:
  """The texts of samples.jsonl; of a file that is being written, the whole lines."""
  texts = []
  for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
    try:
      record = records_lib.value(line)
    except ValueError:
      continue
    if isinstance(record, dict) and isinstance(record.get("text"), str):
      texts.append(record)
  return texts


def _config(workdir, starts, evaluated, saved, problems) -> ml_collections.ConfigDict | None:
  """The newest one that a file has."""
  for record in (*reversed(starts), *evaluated):
    if isinstance(record.get("config"), dict):
      try:
        return config_lib.completed(config_lib.from_dict(record["config"]))
      except (TypeError, ValueError, AttributeError, KeyError):  # of another version
        continue
  if saved:
    try:
      config, _ = checkpoints.describe(workdir)
      return config_lib.completed(config)
    except OSError as e:
      logging.info("%s", e)
  problems.append("its config is not known: neither starts.jsonl, nor an evaluation, nor a checkpoint has it")
  return None
