"""What the benchmarks share: contestants run in turn, the first run is kept apart, and the report has what others need to repeat it."""

import json
import sys

from conftest import ROOT
import pytest

CONTEST = """
import sys
import paired

args = paired.parser("A contest.", repeats=2).parse_args()
if args.serve:
  count = iter(range(1, 9))
  def answer(log, dies):
    with open(log, "a") as file:
      print(args.serve, file=file)
    if dies == args.serve:
      sys.exit("it could not go on")
    print("what it prints is no answer")
    return {"seconds": next(count) * (3.0 if args.serve == "slow" else 1.0)}
  paired.serve(answer)
else:
  with paired.contestants(("fast", "slow")) as contestants:
    runs = paired.in_turn(contestants, args.repeats, log="log", dies="slow" if args.quick else "")
  results = {name: r.figures() for name, r in runs.items()} | {"ratio": paired.ratio(runs["slow"], runs["fast"])}
  paired.report(args, results, paired.table(("name", "seconds"), [(n, r.median("seconds")) for n, r in runs.items()]))
"""


@pytest.fixture
def paired(monkeypatch):
  monkeypatch.syspath_prepend(ROOT / "benchmarks")
  import paired as module  # pylint: disable=import-outside-toplevel
  return module


@pytest.fixture
def contest(tmp_path, monkeypatch, capfd, paired):
  """Starts it in this process, with its contestants in processes of their own; returns what it printed."""
  (tmp_path / "contest.py").write_text(CONTEST)
  monkeypatch.setenv("PYTHONPATH", str(ROOT / "benchmarks"))
  monkeypatch.chdir(tmp_path)

  def start(*arguments):
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "contest.py"), *arguments])
    exec(compile(CONTEST, "contest.py", "exec"), {})  # pylint: disable=exec-used
    return capfd.readouterr().out

  return start


def test_contestants_run_in_turn_and_the_first_run_of_each_is_kept_apart(contest, tmp_path):
  out = contest("--json=found.json", "--repeats=3")
  assert (tmp_path / "log").read_text().split() == ["fast", "slow"] * 4
  found = json.loads((tmp_path / "found.json").read_text())
  fast, slow = found["results"]["fast"], found["results"]["slow"]
  assert fast["first_seconds"] == 1.0 and fast["seconds"] == {"median": 3.0, "all": [2.0, 3.0, 4.0]}
  assert slow["first_seconds"] == 3.0 and found["results"]["ratio"] == {"median": 3.0, "all": [3.0] * 3}
  assert slow["peak_mib"] > 1 and {"processor", "threads", "python", "load_before"} <= found["facts"].keys()
  assert found["command"] == "python benchmarks/contest.py --repeats=3"
  assert out.endswith("name  seconds\nfast      3.0\nslow      9.0\n") and "no answer" not in out


def test_a_contestant_that_stops_is_named(contest):
  with pytest.raises(SystemExit, match="error: slow stopped"):
    contest("--quick")


def test_the_command_names_no_directory_of_this_machine(paired, monkeypatch):
  monkeypatch.setattr(sys, "argv", ["/a/training.py", "--pytorch=/my/code", "--json", "/my/x.json", "--sizes=1x2", "--json=/y"])
  assert paired.command() == "python benchmarks/training.py --pytorch=DIR --sizes=1x2"


def test_what_can_not_be_written_or_read_is_named_before_anything_runs(paired, capsys, tmp_path):
  (tmp_path / "taken").write_text("")
  with pytest.raises(SystemExit):
    paired.parser("", repeats=1).parse_args([f"--json={tmp_path}/taken/x.json"])
  assert "taken/x.json: File exists; give a file whose directory can be made" in capsys.readouterr().err
  assert paired.parser("", repeats=1).parse_args([f"--json={tmp_path}/new/x.json"]).json and (tmp_path / "new").is_dir()
  with pytest.raises(SystemExit, match="has no model.py; give a checkout"):
    paired.check_peer(str(tmp_path), "model.py")
