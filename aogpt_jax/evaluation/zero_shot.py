"""Zero-shot perplexity on the five data sets of the paper's table 1, beside the published figures.

Every figure has a recipe: all that determines it but the model and the text itself, with a hash. Two figures are comparable where
their hashes are equal.
"""

from collections.abc import Callable, Iterator
import dataclasses
import hashlib
import json
import math
import pathlib
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import ml_collections

from aogpt_jax import config as config_lib
from aogpt_jax import console
from aogpt_jax import sharding
from aogpt_jax.data import loader
from aogpt_jax.data import tokenizers
from aogpt_jax.data import zero_shot as data
from aogpt_jax.evaluation import generative
from aogpt_jax.evaluation import held_out
from aogpt_jax.evaluation import likelihood
from aogpt_jax.evaluation import published
from aogpt_jax.run import Run

# What the published figures were computed with, as far as it is known.
PUBLISHED_BLOCK_SIZE = 1024


@dataclasses.dataclass(frozen=True)
class Score:
  """A model's perplexity on a data set under one distribution of orders; all from one sum of nats."""

  dataset: str
  model: str
  order: str  # as `held_out.label` has it
  contexts: int  # M, orders of each context over which probabilities were averaged
  perplexity: float  # per token
  word_perplexity: float
  bits_per_byte: float
  nats_per_token: float
  stderr: float  # of nats_per_token, over the blocks
  tokens: int  # scored
  dropped_tokens: int
  words: int  # of the scored text, see `zero_shot.Blocks`
  bytes: int
  rows: int
  blocks: int
  recipe: dict[str, Any]
  recipe_hash: str
  fingerprint: str  # of the text
  is_shuffled: bool  # its rows are not in the order of the published files
  weights: str
  dtype: str


def evaluate(run: Run, params: Any) -> list[Score]:
  """The scores of each model of config.eval.zero_shot.models on each of its data sets.

  Args:
    run: its model is scored where "run" is among the models.
    params: of that model; not used otherwise.

  Raises:
    ConfigError: a data set or GPT-2 model can't be read, or does not fit; the message says which.
    OSError: likewise, of files.
  """
  config = run.config.eval
  scores = []
  for spec in config.zero_shot.models:
    scorer = _Trained(run, params) if spec == "run" else _Gpt2(run, spec.removeprefix("gpt2:"))
    for dataset in config.zero_shot.datasets:
      scores += scorer.scores(dataset)
  return scores


class _Scorer:
  """A model with its tokenizer and block size."""

  name: str
  weights: str
  tokenizer: tokenizers.Tokenizer
  block_size: int
  dtype: str

  def __init__(self, run: Run):
    self.run = run

  def scores(self, spec: str) -> Iterator[Score]:
    config = self.run.config
    name, _ = data.parse(spec)
    try:
      blocks = data.load(spec, config.data, config.eval.zero_shot, self.tokenizer, self.block_size)
    except ValueError as e:
      raise config_lib.ConfigError(f"config.eval.zero_shot.datasets: {spec}: {e}") from None

    def batches(what: str):
      rows = loader.batches_of(lambda some: blocks.tokens[some], blocks.lengths, self.block_size,
                               batch_size=config.eval.batch_size,
                               local=sharding.local_rows(self.run.mesh, config.eval.batch_size))
      return rows, console.Progress(f"{what} {name}, {self.name}", len(blocks.lengths), "blocks")

    of_recipe = recipe(config, name, self.tokenizer, self.block_size, self.distributions())
    for order, contexts, nats, stderr, size in self.nats(batches):
      total, tokens = nats * float(blocks.lengths.sum()), int(blocks.lengths.sum())
      yield Score(
          dataset=name, model=self.name, order=order, contexts=contexts, perplexity=_exp(nats),
          word_perplexity=_exp(total / max(blocks.words, 1)), bits_per_byte=total / max(size, 1) / math.log(2),
          nats_per_token=nats, stderr=stderr, tokens=tokens, dropped_tokens=blocks.dropped_tokens, words=blocks.words, bytes=size,
          rows=blocks.rows, blocks=len(blocks.lengths), recipe=of_recipe, recipe_hash=hash_of(of_recipe),
          fingerprint=blocks.fingerprint, is_shuffled=blocks.is_shuffled, weights=self.weights, dtype=self.dtype)

  def distributions(self) -> tuple[str, ...]:
    raise NotImplementedError

  def nats(self, batches: Callable[[str], tuple]) -> Iterator[tuple[str, int, float, float, int]]:
    """Order, M, nats per token, standard error and bytes of the text, for each way in which the model is scored."""
    raise NotImplementedError


