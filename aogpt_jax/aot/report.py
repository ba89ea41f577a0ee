"""What a run needs on TPU slices, as a table and as JSON: `python -m aogpt_jax.main --mode=aot --topology=v5e:4x4,v4:2x2x4`."""

import collections
from collections.abc import Sequence
import dataclasses
import json
import pathlib
from typing import Any

import ml_collections

from aogpt_jax import config as config_lib
from aogpt_jax import console
from aogpt_jax.aot import processes
from aogpt_jax.aot import programs
from aogpt_jax.aot import topology

GIB = topology.GIB


@dataclasses.dataclass(frozen=True)
class Report:
  """Of one topology.

  Attributes:
    training: the step, with the config's micro-batches.
    largest: micro-batch of it that fits; None where nothing was compiled that could say so.
    sampler: of a batch of config.sample.
  """

  training: programs.Training
  largest: processes.Largest | None
  sampler: programs.Sampler


def run(config: ml_collections.ConfigDict, names: Sequence[str], workdir: pathlib.Path) -> bool:
  """Compiles for each topology, prints a table, and writes WORKDIR/aot.json.

  Args:
    config: of the run.
    names: of topologies.
    workdir: is created.

  Returns:
    Whether all was compiled, or found not to fit.

  Raises:
    ConfigError: the config is wrong.
    ValueError: a topology is not known.
    ImportError: libtpu is not installed.
    OSError: the workdir can't be written to.
  """
  config_lib.check(config)
  if config.sample.sampler != "plan":
    raise config_lib.ConfigError(f"config.sample.sampler: is {config.sample.sampler}; plan alone is measured, set it to that.")
  for name in names:
    topology.check(name)
  workdir.mkdir(parents=True, exist_ok=True)
  reports = [_measure(config, name) for name in names]
  path = workdir / "aot.json"
  path.write_text(json.dumps(
      {"config": config.to_dict(), "topologies": [as_dict(report) for report in reports]}, indent=2) + "\n", encoding="utf-8")
  console.say(f"\n{table(reports)}\n\nwritten:\n  {path}")
  return not any(_failed(report) for report in reports)


def _measure(config: ml_collections.ConfigDict, name: str) -> Report:
  console.say(f"{name}, the training step ...")
  training = processes.training(config, name)
  known = training.sequences and name != topology.CUDA
  largest = processes.largest(config, training, console.say) if known else None
  console.say(f"{name}, sampling {config.sample.batch_size} texts ...")
  return Report(training, largest, processes.sampler(config, name))


def _failed(report: Report) -> bool:
  found = [report.training.program, *report.sampler.programs]
  errors = [report.training.error, report.sampler.error, *(m.error for m in found if m)]
  return any(error and "RESOURCE_EXHAUSTED" not in error for error in errors)


def as_dict(report: Report) -> dict[str, Any]:
  """The report for JSON: bytes, seconds and FLOPs as numbers."""
  fields = dataclasses.asdict(report)
  fields["training"]["fits"], fields["sampler"]["fits"] = report.training.fits, report.sampler.fits
  if report.training.roofline:
    r = report.training.roofline
    fields["training"]["roofline"] |= {"step": r.step, "utilisation": r.utilisation}
  return fields


def table(reports: Sequence[Report]) -> str:
  """The reports as text."""
  return "\n\n".join("\n".join(_lines(report)) for report in reports)


def _lines(report: Report) -> list[str]:
  t, s = report.training, report.sampler
  columns = ("arguments", "outputs", "aliased", "temporaries", "code", "beside", "total")
  lines = [f"{'GiB per device':<22}" + "".join(f"{c:>12}" for c in columns) + f"{'seconds':>9}"]
  for label, m in [("training step", t.program)] * bool(t.program) + [(f"sampling: {m.program}", m) for m in s.programs]:
    # What no compiler counted comes from shapes.
    numbers = "".join(f"{('' if m.compiled else '~') + f'{getattr(m, c) / GIB:.3f}':>12}" for c in columns)
    lines.append(f"{label:<22}{numbers}{m.seconds:>9.1f}")
  mesh = " x ".join(f"{axis}={n}" for axis, n in t.mesh.items())
  return [f"{t.topology}: {t.devices or s.devices} devices, {mesh}"] + [
      f"  {line}" for line in (*lines, *_training(report), *_sampling(s))]


