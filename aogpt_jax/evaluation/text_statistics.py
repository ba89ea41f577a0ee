"""What perplexity does not see in generated texts: how varied they are."""

from collections.abc import Sequence
import dataclasses
import math

import numpy as np

REPEATED_N = 4  # tokens of the n-grams whose repetition is counted


@dataclasses.dataclass(frozen=True)
class TextStatistics:
  """Of texts as token ids. nan where no text is long enough.

  Attributes:
    entropy: in nats per token, of each text's own histogram of tokens; mean over the texts.
    entropy_stderr: its standard error over the texts.
    distinct: n -> different n-grams of all texts together over all their n-grams (distinct-n, Li et al., arXiv 1510.03055), for n
      from 1 to 4. It falls as texts are added: compare equally many.
    repetition: share of the 4-grams of a text that occurred in it before (seq-rep-4, Welleck et al., arXiv 1908.04319); mean
      over the texts.
    constant: texts that are one token again and again; their entropy is 0.
  """

  entropy: float
  entropy_stderr: float
  distinct: dict[int, float]
  repetition: float
  constant: int


def statistics(texts: Sequence[np.ndarray]) -> TextStatistics:
  """Statistics of texts, int [n] each; texts of no tokens have none, and are left out."""
  texts = [np.asarray(text, np.int64) for text in texts if len(text)]
  entropies = [entropy(text) for text in texts]
  grams = {n: [_n_grams(text, n) for text in texts if len(text) >= n] for n in (1, 2, 3, 4)}
  different = lambda grams: len(np.unique(grams, axis=0))
  return TextStatistics(
      entropy=_mean(entropies), entropy_stderr=stderr(entropies),
      distinct={n: different(np.concatenate(g)) / sum(map(len, g)) if g else math.nan for n, g in grams.items()},
      repetition=_mean([1 - different(g) / len(g) for g in grams[REPEATED_N]]),
      constant=sum(h == 0 and len(text) > 1 for h, text in zip(entropies, texts)))


def entropy(tokens: np.ndarray) -> float:
  """-sum_a p(a) log p(a) of the token frequencies p of one text, in nats."""
  _, counts = np.unique(tokens, return_counts=True)
  p = counts / counts.sum()
  return float(-(p * np.log(p)).sum()) + 0.0  # not -0.0


def stderr(values: Sequence[float]) -> float:
  """Standard error of a mean; nan for fewer than two values."""
  return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def _n_grams(tokens: np.ndarray, n: int) -> np.ndarray:
  return np.lib.stride_tricks.sliding_window_view(tokens, n)


def _mean(values: list[float]) -> float:
  return float(np.mean(values)) if values else math.nan