class _Trained(_Scorer):
  """The model of a run."""

  def __init__(self, run: Run, params: Any):
    super().__init__(run)
    self.name, self.weights, self.dtype = run.workdir.name, run.config.eval.weights, run.config.model.dtype
    self.tokenizer, self.block_size, self._params = run.tokenizer, run.config.model.block_size, params

  def distributions(self):
    return self.run.config.eval.distributions

  def nats(self, batches):
    found = held_out.score(self.run, self._params, batches)
    size = next(iter(found.likelihoods.values())).bytes
    for order, r in found.likelihoods.items():
      yield order, 1, r.nats_per_token, r.stderr_sequences, size
    for contexts, r in found.ensembles.items():
      if contexts > 1:
        yield "any_order", contexts, r.nats_per_token, r.stderr_sequences, size


class _AfterBoundary(nn.Module):
  """GPT-2 in the interface of a decoder, for the order left to right: the boundary stands before each text."""

  gpt2: nn.Module
  boundary: int
  head_chunk: int = -1

  def features(self, tokens: jax.Array, orders: jax.Array) -> jax.Array:
    del orders
    return self.gpt2.features(jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)), constant_values=self.boundary))

  def head_parameters(self, params: Any) -> tuple[jax.Array, jax.Array]:
    return params["gpt2"]["tokens"]["embedding"].T, jnp.zeros(self.gpt2.vocab_size)


class _Gpt2(_Scorer):
  """GPT-2, which sees the boundary before each block, so that it is scored on the same tokens as the others."""

  def __init__(self, run: Run, name: str):
    super().__init__(run)
    judge = generative.load_judge(run, name, f"config.eval.zero_shot.models: gpt2:{name}")
    self.name, self.weights, self.dtype = f"GPT-2 ({pathlib.Path(name).name})", "released", judge.record["dtype"]
    self.tokenizer, self.block_size = judge.tokenizer, judge.model.block_size
    self._model, self._params = _AfterBoundary(judge.model, judge.tokenizer.boundary_id), {"gpt2": judge.params}

  def distributions(self):
    return ("left_to_right",)

  def nats(self, batches):
    rows, progress = batches("evaluating")
    (order, r), = likelihood.evaluate(
        self._model, self._params, rows, mesh=self.run.mesh, token_bytes=self.tokenizer.token_bytes(),
        repeats={"left_to_right": 1}, progress=progress).items()
    yield order, 1, r.nats_per_token, r.stderr_sequences, r.bytes


def recipe(
    config: ml_collections.ConfigDict, dataset: str, tokenizer: tokenizers.Tokenizer, block_size: int,
    distributions: tuple[str, ...]
) -> dict[str, Any]:
  """All that determines a figure but the model and the text."""
  chosen = config.eval.zero_shot
  switches = {"recipe": chosen.recipe, "dataset": dataset, "split": data.split(dataset, chosen), "detokenize": chosen.detokenize,
              "end_of_text": chosen.end_of_text, "tokenizer": tokenizer.fingerprint, "block_size": block_size,
              "distributions": list(distributions), "orders": config.eval.orders, "contexts": config.eval.ensemble,
              "targets": config.eval.targets, "seed": config.eval.seed}
  if config.model.architecture == "encoder":
    switches["masks"] = config.eval.masks
  if chosen.recipe == "sedd":
    switches |= {"shards": chosen.shards, "map_batch": chosen.map_batch}
  return switches


def hash_of(switches: dict[str, Any]) -> str:
  """16 hexadecimal digits that change with any switch of a recipe."""
  return hashlib.sha256(json.dumps(switches, sort_keys=True).encode()).hexdigest()[:16]


