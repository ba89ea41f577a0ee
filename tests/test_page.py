"""The page of --html, in a real Chromium: it plays, it is worked by keyboard, and hostile tokens stay text."""

import functools
import json
import math
import re

import jax
import numpy as np
import pytest

from aogpt_jax import console
from aogpt_jax import sampling
from aogpt_jax.data import tokenizers
from aogpt_jax.sampling import alternatives
from aogpt_jax.sampling import filters as filters_lib
from aogpt_jax.sampling import labels
from aogpt_jax.sampling import output
from aogpt_jax.sampling import page
from aogpt_jax.sampling import texts
import random_models

BYTES = tokenizers.load("bytes")
# Vocabulary of tokens that would like to be more than text, among some that are parts of characters, and some that can't be seen.
HOSTILE = tokenizers.Tokenizer("hostile", "hostile", [
    b"<script>document.title='taken'</script>", b"</script><img src=x onerror=document.title='taken'>", b"<!--", b"\"'`", b"&lt;&amp;",
    b"{{data}}", b"\x00", b"\x1b[2J", b"\x1b", b"\r", b"\n", b"\n\n", b" ", b"\t", "\u202eabc".encode(), "\u202e".encode(),
    "\u200f".encode(), "\u2028\u2029".encode(), "\u0301".encode(), "\u05e9\u05dc\u05d5\u05dd".encode(), b"\xff", b"x\xe2\x80", b"\x94y",
    b"\xf0\x9f", b"\xa4\x96", b"\xe2\x80", b"__proto__", b"constructor", b"a" * 90, b"\\", b"z"], None)
# Of the settings of a draw, those that a page reads.
SAMPLER = dict(steps=0, temperature=0.8, top_p=0.95, top_k=0, contexts=1)


def record(ids, tokenizer, seed=0, given=0, together=1, **fields):
  """A made-up text in random order, the first `given` positions of it known, `together` tokens a step; and its alternatives."""
  rng, length = np.random.default_rng(seed), len(ids)
  positions = [int(i) for i in rng.permutation(length)]
  positions = sorted(positions[:given]) + positions[given:]
  steps = [0] * length
  for place, position in enumerate(positions[given:]):
    steps[position] = place // together + 1
  log_probs = np.log(rng.uniform(1e-5, 1, length)).astype(np.float32)
  others = np.sort(np.log(rng.dirichlet(np.ones(4), length)))[:, ::-1].astype(np.float32)
  fields = dict(prompt_index=0, sample_index=0, prompt="", order="uniform") | fields
  text = texts.Text(**fields, seed=seed, text=tokenizer.decode(ids), ids=list(ids), positions=positions, steps=steps,
                    log_probs=(log_probs * 1.25).tolist(), evaluations=max(steps), sampler=SAMPLER)
  return text, alternatives.Alternatives(log_probs, rng.integers(0, tokenizer.vocab_size, (length, 4)), others, 1e-5)


def page_of(records, tokenizer):
  return page.html(*zip(*records), tokenizer)


def embedded(html):
  """What a page knows, read as a browser reads it: up to the first end of a script."""
  return json.loads(html.split('id="data">')[1].split("</script>")[0])


@pytest.fixture(scope="module")
def model():
  return random_models.make(8, 320)


@pytest.mark.parametrize("options", [
    dict(temperature=0.7, top_p=0.8, top_k=3), dict(temperature=0.0), dict(steps=3, spaced=True, temperature=0.7, top_k=9)])
def test_alternatives_are_what_was_drawn_from(model, compilations, options):
  drawn = sampling.generate(*model, BYTES, "a[[6]]b", num_samples=2, order="uniform", **options)
  compilations.clear()
  found = alternatives.find(*model, drawn, BYTES.vocab_size, k=5)
  assert compilations["_decode_logits"] <= 1  # texts with equal numbers of tokens in each step share a program
  options = {name: x for name, x in options.items() if name not in ("steps", "spaced") and options.get("temperature", 1)}
  filters = filters_lib.Filters(BYTES.vocab_size, **options)
  for text, other in zip(drawn, found, strict=True):
    assert other.difference < 1e-4
    # Full forward passes: for each position, what was known before its step, then the position itself, then the others.
    before = [[p for p in text.positions if text.steps[p] < text.steps[position]] for position in range(8)]
    orders = [[*known, i, *(p for p in range(8) if p not in known and p != i)] for i, known in enumerate(before)]
    logits = forward(*model, np.array([text.ids] * 8), np.array(orders))
    for i, known in enumerate(before):
      if not text.steps[i]:
        continue
      expected = np.asarray(jax.nn.log_softmax(filters(logits[i, len(known)])))
      assert other.log_probs[i] == pytest.approx(expected[text.ids[i]], abs=1e-4)
      np.testing.assert_allclose(other.ids_log_probs[i], np.sort(expected)[: -6 : -1], atol=1e-4)
      possible = np.isfinite(other.ids_log_probs[i])
      np.testing.assert_allclose(expected[other.ids[i]][possible], other.ids_log_probs[i][possible], atol=1e-4)


