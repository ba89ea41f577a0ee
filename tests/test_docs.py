"""The documents: links lead somewhere, generated pages are up to date, and what they tell a reader to type works as printed.

All commands are checked without doing their work: a config and its fields by the parser and the checks of main, flags by the
parser of their program, scripts of launch/ by --dry-run. Some are run, with a smaller model in the place of configs/tiny.py: the
README's way from own text to a page, and the examples of howto.md. So are blocks of `python`, those of a page as one program, and
`console` blocks, which show a command with the error that it ends with.
"""

import argparse
import ast
import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
from unittest import mock

from absl import flags
import jax
from jax.experimental.compilation_cache import compilation_cache
from ml_collections import config_flags
import pytest

from aogpt_jax import config as config_lib
from aogpt_jax import convert
from aogpt_jax import main as main_lib
from aogpt_jax import objectives
from aogpt_jax import orders
from aogpt_jax import sweep
from aogpt_jax.data import sources
from aogpt_jax.sampling import output
from aogpt_jax.training import metrics
from conftest import make_words_config, ROOT

pytestmark = pytest.mark.filterwarnings("ignore:the load_module.. method is deprecated:DeprecationWarning")  # see conftest.py
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "launch").glob("*.md"))]
# Programs whose arguments are not checked, and why.
NOT_CHECKED = {
    "aogpt_jax.harness": "arguments are those of the lm-evaluation-harness, which need not be installed",
    "tensorboard": "is no part of this project, and need not be installed",
}
# Programs by flags of absl, and whose flags they have beside their own. All but the report take a config.
FLAGS_OF = {
    "aogpt_jax.main": (), "aogpt_jax.sweep": ("aogpt_jax.main",), "aogpt_jax.report": (),
    **dict.fromkeys(("aogpt_jax.findings", "aogpt_jax.decoding"), ("aogpt_jax.main", "aogpt_jax.sweep"))}


@dataclasses.dataclass(frozen=True)
class Block:
  """A fenced block: its language, the file that it is to be saved as or "", and its text."""

  path: pathlib.Path
  line: int
  language: str
  file: str
  text: str

  @property
  def where(self) -> str:
    return f"{self.path.relative_to(ROOT)}:{self.line}"


def read(path):
  return path.read_text(encoding="utf-8")


def blocks(path, language=""):
  found = re.finditer(r"^```(\w*) ?(\S*)\n(.*?)^```$", read(path), re.MULTILINE | re.DOTALL)
  made = [Block(path, read(path)[: m.start()].count("\n") + 1, *m.groups()) for m in found]
  return [block for block in made if not language or block.language == language]


def prose(path):
  """A page without its fenced blocks."""
  return re.sub(r"^```.*?^```$", "", read(path), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def registered():
  """Takes back what the examples register: each program would start without it."""
  with contextlib.ExitStack() as stack:
    for names in (config_lib.OBJECTIVES, objectives.OBJECTIVES, orders.ORDERS, sources.SOURCES):
      stack.enter_context(mock.patch.dict(names))
    yield


# --- links ---


def anchors(path):
  """As GitHub makes them of headings."""
  headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
  return {re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_and_pictures_lead_to_what_is_there(path):
  links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(path)))
  for link in links:
    if re.match(r"https?:", link):
      continue
    file, _, anchor = link.partition("#")
    target = (path.parent / file).resolve() if file else path
    assert target.exists() and target.is_relative_to(ROOT), f"{path.name}: {link} leads nowhere"
    assert not anchor or anchor in anchors(target), f"{path.name}: {link}: {target.name} has no such heading"


def test_every_page_can_be_reached_from_the_readme():
  linked = lambda path: {(path.parent / link).resolve() for link in re.findall(r"\]\(([^)#\s]+)", prose(path))}
  assert set(PAGES[1:]) <= linked(ROOT / "README.md")


# --- pages that are made ---


@pytest.mark.parametrize("script, file, make", [
    ("config_reference", "config.md", lambda made: made["page"](read(ROOT / "aogpt_jax" / "config.py"))),
    ("reproduction", "reproduction.md", lambda made: made["page"]()),
    ("idea_diagram", "idea.svg", lambda made: made["picture"]()),
    ("performance", "performance.md", lambda made: made["page"]()),
])
def test_what_a_script_writes_is_up_to_date(script, file, make):
  made = runpy.run_path(str(ROOT / "docs" / f"{script}.py"))
  assert make(made) == read(ROOT / "docs" / file), f"docs/{file} is not up to date: run python docs/{script}.py"


