"""Documents: an ordered, deterministic stream of texts, each belonging to one split.

`documents(config.data)` opens one of

  stdlib             English prose (docstrings and comments) of the running Python's standard library
  stdlib_source      its source code
  files:GLOB         local text files (a document each), JSON lines or CSV (a document per record), also .gz
  lines:GLOB         local text files with a document per line
  tfds:NAME[/CONFIG][:VERSION]   a data set of TFDS prepared as array_record, read without TensorFlow
  urn:LENGTH         texts of LENGTH letters each from a Pólya urn: data with no natural order, whose entropy is known
  sudoku:CLUES       4x4 Sudokus with one solution each, CLUES of whose 16 cells are given: examples, for which order decides

Documents are held out whole. Which split a document falls into depends on a hash of the document alone
(of its name for stdlib, of its text elsewhere, so that copies stay together), so adding documents moves
none, and duplicates never sit on both sides.

To add one: a subclass of Source, and a line in SOURCES.
"""

import ast
import collections
import csv
import difflib
import glob
import gzip
import hashlib
import importlib.util
import inspect
import io
import itertools
import json
import math
import os
import random
import re
import socket
import sysconfig
import tokenize
import urllib.request
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import json_format

from aogpt_jax import records

SPLITS = ("train", "validation", "test")

# Part of every fingerprint: raise it when this file starts to yield other text from the same input.
_VERSION = 2
# Up to here a fingerprint reads every byte (about a second); above, it trusts size and mtime.
_HASH_CONTENT_BELOW = 1 << 30


class Document(NamedTuple):
  """One text. `fraction` in (0, 1] says how far through the source its end is, for progress reports.

  An example, of which a part is given, has its text in pieces too, each with whether it is given.
  """

  split: str
  id: str
  text: str
  fraction: float
  pieces: tuple[tuple[str, bool], ...] = ()


class Source:
  """Base of all sources.

  Attributes:
    name: readable, fit for a directory name.
    fingerprint: sha256 hex digest; changes when any document, its order or its split may have changed.
    is_shuffled: whether documents are in another order than the data set was published in.
    has_examples: whether documents are examples, in pieces of which some are given.
    files: that documents are read from.
  """

  name: str
  fingerprint: str
  is_shuffled: bool = False
  has_examples: bool = False
  files: Sequence[str] = ()

  def stamp(self) -> str:
    """Of names, sizes and times of the files as they are now, 64 hexadecimal digits; another one where one was written to."""
    digest = hashlib.sha256()
    for path in self.files:
      digest.update(_stat(path, os.stat(path)))
    return digest.hexdigest()

  def stream(self, start: int = 0) -> Iterator[Document]:
    """Yields all documents of all splits in a fixed order, from number `start` on; texts may be empty."""
    raise NotImplementedError

  def split(self, split: str) -> Iterator[tuple[str, str]]:
    """Yields (id, text) of one split, in order."""
    return ((d.id, d.text) for d in self.stream() if d.split == split)


def documents(config) -> Source:
  """Opens the source that `config` (the `data` section of a config) names.

  Raises:
    ValueError, FileNotFoundError, ModuleNotFoundError, ConnectionError, RuntimeError: one line each, saying what is
      wrong, where, and how to mend it.
  """
  for field in ("validation_fraction", "test_fraction"):
    if not 0 <= config[field] < 1:
      raise ValueError(f"data.{field}={config[field]} must lie in [0, 1)")
  if config.validation_fraction + config.test_fraction >= 1:
    raise ValueError("data.validation_fraction + data.test_fraction must stay below 1 to leave a train split")
  kind, _, rest = config.source.partition(":")
  if kind in SOURCES and (":" in SOURCES[kind].usage) == bool(rest):
    return SOURCES[kind].open(config, rest)
  raise ValueError(
      f"data.source={config.source!r} is not one of {', '.join(repr(source.usage) for source in SOURCES.values())}")


def held_out_split(key: str, validation_fraction: float, test_fraction: float) -> str:
  """Returns the split of the document with this key: a function of the key and the fractions alone."""
  u = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
  if u < test_fraction:
    return "test"
  return "validation" if u < test_fraction + validation_fraction else "train"