# Name in the page's list of orders -> how the text was drawn.
DRAWS = {
    "right_to_left": dict(order="right_to_left", sampler="speculative", window=3),
    "burst": dict(order="uniform", sampler="burst", checks=2), "adaptive": dict(order="uniform", sampler="adaptive")}


def test_a_page_plays_the_order_that_each_sampler_has_taken(model, request):
  texts = [text for options in DRAWS.values() for text in sampling.generate(*model, BYTES, "a[[6]]b", seed=2, **options)]
  others = alternatives.find(*model, texts, BYTES.vocab_size)
  html = page.html(texts, others, BYTES)
  for text, known in zip(texts, embedded(html)["texts"], strict=True):
    assert known["order"] in DRAWS and (known["steps"], known["positions"]) == (text.steps, text.positions)
    assert known["difference"] < 1e-4  # what the page says of a token is what its sampler has drawn it from
    assert known["settings"]["evaluations"] == text.evaluations and known["settings"]["sampler"] == text.sampler["sampler"]
    by_place = [text.steps[position] for position in text.positions]
    assert by_place == sorted(by_place) and by_place[:2] == [0, 0] and max(by_place) <= 6
  assert max(texts[2].steps) == 6
  shown = request.getfixturevalue("show")(None, html=html)  # where there is a browser
  for text in texts:
    shown.select_option("#order", text.order)
    assert frame(shown) == console.printable(text.text)
    for step in range(max(text.steps) + 1):
      shown.evaluate(f"go({step})")
      assert [cell == "?" for cell in shown.eval_on_selector_all(
          "#text > .cell", "cells => cells.map(c => c.matches('.unknown') ? '?' : '')")] == [s > step for s in text.steps]


@functools.partial(jax.jit, static_argnums=0)
def forward(model, params, tokens, orders):
  return model.apply({"params": params}, tokens, orders)


def test_nothing_in_a_token_ends_the_data():
  ids = list(range(HOSTILE.vocab_size))
  html = page_of([record(ids, HOSTILE, prompt="</script><!--\u2028")], HOSTILE)
  frame = page_of([record([30], HOSTILE)], HOSTILE)
  assert html.count("<script") == frame.count("<script") and html.count("<!--") == frame.count("<!--") and "\u2028" not in html
  known = embedded(html)
  assert known["texts"][0]["prompt"] == [0, "</script><!--\u2028"] and HOSTILE.decode([0]) in known["labels"]
  assert not re.search(r"https?:|url\(|@import|\bsrc=", frame)


@pytest.mark.parametrize("content, joined", [
    (b"abc", []),
    ("a\u00e9b".encode(), [[1, 2, "\u00e9"]]),
    ("\u202e".encode(), [[0, 3, "\u202e", "U+202E"]]),
    (b"a\xffb", [[1, 1, "\ufffd"]]),
    (b"\xe2\x80a\x80", [[0, 2, "\ufffd"], [3, 1, "\ufffd"]]),
    ("\U0001f916".encode() * 2, [[0, 4, "\U0001f916"], [4, 4, "\U0001f916"]]),
    (b"\xf0\x9f\xa4" + "\u00e9".encode(), [[0, 3, "\ufffd"], [3, 2, "\u00e9"]])])
def test_bytes_that_are_a_character_are_joined(content, joined):
  assert page._joined(list(content), BYTES) == joined
  of_byte = {start + i: (text if i == 0 else "") for start, count, text, *_ in joined for i in range(count)}
  assert "".join(of_byte.get(i, chr(byte)) for i, byte in enumerate(content)) == BYTES.decode(list(content))