def test_the_table_of_the_readme_is_what_the_benchmarks_found():
  made = runpy.run_path(str(ROOT / "docs" / "performance.py"))
  text = read(ROOT / "README.md")
  assert made["with_table"](text, made["read"](made["RESULTS"])) == text, "README.md is not up to date: run python docs/performance.py"
  assert "|" not in made["readme"]({})


def test_what_has_not_been_measured_has_no_figures_but_the_command_that_measures_it(tmp_path):
  made = runpy.run_path(str(ROOT / "docs" / "performance.py"))
  nothing = made["page"](tmp_path)
  assert "|" not in nothing and "![" not in nothing
  (tmp_path / "startup.json").write_text(json.dumps({
      "command": "python benchmarks/startup.py --repeats=2", "date": "2000-01-01",
      "facts": {"processor": "Z80", "threads": 1, "load_before": 0.25, "jax": "1.2"}, "results": {
          "imports": {"aogpt_jax": {"median": 1.5, "all": [1.25, 1.75]}}, "loaded": [], "not_to_be_loaded": ["torch"],
          "first_step": {"warm": {f: {"median": 3.0, "all": [3.0]} for f in ("process_seconds", "step_seconds")}}}}))
  measured = made["page"](tmp_path)
  for line in ("| `import aogpt_jax` | 1.50 (1.25 to 1.75) |  |", "2000-01-01: Z80, 1 threads, jax 1.2; load before it 0.25."):
    assert line in measured and line not in nothing
  for name, command in made["COMMANDS"].items():
    line = f"\n{command} --json=docs/performance/{name}.json\n"
    assert line in nothing and (name == "startup") != (line in measured)


def test_every_field_is_in_the_reference_and_needs_a_comment():
  fields = re.findall(r"^\| `([\w.]+)` \|", read(ROOT / "docs" / "config.md"), re.MULTILINE)
  assert sorted(fields) == sorted(config_lib.flat(config_lib.default_config()))
  made = runpy.run_path(str(ROOT / "docs" / "config_reference.py"))
  source = "def default_config():\n  return c(\n      seed=0,  # of all\n      steps=1,\n  )\nFREE_TO_CHANGE = ('steps',)\n"
  with pytest.raises(made["UndocumentedError"], match="line 4: config.steps has no comment"):
    made["page"](source)


# --- commands ---


def parse_flags(words):
  """What main does with a command line; the flags are then those of this one alone."""
  for name in list(flags.FLAGS):
    if name.startswith("config."):
      delattr(flags.FLAGS, name)
    else:
      flags.FLAGS[name].unparse()
  sys.argv = words
  main_lib.parse_flags(words)


@contextlib.contextmanager
def flags_of(module):
  """The flags of a program, without those of others that have some of the same names; yields the modules that define them."""
  name = f"{module}.__main__" if (ROOT / module.replace(".", "/")).is_dir() else module
  defined = flags.FLAGS.flags_by_module_dict()
  others = {(other, flag) for program in FLAGS_OF.keys() - {module, *FLAGS_OF[module]} for other in (program, f"{program}.__main__")
            for flag in defined.get(other, ())}
  for _, flag in others:
    delattr(flags.FLAGS, flag.name)
  was_there = bool(defined.get(name))
  for flag in () if was_there else _DEFINED.get(name, ()):
    flags.DEFINE_flag(flag, module_name=name)
  importlib.import_module(name)
  _DEFINED[name] = list(flags.FLAGS.flags_by_module_dict()[name])
  try:
    yield (name, *FLAGS_OF[module])
  finally:
    for flag in () if was_there else _DEFINED[name]:
      delattr(flags.FLAGS, flag.name)
    for other, flag in others:
      flags.DEFINE_flag(flag, module_name=other)


_DEFINED = {}


