"""What tells several runs apart: fields of their configs, and which of them has the lower loss."""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import numpy as np

from aogpt_jax import config as config_lib
from aogpt_jax.evaluation import likelihood
from aogpt_jax.report import runs as runs_lib
from aogpt_jax.training import curves

# Of a normal distribution, which the mean over so many sequences has: half of the 95% interval, in standard errors.
_Z95 = 1.96
_OTHER_TEXT = "The runs were evaluated on different texts: a lower loss may be that of an easier text."


def differing(configs: Sequence[Any]) -> dict[str, list[Any]]:
  """The fields on which configs differ, with the value of each; a run whose config is None has none.

  Those that make another run of it come first, then those of evaluation, sampling, logging and the like.
  """
  flat = [config_lib.flat(config) if config is not None else {} for config in configs]
  known = [f for f in flat if f]
  first = {field for config in configs if config is not None for field in config_lib.determining(config)} | {"steps"}
  fields = sorted({field for f in known for field in f}, key=lambda field: (field not in first, field))
  return {field: [f.get(field) for f in flat] for field in fields if any(f.get(field) != known[0].get(field) for f in known)}


@dataclasses.dataclass(frozen=True)
class Loss:
  """Of a run: what is compared, in `Comparison.unit`."""

  run: str
  step: int
  value: float
  stderr: float  # over the sequences; nan where it is not known
  # Of the run with the lowest value: value - its value, and half of the 95% interval; 0 and nan for that run itself.
  difference: float
  margin: float
  paired: bool  # whether the difference is that of the same sequences

  @property
  def verdict(self) -> str:
    if self.difference == 0 and math.isnan(self.margin):
      return "lowest"
    if math.isnan(self.margin):
      return "no error is known"
    return "worse" if self.difference > self.margin else "not told apart from the lowest"


@dataclasses.dataclass(frozen=True)
class Comparison:
  """The losses of runs under one distribution of orders.

  Attributes:
    distribution: as `held_out.label` has it.
    unit: nats/token, or bits/byte where tokenizers differ.
    source: what was evaluated.
    losses: the lowest first.
    remarks: what a reader has to know.
    same_text: whether all were evaluated on one text; on different ones, a lower loss says little of a model.
  """

  distribution: str
  unit: str
  source: str
  losses: list[Loss]
  remarks: list[str]
  same_text: bool

  @property
  def sentence(self) -> str:
    """Which one is better, and by how much."""
    best, *others = self.losses
    clearly = [o for o in others if o.difference > o.margin]
    name = self.distribution.replace("_", " ")
    if not clearly:
      return f"{name}: the runs are not told apart."
    second = min(clearly, key=lambda o: o.difference)
    unclear = [o.run for o in others if o not in clearly]
    also = f"; it is not told apart from {', '.join(unclear)}" if unclear else ""
    verdict = "is better than" if self.same_text else "has, on another text, a lower loss than"
    return (f"{name}: {best.run} {verdict} {'all others' if len(clearly) > 1 and not unclear else second.run}, by "
            f"{second.difference:.4f} ± {second.margin:.4f} {self.unit}{' or more' if len(clearly) > 1 else ''}{also}.")


def compare(records: Sequence[runs_lib.RunRecord]) -> list[Comparison]:
  """Comparisons by the evaluation after training that most runs have, else by the last evaluations during training."""
  names = sorted({name for r in records for name in r.evaluations},
                 key=lambda name: (-sum(name in r.evaluations for r in records), name != "eval_validation", name))
  if names and sum(names[0] in r.evaluations for r in records) > 1:
    return _of_evaluations([r for r in records if names[0] in r.evaluations], names[0],
                           [r.name for r in records if names[0] not in r.evaluations])
  return _during_training(records)


def _tokenizer(record: runs_lib.RunRecord) -> str:
  return record.config.data.tokenizer if record.config is not None else ""


def _weights(evaluation: runs_lib.Evaluation) -> str:
  return {"ema": "EMA"}.get(name := str(evaluation.record.get("weights", "ema")), name)