def _fingerprint(settings: dict, paths: Iterable[str]) -> str:
  """sha256 over the settings and the files, in order."""
  paths = list(paths)
  settings = dict(settings, version=_VERSION)
  digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
  stats = [os.stat(path) for path in paths]
  by_content = sum(s.st_size for s in stats) <= _HASH_CONTENT_BELOW
  for path, stat in zip(paths, stats):
    if by_content:
      with open(path, "rb") as f:
        digest.update(hashlib.file_digest(f, "sha256").digest())
    else:
      digest.update(_stat(path, stat))
  return digest.hexdigest()


def _stat(path: str, stat: os.stat_result) -> bytes:
  return f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode(errors="surrogateescape")


# --- stdlib -----------------------------------------------------------------------------------------

# Tests hold data rather than language, and third-party packages differ between installations.
_SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_MIN_LETTERS = 0.86  # of the non-space characters of a paragraph; English has 0.95, code and tables less
_MIN_PROSE = 200  # characters; below, a module has nothing to say


class Stdlib(Source):
  """The running Python's standard library: a document per module, named by the module."""

  def __init__(self, config, prose: bool):
    self.name = "stdlib" if prose else "stdlib_source"
    self._prose = prose
    self._fractions = (config.validation_fraction, config.test_fraction)
    root = Path(sysconfig.get_paths()["stdlib"])
    self._modules = sorted(
        (_module_name(path.relative_to(root)), path)
        for path in root.rglob("*.py")
        if not _SKIPPED_DIRECTORIES.intersection(path.relative_to(root).parts)
        and not path.name.startswith("_sysconfigdata"))
    if not self._modules:
      raise FileNotFoundError(
          f"data.source={self.name!r}: no .py files under {root} (a zipped standard library?); use another "
          "Python or data.source='files:GLOB'")
    self.files = [str(path) for _, path in self._modules]
    self.fingerprint = _fingerprint(
        {"source": self.name, "fractions": self._fractions, "modules": [m for m, _ in self._modules]}, self.files)

  def stream(self, start: int = 0) -> Iterator[Document]:
    number = 0
    for i, (module, path) in enumerate(self._modules, 1):
      try:
        with tokenize.open(path) as f:
          text = f.read()
        texts = self._texts(module, text)
      except (SyntaxError, UnicodeDecodeError):
        continue  # Not a module of this Python: templates and fixtures.
      for key, text in texts:
        if number >= start:
          yield Document(held_out_split(key, *self._fractions), key, text, i / len(self._modules))
        number += 1

  def _texts(self, module: str, source: str) -> list[tuple[str, str]]:
    if not self._prose:
      return [(module, source)] if source.strip() else []
    text = _pydoc_topics(source) if module == "pydoc_data.topics" else prose(source)
    return [(module, text)] if len(text) >= _MIN_PROSE else []


def _module_name(path: Path) -> str:
  return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def prose(source: str) -> str:
  """Returns the English of a Python source: docstrings and comment blocks in order of appearance.

  Blocks are dedented, without comment markers, and separated by blank lines. Doctests, commented-out
  code, tables, separator lines and trailing comments are left out.

  Raises:
    SyntaxError: `source` does not parse.
  """
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Invalid escapes in somebody else's strings.
    tree = ast.parse(source)
  blocks = []  # (line, text)
  string_lines = set()
  for node in ast.walk(tree):
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
      docstring = ast.get_docstring(node, clean=False)
      if docstring:
        blocks.append((node.body[0].lineno, inspect.cleandoc(docstring)))
    elif isinstance(node, (ast.Constant, ast.JoinedStr)) and node.end_lineno > node.lineno:
      string_lines.update(range(node.lineno, node.end_lineno + 1))
  blocks += _comment_blocks(source, string_lines)
  return _english("\n\n".join(text for _, text in sorted(blocks)))


def _comment_blocks(source: str, string_lines: set[int]) -> list[tuple[int, str]]:
  """Runs of whole-line comments at one indentation, with their first line; string_lines hold no comment."""
  blocks, lines, indent = [], [], -1
  for number, line in enumerate(source.split("\n") + [""], 1):
    stripped = line.lstrip()
    is_comment = stripped.startswith("#") and number not in string_lines
    column = len(line) - len(stripped)
    if lines and not (is_comment and column == indent):
      text = "\n".join(lines)
      if not _is_code(text):
        blocks.append((number - len(lines), text))
      lines = []
    if is_comment:
      # Markers such as "#:" and "##" are more than the one character.
      lines.append(re.sub(r"^#+[:!|]? ?", "", stripped).rstrip(" #"))
      indent = column
  return blocks


