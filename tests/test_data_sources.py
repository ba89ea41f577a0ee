import gzip
import itertools
import json
import os
import sys

import ml_collections
import numpy as np
import pytest
import tensorflow_datasets as tfds

from aogpt_jax.data import sources


def data_config(source, **fields):
  return ml_collections.ConfigDict(dict(
      source=source, text_field="text", prompt_field="", train_split="train", validation_split="", test_split="",
      validation_fraction=0.2, test_fraction=0.2, tfds_data_dir="") | fields)


# --- prose ---

SOURCE = '''#!/usr/bin/env python
# -*- coding: utf-8 -*-
"""Parse the header of a message.

    The parser is lazy: it reads what is asked for.

>>> parse("a")
1
"""
# ---------------------------------------------
# Headers may be folded over several lines,
# as the standard allows.

# x = parse(header)
# y = x + 1
TEXT = """
# not a comment of this module
"""

def parse(header):  # a trailing comment
  """Return the parsed header as a mapping."""
  #: The cache is never emptied here.
  return TEXT
'''


def test_prose_is_docstrings_and_comment_blocks_in_order():
  assert sources.prose(SOURCE) == """Parse the header of a message.

    The parser is lazy: it reads what is asked for.

Headers may be folded over several lines,
as the standard allows.

Return the parsed header as a mapping.

The cache is never emptied here."""


def test_standard_library_gives_megabytes_of_prose_in_three_splits():
  config = data_config("stdlib", validation_fraction=0.05, test_fraction=0.05)
  source = sources.documents(config)
  characters = dict.fromkeys(sources.SPLITS, 0)
  ids = []
  for document in source.stream():
    characters[document.split] += len(document.text)
    ids.append(document.id)
  assert len(set(ids)) == len(ids) and "argparse" in ids
  assert characters["train"] > 1_000_000 and characters["validation"] > 30_000 and characters["test"] > 30_000
  assert sources.documents(config).fingerprint == source.fingerprint


def test_standard_library_source_is_the_code_itself():
  source = sources.documents(data_config("stdlib_source"))
  text = next(d.text for d in source.stream() if d.id == "bisect")
  assert "def bisect_left(" in text


# --- splits ---


def test_split_of_a_document_depends_on_its_key_alone():
  # sha256("a") = ca97..., sha256("b") = 3e23..., sha256("d") = 18ac...
  assert sources.held_out_split("a", 0.2, 0.1) == "train"
  assert sources.held_out_split("b", 0.2, 0.1) == "validation"
  assert sources.held_out_split("d", 0.2, 0.1) == "test"


def test_held_out_shares_are_the_fractions():
  splits = [sources.held_out_split(str(i), 0.1, 0.05) for i in range(20_000)]
  assert abs(splits.count("validation") / 20_000 - 0.1) < 4 * (0.1 * 0.9 / 20_000) ** 0.5
  assert abs(splits.count("test") / 20_000 - 0.05) < 4 * (0.05 * 0.95 / 20_000) ** 0.5


def test_copies_of_a_text_fall_into_one_split(tmp_path):
  for i in range(8):
    (tmp_path / f"{i}.txt").write_text("the same text")
  assert len({d.split for d in sources.documents(data_config(f"files:{tmp_path}/*.txt")).stream()}) == 1


# --- files ---


def write_files(tmp_path):
  (tmp_path / "sub").mkdir()
  (tmp_path / "a.txt").write_text("alpha\n")
  (tmp_path / "b.jsonl").write_text('{"text": "beta"}\n\n{"text": ""}\n')
  with gzip.open(tmp_path / "sub" / "c.jsonl.gz", "wt") as f:
    f.write('{"text": "gamma"}\n{"text": "delta"}\n')
  return f"files:{tmp_path}/**/*.*"


def test_text_files_are_documents_and_json_lines_hold_one_each(tmp_path):
  source = sources.documents(data_config(write_files(tmp_path)))
  assert [d.text for d in source.stream()] == ["alpha\n", "beta", "", "gamma", "delta"]


def test_stream_from_a_start_is_the_rest_of_the_stream(tmp_path):
  source = sources.documents(data_config(write_files(tmp_path)))
  for start in range(7):
    assert list(source.stream(start)) == list(source.stream())[start:]
  assert sorted(key for split in sources.SPLITS for key, _ in source.split(split)) == sorted(
      d.id for d in source.stream())


