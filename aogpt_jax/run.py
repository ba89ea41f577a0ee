"""What training, evaluation and sampling of one run share: its config, mesh, model, tokenizer, data and prompts."""

import dataclasses
import pathlib
import tempfile

from flax import linen as nn
import jax
from jax.sharding import Mesh
import ml_collections

from aogpt_jax import cluster
from aogpt_jax import config as config_lib
from aogpt_jax import models
from aogpt_jax import orders
from aogpt_jax import sharding
from aogpt_jax.data import packing
from aogpt_jax.data import sources
from aogpt_jax.data import tokenizers
from aogpt_jax.data import zero_shot
from aogpt_jax.sampling import prompts
from aogpt_jax.training import checkpoints
from aogpt_jax.training import optimizer
from aogpt_jax.training import start
from aogpt_jax.training import step


@dataclasses.dataclass(frozen=True)
class Run:
  config: ml_collections.ConfigDict
  workdir: pathlib.Path
  mesh: Mesh
  model: nn.Module
  tokenizer: tokenizers.Tokenizer
  packed: packing.PackedDataset | None  # None where the run is opened for what does not need its own text
  evaluated: packing.PackedDataset | None  # the text whose likelihood is evaluated; None where there is none
  split: str  # of `evaluated`
  prompts: tuple[prompts.Prompt, ...]  # none where the run is opened for what draws none


MODES = ("all", "train", "eval", "sample")