def _is_code(comment: str) -> bool:
  """Whether a comment block is commented-out code: it parses, and not as bare words."""
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
      body = ast.parse(inspect.cleandoc(comment)).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
      return False
  return not all(isinstance(s, ast.Expr) and isinstance(s.value, (ast.Name, ast.Constant)) for s in body)


def _english(text: str) -> str:
  """Keeps the paragraphs that read as English, each once."""
  paragraphs = dict.fromkeys(map(_tidy, re.split(r"\n\s*\n", text)))
  return "\n\n".join(p for p in paragraphs if _is_english(p))


def _tidy(paragraph: str) -> str:
  lines = paragraph.rstrip().split("\n")
  return "\n".join(line.rstrip() for line in lines if re.search(r"[A-Za-z0-9]", line))


def _is_english(paragraph: str) -> bool:
  if re.match(r"\s*(>>>|\.\. |-\*-|vim?:|!/|XXX$|type:|pragma|noqa|fmt:|\$Id)", paragraph) or "-*-" in paragraph:
    return False
  dense = re.sub(r"\s", "", paragraph)
  if sum(c.isalpha() for c in dense) < _MIN_LETTERS * len(dense):
    return False
  words = re.findall(r"[A-Za-z]{2,}", paragraph)
  return len(words) >= 3 and sum(w.islower() for w in words) >= 0.4 * len(words)


def _pydoc_topics(source: str) -> str:
  """The language reference, which pydoc_data/topics.py holds as one dict of texts.

  One document, because topics contain one another: apart, the same paragraphs would be in two splits.
  """
  for node in ast.parse(source).body:
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
      return _english("\n\n".join(text for _, text in sorted(ast.literal_eval(node.value).items())))
  return ""


# --- files ------------------------------------------------------------------------------------------


# By the end of a file's name without .gz: what holds a document per record, in a field. Any other file is text.
_RECORDS = {".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv"}
_LONGEST_FIELD = 1 << 30  # characters of a CSV field; the csv module's own limit is 131,072


# In a prompt; the number, which says how many tokens are to be drawn where a prompt is sampled, may be left out.
_BLANK = re.compile(r"\[\[\d*\]\]")