def test_fingerprint_changes_with_the_text_though_size_and_time_stay(tmp_path):
  path = tmp_path / "a.txt"
  path.write_text("one")
  stat = path.stat()
  before = sources.documents(data_config(f"files:{path}")).fingerprint
  path.write_text("two")
  os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
  assert sources.documents(data_config(f"files:{path}")).fingerprint != before
  path.write_text("one")
  assert sources.documents(data_config(f"files:{path}")).fingerprint == before
  assert sources.documents(data_config(f"files:{path}", test_fraction=0.1)).fingerprint != before


def test_glob_without_a_match_is_an_error(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"nothing\.txt' matches no file"):
    sources.documents(data_config(f"files:{tmp_path}/nothing.txt"))


@pytest.mark.parametrize("name, data, message", [
    ("a.txt", b"caf\xe9 au lait", r"a\.txt: invalid UTF-8 at byte 3 \(0xe9\); re-encode"),
    ("a.txt", b"\xef\xbb\xbfcaf\xe9", r"invalid UTF-8 at byte 6"),
    ("a.jsonl", b'{"text": "ok"}\n{"text": "\xff"}\n', r"invalid UTF-8 at byte 25"),
    ("a.jsonl", b'{"text": "ok"}\nnot json\n', r"a\.jsonl:2: not JSON"),
    ("a.jsonl", b'[1]\n', r"a\.jsonl:1: a JSON list"),
    ("a.jsonl", b'{"body": "x", "id": 1}\n', r"a\.jsonl:1: no field 'text'; it has \['body', 'id'\]"),
    ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl:1: field 'text' holds a int"),
    ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl:1: .*surrogate"),
    ("a.jsonl.gz", gzip.compress(b'{"text": "ok"}\n' * 1000, mtime=0)[:-9], r"not a complete gzip file"),
    ("a.txt.gz", b"plain", r"not a complete gzip file"),
])
def test_damaged_file_is_named_with_the_place_and_the_fix(tmp_path, name, data, message):
  (tmp_path / name).write_bytes(data)
  with pytest.raises(ValueError, match=message) as e:
    list(sources.documents(data_config(f"files:{tmp_path}/*")).stream())
  assert "\n" not in str(e.value)


