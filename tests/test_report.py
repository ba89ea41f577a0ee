"""The page of runs: what it compares, what is missing of them, and that what they hold stays text."""

import html
import json
import math
import re

import numpy as np
import pytest

from aogpt_jax import config as config_lib
from aogpt_jax.data import packing
from aogpt_jax.data import tokenizers
from aogpt_jax.evaluation import attended
from aogpt_jax.evaluation import likelihood
from aogpt_jax.report import charts
from aogpt_jax.report import comparison
from aogpt_jax.report import page
from aogpt_jax.report import runs
from aogpt_jax.training import curves

HOSTILE = "<script>document.title='taken'</script></pre><img src=x onerror=alert(1)>\u202e\x1b[2J&lt;\"'{{style}}{{body}}"


def make_run(workdir, level=2.5, seed=0, steps=40, changes=(), evaluated=True, text="words", sample=HOSTILE, count=50, source=HOSTILE):
  """The files of a run with made-up figures: losses that fall to a level, and sequences that differ far more in difficulty."""
  config = config_lib.default_config()
  config.update_from_flattened_dict({
      "steps": 40, "data.tokenizer": "bytes", "batch_size": 8, "model.block_size": 16, "model.vocab_size": 320, "model.layers": 2,
      "model.width": 32, "model.heads": 2, **dict(changes)})
  workdir.mkdir(parents=True)
  rng = np.random.default_rng(seed)
  fall = lambda step: level + 3 * math.exp(-step / 8)
  records = [{"step": s, "loss": fall(s) + rng.normal(0, 0.1), "learning_rate": 1e-3, "grad_norm": 1.0, "tokens_per_second": 500.0}
             for s in range(1, steps + 1)]
  records += [{"step": s, **{f"eval/{d}/{k}": v for d, up in (("left_to_right", 0.0), ("any_order", 0.4))
                             for k, v in (("nats_per_token", fall(s) + up), ("stderr_sequences", 0.02))}}
              for s in range(10, steps + 1, 10)]
  (workdir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
  start = {"step": 0, "time": "2026-01-02T03:04:05+00:00", "command": ["main.py", "--config=x.py"], "python": "3.11", "commit": "abc",
           "versions": {"jax": "0.10"}, "devices": 1, "device_kind": "cpu", "platform": "cpu", "processes": 1, "machine": "x86_64",
           "system": "Linux", "cores": 2, "config": config.to_dict()}
  (workdir / "starts.jsonl").write_text(json.dumps(start) + "\n")
  if not evaluated:
    return config
  hard = np.random.default_rng(99).normal(0, 8.0, count)  # of the sequences, whichever the model
  arrays = {d: 16 * (level + up) + hard + rng.normal(0, 0.2, count) for d, up in (("left_to_right", 0.0), ("any_order", 0.4))}
  lengths = np.full(count, 16.0)
  likelihoods = {d: likelihood.summary(x[None], lengths, 16 * count) for d, x in arrays.items()}
  fields = lambda r: {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in vars(r).items()
                      if not k.startswith("sequence_")}
  record = {"step": steps, "split": "validation", "source": source, "weights": "ema", "text": text, "limit": 0, "seed": 0,
            "config": config.to_dict(), "entropies": {"unigram": 3.0, "bigram": 2.6, "tokens": 800},
            **{d: fields(r) for d, r in likelihoods.items()}, "ensemble": {}, "mdm_gap": None}
  (workdir / "eval_validation.json").write_text(json.dumps(record))
  np.savez_compressed(workdir / "eval_validation.npz", tokens=lengths, **arrays)
  samples = [{"text": f"{sample} {i}", "order": order, "evaluations": 16, "sampler": {"temperature": 0.8}, "prompt": HOSTILE}
             for order in ("left_to_right", "uniform") for i in range(3)]
  (workdir / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
  return config


def read_all(*workdirs):
  return [runs.read(path, name) for path, name in zip(workdirs, runs.names(workdirs))]


def make_page(*workdirs, attention="It is left out.", samples=4):
  records = read_all(*workdirs)
  return page.html_page(records, [attention] * len(records), samples)


def words_of(content):
  return re.sub(r"\s+", " ", html.unescape(re.sub(r"(?s)<(style|script).*?</\1>|<[^>]*>", " ", content)))


def test_of_two_runs_it_says_what_differs_and_which_is_better(tmp_path):
  make_run(tmp_path / "runs/one", 2.5, seed=1)
  make_run(tmp_path / "runs/two", 2.55, seed=2, changes={"model.width": 64, "orders": "uniform"})
  records = read_all(tmp_path / "runs/one", tmp_path / "runs/two")
  assert comparison.differing([r.config for r in records]) == {"model.width": [32, 64], "orders": ["mix(0.1)", "uniform"]}
  ltr, any_order = comparison.compare(records)
  assert [loss.run for loss in ltr.losses] == ["one", "two"] and ltr.losses[1].paired
  one, two = (np.load(tmp_path / f"runs/{name}/eval_validation.npz")["left_to_right"] / 16 for name in ("one", "two"))
  assert ltr.losses[1].difference == pytest.approx((two - one).mean())
  assert ltr.losses[1].margin == pytest.approx(1.96 * (two - one).std(ddof=1) / 50**0.5)
  assert ltr.losses[1].verdict == "worse" and any_order.losses[0].verdict == "lowest"
  # The sequences' own difficulty is in the errors of each, and not in that of the difference.
  assert ltr.losses[0].stderr > 10 * ltr.losses[1].margin
  assert re.fullmatch(r"left to right: one is better than two, by 0\.0\d+ ± 0\.00\d+ nats/token\.", ltr.sentence)
  text = words_of(make_page(tmp_path / "runs/one", tmp_path / "runs/two"))
  assert ltr.sentence in text and "worse, paired" in text and "'mix(0.1)' 'uniform'" in text
  for title in ("Which is better", "What differs", "Validation, any order", "Training batches, smoothed", "The runs"):
    assert title in text


def test_runs_on_other_sequences_are_compared_as_independent_and_those_on_other_tokens_by_bytes(tmp_path):
  make_run(tmp_path / "one", 2.5)
  make_run(tmp_path / "two", 2.55, text="other words")
  ltr, _ = comparison.compare(read_all(tmp_path / "one", tmp_path / "two"))
  assert not ltr.losses[1].paired and ltr.losses[1].verdict == "not told apart from the lowest"
  assert ltr.sentence == "left to right: the runs are not told apart." and "not paired" in ltr.remarks[0]
  make_run(tmp_path / "three", 2.5, changes={"data.tokenizer": "gpt2", "model.vocab_size": 50304})
  in_bytes, _ = comparison.compare(read_all(tmp_path / "one", tmp_path / "three"))
  assert in_bytes.unit == "bits/byte" and in_bytes.losses[0].value == pytest.approx(2.5 / math.log(2), rel=0.05)


def test_of_runs_on_different_texts_none_is_called_better(tmp_path):
  for name in ("evaluated", "training"):
    make_run(tmp_path / name / "one", 2.5, evaluated=name == "evaluated")
    make_run(tmp_path / name / "two", 4.5, text="other", source="files:x", changes={"data.source": "files:x"},
             evaluated=name == "evaluated")
    ltr, _ = comparison.compare(read_all(tmp_path / name / "one", tmp_path / name / "two"))
    assert ltr.sentence.startswith("left to right: one has, on another text, a lower loss than two, by ")
    assert any("different texts" in remark for remark in ltr.remarks)


def test_runs_without_an_evaluation_after_training_are_compared_at_their_last_common_step(tmp_path):
  make_run(tmp_path / "one", 2.5, evaluated=False)
  make_run(tmp_path / "two", 2.7, steps=30, evaluated=False)
  ltr, _ = comparison.compare(read_all(tmp_path / "one", tmp_path / "two"))
  assert [loss.step for loss in ltr.losses] == [30, 30] and ltr.losses[1].difference == pytest.approx(0.2)
  assert "not paired" in ltr.remarks[0] and ltr.losses[1].verdict == "worse"
  (tmp_path / "one/metrics.jsonl").unlink()
  assert comparison.compare(read_all(tmp_path / "one", tmp_path / "two")) == []
  assert "their losses can't be compared" in words_of(make_page(tmp_path / "one", tmp_path / "two"))


def test_what_is_missing_or_damaged_is_said_and_the_rest_is_shown(tmp_path):
  make_run(tmp_path / "run", steps=24, evaluated=False)
  path = tmp_path / "run/metrics.jsonl"
  lines = path.read_text().splitlines()
  lines[3], lines[7] = '{"step": 4, garb', "[]"
  lines += ['{"step": 23, "loss": "high", "learning_rate": NaN}', '{"step": true}', '{"step": 24, "lo']
  path.write_text("\n".join(lines))
  (tmp_path / "run/eval_test.json").write_text("{}")
  (tmp_path / "run/zero_shot.json").write_text('{"scores": [{"dataset": 1}]}')
  (tmp_path / "run/starts.jsonl").write_text("no start\n")
  (record,) = read_all(tmp_path / "run")
  assert len([r for r in record.records if "loss" in r]) == 23 and record.step == 24 and not record.is_finished
  text = words_of(make_page(tmp_path / "run"))
  for said in ("metrics.jsonl: 4 of 29 lines are no records and are passed over: 4, 8, 28, 29", "starts.jsonl has no records",
               "eval_test.json can't be read and is left out", "zero_shot.json can't be read", "its config is not known",
               "step 24", "There are none: --mode=sample draws some", "There are no tables"):
    assert said in text, said
  path.unlink()
  with pytest.raises(ValueError, match="there is nothing of a run in it"):
    runs.read(tmp_path / "run", "")
  with pytest.raises(ValueError, match="there is no such directory"):
    runs.read(tmp_path / "nowhere", "")


def test_runs_are_named_by_as_much_of_their_paths_as_tells_them_apart(tmp_path):
  names = lambda *paths: runs.names([tmp_path / path for path in paths])
  assert names("a/run", "b/other") == ["run", "other"] and names("a/run", "b/run") == ["a/run", "b/run"]


def test_a_long_line_keeps_its_ends_and_its_extremes_and_ticks_are_round():
  y = np.zeros(20_000)
  y[7777], y[12_345] = 9.0, -9.0
  line = charts._thinned(charts.Line("", np.arange(20_000), y))
  assert len(line.x) <= charts._MOST_POINTS and {0, 7777, 12_345, 19_999} <= set(line.x.tolist())
  for low, high, log, expected in (
      (0, 300, False, [0, 100, 200, 300]), (2.01, 3.3, False, [2.5, 3.0]), (1e-4, 1.0, True, [1e-4, 1e-3, 1e-2, 1e-1, 1]),
      (3, 40, True, [5, 10, 20])):
    assert charts._Axis(low, high, log, 0).ticks() == pytest.approx(expected)
  for low, high in ((0, 0), (5, 5), (-1e-9, 1e-9), (1, 1e12)):
    assert 1 <= len(charts._Axis(low, high, False, 0.04).ticks()) <= 8
  assert charts.chart("", [charts.Line("", np.array([1]), np.array([math.nan]))], "", "") == ""


def test_a_smoothed_curve_starts_where_the_curve_does_and_follows_it():
  c = curves.Curve("loss", np.arange(100), np.full(100, 3.0))
  np.testing.assert_allclose(curves.smoothed(c).values, 3.0)
  noisy = curves.Curve("loss", np.arange(1000), 3 + np.random.default_rng(0).normal(0, 1, 1000))
  assert curves.smoothed(noisy).values[500:].std() < 0.3


def attention():
  falling = np.geomspace(0.3, 0.001, 15)
  found = attended.Attended(np.stack([falling, falling / 2]), np.full(15, 0.05), np.stack([falling, falling]), np.full(15, 0.05),
                            np.array([0.2, 0.1]), 0.2, 4)
  return {"left_to_right": found, "uniform": found}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser_it_fits_a_phone_reads_out_its_charts_and_hostile_texts_stay_text(browser, tmp_path, scheme):
  make_run(tmp_path / "runs/<b>one", seed=1)
  make_run(tmp_path / "runs/two", 2.6, seed=2, changes={"data.source": HOSTILE, "sample.prompt": "x" * 400})
  file = tmp_path / "report.html"
  file.write_text(make_page(tmp_path / "runs/<b>one", tmp_path / "runs/two", attention=attention()), encoding="utf-8")
  shown = browser.new_page(viewport={"width": 360, "height": 640}, color_scheme=scheme)
  requests, complaints = [], []
  shown.on("request", lambda request: requests.append(request.url))
  shown.on("console", lambda message: complaints.append(message.text))
  shown.on("pageerror", lambda error: complaints.append(str(error)))
  shown.on("dialog", lambda dialog: complaints.append(dialog.message))
  shown.goto(file.as_uri())
  shown.eval_on_selector_all("details", "all => all.forEach(d => { d.open = true; })")
  assert shown.evaluate("document.documentElement.scrollWidth") == 360
  assert shown.title() == "2 runs" and shown.locator("img, main script").count() == 0
  visible = HOSTILE.replace("\x1b", "\u241b")
  assert shown.locator("pre").all_text_contents()[:2] == [f"{visible} 0", f"{visible} 1"]
  assert shown.locator("summary").first.text_content() == "<b>one"
  plot = shown.locator(".plot").first
  plot.focus()
  shown.keyboard.press("End")
  tip = shown.locator(".tip").inner_text().split("\n")
  assert tip[0] == "step 40" and tip[1].startswith("<b>one 2.5") and tip[2].startswith("two 2.6")
  shown.keyboard.press("ArrowLeft")
  assert shown.locator(".tip").inner_text().startswith("step 30")
  plot.scroll_into_view_if_needed()
  box = plot.bounding_box()
  shown.mouse.move(box["x"] + 2, box["y"] + 40)
  assert shown.locator(".tip").inner_text().startswith("step 10")
  for label in shown.locator(".plot .y > span").all()[:4]:
    assert label.bounding_box()["x"] >= 0
  luminance = sum(map(int, re.findall(r"\d+", shown.evaluate("getComputedStyle(document.body).backgroundColor"))[:3])) / 3
  assert luminance > 200 if scheme == "light" else luminance < 60
  shown.close()
  assert requests == [file.as_uri()] and complaints == []


def test_the_command_writes_the_page_of_a_run_with_its_attention(command, untrained, words_config, tmp_path):
  packing.prepare(words_config.data, tokenizers.load("bytes"), 16)
  workdir = untrained.removeprefix("--workdir=")
  done = command(workdir, "--output=out/page.html", config=None, module="aogpt_jax.report")
  assert done.returncode == 0, done.stderr
  assert "metrics.jsonl is not there: it has no curves" in done.stdout
  text = words_of((tmp_path / "out/page.html").read_text(encoding="utf-8"))
  for said in ("By age, left to right", "By age, uniform", "By distance, uniform", "of 16 held-out sequences", "parameters",
               "model.width", "its environment is not known"):
    assert said in text, said
  wrong = command("nowhere", config=None, module="aogpt_jax.report")
  assert wrong.returncode == 1 and wrong.stderr == "error: nowhere: there is no such directory; give the --workdir of a run.\n"
