"""Where and with what a run was trained: a JSON object in WORKDIR/starts.jsonl for each time that training was started there."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
from typing import Any

import jax
import ml_collections

from aogpt_jax import config as config_lib
from aogpt_jax import records
from aogpt_jax.data import packing

FILE = "starts.jsonl"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def describe() -> dict[str, Any]:
  """Versions, devices and, where the code is a git checkout, its commit."""
  versions = {}
  for name in _PACKAGES:
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # such as a jaxlib under another name
      pass
  device = jax.devices()[0]
  return {
      "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
      "command": [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]],
      "python": platform.python_version(), "versions": versions, "commit": commit(),
      "devices": jax.device_count(), "device_kind": device.device_kind, "platform": device.platform,
      "processes": jax.process_count(), "machine": platform.machine(), "system": platform.system(),
      "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()}


def commit() -> str:
  """Of the checkout that this code is in, with "+" where tracked files differ from it; "" where it is in none."""
  root = pathlib.Path(__file__).resolve().parents[2]
  if not (root / ".git").exists():
    return ""
  try:
    git = lambda *arguments: subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return git("rev-parse", "HEAD") + "+" * bool(git("status", "--porcelain", "--untracked-files=no"))
  except (OSError, subprocess.SubprocessError):  # no git, or a checkout that is somebody else's
    return ""


def record(workdir: pathlib.Path, step: int, config: ml_collections.ConfigDict, packed: packing.PackedDataset) -> None:
  """Adds a line for a start from this step, on process 0; with the text, by its checksums."""
  if jax.process_index() != 0:
    return
  path = workdir / FILE
  is_cut = path.exists() and not path.read_bytes().endswith(b"\n")  # by a process that was killed
  with path.open("a", encoding="utf-8") as f:
    f.write("\n" * is_cut + json.dumps({"step": step, **describe(), "text": packed.metadata.get("checksums", {}), "config": config.to_dict()}) + "\n")


def check_text(workdir: pathlib.Path, config: ml_collections.ConfigDict, packed: packing.PackedDataset) -> None:
  """Raises ConfigError where a run's text is not the one that it was trained on when it was last started."""
  before = next((r["text"] for r in reversed(records.of_steps(workdir / FILE)[0]) if r.get("text")), {})
  now = packed.metadata.get("checksums", {})
  different = [split for split, checksum in before.items() if now and now.get(split) != checksum]
  if different:
    raise config_lib.ConfigError(
        f"config.data.source: {config.data.source} has changed since {workdir} was trained on it: the tokens of its "
        f"{' and '.join(different)} text are others. Put it back as it was, or give another --workdir; --config.init_from={workdir} "
        "starts from this run's parameters.")
