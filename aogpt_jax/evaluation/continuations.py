"""Log-likelihood of texts after given ones, by one left-to-right pass each: exact for a decoder, which takes the context as it is.

What lies before a text is kept as far as a block has room. A text longer than a block is scored in parts, of which each but the
first has at least the last token before it as its context.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from aogpt_jax import objectives
from aogpt_jax import sharding
from aogpt_jax.models import encoder

_SHORTEST = 32  # tokens of the smallest program; the others are of powers of two up to T


def score(
    model: nn.Module, params: Any, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, num_tokens: int, mesh: Mesh,
    batch_size: int = 16, progress: Callable[[int], None] = lambda pairs: None,
) -> list[tuple[float, bool]]:
  """log p(continuation | context) in nats, and whether each of its tokens is the most probable one, of each pair.

  Args:
    model: a decoder of blocks of T tokens.
    params: its parameters.
    pairs: (context, continuation), token ids; both may be empty.
    num_tokens: V', the ids that there are.
    mesh: from `sharding.make_mesh`; its devices of data x fsdp divide the batch size.
    batch_size: sequences at once.
    progress: called with the number of sequences scored so far; a pair is one, but for continuations longer than a block.

  Raises:
    ValueError: the model is an encoder, in which no pass gives all tokens of a text each from those before it.
  """
  if isinstance(model, encoder.Encoder):
    raise ValueError("the model is an encoder, which has no exact likelihood of a continuation in one pass; give a decoder.")
  rows = [(i, context, part) for i, pair in enumerate(pairs) for context, part in windows(*pair, model.block_size)]
  rows.sort(key=lambda row: -len(row[1]) - len(row[2]))  # what does not fit into memory does so at once
  nats, greedy, start = np.zeros(len(pairs)), np.ones(len(pairs), bool), 0
  place = lambda x: jax.make_array_from_callback(x.shape, sharding.batch_sharding(mesh), lambda index: x[index])
  while start < len(rows):
    longest = len(rows[start][1]) + len(rows[start][2])
    length = min(max(_SHORTEST, 1 << (longest - 1).bit_length()), model.block_size)
    batch = rows[start : start + batch_size]
    tokens, spans = np.zeros((batch_size, length), np.int32), np.zeros((batch_size, 2), np.int32)
    for b, (_, context, part) in enumerate(batch):
      tokens[b, : len(context) + len(part)] = [*context, *part]
      spans[b] = len(context), len(context) + len(part)
    out = jax.device_get(_score(model, mesh, num_tokens, params, place(tokens), place(spans)))
    for (i, *_), nll, best in zip(batch, *out):
      nats[i] -= nll
      greedy[i] &= best
    start += len(batch)
    progress(start)
  return list(zip(nats.tolist(), greedy.tolist()))


def windows(context: Sequence[int], continuation: Sequence[int], block_size: int) -> Iterator[tuple[list[int], list[int]]]:
  """Pairs of at most `block_size` tokens that score each token of the continuation once, with as much context as there is room."""
  tokens, done = [*context, *continuation], 0
  room = block_size if len(continuation) <= block_size else max(block_size - 1, 1)
  while done < len(continuation):
    count = min(room, len(continuation) - done)
    end = len(context) + done + count
    yield tokens[max(end - block_size, 0) : end - count], tokens[end - count : end]
    done += count


@functools.partial(jax.jit, static_argnames=("model", "mesh", "num_tokens"))
def _score(model, mesh, num_tokens, params, tokens, spans):
  """Nats [B] of the tokens from spans[:, 0] to below spans[:, 1], and whether each is the most probable one [B]; on every process."""
  batch, length = tokens.shape
  with sharding.on_mesh(mesh):
    logits = model.apply({"params": params}, tokens, jnp.broadcast_to(jnp.arange(length), (batch, length)))
  places = jnp.arange(length)
  counted = (spans[:, :1] <= places) & (places < spans[:, 1:])
  nats = jnp.where(counted, objectives.cross_entropy(logits, tokens), 0.0).sum(axis=1)
  best = jnp.argmax(logits[..., :num_tokens], axis=-1) == tokens
  return jax.lax.with_sharding_constraint((nats, (best | ~counted).all(axis=1)), sharding.replicated(mesh))
