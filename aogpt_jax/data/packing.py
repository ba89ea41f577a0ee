"""Documents to fixed-length blocks of token ids, written once as a TFDS data set (array_record).

Each document's tokens are followed by the boundary id, the documents of a split are concatenated, and the
stream is cut into blocks of T; the last < T tokens of a split are dropped and counted. The result lies in

  CACHE_DIR/NAME/1.0.0     what `tfds.builder_from_directory` and `tfds.data_source(NAME, data_dir=CACHE_DIR)` open
  CACHE_DIR/NAME/building  parts of an unfinished preparation
  CACHE_DIR/NAME/lock      held while one process prepares

Where a part of each document is given (examples, see sources.py), each has a block of its own instead: [2, T], tokens above and
below them what each is, given, predicted or padding (orders.py). The boundary follows, and is predicted, where the end of the text
is; examples of more than T tokens are left out and counted.

NAME ends in a hash of all that determines the tokens, so other text, tokenizer or T is another data set.

Preparation has two stages. Tokenise: the document stream is cut into parts of about PART_CHARS characters and
each part becomes one file. Pack: the parts are cut into blocks and written as shards. Files appear under their
name when they are complete (rename), so a killed preparation continues where it was; the directory 1.0.0
appears last, by rename too. Neither the parts' boundaries nor the number of workers has any effect on the tokens.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from aogpt_jax import console
from aogpt_jax import orders
from aogpt_jax.data import sources
from aogpt_jax.data import tokenizers

VERSION = "1.0.0"
PART_CHARS = 16 << 20  # about 4 s of BPE on one core: what a killed preparation loses
SHARD_BYTES = 256 << 20

# Raise it when this file starts to cut the same documents into other blocks.
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class PackedDataset:
  """Packed blocks on disk.

  Attributes:
    directory: the TFDS data set's directory, CACHE_DIR/NAME/1.0.0.
    block_size: T, tokens per sequence.
    num_sequences: split -> number of blocks; splits without any are absent.
    metadata: what metadata.json holds: tokenizer, vocab_size, boundary_id, dtype, fingerprints, and per split
      the counts documents, empty_documents, tokens (boundaries included), bytes (UTF-8, without boundaries),
      sequences, dropped_tokens; of examples also long_documents, which are left out.
  """

  directory: Path
  block_size: int
  num_sequences: Mapping[str, int]
  metadata: Mapping[str, object]

  @property
  def dtype(self) -> np.dtype:
    """Of the stored tokens: uint16 or uint32."""
    return np.dtype(self.metadata["dtype"])

  @property
  def row_shape(self) -> tuple[int, ...]:
    """[T]; [2, T] of examples, tokens and parts."""
    return (2, self.block_size) if self.metadata.get("examples") else (self.block_size,)


def prepare(
    config,
    tokenizer: tokenizers.Tokenizer,
    block_size: int,
    *,
    part_chars: int = PART_CHARS,
    shard_bytes: int = SHARD_BYTES,
) -> PackedDataset:
  """Returns the packed data set of `config` (the `data` section), preparing it if it is not in the cache.

  Args:
    config: with the fields of sources.py and `cache_dir`, `workers` (processes that tokenise; 0: this one).
    tokenizer: of `tokenizers.load`.
    block_size: T.
    part_chars: characters per part, see above.
    shard_bytes: bytes per array_record file.

  Raises:
    ValueError: a split is smaller than one block, or the cached copy is damaged; and what sources.py raises.
  """
  if block_size < 1:
    raise ValueError(f"block_size={block_size} must be at least 1 token")
  if "://" in config.cache_dir:
    raise ValueError(f"data.cache_dir={config.cache_dir!r} must be a local directory")
  source = sources.documents(config)
  name = _name(source, tokenizer, block_size)
  root = Path(config.cache_dir).expanduser().absolute() / name
  directory = root / VERSION
  if directory.exists():
    return load(directory)
  root.mkdir(parents=True, exist_ok=True)
  with _lock(root / "lock"):
    if not directory.exists():  # Another process may have finished it while this one waited.
      building = root / "building"
      parts = _tokenise(source, tokenizer, building, config.workers, part_chars, block_size)
      staged = building / VERSION
      _pack(parts, source, tokenizer, block_size, staged, name, config, shard_bytes)
      os.rename(staged, directory)
      shutil.rmtree(building)
      splits = load(directory).metadata["splits"].values()
      if left_out := sum(count.get("long_documents", 0) for count in splits):
        console.say(f"{left_out} of {left_out + sum(count['documents'] for count in splits)} examples have more than {block_size} "
                    "tokens and are left out")
  return load(directory)


def find(config, tokenizer: tokenizers.Tokenizer, block_size: int) -> PackedDataset | None:
  """The packed data set of `config` where it is in the cache; None where it would have to be prepared.

  Raises:
    ValueError: as `prepare`.
  """
  name = _name(sources.documents(config), tokenizer, block_size)
  directory = Path(config.cache_dir).expanduser().absolute() / name / VERSION
  return load(directory) if directory.exists() else None


def load(directory) -> PackedDataset:
  """Opens a packed data set; raises ValueError if a shard is missing or not of its recorded size."""
  directory = Path(directory)
  try:
    metadata = json.loads((directory / "metadata.json").read_text())
  except FileNotFoundError:
    raise FileNotFoundError(f"{directory} is no packed data set (no metadata.json); prepare it first") from None
  for shard, size in metadata["shards"].items():
    path = directory / shard
    found = path.stat().st_size if path.exists() else "no"
    if found != size:
      raise ValueError(
          f"{path}: {found} bytes instead of {size}; the copy is damaged: delete {directory.parent} to prepare it "
          "again")
  return PackedDataset(
      directory=directory,
      block_size=metadata["block_size"],
      num_sequences={split: c["sequences"] for split, c in metadata["splits"].items() if c["sequences"]},
      metadata=metadata,
  )


def _name(source: sources.Source, tokenizer: tokenizers.Tokenizer, block_size: int) -> str:
  """A valid TFDS data set name (snake case)."""
  determining = json.dumps([_FORMAT, source.fingerprint, tokenizer.fingerprint, block_size])
  digest = hashlib.sha256(determining.encode()).hexdigest()[:12]
  return f"{source.name[:60]}_{tokenizer.name[:20]}_t{block_size}_h{digest}"


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
  """Holds a file lock; the system frees it when the process ends, however it ends."""
  with open(path, "w") as f:
    try:
      fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      console.say(f"waiting for another process that prepares {path.parent}")
      fcntl.flock(f, fcntl.LOCK_EX)
    yield


# --- stage 1: tokenise ------------------------------------------------------------------------------


def _tokenise(source, tokenizer, building: Path, workers: int, part_chars: int, block_size: int) -> list[dict]:
  """Writes the missing parts and returns the records of all, in order."""
  # Parts of another size have other boundaries and cannot be mixed.
  directory = building / f"parts_{part_chars}"
  directory.mkdir(parents=True, exist_ok=True)
  finished = start = 0
  while (record := _part_record(directory, finished)) is not None:
    start += record["stream_documents"]
    finished += 1
  jobs = (
      (directory, index, documents)
      for index, documents in _parts(source, start, finished, part_chars)
      # Workers finish out of order, so a later part may be there already.
      if _part_record(directory, index) is None)
  _run(jobs, tokenizer, workers, block_size if source.has_examples else 0)
  parts = []
  while (record := _part_record(directory, len(parts))) is not None:
    parts.append(record)
  return parts


def _parts(source, start: int, index: int, part_chars: int) -> Iterator[tuple[int, list[tuple]]]:
  """Groups the documents from number `start` on: yields (index, [(split, text or pieces)])."""
  progress = console.Share(f"tokenising {source.name}")
  documents, chars = [], 0
  for document in source.stream(start):
    documents.append((document.split, document.pieces if source.has_examples else document.text))
    chars += len(document.text)
    progress(document.fraction)
    if chars >= part_chars:
      yield index, documents
      index, documents, chars = index + 1, [], 0
  if documents:
    yield index, documents


def _run(jobs, tokenizer: tokenizers.Tokenizer, workers: int, block_size: int):
  """Writes a part per job, in this process or in `workers` others; `block_size` as for _write_part."""
  if not workers:
    for directory, index, documents in jobs:
      _write_part(directory, index, documents, tokenizer, block_size)
    return
  with concurrent.futures.ProcessPoolExecutor(
      workers, multiprocessing.get_context("spawn"), _start_worker, (tokenizer.spec,)) as pool:
    pending = collections.deque()
    for job in jobs:
      pending.append(pool.submit(_work, *job, block_size))
      if len(pending) > 2 * workers:  # Bounds the text held in memory.
        pending.popleft().result()
    for future in pending:
      future.result()


_worker_tokenizer: tokenizers.Tokenizer  # Loaded once per worker process.


def _start_worker(spec: str):
  global _worker_tokenizer
  _worker_tokenizer = tokenizers.load(spec)

  def exit_with_parent():
    multiprocessing.parent_process().join()
    os._exit(1)

  # A worker of a killed parent would wait for its next job for ever.
  threading.Thread(target=exit_with_parent, daemon=True).start()


def _work(directory: Path, index: int, documents: list[tuple], block_size: int):
  _write_part(directory, index, documents, _worker_tokenizer, block_size)


def _write_part(directory: Path, index: int, documents: list[tuple], tokenizer: tokenizers.Tokenizer, block_size: int):
  """Writes the part's tokens, split after split, then the record that says the part is complete.

  Of examples, the documents are pieces, and `block_size` is that of their rows; of texts it is 0.
  """
  if block_size:
    _write_examples(directory, index, documents, tokenizer, block_size)
    return
  boundary = np.asarray([tokenizer.boundary_id], tokenizer.dtype)
  tokens = {split: [] for split in sources.SPLITS}
  counts = {split: dict(documents=0, empty_documents=0, tokens=0, bytes=0) for split in sources.SPLITS}
  for split, text in documents:
    count = counts[split]
    if not text.strip():
      count["empty_documents"] += 1
      continue
    ids = tokenizer.encode(text)
    tokens[split] += [ids, boundary]
    count["documents"] += 1
    count["tokens"] += len(ids) + 1
    count["bytes"] += len(text.encode())
  _write_tokens(directory, index, tokens, counts, len(documents))


def _write_examples(directory: Path, index: int, documents: list[tuple], tokenizer: tokenizers.Tokenizer, block_size: int):
  """The same for examples: a row of tokens, and of what each is, for each."""
  rows = {split: [] for split in sources.SPLITS}
  counts = {split: dict(documents=0, empty_documents=0, long_documents=0, tokens=0, bytes=0, sequences=0)
            for split in sources.SPLITS}
  for split, pieces in documents:
    ids = [tokenizer.encode(text) for text, _ in pieces]
    parts = [np.full(len(x), orders.GIVEN if given else orders.PREDICTED) for x, (_, given) in zip(ids, pieces)]
    if pieces and not pieces[-1][1]:
      ids, parts = [*ids, [tokenizer.boundary_id]], [*parts, [orders.PREDICTED]]
    length, count = sum(map(len, ids)), counts[split]
    if all(given for _, given in pieces):
      count["empty_documents"] += 1
    elif length > block_size:
      count["long_documents"] += 1
    else:
      row = np.zeros((2, block_size), tokenizer.dtype)
      row[1] = orders.PADDING
      row[:, :length] = np.concatenate(ids), np.concatenate(parts)
      rows[split].append(row)
      count["documents"] += 1
      count["sequences"] += 1
      count["tokens"] += length
      count["bytes"] += sum(len(text.encode()) for text, _ in pieces)
  _write_tokens(directory, index, rows, counts, len(documents))


def _write_tokens(directory: Path, index: int, tokens: dict[str, list[np.ndarray]], counts: dict[str, dict], documents: int):
  data = b"".join(ids.tobytes() for split in sources.SPLITS for ids in tokens[split])
  path = directory / f"{index:06d}.tokens"
  _write_atomically(path, data)
  record = dict(path=path.name, stream_documents=documents, splits=counts)
  _write_atomically(directory / f"{index:06d}.json", json.dumps(record).encode())


def _part_record(directory: Path, index: int) -> dict | None:
  """Returns what _write_part recorded, or None for a part that is not complete."""
  try:
    record = json.loads((directory / f"{index:06d}.json").read_text())
  except FileNotFoundError:
    return None
  return dict(record, path=directory / record["path"])


def _write_atomically(path: Path, data: bytes):
  temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
  with open(temporary, "wb") as f:
    f.write(data)
    f.flush()
    os.fsync(f.fileno())
  os.rename(temporary, path)


# --- stage 2: pack ----------------------------------------------------------------------------------


def _pack(parts, source, tokenizer, block_size, directory: Path, name: str, config, shard_bytes: int):
  """Cuts the parts into blocks and writes them as a TFDS data set."""
  import tensorflow_datasets as tfds
  counts = _count(parts, block_size, config)
  shape = (2, block_size) if source.has_examples else (block_size,)
  directory.mkdir(parents=True, exist_ok=True)
  features = tfds.features.FeaturesDict({
      "tokens": tfds.features.Tensor(shape=shape, dtype=tokenizer.dtype.type, encoding="bytes")})
  # With encoding="bytes" and a fixed shape every record is the same few bytes followed by the tokens.
  row = math.prod(shape)
  row_bytes = row * tokenizer.dtype.itemsize
  prefix = features.serialize_example({"tokens": np.zeros(shape, tokenizer.dtype)})[:-row_bytes]
  per_shard = max(shard_bytes // (len(prefix) + row_bytes), 1)
  split_infos, shards = [], {}
  total = sum(c["sequences"] for c in counts.values())
  done, progress = 0, console.Share(f"packing {source.name}")
  for split in sources.SPLITS:
    sequences = counts[split]["sequences"]
    if not sequences:
      continue
    template = tfds.core.ShardedFileTemplate(
        data_dir=directory, dataset_name=name, split=split, filetype_suffix="array_record")
    starts = range(0, sequences, per_shard)
    lengths = [min(per_shard, sequences - start) for start in starts]
    for shard, (start, length) in enumerate(zip(starts, lengths)):
      path = Path(template.sharded_filepath(shard_index=shard, num_shards=len(lengths)))
      if not path.exists():
        _write_shard(path, prefix, _rows(parts, split, tokenizer.dtype, row, start, length))
      shards[path.name] = path.stat().st_size
      done += length
      progress(done / total)
    split_infos.append(tfds.core.SplitInfo(
        name=split, shard_lengths=lengths, num_bytes=sequences * (len(prefix) + row_bytes),
        filename_template=template))
  metadata = dict(
      block_size=block_size,
      dtype=tokenizer.dtype.name,
      tokenizer=tokenizer.name,
      tokenizer_fingerprint=tokenizer.fingerprint,
      vocab_size=tokenizer.vocab_size,
      boundary_id=tokenizer.boundary_id,
      source=config.source,
      source_fingerprint=source.fingerprint,
      splits=counts,
      record_prefix=prefix.hex(),
      shards=shards,
      **(dict(examples=True) if source.has_examples else {}),
  )
  tfds.folder_dataset.write_metadata(
      data_dir=directory,
      features=features,
      split_infos=split_infos,
      version=VERSION,
      check_data=False,  # Its check reads through TensorFlow.
      description=f"{config.source} as {tokenizer.name} tokens in blocks of {block_size}.",
      metadata=tfds.core.MetadataDict(metadata),
  )


def _count(parts: list[dict], block_size: int, config) -> dict[str, dict[str, int]]:
  """Sums the parts' counts per split; raises a ValueError if a wanted split has less than one block."""
  counts = {}
  for split in sources.SPLITS:
    count = {key: sum(part["splits"][split][key] for part in parts) for key in parts[0]["splits"][split]}
    if "sequences" in count:  # of examples
      count["dropped_tokens"] = 0
    else:
      count["sequences"], count["dropped_tokens"] = divmod(count["tokens"], block_size)
    counts[split] = count
  for split, count in counts.items():
    wanted = split == "train" or config[f"{split}_fraction"] > 0 or (
        config.source.startswith("tfds:") and config[f"{split}_split"])
    if wanted and not count["sequences"]:
      sizes = ", ".join(f"{s} {c['tokens']} tokens in {c['documents']} documents" for s, c in counts.items())
      fix = "give more text" if split == "train" else f"raise data.{split}_fraction, give more documents"
      if sum(c["documents"] for c in counts.values()) < len(sources.SPLITS):
        # A text file is one document, and documents are held out whole: no fraction splits a single one.
        fix = "give more documents: several text files, or a .jsonl file with a document per line"
      if "long_documents" in count:
        raise ValueError(
            f"data.source={config.source!r}: its {split} split has no examples of at most {block_size} tokens, and "
            f"{count['long_documents']} of more; give more examples, raise the block size" + (
                "" if split == "train" else f" or data.{split}_fraction"))
      raise ValueError(
          f"data.source={config.source!r}: its {split} split is smaller than one block of {block_size} tokens "
          f"({sizes}); {fix} or lower the block size")
  return counts


