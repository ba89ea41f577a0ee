"""Files that we read, damaged in all ways that a seeded generator thinks of: each is read, or refused in one line.

  python benchmarks/fuzz.py [--seconds=60] [--seed=0] [--only=NAME,...] [--list]

A kind of file after the other is written as it should be, damaged, and read as the commands read it: bits are flipped; bytes left
out, put in, repeated or cut off; values of JSON replaced by others, such as names with ../ in them, numbers of thousands of digits
or lists in lists in lists; pickles made to call something. Whoever reads it must return, or raise an error of a type that commands
print without a traceback, of one line. While it does, nothing may be executed, and nothing be written outside of its directory.

Prints a table, and each damage that was not borne, with the number that repeats it: --only=NAME --seed=SEED. Its status is 1 then.
"""

import argparse
from collections.abc import Callable, Iterator
import contextlib
import copy
import dataclasses
import gzip
import io
import json
import logging
import os
import pathlib
import pickle
import random
import shutil
import sys
import tempfile
import time
import traceback
from typing import Any
import warnings
import zipfile

import ml_collections
import numpy as np

from aogpt_jax import config as config_lib
from aogpt_jax import console
from aogpt_jax.data import loader
from aogpt_jax.data import packing
from aogpt_jax.data import sources
from aogpt_jax.data import tokenizers

# What commands print as one line.
REFUSED = (ValueError, OSError, ImportError, FloatingPointError)


# --- what is done to a file ---

HOSTILE = ("../../../outside", "/tmp/outside", "..\\..\\x", "a\nb\x1b[2J", "\ud800", "", "x" * 3000, "__import__('os').system('x')", "${HOME}",
           -1, 0, 2**31, 2**63, 10**40, 10**400, 1.5, 1e308, float("nan"), float("inf"), True, None, [], {}, [[]], [None], {"": None},
           {"__class__": "os"}, [1] * 1000)
BYTES = (b"../../../outside\x00", b"[" * 50_000, b'{"a":' * 20_000, b"9" * 5000, b"NaN", b"\xff\xfe", b"\xef\xbb\xbf", b"\x00" * 9,
         b"-", b'"', b"\n", b"\r", b",", b"}", b"1e999", b"\xed\xa0\x80", b"\\ud800")


def damaged(data: bytes, rng: random.Random) -> bytes:
  """Bytes with one to three things done to them."""
  data = bytearray(data)
  for _ in range(rng.choice((1, 1, 2, 3))):
    at, length = rng.randrange(len(data) + 1), rng.choice((1, 2, 8, 100))
    match rng.randrange(7):
      case 0 if data:
        data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
      case 1:
        del data[at:]
      case 2:
        del data[at:at + length]
      case 3:
        data[at:at] = rng.randbytes(length)
      case 4:
        data[at:at] = data[at:at + length] * rng.choice((1, 3))
      case 5:
        data[at:at + length] = rng.choice(BYTES)
      case _:
        other = rng.randrange(len(data) + 1)
        data[at:at + length], data[other:other + length] = data[other:other + length], data[at:at + length]
  return bytes(data)


def damaged_value(value: Any, rng: random.Random) -> Any:
  """What JSON stands for, with one of its parts another, twice there or left out."""
  value, places = copy.deepcopy(value), []

  def visit(node):
    for key in node if isinstance(node, dict) else range(len(node)):
      places.append((node, key))
      if isinstance(node[key], (dict, list)):
        visit(node[key])

  if isinstance(value, (dict, list)):
    visit(value)
  if not places or rng.random() < 0.05:
    return rng.choice(HOSTILE)
  node, key = rng.choice(places)
  match rng.randrange(6):
    case 0 if isinstance(node, dict):
      del node[key]
    case 1 if isinstance(node, dict):
      node[str(rng.choice(HOSTILE))[:4000]] = node.pop(key)
    case 2:
      _, other = rng.choice(places)
      node[key] = copy.deepcopy(rng.choice(places)[0])
    case _:
      node[key] = rng.choice(HOSTILE)
  return value


def damaged_json(data: bytes, rng: random.Random) -> bytes:
  """The same of a JSON file, or of one of a value a line; now and then of its bytes."""
  lines = data.splitlines() if data.count(b"\n") > 1 and data.lstrip()[:1] in b"{[" and _is_json(data.splitlines()[0]) else [data]
  i = rng.randrange(len(lines))
  if rng.random() < 0.3 or not _is_json(lines[i]):  # Orbax has empty files and such of other kinds beside its JSON
    return damaged(data, rng)
  sys.set_int_max_str_digits(0)
  try:
    lines[i] = json.dumps(damaged_value(json.loads(lines[i]), rng)).encode()
  finally:
    sys.set_int_max_str_digits(4300)
  return b"\n".join(lines) + b"\n"


