import itertools
import shutil
import threading
import time
import types

import grain
import ml_collections
import numpy as np
import pytest

from aogpt_jax.data import loader
from aogpt_jax.data import packing
from aogpt_jax.data import tokenizers

T = 8


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
  """Rows that name themselves: document i is its number in seven digits, which with its boundary is one block."""
  directory = tmp_path_factory.mktemp("data")
  (directory / "a.jsonl").write_text("".join(f'{{"text": "{i:07d}"}}\n' for i in range(300)))
  config = ml_collections.ConfigDict(dict(
      source=f"files:{directory}/a.jsonl", text_field="text", prompt_field="", validation_fraction=0.2, test_fraction=0.2,
      train_split="train", validation_split="", test_split="", cache_dir=str(directory / "cache"), workers=0))
  return packing.prepare(config, tokenizers.load("bytes"), T)


def names(rows):
  return [bytes(row[:-1].tolist()).decode() for row in rows]


def first_batches(packed, count, **arguments):
  with loader.train_batches(packed, **dict(dict(seed=3, batch_size=6), **arguments)) as batches:
    return [next(batches) for _ in range(count)]


def test_batch_is_int32_rows_of_the_training_split(packed):
  batch, = first_batches(packed, 1)
  assert batch.shape == (6, T) and batch.dtype == np.int32
  assert set(names(batch)) <= set(names(loader.Rows(packed, "train")))


def test_batch_of_a_step_depends_only_on_seed_and_step(packed):
  batches = first_batches(packed, 100)
  for step in (1, 37, 99):
    np.testing.assert_array_equal(first_batches(packed, 1, start_step=step)[0], batches[step])
    np.testing.assert_array_equal(
        first_batches(packed, 1, start_step=step, prefetch=0, num_threads=1)[0], batches[step])
  assert (first_batches(packed, 1, seed=4)[0] != batches[0]).any()


@pytest.mark.parametrize("hosts", [2, 3, 6])
def test_rows_of_all_hosts_are_the_batch_of_one(packed, hosts):
  # Past the end of an epoch too: 180 rows are 30 batches.
  whole = first_batches(packed, 40)
  # Those of a host need not lie together.
  local = [range(h, 6, hosts) for h in range(hosts)]
  shares = [first_batches(packed, 40, local=rows) for rows in local]
  for step in range(40):
    for rows, share in zip(local, shares):
      np.testing.assert_array_equal(share[step], whole[step][rows])


def test_every_epoch_has_every_row_once_in_a_new_order(packed):
  rows = packed.num_sequences["train"]
  stream = names(np.concatenate(first_batches(packed, rows, batch_size=2)))
  first, second = stream[:rows], stream[rows:]
  assert sorted(first) == sorted(second) == sorted(names(loader.Rows(packed, "train")))
  assert first != second != sorted(second)


def test_epochs_of_one_seed_are_not_those_of_the_next(packed):
  rows = packed.num_sequences["train"]
  orders = {seed: names(np.concatenate(first_batches(packed, 3, seed=seed, batch_size=rows))) for seed in range(3)}
  epochs = [tuple(order[i * rows:(i + 1) * rows]) for order in orders.values() for i in range(3)]
  assert len(set(epochs)) == 9


def test_splits_are_disjoint_over_two_epochs(packed):
  rows = packed.num_sequences["train"]
  train = set(names(np.concatenate(first_batches(packed, rows, batch_size=2))))
  held_out = set()
  for split in ("validation", "test"):
    for tokens, lengths in loader.eval_batches(packed, split, batch_size=4):
      held_out |= set(names(tokens[lengths > 0]))
  assert len(held_out) == packed.num_sequences["validation"] + packed.num_sequences["test"]
  assert not train & held_out and len(train | held_out) == 300


@pytest.mark.parametrize("batch_size, hosts", [(1, 1), (4, 1), (64, 1), (4, 2), (48, 4), (512, 4)])
def test_evaluation_sees_every_row_once_whatever_the_batches(packed, batch_size, hosts):
  by_host = [
      list(loader.eval_batches(packed, "validation", batch_size=batch_size,
                               local=range(h * batch_size // hosts, (h + 1) * batch_size // hosts)))
      for h in range(hosts)]
  assert len({len(batches) for batches in by_host}) == 1
  tokens, lengths = (np.concatenate([part for step in zip(*by_host) for part in (batch[i] for batch in step)])
                     for i in (0, 1))
  assert tokens.dtype == np.int32 and lengths.dtype == np.int32 and not tokens[lengths == 0].any()
  assert names(tokens[lengths > 0]) == names(loader.Rows(packed, "validation"))
  assert by_host[0][0][0].shape == (batch_size // hosts, T)


def test_fewer_sequences_are_spread_over_the_split(packed):
  rows = names(loader.Rows(packed, "validation"))
  (tokens, lengths), = loader.eval_batches(packed, "validation", batch_size=5, max_sequences=5)
  assert names(tokens) == [rows[i * len(rows) // 5] for i in range(5)] and (lengths == packed.block_size).all()
  assert loader.evenly_spread(10, 4).tolist() == [0, 2, 5, 7]
  assert loader.evenly_spread(3, 0).tolist() == loader.evenly_spread(3, 9).tolist() == [0, 1, 2]


def test_closing_ends_the_threads(packed):
  before = threading.active_count()
  batches = loader.train_batches(packed, seed=0, batch_size=2, num_threads=3)
  next(batches)
  assert threading.active_count() > before
  batches.close()
  deadline = time.monotonic() + 10
  while threading.active_count() > before and time.monotonic() < deadline:
    time.sleep(0.01)  # They finish the batch in their hands.
  assert threading.active_count() == before


def test_the_time_for_which_batches_were_waited_is_added_up(monkeypatch):
  clock = iter((10.0, 10.5, 20.0, 22.0))
  monkeypatch.setattr(loader, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
  batches = loader.TrainBatches(grain.MapDataset.range(2).to_iter_dataset())
  assert [next(batches), next(batches)] == [0, 1] and batches.seconds_waited == 2.5


def test_error_in_a_thread_reaches_the_consumer(packed, tmp_path):
  copy = tmp_path / "copy" / "1.0.0"
  shutil.copytree(packed.directory, copy)
  damaged = packing.load(copy)
  shard, = copy.glob("*-train.array_record*")
  shard.write_bytes(bytes(shard.stat().st_size))
  with pytest.raises(packing.DamagedError, match="the copy is damaged"):
    with loader.train_batches(damaged, seed=0, batch_size=4) as batches:
      next(batches)


@pytest.mark.parametrize("arguments, message", [
    (dict(batch_size=6, local=[5, 6]), r"local=\[5, 6\] must be rows of a batch, from 0 to 5"),
    (dict(batch_size=0), "batch_size=0"),
    (dict(seed=-1), "seed=-1"),
    (dict(start_step=-1), "start_step=-1"),
    (dict(split="dev"), "no dev sequences"),
])
def test_argument_out_of_range_is_named(packed, arguments, message):
  with pytest.raises(ValueError, match=message):
    loader.train_batches(packed, **dict(dict(seed=0, batch_size=6), **arguments))


def test_batches_run_on_for_ever(packed):
  with loader.train_batches(packed, seed=0, batch_size=100, start_step=10**9) as batches:
    assert len(list(itertools.islice(batches, 3))) == 3
