"""Generated texts under a judge, by the command line: all texts or a warning, settings beside figures, sweeps that go on."""

import json
import math

import numpy as np
import pytest

from aogpt_jax import config as config_lib
from aogpt_jax import run as run_lib
from aogpt_jax.evaluation import generative
from aogpt_jax.evaluation import generative_sweep
from aogpt_jax.training import checkpoints
import random_gpt2

pytest.importorskip("safetensors", reason="weights are in safetensors: pip install 'aogpt_jax[hf]'")


def write_lines(path, records):
  path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def judge(tmp_path):
  return [f"eval.generative.judge={random_gpt2.write(tmp_path / 'judge')}", "eval.generative.tokenizer=bytes"]


def test_texts_are_the_lines_of_jsonl_files_and_whole_other_files(tmp_path):
  write_lines(tmp_path / "b.jsonl", [{"text": "é"}, {"text": "two\nlines", "order": "uniform", "sampler": {"top_p": 0.5}}])
  (tmp_path / "a.txt").write_text("one\n\ntext\n", encoding="utf-8")
  samples, files = generative.read_samples(f"{tmp_path}/*")
  assert [(s.text, s.name) for s in samples] == [
      ("one\n\ntext\n", f"{tmp_path}/a.txt"), ("é", f"{tmp_path}/b.jsonl:1"), ("two\nlines", f"{tmp_path}/b.jsonl:2")]
  assert list(files) == [f"{tmp_path}/a.txt", f"{tmp_path}/b.jsonl"]
  assert set(samples[0].settings.values()) == set(samples[1].settings.values()) == {"unknown"}
  known = {name: value for name, value in samples[2].settings.items() if value != "unknown"}
  assert known == {"order": "uniform", "top_p": 0.5}


@pytest.mark.parametrize("content, expected", [
    (b'{"text": "a"}\n{"txt": "b"}\n', "x.jsonl:2: is no JSON object with a text"),
    (b'["a"]\n', "x.jsonl:1: is no JSON object"), (b'{"text": 1}', "x.jsonl:1: is no JSON object"), (b"{\n", ":1: is no JSON"),
    (b'{"text": "\\ud800"}', "x.jsonl:1: is no JSON object"), (b"\xff", r"x.jsonl: is not UTF-8 \(byte 0\)"),
])
def test_what_is_no_text_is_named_with_its_line(tmp_path, content, expected):
  (tmp_path / "x.jsonl").write_bytes(content)
  with pytest.raises(ValueError, match=expected):
    generative.read_samples(str(tmp_path / "x.jsonl"))


def test_samples_are_measured_by_sampler_with_warnings_and_without_data_or_checkpoint(command, tmp_path):
  sampler = {"steps": 8, "temperature": 0.5, "top_p": 0.9, "dtype": "float32", "weights": "ema", "checkpoint_step": 7}
  drawn = [{"text": f"sample {i}", "order": "uniform", "seed": i % 2, "sampler": sampler} for i in range(5)]
  (tmp_path / "here").mkdir()
  write_lines(tmp_path / "here" / "samples.jsonl", [*drawn, {"text": "aaaa"}, {"text": "b"}, {"text": "c<|endoftext|>"}])
  done = command("--mode=eval", "--workdir=here", *judge(tmp_path), "data.source=files:nowhere/*")
  assert done.returncode == 0, done.stderr
  for line in ("1: uniform", "steps 8, temperature 0.5, top_p 0.9", "2: order unknown, seed unknown",
               "warning: 1 of 3 texts are of fewer than two tokens, and not scored: ", "samples.jsonl:7\n",
               "warning: 1 of 3 texts are one token again and again, of entropy 0: ", "samples.jsonl:6\n"):
    assert line in done.stdout
  result = json.loads((tmp_path / "here" / "generative.json").read_text())
  known, unknown = result["results"]
  assert known["sampler"] == dict.fromkeys(generative.SETTINGS, "unknown") | sampler | {"order": "uniform", "seed": [0, 1]}
  assert (known["samples"], known["texts"], known["tokens"]) == (5, 5, 5 * 7)
  assert (unknown["samples"], unknown["texts"], unknown["too_short"], unknown["tokens"]) == (3, 2, 1, 3 + 1)
  assert unknown["statistics"]["constant"] == 1 and unknown["statistics"]["entropy"] == pytest.approx(math.log(2) / 2)
  assert result["judge"]["window"] == 8 and result["judge"]["stride"] == 4 and len(result["judge"]["fingerprint"]) == 64
  assert [path.rpartition("/")[2] for path in result["files"]] == ["samples.jsonl"]
  assert result["generative"]["judge"] == f"{tmp_path}/judge"