def _is_json(line: bytes) -> bool:
  try:
    json.loads(line)
  except ValueError:
    return False
  return True


def damaged_safetensors(data: bytes, rng: random.Random) -> bytes:
  """A length, that many bytes of JSON, and the arrays."""
  length = int.from_bytes(data[:8], "little")
  if rng.random() < 0.4:
    return damaged(data, rng)
  header = damaged_json(data[8:8 + length], rng)
  return len(header).to_bytes(8, "little") + header + data[8 + length:]


class _Call:
  def __reduce__(self):
    return os.system, ("touch outside",)


def damaged_zip(data: bytes, rng: random.Random) -> bytes:
  """A zip file of which one part is damaged inside, under another name, or a pickle that calls something."""
  if rng.random() < 0.3:
    return damaged(data, rng)
  written = io.BytesIO()
  with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(written, "w") as new:
    names = old.namelist()
    chosen = rng.choice([name for name in names if name.endswith("data.pkl")] or names) if rng.random() < 0.6 else rng.choice(names)
    for name in names:
      content = old.read(name)
      if name == chosen:
        match rng.randrange(4):
          case 0:
            content = pickle.dumps(_Call())
          case 1:
            name = rng.choice(("../outside", "/tmp/outside", name + "x", "."))
          case _:
            content = damaged(content, rng)
      new.writestr(name, content)
  return written.getvalue()


def damaged_gzip(data: bytes, rng: random.Random) -> bytes:
  return damaged(data, rng) if rng.random() < 0.5 else gzip.compress(damaged(gzip.decompress(data), rng))