def _rows(parts, split: str, dtype: np.dtype, block_size: int, start: int, length: int) -> Iterator[np.ndarray]:
  """Yields blocks start .. start+length-1 of a split, [T] each, or [2 T] of examples, for which `block_size` is 2 T."""
  first, last = start * block_size, (start + length) * block_size  # in tokens of the split
  carry = np.zeros(0, dtype)
  position = 0
  for part in parts:
    counts = (part["splits"][s] for s in sources.SPLITS)
    sizes = [count["sequences"] * block_size if "sequences" in count else count["tokens"] for count in counts]
    size = sizes[sources.SPLITS.index(split)]
    begin, end = max(first - position, 0), min(last - position, size)
    position += size
    if begin >= end:
      continue
    offset = sum(sizes[:sources.SPLITS.index(split)])
    tokens = np.memmap(part["path"], dtype, mode="r")[offset + begin:offset + end]
    if len(carry):
      needed = min(block_size - len(carry), len(tokens))
      carry, tokens = np.concatenate([carry, tokens[:needed]]), tokens[needed:]
      if len(carry) < block_size:
        continue
      yield carry
    whole = len(tokens) // block_size * block_size
    yield from tokens[:whole].reshape(-1, block_size)
    carry = np.array(tokens[whole:])


def _write_shard(path: Path, prefix: bytes, rows: Iterator[np.ndarray]):
  from array_record.python import array_record_module
  temporary = path.with_name(path.name + ".tmp")
  # One record per group gives random access. Uncompressed doubles the reading speed; BPE tokens are dense anyway.
  writer = array_record_module.ArrayRecordWriter(str(temporary), "group_size:1,uncompressed")
  for row in rows:
    writer.write(prefix + row.tobytes())
  writer.close()
  os.rename(temporary, path)
