"""The page of what samplers do: figures are those of the texts, measurements are made once, and it is drawn from what is kept."""

import json
import re
import types

import numpy as np
import pytest

import random_models
from aogpt_jax import config as config_lib
from aogpt_jax import run as run_lib
from aogpt_jax import sampling
from aogpt_jax import sweep
from aogpt_jax.data import sources
from aogpt_jax.decoding import measurements
from aogpt_jax.decoding import page
from aogpt_jax.decoding import quality
from aogpt_jax.decoding import speed
from aogpt_jax.decoding import sudoku

LENGTH = 20


def opened(config, name, directory, **fields):
  """A unit with random weights."""
  run = run_lib.open_run(config, str(directory / name), "eval")
  about = {"parameters": 1234, "block_size": config.model.block_size, "steps": 10, "tokens_per_step": 80,
           "fingerprint": f"that of {name}", "nats_per_token": {"left_to_right": 2.5, "any_order": 3.5}} | fields
  return measurements.Opened(name, run, random_models.make(config.model.block_size, 320, layers=1, width=16)[1], about)


@pytest.fixture(scope="module")
def units(words, tmp_path_factory):
  """A model, its judge, and one for Sudokus."""
  from conftest import make_words_config
  directory, config = tmp_path_factory.mktemp("decoding"), make_words_config(words)
  config.model.update(layers=1, width=16, cond_width=8, block_size=LENGTH)
  puzzled = config.copy_and_resolve_references()
  puzzled.data.update(source="sudoku:12", validation_fraction=0.05, test_fraction=0.0)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sources, "_SUDOKU_PUZZLES", 400)
    return {unit.name: unit for unit in (
        opened(config, "tiny", directory), opened(config, "judge", directory),
        opened(puzzled, "sudoku_10-3", directory, clues=12))}


def test_a_text_is_scored_in_its_own_order_and_by_the_judge(units):
  tiny, judge, settings = units["tiny"], units["judge"], dict(order="uniform", sampler="speculative", window=2)
  scorer = quality.Scorer(tiny.run.model, tiny.params, judge.run.model, judge.params)
  found = quality.of_texts(tiny.run, tiny.params, scorer, settings, count=2, seed=1)
  texts = sampling.generate(tiny.run.model, tiny.params, tiny.run.tokenizer, num_samples=2, seed=1, **settings)
  ids, positions = (np.array([getattr(text, name) for text in texts]) for name in ("ids", "positions"))
  nll, rows = random_models.nll_of(tiny.run.model, tiny.params), np.tile(np.arange(LENGTH), (2, 1))
  assert found["nll"] == pytest.approx(nll(ids, positions).mean(), abs=1e-4)
  assert found["judge_nll"] == pytest.approx(nll(ids, rows).mean(), abs=1e-4) == found["nll_left_to_right"]
  assert found["judge_perplexity"] == pytest.approx(np.exp(nll(ids, rows).mean(axis=1)).mean(), rel=1e-3)
  assert found["evaluations"] == pytest.approx(np.mean([text.evaluations for text in texts]))
  assert found["nll"] != pytest.approx(found["nll_left_to_right"], abs=0.01) and found["seconds"] > 0


def test_a_sudoku_is_solved_where_all_open_cells_are_right(units, monkeypatch):
  unit = units["sudoku_10-3"]
  prompts, solutions = sudoku.puzzles(unit.run, 5)
  assert [prompt.known.sum() for prompt in prompts] == [16] * 5  # 12 clues, and four line feeds
  wrong = solutions.copy()
  wrong[3, np.flatnonzero(~prompts[3].known)[:2]] = 0
  drawn = [types.SimpleNamespace(ids=row.tolist()) for row in wrong]
  monkeypatch.setattr(sudoku.texts_lib, "generate", lambda *_, **__: drawn)
  assert sudoku.solved(unit.run, unit.params, prompts, solutions, {}) == {"solved": 0.8, "cells": 0.9}