@pytest.mark.parametrize("fields, expected", [
    ({}, "config.eval.generative.samples: .*samples.jsonl matches no file"),  # the run has drawn none
    ({"samples": "nowhere*"}, r"nowhere\* matches no file"),
    ({"steps": (8,)}, "there is no checkpoint"),
    ({"samples": "short.txt"}, "none of the 1 texts of short.txt has two tokens"),
    ({"samples": "long.txt", "tokenizer": "nowhere"}, "config.eval.generative.tokenizer: 'nowhere' is neither"),
    ({"samples": "long.txt", "judge": "no/such/judge"}, "config.eval.generative.judge: no/such/judge: there is no such dir"),
])
def test_what_is_wrong_is_said_in_one_line_before_anything_is_compiled(
    tmp_path, monkeypatch, words_config, compilations, fields, expected):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "short.txt").write_text("a")
  (tmp_path / "long.txt").write_text("abc")
  words_config.eval.generative.update({"judge": random_gpt2.write(tmp_path / "judge"), "tokenizer": "bytes"} | fields)
  run = run_lib.open_run(words_config, str(tmp_path / "run"), "eval")
  with pytest.raises((config_lib.ConfigError, OSError), match=expected) as error:
    generative.evaluate(run, lambda weights: checkpoints.load_params(run.workdir, run.config, run.mesh, weights))
  assert "\n" not in str(error.value) and "_nll" not in compilations


def test_a_sweep_fills_its_table_and_goes_on_where_it_was(command, untrained, tmp_path):
  arguments = ["--mode=eval", untrained, *judge(tmp_path), "eval.generative.filters=((0.95, 0.7),)", "eval.generative.seeds=2",
               "eval.generative.num_samples=3", "sample.seed=5"]
  done = command(*arguments, "eval.generative.steps=(64,)")
  assert done.returncode == 0, done.stderr
  workdir = untrained.removeprefix("--workdir=")

  def read():
    with open(f"{workdir}/generative_sweep.json", encoding="utf-8") as f:
      result = json.load(f)
    with open(f"{workdir}/generative_sweep.jsonl", encoding="utf-8") as f:
      return result, [json.loads(line) for line in f if line.startswith('{"settings"') and line.endswith("}\n")]

  result, cells = read()
  settings = [[cell["settings"][name] for name in ("seed", "top_p", "temperature", "steps")] for cell in cells]
  assert settings == [[5, 0.95, 0.7, 64], [6, 0.95, 0.7, 64]]
  assert result["cells"] == cells and all(cell["texts"] == 3 and cell["seconds_per_text"] > 0 for cell in cells)
  (row,), of = result["table"], [cell["perplexity"] for cell in cells]
  assert row["seeds"] == 2 and row["perplexity"] == pytest.approx(np.mean(of))
  assert row["perplexity_std"] == pytest.approx(abs(of[0] - of[1]) / 2**0.5)
  assert row["published"] == {"AO-GPT": 6.105, "SEDD": 6.4}
  assert "AO-GPT medium, published" in done.stdout and "top-p 0.95, temperature 0.7" in done.stdout
  with open(f"{workdir}/generative_sweep.png", "rb") as f:
    assert f.read(4) == b"\x89PNG"

  with open(f"{workdir}/generative_sweep.jsonl", "a", encoding="utf-8") as f:
    f.write('{"settings": {"se')  # a process was killed here
  again = command(*arguments, "eval.generative.steps=(2, 64)")
  assert again.returncode == 0, again.stderr
  assert "2 of 4 cells are in" in again.stdout and "64 steps, seed" not in again.stdout
  result, all_cells = read()
  assert all_cells[:2] == cells and len(all_cells) == 4
  assert all(cell["settings"]["steps"] == cell["evaluations"] == 2 for cell in all_cells[2:])
  assert len(result["table"]) == 2 and "S = 2" in again.stdout


