import base64
import fcntl
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import ml_collections
import numpy as np
import pytest
import tensorflow_datasets as tfds

from aogpt_jax.data import loader
from aogpt_jax.data import packing
from aogpt_jax.data import sources
from aogpt_jax.data import tokenizers
from conftest import PYTHON


def data_config(tmp_path, **fields):
  return ml_collections.ConfigDict(dict(
      source=f"files:{tmp_path}/text/*", text_field="text", prompt_field="", train_split="train", validation_split="", test_split="",
      validation_fraction=0.2, test_fraction=0.2, tfds_data_dir="", tokenizer="bytes",
      cache_dir=str(tmp_path / "cache"), workers=0) | fields)


def write_documents(tmp_path, count=60):
  """Texts of 5 to 134 bytes with an empty one and the boundary's name among them."""
  (tmp_path / "text").mkdir()
  for i in range(count):
    (tmp_path / "text" / f"{i:04d}.txt").write_text(f"{i:04d} " + "word " * (i * 7 % 27))
  (tmp_path / "text" / "0003.txt").write_text("")
  (tmp_path / "text" / "0005.txt").write_text("a <|endoftext|> in the middle, été")


def stream_of(packed, split):
  rows = loader.Rows(packed, split)
  return rows.read(range(len(rows))).reshape(-1)


def expected_stream(config, tokenizer, split):
  ids = []
  for _, text in sources.documents(config).split(split):
    if text:
      ids += tokenizer.encode(text).tolist() + [tokenizer.boundary_id]
  return ids


def test_blocks_are_the_documents_with_boundaries_in_order(tmp_path):
  write_documents(tmp_path)
  config, tokenizer = data_config(tmp_path), tokenizers.load("bytes")
  # 100 characters a part and 10 blocks a shard, so that blocks span both.
  packed = packing.prepare(config, tokenizer, 16, part_chars=100, shard_bytes=600)
  assert len(list(packed.directory.glob("*.array_record*"))) > 6
  for split in sources.SPLITS:
    expected = expected_stream(config, tokenizer, split)
    count = packed.metadata["splits"][split]
    assert stream_of(packed, split).tolist() == expected[:len(expected) // 16 * 16]
    assert count["tokens"] == len(expected) and count["dropped_tokens"] == len(expected) % 16
    assert count["bytes"] == count["tokens"] - count["documents"]
    assert packed.num_sequences[split] == count["sequences"] == len(expected) // 16
  counts = packed.metadata["splits"].values()
  assert sum(c["documents"] for c in counts) == 59 and sum(c["empty_documents"] for c in counts) == 1


def test_plain_tfds_opens_it_with_its_metadata(tmp_path):
  write_documents(tmp_path)
  tokenizer = tokenizers.load("bytes")
  packed = packing.prepare(data_config(tmp_path), tokenizer, 16)
  builder = tfds.builder_from_directory(packed.directory)
  assert builder.info.metadata["tokenizer_fingerprint"] == tokenizer.fingerprint
  assert builder.info.features["tokens"].np_dtype == np.uint16
  by_name = tfds.data_source(packed.directory.parent.name, data_dir=tmp_path / "cache", split="train")
  rows = np.concatenate([example["tokens"] for example in by_name])
  assert rows.tolist() == stream_of(packed, "train").tolist()
  assert builder.info.splits["train"].num_examples == packed.num_sequences["train"]


def test_second_call_finds_the_first_and_any_change_is_another_data_set(tmp_path):
  write_documents(tmp_path)
  config, tokenizer = data_config(tmp_path), tokenizers.load("bytes")
  first = packing.prepare(config, tokenizer, 16)
  before = (first.directory / "metadata.json").stat().st_mtime_ns
  assert packing.prepare(config, tokenizer, 16) == first
  assert (first.directory / "metadata.json").stat().st_mtime_ns == before
  directories = {first.directory, packing.prepare(config, tokenizer, 8).directory}
  directories.add(packing.prepare(data_config(tmp_path, test_fraction=0.3), tokenizer, 16).directory)
  (tmp_path / "text" / "0007.txt").write_text("changed")
  directories.add(packing.prepare(config, tokenizer, 16).directory)
  assert len(directories) == 4


@pytest.mark.parametrize("workers", [1, 2])
def test_tokens_are_the_same_for_any_number_of_workers(tmp_path, workers):
  write_documents(tmp_path)
  tokenizer = tokenizers.load("bytes")
  alone = packing.prepare(data_config(tmp_path), tokenizer, 16, part_chars=300)
  config = data_config(tmp_path, workers=workers, cache_dir=str(tmp_path / "other"))
  together = packing.prepare(config, tokenizer, 16, part_chars=200)
  assert together.directory != alone.directory
  for split in sources.SPLITS:
    assert stream_of(together, split).tolist() == stream_of(alone, split).tolist()


def test_ids_above_65535_survive(tmp_path):
  pairs = sorted((bytes([a, b]) for a in range(256) for b in range(256)), key=lambda p: p.isalpha())
  tokens = [bytes([i]) for i in range(256)] + pairs
  ranks = tmp_path / "big.tiktoken"
  ranks.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))
  (tmp_path / "text").mkdir()
  (tmp_path / "text" / "a.txt").write_text("zzzzzzzz")
  config = data_config(tmp_path, validation_fraction=0.0, test_fraction=0.0)
  packed = packing.prepare(config, tokenizers.load(str(ranks)), 5)
  assert packed.dtype == np.uint32
  assert stream_of(packed, "train").tolist() == [65791] * 4 + [65792]
  assert tfds.builder_from_directory(packed.directory).as_data_source(split="train")[0]["tokens"].tolist() == (
      [65791] * 4 + [65792])


