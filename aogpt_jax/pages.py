"""What HTML pages share: their style, the frame that is filled in, and the file that they are written to."""

import importlib.resources
import pathlib
import re
import tempfile


def fill(package: str, **parts: str) -> str:
  """The page.html of a package with its parts in place of {{NAME}}, and the shared style in place of {{style}}.

  Parts are HTML already, and what is in them is not filled in again.
  """
  read = lambda where, name: importlib.resources.files(where).joinpath(name).read_text(encoding="utf-8")
  parts["style"] = read(__package__, "pages.css")
  return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], read(package, "page.html"))


def file(flag: str, path: str) -> pathlib.Path:
  """The file that a flag names, in a directory that is created and can be written to.

  Raises:
    OSError: it can't be written.
  """
  found = pathlib.Path(path).expanduser().resolve()
  try:
    if found.is_dir():
      raise IsADirectoryError(0, "it is a directory")
    found.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=found.parent):
      pass
  except OSError as e:
    raise OSError(f"{flag}={path}: can't be written ({e.strerror}); give another file.") from None
  return found
