import base64
import os
import pathlib
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from aogpt_jax.data import tokenizers
from conftest import PYTHON

TEXT = "Hello, wörld!  <|endoftext|> isn't 日本語\n\n\tdone 12345 \U0001f600  "


def write_ranks(path, tokens):
  path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))
  return str(path)


SINGLE = [bytes([i]) for i in range(256)]


@pytest.fixture(scope="module")
def gpt2_ranks(tmp_path_factory):
  """GPT-2's rank file out of the wheel of mlx-whisper, which pip can find where tiktoken's host is unreachable."""
  directory = tmp_path_factory.mktemp("wheel")
  download = subprocess.run(
      [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-input", "--retries=0", "--timeout=10",
       "-d", str(directory), "mlx-whisper"], capture_output=True, text=True)
  wheels = list(directory.glob("*.whl"))
  if not wheels:
    pytest.skip(f"GPT-2's ranks: pip cannot download mlx-whisper ({download.stderr.strip()[-120:]})")
  with zipfile.ZipFile(wheels[0]) as wheel:
    return wheel.extract("mlx_whisper/assets/gpt2.tiktoken", directory)


def test_bytes_round_trip():
  tokenizer = tokenizers.load("bytes")
  ids = tokenizer.encode(TEXT)
  assert ids.tolist() == list(TEXT.encode()) and ids.dtype == np.uint16
  assert tokenizer.decode(ids) == TEXT
  assert (tokenizer.vocab_size, tokenizer.boundary_id) == (257, 256)


def test_gpt2_ranks_give_the_known_ids_and_round_trip(gpt2_ranks):
  tokenizer = tokenizers.load(gpt2_ranks)
  assert (tokenizer.vocab_size, tokenizer.boundary_id, tokenizer.dtype) == (50257, 50256, np.uint16)
  # As printed in GPT-2's and tiktoken's documentation.
  assert tokenizer.encode("hello world").tolist() == [31373, 995]
  assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_gpt2_pattern_is_that_of_tiktoken(gpt2_ranks):
  import tiktoken
  from tiktoken_ext import openai_public
  ranks = {base64.b64decode(t): int(r) for t, r in map(str.split, pathlib.Path(gpt2_ranks).read_text().splitlines())}
  theirs = tiktoken.Encoding("theirs", pat_str=openai_public.r50k_pat_str, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": 50256})
  text = pathlib.Path(tokenizers.__file__).read_text() + TEXT
  assert tokenizers.load(gpt2_ranks).encode(text).tolist() == theirs.encode_ordinary(text)


def test_end_of_text_in_a_text_is_plain_text(tmp_path):
  for spec in ("bytes", write_ranks(tmp_path / "r.tiktoken", SINGLE + [b"<|"])):
    tokenizer = tokenizers.load(spec)
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.boundary_id not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"
    assert tokenizer.decode([97, tokenizer.boundary_id, 98]) == "a<|endoftext|>b"


def test_decode_never_raises():
  tokenizer = tokenizers.load("bytes")
  assert tokenizer.decode([104, 257, 303, -1, 105]) == "h\ufffd\ufffd\ufffdi"
  assert tokenizer.decode([0xC3]) == "\ufffd"
  assert tokenizer.decode([]) == ""


def test_merges_follow_their_ranks(tmp_path):
  tokenizer = tokenizers.load(write_ranks(tmp_path / "My ranks.tiktoken", SINGLE + [b"th", b"the", b" the"]))
  assert tokenizer.encode("the the").tolist() == [257, 258]
  assert (tokenizer.vocab_size, tokenizer.boundary_id, tokenizer.name) == (260, 259, "my_ranks")
  assert tokenizer.token_bytes()[[97, 257, 258, 259]].tolist() == [1, 3, 4, 0]
  assert tokenizer.token_bytes().dtype == np.int32 and len(tokenizer.token_bytes()) == 260


def test_more_than_65536_ids_are_uint32(tmp_path):
  pairs = sorted((bytes([a, b]) for a in range(256) for b in range(256)), key=lambda p: p.isalpha())
  tokenizer = tokenizers.load(write_ranks(tmp_path / "big.tiktoken", SINGLE + pairs))
  ids = tokenizer.encode("zzzz")
  assert tokenizer.vocab_size == 65793 and tokenizer.dtype == np.uint32
  assert ids.tolist() == [65791, 65791] and tokenizer.decode(ids) == "zzzz"


def test_long_text_has_the_tokens_of_one_call(tmp_path):
  tokenizer = tokenizers.load(write_ranks(tmp_path / "r.tiktoken", SINGLE + [b"  ", b"    ", b"\n\n", b"ab", b" ab"]))
  text = "ab  ab\n\n   c     " * 100_000
  assert len(text) > 1 << 20
  assert tokenizer.encode(text).tolist() == tokenizer._encode_ordinary(text)


def test_fingerprint_is_that_of_the_ranks(tmp_path):
  a = tokenizers.load(write_ranks(tmp_path / "a.tiktoken", SINGLE + [b"ab"]))
  b = tokenizers.load(write_ranks(tmp_path / "b.tiktoken", SINGLE + [b"ab"]))
  c = tokenizers.load(write_ranks(tmp_path / "c.tiktoken", SINGLE + [b"ac"]))
  assert a.fingerprint == b.fingerprint != c.fingerprint != tokenizers.load("bytes").fingerprint


def test_vocabulary_size_is_known_without_loading(tmp_path):
  path = write_ranks(tmp_path / "a.tiktoken", SINGLE + [b"ab"])
  assert tokenizers.known_vocab_size("bytes") == 257
  assert tokenizers.known_vocab_size("gpt2") == 50257
  assert tokenizers.known_vocab_size(path) == tokenizers.load(path).vocab_size == 258
  assert tokenizers.known_vocab_size("gpt-2") is None


@pytest.mark.parametrize("lines, message", [
    ([b"YQ== 0", b"nonsense"], r":2: not a tiktoken rank line"),
    ([b"YQ== zero"], r":1: not a tiktoken rank line"),
    ([b"YQ 0"], r":1: not a tiktoken rank line"),
    ([b"YQ== 0", b"YQ== 1"], r":2: token b'a' is empty or repeated"),
    ([b"YQ== 0", b"Yg== 2"], r"2 ranks are not 0\.\.1"),
    ([b"YQ== 0"], r"255 of the 256 single bytes have no rank"),
])
def test_bad_rank_file_is_one_clear_line(tmp_path, lines, message):
  path = tmp_path / "bad.tiktoken"
  path.write_bytes(b"\n".join(lines))
  with pytest.raises(ValueError, match=message):
    tokenizers.load(str(path))


def test_missing_rank_file_is_one_clear_line():
  with pytest.raises(FileNotFoundError, match="'gpt-2' is neither 'bytes' nor 'gpt2'"):
    tokenizers.load("gpt-2")


def test_gpt2_without_a_network_is_one_clear_line_in_seconds(tmp_path):
  # A resolver that knows no host, and an empty cache, whatever this machine has.
  code = ("import socket; from aogpt_jax.data import tokenizers\n"
          "def no_network(*a, **k): raise socket.gaierror(-2, 'Name or service not known')\n"
          "socket.getaddrinfo = no_network\n"
          "try: tokenizers.load('gpt2')\n"
          "except ConnectionError as e: print(e)\n")
  environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
  out = subprocess.run(
      [*PYTHON, "-c", code], capture_output=True, text=True, timeout=60,
      env=environment | {"TIKTOKEN_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)})
  assert out.stdout.count("\n") == 1 and "local GPT-2 rank file" in out.stdout, out