def check_program(words):
  """python -m aogpt_jax.main and the like."""
  with flags_of(words[2]) as modules:
    if words[2] == "aogpt_jax.report":
      assert flags.FLAGS(["program", *words[3:]])[1:], "the report is of no run"
      return
    parse_flags(["program", *words[3:]])
    known = {flag.name for module in modules for flag in flags.FLAGS.flags_by_module_dict()[module]}
    for name in [word.lstrip("-").partition("=")[0] for word in words[3:]]:
      assert name.startswith("config.") or name in known, f"{words[2]} has no flag --{name}"
    config = flags.FLAGS.config
    config_lib.check(config)
    output.check_file("--html", flags.FLAGS.html, flags.FLAGS.mode)
    if words[2] == "aogpt_jax.sweep":
      assert sweep.units(config_flags.get_config_filename(flags.FLAGS["config"]), config, "runs/sweep")


def check_convert(words, monkeypatch):
  called = []
  for name in ("from_published", "to_torch", "to_safetensors"):
    monkeypatch.setattr(convert, name, lambda *args, **kwargs: called.append(args))
  convert.main(["convert", *words[3:]])
  assert len(called) == 1


def check_benchmark(words, monkeypatch):
  class Parsed(Exception):
    pass

  def parse_args(self, *args, **kwargs):
    original(self, *args, **kwargs)
    raise Parsed

  original = argparse.ArgumentParser.parse_args
  monkeypatch.syspath_prepend(ROOT / "benchmarks")  # as Python does with a script's directory
  monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
  monkeypatch.setattr(sys, "argv", words[1:])
  with pytest.raises(Parsed):
    runpy.run_path(str(ROOT / words[1]), run_name="__main__")


def check_install(words):
  if words[2] in NOT_CHECKED:
    return
  assert words[:3] == ["pip", "install", "-e"]
  known = next(ast.literal_eval(node.value) for node in ast.parse(read(ROOT / "setup.py")).body
               if isinstance(node, ast.Assign) and node.targets[0].id == "EXTRAS")
  extras = re.fullmatch(r"\.(?:\[([\w,-]+)\])?", words[3])
  assert set(filter(None, (extras[1] or "").split(","))) <= set(known), words[3]


def check(words, environment, monkeypatch):
  """Raises what is wrong with a command; where its output goes is left to the shell."""
  words = words[:words.index(">")] if ">" in words and words[0] != "printf" else words
  match words:
    case ["python" | "python3", "-m", "aogpt_jax.convert", *_]:
      check_convert(words, monkeypatch)
    case ["python", "-m", module, *_] | [module, *_] if module in NOT_CHECKED:
      pass
    case ["python" | "python3", "-m", module, *_] if module in FLAGS_OF:
      check_program(words)
    case ["python", "-m", "pytest", file, "-k", name]:
      assert re.search(rf"\ndef test_\w*{name}", read(ROOT / file)), f"{file} has no test of this name"
    case ["python", "-m", "pytest", *files]:
      assert all((ROOT / file).is_file() for file in files)
    case ["python", script, *_] if script.startswith("benchmarks/"):
      check_benchmark(words, monkeypatch)
    case ["python", script] if script.startswith("docs/"):
      assert (ROOT / script).is_file()
    case ["pip", *_]:
      check_install(words)
    case ["printf", *_, ">", file]:
      assert pathlib.PurePath(file).parent == pathlib.PurePath(".")
    case [script, *options] if script.startswith("launch/"):
      split = options.index("--") if "--" in options else len(options)
      own, command = options[:split], options[split:]
      subprocess.run([ROOT / script, *own, "--dry-run", *command], check=True, env={**os.environ, **environment},
                     stdout=subprocess.DEVNULL, timeout=60)
      if command:
        check(command[1:], environment, monkeypatch)
    case _:
      raise AssertionError("no rule checks this; add one to tests/test_docs.py")


