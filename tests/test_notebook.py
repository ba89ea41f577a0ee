"""The notebook runs from top to bottom and shows what it says; what it keeps of a run is of its code; its JAX stays as it is."""

import ast
import base64
import html
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from conftest import ROOT
from notebooks import execute

NAMES = ("parameters", "runtime", "train", "loss", "orders", "steps", "fill", "picture", "page", "time", "finding", "published")


def outputs(path):
  """Name of a code cell -> its outputs: (all that it printed, {type: last shown of this type})."""
  cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
  found = {}
  for name, cell in zip(NAMES, cells, strict=True):
    printed = "".join("".join(o["text"]) for o in cell["outputs"] if o["output_type"] == "stream")
    shown = {kind: "".join(data) for o in cell["outputs"] for kind, data in o.get("data", {}).items()}
    found[name] = printed, shown
  return found


def losses(printed):
  """Order -> its validation losses during training, in nats per token."""
  return {order: [float(x) for x in re.findall(rf"validation \(EMA\):.*?{order} (\d\.\d+)", printed)]
          for order in ("left to right", "any order")}


def texts(printed):
  """The texts of lines that end in one as a Python literal."""
  found = (re.search(r"""^(?:    |'[^']*': |"[^"]*": )(['"].*)$""", line) for line in printed.splitlines())
  return [ast.literal_eval(match[1]) for match in found if match]


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
  for module in ("nbclient", "ipykernel"):
    pytest.importorskip(module, reason=f"{module} is not installed; it comes with .[notebook]")
  directory = tmp_path_factory.mktemp("notebook")
  environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # programs are to run fast here
  done = subprocess.run(
      [sys.executable, "notebooks/execute.py", f"--output={directory}/executed.ipynb", f"--workdir={directory}/run"], cwd=ROOT,
      env=environment, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stdout + done.stderr
  print(done.stdout)  # seconds by cell, with pytest -s
  return outputs(directory / "executed.ipynb")


def test_the_notebook_says_what_it_runs_on_and_trains_past_the_unigram_entropy(executed):
  printed, _ = executed["runtime"]
  assert "all that aogpt_jax needs is installed" in printed and re.search(r"Python 3\.\d+\.\d+, jax \d+\.\d+", printed)
  assert re.search(r"1 x \w+, platform cpu", printed)
  by_order = losses(executed["train"][0])
  unigram, bigram = (float(x) for x in re.search(r"unigram entropy (\S+), bigram entropy (\S+)", executed["train"][0]).groups())
  for curve in by_order.values():
    assert len(curve) == 8 and curve[0] > curve[3] > curve[-1]
  # When a run leaves the unigram plateau, machines that round otherwise do not agree on.
  assert by_order["left to right"][-1] < bigram < by_order["any order"][-1] < unigram - 0.05


def test_its_texts_have_their_lengths_and_keep_what_was_given(executed):
  orders, steps, filled = (texts(executed[name][0]) for name in ("orders", "steps", "fill"))
  assert (len(orders), len(steps), len(filled)) == (16, 8, 4)
  # Bytes that make up no character are shown as one sign or several, and several bytes can make up one character.
  assert all(16 < len(text) <= 32 for text in orders + steps) and len({*orders, *steps}) >= 20
  for text in filled[:2]:
    assert re.fullmatch("Return the (?s:.{3,9}) of the file", text)
  for text in filled[2:]:
    assert re.fullmatch("(?s:.{2,6}) is not a (?s:.{2,6})", text)
  passes = [float(x) for x in re.findall(r"(\d+\.\d) forward passes", executed["steps"][0])]
  assert passes[:3] == [32, 8, 2] and 2 < passes[3] < 32


def test_it_shows_pictures_and_a_page_of_the_texts(executed):
  for name in ("loss", "picture", "time"):
    picture = base64.b64decode(executed[name][1]["image/png"])
    assert picture[:4] == b"\x89PNG" and 5_000 < len(picture) < 150_000, f"{name}: {len(picture)} bytes"
  page = html.unescape(re.search('srcdoc="([^"]*)"', executed["page"][1]["text/html"])[1])
  shown = json.loads(page.split('id="data">')[1].split("</script>")[0])["texts"]
  assert len({(text["prompt"][0], text["sample"]) for text in shown}) == len(shown)  # by which the page tells them apart
  assert [len(text["tokens"]) for text in shown] == [32] * 8
  assert [max(text["steps"]) for text in shown] == [8] * 8
  assert [text["steps"].count(0) for text in shown] == [0] * 4 + [23] * 4


def test_it_measures_times_and_losses_by_order_and_says_what_it_skips(executed):
  seconds = {int(steps): (float(a), float(b)) for steps, a, b in re.findall(
      r"(\d+) steps: decoder with a cache (\S+) s, encoder (\S+) s", executed["time"][0])}
  assert list(seconds) == [16, 64, 256] and seconds[256][1] > 2 * seconds[256][0] > 0
  by_order = {name: float(x) for name, x in re.findall(r"(\S+): (\d\.\d+) ± 0\.\d+ nats", executed["finding"][0])}
  assert list(by_order) == ["left_to_right", "right_to_left", "block_wise(4)", "any_order"]
  assert min(by_order, key=by_order.get) == "left_to_right"
  assert executed["published"][0].startswith("skipped: ")


def test_what_the_notebook_keeps_of_a_run_is_of_its_code():
  notebook = json.loads(execute.NOTEBOOK.read_text(encoding="utf-8"))
  code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
  if not any(cell["outputs"] for cell in code):
    assert not any(cell["execution_count"] for cell in code) and "aogpt_jax" not in notebook["metadata"]
    return
  again = "run python notebooks/execute.py"
  assert notebook["metadata"]["aogpt_jax"]["outputs_of"] == execute.fingerprint(notebook), f"a code cell was changed: {again}"
  assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), again
  assert execute.NOTEBOOK.stat().st_size < 400_000
  kept = json.dumps([cell["outputs"] for cell in code])
  assert "stderr" not in kept and not re.search(r"(/work|/tmp|/home|/root)/", kept)