# --- the files ---


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of file.

  Attributes:
    write: makes the whole files in an empty directory.
    read: reads them.
    how: pattern of files -> what is done to one of them.
  """

  write: Callable[[pathlib.Path], None]
  read: Callable[[pathlib.Path], Any]
  how: dict[str, Callable[[bytes, random.Random], bytes]]


def _data_config(directory: pathlib.Path, source: str, **fields) -> ml_collections.ConfigDict:
  config = config_lib.default_config().data
  config.update(source=source.format(directory), cache_dir=f"{directory}/cache", validation_fraction=0.2, test_fraction=0.2,
                tokenizer="bytes", **fields)
  return config


def _documents(name: str, content: bytes, source: str = "files:{}/" , **fields) -> Kind:
  def write(directory):
    (directory / name).write_bytes(content)

  def read(directory):
    for document in sources.documents(_data_config(directory, source + name, **fields)).stream():
      document.text.encode()

  how = {".jsonl": damaged_json, ".gz": damaged_gzip}.get(pathlib.Path(name).suffix, damaged)
  return Kind(write, read, {name: how})


def _write_packed(directory: pathlib.Path) -> None:
  text = directory / "text.txt"
  text.write_text("".join(f"{i} some words of a line\n" for i in range(60)))
  packed = packing.prepare(_data_config(directory, "lines:{}/text.txt"), tokenizers.load("bytes"), 16, shard_bytes=1200)
  for path in packed.directory.iterdir():
    path.rename(directory / path.name)
  shutil.rmtree(directory / "cache")
  rows = loader.Rows(packing.load(directory), "train")
  np.save(directory / "rows.npy", rows.read(range(len(rows))))


def _read_packed(directory: pathlib.Path) -> None:
  rows = loader.Rows(packing.load(directory), "train")
  tokens = rows.read(range(len(rows)))
  if not np.array_equal(tokens, np.load(directory / "rows.npy")):
    raise AssertionError("other tokens were read, and nothing was said")


def _write_ranks(directory: pathlib.Path) -> None:
  import base64
  tokens = [bytes([i]) for i in range(256)] + [b"th", b"the", b" the", b"in"]
  (directory / "r.tiktoken").write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))


def _read_ranks(directory: pathlib.Path) -> None:
  tokenizers.known_vocab_size(f"{directory}/r.tiktoken")
  tokenizer = tokenizers.load(f"{directory}/r.tiktoken")
  text = "in the theatre \u00e9\U0001f600"
  assert tokenizer.decode(tokenizer.encode(text)) == text


def _read_prompts(directory: pathlib.Path) -> None:
  from aogpt_jax.sampling import prompts
  config = config_lib.default_config().sample
  for path in directory.glob("p.*"):
    config.prompt_file = str(path)
    prompts.load(config, tokenizers.load("bytes"), 16)


def _write_prompts(directory: pathlib.Path) -> None:
  (directory / "p.jsonl").write_text('{"prompt": "a [[3]] b", "id": 1}\n{"prompt": "\\u00e9"}\n')
  (directory / "p.txt").write_text("a [[3]] b\n[[2]]\u00e9\n")


def _write_run(directory: pathlib.Path) -> None:
  """The files of a run with made-up figures."""
  from aogpt_jax.evaluation import likelihood
  config = config_lib.default_config()
  config.update_from_flattened_dict({"steps": 40, "data.tokenizer": "bytes", "model.block_size": 16, "model.vocab_size": 320,
                                     "model.layers": 1, "model.width": 16, "model.heads": 2, "batch_size": 8})
  records = [{"step": s, "loss": 5 / s, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens_per_second": 5.0, "batch_hash": "00ff"}
             for s in range(1, 41)]
  records += [{"step": s, "eval/left_to_right/nats_per_token": 3.0, "eval/left_to_right/stderr_sequences": 0.1} for s in (20, 40)]
  lines = lambda records: "".join(json.dumps(r) + "\n" for r in records)
  (directory / "metrics.jsonl").write_text(lines(records))
  (directory / "starts.jsonl").write_text(lines([{
      "step": 0, "time": "2026-01-02T03:04:05+00:00", "command": ["main.py"], "python": "3.11", "commit": "abc", "cores": 2,
      "versions": {"jax": "0.10"}, "devices": 1, "device_kind": "cpu", "platform": "cpu", "processes": 1, "machine": "x86_64",
      "system": "Linux", "text": {"train": "00"}, "config": config.to_dict()}]))
  nats = np.random.default_rng(0).normal(40, 3, 20)
  found = {k: v for k, v in vars(likelihood.summary(nats[None], np.full(20, 16.0), 320)).items() if not k.startswith("sequence_")}
  found = {k: None if isinstance(v, float) and v != v else v for k, v in found.items()}
  (directory / "eval_validation.json").write_text(json.dumps({
      "step": 40, "split": "validation", "source": "stdlib", "weights": "ema", "text": "ab", "limit": 0, "seed": 0,
      "config": config.to_dict(), "entropies": {"unigram": 3.0, "bigram": 2.6, "tokens": 800}, "left_to_right": found,
      "ensemble": {}, "mdm_gap": None}))
  np.savez_compressed(directory / "eval_validation.npz", tokens=np.full(20, 16.0), left_to_right=nats)
  (directory / "samples.jsonl").write_text(lines([
      {"text": f"some words {i}", "order": "uniform", "evaluations": 16, "sampler": {"temperature": 0.8, "top_p": 1.0}, "prompt": ""}
      for i in range(3)]))
  (directory / "conversion.json").write_text(json.dumps({"source": "a.pt"}))
  (directory / "generative.json").write_text(json.dumps({"judge": {"name": "gpt2"}, "results": [
      {"sampler": {"order": "uniform", "steps": 4}, "samples": 3, "perplexity": 30.0, "entropy": 4.0}], "warnings": []}))


def _read_run(directory: pathlib.Path) -> None:
  from aogpt_jax import convert
  from aogpt_jax.conversion import model_card
  from aogpt_jax.evaluation import generative
  from aogpt_jax.evaluation import held_out
  from aogpt_jax.report import page
  from aogpt_jax.report import runs
  from aogpt_jax.training import curves
  from aogpt_jax.training import metrics
  config = config_lib.default_config()
  held_out.is_done(directory, config)
  curves.evaluations(metrics.read(directory))
  model_card._json(directory / "eval_validation.json")
  for read in (lambda: convert._origin(directory), lambda: generative.read_samples(f"{directory}/samples.jsonl")):
    with contextlib.suppress(*REFUSED):
      read()
  record = runs.read(directory, "a run")
  page.html_page([record], ["It is left out."], 4)


def _write_events(directory: pathlib.Path) -> None:
  import tensorboardX
  writer = tensorboardX.SummaryWriter(str(directory))
  for step in range(5):
    writer.add_scalar("train/loss", 1.0, step)
  writer.close()


def _read_events(directory: pathlib.Path) -> None:
  from aogpt_jax.training import trackers
  trackers.drop_after(directory, 2)


def _write_gpt2(directory: pathlib.Path) -> None:
  from safetensors import numpy as safetensors
  rng, width = np.random.default_rng(0), 8
  shapes = {"wte.weight": (20, width), "wpe.weight": (8, width), "ln_f.weight": (width,), "ln_f.bias": (width,)}
  for name, shape in (("ln_1.weight", (width,)), ("ln_1.bias", (width,)), ("ln_2.weight", (width,)), ("ln_2.bias", (width,)),
                      ("attn.c_attn.weight", (width, 24)), ("attn.c_attn.bias", (24,)), ("attn.c_proj.weight", (width, width)),
                      ("attn.c_proj.bias", (width,)), ("mlp.c_fc.weight", (width, 32)), ("mlp.c_fc.bias", (32,)),
                      ("mlp.c_proj.weight", (32, width)), ("mlp.c_proj.bias", (width,))):
    shapes[f"h.0.{name}"] = shape
  safetensors.save_file({k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}, directory / "model.safetensors")
  (directory / "config.json").write_text(json.dumps(dict(
      model_type="gpt2", activation_function="gelu_new", n_layer=1, n_embd=width, n_head=2, n_positions=8, vocab_size=20,
      layer_norm_epsilon=1e-5)))


def _read_gpt2(directory: pathlib.Path) -> None:
  from aogpt_jax.models import gpt2
  gpt2.load(str(directory))


def _published():
  from aogpt_jax.conversion import names
  from aogpt_jax.conversion import published
  model_args = dict(n_layer=1, n_head=2, n_embd=8, block_size=8, vocab_size=20, bias=True, dropout=0.0)
  rng = np.random.default_rng(0)
  shapes = {p.name: p.shape for p in names.parameters(published.model_of("AO-GPT", model_args))}
  arrays = lambda: {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
  settings = dict(learning_rate=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, ema_rate=0.999, train_mode="Random",
                  batch_size=4)
  return published.Published("AO-GPT", model_args, settings, 5, arrays(), arrays(), published.Moments(5, arrays(), arrays()))


def _write_export(directory: pathlib.Path) -> None:
  from aogpt_jax.conversion import model_directory
  model_directory.write(directory, _published(), "ema", "a card")


def _read_export(directory: pathlib.Path) -> None:
  from aogpt_jax.conversion import model_directory
  from aogpt_jax.conversion import settings
  p, _ = model_directory.read(directory)
  settings.to_config(p.kind, p.model_args, p.settings, p.step)


def _write_torch(directory: pathlib.Path) -> None:
  from aogpt_jax.conversion import torch_file
  torch_file.write(directory / "ckpt.pt", _published(), 1e-3, False)


def _read_torch(directory: pathlib.Path) -> None:
  from aogpt_jax.conversion import settings
  from aogpt_jax.conversion import torch_file
  p = torch_file.read(directory / "ckpt.pt", "ema", True)
  settings.to_config(p.kind, p.model_args, p.settings, p.step)


def _write_checkpoint(directory: pathlib.Path) -> None:
  import jax
  from aogpt_jax import models
  from aogpt_jax import sharding
  from aogpt_jax.training import checkpoints
  from aogpt_jax.training import step as step_lib
  config = config_lib.default_config()
  config.update_from_flattened_dict({
      "data.tokenizer": "bytes", "model.layers": 1, "model.width": 8, "model.heads": 2, "model.block_size": 8,
      "model.vocab_size": 320, "model.cond_width": 4, "model.dtype": "float32", "batch_size": 8})
  mesh = sharding.make_mesh(config)
  saver = checkpoints.Checkpoints(directory, config)
  saver.save(step_lib.make_trainer(config, models.build_model(config, mesh), mesh).init())
  saver.close()
  del jax


def _read_checkpoint(directory: pathlib.Path) -> None:
  from aogpt_jax.training import checkpoints
  checkpoints.load_tokenizer(directory)
  checkpoints.load_model(directory)


def _write_results(directory: pathlib.Path) -> None:
  (directory / "core_seconds.json").write_text("12.5")
  (directory / "results.json").write_text(json.dumps({
      "about": {"command": "c", "core_seconds": 5, "seeds": 1, "units": 1, "machine": "2 cores", "versions": "v"},
      "units": [{"arm": "uniform", "seed": 0, "config": "ab", "steps": 4, "final": {"uniform": 3.0}, "curves": {"uniform": [[1, 2.0]]}}]}))


def _read_results(directory: pathlib.Path) -> None:
  from aogpt_jax import sweep
  from aogpt_jax.decoding import measurements
  from aogpt_jax.findings import results
  sweep.core_seconds(directory, 0.0)
  with contextlib.suppress(*REFUSED):
    measurements.Kept(directory / "results.json")
  results.read(directory / "results.json")


LINES = b"".join(b'{"text": "some words %d", "q": "a [[]] b", "a": ["x"], "n": 3}\n' % i for i in range(8))
TABLE = "text,q,a\n" + "".join(f'"some, words ""{i}""",a [[]] b,x\n' for i in range(8)) + "\u00e9,b,c\n"
SLOW = ("run", "torch", "checkpoint")  # not in the suite
KINDS = {
    "text": _documents("a.txt", "some words \u00e9\n".encode() * 9),
    "lines": _documents("a.txt", "some words \u00e9\n".encode() * 9, "lines:{}/"),
    "gzip": _documents("a.txt.gz", gzip.compress(b"some words\n" * 20, mtime=0)),
    "jsonl": _documents("a.jsonl", LINES),
    "jsonl.gz": _documents("a.jsonl.gz", gzip.compress(LINES, mtime=0)),
    "examples": _documents("a.jsonl", LINES, prompt_field="q", completion_field="a"),
    "csv": _documents("a.csv", TABLE.encode()),
    "tsv.gz": _documents("a.tsv.gz", gzip.compress(TABLE.replace(",", "\t").encode(), mtime=0), prompt_field="q",
                         completion_field="a"),
    "packed": Kind(_write_packed, _read_packed, {"metadata.json": damaged_json, "dataset_info.json": damaged_json,
                                                 "features.json": damaged_json, "*.crc32": damaged, "*-train.array_record*": damaged}),
    "ranks": Kind(_write_ranks, _read_ranks, {"r.tiktoken": damaged}),
    "prompts": Kind(_write_prompts, _read_prompts, {"p.jsonl": damaged_json, "p.txt": damaged}),
    "run": Kind(_write_run, _read_run, {"*.jsonl": damaged_json, "*.json": damaged_json, "*.npz": damaged_zip}),
    "results": Kind(_write_results, _read_results, {"*.json": damaged_json}),
    "events": Kind(_write_events, _read_events, {"events.*": damaged}),
    "gpt2": Kind(_write_gpt2, _read_gpt2, {"config.json": damaged_json, "model.safetensors": damaged_safetensors}),
    "export": Kind(_write_export, _read_export, {"config.json": damaged_json, "model.safetensors": damaged_safetensors}),
    "torch": Kind(_write_torch, _read_torch, {"ckpt.pt": damaged_zip}),
    "checkpoint": Kind(_write_checkpoint, _read_checkpoint, {
        "checkpoints/0/config/*": damaged_json, "checkpoints/0/checksums/*": damaged_json, "checkpoints/0/_*": damaged_json,
        "checkpoints/0/ema/_*": damaged_json, "checkpoints/0/ema/**/*": damaged}),
}