class Files(Source):
  """Local files by glob: a document per record of .jsonl, .ndjson, .csv and .tsv, or per line; any other file is one document.

  With `prompt_field`, each record is an example: the prompt, which is given, and behind it the completion; or the prompt with the
  texts of the completion in place of its blanks. Those of one prompt are in one split.
  """

  def __init__(self, config, pattern: str, by_lines: bool = False):
    paths = glob.glob(os.path.expanduser(pattern), recursive=True)
    self.files = sorted(path for path in paths if os.path.isfile(path))
    self._by_lines = by_lines
    kind = "lines" if by_lines else "files"
    if os.path.isdir(os.path.expanduser(pattern)):
      raise FileNotFoundError(f"data.source='{kind}:{pattern}' is a directory; name its files: '{kind}:{pattern}/**/*.txt'")
    if not self.files:
      raise FileNotFoundError(
          f"data.source='{kind}:{pattern}' matches no file (from {os.getcwd()}); check the pattern and quote "
          "it in the shell")
    stem = re.sub(r"[^a-z0-9]+", "_", Path(self.files[0]).name.split(".")[0].lower()).strip("_")
    self.name = f"files_{stem}" if stem else "files"
    self._text_field = config.text_field
    self._fields = (config.prompt_field, config.completion_field) if config.prompt_field else ()
    self.has_examples = bool(self._fields)
    for path in self.files if self.has_examples else ():
      if by_lines or not is_records(path):
        raise ValueError(f"{path}: has no records with the field data.prompt_field={config.prompt_field!r}; give "
                         f"'files:GLOB' of {', '.join(_RECORDS)}")
    self._fractions = (config.validation_fraction, config.test_fraction)
    settings = {"source": "files", "fractions": self._fractions, "text_field": self._text_field,
                "kinds": [self._kind(path) for path in self.files]}
    self.fingerprint = _fingerprint(settings | ({"fields": self._fields} if self._fields else {}), self.files)

  def stream(self, start: int = 0) -> Iterator[Document]:
    total = sum(os.path.getsize(path) for path in self.files) or 1
    number = done = 0
    for path in self.files:
      size = os.path.getsize(path)
      for key, text, fraction in self._file(path):
        if number >= start:
          pieces = text if self.has_examples else ()
          text = "".join(piece for piece, _ in pieces) if pieces else text
          # By what is given alone: the same question is not both learnt and asked.
          prompt = "".join(piece for piece, given in pieces if given)
          yield Document(held_out_split(prompt or text, *self._fractions), key, text, (done + fraction * size) / total, pieces)
        number += 1
      done += size

  def _kind(self, path: str) -> str:
    """text, lines, json or csv."""
    return "lines" if self._by_lines else _RECORDS.get(_ending(path), "text")

  def _file(self, path: str) -> Iterator[tuple[str, Any, float]]:
    """Yields (id, text or pieces, fraction of the file read)."""
    size, kind = os.path.getsize(path) or 1, self._kind(path)
    with open(path, "rb") as raw, (gzip.open(raw) if path.endswith(".gz") else raw) as f:
      try:
        if kind == "text":
          yield path, _decode(f.read(), path, 0), 1.0
          return
        texts = self._csv(f, path) if kind == "csv" else self._lines(f, path, kind)
        for where, text in texts:
          yield where, text, min(raw.tell() / size, 1.0)
      except (gzip.BadGzipFile, EOFError, zlib.error) as e:
        raise ValueError(f"{path}: not a complete gzip file ({e}); download or compress it again") from None

  def _lines(self, file, path: str, kind: str) -> Iterator[tuple[str, str]]:
    offset = 0
    for number, line in enumerate(file, 1):
      where, text = f"{path}:{number}", _decode(line, path, offset)
      offset += len(line)
      if kind == "lines":
        yield where, text.rstrip("\r\n")
      elif text.strip():
        yield where, self._of_json(text, where)

  def _csv(self, file, path: str) -> Iterator[tuple[str, str]]:
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.DictReader(text, delimiter="\t" if path.removesuffix(".gz").endswith(".tsv") else ",", strict=True)
    try:
      for record in reader:
        where = f"{path}:{reader.line_num}"
        values = [self._field(record, field, where) for field in self._fields or (self._text_field,)]
        if None in values:
          raise ValueError(f"{where}: has {len([v for v in record.values() if v is not None])} columns and none for the field "
                           f"{(self._fields or (self._text_field,))[values.index(None)]!r}; each record needs all columns of the "
                           "first line")
        yield where, _pieces(*values, where) if self._fields else values[0]
    except csv.Error as e:
      raise ValueError(f"{path}:{reader.line_num}: not CSV ({records.shown(str(e))}); quote fields that hold quotes or line ends") from None
    except UnicodeDecodeError as e:
      raise ValueError(f"{path}: invalid UTF-8 after line {reader.line_num} ({e.object[e.start]:#04x}); re-encode the file, for "
                       f"example: iconv -f latin1 -t utf-8 {os.path.basename(path)} > fixed.csv") from None
    finally:
      text.detach()

  def _field(self, record: dict, field: str, where: str):
    if field not in record:
      ours = dict(zip(self._fields, ("prompt_field", "completion_field"))).get(field, "text_field")
      raise ValueError(f"{where}: no field {field!r}; it has {sorted(filter(None, record))}: set data.{ours} to one of these")
    return record[field]

  def _of_json(self, line: str, where: str) -> str | tuple[tuple[str, bool], ...]:
    """The text or the pieces of a record."""
    try:
      record = records.value(line)
    except ValueError as e:
      raise ValueError(f"{where}: not JSON ({e}); each line must be one object") from None
    if not isinstance(record, dict):
      raise ValueError(f"{where}: a JSON {type(record).__name__}, not an object with the field "
                       f"{(self._fields or (self._text_field,))[0]!r}")
    values = []
    for field in self._fields or (self._text_field,):
      value = self._field(record, field, where)
      texts = value if isinstance(value, list) and values else [value]  # a completion may be one text for each blank
      for text in texts:
        if not isinstance(text, str):
          raise ValueError(f"{where}: field {field!r} holds a {type(text).__name__}, not a string")
        try:
          text.encode()
        except UnicodeEncodeError:
          raise ValueError(f"{where}: field {field!r} holds half a surrogate pair (\\ud800..\\udfff), which is no text; repair "
                           "the escape") from None
      values.append(value)
    return _pieces(*values, where) if self._fields else values[0]


