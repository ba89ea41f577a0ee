"""The list of files in the README is complete, and each file imports only from those below it, as it says."""

import ast
import re

from conftest import ROOT

LISTED = re.findall(r"^    (aogpt_jax/\S+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
FILES = [path for path in sorted((ROOT / "aogpt_jax").rglob("*.py")) if path.name != "__init__.py"]


def floor(module: str) -> int:
  """The line of the README's list that holds a dotted module, counted from the top."""
  path = module.replace(".", "/")
  lines = [i for i, line in enumerate(LISTED) if path + ".py" == line or (path + "/").startswith(line)]
  assert len(lines) == 1, f"{module} is on {len(lines)} lines of the README's list of files"
  return lines[0]


def imported(path) -> set[str]:
  """The modules of this package that a file imports."""
  modules = set()
  for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aogpt_jax"):
      for alias in node.names:
        inner = f"{node.module}.{alias.name}"
        is_module = (ROOT / (inner.replace(".", "/") + ".py")).exists() or (ROOT / inner.replace(".", "/")).is_dir()
        modules.add(inner if is_module else node.module)
  return modules


def test_the_list_of_files_is_complete():
  assert len({floor(str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")) for path in FILES}) == len(LISTED)


def test_each_file_imports_only_from_those_below_it():
  for path in FILES:
    own = floor(str(path.relative_to(ROOT).with_suffix("")).replace("/", "."))
    for module in imported(path):
      assert floor(module) > own or LISTED[own].endswith("/"), f"{path.relative_to(ROOT)} imports {module}, which is above it"