# --- watching ---

_EXECUTES = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "pty.spawn", "socket.connect", "ctypes.dlopen")
_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate", "shutil.rmtree")


class Watch:
  """Notes what this process executes and where it writes while it is switched on; there is no way to take it away again."""

  def __init__(self):
    self.directory, self.seen = None, []
    sys.addaudithook(self._note)

  def _note(self, event: str, args: tuple[Any, ...]) -> None:
    if self.directory is None:
      return
    if event in _EXECUTES:
      self.seen.append(f"{event} {args[:1]}")
    paths = args[:2] if event in ("os.rename", "os.link", "os.symlink") else args[:1]
    if event in _CHANGES or event == "open" and self._writes(args):
      for path in paths:
        if isinstance(path, (str, bytes, os.PathLike)) and not self._is_inside(os.fsdecode(path)):
          self.seen.append(f"{event} {path!r}")

  @staticmethod
  def _writes(args: tuple[Any, ...]) -> bool:
    return bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) if isinstance(args[2], int) else False

  def _is_inside(self, path: str) -> bool:
    # Compiled modules and programs are kept elsewhere, whatever is read.
    known = (self.directory, "/dev/", "/proc/", *self._caches())
    return os.path.abspath(path).startswith(known) or "__pycache__" in path

  @staticmethod
  def _caches() -> tuple[str, ...]:
    import jax
    return tuple(filter(None, [jax.config.jax_compilation_cache_dir]))

  @contextlib.contextmanager
  def on(self, directory: pathlib.Path) -> Iterator[list[str]]:
    self.seen, self.directory = [], str(directory.resolve())
    try:
      yield self.seen
    finally:
      self.directory = None