def _pieces(prompt: str, completion: str | list[str], where: str) -> tuple[tuple[str, bool], ...]:
  """(text, whether it is given) of a prompt with its completion behind it or its blanks filled; none is empty."""
  between, answers = _BLANK.split(prompt), [completion] if isinstance(completion, str) else completion
  if len(answers) != max(len(between) - 1, 1):
    raise ValueError(f"{where}: the prompt has {len(between) - 1} blanks and the completion {len(answers)} texts; give one for "
                     "each blank, or one for a prompt without blanks")
  pieces = []
  for i, text in enumerate(between):
    pieces += [(text, True), *((answer, False) for answer in answers[i : i + 1])]
  return tuple(piece for piece in pieces if piece[0])


def is_records(path: str) -> bool:
  """Whether a file holds a document per record, by its name."""
  return _ending(path) in _RECORDS


def _ending(path: str) -> str:
  return os.path.splitext(path.removesuffix(".gz"))[1]


def _decode(data: bytes, path: str, offset: int) -> str:
  """UTF-8 text of `data`, which begins at byte `offset` of the (uncompressed) file."""
  try:
    return data.decode("utf-8-sig" if offset == 0 else "utf-8")
  except UnicodeDecodeError as e:
    # A byte order mark is cut off before the error is counted.
    start = offset + e.start + (3 if offset == 0 and data.startswith(b"\xef\xbb\xbf") else 0)
    raise ValueError(
        f"{path}: invalid UTF-8 at byte {start} ({data[start - offset]:#04x}); re-encode the file, for "
        f"example: iconv -f latin1 -t utf-8 {os.path.basename(path)} > fixed.txt") from None


# --- urn --------------------------------------------------------------------------------------------

_URN_LETTERS = "abcdefghijklmnop"
_URN_START = 4.0  # balls in the urn at first, in all letters together: the fewer, the more a text repeats its letters
_URN_TEXTS = 60_000


class Urn(Source):
  """Texts from a Pólya urn each: a letter is drawn, and put back with another of its kind.

  All orders of a text's letters are equally probable (it is exchangeable), so that no order of prediction is easier than another.
  """

  def __init__(self, config, length: str):
    if not (length.isascii() and length.isdigit() and int(length)):
      raise ValueError(f"data.source='urn:{length}' is not 'urn:LENGTH' with a number of letters from 1 on, as urn:15")
    self.name = f"urn_{int(length)}"
    self._length = int(length)
    self._fractions = (config.validation_fraction, config.test_fraction)
    self.fingerprint = _fingerprint(
        {"source": "urn", "length": self._length, "letters": _URN_LETTERS, "start": _URN_START, "texts": _URN_TEXTS,
         "fractions": self._fractions}, [])

  def stream(self, start: int = 0) -> Iterator[Document]:
    for number in range(start, _URN_TEXTS):
      draw = random.Random(number)
      letters = []
      for drawn in range(self._length):
        # Either one of the balls that were put in since, which are the letters drawn so far, or one of those at first.
        old = draw.random() * (_URN_START + drawn) < drawn
        letters.append(draw.choice(letters if old else _URN_LETTERS))
      key = f"text {number}"
      yield Document(held_out_split(key, *self._fractions), key, "".join(letters), (number + 1) / _URN_TEXTS)


def urn_nats(text: str) -> float:
  """-log p of a text of `Urn`, in nats."""
  counts, nats = collections.Counter(), 0.0
  for drawn, letter in enumerate(text):
    nats -= math.log((_URN_START / len(_URN_LETTERS) + counts[letter]) / (_URN_START + drawn))
    counts[letter] += 1
  return nats