def test_byte_order_mark_is_no_text(tmp_path):
  (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
  assert [d.text for d in sources.documents(data_config(f"files:{tmp_path}/a.txt")).stream()] == ["hello"]


@pytest.mark.parametrize("source", ["", "files:", "stdlib:x", "urn", "openwebtext"])
def test_unknown_source_is_an_error(source):
  with pytest.raises(ValueError, match="is not one of 'stdlib'"):
    sources.documents(data_config(source))


# --- urn ---


def test_an_urn_gives_exchangeable_texts_of_known_probability():
  source = sources.documents(data_config("urn:5", validation_fraction=0.1, test_fraction=0.0))
  texts = [document.text for document in source.stream()]
  assert len(texts) == 60_000 and {len(text) for text in texts} == {5}
  assert list(source.stream(59_990)) == list(source.stream())[59_990:]
  assert abs(len(list(source.split("validation"))) / 6_000 - 1) < 0.05
  # Probabilities of what repeats, by the urn's own rule; every order of a text is as probable as another.
  assert sources.urn_nats("aabac") == pytest.approx(sources.urn_nats("caaba"), rel=1e-12)
  for pattern, share in (((0, 1), 1 / 16 + 15 / 16 * 1 / 5), ((0, 4), 1 / 16 + 15 / 16 * 1 / 5)):
    same = sum(text[pattern[0]] == text[pattern[1]] for text in texts) / len(texts)
    assert abs(same - share) < 4 * (share * (1 - share) / len(texts)) ** 0.5
  total = sum(np.exp(-sources.urn_nats(a + b)) for a in "abcdefghijklmnop" for b in "abcdefghijklmnop")
  assert total == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("spec", ["urn:", "urn:0", "urn:-1", "urn:x"])
def test_an_urn_wants_a_length(spec):
  with pytest.raises(ValueError, match="'urn:LENGTH'"):
    sources.documents(data_config(spec))


# --- sudoku ---


def test_a_sudoku_has_one_solution_and_stands_in_one_split():
  documents = list(sources.documents(data_config("sudoku:5")).stream(start=59_700))
  assert len(documents) == 300 and documents[0].id == "puzzle 59700"
  quarters = [{4 * i + j for i in (r, r + 1) for j in (c, c + 1)} for r in (0, 2) for c in (0, 2)]
  units = quarters + [set(range(4 * i, 4 * i + 4)) for i in range(4)] + [set(range(i, 16, 4)) for i in range(4)]
  grids = ["".join(rows) for rows in itertools.product(map("".join, itertools.permutations("1234")), repeat=4)]
  grids = [grid for grid in grids if all(len({grid[cell] for cell in unit}) == 4 for unit in units)]
  assert sorted(sources.sudoku_grids()) == sorted(grids) and len(grids) == 288
  splits = {}
  for document in documents:
    assert "".join(text for text, _ in document.pieces) == document.text
    puzzle = "".join(text if given else "." * len(text) for text, given in document.pieces)
    assert [len(line) for line in puzzle.split("\n")] == [4, 4, 4, 4, 0] and puzzle.count(".") == 11
    puzzle = puzzle.replace("\n", "")
    assert [grid for grid in grids if all(a in (".", b) for a, b in zip(puzzle, grid))] == [document.text.replace("\n", "")]
    assert splits.setdefault(puzzle, document.split) == document.split
  assert set(splits.values()) == set(sources.SPLITS)


@pytest.mark.parametrize("spec", ["sudoku:", "sudoku:3", "sudoku:16", "sudoku:x"])
def test_a_sudoku_wants_a_number_of_clues(spec):
  with pytest.raises(ValueError, match=f"data.source='{spec}' is not .*'sudoku:CLUES'"):
    sources.documents(data_config(spec))


# --- lines and tables ---


def test_lines_are_documents_and_blank_ones_too(tmp_path):
  (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\ntwo \n")
  source = sources.documents(data_config(f"lines:{tmp_path}/a.txt", validation_fraction=0.0, test_fraction=0.0))
  assert [document.text for document in source.stream()] == ["one", "", "two "]
  whole = sources.documents(data_config(f"files:{tmp_path}/a.txt", validation_fraction=0.0, test_fraction=0.0))
  assert whole.fingerprint != source.fingerprint


@pytest.mark.parametrize("name, content, expected", [
    ("a.csv", 'text,x\n"a, ""b""\nc",1\nd,2\n', ['a, "b"\nc', "d"]), ("a.tsv", "x\ttext\n1\té, f\n", ["é, f"])])
def test_tables_hold_a_document_per_record(tmp_path, name, content, expected):
  (tmp_path / name).write_text(content, encoding="utf-8")
  with gzip.open(tmp_path / f"z{name}.gz", "wt", encoding="utf-8") as f:
    f.write(content)
  source = sources.documents(data_config(f"files:{tmp_path}/*", validation_fraction=0.0, test_fraction=0.0))
  assert [document.text for document in source.stream()] == 2 * expected


@pytest.mark.parametrize("content, message", [
    (b"a,b\n1,2\n", r"a\.csv:2: no field 'text'; it has \['a', 'b'\]: set data.text_field"),
    (b"x,text\n1\n", r"a\.csv:2: has 1 columns and none for the field 'text'"),
    (b'text\n"a\n', r"a\.csv:1: not CSV"),
    (b"text\na\xff\n", r"a\.csv: invalid UTF-8 after line \d \(0xff\)")])
def test_a_damaged_table_is_named_with_its_line(tmp_path, content, message):
  (tmp_path / "a.csv").write_bytes(content)
  source = sources.documents(data_config(f"files:{tmp_path}/a.csv", validation_fraction=0.0, test_fraction=0.0))
  with pytest.raises(ValueError, match=message):
    list(source.stream())


# --- tfds ---


class AogptTestCorpus(tfds.core.GeneratorBasedBuilder):
  """Forty numbered texts and four more to validate on."""

  VERSION = tfds.core.Version("1.0.0")

  def _info(self):
    return tfds.core.DatasetInfo(
        builder=self,
        features=tfds.features.FeaturesDict({"text": tfds.features.Text(), "year": tfds.features.Scalar(np.int64)}),
        disable_shuffling=True)

  def _split_generators(self, dl_manager):
    return {"train": self._generate_examples(40), "valid": self._generate_examples(4)}

  def _generate_examples(self, count):
    for i in range(count):
      yield i, {"text": f"text {i} of {count}: été", "year": i}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
  data_dir = tmp_path_factory.mktemp("tfds")
  AogptTestCorpus(data_dir=data_dir, file_format="array_record").download_and_prepare()
  return data_dir


def test_prepared_tfds_set_is_read_by_name_without_tensorflow(prepared):
  for name in ("aogpt_test_corpus", "aogpt_test_corpus:1.0.0"):
    config = data_config(f"tfds:{name}", tfds_data_dir=str(prepared), validation_split="valid",
                         test_split="train[90%:]", train_split="train[:90%]")
    source = sources.documents(config)
    assert [text for _, text in source.split("train")] == [f"text {i} of 40: été" for i in range(36)]
    assert [text for _, text in source.split("validation")] == [f"text {i} of 4: été" for i in range(4)]
    assert [text for _, text in source.split("test")] == [f"text {i} of 40: été" for i in range(36, 40)]
    assert list(source.stream(38)) == list(source.stream())[38:]
  assert "tensorflow" not in sys.modules


def test_unnamed_tfds_splits_are_held_out_of_train(prepared):
  source = sources.documents(data_config("tfds:aogpt_test_corpus", tfds_data_dir=str(prepared)))
  texts = {split: {text for _, text in source.split(split)} for split in sources.SPLITS}
  assert all(texts.values())
  assert set.union(*texts.values()) == {f"text {i} of 40: été" for i in range(40)}
  assert sum(map(len, texts.values())) == 40


@pytest.mark.parametrize("fields, message", [
    (dict(validation_split="dev"), r"data\.validation_split='dev': .* has the splits \['train', 'valid'\]"),
    (dict(train_split=""), r"data\.train_split is empty"),
    (dict(text_field="body"), r"no text field 'body'; its fields are \['text', 'year'\]"),
    (dict(text_field="year"), r"no text field 'year'"),
    (dict(validation_split="train[:10%]"), r"share records"),
    (dict(train_split="train[:50%]", test_split="train[40%:]"), r"share records"),
])
def test_wrong_tfds_field_is_named_with_what_there_is(prepared, fields, message):
  with pytest.raises(ValueError, match=message):
    sources.documents(data_config("tfds:aogpt_test_corpus", tfds_data_dir=str(prepared), **fields))


def test_unknown_tfds_name_suggests_a_close_one(tmp_path):
  with pytest.raises(ValueError, match=r"did you mean .*lm1b"):
    sources.documents(data_config("tfds:lm1bb", tfds_data_dir=str(tmp_path)))


def test_unknown_tfds_config_and_malformed_name_are_errors(tmp_path):
  with pytest.raises(ValueError, match=r"math_dataset has no config 'linear'; it has \w+__"):
    sources.documents(data_config("tfds:math_dataset/linear", tfds_data_dir=str(tmp_path)))
  with pytest.raises(ValueError, match=r"must read tfds:NAME"):
    sources.documents(data_config("tfds:a b", tfds_data_dir=str(tmp_path)))


def test_damaged_dataset_info_is_one_clear_line(tmp_path):
  directory = tmp_path / "aogpt_test_corpus" / "1.0.0"
  directory.mkdir(parents=True)
  (directory / "dataset_info.json").write_text("{")
  (directory / "features.json").write_text("{}")
  with pytest.raises(ValueError, match=r"dataset_info\.json is damaged"):
    sources.documents(data_config("tfds:aogpt_test_corpus", tfds_data_dir=str(tmp_path)))


@pytest.mark.parametrize("name", ["lm1b", "tiny_shakespeare", "pg19", "huggingface:openwebtext"])
def test_unprepared_tfds_set_is_one_line_naming_the_extra_and_the_directory(tmp_path, name):
  if "tensorflow" in sys.modules:
    pytest.skip("TensorFlow is there: the set would be downloaded")
  with pytest.raises(ModuleNotFoundError, match=r'pip install "aogpt_jax\[tfds\]"') as e:
    sources.documents(data_config(f"tfds:{name}", tfds_data_dir=str(tmp_path)))
  assert str(tmp_path) in str(e.value) and "\n" not in str(e.value)


def test_tfrecord_copy_is_an_error_with_the_command_that_converts_it(prepared, tmp_path):
  directory = tmp_path / "aogpt_test_corpus" / "1.0.0"
  directory.mkdir(parents=True)
  for path in (prepared / "aogpt_test_corpus" / "1.0.0").iterdir():
    (directory / path.name.replace("array_record", "tfrecord")).write_bytes(path.read_bytes())
  info = json.loads((directory / "dataset_info.json").read_text())
  (directory / "dataset_info.json").write_text(json.dumps(info | {"fileFormat": "tfrecord"}))
  with pytest.raises(ValueError, match=r"prepared as tfrecord.*tfds convert_format .*--out_file_format=array_record"):
    sources.documents(data_config("tfds:aogpt_test_corpus", tfds_data_dir=str(tmp_path)))