def attempt(kind: Kind, whole: pathlib.Path, directory: pathlib.Path, rng: random.Random, watch: Watch) -> tuple[str, str]:
  """Damages a file of a kind and reads it: "read", "refused" or what must not be; and what was said."""
  shutil.rmtree(directory, ignore_errors=True)
  shutil.copytree(whole, directory)
  files = [(path, how) for pattern, how in kind.how.items() for path in sorted(directory.glob(pattern)) if path.is_file()]
  path, how = rng.choice(files)
  path.write_bytes(how(path.read_bytes(), rng))
  with watch.on(directory) as seen, contextlib.redirect_stdout(io.StringIO()):
    try:
      with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind.read(directory)
      outcome, message = "read", ""
    except REFUSED as e:
      message = str(e)
      one_line = all(line.isprintable() for line in message.split("\n")) and (
          "\n" not in message or isinstance(e, config_lib.ConfigError))
      outcome = "refused" if one_line and message else f"{path.name}: no line: {type(e).__name__}: {message!r}"
    except BaseException as e:  # pylint: disable=broad-exception-caught  # that it is one is what is looked for
      if isinstance(e, KeyboardInterrupt):
        raise
      last = traceback.extract_tb(e.__traceback__)[-3:]
      outcome = f"{path.name}: {type(e).__name__}: {str(e)[:200]!r} at " + ", ".join(f"{f.filename}:{f.lineno}" for f in last)
      message = ""
  if seen:
    outcome = f"{path.name}: {'; '.join(seen[:3])}"
  return outcome, message


