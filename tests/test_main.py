"""The command line: one clear line for what is wrong, before anything is compiled; files where it says."""

import json
import re
import signal
import time

import numpy as np
import pytest

from aogpt_jax import load_model
from conftest import ROOT, shown_on_terminal


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
    (["sample.prompt=[[17]]"], "config.sample.prompt: has 17 tokens, blanks included, and the text 16"),
    (["--mode=sample", "sample.prompt_file=nowhere.txt"], "config.sample.prompt_file=nowhere.txt: can't be read"),
    (["--mode=sample", "sample.prompt=[[3]]", "sample.orders=('explicit((1, 0))',)"], "of 2 tokens, and the text has 3"),
    (["--mode=eval"], "there is no checkpoint"),
    (["--mode=tune"], "--mode"),
    (["--mode=train", "--html=page.html"], "--html=page.html: --mode=train draws no texts to show; give --mode=sample"),
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
    ("def get_config():\n  pass\ndef sweep():\n  yield x\n", "line 4: NameError: name 'x' is not defined"),
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
  timed = [r for r in records if "step_seconds" in r]
  assert timed and all(0 <= r["data_seconds"] <= r["step_seconds"] for r in timed)
  assert [r["step"] for r in records if "eval/any_order/perplexity" in r] == [2, 4]
  result = json.loads((workdir / "eval_validation.json").read_text())
  assert result["step"] == 4 and result["left_to_right"]["orders"] == 1 and result["any_order"]["orders"] == 2

  evaluated = command("--mode=eval", "steps=4", "eval.split=test")
  assert evaluated.returncode == 0, evaluated.stderr
  assert json.loads((workdir / "eval_test.json").read_text())["step"] == 4
  sampled = command("--mode=sample", "steps=4", "sample.temperature=0.0")
  assert sampled.returncode == 0 and "--- left_to_right, 16 evaluations, sample 1 ---" in sampled.stdout
  assert (ROOT / "runs" / "words").exists() is False


def test_prompts_of_a_file_are_filled_and_recorded(command, untrained, tmp_path):
  (tmp_path / "prompts.jsonl").write_text('{"prompt": "any [[4]] order"}\n{"prompt": "a\\n[[3]]"}\n')
  done = command("--mode=sample", untrained, "sample.prompt_file=prompts.jsonl", "sample.orders=('uniform', 'right_to_left')",
                 "sample.num_samples=2", "sample.batch_size=3", "sample.steps=2", "data.cache_dir=nowhere", "--picture=drawn.svg")
  assert done.returncode == 0, done.stderr
  assert (tmp_path / "drawn.svg").exists() and f"  {tmp_path}/drawn.svg" in done.stdout
  assert not (tmp_path / "nowhere").exists()  # the data that the model was trained on is not needed
  workdir = untrained.removeprefix("--workdir=")
  with open(f"{workdir}/samples.jsonl", encoding="utf-8") as f:
    records = [json.loads(line) for line in f]
  assert [(r["order"], r["prompt_index"], r["sample_index"]) for r in records] == [
      (order, p, s) for order in ("uniform", "right_to_left") for p in (0, 1) for s in (0, 1)]
  for r in records:
    prompt, length, blank = (("any [[4]] order", 14, range(4, 8)), ("a\n[[3]]", 5, range(2, 5)))[r["prompt_index"]]
    given = dict(enumerate(prompt.encode().replace(b"[[4]]", b"????").replace(b"[[3]]", b"???")))
    assert r["prompt"] == prompt and len(r["ids"]) == length and r["evaluations"] == 2 and r["seed"] == 0
    assert r["sampler"]["steps"] == 2 and r["sampler"]["weights"] == "ema" and r["sampler"]["checkpoint_step"] == 0
    assert all(r["ids"][i] == given[i] for i in range(length) if i not in blank)
    assert [i for i in range(length) if r["steps"][i]] == list(blank) == [i for i in range(length) if r["log_probs"][i]]
    assert sorted(r["positions"]) == list(range(length)) and set(r["positions"][-len(blank):]) == set(blank)
    if r["order"] == "right_to_left":
      assert r["positions"][-len(blank):] == list(blank)[::-1]
  assert len({tuple(r["ids"]) for r in records}) == 8
  with open(f"{workdir}/samples.txt", encoding="utf-8") as f:
    readable = f.read()
  assert readable.count("--- right_to_left, 2 evaluations, prompt 2, sample 1 ---\na\n") == 1
  assert all(text in done.stdout for text in re.split("(?=--- )", readable))


def test_on_a_terminal_texts_appear_as_they_become_known_and_stay_in_full(command, untrained):
  status, seen, errors = shown_on_terminal(lambda terminal: command(
      "--mode=sample", untrained, "sample.prompt_file=-", "sample.orders=('left_to_right', 'uniform')", wait=False, stdout=terminal,
      environment={"TERM": "xterm"}), columns=80, typed="any [[5]]\n[[3]] order\n")
  assert status == 0, errors
  plain = re.sub(rb"\x1b\[[?0-9;]*[a-zA-Z]", b"", seen).decode().replace("\r", "")
  assert b"\x1b[2m\xc2\xb7" in seen and b"\x1b[1A\x1b[2K" in seen  # a dim placeholder; up a line and erase it
  assert re.search("any [^\u00b7\n]{1,4}\u00b7{1,4}\n", plain) and re.search("sampling: [0-9]+ of 16 tokens", plain)
  with open(f"{untrained.removeprefix('--workdir=')}/samples.txt", encoding="utf-8") as f:
    texts = re.split("(?=--- )", f.read())
  assert all(text in plain for text in texts)
  assert seen.count(b"\x1b[?25l") == seen.count(b"\x1b[?25h") == 2  # the cursor was hidden once an order, and is back