def _of_evaluations(records, name, without) -> list[Comparison]:
  evaluations = [r.evaluations[name] for r in records]
  in_bytes = len({*map(_tokenizer, records)}) > 1
  shared = [d for d in evaluations[0].found.likelihoods if all(d in e.found.likelihoods for e in evaluations)]
  found = []
  for distribution in shared:
    results = [e.found.likelihoods[distribution] for e in evaluations]
    scale = [r.tokens / max(r.bytes, 1) / math.log(2) if in_bytes else 1.0 for r in results]
    values = [r.nats_per_token * x for r, x in zip(results, scale)]
    best = int(np.argmin(values))
    losses = []
    for i, r in enumerate(results):
      paired = not in_bytes and _are_paired(evaluations[i], evaluations[best], distribution)
      if i == best:
        difference, margin = 0.0, math.nan
      elif paired:
        difference, stderr = likelihood.per_token(r.sequence_nats - results[best].sequence_nats, r.sequence_tokens)
        margin = _Z95 * stderr
      else:
        difference = values[i] - values[best]
        margin = _Z95 * math.hypot(r.stderr_sequences * scale[i], results[best].stderr_sequences * scale[best])
      losses.append(Loss(records[i].name, int(evaluations[i].record.get("step", 0)), values[i], r.stderr_sequences * scale[i],
                         difference, margin, paired))
    remarks = [f"{run} has no {name}.json, and is not compared here." for run in without]
    if not all(loss.paired for loss in losses if loss.difference):
      remarks.append("Where a difference is not paired, the runs were evaluated on other sequences, or their files do not say on "
                     "which; its interval is that of independent texts.")
    same_text = len({(e.record.get("source"), e.record.get("split")) for e in evaluations}) == 1
    if not same_text:
      remarks.append(_OTHER_TEXT)
    remarks += _other_steps(losses)
    split = evaluations[best].record.get("split", "")
    found.append(Comparison(distribution, "bits/byte" if in_bytes else "nats/token",
                            f"{split} text, after training, {_weights(evaluations[best])} weights",
                            sorted(losses, key=lambda loss: loss.value), remarks, same_text))
  return found


def _other_steps(losses: Sequence[Loss]) -> list[str]:
  if len({loss.step for loss in losses}) == 1:
    return []
  return ["The runs were evaluated after different numbers of steps."]


def _are_paired(one: runs_lib.Evaluation, other: runs_lib.Evaluation, distribution: str) -> bool:
  """Whether two evaluations are of the same sequences, and know the nats of each."""
  a, b = (e.found.likelihoods[distribution] for e in (one, other))
  same = all(one.record.get(field) == other.record.get(field) for field in ("text", "split", "limit", "source"))
  return bool(same and one.record.get("text") and a.sequence_nats is not None and b.sequence_nats is not None
              and np.array_equal(a.sequence_tokens, b.sequence_tokens))


def _during_training(records) -> list[Comparison]:
  """By the last evaluations at a step that all runs have, or at the last one of each."""
  of = {r.name: curves.evaluations(r.records) for r in records}
  if len({*map(_tokenizer, records)}) > 1:
    return []
  found = []
  for distribution in dict.fromkeys(d for curves_of in of.values() for d in curves_of):
    own = {name: curves_of[distribution] for name, curves_of in of.items() if distribution in curves_of}
    if len(own) < 2:
      continue
    common = set.intersection(*({*map(int, c.steps)} for c in own.values()))
    at = {name: int(np.flatnonzero(c.steps == max(common))[0]) if common else len(c.steps) - 1 for name, c in own.items()}
    points = {name: (int(c.steps[at[name]]), float(c.values[at[name]]), float(c.errors[at[name]])) for name, c in own.items()}
    best = min(points, key=lambda name: points[name][1])
    losses = [
        Loss(name, step, value, error, value - points[best][1],
             math.nan if name == best else _Z95 * math.hypot(error, points[best][2]), False)
        for name, (step, value, error) in points.items()]
    remarks = [f"{name} has no such evaluation, and is not compared here." for name in of if name not in own]
    remarks.append("Differences are not paired: evaluations during training keep no nats of single sequences. Their intervals are "
                   "those of independent texts, and wider than need be where the sequences are the same.")
    same_text = len({r.config and r.config.data.source for r in records if r.name in own}) == 1
    if not same_text:
      remarks.append(_OTHER_TEXT)
    found.append(Comparison(distribution, "nats/token", "validation text, during training, EMA weights",
                            sorted(losses, key=lambda loss: loss.value), remarks + _other_steps(losses), same_text))
  return found
