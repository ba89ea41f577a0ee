"""What a notebook runs on: its JAX with its devices, and beside it what this checkout needs.

    python notebooks/runtime.py [--dry-run and other options of pip install]

Colab, Kaggle and the images of TPU machines come with a JAX that is made for their devices. That one stays: of the rest, pip may
choose any versions that go with it. The package itself is imported from the checkout, which needs no installation.
"""

import ast
import importlib
import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Distributions that make up a JAX with its devices: jax, jaxlib, jax-cuda12-plugin, libtpu, nvidia-cudnn-cu12 and the like.
_JAX = re.compile(r"(jax(lib)?|libtpu|jax[-_](cuda|rocm|tpu).*|nvidia[-_].*)", re.IGNORECASE)


def install(*options: str) -> None:
  """Installs what setup.py asks for and is not there; leaves JAX as it is.

  Args:
    options: of pip install.

  Raises:
    RuntimeError: JAX is older than setup.py wants, or pip finds nothing that goes with it; nothing has been installed.
  """
  requirements = [_parsed(line) for line in _requirements()]
  floor = dict(requirements)["jax"]
  installed = {name: _version(name) for name, _ in requirements}
  if installed["jax"] and _numbers(installed["jax"]) < _numbers(floor):
    raise RuntimeError(
        f"JAX {installed['jax']} of this runtime is older than {floor}, the oldest that aogpt_jax is tested with; nothing was "
        "installed. Choose a newer version of the runtime (in Colab: Runtime > Change runtime type), or give this one another JAX, "
        f"pip install -U 'jax>={floor}' with [cuda12] or [tpu] behind its name for such devices, and restart it.")
  missing = [f"{name}>={least}" for name, least in requirements
             if not installed[name] or _numbers(installed[name]) < _numbers(least)]
  if not missing:
    print("all that aogpt_jax needs is installed")
    return
  names = {d.name for d in importlib.metadata.distributions() if _JAX.fullmatch(d.name or "")}
  kept = sorted(f"{name}=={_version(name)}" for name in names)
  unchanged = ", ".join(kept) or "none; pip chooses one"
  print(f"installing {', '.join(missing)}\nunchanged, as parts of JAX: {unchanged}", flush=True)
  with tempfile.TemporaryDirectory() as directory:
    constraints = pathlib.Path(directory) / "constraints.txt"
    constraints.write_text("".join(line + "\n" for line in kept))
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", str(constraints), *missing, *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
  print(done.stdout, end="", flush=True)
  if done.returncode:
    raise RuntimeError(f"pip finds nothing that goes with this JAX ({unchanged}); its lines above say why. A newer version of the "
                       "runtime may have what is missing.")
  importlib.invalidate_caches()


def describe() -> None:
  """Prints versions and devices, and what to do where there is an accelerator that JAX does not use."""
  import jax  # pylint: disable=import-outside-toplevel  # after `install`
  import jaxlib  # pylint: disable=import-outside-toplevel
  print(f"Python {platform.python_version()}, jax {jax.__version__}, jaxlib {jaxlib.__version__}, flax {_version('flax')}")
  devices = jax.devices()
  print(f"{len(devices)} x {devices[0].device_kind}, platform {devices[0].platform}, {os.cpu_count()} CPU cores")
  if devices[0].platform == "cpu" and shutil.which("nvidia-smi"):
    print("There is an NVIDIA GPU that this JAX does not use: pip install 'jax[cuda12]' and restart the runtime.")
  elif devices[0].platform == "cpu":
    print("No GPU or TPU: all of this runs, in some minutes. In Colab, Runtime > Change runtime type has them.")


def _requirements() -> list[str]:
  """REQUIRES of setup.py, which is not run."""
  for node in ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body:
    if isinstance(node, ast.Assign) and node.targets[0].id == "REQUIRES":
      return ast.literal_eval(node.value)
  raise RuntimeError(f"{ROOT / 'setup.py'}: has no list REQUIRES.")


def _parsed(requirement: str) -> tuple[str, str]:
  name, _, least = requirement.partition(">=")
  return name, least


def _version(name: str) -> str:
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return ""


def _numbers(version: str) -> list[int]:
  """The release of a version: [0, 11, 0] of 0.11.0.dev20260101+cuda12."""
  return [int(x) for x in re.match(r"[\d.]*\d", version)[0].split(".")]


if __name__ == "__main__":
  try:
    install(*sys.argv[1:])
  except RuntimeError as e:
    sys.exit(f"error: {e}")
