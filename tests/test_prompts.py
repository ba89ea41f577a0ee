"""Prompts: what lies between blanks is given, blanks and the rest are drawn; files have one a line."""

import io
import sys

import numpy as np
import pytest

from aogpt_jax import config as config_lib
from aogpt_jax import run as run_lib
from aogpt_jax.data import tokenizers
from aogpt_jax.sampling import prompts

BYTES = tokenizers.load("bytes")


@pytest.mark.parametrize("text, length, given", [
    ("", 0, "????????"), ("", 3, "???"), ("ab", 0, "ab??????"), ("ab", 3, "ab?"), ("a[[2]]b", 0, "a??b"),
    ("[[1]]a[[002]]", 0, "?a??"), ("[[0000]]a[[1]]", 0, "a?"), ("a[[2]]b", 6, "a??b??"), ("[[8]]", 0, "????????"), ("a[[0]]b", 0, "ab"),
    ("abcdefgh", 0, "abcdefgh"), ("[[x]]", 0, "[[x]]???"),
])
def test_a_prompt_is_given_tokens_and_blanks(text, length, given):
  prompt = prompts.parse(text, BYTES, length, 8)
  assert "".join(chr(t) if k else "?" for t, k in zip(prompt.tokens, prompt.known)) == given and prompt.text == text
  assert prompt.tokens.dtype == np.int32 and (prompt.tokens[~prompt.known] == 0).all()


@pytest.mark.parametrize("text, length", [("abcdefghi", 0), ("a[[8]]", 0), ("[[99999999999]]", 0), ("[[" + "9" * 5000 + "]]", 0), ("abc", 2)])
def test_a_prompt_that_is_too_long_is_named_with_the_numbers(text, length):
  with pytest.raises(ValueError, match="config.sample.prompt: has .* tokens"):
    prompts.parse(text, BYTES, length, 8, "config.sample.prompt")


def load(prompt_file="", prompt="", length=0, block_size=16):
  config = config_lib.default_config().sample
  config.update(prompt=prompt, prompt_file=str(prompt_file), length=length)
  return prompts.load(config, BYTES, block_size)


def texts(loaded):
  return [prompt.text for prompt in loaded]


def test_without_a_file_the_config_has_one_prompt_which_may_be_empty():
  assert texts(load()) == [""] and texts(load(prompt="a[[2]]")) == ["a[[2]]"]


def test_a_text_file_has_a_prompt_a_line_and_keeps_their_spaces(tmp_path):
  path = tmp_path / "prompts.txt"
  path.write_bytes("\ufeffone \r\n\n  \n two\u2028[[3]]\nété".encode())  # a line separator is no line feed
  assert texts(load(path)) == ["one ", " two\u2028[[3]]", "été"]


def test_a_jsonl_file_has_a_prompt_an_object_of_any_number_of_lines(tmp_path):
  path = tmp_path / "prompts.jsonl"
  path.write_text('{"prompt": "one\\n[[2]]", "id": 7}\n\n{"prompt": ""}\n', encoding="utf-8")
  assert texts(load(path)) == ["one\n[[2]]", ""]


def test_standard_input_is_read_like_a_text_file(monkeypatch):
  monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("un\ndeux é\n".encode())))
  assert texts(load("-")) == ["un", "deux é"]


def test_only_what_samples_reads_prompts(monkeypatch, words_config, tmp_path):
  words_config.sample.prompt_file = "-"
  for mode in ("train", "eval"):
    monkeypatch.setattr(sys, "stdin", None)
    assert run_lib.open_run(words_config, str(tmp_path), mode).prompts == ()
  for mode in ("all", "sample"):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\n")))
    run = run_lib.open_run(words_config, str(tmp_path), mode)
    assert texts(run.prompts) == ["a"] and (run.packed is None) == (mode == "sample")


@pytest.mark.parametrize("name, content, expected", [
    ("p.txt", None, r"p.txt: can't be read \(No such file or directory\); give a file with a prompt a line"),
    ("", None, r"can't be read \(Is a directory\)"),
    ("p.txt", b"", "p.txt: has no prompts; write one a line"),
    ("p.jsonl", b"\n \n", "p.jsonl: has no prompts"),
    ("p.txt", b"one\ntw\xff\n", "p.txt, line 2: is not UTF-8"),
    ("p.txt", b"one\n\n[[17]]\n", "p.txt, line 3: has 17 tokens, blanks included, and the text 16"),
    ("p.txt", b"one\n[[0]]\n", "p.txt, line 2: is of no tokens at all"),
    ("p.jsonl", b'{"prompt": "a"}\n{"prompt": "b"\n', r"p.jsonl, line 2: is not JSON \(Expecting ',' delimiter at column 15\)"),
    ("p.jsonl", b'{"text": "a"}\n', 'p.jsonl, line 1: has no text in a field "prompt"'),
    ("p.jsonl", b'{"prompt": 3}\n', 'p.jsonl, line 1: has no text in a field "prompt"'),
    ("p.jsonl", b'["a"]\n', 'p.jsonl, line 1: has no text in a field "prompt"'),
    ("p.jsonl", b'{"prompt": "a\\ud800"}\n', "p.jsonl, line 1: has '.ud800', which is no character"),
])
def test_a_file_that_is_no_list_of_prompts_is_named_with_the_line(tmp_path, name, content, expected):
  if content is not None:
    (tmp_path / name).write_bytes(content)
  with pytest.raises((ValueError, OSError), match=expected) as error:
    load(tmp_path / name)
  assert str(error.value).startswith("config.sample.prompt_file=") and "\n" not in str(error.value)


@pytest.mark.parametrize("mode, sample, expected", [
    ("sample", dict(prompt="a[[2]]", orders=("uniform", "explicit((1, 0))")),
     r"config.sample.orders\[1\]: .* of 2 tokens, and the text has 3; .* The text is that of config.sample.prompt."),
    ("all", dict(prompt="a[[1]]", orders=("explicit((1, 0))",)), r"and the text has 16; .* The text is that of an evaluation."),
])
def test_an_order_that_does_not_fit_a_text_is_named_with_it(words_config, tmp_path, mode, sample, expected):
  words_config.sample.update(sample)
  with pytest.raises(config_lib.ConfigError, match=expected):
    run_lib.open_run(words_config, str(tmp_path), mode)


def test_an_explicit_order_need_only_fit_the_texts_that_are_drawn(words_config, tmp_path):
  words_config.sample.update(prompt="a[[1]]", orders=("explicit((1, 0))",))
  run_lib.open_run(words_config, str(tmp_path), "sample")
  words_config.sample.length = 2
  run_lib.open_run(words_config, str(tmp_path), "all")