def test_a_page_has_room_for_the_first_samples_of_all_prompts(monkeypatch):
  monkeypatch.setattr(page, "MOST_TOKENS", 30)
  drawn = [record([1] * 10, BYTES, prompt_index=p, sample_index=s)[0] for p in (0, 1) for s in (0, 1, 2)]
  assert [(t.prompt_index, t.sample_index) for t in page._with_room(drawn)] == [(0, 0), (0, 1), (1, 0)]
  monkeypatch.setattr(page, "MOST_TOKENS", 3)
  assert page._with_room(drawn) == drawn[:1]


def test_long_texts_make_a_small_page():
  rng = np.random.default_rng(0)
  records = [record(rng.integers(0, 256, 1024).tolist(), BYTES, seed=i, sample_index=i) for i in range(8)]
  assert len(page_of(records, BYTES)) < 8 * 1024 * 64


def test_what_keeps_a_page_from_being_written_is_said_before_there_is_one(tmp_path):
  (tmp_path / "directory.html").mkdir()
  (tmp_path / "file").touch()
  output.check_file("--html", "", "train")
  output.check_file("--html", str(tmp_path / "new" / "page.html"), "sample", (".html",))
  assert (tmp_path / "new").is_dir() and not (tmp_path / "new" / "page.html").exists()
  for path, mode, error, expected in (
      ("page.html", "train", ValueError, "--mode=train draws no texts to show; give --mode=sample"),
      ("page.htm", "sample", ValueError, "ends in none of .html, which say what it is to be; give such a name"),
      (str(tmp_path / "directory.html"), "sample", OSError, "it is a directory"),
      (str(tmp_path / "file" / "page.html"), "all", OSError, "can't be written")):
    with pytest.raises(error, match=f"--html={re.escape(path)}: .*{expected}"):
      output.check_file("--html", path, mode, (".html",))


@pytest.fixture
def show(browser, tmp_path):
  """Opens a page of records; at the end, it must have asked for nothing, and complained of nothing."""
  opened = []

  def start(records, tokenizer=BYTES, html=None, **options):
    file = tmp_path / f"{len(opened)}.html"
    file.write_text(html or page_of(records, tokenizer), encoding="utf-8")
    shown = browser.new_page(**({"viewport": {"width": 1000, "height": 700}} | options))
    opened.append((shown, file.as_uri(), requests := [], complaints := []))
    shown.on("request", lambda request: requests.append(request.url))
    shown.on("console", lambda message: complaints.append(message.text))
    shown.on("pageerror", lambda error: complaints.append(str(error)))
    shown.on("dialog", lambda dialog: complaints.append(dialog.message))
    shown.set_default_timeout(20_000)
    shown.goto(file.as_uri())
    return shown

  yield start
  for shown, address, requests, complaints in opened:
    shown.close()
    assert requests == [address] and complaints == []


def cells(shown):
  return shown.locator("#text > .cell")


def frame(shown):
  """The text as it is shown, with ? for tokens that are not drawn yet."""
  return shown.eval_on_selector_all(
      "#text > .cell", "cells => cells.map(c => c.matches('.unknown') ? '?' : c.querySelector('.text').textContent).join('')")


def known(text, step):
  """What a frame of one byte a character must show."""
  return "".join(chr(i) if s <= step else "?" for i, s in zip(text.ids, text.steps))


def details(shown):
  return shown.inner_text("#about")


@pytest.fixture(scope="module")
def simple():
  """A text of 26 letters, three of them given, two a step."""
  return record(list(b"abcdefghijklmnopqrstuvwxyz"), BYTES, given=3, together=2)


def test_it_plays_from_what_is_given_to_the_whole_text(show, simple):
  shown, (text, _) = show([simple]), simple
  assert frame(shown) == text.text and shown.inner_text("#now") == "12 of 12"
  assert cells(shown).count() == 26 and shown.locator("#text > .given").count() == 3
  shown.select_option("#speed", "20")
  shown.evaluate("""() => {
    window.frames_seen = [];
    new MutationObserver(() => window.frames_seen.push(document.querySelectorAll('#text > .unknown').length)).observe(
      document.getElementById('now'), { childList: true });
  }""")
  shown.click("#play")
  assert shown.inner_text("#play") == "Pause"
  shown.locator("#play", has_text="Play").wait_for()
  assert shown.evaluate("window.frames_seen") == [23 - min(2 * step, 23) for step in range(13)]
  assert frame(shown) == text.text and shown.input_value("#step") == "12"