# --- sudoku -----------------------------------------------------------------------------------------

_SUDOKU_CLUES = range(4, 16)  # with fewer than 4, no puzzle has one solution
_SUDOKU_PUZZLES = 60_000  # some of which are the same where there are few


class Sudoku(Source):
  """4x4 Sudokus: in a grid of four lines, each line, column and quarter has the digits 1 to 4.

  A text is the solved grid, a line of four digits and a line feed each. Given are the line feeds and some digits, at random
  places that leave one solution. The same puzzle is in one split alone; there are 288 grids, which all splits share.
  """

  has_examples = True

  def __init__(self, config, clues: str):
    if not (clues.isascii() and clues.isdigit() and int(clues) in _SUDOKU_CLUES):
      raise ValueError(f"data.source='sudoku:{clues}' is not 'sudoku:CLUES' with {_SUDOKU_CLUES[0]} to {_SUDOKU_CLUES[-1]} clues")
    self.name = f"sudoku_{int(clues)}"
    self._clues = int(clues)
    self._fractions = (config.validation_fraction, config.test_fraction)
    self.fingerprint = _fingerprint(
        {"source": "sudoku", "clues": self._clues, "puzzles": _SUDOKU_PUZZLES, "fractions": self._fractions}, [])

  def stream(self, start: int = 0) -> Iterator[Document]:
    grids = list(sudoku_grids())
    # By cell and digit, the grids with that digit there, as bits: those of a puzzle's clues have one in common for each solution.
    having = collections.Counter()
    for i, grid in enumerate(grids):
      for cell in enumerate(grid):
        having[cell] += 1 << i
    for number in range(start, _SUDOKU_PUZZLES):
      draw, left = random.Random(number), 0
      while left.bit_count() != 1:
        grid, given = draw.choice(grids), draw.sample(range(16), self._clues)
        left = -1
        for cell in given:
          left &= having[cell, grid[cell]]
      cells = [(digit + "\n" * (cell % 4 == 3), cell) for cell, digit in enumerate(grid)]
      text = "".join(content for content, _ in cells)
      known = [character == "\n" or cell in given for content, cell in cells for character in content]
      pieces = tuple(("".join(character for character, _ in run), is_given) for is_given, run in itertools.groupby(
          zip(text, known), key=lambda x: x[1]))
      puzzle = "".join(character if is_given else "." for character, is_given in zip(text, known))
      yield Document(held_out_split(puzzle, *self._fractions), f"puzzle {number}", text, (number + 1) / _SUDOKU_PUZZLES, pieces)