def test_corpus_of_500_tokens_at_block_1024_is_one_clear_line(tmp_path):
  (tmp_path / "text").mkdir()
  (tmp_path / "text" / "a.txt").write_text("x" * 499)
  config = data_config(tmp_path, validation_fraction=0.0, test_fraction=0.0)
  with pytest.raises(ValueError, match=r"train split is smaller than one block of 1024 tokens \(train 500 tokens in 1"):
    packing.prepare(config, tokenizers.load("bytes"), 1024)


@pytest.mark.parametrize("files, fix", [
    (1, r"give more documents: several text files, or a \.jsonl file"),  # no fraction splits a single document
    (5, r"raise data\.validation_fraction, give more documents"),
])
def test_split_without_a_block_is_named_with_the_fix(tmp_path, files, fix):
  (tmp_path / "text").mkdir()
  for i in range(files):
    (tmp_path / "text" / f"{i}.txt").write_text("x" * (499 + i))
  with pytest.raises(ValueError, match=f"validation split is smaller .*{fix}"):
    packing.prepare(data_config(tmp_path, validation_fraction=1e-9, test_fraction=0.0), tokenizers.load("bytes"), 64)


def test_error_in_a_document_surfaces_and_leaves_no_data_set(tmp_path):
  write_documents(tmp_path)
  (tmp_path / "text" / "0040.txt").write_bytes(b"caf\xe9")
  with pytest.raises(ValueError, match=r"0040\.txt: invalid UTF-8 at byte 3"):
    packing.prepare(data_config(tmp_path), tokenizers.load("bytes"), 16, part_chars=100)
  assert not list((tmp_path / "cache").glob("*/1.0.0"))


def test_damaged_copy_is_an_error(tmp_path):
  write_documents(tmp_path)
  packed = packing.prepare(data_config(tmp_path), tokenizers.load("bytes"), 16)
  shard = next(packed.directory.glob("*-train.array_record*"))
  shard.write_bytes(shard.read_bytes()[:100])
  with pytest.raises(packing.DamagedError, match=r"100 bytes instead of \d+; the copy is damaged: delete"):
    packing.prepare(data_config(tmp_path), tokenizers.load("bytes"), 16)


def swap(a, b):
  content = a.read_bytes()
  a.write_bytes(b.read_bytes())
  b.write_bytes(content)


def flip(path, byte):
  content = bytearray(path.read_bytes())
  content[byte] ^= 4
  path.write_bytes(content)


def changed_json(path, **fields):
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("damage, message", [
    (lambda d, shards: swap(shards[0], shards[1]), "row 0 is not the one that was written"),
    (lambda d, shards: flip(shards[0], 200), "a row can't be read .*hash mismatch"),
    (lambda d, shards: shards[0].write_bytes(bytes(shards[0].stat().st_size)), "can't be"),
    (lambda d, shards: shards[1].unlink(), "00001-of-.* has no bytes instead of"),
    (lambda d, shards: flip(d / "train.crc32", 3), "train.crc32 is not as it was written"),
    (lambda d, shards: (d / "train.crc32").unlink(), "train.crc32 is missing"),
    (lambda d, shards: (d / "features.json").write_text(""), "can't be opened"),
    (lambda d, shards: (d / "dataset_info.json").write_text("[1]"), "can't be opened"),
    (lambda d, shards: (d / "metadata.json").write_text("{"), "metadata.json Expecting .* at column 2"),
    (lambda d, shards: (d / "metadata.json").write_text("[]"), "metadata.json is not as it was written"),
    (lambda d, shards: (d / "metadata.json").write_text("[" * 100_000), "metadata.json is nested too deeply"),
    (lambda d, shards: changed_json(d / "metadata.json", block_size=8), "metadata.json is not as it was written"),
], ids=lambda x: x if isinstance(x, str) else "")
def test_whatever_is_damaged_is_named_and_no_other_token_is_read(small, tmp_path, damage, message):
  directory = tmp_path / "copy" / "1.0.0"
  shutil.copytree(small.directory, directory)
  damage(directory, sorted(directory.glob("*-train.array_record*")))
  with pytest.raises(packing.DamagedError, match=f"1.0.0: .*{message}.*the copy is damaged: delete") as error:
    stream_of(packing.load(directory), "train")
  assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
  directory = tmp_path_factory.mktemp("small")
  write_documents(directory)
  return packing.prepare(data_config(directory), tokenizers.load("bytes"), 16, shard_bytes=600)