def test_the_slider_and_the_keys_go_from_step_to_step(show, simple):
  shown, (text, _) = show([simple]), simple
  shown.focus("#step")
  for key, step in (("Home", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("End", 12), ("ArrowLeft", 11)):
    shown.keyboard.press(key)
    assert frame(shown) == known(text, step)
    assert shown.get_attribute("#step", "aria-valuetext") == (
        f"step {step} of 12, {sum(s <= step for s in text.steps)} of 26 tokens known")
  assert shown.locator("#text > .now").count() == 2
  shown.evaluate("document.activeElement.blur()")
  shown.keyboard.press("ArrowLeft")
  assert frame(shown) == known(text, 10)
  shown.select_option("#speed", "1")
  shown.keyboard.press("Space")
  assert shown.inner_text("#play") == "Pause"
  shown.keyboard.press("Space")
  assert shown.inner_text("#play") == "Play" and shown.evaluate("scrollY") == 0


def test_tab_reaches_everything_once_and_arrows_go_through_the_text(show, simple):
  shown, reached = show([simple]), []
  for _ in range(7):
    shown.keyboard.press("Tab")
    reached.append(shown.evaluate("document.activeElement.id || document.activeElement.className || document.activeElement.tagName"))
    outline = shown.evaluate("getComputedStyle(document.activeElement).outlineWidth")
    assert outline == "3px", f"no focus is to be seen on {reached[-1]}"
  assert [r.split()[0] for r in reached] == ["play", "step", "speed", "INPUT", "cell", "SUMMARY", "BODY"]


def test_what_a_token_could_have_been_is_shown_to_mouse_and_keyboard(show, simple):
  shown, (text, other) = show([simple]), simple
  drawn = [i for i in text.positions if text.steps[i]]

  def check(i):
    said = details(shown)
    assert f"Token {chr(text.ids[i])}\n" in said and f"{i}, of 0 to 25" in said and f"{text.steps[i]} of 12" in said
    assert "before temperature 0.8 and top-p 0.95" in said
    rows = shown.locator("#about tr").all_inner_texts()[1:]
    assert len(rows) in (4, 5) and sum("drawn" in row for row in rows) == 1
    for row, token, log_prob in zip(rows, other.ids[i], other.ids_log_probs[i]):
      label = embedded_labels(token)
      p = float(row.split("\t")[-1].removeprefix("< "))
      assert row.startswith(label) and p == pytest.approx(math.exp(log_prob), rel=0.06, abs=0.006)

  def embedded_labels(token):
    label = labels.of_bytes(BYTES.bytes_of(int(token)))
    return label if isinstance(label, str) else ""

  cells(shown).nth(drawn[0]).hover()
  check(drawn[0])
  cells(shown).nth(drawn[5]).click()
  check(drawn[5])
  shown.keyboard.press("ArrowDown")
  check(drawn[6])
  shown.keyboard.press("ArrowUp")
  shown.keyboard.press("ArrowUp")
  check(drawn[4])
  said = shown.evaluate("document.activeElement.getAttribute('aria-label')")
  assert said.startswith(f"{chr(text.ids[drawn[4]])}, position {drawn[4]}, step {text.steps[drawn[4]]} of 12, probability ")
  shown.keyboard.press("Home")
  shown.keyboard.press("ArrowRight")
  assert "1, of 0 to 25" in details(shown)
  given = text.positions[0]
  cells(shown).nth(given).hover()
  assert "none: it was given" in details(shown) and "Probability" not in details(shown)
  shown.focus("#step")
  shown.keyboard.press("Home")
  cells(shown).nth(drawn[0]).hover()
  assert "not drawn yet" in details(shown) and "1 of 12" in details(shown) and "Probability" not in details(shown)


def test_colours_are_of_steps_or_of_probabilities_and_can_be_read_on(show, simple):
  shown, (text, other) = show([simple]), simple
  painted = """cells => cells.map(c => [getComputedStyle(c).backgroundColor, getComputedStyle(c).color])"""

  def contrast(colours):
    light = []
    for colour in colours:
      rgb = [int(x) / 255 for x in re.findall(r"\d+", colour)[:3]]
      rgb = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in rgb]
      light.append(0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2] + 0.05)
    return max(light) / min(light)

  by_step = shown.eval_on_selector_all("#text > .cell", painted)
  assert shown.locator("#ticks span").all_inner_texts() == ["1", "12"]
  of = {}
  for step, (back, _) in zip(text.steps, by_step):
    assert of.setdefault(step, back) == back  # a colour for each step
  assert len(set(of.values())) == 13 and of[1] == "rgb(68, 1, 84)" and of[12] == "rgb(253, 231, 37)"  # the ends of viridis
  shown.check("input[value=probability]")
  shown.wait_for_timeout(400)  # colours fade in
  by_probability = shown.eval_on_selector_all("#text > .cell", painted)
  assert shown.locator("#ticks span").all_inner_texts() == ["\u2264 0.001", "0.01", "0.1", "1"]
  luminance = lambda i: contrast([by_probability[i][0], "rgb(0, 0, 0)"])
  ranked = sorted((i for i in range(26) if text.steps[i]), key=lambda i: other.log_probs[i])
  assert luminance(ranked[0]) < luminance(ranked[11]) < luminance(ranked[-1])
  for step, *both in zip(text.steps, by_step, by_probability):
    assert all(contrast(colours) >= 4.5 for colours in both if step)