def sudoku_grids(cells: str = "") -> Iterator[str]:
  """All solved 4x4 Sudokus that begin with these digits, 16 of them each, line after line."""
  if len(cells) == 16:
    yield cells
    return
  row, column = divmod(len(cells), 4)
  seen = {digit for cell, digit in enumerate(cells)
          if cell // 4 == row or cell % 4 == column or (cell // 8, cell % 4 // 2) == (row // 2, column // 2)}
  for digit in "1234":
    if digit not in seen:
      yield from sudoku_grids(cells + digit)


# --- tfds -------------------------------------------------------------------------------------------

_READ_AT_ONCE = 256  # records


class Tfds(Source):
  """A data set prepared by TensorFlow Datasets as array_record."""

  def __init__(self, config, name: str):
    self.name = "tfds_" + re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    self._name = name
    self._field = config.text_field
    self._builder = _prepared_builder(name, config.tfds_data_dir)
    features = self._builder.info.features
    if self._field not in features or features[self._field].np_dtype.kind not in "OSU":
      raise ValueError(
          f"tfds:{name} has no text field {self._field!r}; its fields are {sorted(features)}: set data.text_field")
    named = {"train": config.train_split, "validation": config.validation_split, "test": config.test_split}
    if not named["train"]:
      raise ValueError("data.train_split is empty; name a split such as 'train' or 'train[:99%]'")
    self._splits = {split: arg for split, arg in named.items() if arg}
    self._fractions = tuple(
        0.0 if named[split] else config[f"{split}_fraction"] for split in ("validation", "test"))
    self._check_splits()
    self.is_shuffled = not self._builder.info.disable_shuffling
    self.files = sorted(str(p) for p in Path(self._builder.data_dir).iterdir() if p.is_file())
    self.fingerprint = _fingerprint(
        {"source": "tfds", "name": name, "field": self._field, "splits": self._splits, "fractions": self._fractions}, self.files)

  def stream(self, start: int = 0) -> Iterator[Document]:
    import tensorflow_datasets as tfds
    from tensorflow_datasets.proto import tf_example_pb2
    total = sum(self._builder.info.splits[arg].num_examples for arg in self._splits.values())
    done = 0
    for split, arg in self._splits.items():
      records = self._builder.as_data_source(
          split=arg, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES)
      for first in range(min(max(start - done, 0), len(records)), len(records), _READ_AT_ONCE):
        indices = list(range(first, min(first + _READ_AT_ONCE, len(records))))
        for i, record in zip(indices, records.__getitems__(indices)):
          # The text alone: decoding every feature of every record takes several times as long.
          example = tf_example_pb2.Example.FromString(record)
          key = f"{arg}:{i}"
          text = self._text(example.features.feature[self._field].bytes_list.value, key)
          where = held_out_split(text, *self._fractions) if split == "train" else split
          yield Document(where, key, text, (done + i + 1) / total)
      done += len(records)

  def _text(self, values, key: str) -> str:
    try:
      return b"".join(values).decode("utf-8")
    except UnicodeDecodeError as e:
      raise ValueError(
          f"tfds:{self._name}, record {key}: field {self._field!r} is invalid UTF-8 at byte {e.start}; prepare "
          "the data set from text in UTF-8") from None

  def _check_splits(self):
    """Names exist, and no record is read for two splits."""
    ranges = []
    for split, arg in self._splits.items():
      try:
        instructions = self._builder.info.splits[arg].file_instructions
      except (KeyError, ValueError, AssertionError):
        raise ValueError(
            f"data.{split}_split={arg!r}: tfds:{self._name} has the splits {sorted(self._builder.info.splits)}; "
            "use one of them, a slice such as 'train[:99%]', or '' to hold documents out of train") from None
      ranges += [(str(f.filename), f.skip, f.skip + f.take, split, arg) for f in instructions]
    ranges.sort()
    for (file, _, end, split, arg), (other_file, begin, _, other_split, other_arg) in zip(ranges, ranges[1:]):
      if file == other_file and begin < end:
        raise ValueError(
            f"data.{split}_split={arg!r} and data.{other_split}_split={other_arg!r} of tfds:{self._name} share "
            "records; make them disjoint, for example 'train[:99%]' and 'train[99%:]'")


def _prepared_builder(name: str, data_dir: str):
  """Returns the TFDS builder of a data set prepared as array_record, preparing it if that is possible."""
  import tensorflow_datasets as tfds
  data_dir = os.path.expanduser(data_dir) if data_dir else ""
  where = data_dir or os.environ.get("TFDS_DATA_DIR") or os.path.join("~", "tensorflow_datasets")
  hugging_face = name.startswith("huggingface:")
  # A Hugging Face set lies under its own name, with TFDS's spelling of it.
  on_disk = name.removeprefix("huggingface:").replace("-", "_").lower() if hugging_face else name
  if not hugging_face and not re.fullmatch(r"\w+(/[^:/]+)?(:[\w.]+)?", name):
    raise ValueError(f"data.source='tfds:{name}' must read tfds:NAME, tfds:NAME/CONFIG or tfds:NAME/CONFIG:VERSION")
  try:
    builder = tfds.core.read_only_builder.builder_from_files(on_disk, data_dir=data_dir or None)
  except tfds.core.registered.DatasetNotFoundError:
    if not hugging_face:
      _check_registered(name, where)
    _prepare(name, data_dir, where, hugging_face)
    builder = tfds.core.read_only_builder.builder_from_files(on_disk, data_dir=data_dir or None)
  except json_format.ParseError as e:
    raise ValueError(f"tfds:{name} under {where}: dataset_info.json is damaged ({e}); prepare it again") from None
  return _as_array_record(builder, name)


def _as_array_record(builder, name: str):
  import tensorflow_datasets as tfds
  wanted = tfds.core.FileFormat.ARRAY_RECORD
  if builder.info.file_format == wanted:
    return builder
  if wanted in builder.info.alternative_file_formats:
    return tfds.builder_from_directory(builder.data_dir, file_format="array_record")
  raise ValueError(
      f"tfds:{name} under {builder.data_dir} is prepared as {builder.info.file_format.value}, which has no random "
      f"access; convert it where TensorFlow is installed: tfds convert_format --dataset_version_dir="
      f"{builder.data_dir} --out_file_format=array_record")


def _check_registered(name: str, where: str):
  """Raises a ValueError for a name or config that is not in TFDS's catalogue."""
  import tensorflow_datasets as tfds
  base, _, config = name.partition(":")[0].partition("/")
  try:
    configs = tfds.builder_cls(base).builder_configs
  except tfds.core.registered.DatasetNotFoundError:
    close = difflib.get_close_matches(base, tfds.list_builders(with_community_datasets=False), 3)
    hint = f" (did you mean {', '.join(close)}?)" if close else ""
    # TFDS registers its older sets only where TensorFlow is installed.
    without = "" if importlib.util.find_spec("tensorflow") else (
        ', or pip install "aogpt_jax[tfds]" (without TensorFlow, TFDS does not list all of its sets)')
    raise ValueError(
        f"data.source='tfds:{name}' is neither in the TFDS catalogue{hint} nor prepared under {where}; check the "
        f"name and data.tfds_data_dir{without}") from None
  if config and config not in configs:
    known = ", ".join(difflib.get_close_matches(config, configs, 5, 0.0)) or "none"
    raise ValueError(f"data.source='tfds:{name}': {base} has no config {config!r}; it has {known}")


def _prepare(name: str, data_dir: str, where: str, hugging_face: bool):
  """Downloads and prepares a catalogue set as array_record."""
  modules = ("tensorflow", "datasets") if hugging_face else ("tensorflow",)
  if not all(importlib.util.find_spec(module) for module in modules):
    raise ModuleNotFoundError(
        f"tfds:{name} is not prepared under {where}, and preparing it needs {' and '.join(modules)}: pip install "
        '"aogpt_jax[tfds]", or set data.tfds_data_dir to the directory of a prepared array_record copy')
  _check_network(name, where, "huggingface.co" if hugging_face else "storage.googleapis.com")
  import tensorflow_datasets as tfds
  try:
    builder = tfds.builder(name, data_dir=data_dir or None, file_format="array_record")
    builder.download_and_prepare(
        # Copies on GCS are tfrecord.
        download_config=tfds.download.DownloadConfig(try_download_gcs=False))
  except (OSError, tfds.download.DownloadError, ValueError, AssertionError) as e:
    reason = re.sub(r"\s+", " ", str(e))[:200]
    raise RuntimeError(
        f"tfds:{name}: preparing it failed ({reason}); mend that, or set data.tfds_data_dir to a prepared copy") from e


def _check_network(name: str, where: str, host: str):
  """TFDS retries for minutes without a network; this takes seconds."""
  if urllib.request.getproxies().get("https"):
    return
  try:
    socket.create_connection((host, 443), timeout=5).close()
  except OSError as e:
    raise ConnectionError(
        f"tfds:{name} is not prepared under {where}, and there is no network to download it ({host}: {e}); "
        "set data.tfds_data_dir to the directory of a prepared array_record copy") from None


# --- registry ---------------------------------------------------------------------------------------


class Kind(NamedTuple):
  """One kind of source. `usage` is how `data.source` names it; `open` takes the data section and what follows the colon."""

  usage: str
  open: Callable[[Any, str], Source]


# By the word before the colon.
SOURCES: dict[str, Kind] = {
    "stdlib": Kind("stdlib", lambda config, _: Stdlib(config, prose=True)),
    "stdlib_source": Kind("stdlib_source", lambda config, _: Stdlib(config, prose=False)),
    "files": Kind("files:GLOB", Files),
    "lines": Kind("lines:GLOB", lambda config, pattern: Files(config, pattern, by_lines=True)),
    "tfds": Kind("tfds:NAME[/CONFIG][:VERSION]", Tfds),
    "urn": Kind("urn:LENGTH", Urn),
    "sudoku": Kind("sudoku:CLUES", Sudoku),
}