def open_run(config: ml_collections.ConfigDict, workdir: str, mode: str = "train") -> Run:
  """Checks the config, reads prompts, prepares the data where that has not been done, and compiles nothing.

  Args:
    config: see config.py.
    workdir: is created.
    mode: one of MODES: "sample" needs no data, "eval" none of the run's own where it scores generated texts or other texts, and
      "train" and "eval" read no prompts.

  Raises:
    ValueError: a field, or the data or devices that it names, can't be used; the message says which and what to do.
    OSError: files that can't be read or written, or a download without a network.
  """
  config_lib.check(config)
  mesh = sharding.make_mesh(config)
  if mode != "sample":
    sharding.check_batch("eval.batch_size", config.eval.batch_size, mesh)
  if mode in ("all", "train"):
    sharding.check_batch("batch_size / micro_batches", config.batch_size // config.micro_batches, mesh)
  model = models.build_model(config, mesh)
  # Before minutes of tokenising: do the mesh and the rules fit the parameters?
  boxed = jax.eval_shape(lambda: step.init_params(model, config.seed))
  sharding.parameter_shardings(boxed, mesh, config.sharding_rules)
  optimizer.decay_mask(nn.unbox(boxed), config.optimizer.weight_decay_rules)
  tokenizer = tokenizers.load(config.data.tokenizer)
  if config.model.vocab_size < tokenizer.vocab_size:
    raise config_lib.ConfigError(
        f"config.model.vocab_size: {config.model.vocab_size} is below the {tokenizer.vocab_size} ids of "
        f"{config.data.tokenizer}; set it to {-(-tokenizer.vocab_size // 64) * 64}.")
  if config.model.num_tokens not in (0, tokenizer.vocab_size):
    raise config_lib.ConfigError(
        f"config.model.num_tokens: {config.model.num_tokens} is not the number of ids of config.data.tokenizer = "
        f"{config.data.tokenizer}; set it to {tokenizer.vocab_size}.")
  asked = prompts.load(config.sample, tokenizer, config.model.block_size) if mode in ("all", "sample") else []
  evaluated = [prompts.parse("", tokenizer, config.sample.length, config.model.block_size, "an evaluation")]
  _check_orders(config, asked if mode == "sample" else asked + evaluated)
  directory = pathlib.Path(workdir).expanduser().resolve()
  try:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
      pass
  except OSError as e:
    raise OSError(f"--workdir={workdir}: can't be written to ({e.strerror}); give another directory.") from None
  if not cluster.shares(directory):
    raise OSError(f"--workdir={workdir}: is not one directory for all {jax.process_count()} processes; give one on a file system "
                  "that all hosts share.")
  if mode in ("all", "train") and not checkpoints.is_there(directory):
    start.check(config, model, tokenizer)
  if mode == "sample":
    return Run(config, directory, mesh, model, tokenizer, None, None, "", tuple(asked))
  for spec in config.eval.zero_shot.datasets if mode in ("all", "eval") else ():  # now, and not after the others are scored
    try:
      zero_shot.source(spec, config.data, config.eval.zero_shot)
    except (ValueError, OSError, ImportError, RuntimeError) as e:
      raise config_lib.ConfigError(f"config.eval.zero_shot.datasets: {spec}: {e}") from None
  if mode == "eval" and (config.eval.zero_shot.datasets or config.eval.generative.judge):
    return Run(config, directory, mesh, model, tokenizer, None, None, "", ())
  other = _other_text(config, tokenizer) if config.eval.source and mode != "train" else None
  if other and mode == "eval":
    return Run(config, directory, mesh, model, tokenizer, None, other, "train", ())
  packed = _prepare(config.data, tokenizer, config.model.block_size)
  for split in ("validation",) if other else ("validation", config.eval.split):  # now, and not at the first evaluation
    if split not in packed.num_sequences:
      raise config_lib.ConfigError(
          f"config.data.{split}_fraction: is 0, so that there is no {split} text to evaluate on; set it above 0, or name a "
          f"split of the data set in config.data.{split}_split.")
  return Run(config, directory, mesh, model, tokenizer, packed, other or packed, "train" if other else config.eval.split,
             tuple(asked))


def _prepare(
    data: ml_collections.ConfigDict, tokenizer: tokenizers.Tokenizer, block_size: int
) -> packing.PackedDataset:
  """The packed text on every process; prepared by process 0 where they share cache_dir, else by each host for itself.

  Raises:
    ConfigError: it is not the same text everywhere.
  """
  prepare = lambda: packing.prepare(data, tokenizer, block_size)
  if jax.process_count() == 1:
    return prepare()
  cache = pathlib.Path(data.cache_dir).expanduser()
  cache.mkdir(parents=True, exist_ok=True)
  shared = cluster.shares(cache)
  if shared and jax.process_index() != 0:
    cluster.gather("waiting for process 0")  # not for its lock, which not all network file systems have
  packed = prepare()
  if shared and jax.process_index() == 0:
    cluster.gather("prepared")
  theirs = cluster.gather([packed.directory.parent.name, dict(packed.num_sequences)])
  for process, text in enumerate(theirs):
    if text != theirs[0]:
      raise config_lib.ConfigError(
          f"config.data.source: {data.source} is another text for process {process} ({text}) than for process 0 ({theirs[0]}); "
          "give all hosts the same.")
  return packed


def _other_text(config: ml_collections.ConfigDict, tokenizer: tokenizers.Tokenizer) -> packing.PackedDataset:
  """The text of config.eval.source: all its documents, as the one split "train"."""
  data = config.data.copy_and_resolve_references()
  with data.unlocked():
    # Where the run's own data are examples, records are examples too, and any other file is a document.
    data.update(source=config.eval.source, prompt_field=data.prompt_field if sources.is_records(config.eval.source) else "",
                train_split=config.eval.split, validation_split="", test_split="", validation_fraction=0.0, test_fraction=0.0)
  try:
    return _prepare(data, tokenizer, config.model.block_size)
  except ValueError as e:
    raise config_lib.ConfigError(f"config.eval.source={config.eval.source}: {e}") from None


def _check_orders(config: ml_collections.ConfigDict, drawn: list[prompts.Prompt]) -> None:
  """Raises ConfigError where an order does not fit the length of a text that is to be drawn in it."""
  for length, name in {len(prompt.tokens): prompt.name for prompt in reversed(drawn)}.items():
    for i, spec in enumerate(config.sample.orders):
      try:
        orders.check(spec, length)
      except ValueError as e:
        raise config_lib.ConfigError(f"config.sample.orders[{i}]: {e} The text is that of {name}.") from None
