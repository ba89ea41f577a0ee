"""Compilations in processes of their own, since the TPU compiler may abort; and the largest micro-batch that fits."""

from collections.abc import Callable
import dataclasses
import json
import os
import re
import subprocess
import sys
from typing import Any

import jax
import ml_collections

from aogpt_jax import config as config_lib
from aogpt_jax.aot import hlo
from aogpt_jax.aot import programs
from aogpt_jax.aot import roofline
from aogpt_jax.aot import topology
from aogpt_jax.aot import traffic

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # a device that is there stays free
    "TPU_SKIP_MDS_QUERY": "1",  # do not ask the cloud which TPU this machine has
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_FOUND = "found: "  # what a line of the answer begins with


@dataclasses.dataclass(frozen=True)
class Largest:
  """The largest micro-batch of a step whose batch stays the same.

  Attributes:
    sequences: on each device; 0: none fits.
    micro_batches: into which it parts the batch.
    tried: sequences on each device -> "fits", "does not fit", or why that is not known.
  """

  sequences: int
  micro_batches: int
  tried: dict[int, str]


def training(config: ml_collections.ConfigDict, name: str) -> programs.Training:
  """`programs.training` in a process of its own.

  Args:
    config: of the run.
    name: of a topology.

  Raises:
    ConfigError: the config is wrong.
    ValueError: the topology is not known.
    ImportError: libtpu is not installed.
  """
  fields = _ask("training", config, name) | {"topology": name, "micro_batches": config.micro_batches}
  for field, kind in (("program", programs.Memory), ("roofline", roofline.Roofline)):
    fields[field] = kind(**fields[field]) if fields.get(field) else None
  if fields.get("collectives") is not None:
    fields["collectives"] = tuple(hlo.Collective(**c) for c in fields["collectives"])
  fields["movements"] = tuple(traffic.Movement(**m) for m in fields.get("movements", ()))
  return programs.Training(**fields)


def sampler(config: ml_collections.ConfigDict, name: str) -> programs.Sampler:
  """`programs.sampler` in a process of its own; see `training`."""
  fields = _ask("sampler", config, name) | {"topology": name, "batch_size": config.sample.batch_size}
  return programs.Sampler(**fields | {"programs": tuple(programs.Memory(**m) for m in fields.get("programs", ()))})


def largest(
    config: ml_collections.ConfigDict, first: programs.Training, say: Callable[[str], None],
    measure: Callable[[ml_collections.ConfigDict, str], programs.Training] = training,
) -> Largest:
  """Bisects over the sizes of a micro-batch that divide the batch; what does not compile counts as not fitting.

  Args:
    config: of the run.
    first: what is known of its own number of micro-batches.
    say: is told what is tried.
    measure: compiles a step.
  """
  each = first.sequences * first.micro_batches  # sequences of a step on each device
  sizes = [n for n in range(1, each + 1) if each % n == 0]
  tried = {first.sequences: _outcome(first)}

  def fits(n: int) -> bool:
    if n not in tried:
      say(f"{first.topology}, {n} sequences a device ...")
      smaller = config.copy_and_resolve_references()
      smaller.micro_batches = each // n
      tried[n] = _outcome(measure(smaller, first.topology))
    return tried[n] == "fits"

  own = sizes.index(first.sequences)
  low, high = (own + 1, len(sizes)) if fits(first.sequences) else (0, own)  # all below low fit, none from high on does
  while low < high:
    middle = (low + high) // 2
    low, high = (middle + 1, high) if fits(sizes[middle]) else (low, middle)
  best = sizes[low - 1] if low else 0
  return Largest(best, each // best if best else 0, dict(sorted(tried.items())))


def _outcome(report: programs.Training) -> str:
  error = report.error or (report.program.error if report.program else "")
  return {True: "fits", False: "does not fit", None: f"failed: {error}"}[report.fits]


def _ask(what: str, config: ml_collections.ConfigDict, name: str) -> dict[str, Any]:
  """The fields of what a process found, with the error where it did not come to its end."""
  config_lib.check(config)
  topology.check(name)
  request = json.dumps({"what": what, "config": config.to_dict(), "topology": name})
  process = subprocess.run(
      [sys.executable, "-c", "from aogpt_jax.aot import processes; processes.answer()"], input=request, text=True,
      capture_output=True, env=os.environ | _ENVIRONMENT, check=False)
  # libtpu writes to both streams, too.
  found = [line for line in process.stdout.splitlines() if line.startswith(_FOUND)]
  fields = json.loads(found[-1].removeprefix(_FOUND)) if found else {}
  if process.returncode:
    lines = [line.strip() for line in process.stderr.splitlines() if re.search("error|fail|abort", line, re.IGNORECASE)]
    said = lines[-1][:300] if lines else "without a message"
    fields["error"] = f"the compiler's process ended with code {process.returncode}: {said}"
  return fields


def answer() -> None:
  """The other side of `_ask`: reads a request from standard input, writes what it finds, a line each time there is more."""
  request = json.loads(sys.stdin.read())
  measure = {"training": programs.training, "sampler": programs.sampler}[request["what"]]
  try:
    for found in measure(config_lib.from_dict(request["config"]), request["topology"]):
      print(f"\n{_FOUND}{json.dumps(dataclasses.asdict(found))}", flush=True)
  except (ValueError, jax.errors.JaxRuntimeError) as e:  # a topology or mesh that can't be
    print(f"\n{_FOUND}{json.dumps({'error': programs.line(e)})}", flush=True)
