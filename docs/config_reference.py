"""Writes docs/config.md, the reference of all fields, from the comments of aogpt_jax/config.py:

    python docs/config_reference.py
"""

import ast
from collections.abc import Iterator
import io
import pathlib
import tokenize

DOCS = pathlib.Path(__file__).resolve().parent
SOURCE = DOCS.parent / "aogpt_jax" / "config.py"
HEAD = """# Config reference

<!-- Written by `python docs/config_reference.py` from the comments in aogpt_jax/config.py. Change those, and run it again. -->

A config file has a function `get_config()`, which takes `default_config()` of
[aogpt_jax/config.py](../aogpt_jax/config.py) and sets what differs: see [configs/tiny.py](../configs/tiny.py). Any field can be set on
the command line, as `--config.model.width=256`; a tuple as `--config.sample.orders="('uniform', 'mix(0.1)')"`. A value is of the type
of its default. The defaults are AO-GPT small as released. What the tables say goes on from the name of the field: `seed`, of the
initialisation.

What is misspelt, out of range or contradictory is an error before anything is compiled.

A run that is started again may change these fields and sections: {free}.
Anything else would make it another run, and is an error.
"""


class UndocumentedError(ValueError):
  """A field has neither a comment behind it nor one above it."""


def comments(source: str) -> tuple[dict[int, str], dict[int, str]]:
  """Comments behind code and comments that have a line to themselves, by line."""
  behind, whole = {}, {}
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    if token.type == tokenize.COMMENT:
      (behind if token.line[: token.start[1]].strip() else whole)[token.start[0]] = token.string.lstrip("# ").rstrip()
  return behind, whole


def is_section(value: ast.expr) -> bool:
  return isinstance(value, ast.Call)


def section(call: ast.Call, path: str, source: str) -> Iterator[str]:
  """The lines of a section: its fields as tables, then the sections within it."""
  behind, whole = comments(source)

  def above(line: int) -> str:
    texts = []
    while line - 1 in whole:
      line -= 1
      texts.insert(0, whole[line])
    return " ".join(texts)

  in_table = False
  for field in (f for f in call.keywords if not is_section(f.value)):
    # The comment behind a field is its own; where there is one, the lines above it are of what follows, too.
    own, note = behind.get(field.value.end_lineno, ""), above(field.lineno)
    if not own:
      own, note = note, ""
    if not own:
      raise UndocumentedError(f"{SOURCE.name}: line {field.lineno}: config.{path}{field.arg} has no comment; say what it is.")
    if note:
      yield from ("", note)
    if note or not in_table:
      yield from ("", "| field | default | |", "|---|---|---|")
    in_table = True
    yield f"| `{path}{field.arg}` | `{cell(ast.unparse(field.value))}` | {cell(own)} |"
  for field in (f for f in call.keywords if is_section(f.value)):
    yield from ("", f"{'##' + '#' * path.count('.')} {path}{field.arg}")
    about = behind.get(field.lineno, "") or above(field.lineno)
    if about:
      yield from ("", about[0].upper() + about[1:] + "." * (not about.endswith(".")))
    yield from section(field.value, f"{path}{field.arg}.", source)


def cell(text: str) -> str:
  return text.replace("|", "\\|")


def page(source: str) -> str:
  """The whole page, from the text of config.py."""
  names = {}
  for node in ast.parse(source).body:
    if isinstance(node, ast.FunctionDef) and node.name == "default_config":
      names["fields"] = next(n.value for n in ast.walk(node) if isinstance(n, ast.Return))
    elif isinstance(node, ast.Assign) and node.targets[0].id == "FREE_TO_CHANGE":
      names["free"] = ast.literal_eval(node.value)
  free = ", ".join(f"`{name}`" for name in names["free"])
  return "\n".join([HEAD.format(free=free).rstrip("\n"), "", "## The run", *section(names["fields"], "", source), ""])


if __name__ == "__main__":
  (DOCS / "config.md").write_text(page(SOURCE.read_text(encoding="utf-8")), encoding="utf-8")
