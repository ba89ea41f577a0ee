"""The page of findings: verdicts from numbers, every section from results, and real units at the same time, started again."""

import json
import re

import numpy as np
import pytest

from aogpt_jax import config as config_lib
from aogpt_jax.findings import page
from aogpt_jax.findings import results as results_lib
from conftest import ROOT, make_command

TYPES = ("left_to_right", "right_to_left", "block_wise(4)", "fixed_random(1)", "any_order")


def difference(*by_seed):
  return page.Difference(np.array(by_seed))


def test_the_interval_of_a_difference_is_students_over_the_seeds():
  d = difference(1.0, 2.0, 3.0)
  assert d.mean == 2.0 and d.margin == pytest.approx(4.303 / 3**0.5, rel=1e-3)
  assert (d.sign, difference(1.9, 2.0, 2.1).sign, difference(-1.9, -2.0, -2.1).sign) == (0, 1, -1)
  assert difference(1.0).sign == 0  # one seed says nothing of its error
  assert str(difference(0.1, 0.2, -0.1)).endswith("2 of 3 seeds on this side)")


def test_a_verdict_needs_every_difference_on_the_claimed_side():
  up, down, unclear = difference(1.0, 1.1, 0.9), difference(-1.0, -1.1, -0.9), difference(1.0, -1.0, 0.5)
  assert page.verdict([(up, 1), (down, -1)]) == "Holds."
  assert page.verdict([(up, 1), (unclear, 1)]).startswith("Open")
  assert page.verdict([(up, -1), (unclear, 1)]).startswith("Does not hold")


def unit(arm, seed, rng):
  """A result as `results.collect` makes it, with numbers of no meaning."""
  level = {"uniform": 2.6, "left_to_right": 2.2, "encoder_ao": 2.5}.get(arm, 2.7) + rng.normal(0, 0.01)
  of = {t: level + 0.1 * i for i, t in enumerate(TYPES)}
  return {"arm": arm, "seed": seed, "steps": 20, "tokens_per_step": 1024, "block_size": 16, "sequences": 100, "parameters": 1234,
          "step_seconds": 0.1, "curves": {t: [[10, x + 0.5], [20, x]] for t, x in of.items()}, "final": of,
          "stderr": dict.fromkeys(TYPES, 0.01), "ensemble": {str(m): of["any_order"] - 0.01 * m for m in (1, 2, 4, 8)},
          "gap": {"ao": of["any_order"], "random": 1e-6, "sorted": 1e-6 if "encoder" in arm else 0.001,
                  "mixture": 1e-6 if "encoder" in arm else -0.01 + rng.normal(0, 1e-3)}}


ABOUT = {"command": "python -m aogpt_jax.findings", "core_seconds": 3720, "seeds": 3, "units": 57, "machine": "2 cores",
         "versions": "JAX 1"}


def test_every_section_is_written_from_results_with_its_picture(tmp_path):
  rng = np.random.default_rng(0)
  arms = {arm for section in page.SECTIONS for arm in section.arms}
  results = [unit(arm, seed, rng) for seed in range(3) for arm in arms]
  written = page.write(tmp_path / "page.md", page.Results(results), ABOUT)
  text = (tmp_path / "page.md").read_text()
  assert text.count("\n## ") == len(page.SECTIONS)
  pictures = re.findall(r"\]\((page/\w+\.png)\)", text)
  assert [tmp_path / picture for picture in pictures] == written[1:] and len(pictures) == len(page.SECTIONS) - 1
  assert all((tmp_path / picture).read_bytes()[:4] == b"\x89PNG" for picture in pictures)
  orders = text[text.index("## Orders") :]
  expected = np.mean([r["final"]["left_to_right"] for r in results if r["arm"] == "left_to_right"])
  assert f"| left to right | {expected:.3f} ± " in orders and "1.0 core hours" in text
  assert "nan" not in text


def test_another_config_has_another_digest_and_a_field_that_is_new_does_not_change_it():
  config = config_lib.default_config()
  before = results_lib.digest(config)
  config.optimizer.learning_rate = 0.5
  assert results_lib.digest(config) != before
  del config.model["activation"]  # as before the field was there
  config.optimizer.learning_rate = config_lib.default_config().optimizer.learning_rate
  assert results_lib.digest(config) == before