def test_a_data_set_of_before_there_were_checksums_is_read(small, tmp_path):
  directory = tmp_path / "copy" / "1.0.0"
  shutil.copytree(small.directory, directory)
  metadata = {k: v for k, v in json.loads((directory / "metadata.json").read_text()).items() if k not in ("checksums", "hash")}
  (directory / "metadata.json").write_text(json.dumps(metadata))
  assert stream_of(packing.load(directory), "train").tolist() == stream_of(small, "train").tolist()


def test_a_data_set_that_lies_under_the_name_of_another_is_refused(tmp_path):
  write_documents(tmp_path)
  config, tokenizer = data_config(tmp_path), tokenizers.load("bytes")
  one, other = (packing.prepare(config, tokenizer, size).directory for size in (8, 16))
  shutil.rmtree(one)
  os.rename(other, one)
  for call in packing.prepare, packing.find:
    with pytest.raises(packing.DamagedError, match="metadata.json has another block_size than the name of the directory"):
      call(config, tokenizer, 8)


@pytest.mark.parametrize("keeps_size_and_time", [False, True])
def test_a_source_that_changes_while_it_is_read_gives_no_data_set(tmp_path, monkeypatch, keeps_size_and_time):
  write_documents(tmp_path)
  config, tokenizer, changing = data_config(tmp_path), tokenizers.load("bytes"), tmp_path / "text" / "0040.txt"
  stream, before, time = sources.Files.stream, changing.read_text(), changing.stat().st_mtime_ns

  def changed_on_the_way(self, start=0):
    for number, document in enumerate(stream(self, start)):
      if number == 20:
        changing.write_text(before.replace("word", "wird") if keeps_size_and_time else "other")
        os.utime(changing, ns=(time, time))
      yield document

  monkeypatch.setattr(sources.Files, "stream", changed_on_the_way)
  with pytest.raises(ValueError, match="^data.source: files_0000 has changed while it was being prepared"):
    packing.prepare(config, tokenizer, 16, part_chars=200)
  monkeypatch.undo()
  assert not list((tmp_path / "cache").glob("*/1.0.0"))
  changing.write_text(before)  # what was read of the other text is not taken for this one's
  expected = expected_stream(config, tokenizer, "train")
  assert stream_of(packing.prepare(config, tokenizer, 16, part_chars=200), "train").tolist() == expected[:len(expected) // 16 * 16]


@pytest.mark.parametrize("damage", [
    lambda part: part.write_bytes(part.read_bytes()[:-8]),
    lambda part: flip(part, 5),
    lambda part: part.unlink(),
    lambda part: part.with_suffix(".json").write_text('{"path": "../../../1.0.0'),
    lambda part: changed_json(part.with_suffix(".json"), stream_documents=1),
], ids=["cut off", "flipped", "missing", "record", "count"])
def test_a_damaged_part_of_an_unfinished_preparation_is_made_again(tmp_path, monkeypatch, damage):
  write_documents(tmp_path)
  config, tokenizer = data_config(tmp_path), tokenizers.load("bytes")
  with monkeypatch.context() as patch, pytest.raises(InterruptedError):
    patch.setattr(packing, "_pack", interrupted)
    packing.prepare(config, tokenizer, 16, part_chars=300)
  part = sorted((tmp_path / "cache").glob("*/building/parts_300_*/*.tokens"))[2]
  damage(part)
  expected = expected_stream(config, tokenizer, "train")
  assert stream_of(packing.prepare(config, tokenizer, 16, part_chars=300), "train").tolist() == expected[:len(expected) // 16 * 16]


def interrupted(*_):
  raise InterruptedError


# --- other processes ---

PREPARE = """
import hashlib, json, multiprocessing, os, signal, sys
import ml_collections
from aogpt_jax.data import loader, packing, sources, tokenizers

def kill_at(document):
  stream = sources.Files.stream
  def cut_short(self, start=0):
    for number, d in enumerate(stream(self, start), start):
      if number == document:
        print("workers", *[child.pid for child in multiprocessing.active_children()], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
      yield d
  sources.Files.stream = cut_short

def kill_at_shard(shard):
  write = packing._write_shard
  def killed(path, prefix, rows):
    sums = write(path, prefix, rows)
    if int(path.name.split("-")[-3]) == shard:
      os.kill(os.getpid(), signal.SIGKILL)
    return sums
  packing._write_shard = killed

def main():
  config = ml_collections.ConfigDict(json.loads(sys.argv[1]))
  kill_at(int(sys.argv[2]))
  kill_at_shard(int(sys.argv[3]))
  packed = packing.prepare(config, tokenizers.load("bytes"), 16, part_chars=200, shard_bytes=600)
  rows = loader.Rows(packed, "train")
  print("digest", hashlib.sha256(rows.read(range(len(rows))).tobytes()).hexdigest())

if __name__ == "__main__":
  main()
"""


def start_preparing(tmp_path, config, kill_at=-1, kill_at_shard=-1):
  script = tmp_path / "prepare.py"
  script.write_text(PREPARE)
  return subprocess.Popen(
      [*PYTHON, str(script), config.to_json(), str(kill_at), str(kill_at_shard)], stdout=subprocess.PIPE, text=True,
      env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})


def digest(packed):
  return hashlib.sha256(stream_of(packed, "train").astype(np.int32).tobytes()).hexdigest()


def is_running(pid):
  """A zombie, which nobody has waited for, has no command line any more."""
  try:
    return bool(pathlib.Path(f"/proc/{pid}/cmdline").read_bytes())
  except FileNotFoundError:
    return False


@pytest.mark.parametrize("workers", [0, 1])
def test_preparation_killed_half_way_continues_with_its_finished_parts(tmp_path, workers):
  write_documents(tmp_path, 300)
  process = start_preparing(tmp_path, data_config(tmp_path, workers=workers), kill_at=200)
  children = re.search("^workers(.*)$", process.communicate(timeout=120)[0], re.MULTILINE)[1].split()
  assert process.returncode == -signal.SIGKILL and len(children) == workers
  deadline = time.monotonic() + 60
  while any(map(is_running, children)):  # A worker leaves with its parent.
    assert time.monotonic() < deadline
    time.sleep(0.01)
  assert not list((tmp_path / "cache").glob("*/1.0.0"))
  parts = len(list((tmp_path / "cache").glob("*/building/parts_200_*/*.json")))
  assert parts > 30

  tokenizer = tokenizers.load("bytes")
  encode, texts = tokenizer.encode, []
  tokenizer.encode = lambda text: texts.append(text) or encode(text)
  resumed = packing.prepare(data_config(tmp_path), tokenizer, 16, part_chars=200)
  assert 99 <= len(texts) < 299 - parts  # Each finished part holds more than one document.
  whole = packing.prepare(data_config(tmp_path, cache_dir=str(tmp_path / "other")), tokenizers.load("bytes"), 16)
  assert digest(resumed) == digest(whole)
  assert resumed.metadata["splits"] == whole.metadata["splits"]
  assert not (resumed.directory.parent / "building").exists()


def test_preparation_killed_between_its_shards_packs_again(tmp_path):
  write_documents(tmp_path)
  config, tokenizer = data_config(tmp_path), tokenizers.load("bytes")
  process = start_preparing(tmp_path, config, kill_at_shard=3)
  process.communicate(timeout=120)
  assert process.returncode == -signal.SIGKILL
  staged, = (tmp_path / "cache").glob("*/building/1.0.0")
  shards = sorted(staged.glob("*-train.array_record*"))
  assert len(shards) == 4
  shards[1].write_bytes(b"")  # as where the machine has lost its power
  expected = expected_stream(config, tokenizer, "train")
  packed = packing.prepare(config, tokenizer, 16, part_chars=200, shard_bytes=1200)
  assert stream_of(packed, "train").tolist() == expected[:len(expected) // 16 * 16]
  assert {path.name for path in packed.directory.glob("*array_record*")} == packed.metadata["shards"].keys()


def test_two_processes_at_once_prepare_one_data_set(tmp_path):
  write_documents(tmp_path, 400)
  config = data_config(tmp_path)
  processes = [start_preparing(tmp_path, config) for _ in range(2)]
  outputs = [p.communicate(timeout=60)[0].split("digest ")[-1].strip() for p in processes]
  assert [p.returncode for p in processes] == [0, 0]
  assert outputs == [digest(packing.prepare(config, tokenizers.load("bytes"), 16, part_chars=200))] * 2


def test_second_process_says_that_it_waits(tmp_path):
  write_documents(tmp_path)
  config = data_config(tmp_path)
  name = packing.prepare(config, tokenizers.load("bytes"), 16).directory.parent.name
  config.cache_dir = str(tmp_path / "other")
  (tmp_path / "other" / name).mkdir(parents=True)
  with open(tmp_path / "other" / name / "lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    process = start_preparing(tmp_path, config)
    assert process.stdout.readline().startswith("waiting for another process")
    assert process.poll() is None
  assert process.communicate(timeout=60)[0].startswith("digest ")
