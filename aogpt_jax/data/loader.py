"""Packed blocks to batches, by random access through Grain.

The training batch of step s is a function of (seed, s) alone: rows s*G .. s*G + G-1 of one endless shuffled row order,
of which each host reads those that its devices need. Resuming needs a step number and nothing else, on any number of
hosts. Every epoch is a new permutation.
"""

from collections.abc import Callable, Iterator, Sequence
import math
import time
import zlib

import grain
import numpy as np

from aogpt_jax import records as records_lib
from aogpt_jax.data import packing


class Rows:
  """One split of a packed data set: a Grain random-access source of int32 [T] rows; of examples [2, T], tokens and parts.

  Each row that is read has the checksum that it was written with: a shard that was damaged, or is another one, is noticed.

  Raises:
    ValueError: there is no such split.
    packing.DamagedError: the data set is not as it was prepared.
  """

  def __init__(self, packed: packing.PackedDataset, split: str):
    if split not in packed.num_sequences:
      raise ValueError(
          f"{packed.directory} has no {split} sequences, only {sorted(packed.num_sequences)}; set "
          f"data.{split}_fraction above 0 and prepare again")
    import tensorflow_datasets as tfds
    self._directory, self._sums = packed.directory, packed.checksums(split)
    try:
      self._records = tfds.builder_from_directory(packed.directory).as_data_source(
          split=split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES)
      found = len(self._records)
    except Exception as e:  # pylint: disable=broad-exception-caught  # damage raises exceptions of many types
      raise packing.DamagedError(packed.directory, f"can't be opened ({_reason(e)})") from None
    if found != packed.num_sequences[split]:
      raise packing.DamagedError(packed.directory, f"has {found} {split} rows instead of {packed.num_sequences[split]}")
    self._prefix = np.frombuffer(bytes.fromhex(packed.metadata["record_prefix"]), np.uint8)
    self._dtype, self._shape = packed.dtype, packed.row_shape

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, index: int) -> np.ndarray:
    if not 0 <= index < len(self):
      raise IndexError(f"row {index} of {len(self)}")
    return self.read([index])[0]

  def read(self, indices) -> np.ndarray:
    """Returns rows `indices`, int32 [n, T] or [n, 2, T]; raises DamagedError if one is not as it was written."""
    indices = [int(i) for i in indices]
    try:
      records = self._records.__getitems__(indices)
    except RuntimeError as e:
      raise packing.DamagedError(self._directory, f"a row can't be read ({_reason(e)})") from None
    # Every record is the same prefix and then the raw tokens (see packing.py): no need to parse a proto each.
    skip = len(self._prefix)
    width = skip + math.prod(self._shape) * self._dtype.itemsize
    if any(len(record) != width for record in records):
      raise packing.DamagedError(self._directory, f"a record has not the {width} bytes of a row")
    if self._sums is not None:
      for i, record in zip(indices, records):
        if zlib.crc32(record[skip:]) != self._sums[i]:
          raise packing.DamagedError(self._directory, f"row {i} is not the one that was written")
    raw = np.frombuffer(b"".join(records), np.uint8).reshape(len(records), width)
    if (raw[:, :skip] != self._prefix).any():
      raise packing.DamagedError(self._directory, "a record is no row")
    rows = np.ascontiguousarray(raw[:, skip:]).view(self._dtype).astype(np.int32)
    return rows.reshape(-1, *self._shape)


def _reason(e: Exception) -> str:
  return records_lib.shown(" ".join(f"{type(e).__name__}: {e}".split()))


class TrainBatches(Iterator[np.ndarray]):
  """The endless iterator that `train_batches` returns; close() or `with` ends its threads.

  Attributes:
    seconds_waited: that its next() has taken so far.
  """

  def __init__(self, batches: grain.IterDataset):
    self._iterator = iter(batches)
    self.seconds_waited = 0.0

  def __next__(self) -> np.ndarray:
    start = time.monotonic()
    batch = next(self._iterator)
    self.seconds_waited += time.monotonic() - start
    return batch

  def close(self):
    self._iterator.close()

  def __enter__(self) -> "TrainBatches":
    return self

  def __exit__(self, *exception):
    self.close()