def test_a_section_is_of_the_arms_that_were_trained_for_longer_where_it_has_them_all(tmp_path):
  rng = np.random.default_rng(0)
  arms = ("uniform", "left_to_right", "encoder_ao", "long_uniform", "long_encoder_ao")
  results = [unit(arm, seed, rng) for seed in range(2) for arm in arms]
  for result in results:
    if result["arm"].startswith("long_"):
      result |= {"steps": 60, "curves": {t: [[30, 2.0], [60, 1.0]] for t in TYPES}, "final": dict.fromkeys(TYPES, 1.0)}
  page.write(tmp_path / "page.md", page.Results(results), ABOUT)
  chapters = {text.split("\n")[0]: text for text in (tmp_path / "page.md").read_text().split("\n## ")}
  assert "Each model: 60 steps, 61,440 tokens." in chapters["Decoder and encoder"]
  assert "| encoder | 1.000 ± 0.000 |" in chapters["Decoder and encoder"]
  assert "Each model: 20 steps, 20,480 tokens." in chapters["Slow optimisation or less informative orders"]


def test_a_section_without_its_arms_is_left_out(tmp_path):
  rng = np.random.default_rng(0)
  page.write(tmp_path / "page.md", page.Results([unit(arm, 0, rng) for arm in ("uniform", "left_to_right")]), ABOUT)
  text = (tmp_path / "page.md").read_text()
  assert [line for line in text.splitlines() if line.startswith("## ")] == ["## Slow optimisation or less informative orders"]


CONFIG = """
import runpy

def get_config():
  config = runpy.run_path({words!r})["get_config"]()
  config.steps, config.micro_batches, config.sample.length = 4, 1, 2
  config.eval.update(every_steps=2, sequences=8, limit=8, orders=1, gap=2, targets=1, distributions=(
      "left_to_right", "uniform", "right_to_left", "block_wise(4)", "fixed_random(1)"))
  return config

def sweep():
  for orders in ("uniform", "left_to_right"):
    yield f"{{orders}}-1", {{"orders": orders, "seed": 1}}
"""


def test_units_run_at_the_same_time_and_their_results_are_drawn_again_without_them(words, tmp_path):
  config = tmp_path / "mine.py"
  config.write_text(CONFIG.format(words=str(ROOT / "tests" / "configs" / "words.py")))
  command = make_command(words, tmp_path)
  find = lambda *arguments: command("--page=page.md", *arguments, config=str(config), module="aogpt_jax.findings")
  done = find("--jobs=2")
  assert done.returncode == 0, done.stderr
  started = re.findall(r"^sweep: (\S+),", done.stdout, re.M)
  assert started == ["uniform-1", "left_to_right-1"]
  assert "step 4/4" in (tmp_path / "runs/mine/uniform-1/log.txt").read_text()  # and nothing of it on the terminal
  assert "step 4/4" not in done.stdout
  record = json.loads((tmp_path / "page" / "results.json").read_text())
  evaluation = json.loads((tmp_path / "runs/mine/uniform-1/eval_validation.json").read_text())
  found = record["units"][0]
  assert (found["arm"], found["seed"]) == ("uniform", 1)
  assert found["final"]["any_order"] == pytest.approx(evaluation["any_order"]["nats_per_token"], abs=1e-5)
  assert [step for step, _ in found["curves"]["any_order"]] == [2, 4] and found["gap"]["sorted"] != 0
  assert record["about"]["units"] == 2 and record["about"]["core_seconds"] > 0
  written = (tmp_path / "page.md").read_bytes()

  (tmp_path / "runs").rename(tmp_path / "elsewhere")
  again = find("--redraw")
  assert again.returncode == 0, again.stderr
  assert (tmp_path / "page.md").read_bytes() == written and not (tmp_path / "runs").exists()
  kept = find("--jobs=2")  # what is kept beside the page is not trained again
  assert kept.returncode == 0, kept.stderr
  assert "findings: 2 of 2 units" in kept.stdout and (tmp_path / "page.md").read_bytes() == written
  lost = command("--page=other.md", "--redraw", config=str(config), module="aogpt_jax.findings")
  assert lost.returncode == 1 and lost.stderr == "error: --redraw: there is no other/results.json; leave it out to train.\n"