def test_what_is_measured_is_kept_and_makes_the_page(units, tmp_path, monkeypatch):
  monkeypatch.setattr(quality, "WINDOWS", (2,))
  monkeypatch.setattr(quality, "methods", lambda length, every=quality.methods: [
      method for method in every(length) if method[0] == "speculative" or method == ("fixed", dict(order="uniform", steps=length))])
  monkeypatch.setattr(speed, "ORDERS", ("uniform",))
  monkeypatch.setattr(speed, "BATCHES", (2,))  # as below: the same programs
  monkeypatch.setattr(sudoku, "methods", lambda every=sudoku.methods: [x for x in every() if x[0] in ("random", "margin")])
  path, about = tmp_path / "page" / "results.json", {
      "command": "a command", "core_seconds": 3720, "seeds": 2, "machine": "2 cores", "versions": "JAX 1"}
  abouts = {name: unit.about for name, unit in units.items()}
  amounts = measurements.Amounts(seeds=2, texts=2, repeats=2, puzzles=2)
  kept = measurements.Kept(path)
  kept.begin(about, abouts)
  measurements.measure(units, kept, amounts)
  counts = {name: len(kept.results[name]) for name in measurements.SECTIONS}
  assert counts == {"quality": 2 * 3, "speed": 2, "sudoku": 2 * 2}, "with the held-out text, three rows"
  windows = {cell["window"]: cell for cell in kept.results["speed"]}
  assert [len(cell["seconds"]) for cell in windows.values()] == [2, 2] and set(windows[0]["evaluations"]) == {LENGTH}
  assert all(1 <= x <= LENGTH for x in windows[2]["evaluations"]) and len(windows[2]["evaluations"]) == 8

  written = page.write(tmp_path / "page.md", kept.results)
  text = written[0].read_text()
  assert [line for line in text.splitlines() if line.startswith("#")] == [
      "# Decoding", "## Tiny", "### At equal distribution", "### Quality against evaluations and seconds: tiny", "## Sudoku"]
  assert [tmp_path / picture for picture in re.findall(r"\]\((page/\S+\.png)\)", text)] == written[1:] and "nan" not in text

  again = measurements.Kept(path)  # as another start reads them
  again.begin(about, abouts)
  monkeypatch.setattr(quality, "of_texts", lambda *_, **__: pytest.fail("measured again"))
  measurements.measure(units, again, amounts)
  assert again.results == kept.results
  again.begin(about, abouts | {"tiny": units["tiny"].about | {"fingerprint": "another"}})
  assert [len(again.results[name]) for name in measurements.SECTIONS] == [0, 0, 4]
  assert json.loads(path.read_text()) == again.results


def test_the_page_says_where_margin_order_has_three_times_the_accuracy():
  lines = page._of_sudoku([(1.0, 500, 0.31, 0.1, 3), (1.0, 1000, 0.29, 0.1, 3), (0.0, 500, 0.8, 0.4, 3), (0.0, 1000, 0.0, 0.0, 3)])
  assert lines[0].endswith("has at least 3 times the accuracy of random order after 500 steps; not after 1,000.")
  assert "after no number of steps; not after 500 (random order solves 40%: 2.5 times is all there can be), 1,000." in lines[1]


def test_how_many_times_as_fast_is_of_measurements_made_in_turn():
  mean, error = speed.ratios([2.0, 8.0, 4.0], [1.0, 4.0, 2.0])  # a machine that is slow at times is so for both
  assert mean == pytest.approx(2.0) and error == pytest.approx(0.0, abs=1e-12)
  assert speed.ratios([4.0], [1.0])[0] == 4.0


def test_units_that_can_not_be_measured_are_named():
  config = config_lib.default_config()
  short = config.copy_and_resolve_references()
  short.model.block_size = 8
  unit = lambda name, config: sweep.Unit(name, config, None, ())
  encoder = config.copy_and_resolve_references()
  encoder.model.architecture = "encoder"
  puzzled = config.copy_and_resolve_references()
  puzzled.data.source = "sudoku:5"
  for units, expected in (
      ([unit("tiny", config)], "has no unit judge"),
      ([unit("tiny", config), unit("judge", short)], "unit tiny: has texts of 1024 tokens, longer than .* = 8 of unit judge"),
      ([unit("tiny", encoder), unit("judge", config)], "unit tiny: is an encoder"),
      ([unit("sudoku", puzzled), unit("judge", config)], "unit sudoku: is not named ARM-SEED")):
    with pytest.raises(config_lib.ConfigError, match=expected):
      measurements.check(units)


def test_a_page_is_not_drawn_again_from_nothing(command, tmp_path):
  lost = command("--page=other.md", "--redraw", module="aogpt_jax.decoding")
  assert lost.returncode == 1 and lost.stderr == (
      "error: --redraw: there is no other/results.json; leave it out to train and to measure.\n")