def train_batches(
    packed: packing.PackedDataset,
    *,
    seed: int,
    batch_size: int,
    start_step: int = 0,
    local: Sequence[int] = (),
    prefetch: int = 4,
    num_threads: int = 2,
    split: str = "train",
) -> TrainBatches:
  """Iterates over the training batches of this host from `start_step` on, for ever.

  Args:
    packed: of packing.prepare.
    seed: of the row order, 0 <= seed < 2**32.
    batch_size: G, rows of all hosts together.
    start_step: the first batch's step.
    local: b of 0..G-1, the rows of each batch that this host reads, as `sharding.local_rows` says; (): all.
    prefetch: batches read ahead; 0 reads in the caller's thread.
    num_threads: that read.
    split: whose rows.

  Returns:
    An iterator of int32 [b, T] rows, or of [b, 2, T] of examples. What goes wrong in a thread is raised by its next().

  Raises:
    ValueError: an argument is out of range.
  """
  local = _local(batch_size, local)
  if not 0 <= seed < 2**32:
    raise ValueError(f"seed={seed} must lie in [0, 2**32)")
  if start_step < 0:
    raise ValueError(f"start_step={start_step} must not be negative")
  rows = Rows(packed, split)
  # The order is drawn over row numbers, so that the rows of a batch are read in one call (several times faster).
  # drop_remainder drops nothing of an endless order; without it, Grain's length of batches of one row overflows.
  batches = (
      grain.MapDataset.range(len(rows))
      .seed(seed)
      .shuffle()
      .repeat()
      .batch(batch_size, drop_remainder=True, batch_fn=np.asarray)[start_step:]
      .map(lambda numbers: rows.read(numbers[local])))
  return TrainBatches(batches.to_iter_dataset(
      grain.ReadOptions(num_threads=min(num_threads, prefetch), prefetch_buffer_size=prefetch)))


def eval_batches(
    packed: packing.PackedDataset,
    split: str,
    *,
    batch_size: int,
    max_sequences: int = 0,
    local: Sequence[int] = (),
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields this host's (tokens int32 [b, T], lengths int32 [b]) over a split, in a fixed order; of examples [b, 2, T].

  A row's length is how many of its tokens are text: T, or 0 for the rows of zeros with which the last batches are filled up.
  Every host gets the same number of batches.

  Args:
    packed: of packing.prepare.
    split: "train", "validation" or "test".
    batch_size: G, rows of all hosts together.
    max_sequences: evaluate on that many, evenly spread over the split; 0: all.
    local: as for `train_batches`.
  """
  rows = Rows(packed, split)
  indices = evenly_spread(len(rows), max_sequences)
  lengths = np.full(len(indices), packed.block_size, np.int32)
  read = lambda chosen: rows.read(indices[chosen])
  yield from batches_of(read, lengths, *packed.row_shape, batch_size=batch_size, local=local)


def batches_of(
    read: Callable[[np.ndarray], np.ndarray],
    lengths: np.ndarray,
    *row_shape: int,
    batch_size: int,
    local: Sequence[int] = (),
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields this host's batches of N rows as `eval_batches` does.

  Args:
    read: rows of n numbers from 0..N-1, int32 [n, T].
    lengths: int32 [N], how many tokens of each row are text.
    row_shape: T; or 2, T.
    batch_size, local: as for `eval_batches`.
  """
  local = _local(batch_size, local)
  for start in range(0, len(lengths), batch_size):
    there = start + local < len(lengths)
    chosen = (start + local)[there]
    tokens, length = np.zeros((len(local), *row_shape), np.int32), np.zeros(len(local), np.int32)
    if len(chosen):
      tokens[there], length[there] = read(chosen), lengths[chosen]
    yield tokens, length


def evenly_spread(count: int, wanted: int) -> np.ndarray:
  """Returns `wanted` of 0..count-1 in order at even distances, or all if `wanted` is 0 or too many."""
  if not 0 < wanted < count:
    return np.arange(count)
  return np.arange(wanted) * count // wanted


def _local(batch_size: int, local: Sequence[int]) -> np.ndarray:
  if batch_size < 1:
    raise ValueError(f"batch_size={batch_size} must be at least 1")
  rows = np.arange(batch_size) if len(local) == 0 else np.array(local)
  if rows.min() < 0 or rows.max() >= batch_size:
    raise ValueError(f"local={list(local)} must be rows of a batch, from 0 to {batch_size - 1}")
  return rows