def test_hostile_tokens_stay_text_and_in_their_places(show):
  rng = np.random.default_rng(0)
  ids = [*range(HOSTILE.vocab_size), *rng.integers(0, HOSTILE.vocab_size, 60).tolist()]
  one, two = record(ids, HOSTILE, prompt="<script>alert(1)</script>\u202e"), record(ids[::-1], HOSTILE, seed=1, prompt_index=1)
  shown = show([one, two], HOSTILE)
  for prompt, (text, _) in enumerate((one, two)):
    shown.select_option("#prompt", value=str(prompt))
    assert frame(shown) == console.printable(text.text)
    for step in (0, 30, max(text.steps)):
      shown.evaluate(f"go({step})")
    assert frame(shown) == console.printable(text.text)
    for i in range(0, len(ids), 7):
      shown.evaluate(f"focusOn({i})")
  assert shown.title() == "Texts as they were drawn" and shown.locator("img, #text script").count() == 0
  shown.select_option("#prompt", value="0")
  signs = dict(zip(ids, shown.eval_on_selector_all("#text > .cell", "cells => cells.map(c => c.dataset.sign || '')")))
  signs |= {i: shown.evaluate(f"label(DATA.texts[0].tokens[{i}])[1]") for i in (20, 21)}
  assert [signs[i] for i in (8, 9, 10, 11, 12, 13, 15, 16, 17, 18)] == [
      "U+001B", "U+000D", "\u21b5", "\u21b5\u21b5", "\u2423", "\u21e5", "U+202E", "U+200F", "U+2028U+2029", "U+0301"]
  assert signs[0] == signs[7] == "" and signs[20] == "\\xff" and signs[21] == "x\\xe2\\x80"


def test_a_token_from_right_to_left_does_not_move_the_others(show):
  ids = [30, 14, 30, 15, 30, 19, 30, 16, 30]
  shown = show([record(ids, HOSTILE)], HOSTILE)
  boxes = [cells(shown).nth(i).bounding_box() for i in range(len(ids))]
  assert len({round(box["y"]) for box in boxes}) == 1
  assert all(a["x"] + a["width"] <= b["x"] + 1 for a, b in zip(boxes, boxes[1:]))
  arabic = record([19, 12, 19, 12, 30], HOSTILE)
  boxes = [cells(shown := show([arabic], HOSTILE)).nth(i).bounding_box() for i in range(5)]
  assert all(a["x"] > b["x"] for a, b in zip(boxes, boxes[1:])), "a text from right to left must be read so"


def test_a_character_of_several_tokens_appears_when_all_are_known(show):
  ids = list("\u00e9\U0001f916".encode())
  shown, (text, _) = show([made := record(ids, BYTES)]), made
  seen = []
  for step in range(7):
    shown.evaluate(f"go({step})")
    seen.append(frame(shown).replace("?", ""))
    signs = shown.eval_on_selector_all("#text > .cell:not(.unknown)", "cells => cells.map(c => c.dataset.sign || '')")
    assert len(signs) == step
  last = max(text.steps[:2])
  assert seen[-1] == "\u00e9\U0001f916" and ("\u00e9" in seen[last]) and "\u00e9" not in frame_of(shown, last - 1)


