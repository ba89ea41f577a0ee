"""Runs the notebook from top to bottom, and keeps what its cells put out: python notebooks/execute.py

What is kept is for those who read the notebook without running it. It belongs to the code cells as they were (`fingerprint`), so
run this again after changing one; tests/test_notebook.py says so too.
"""

import argparse
import hashlib
import pathlib
import re
import sys
import tempfile
import time
from typing import Any

NOTEBOOK = pathlib.Path(__file__).with_name("aogpt_jax.ipynb")
_LONGEST_HTML = 20_000  # characters; what is longer is a page with scripts, which GitHub does not show


def fingerprint(notebook: dict[str, Any]) -> str:
  """Of the sources of all code cells."""
  sources = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
  return hashlib.sha256("\0".join(sources).encode()).hexdigest()[:16]


def run(notebook: Any, values: dict[str, Any]) -> None:
  """Runs a notebook of nbformat, which then has the outputs; says which cell it has come to.

  Args:
    notebook: is changed.
    values: what names of the first code cell are set to instead, for this run.
  """
  import nbclient  # pylint: disable=import-outside-toplevel  # `fingerprint` does without it
  first = next(cell for cell in notebook.cells if cell.cell_type == "code")
  written = first.source
  for name, value in values.items():
    first.source, times = re.subn(rf"^{name} = .*?(?=  #|$)", lambda _: f"{name} = {value!r}", first.source, flags=re.MULTILINE)
    if not times:
      raise ValueError(f"{NOTEBOOK}: its first code cell does not set {name}.")
  numbers = [i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
  start = time.monotonic()

  def executed(cell, cell_index, execute_reply):
    del cell, execute_reply
    print(f"cell {numbers.index(cell_index) + 1} of {len(numbers)}, {time.monotonic() - start:.0f} s", flush=True)

  client = nbclient.NotebookClient(
      notebook, timeout=None, startup_timeout=600, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}},
      record_timing=False, on_cell_executed=executed)
  try:
    client.execute()
  finally:
    first.source = written


def tidy(notebook: Any) -> None:
  """Joins the lines of each cell, and leaves out what would not be shown."""
  for cell in notebook.cells:
    joined = []
    for output in cell.get("outputs", ()):
      if joined and output.output_type == "stream" and joined[-1].get("name") == output.name:
        joined[-1].text += output.text
      else:
        joined.append(output)
      if len(output.get("data", {}).get("text/html", "")) > _LONGEST_HTML:
        output.data = {"text/plain": "(a page that plays: run the cell to see it)"}
    if "outputs" in cell:
      cell.outputs = joined


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--output", default=str(NOTEBOOK), help="file to write; with another than the notebook, outputs are kept whole")
  parser.add_argument("--workdir", default="", help="WORKDIR of the notebook; a temporary directory by default")
  args = parser.parse_args()
  try:
    import nbformat  # pylint: disable=import-outside-toplevel
  except ImportError:
    sys.exit("error: nbformat is not installed; pip install 'aogpt_jax[notebook]'")
  notebook = nbformat.read(NOTEBOOK, as_version=4)
  with tempfile.TemporaryDirectory() as directory:
    run(notebook, {"WORKDIR": args.workdir or directory})
  if pathlib.Path(args.output).resolve() == NOTEBOOK.resolve():
    tidy(notebook)
    notebook.metadata["aogpt_jax"] = {"outputs_of": fingerprint(notebook)}
  nbformat.write(notebook, args.output)


if __name__ == "__main__":
  main()