def _exp(nats: float) -> float:
  return math.exp(min(nats, 700.0))


def tables(scores: list[Score]) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
  """Rows of two tables, headings first: perplexities beside the published ones, and what each is made of."""
  names = [name for name in data.DATASETS if any(s.dataset == name for s in scores)]
  perplexities = [("order", "model", *(data.DATASETS[name].title for name in names))]
  orders = list(dict.fromkeys([*(s.order for s in scores), *(order for order, _, _ in published.ZERO_SHOT)]))
  for order in orders:
    for model, contexts in dict.fromkeys((s.model, s.contexts) for s in scores if s.order == order):
      of = {s.dataset: s.perplexity for s in scores if (s.model, s.order, s.contexts) == (model, order, contexts)}
      perplexities.append((order, model + (f", M={contexts}" if contexts > 1 else ""), *(f"{of[name]:.2f}" for name in names)))
    for (their_order, model, size), figures in published.ZERO_SHOT.items():
      if their_order == order:
        of = dict(zip(published.ZERO_SHOT_DATASETS, figures))
        perplexities.append((order, f"{model} {size}, published", *(f"{of[name]:.2f}" for name in names)))
  details = [("data set", "model", "order", "nats/token", "", "per word", "bits/byte", "tokens", "dropped", "recipe")]
  for s in scores:
    several = f", M={s.contexts}" if s.contexts > 1 else ""
    details.append((data.DATASETS[s.dataset].title, s.model, s.order + several, f"{s.nats_per_token:.4f}", f"+- {s.stderr:.4f}",
                    f"{s.word_perplexity:.2f}", f"{s.bits_per_byte:.4f}", f"{s.tokens:,}", f"{s.dropped_tokens:,}",
                    f"{s.recipe['recipe']} {s.recipe_hash}"))
  return perplexities, details


def remarks(run: Run, scores: list[Score]) -> list[str]:
  """What a reader of the tables has to know."""
  lines = []
  chosen, protocol = run.config.eval.zero_shot, config_lib.default_config().eval.zero_shot
  changed = [f"{field} = {chosen[field]!r}" for field in protocol
             if field not in ("datasets", "models") and chosen[field] != protocol[field]]
  changed += sorted({f"blocks of {s.recipe['block_size']}" for s in scores if s.recipe["block_size"] != PUBLISHED_BLOCK_SIZE})
  if "run" in chosen.models and run.config.data.tokenizer != "gpt2":
    changed.append(f"tokenizer = {run.config.data.tokenizer}")
  if changed:
    lines.append("Not comparable with the published figures, which are of GPT-2 BPE in blocks of 1,024 by the recipe sedd; here: "
                 f"{', '.join(changed)}.")
  for s in {(s.dataset, s.model): s for s in scores}.values():
    title = data.DATASETS[s.dataset].title
    if s.dropped_tokens:
      lines.append(f"{title}: {s.model} is not scored on {s.dropped_tokens:,} of {s.tokens + s.dropped_tokens:,} tokens, which "
                   "the recipe drops.")
    if s.is_shuffled:
      lines.append(f"{title}: its rows are shuffled, as TFDS prepares it, which changes what each block holds; give the "
                   f"published file, as {s.dataset}=FILE, for the order of the published figures.")
  return lines


def write(run: Run, step: int | None, scores: list[Score]) -> list[pathlib.Path]:
  """zero_shot.json, with everything needed to repeat the figures, and zero_shot.md, in the run's workdir; returns the paths."""
  record = {"step": step, "eval": run.config.eval.to_dict(), "tokenizer": run.config.data.tokenizer,
            "scores": [held_out.finite(dataclasses.asdict(score)) for score in scores]}
  perplexities, details = tables(scores)
  sections = ["# Zero-shot perplexity", held_out.markdown(perplexities), *remarks(run, scores), held_out.markdown(details)]
  paths = run.workdir / "zero_shot.json", run.workdir / "zero_shot.md"
  if jax.process_index() == 0:
    paths[0].write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    paths[1].write_text("\n\n".join(sections) + "\n", encoding="utf-8")
  return list(paths)