def _training(report: Report) -> list[str]:
  t = report.training
  says = [f"training, {t.sequences} sequences a device x {t.micro_batches} micro-batches, attention {t.attention}: "
          + (_verdict(t.topology, t.fits, (t.program,), t.shapes) if t.program else f"failed: {t.error}")]
  if t.collectives is None:
    says += [f"collectives: the compiled text can't be read: {t.unread}"] if t.unread else []
  else:
    totals = collections.defaultdict(lambda: [0, 0])
    for c in t.collectives:
      totals[c.kind][0] += c.count
      totals[c.kind][1] += c.bytes
    found = ", ".join(f"{kind} {count:,} x, {size / GIB:.2f} GiB" for kind, (count, size) in totals.items())
    says.append(f"collectives of a step, with what each device receives: {found or 'none'}; "
                f"matrix products of float32 operands: {t.float32_products}")
    moved = sum(m.bytes for m in t.movements)
    says.append(f"memory of a device in a step: {t.accessed / GIB:.1f} GiB read and written, of which by copies and transposes "
                f"{moved / t.accessed:.1%}" + "".join(f"; {m.kind} {m.shape} {m.count:,} x, {m.bytes / t.accessed:.1%}"
                                                      for m in t.movements if m.bytes >= t.accessed / 100))
  if r := t.roofline:
    communication = "not known" if r.communication is None else f"{r.communication:.3f} s"
    says += [
        f"FLOPs of a step: model {r.formula_weights + r.formula_attention:.4g}; counted {r.weights / r.formula_weights:.4f} times "
        f"the formula's with weights, {r.attention / r.formula_attention:.4f} times those of attention; "
        f"{r.float32:.1%} of them on float32 before compiling",
        f"at best {r.step:.3f} s a step, {r.utilisation:.0%} of peak: compute {r.compute:.3f} s, memory {r.memory:.3f} s, "
        f"communication {communication} (aogpt_jax/aot/roofline.py says what is assumed)"]
  if report.largest:
    best, tried = report.largest, ", ".join(f"{n} {outcome}" for n, outcome in report.largest.tried.items())
    found = f"{best.sequences} sequences a device, micro_batches={best.micro_batches}" if best.sequences else "none fits"
    says.append(f"largest micro-batch: {found} (tried: {tried})")
  return says


def _sampling(s: programs.Sampler) -> list[str]:
  if s.error:
    return [f"sampling failed: {s.error}"]
  return [f"sampling {s.batch_size} texts: {_verdict(s.topology, s.fits, s.programs, s.shapes)}"]


def _verdict(name: str, fits: bool | None, found: Sequence[programs.Memory], shapes: dict[str, int]) -> str:
  failed = "; ".join(f"{m.program} failed: {m.error}" for m in found if m.error)
  from_shapes = ", ".join(f"{part} {size / GIB:.3f}" for part, size in shapes.items())
  most = max(m.total for m in found) / GIB
  if name == topology.CUDA:
    return f"lowered; needs about {most:.2f} GiB and what a compiler adds (from shapes: {from_shapes})"
  has = topology.chip(name).memory / GIB
  says = {True: f"fits, {has - most:.2f} GiB to spare", False: "does not fit", None: "is not known to fit"}[fits]
  about = "" if all(m.compiled for m in found) else "about "
  return f"{says}: {about}{most:.2f} of {has:.2f} GiB (from shapes: {from_shapes}){'; ' if failed else ''}{failed}"