def test_an_interrupt_keeps_the_batches_that_were_drawn(command, untrained):
  path = untrained.removeprefix("--workdir=") + "/samples.jsonl"
  with open(path, "w", encoding="utf-8") as f:
    f.write("of the run before\n")
  # Where the tests themselves run in the background, SIGINT is ignored, and the process would inherit that.
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  process = command("--mode=sample", untrained, "sample.num_samples=100000", "sample.batch_size=2", wait=False)
  signal.signal(signal.SIGINT, before)
  deadline = time.monotonic() + 120
  while time.monotonic() < deadline and process.poll() is None:
    with open(path, encoding="utf-8") as f:
      if len(f.readlines()) > 4:
        break
    time.sleep(0.05)
  process.send_signal(signal.SIGINT)
  _, errors = process.communicate(timeout=60)
  with open(path, encoding="utf-8") as f:
    records = [json.loads(line) for line in f]
  assert process.returncode == 1 and [r["sample_index"] for r in records] == list(range(len(records)))
  assert errors == f"interrupted; {len(records)} of 200,000 texts were drawn and are in {path}\n"


def test_a_checkpoint_alone_is_evaluated_on_another_text_in_any_order(command, untrained, tmp_path):
  for i in range(8):
    (tmp_path / f"{i}.txt").write_text("any order of masked tokens and their cache entries " * 2)
  done = command("--mode=eval", untrained, "data.source=files:nowhere/*.txt", "eval.source=files:*.txt", "eval.ensemble=2",
                 "eval.gap=2", "eval.targets=3", "eval.lanes=4",
                 "eval.distributions=('right_to_left', 'mix(0.5)', 'explicit((%s,))')" % ", ".join(map(str, range(16))))
  # The data of the run is another's in the config of the checkpoint, which is not to be changed.
  assert done.returncode != 0 and "config.data.source" in done.stderr and "Traceback" not in done.stderr

  done = command("--mode=eval", untrained, "eval.source=files:*.txt", "eval.ensemble=2", "eval.gap=2", "eval.targets=3",
                 "eval.lanes=4", "eval.distributions=('right_to_left', 'mix(0.5)')", "data.cache_dir=elsewhere")
  assert done.returncode == 0, done.stderr
  assert len(list((tmp_path / "elsewhere").iterdir())) == 1  # the text that the model was trained on is not needed
  for line in ("right to left", "mix(0.5), 2 orders a sequence", "bound of 2 orders at once", "ensemble of 2 context orders, 3",
               "% of any-order loss", "context left to right"):
    assert line in done.stdout
  with open(f"{untrained.removeprefix('--workdir=')}/eval_files_txt.json", encoding="utf-8") as f:
    result = json.load(f)
  assert result["source"] == "files:*.txt" and result["step"] == 0 and result["config"]["eval"]["ensemble"] == 2
  assert result["right_to_left"]["orders"] == 1 and result["mix(0.5)"]["orders"] == 2
  assert result["ensemble"]["2"]["targets"] == 3 and list(result["mdm_gap"]["rules"]) == ["random", "sorted", "mixture"]
  tokens = sum(len("any order of masked tokens and their cache entries " * 2) + 1 for _ in range(8)) // 16 * 16
  assert result["right_to_left"]["tokens"] == result["ensemble"]["2"]["tokens"] == tokens


@pytest.mark.parametrize("objective", ["ao", "lambda_dce", "score_entropy"])
def test_an_encoder_trains_goes_on_evaluates_and_samples(command, tmp_path, objective):
  encoder = ("--workdir=run", "model.architecture=encoder", f"objective={objective}", "orders=uniform", "model.layers=1",
             "model.block_size=8", "micro_batches=1", "eval.sequences=8")
  first = command("--mode=train", *encoder, "steps=1", "eval.distributions=('uniform',)", "eval.masks=1")
  assert first.returncode == 0, first.stderr
  done = command(*encoder, "steps=2", "eval.limit=16", "eval.gap=2", "eval.targets=2", "sample.prompt=an[[5]]r", "sample.steps=3",
                 "sample.counts=binomial")
  assert done.returncode == 0, done.stderr
  for line in ("going on from the checkpoint of step 1", "any order, 16 masks a sequence", "left to right", "context left to right"):
    assert line in done.stdout
  losses = [json.loads(line).get("loss") for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
  assert len([x for x in losses if x]) == 2
  result = json.loads((tmp_path / "run/eval_validation.json").read_text())
  assert result["step"] == 2 and result["config"]["objective"] == objective
  assert result["any_order"]["masks"] == 16 and result["any_order"]["iw_nats_per_token"] is None
  assert result["any_order"]["stderr_sequences"] > 0 and result["left_to_right"]["orders"] == 1
  assert max(abs(gap["difference"]) for gap in result["mdm_gap"]["rules"].values()) < 1e-5
  records = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
  assert [r["order"] for r in records] == ["left_to_right", "uniform"]
  assert all(bytes(r["ids"][:2] + r["ids"][-1:]) == b"anr" and 1 <= r["evaluations"] <= 3 for r in records)
  model, params = load_model(tmp_path / "run")
  assert model.apply({"params": params}, np.array([[97, model.mask_id]])).shape == (1, 2, 320)