def commands(text):
  """The words of each command of a shell block, with what was exported before it."""
  environment, variables = {}, {}
  for line in text.replace("\\\n", " ").splitlines():
    for name, value in variables.items():
      line = line.replace(f"${name}", value)
    words, command = shlex.split(line, comments=True), []
    if words and re.match(r"\w+=", words[0]):
      variables |= [words[0].split("=", 1)]
    elif words and words[0] == "export":
      environment |= dict(word.split("=", 1) for word in words[1:])
    else:
      for word in (*words, "&&"):
        if word == "&&":
          if command:
            yield command, dict(environment)
          command = []
        else:
          command.append(word)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
  """A directory as a reader has it, but for what lies in a run's workdir: the config that the run would have written there."""
  directory = tmp_path_factory.mktemp("reader")
  for name in ("configs", "benchmarks", "docs", "launch"):
    (directory / name).symlink_to(ROOT / name)
  for block in blocks(ROOT / "docs" / "howto.md", "python"):
    if block.file:
      (directory / block.file).write_text(block.text, encoding="utf-8")
  for run, config in (("mine", "tiny"), ("medium", "medium")):
    (directory / "runs" / run).mkdir(parents=True)
    (directory / "runs" / run / "config.py").write_text(read(ROOT / "configs" / f"{config}.py"), encoding="utf-8")
  return directory


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands_parse_and_their_configs_pass_the_checks(path, reader, monkeypatch):
  monkeypatch.chdir(reader)
  monkeypatch.setattr(sys, "argv", sys.argv)  # is put back
  typed = [(block.where, *command) for block in blocks(path, "sh") for command in commands(block.text)]
  typed += [(path.name, *command) for text in re.findall(r"`(python3? (?:-m [\w.]+ |\w+/)[^`]+)`", prose(path)) for command in commands(text)]
  for where, words, environment in typed:
    try:
      with monkeypatch.context() as patch:
        check(words, environment, patch)
    except (Exception, SystemExit) as e:
      raise AssertionError(f"{where}: {shlex.join(words)}: {e}") from e


@pytest.mark.parametrize("command, wrong", [
    ("python -m aogpt_jax.main --config=configs/tinier.py", "there is no such file"),
    ("python -m aogpt_jax.main --config=configs/tiny.py --config.sample.stesp=8", "did you mean"),
    ("python -m aogpt_jax.main --config=configs/tiny.py --config.steps=1e5", "invalid literal"),
    ("python -m aogpt_jax.main --config=configs/tiny.py --config.sample.steps=-8", "must be at least 0"),
    ("python -m aogpt_jax.main --config=configs/tiny.py --jobs=2", "Unknown command line flag .jobs."),
    ("python -m aogpt_jax.convert --output=a", "give what to read"),
    ("python benchmarks/ensemble.py --vocabulary=3", "2"),
    ("pip install -e '.[gpu]'", "gpu"),
    ("launch/local.sh --processes=none -- true", "non-zero exit status"),
    ("aogpt train", "no rule"),
])
def test_a_command_that_would_not_work_is_found(command, wrong, reader, monkeypatch):
  monkeypatch.chdir(reader)
  monkeypatch.setattr(sys, "argv", sys.argv)
  (words, environment), = commands(command)
  with pytest.raises((Exception, SystemExit), match=wrong):
    check(words, environment, monkeypatch)


# --- what is run ---

SMALLER = """
import runpy

def get_config():
  config = runpy.run_path({tiny!r})["get_config"]()
  config.update(steps=2, batch_size=8, compilation_cache="cache/xla")  # most commands run the same programs
  config.model.update(layers=1, width=32, heads=2, cond_width=16)
  config.optimizer.update(warmup_steps=1, decay_steps=2)
  config.data.update(source="files:my_texts/**/*.txt", cache_dir="cache", validation_fraction=0.2, test_fraction=0.2)
  config.eval.update(sequences=8, orders=2, batch_size=8, limit=8)
  config.sample.num_samples = 1
  config.log.tensorboard = False
  return config
"""


def perform(words):
  """A command of this package, in this process."""
  match words:
    case ["python", "-m", "aogpt_jax.main", *arguments]:
      parse_flags(["main", *arguments])
      main_lib.main(["main"])
    case ["python", "-m", "aogpt_jax.convert", *arguments]:
      convert.main(["convert", *arguments])
    case _:
      subprocess.run(shlex.join(words).replace("'>'", ">"), shell=True, check=True)


