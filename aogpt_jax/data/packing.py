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
name when they are complete (rename), so a killed preparation continues with the parts that it finished; the directory 1.0.0
appears last, by rename too. Neither the parts' boundaries nor the number of workers has any effect on the tokens.

What is read is what was written: SPLIT.crc32 has a checksum of each row, which the loader compares (loader.py), and metadata.json
has those of these files and of itself. Parts are kept for files of the same sizes and times alone; where a file changes while it
is being read, nothing is prepared.
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
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from aogpt_jax import console
from aogpt_jax import orders
from aogpt_jax import records
from aogpt_jax.data import sources
from aogpt_jax.data import tokenizers

VERSION = "1.0.0"
PART_CHARS = 16 << 20  # about 4 s of BPE on one core: what a killed preparation loses
SHARD_BYTES = 256 << 20

# Raise it when this file starts to cut the same documents into other blocks.
_FORMAT = 1


class DamagedError(OSError):
  """A packed data set is not as it was prepared; one line, with what to do."""

  def __init__(self, directory: Path, what: str):
    super().__init__(f"{directory}: {what}; the copy is damaged: delete {directory.parent} to prepare it again")


@dataclasses.dataclass(frozen=True)
class PackedDataset:
  """Packed blocks on disk.

  Attributes:
    directory: the TFDS data set's directory, CACHE_DIR/NAME/1.0.0.
    block_size: T, tokens per sequence.
    num_sequences: split -> number of blocks; splits without any are absent.
    metadata: what metadata.json holds: tokenizer, vocab_size, boundary_id, dtype, fingerprints, and per split
      the counts documents, empty_documents, tokens (boundaries included), bytes (UTF-8, without boundaries),
      sequences, dropped_tokens; of examples also long_documents, which are left out. Also `checksums`, by split, of the
      file of its rows' checksums: two data sets with the same ones have the same tokens. Those of before have none.
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

  def checksums(self, split: str) -> np.ndarray | None:
    """The CRC-32 of the bytes of each row of tokens, uint32 [N]; None of a data set of before there were any.

    Raises:
      DamagedError: they are not those that were written.
    """
    wanted = self.metadata.get("checksums", {}).get(split)
    if wanted is None:
      return None
    path = self.directory / f"{split}.crc32"
    data = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(data).hexdigest() != wanted:
      raise DamagedError(self.directory, f"{path.name} is {'not as it was written' if data else 'missing'}")
    return np.frombuffer(data, "<u4")


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
    ValueError: a split is smaller than one block, or the source has changed while it was read; and what sources.py raises.
    DamagedError: the cached copy is damaged.
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
    return _load_as(directory, source, tokenizer, block_size)
  root.mkdir(parents=True, exist_ok=True)
  with _lock(root / "lock"):
    if not directory.exists():  # Another process may have finished it while this one waited.
      building = root / "building"
      parts = _tokenise(source, tokenizer, building, config.workers, part_chars, block_size)
      if sources.documents(config).fingerprint != source.fingerprint:  # by whatever keeps a file's size and time
        shutil.rmtree(building)
        raise _changed(source)
      staged = building / VERSION
      _pack(parts, source, tokenizer, block_size, staged, name, config, shard_bytes)
      os.rename(staged, directory)
      shutil.rmtree(building)
      splits = load(directory).metadata["splits"].values()
      if left_out := sum(count.get("long_documents", 0) for count in splits):
        console.say(f"{left_out} of {left_out + sum(count['documents'] for count in splits)} examples have more than {block_size} "
                    "tokens and are left out")
  return _load_as(directory, source, tokenizer, block_size)


def find(config, tokenizer: tokenizers.Tokenizer, block_size: int) -> PackedDataset | None:
  """The packed data set of `config` where it is in the cache; None where it would have to be prepared.

  Raises:
    ValueError, DamagedError: as `prepare`.
  """
  source = sources.documents(config)
  directory = Path(config.cache_dir).expanduser().absolute() / _name(source, tokenizer, block_size) / VERSION
  return _load_as(directory, source, tokenizer, block_size) if directory.exists() else None


def load(directory) -> PackedDataset:
  """Opens a packed data set.

  Raises:
    FileNotFoundError: there is none.
    DamagedError: a shard is missing or not of its recorded size, or metadata.json is not as it was written.
  """
  directory = Path(directory)
  try:
    metadata = records.value((directory / "metadata.json").read_bytes())
    if metadata.get("hash", "") not in ("", _hash(metadata)):
      raise ValueError("is not as it was written")
    packed = PackedDataset(
        directory=directory,
        block_size=int(metadata["block_size"]),
        num_sequences={split: c["sequences"] for split, c in metadata["splits"].items() if c["sequences"]},
        metadata=metadata,
    )
    shards = dict(metadata["shards"])
  except (FileNotFoundError, NotADirectoryError):
    raise FileNotFoundError(f"{directory} is no packed data set (no metadata.json); prepare it first") from None
  except (ValueError, TypeError, KeyError, AttributeError) as e:
    raise DamagedError(directory, f"metadata.json {e if type(e) is ValueError else 'is not as it was written'}") from None
  for shard, size in shards.items():
    path = directory / Path(shard).name
    found = path.stat().st_size if path.exists() else "no"
    if found != size:
      raise DamagedError(directory, f"{path.name} has {found} bytes instead of {size}")
  return packed


def _load_as(directory: Path, source: sources.Source, tokenizer: tokenizers.Tokenizer, block_size: int) -> PackedDataset:
  """Opens the packed data set of a source; raises DamagedError where the directory holds another one."""
  packed = load(directory)
  wanted = dict(source_fingerprint=source.fingerprint, tokenizer_fingerprint=tokenizer.fingerprint, block_size=block_size)
  for field, value in wanted.items():
    if packed.metadata.get(field) != value:
      raise DamagedError(directory, f"metadata.json has another {field} than the name of the directory")
  return packed


def _hash(record: Mapping[str, object]) -> str:
  """Of what a JSON file holds, but for this hash in it."""
  return hashlib.sha256(json.dumps({k: v for k, v in record.items() if k != "hash"}, sort_keys=True).encode()).hexdigest()


def _changed(source: sources.Source) -> ValueError:
  return ValueError(f"data.source: {source.name} has changed while it was being prepared, so that its tokens would be of no one "
                    "state of it; start again when nothing writes to its files any more")


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
  # Parts of another size have other boundaries, and those of files that have changed since may have another text: none are mixed.
  stamp = source.stamp()
  directory = building / f"parts_{part_chars}_{stamp[:16]}"
  for other in building.glob("parts_*"):
    if other != directory:
      shutil.rmtree(other)
  directory.mkdir(parents=True, exist_ok=True)
  for path in directory.glob("*.json"):  # of a process that was killed
    record = _part_record(directory, int(path.stem)) if path.stem.isdecimal() else None
    if record is None or zlib.crc32(record["path"].read_bytes()) != record["crc32"]:
      path.unlink()
  finished = start = 0
  while (record := _part_record(directory, finished)) is not None:
    start += record["stream_documents"]
    finished += 1
  jobs = (
      (directory, index, documents)
      for index, documents in _parts(source, start, finished, part_chars, stamp)
      # Workers finish out of order, so a later part may be there already.
      if _part_record(directory, index) is None)
  _run(jobs, tokenizer, workers, block_size if source.has_examples else 0)
  parts = []
  while (record := _part_record(directory, len(parts))) is not None:
    parts.append(record)
  return parts


def _parts(source, start: int, index: int, part_chars: int, stamp: str) -> Iterator[tuple[int, list[tuple]]]:
  """Groups the documents from number `start` on: yields (index, [(split, text or pieces)]), all of files with this stamp."""
  progress = console.Share(f"tokenising {source.name}")
  documents, chars = [], 0
  for document in source.stream(start):
    documents.append((document.split, document.pieces if source.has_examples else document.text))
    chars += len(document.text)
    progress(document.fraction)
    if chars >= part_chars:
      if source.stamp() != stamp:
        raise _changed(source)
      yield index, documents
      index, documents, chars = index + 1, [], 0
  if source.stamp() != stamp:
    raise _changed(source)
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
  _write_atomically(directory / f"{index:06d}.tokens", data)
  record = dict(stream_documents=documents, splits=counts, bytes=len(data), crc32=zlib.crc32(data))
  _write_atomically(directory / f"{index:06d}.json", json.dumps(record | {"hash": _hash(record)}).encode())


def _part_record(directory: Path, index: int) -> dict | None:
  """Returns what _write_part recorded, with the `path` of the tokens; None for a part that is not complete."""
  path = directory / f"{index:06d}.tokens"
  try:
    record = records.value(path.with_suffix(".json").read_bytes())
    is_whole = record["hash"] == _hash(record) and path.stat().st_size == record["bytes"]
  except (OSError, ValueError, TypeError, KeyError, AttributeError):  # not there, damaged, or of before there were checksums
    return None
  return dict(record, path=path) if is_whole else None


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
  shutil.rmtree(directory, ignore_errors=True)  # of a process that was killed: packing takes far less time than tokenising
  directory.mkdir(parents=True)
  features = tfds.features.FeaturesDict({
      "tokens": tfds.features.Tensor(shape=shape, dtype=tokenizer.dtype.type, encoding="bytes")})
  # With encoding="bytes" and a fixed shape every record is the same few bytes followed by the tokens.
  row = math.prod(shape)
  row_bytes = row * tokenizer.dtype.itemsize
  prefix = features.serialize_example({"tokens": np.zeros(shape, tokenizer.dtype)})[:-row_bytes]
  per_shard = max(shard_bytes // (len(prefix) + row_bytes), 1)
  split_infos, shards, checksums = [], {}, {}
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
    sums = []
    for shard, (start, length) in enumerate(zip(starts, lengths)):
      path = Path(template.sharded_filepath(shard_index=shard, num_shards=len(lengths)))
      sums += _write_shard(path, prefix, _rows(parts, split, tokenizer.dtype, row, start, length))
      shards[path.name] = path.stat().st_size
      done += length
      progress(done / total)
    if len(sums) != sequences:
      raise OSError(f"{parts[0]['path'].parent}: has {len(sums)} {split} rows instead of {sequences}; start again")
    data = np.asarray(sums, "<u4").tobytes()
    _write_atomically(directory / f"{split}.crc32", data)
    checksums[split] = hashlib.sha256(data).hexdigest()
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
      checksums=checksums,
      **(dict(examples=True) if source.has_examples else {}),
  )
  metadata["hash"] = _hash(metadata)
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


def _write_shard(path: Path, prefix: bytes, rows: Iterator[np.ndarray]) -> list[int]:
  """Returns the CRC-32 of each row's bytes."""
  from array_record.python import array_record_module
  # One record per group gives random access. Uncompressed doubles the reading speed; BPE tokens are dense anyway.
  writer, sums = array_record_module.ArrayRecordWriter(str(path), "group_size:1,uncompressed"), []
  for row in rows:
    data = row.tobytes()
    writer.write(prefix + data)
    sums.append(zlib.crc32(data))
  writer.close()
  with open(path, "rb") as f:
    os.fsync(f.fileno())  # what is renamed to be a data set lies on the disk
  return sums
