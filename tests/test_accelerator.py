"""The benchmark of accelerators runs, at toy sizes."""

import json
import subprocess

from conftest import PYTHON, ROOT


def test_its_dry_run_measures_every_part_and_writes_a_table(tmp_path):
  process = subprocess.run(
      [*PYTHON, str(ROOT / "benchmarks" / "accelerator.py"), f"--output={tmp_path}", "--dry_run"], cwd=tmp_path,
      text=True, capture_output=True, check=False)
  assert process.returncode == 0, process.stderr
  small, medium, sampling = json.loads((tmp_path / "accelerator.json").read_text(encoding="utf-8"))
  assert [r["part"] for r in (small, medium, sampling)] == ["training small", "training medium", "sampling medium"]
  assert all(r["sequences_per_device"] == 1 and 10 < r["loss"] < 12 and r["tokens_per_second"] > 0 for r in (small, medium))
  assert list(sampling["seconds"]) == ["4", "8"]
  assert (tmp_path / "accelerator.txt").read_text(encoding="utf-8") in process.stdout
