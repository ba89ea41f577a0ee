"""Files as Hugging Face keeps them: downloads from its hub, and tensors in safetensors files."""

from collections.abc import Callable, Iterator
import pathlib
import re
from typing import Any

import numpy as np

from aogpt_jax import records


def download(what: str, advice: str, call: Callable[[Any], str]) -> pathlib.Path:
  """What `call` downloads, given the module huggingface_hub.

  Args:
    what: begins the error, e.g. the name with what is wrong with it as a path.
    advice: ends it: what to do where there is no network.
    call: returns where the hub's cache has it.

  Raises:
    ImportError: huggingface_hub is not installed.
    ConnectionError: no network, or no such name.
  """
  try:
    import huggingface_hub  # Here: local files do without it.
  except ImportError:
    raise ImportError(f"{what} huggingface_hub, which would download it, is not installed; pip install 'aogpt_jax[hf]', or "
                      f"{advice}.") from None
  try:
    return pathlib.Path(call(huggingface_hub))
  except Exception as e:  # pylint: disable=broad-exception-caught  # the hub's own types, and those of its HTTP client
    reason = re.sub(r"\s+", " ", f"{type(e).__name__}: {e}")[:200]
    raise ConnectionError(
        f"{what} can't be downloaded from the Hugging Face hub ({reason}); check the name, or {advice}.") from None


def require_safetensors(what: str) -> Any:
  """The module safetensors.

  Raises:
    ImportError: it is not installed.
  """
  try:
    import safetensors  # Here: only files in its format need it.
  except ImportError:
    raise ImportError(
        f"{what}: its weights are kept by safetensors, which is not installed; pip install 'aogpt_jax[hf]'.") from None
  return safetensors


def tensors(path: pathlib.Path) -> Iterator[tuple[str, np.ndarray]]:
  """Name and values of each tensor in a safetensors file, one after another.

  Raises:
    ImportError: safetensors is not installed.
    ValueError: it is no such file.
  """
  safetensors = require_safetensors(str(path))
  try:
    with safetensors.safe_open(path, framework="np") as f:
      for key in f.keys():
        yield key, f.get_tensor(key)
  except OSError:
    raise
  except Exception as e:  # pylint: disable=broad-exception-caught  # damage raises exceptions of many types
    raise ValueError(f"{path}: is not a safetensors file of arrays ({records.shown(str(e))}); download or save it again.") from None
