"""A GPT-2 as the judge of texts: nats of each of their tokens, and the perplexities made of them.

The first token of a text is not scored: GPT-2 has nothing to predict it from. A text that is longer than the model's window of W
tokens is scored in windows that begin W // 2 tokens after one another. Each token counts once, in the first window that has it:
those after the first window see half a window of context at least.

Sums are kept in float64; the batch that a text is in changes its nats by the rounding of floats at most.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np

from aogpt_jax import objectives
from aogpt_jax import sharding
from aogpt_jax.data import tokenizers
from aogpt_jax.evaluation import likelihood
from aogpt_jax.evaluation import text_statistics
from aogpt_jax.models import gpt2

_SHORTEST = 16  # tokens to which a window is padded at least; above it, to a power of two: few programs
_NAMED = 5  # texts that a warning names
_PADDED_ROWS = 128  # a model's table may have up to a multiple of this many rows, of which the tokenizer has no ids


@dataclasses.dataclass(frozen=True)
class Score:
  """Generative perplexity of texts. nan where there is nothing to compute it from.

  Attributes:
    perplexity: mean over the texts of exp(nats per token of the text), the one that papers report.
    perplexity_stderr: its standard error over the texts.
    nats_per_token: over all scored tokens of all texts.
    nats_stderr: its standard error over the texts.
    token_perplexity: exp(nats_per_token).
    token_perplexity_stderr: its standard error over the texts (delta method).
    texts: that are scored.
    too_short: other texts, of fewer than two tokens, in which there is nothing to score.
    longer_than_window: texts that took more than one window.
    tokens: that are scored.
    statistics: of all tokens of the texts that are scored.
  """

  perplexity: float
  perplexity_stderr: float
  nats_per_token: float
  nats_stderr: float
  token_perplexity: float
  token_perplexity_stderr: float
  texts: int
  too_short: int
  longer_than_window: int
  tokens: int
  statistics: text_statistics.TextStatistics


@dataclasses.dataclass(frozen=True)
class Judge:
  """A GPT-2 that is ready to score.

  Attributes:
    name: as it was loaded.
    model: its module.
    params: its parameters, whole on each device of the mesh.
    tokenizer: its own.
    fingerprint: of model and parameters, see `gpt2.fingerprint`.
    mesh: over whose data and fsdp axes the texts are split.
    batch_size: windows scored at once, at most; has no say in the result.
  """

  name: str
  model: gpt2.GPT2
  params: Any
  tokenizer: tokenizers.Tokenizer
  fingerprint: str
  mesh: Mesh
  batch_size: int

  @property
  def record(self) -> dict[str, Any]:
    """All that a score depends on besides the texts."""
    return {"name": self.name, "fingerprint": self.fingerprint, "layers": self.model.layers, "width": self.model.width,
            "dtype": np.dtype(self.model.dtype).name, "tokenizer": self.tokenizer.spec,
            "tokenizer_fingerprint": self.tokenizer.fingerprint, "window": self.model.block_size,
            "stride": self.model.block_size // 2, "first_token": "not scored"}

  def encode(self, text: str) -> np.ndarray:
    """Token ids of a text, in which "<|endoftext|>" is the boundary, as `Tokenizer.decode` writes it."""
    parts = [self.tokenizer.encode(part) for part in text.split(tokenizers.BOUNDARY)]
    boundary = np.array([self.tokenizer.boundary_id], self.tokenizer.dtype)
    return np.concatenate([parts[0], *(x for part in parts[1:] for x in (boundary, part))])

  def score(self, texts: Sequence[np.ndarray], progress: Callable[[int], None] = lambda tokens: None) -> Score:
    """Scores texts of token ids, int [n] each; `progress` is called with the number of tokens that are done."""
    return summarise(self.nll(texts, progress), texts, self.model.block_size)

  def nll(self, texts: Sequence[np.ndarray], progress: Callable[[int], None] = lambda tokens: None) -> list[np.ndarray]:
    """Nats of every token of the texts but their first, float64 [n - 1] for each text [n]."""
    nats = [np.full(max(len(text) - 1, 0), np.nan) for text in texts]
    groups = {}  # padded length -> windows, of any texts
    for i, text in enumerate(texts):
      for window in windows(len(text), self.model.block_size):
        length = max(1 << (window[2] - window[0] - 1).bit_length(), _SHORTEST)
        groups.setdefault(min(length, self.model.block_size), []).append((i, *window))
    ways = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
    done = 0
    for length, group in sorted(groups.items()):
      size = min(self.batch_size, 1 << (len(group) - 1).bit_length())
      size += -size % ways
      for batch in (group[start : start + size] for start in range(0, len(group), size)):
        rows = np.zeros((size, length), np.int32)
        for row, (i, start, _, stop) in zip(rows, batch):
          row[: stop - start] = texts[i][start:stop]  # causal: what comes behind has no say
        with jax.default_matmul_precision("highest"):  # float32 means float32, on TPUs and GPUs too
          out = np.asarray(_nll(self.model, self.mesh, self.params, jax.device_put(rows, sharding.batch_sharding(self.mesh))))
        for row, (i, start, first, stop) in zip(out, batch):
          nats[i][first - 1 : stop - 1] = row[first - 1 - start : stop - 1 - start]
          done += stop - first
        progress(done)
    return nats


def load(name: str, tokenizer: tokenizers.Tokenizer, *, dtype: str, mesh: Mesh, batch_size: int) -> Judge:
  """Loads a judge; see `gpt2.load` for names and errors.

  Raises:
    ValueError: the tokenizer is not the model's, by its number of ids.
  """
  model, params = gpt2.load(name, dtype)
  if not tokenizer.vocab_size <= model.vocab_size <= -(-tokenizer.vocab_size // _PADDED_ROWS) * _PADDED_ROWS:
    raise ValueError(f"the {tokenizer.vocab_size} ids of the tokenizer {tokenizer.spec} are not the {model.vocab_size} rows of "
                     "the model; give the model's own tokenizer.")
  if model.block_size < 2:
    raise ValueError(f"the model takes texts of {model.block_size} token; it must take 2 at least.")
  fingerprint = gpt2.fingerprint(model, params)
  return Judge(name, model, jax.device_put(params, sharding.replicated(mesh)), tokenizer, fingerprint, mesh, batch_size)


def windows(length: int, window: int) -> Iterator[tuple[int, int, int]]:
  """(start, first, stop) of each window of a text: it is run on the tokens from start, and scores those from first up to stop."""
  start, first = 0, 1
  while first < length:
    stop = min(start + window, length)
    yield start, first, stop
    start, first = start + window // 2, stop


def summarise(nats: Sequence[np.ndarray], texts: Sequence[np.ndarray], window: int) -> Score:
  """The score of texts from the nats of their tokens but the first.

  Args:
    nats: float64 [n - 1] for each text.
    texts: their token ids, int [n].
    window: of the judge, in tokens.
  """
  scored = [i for i, x in enumerate(nats) if len(x)]
  sums, sizes = np.array([nats[i].sum() for i in scored]), np.array([len(nats[i]) for i in scored])
  tokens = int(sizes.sum())
  # Over the texts, which are independent while the tokens of a text are not.
  mean, nats_stderr = likelihood.per_token(sums, sizes) if tokens else (math.nan, math.nan)
  own = np.exp(np.minimum(sums / np.maximum(sizes, 1), 700.0))
  token_perplexity = math.exp(min(mean, 700.0))
  return Score(
      perplexity=float(own.mean()) if scored else math.nan, perplexity_stderr=text_statistics.stderr(own), nats_per_token=mean,
      nats_stderr=nats_stderr, token_perplexity=token_perplexity, token_perplexity_stderr=token_perplexity * nats_stderr,
      texts=len(scored), too_short=len(texts) - len(scored), longer_than_window=sum(len(texts[i]) > window for i in scored),
      tokens=tokens, statistics=text_statistics.statistics([texts[i] for i in scored]))


def warnings(texts: Sequence[np.ndarray], names: Sequence[str], window: int) -> list[str]:
  """What the reader of a figure has to know of its texts of token ids, a line for each kind."""
  kinds = (
      ("warning", "of fewer than two tokens, and not scored", lambda text: len(text) < 2),
      ("warning", "one token again and again, of entropy 0", lambda text: len(text) > 1 and (text == text[0]).all()),
      ("note", f"longer than the judge's window of {window} tokens, and scored in windows {window // 2} tokens apart",
       lambda text: len(text) > window))
  lines = []
  for kind, what, holds in kinds:
    those = [name for text, name in zip(texts, names) if holds(text)]
    if those:
      more = f" and {len(those) - _NAMED} more" if len(those) > _NAMED else ""
      lines.append(f"{kind}: {len(those)} of {len(texts)} texts are {what}: {', '.join(those[:_NAMED])}{more}")
  return lines


@functools.partial(jax.jit, static_argnames=("model", "mesh"))
def _nll(model, mesh, params, tokens):
  """Nats [B, N - 1] of the tokens [B, N] but the first, on every process."""
  nats = objectives.cross_entropy(model.apply({"params": params}, tokens)[:, :-1], tokens[:, 1:])
  return jax.lax.with_sharding_constraint(nats, sharding.replicated(mesh))
