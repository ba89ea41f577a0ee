"""Tokenizers: UTF-8 bytes, GPT-2 BPE, or a local tiktoken rank file with GPT-2's pattern.

Every tokenizer has one id beyond its text ids, the document boundary. It never comes out of `encode`:
"<|endoftext|>" inside a text is plain text.
"""

import base64
import binascii
import functools
import hashlib
import os
import re
import socket
import tempfile
import urllib.request

import numpy as np

BOUNDARY = "<|endoftext|>"

# The pattern of the GPT-2 release, which cuts a text into the pieces that BPE works on.
GPT2_PATTERN = (
    r"""'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
)
_GPT2_RANKS = 50256
# V' of those that have a name instead of a file.
VOCAB_SIZES = {"bytes": 257, "gpt2": _GPT2_RANKS + 1}
_GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"

# GPT2_PATTERN always ends a piece between a non-space and a space, so a long text may be cut there
# without changing a token; a text of gigabytes then never becomes one list of Python ints.
_CHUNK = 1 << 20
_CUT = re.compile(r"(?<=\S)(?=\s)")


class Tokenizer:
  """Text <-> token ids.

  Attributes:
    spec: the string that `load` was given.
    name: readable, fit for a directory name.
    vocab_size: V', all ids including the boundary.
    boundary_id: the id put after each document.
    dtype: uint16 if V' <= 65536, else uint32.
    fingerprint: sha256 hex digest of all that determines `encode`.
  """

  def __init__(self, spec: str, name: str, token_bytes: list[bytes], encode_ordinary):
    self.spec = spec
    self.name = name
    self.boundary_id = len(token_bytes)
    self.vocab_size = len(token_bytes) + 1
    self.dtype = np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)
    self._token_bytes = token_bytes
    self._encode_ordinary = encode_ordinary
    digest = hashlib.sha256((GPT2_PATTERN if encode_ordinary else "bytes").encode())
    for token in token_bytes:
      digest.update(len(token).to_bytes(4, "little") + token)
    self.fingerprint = digest.hexdigest()

  def encode(self, text: str) -> np.ndarray:
    """Returns the ids of `text`, [n] of `dtype`; the boundary id is never among them."""
    if self._encode_ordinary is None:
      return np.frombuffer(text.encode("utf-8"), np.uint8).astype(self.dtype)
    ids = [np.asarray(self._encode_ordinary(piece), self.dtype) for piece in _pieces(text)]
    return np.concatenate(ids) if ids else np.zeros(0, self.dtype)

  def decode(self, ids) -> str:
    """Returns the text of `ids` (any integer sequence); never raises.

    The boundary reads "<|endoftext|>"; an id outside the vocabulary (padding of the model's table) and
    bytes that are not UTF-8 read U+FFFD.
    """
    out = []
    for i in np.asarray(ids).reshape(-1).tolist():
      if 0 <= i < self.boundary_id:
        out.append(self._token_bytes[i])
      else:
        out.append(BOUNDARY.encode() if i == self.boundary_id else "\ufffd".encode())
    return b"".join(out).decode("utf-8", errors="replace")

  def bytes_of(self, token: int) -> bytes:
    """The bytes that an id stands for; b"<|endoftext|>" for the boundary.

    Raises:
      IndexError: the id is outside the vocabulary.
    """
    return self._token_bytes[token] if token != self.boundary_id else BOUNDARY.encode()

  def word_starts(self, ids: np.ndarray) -> np.ndarray:
    """How many words begin in each token of a text, int [n]; a word is a run of bytes that are no ASCII whitespace.

    The boundary ends a word and is none.
    """
    inside, first, last = self._word_tables
    before = np.concatenate([[True], last[ids[:-1]]]) if len(ids) else np.zeros(0, bool)
    return inside[ids] + (first[ids] & before)

  @functools.cached_property
  def _word_tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each id: the words that begin after its first byte, whether that is of a word, and whether a word is over at its end."""
    tokens = [*self._token_bytes, b" "]  # the boundary is like a blank
    is_first = np.array([not token[:1].isspace() for token in tokens])
    is_over = np.array([token[-1:].isspace() for token in tokens])
    return np.array([len(token.split()) for token in tokens]) - is_first, is_first, is_over

  def token_bytes(self) -> np.ndarray:
    """Returns int32 [V'], the number of bytes that each id stands for; 0 for the boundary."""
    return np.asarray([len(token) for token in self._token_bytes] + [0], np.int32)


def load(spec: str) -> Tokenizer:
  """Loads "bytes", "gpt2" or the path of a tiktoken rank file.

  Raises:
    ConnectionError: "gpt2" is not in tiktoken's cache and its host cannot be reached.
    FileNotFoundError: no such rank file.
    ValueError: the rank file is malformed.
  """
  if spec == "bytes":
    return Tokenizer(spec, "bytes", [bytes([i]) for i in range(256)], None)
  if spec == "gpt2":
    encoding = _gpt2_encoding()
    ranks = [encoding.decode_single_token_bytes(i) for i in range(_GPT2_RANKS)]
    return Tokenizer(spec, "gpt2", ranks, encoding.encode_ordinary)
  ranks = _read_ranks(spec)
  import tiktoken  # Here: a run on bytes should not pay for it.
  encoding = tiktoken.Encoding(
      name="local",
      pat_str=GPT2_PATTERN,
      mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
      special_tokens={BOUNDARY: len(ranks)},
  )
  stem = os.path.basename(spec).removesuffix(".tiktoken")
  name = re.sub(r"[^a-z0-9]+", "_", stem.lower()).strip("_") or "ranks"
  return Tokenizer(spec, name, ranks, encoding.encode_ordinary)


def known_vocab_size(spec: str) -> int | None:
  """Returns V' of `load(spec)` without loading it; None where only `load` can tell (and complain)."""
  if spec in VOCAB_SIZES:
    return VOCAB_SIZES[spec]
  if not os.path.isfile(os.path.expanduser(spec)):
    return None
  return sum(1 for line in _open_ranks(spec) if line.strip()) + 1


def _pieces(text: str):
  start = 0
  while len(text) - start > _CHUNK:
    cut = _CUT.search(text, start + _CHUNK)
    if cut is None:
      break
    yield text[start:cut.start()]
    start = cut.start()
  if start < len(text):
    yield text[start:]


def _open_ranks(path: str) -> list[bytes]:
  path = os.path.expanduser(path)
  if not os.path.isfile(path):
    raise FileNotFoundError(
        f"data.tokenizer: {path!r} is neither 'bytes' nor 'gpt2' nor an existing tiktoken rank file; "
        "set it to one of these")
  with open(path, "rb") as f:
    return f.read().splitlines()


def _read_ranks(path: str) -> list[bytes]:
  """Returns the tokens of a rank file ("<base64 token> <rank>" per line), ordered by rank."""
  ranks = {}
  for number, line in enumerate(_open_ranks(path), 1):
    if not line.strip():
      continue
    try:
      encoded, written = line.split()
      token, rank = base64.b64decode(encoded, validate=True), int(written)
    except (ValueError, binascii.Error):
      raise ValueError(
          f"{path}:{number}: not a tiktoken rank line ('<base64 token> <rank>'): {line[:40]!r}; "
          "point data.tokenizer at a .tiktoken file") from None
    if not token or token in ranks:
      raise ValueError(f"{path}:{number}: token {token!r} is empty or repeated; each token needs one rank")
    ranks[token] = rank
  tokens = sorted(ranks, key=ranks.__getitem__)
  if [ranks[token] for token in tokens] != list(range(len(tokens))):
    raise ValueError(f"{path}: its {len(tokens)} ranks are not 0..{len(tokens) - 1}, each once; renumber them")
  missing = [i for i in range(256) if bytes([i]) not in ranks]
  if missing:
    raise ValueError(
        f"{path}: {len(missing)} of the 256 single bytes have no rank (first: {missing[0]:#04x}), so some "
        "text could not be encoded; add them")
  return tokens


def _gpt2_encoding():
  import tiktoken
  advice = ("download the ranks where there is a network, or set data.tokenizer to a local GPT-2 rank file "
            "(*.tiktoken) or to 'bytes'")
  try:
    if not _gpt2_is_cached() and not urllib.request.getproxies().get("https"):
      # tiktoken downloads without a timeout; behind a silent firewall that is minutes.
      socket.create_connection((_GPT2_URL.split("/")[2], 443), timeout=5).close()
    return tiktoken.get_encoding("gpt2")
  except OSError as e:  # requests' exceptions are OSErrors.
    reason = re.sub(r"\s+", " ", str(e))[:120]
    raise ConnectionError(
        f"data.tokenizer='gpt2': tiktoken downloads its ranks on first use and cannot reach the network "
        f"({reason}); {advice}") from None


def _gpt2_is_cached() -> bool:
  """Whether tiktoken finds both GPT-2 files in its cache (tiktoken.load.read_file_cached)."""
  directory = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get(
      "DATA_GYM_CACHE_DIR", os.path.join(tempfile.gettempdir(), "data-gym-cache")))
  return all(
      os.path.exists(os.path.join(directory, hashlib.sha1((_GPT2_URL + name).encode()).hexdigest()))
      for name in ("vocab.bpe", "encoder.json"))