@pytest.fixture(scope="module")
def runs(words, tmp_path_factory):
  """A directory with a smaller configs/tiny.py, texts, and the run that comes of the README's first command on own text."""
  directory = tmp_path_factory.mktemp("runs")
  (directory / "configs").mkdir()
  (directory / "configs" / "tiny.py").write_text(SMALLER.format(tiny=str(ROOT / "configs" / "tiny.py")), encoding="utf-8")
  texts = pathlib.Path(make_words_config(words).data.source.removeprefix("files:")).parent
  for name in ("my_texts", "other_texts"):
    (directory / name).symlink_to(texts)
  (directory / "one_text").mkdir()
  (directory / "one_text" / "a.txt").write_text("a text of a line\n")
  (directory / "old.txt").write_bytes("caf\u00e9".encode("latin1"))
  (directory / "records.jsonl").write_text('{"body": "a text"}\n')
  (directory / "broken.py").write_text("def get_config():\n  return confg\n")
  for block in blocks(ROOT / "docs" / "howto.md", "python"):
    if block.file:
      (directory / block.file).write_text(block.text, encoding="utf-8")
  return directory


@pytest.fixture
def at_work(runs, monkeypatch):
  """Works in `runs`, as somebody who has made runs/mine and runs/tiny there."""
  monkeypatch.chdir(runs)
  monkeypatch.setattr(sys, "argv", sys.argv)
  least = jax.config.jax_persistent_cache_min_compile_time_secs
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
  if not (runs / "runs" / "mine").exists():
    perform(typed("README.md", "--workdir=runs/mine")[0])
    (runs / "runs" / "tiny").symlink_to("mine")
  yield runs
  jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
  jax.config.update("jax_compilation_cache_dir", None)
  compilation_cache.reset_cache()


def typed(page_name, *parts):
  """The words of each command of a page in which there is one of some parts."""
  everything = [words for block in blocks(ROOT / page_name, "sh") for words, _ in commands(block.text)]
  return [words for words in everything if any(part in " ".join(words) for part in parts)]


def run_python(page_name):
  """Runs the blocks of a page that are no files, in one namespace, with the names of the file before them."""
  names = {}
  for block in blocks(ROOT / page_name, "python"):
    names = {"__name__": "page"} if block.file else names
    exec(compile(block.text, block.where, "exec"), names)  # pylint: disable=exec-used


def test_the_readmes_way_from_own_text_to_a_page_works(at_work, capsys):
  found = typed("README.md", "--config=runs/mine/config.py")
  assert len(found) == 3
  for words in found:
    perform(words)
  run_python("README.md")
  assert "<html" in read(at_work / "out.html") and (at_work / "runs/mine/eval_test.json").exists()
  assert capsys.readouterr().out.count("The ") >= 2


def test_prompts_in_a_file_another_text_and_python_work_as_printed(at_work, capsys):
  found = typed("docs/usage.md", "prompts.txt", "eval.source")
  assert len(found) == 3
  for words in found:
    perform(words)
  out = capsys.readouterr().out
  assert out.count("The ") == 2 and "files:other_texts/**/*.txt at step 2" in out
  run_python("docs/usage.md")
  assert "\nThe " in "\n" + capsys.readouterr().out


@pytest.mark.parametrize("name", ["spans", "late", "sums"])
def test_an_example_of_how_to_add_trains(name, at_work, capsys):
  for words in typed("docs/howto.md", f"--config={name}.py"):
    if "schedule" in " ".join(words):
      continue  # the time is better spent elsewhere
    perform(words if "--mode" in " ".join(words) else [*words, "--mode=train"])  # which ends with an evaluation and samples
  loss = lambda run: [r["loss"] for r in metrics.read(at_work / "runs" / run) if "loss" in r]
  assert loss(name) != loss("mine") and abs(loss(name)[0] - loss("mine")[0]) < 0.5
  out = capsys.readouterr().out
  assert {"spans": "spans(8) ", "late": "any order", "sums": "+25=67"}[name] in out


def test_blocks_of_python_on_how_to_add_hold(at_work):
  run_python("docs/howto.md")


@pytest.mark.parametrize("block", blocks(ROOT / "docs" / "troubleshooting.md", "console"), ids=lambda block: str(block.line))
def test_an_error_is_as_printed(block, at_work, capsys):
  first, *lines = block.text.replace("\\\n", " ").splitlines()
  (words, _), = commands(first.removeprefix("$ "))
  with pytest.raises(SystemExit) as error:
    perform(words)
  said = capsys.readouterr().out + str(error.value)
  expected = "\n".join(lines)
  assert expected and re.search(re.escape(expected).replace(re.escape("..."), ".*") + r"\s*$", said), f"{block.where}: it says {said}"