def test_a_table_has_filters_down_steps_across_and_means_over_seeds():
  cells = [{"settings": {"top_p": top_p, "temperature": temperature, "steps": steps, "seed": seed},
            "perplexity": steps * top_p + seed, "token_perplexity": 1.0, "seconds_per_text": 0.5,
            "statistics": {"entropy": None if steps == 128 else 3.0, "repetition": 0.0}}
           for seed in (0, 2) for top_p, temperature in ((0.5, 0.7), (1.0, 1.0)) for steps in (128, 64)]
  lines = [line.split("  ") for line in generative_sweep.table(generative_sweep.summary(cells)).split("\n")]
  lines = [[cell.strip() for cell in line if cell.strip()] for line in lines]
  assert lines[0] == ["top_p, temperature", "S = 64", "S = 128"]
  assert lines[1] == ["top-p 1, temperature 1", "perplexity", "65.00 +- 1.41", "129.00 +- 1.41"]
  assert lines[2] == ["token entropy", "3.000 +- 0.000", "-"]
  assert lines[5:8] == [["AO-GPT medium, published", "194.59", "154.84"], ["SEDD medium, published", "121.57", "100.01"],
                        ["top-p 0.5, temperature 0.7", "perplexity", "33.00 +- 1.41", "65.00 +- 1.41"]]
  cells[2]["settings"]["steps"] = 100  # of which nothing was published
  assert "published" not in generative_sweep.table(generative_sweep.summary(cells[2:3]))


def test_seconds_are_those_without_compiling():
  calls = []

  def generate(compiles):
    calls.append(compiles)
    import jax

    if compiles > 0 and len(calls) == 1:
      jax.jit(lambda x: x + compiles)(1.0)
    return calls[-1]

  generative_sweep.timed(lambda: generate(1))
  assert len(calls) == 2  # the first has compiled
  generative_sweep.timed(lambda: generate(0))
  assert len(calls) == 3


@pytest.mark.parametrize("field, value, expected", [
    ("steps", (8, 8), "different numbers of steps"), ("steps", (0,), "at least 1"), ("steps", ("8",), "at least 1"),
    ("filters", (), "pairs of top_p"), ("filters", (0.9, 1.0), "pairs of top_p"), ("filters", ((1.1, 1.0),), "from 0 to 1"),
    ("filters", ((1.0, -1.0),), "0 or more"), ("filters", ((1.0, 1.0), (1.0, 1.0)), "different pairs"),
    ("dtype", "float16", "one of float32, bfloat16"), ("order", "unifrom", "did you mean uniform"),
    ("order", "explicit((1, 0))", "of 2 tokens, and the text has 1024"), ("seeds", 0, "at least 1"),
])
def test_fields_out_of_range_are_named(field, value, expected):
  config = config_lib.default_config()
  config.eval.generative[field] = value
  with pytest.raises(config_lib.ConfigError, match=expected) as error:
    config_lib.check(config)
  assert str(error.value).startswith(f"config.eval.generative.{field}: ") and "\n" not in str(error.value)


def test_samples_and_a_sweep_exclude_each_other():
  config = config_lib.default_config()
  config.eval.generative.update(samples="x.jsonl", steps=(8,))
  with pytest.raises(config_lib.ConfigError, match=r"^config.eval.generative.samples: 'x.jsonl' is .* beside .*steps = \(8,\)"):
    config_lib.check(config)
