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


def record(workdir: pathlib.Path, step: int, config: ml_collections.ConfigDict) -> None:
  """Adds a line for a start from this step, on process 0."""
  if jax.process_index() != 0:
    return
  path = workdir / FILE
  is_cut = path.exists() and not path.read_bytes().endswith(b"\n")  # by a process that was killed
  with path.open("a", encoding="utf-8") as f:
    f.write("\n" * is_cut + json.dumps({"step": step, **describe(), "config": config.to_dict()}) + "\n")
