"""Unigram and bigram entropy of a split: what a model must beat to have learnt more than token frequencies."""

import dataclasses

import numpy as np

from aogpt_jax import orders
from aogpt_jax.data import loader
from aogpt_jax.data import packing


@dataclasses.dataclass(frozen=True)
class Entropies:
  """Empirical entropies of one text, in nats per token, over `tokens` tokens."""

  unigram: float
  bigram: float
  tokens: int


def entropies(packed: packing.PackedDataset, split: str = "validation", max_tokens: int = 10_000_000) -> Entropies:
  """Returns the empirical entropies of a split, from the histograms of that same text.

  unigram: H(x) = -sum_a p(a) log p(a).
  bigram: H(x_t | x_{t-1}) = -sum_{a,b} p(a, b) log p(b | a), over the pairs inside a block, as a model sees them.

  Of examples, a is any token and b, or the token of the unigrams, one that is predicted.

  Because the histograms are the text's own, the bigram figure is optimistic where most pairs are rare (BPE on
  little text): no bigram model reaches it on unseen text. With more than `max_tokens` tokens, blocks evenly
  spread over the split stand for it.
  """
  rows = loader.Rows(packed, split)
  tokens_NT = rows.read(loader.evenly_spread(len(rows), max(max_tokens // packed.block_size, 1)))
  counted_NT = np.ones(tokens_NT.shape, bool)
  if tokens_NT.ndim == 3:
    tokens_NT, counted_NT = tokens_NT[:, 0], tokens_NT[:, 1] == orders.PREDICTED
  _, counts = np.unique(tokens_NT[counted_NT], return_counts=True)
  # Pairs as one integer: sorting them needs no table of V' x V'.
  previous = tokens_NT[:, :-1][counted_NT[:, 1:]].astype(np.uint64)
  pairs = previous * np.uint64(packed.metadata["vocab_size"]) + tokens_NT[:, 1:][counted_NT[:, 1:]].astype(np.uint64)
  _, pair_counts = np.unique(pairs, return_counts=True)
  _, previous_counts = np.unique(previous, return_counts=True)
  # H(b | a) = H(a, b) - H(a).
  return Entropies(
      unigram=_entropy(counts), bigram=_entropy(pair_counts) - _entropy(previous_counts), tokens=int(counted_NT.sum()))


def _entropy(counts: np.ndarray) -> float:
  p = counts / max(counts.sum(), 1)
  return float(-(p * np.log(p)).sum())
