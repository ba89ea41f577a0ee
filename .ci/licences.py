"""The licences of what `pip install aogpt_jax` brings along, as a table; its status is 1 where one is not on the list of those known.

  python .ci/licences.py [--write]

With --write, the table in docs/licences.md is written anew.
"""

import ast
from collections.abc import Iterable
import importlib.metadata
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "licences.md"
# Permissive ones, and those whose terms are met by using a library as it is.
KNOWN = re.compile(r"apache|bsd|mit\b|isc|python|psf|mpl|mozilla|hpnd|unlicense|zlib|cnri|historical", re.IGNORECASE)


def required() -> list[str]:
  """The requirements of setup.py, without those of extras."""
  for node in ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body:
    if isinstance(node, ast.Assign) and node.targets[0].id == "REQUIRES":
      return ast.literal_eval(node.value)
  raise ValueError("setup.py has no REQUIRES")


def closure(requirements: Iterable[str], found: set[str]) -> set[str]:
  """Adds the names of these packages, and of all that they require, where they are installed; returns `found`."""
  for requirement in requirements:
    name = re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")
    if name in found or "extra" in requirement.partition(";")[2]:
      continue
    try:
      theirs = importlib.metadata.requires(name) or ()
    except importlib.metadata.PackageNotFoundError:  # of another system or Python
      continue
    found.add(name)
    closure(theirs, found)
  return found


def licence(package: str) -> str:
  """What a package says, in one line."""
  metadata = importlib.metadata.metadata(package)
  classified = [c.rpartition(" :: ")[2] for c in metadata.get_all("Classifier") or () if c.startswith("License ::")]
  text = metadata.get("License-Expression") or ", ".join(c for c in classified if c != "OSI Approved") or metadata.get("License") or ""
  return " ".join(text.split())[:60] or "not said"


def main() -> None:
  rows = [(name, importlib.metadata.version(name), licence(name)) for name in sorted(closure(required(), set()))]
  table = "\n".join(["| package | version | licence |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])
  if "--write" in sys.argv[1:]:
    before = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(r"\| package \|.*", lambda _: table, before, flags=re.DOTALL) + "\n", encoding="utf-8")
  print(table)
  unknown = [name for name, _, text in rows if not KNOWN.search(text)]
  if unknown:
    sys.exit(f"error: look at the licences of {', '.join(unknown)}, and add what they are to .ci/licences.py")


if __name__ == "__main__":
  main()