def frame_of(shown, step):
  shown.evaluate(f"go({step})")
  return shown.eval_on_selector_all("#text > .cell:not(.unknown):not(.signed)", "cells => cells.map(c => c.textContent).join('')")


def test_prompt_order_and_sample_choose_a_text(show):
  made = {(p, o, s): record([97 + p, 97 + s, 97 + len(o)], BYTES, prompt_index=p, prompt=f"prompt {p}", order=o, sample_index=s)
          for p in (0, 1) for o in ("uniform", "left_to_right") for s in (0, 1, 2)}
  del made[1, "left_to_right", 2]  # of what a page has no room for
  shown = show(list(made.values()))
  assert shown.locator("#prompt option").all_inner_texts() == ["1: prompt 0", "2: prompt 1"]
  for (p, o, s), (text, _) in made.items():
    shown.select_option("#prompt", label=f"{p + 1}: prompt {p}")
    shown.select_option("#order", o)
    shown.select_option("#sample", label=str(s + 1))
    assert frame(shown) == text.text
  shown.select_option("#order", "uniform")
  shown.select_option("#sample", label="3")
  shown.select_option("#order", "left_to_right")
  assert frame(shown) == made[1, "left_to_right", 0][0].text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_light_and_dark(show, scheme):
  ids = [28, 0, 1, 28, 28, 11, *[i % 31 for i in range(80)]]
  prompt = "a prompt that is much longer than a line of a phone is wide, and then some more of it " * 3
  records = [record(ids, HOSTILE, prompt=prompt, prompt_index=p, order="explicit((%s))" % ", ".join(map(str, range(200)))) for p in (0, 1)]
  shown = show(records, HOSTILE, viewport={"width": 360, "height": 640}, color_scheme=scheme, has_touch=True)
  for i in (0, 20, 28):
    cells(shown).nth(i).tap()
    assert f"{i}, of 0 to 85" in details(shown)
  shown.click("summary")
  assert shown.evaluate("document.documentElement.scrollWidth") == 360
  for selector in ("#play", "#step", "#speed", "input[value=probability]", "#prompt", "#text", "aside"):
    box = shown.locator(selector).bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 360
  luminance = sum(map(int, re.findall(r"\d+", shown.evaluate("getComputedStyle(document.body).backgroundColor"))[:3])) / 3
  assert luminance > 200 if scheme == "light" else luminance < 60


@pytest.mark.parametrize("motion, duration", [("no-preference", "0.25s"), ("reduce", "0s")])
def test_nothing_fades_where_motion_is_not_wanted(show, simple, motion, duration):
  shown = show([simple], reduced_motion=motion)
  assert shown.eval_on_selector("#text > .cell", "cell => getComputedStyle(cell).transitionDuration") == duration


def test_the_command_writes_a_page_of_what_it_has_drawn(command, untrained, tmp_path, show):
  done = command("--mode=sample", untrained, "--html=out/page.html", "sample.prompt=an[[5]]er", "sample.num_samples=2",
                 "sample.orders=('uniform', 'right_to_left')", "sample.steps=3", "sample.temperature=0.7")
  assert done.returncode == 0, done.stderr
  assert str(tmp_path / "out" / "page.html") in done.stdout
  with open(f"{untrained.removeprefix('--workdir=')}/samples.jsonl", encoding="utf-8") as f:
    records = [json.loads(line) for line in f]
  html = (tmp_path / "out" / "page.html").read_text(encoding="utf-8")
  for record_, text in zip(records, embedded(html)["texts"], strict=True):
    assert text["steps"] == record_["steps"] and text["positions"] == record_["positions"] and text["difference"] < 1e-4
    assert [len(row) for row in text["others"]] == [10 if step else 0 for step in text["steps"]]
  shown = show(None, html=html)
  for record_ in records:
    shown.select_option("#order", record_["order"])
    shown.select_option("#sample", label=str(record_["sample_index"] + 1))
    assert frame(shown) == console.printable(record_["text"])
    shown.evaluate("go(0)")
    assert frame(shown) == "an?????er"