def test_its_losses_are_about_those_that_it_shows(executed):
  shown = losses(outputs(execute.NOTEBOOK)["train"][0])
  if not shown["any order"]:
    pytest.skip("the notebook is kept without outputs")
  for order, curve in losses(executed["train"][0]).items():
    assert curve[-1] == pytest.approx(shown[order][-1], abs=0.25), "run python notebooks/execute.py"


@pytest.mark.parametrize("repository, expected", [("", "Set REPOSITORY, in the cell above"), (ROOT.as_uri(), "all that aogpt_jax needs")])
def test_outside_a_checkout_the_code_is_cloned_or_its_address_asked_for(tmp_path, repository, expected):
  if not shutil.which("git") or not (ROOT / ".git").exists():
    pytest.skip("these files are not in a git repository")
  notebook = json.loads(execute.NOTEBOOK.read_text(encoding="utf-8"))
  first, second = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"][:2]
  script = first.replace('REPOSITORY = ""', f"REPOSITORY = {repository!r}") + "\n" + second.replace("runtime.describe()", "")
  environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
  done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
  assert done.returncode == (0 if repository else 1) and expected in done.stdout + done.stderr, done.stderr
  assert [path.name for path in tmp_path.iterdir()] == ["aogpt_jax"] * bool(repository)


def installed(directory, name, version):
  """Makes a distribution that Python and pip find installed in a directory."""
  info = directory / f"{name}-{version}.dist-info"
  info.mkdir(parents=True)
  (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def wheel(directory, name, version, *requirements):
  directory.mkdir(exist_ok=True)
  info = f"{name}-{version}.dist-info"
  with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as f:
    f.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(
        f"Requires-Dist: {requirement}\n" for requirement in requirements))
    f.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    f.writestr(f"{info}/RECORD", "")


def dry_run(tmp_path):
  """pip's dry run of what the notebook installs, in this environment with what lies in `installed` first."""
  report = tmp_path / "report.json"
  done = subprocess.run(
      [sys.executable, "notebooks/runtime.py", "--dry-run", "--no-index", f"--find-links={tmp_path}/wheels", f"--report={report}"],
      cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")}, capture_output=True, text=True, check=False)
  names = [item["metadata"] for item in json.loads(report.read_text())["install"]] if report.exists() else []
  return done, {item["name"]: item["version"] for item in names}


def test_beside_a_newer_jax_what_is_missing_is_installed_and_no_part_of_jax_is_changed(tmp_path):
  # A JAX of the future, without Flax; the newest Flax there is wants a JAX that is newer still.
  for name, version in (("jax", "99.0"), ("jaxlib", "99.0.1"), ("jax_cuda12_plugin", "99.0"), ("flax", "0.1")):
    installed(tmp_path / "installed", name, version)
  wheel(tmp_path / "wheels", "jax", "100.0", "jaxlib>=100")
  wheel(tmp_path / "wheels", "jaxlib", "100.0")
  wheel(tmp_path / "wheels", "flax", "98.0", "jax>=0.10")
  wheel(tmp_path / "wheels", "flax", "99.0", "jax>=100")
  done, found = dry_run(tmp_path)
  assert done.returncode == 0, done.stdout + done.stderr
  assert found == {"flax": "98.0"}
  assert re.search(r"unchanged, as parts of JAX: jax==99\.0, jax_cuda12_plugin==99\.0, jaxlib==99\.0\.1", done.stdout)

  (tmp_path / "wheels" / "flax-98.0-py3-none-any.whl").unlink()
  (tmp_path / "report.json").unlink()
  done, found = dry_run(tmp_path)
  assert done.returncode == 1 and not found
  assert "error: pip finds nothing that goes with this JAX (jax==99.0" in done.stderr and "Traceback" not in done.stderr


def test_an_older_jax_is_named_and_nothing_is_installed(tmp_path):
  installed(tmp_path / "installed", "jax", "0.4.30")
  done, found = dry_run(tmp_path)
  assert done.returncode == 1 and not found and not done.stdout
  assert done.stderr.startswith("error: JAX 0.4.30 of this runtime is older than 0.") and done.stderr.count("\n") == 1