def attempts(name: str, seed: int, directory: pathlib.Path, watch: Watch) -> Iterator[tuple[str, str]]:
  """Endless attempts on a kind, the same ones for a seed, as `attempt` has them."""
  whole = directory / "whole"
  whole.mkdir(parents=True)
  kind = KINDS[name]
  kind.write(whole)
  kind.read(shutil.copytree(whole, directory / "damaged"))  # undamaged, it is read
  for number in range(2**62):
    yield attempt(kind, whole, directory / "damaged", random.Random(f"{seed} {name} {number}"), watch)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--seconds", type=float, default=60.0, help="of all kinds together")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--only", default="", help="names of kinds, with commas")
  parser.add_argument("--list", action="store_true", help="print the names")
  arguments = parser.parse_args()
  if arguments.list:
    print("\n".join(KINDS))
    return
  chosen = arguments.only.split(",") if arguments.only else list(KINDS)
  unknown = [name for name in chosen if name not in KINDS]
  if unknown:
    sys.exit(f"error: --only: there is no kind {unknown[0]!r}; the kinds are {', '.join(KINDS)}")
  logging.disable(logging.WARNING)
  console.be_quiet(True)
  watch, bad, rows = Watch(), [], []
  with tempfile.TemporaryDirectory(prefix="fuzz_") as directory:
    for i, name in enumerate(chosen):
      counts, begin = {"read": 0, "refused": 0, "bad": 0}, time.monotonic()
      for number, (outcome, _) in enumerate(attempts(name, arguments.seed, pathlib.Path(directory) / name.replace(".", "_"), watch)):
        if outcome in counts:
          counts[outcome] += 1
        else:
          counts["bad"] += 1
          if outcome not in bad:
            bad.append(outcome)
            print(f"{name} {number}: {outcome}", flush=True)
        if time.monotonic() - begin > arguments.seconds / len(chosen):
          break
      rows.append((name, sum(counts.values()), counts["read"], counts["refused"], counts["bad"]))
      print(f"{i + 1} of {len(chosen)}: {name}, {rows[-1][1]} attempts", file=sys.stderr, flush=True)
  print("| files | damaged | read | refused in a line | neither |\n|---|---|---|---|---|")
  for row in [*rows, ("all", *(sum(row[i] for row in rows) for i in range(1, 5)))]:
    print("| " + " | ".join(map(str, row)) + " |")
  if bad:
    sys.exit(1)


if __name__ == "__main__":
  main()
