"""The command line: one clear line for what is wrong, before anything is compiled; files where it says."""

import json

import pytest

from conftest import ROOT


@pytest.mark.parametrize("arguments, expected", [
    (["model.widht=64"], "model.width"),
    (["model.width=65"], "config.model.heads: 2 does not divide config.model.width = 65"),
    (["optimizer.learning_rate=-1.0"], "config.optimizer.learning_rate: is -1.0; it must be above 0"),
    (["optimizer.warmup_steps=20"], "config.optimizer.warmup_steps: 20 leaves no decay before"),
    (["steps=1e5"], "steps"),
    (["orders=unifrom"], "did you mean uniform?"),
    (["model.vocab_size=256"], "below the 257 ids of config.data.tokenizer = bytes; set it to 320"),
    (["data.source=files:nowhere/*.txt"], "nowhere/*.txt"),
    (["data.tokenizer=nowhere.tiktoken"], "nowhere.tiktoken"),
    (["mesh.fsdp=3"], "config.mesh"),
    (["data.validation_fraction=0.0"], "config.data.validation_fraction: is 0, so that there is no validation text"),
    (["--mode=eval"], "there is no checkpoint"),
    (["--mode=tune"], "--mode"),
    (["--workdir=/dev/null"], "--workdir=/dev/null: can't be written to"),
    (["--workdri=x"], "workdri"),
])
def test_what_is_wrong_is_said_in_one_line_and_nothing_is_compiled(command, arguments, expected):
  done = command(*arguments, environment={"JAX_LOG_COMPILES": "1"})
  assert done.returncode != 0
  assert expected in done.stderr + done.stdout
  assert "Traceback" not in done.stderr, done.stderr
  assert "Compiling" not in done.stderr


@pytest.mark.parametrize("config, expected", [
    (None, "--config is missing; give a config file, e.g. --config=configs/tiny.py"),
    ("nowhere.py", "nowhere.py"),
])
def test_a_missing_config_is_said_in_one_line(command, config, expected):
  done = command(config=config)
  assert done.returncode != 0 and expected in done.stderr + done.stdout
  assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("text, expected", [
    ("def get_config():\n  return x\n", "line 2: NameError: name 'x' is not defined"),
    ("def get_config(:\n", "line 1: SyntaxError"), ("x = 1\n", "has no function get_config()")])
def test_a_mistake_in_a_config_file_is_named_with_its_line(command, tmp_path, text, expected):
  (tmp_path / "mine.py").write_text(text)
  done = command(config="mine.py")
  assert done.returncode != 0 and "--config=mine.py" in done.stderr and expected in done.stderr
  assert "Traceback" not in done.stderr, done.stderr


def test_without_a_mode_it_trains_evaluates_and_samples_and_says_where_everything_is(command, tmp_path):
  done = command("steps=4", "eval.every_steps=2", "checkpoint.every_steps=2", "log.tensorboard=True")
  assert done.returncode == 0, done.stderr
  workdir = tmp_path / "runs" / "words"  # the default is relative, and named after the config
  for name in ("checkpoints", "metrics.jsonl", "loss.png", "eval_validation.json", "samples.txt"):
    assert (workdir / name).exists() and str(workdir / name) in done.stdout
  assert list((workdir / "tensorboard").iterdir())
  for line in ("unigram entropy", "bigram entropy", "left to right", "any order", "--- uniform, 16 evaluations, sample 1 ---"):
    assert line in done.stdout
  records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4]
  assert [r["step"] for r in records if "eval/any_order/perplexity" in r] == [2, 4]
  result = json.loads((workdir / "eval_validation.json").read_text())
  assert result["step"] == 4 and result["left_to_right"]["orders"] == 1 and result["any_order"]["orders"] == 2

  evaluated = command("--mode=eval", "steps=4", "eval.split=test")
  assert evaluated.returncode == 0, evaluated.stderr
  assert json.loads((workdir / "eval_test.json").read_text())["step"] == 4
  sampled = command("--mode=sample", "steps=4", "sample.temperature=0.0")
  assert sampled.returncode == 0 and "--- left_to_right, 16 evaluations, sample 1 ---" in sampled.stdout
  assert (ROOT / "runs" / "words").exists() is False

  filled = command("--mode=sample", "steps=4", "sample.prompt=any [[4]] order", "sample.orders=('uniform',)")
  assert filled.returncode == 0, filled.stderr
  record, = map(json.loads, (workdir / "samples.jsonl").read_text().splitlines())
  assert bytes(record["ids"][:4] + record["ids"][8:]) == b"any  order" and len(record["ids"]) == 14
  assert [s > 0 for s in record["steps"]] == [False] * 4 + [True] * 4 + [False] * 6
  assert sorted(record["positions"]) == list(range(14)) and set(record["positions"][10:]) == {4, 5, 6, 7}
  too_long = command("--mode=sample", "steps=4", "sample.prompt=[[17]]")
  assert "config.sample.prompt: has 17 tokens" in too_long.stderr and "Traceback" not in too_long.stderr
