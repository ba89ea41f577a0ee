"""What else each token of a text could have been: the distributions that it was drawn from, computed after the draw.

A text says in which order and in which step its tokens were drawn; along those, the model is asked again with the tokens given. So
the samplers do nothing for it, and whatever order they have found is followed.
"""

from collections.abc import Sequence
import dataclasses
import functools
import itertools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from aogpt_jax import console
from aogpt_jax import samplers
from aogpt_jax import sharding
from aogpt_jax.sampling import decode
from aogpt_jax.sampling import filters as filters_lib
from aogpt_jax.sampling import texts as texts_lib

# Of logits that are computed together, at most, if that is not one text.
_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True, eq=False)
class Alternatives:
  """Of a text of L tokens, by position; nothing that is of given tokens has a meaning.

  Attributes:
    log_probs: float32 [L], log-probability in nats with which a token was drawn, after temperature, top-k and top-p.
    ids: int32 [L, k], the most probable tokens, the likeliest first.
    ids_log_probs: float32 [L, k], of those; -inf where they could not be drawn.
    difference: the largest between the model's log-probabilities of the tokens and those that the text has from its draw, nats: by
      rounding, or where the draw averaged over contexts, which is not done again.
  """

  log_probs: np.ndarray
  ids: np.ndarray
  ids_log_probs: np.ndarray
  difference: float


def find(model: nn.Module, params: Any, texts: Sequence[texts_lib.Text], vocab_size: int, k: int = 5) -> list[Alternatives]:
  """The alternatives of complete texts.

  At temperature 0 there are none to the likeliest token: those of temperature 1 without filters stand in for them. Texts with the
  same numbers of tokens in each step share a program.

  Args:
    model: a decoder or an encoder, which has drawn them.
    params: its parameters.
    texts: each with the settings of its draw in `sampler`.
    vocab_size: V', all ids that can be drawn.
    k: how many tokens; at most V'.
  """
  k = min(k, vocab_size)
  progress = console.Progress("asking for alternatives", sum(len(text.ids) for text in texts), "tokens")
  alike, found, done = {}, {}, 0
  for i, text in enumerate(texts):
    alike.setdefault((_groups(text), _filters(text, vocab_size)), []).append(i)
  for (groups, filters), members in alike.items():
    together = max(_BYTES // (4 * model.vocab_size * max(sum(groups), 1)), 1)
    for start in range(0, len(members), together):
      batch = members[start : start + together]
      for i, alternatives in zip(batch, _of_batch(model, params, [texts[i] for i in batch], groups, filters, k)):
        found[i] = alternatives
      done += len(batch) * sum(groups)
      progress(done)
  return [found[i] for i in range(len(texts))]


def _groups(text: texts_lib.Text) -> tuple[int, ...]:
  """How many tokens became known at once, in the order of the draw: the given ones, then those of each step.

  Samplers that check a draft say what its tokens have one after another.
  """
  groups = [len(list(same)) for _, same in itertools.groupby(text.steps[position] for position in text.positions)]
  if text.sampler.get("sampler") in samplers.OF_DECODERS:
    given = sum(step == 0 for step in text.steps)
    groups = [given] * (given > 0) + [1] * (len(text.ids) - given)
  return tuple(groups)


def _filters(text: texts_lib.Text, vocab_size: int) -> filters_lib.Filters:
  if not text.sampler["temperature"]:
    return filters_lib.Filters(vocab_size)
  return filters_lib.Filters(vocab_size, **{name: text.sampler[name] for name in ("temperature", "top_p", "top_k", "top_p_rule")})


def _of_batch(model, params, texts, groups, filters, k) -> list[Alternatives]:
  tokens, orders, steps, drawn_log_probs = (
      np.array([getattr(text, name) for text in texts]) for name in ("ids", "positions", "steps", "log_probs"))
  logits = decode.decode_logits(model, params, tokens, orders, groups)
  ask = _program(sharding.replicated(sharding.mesh_of(params)), k)
  by_place = (np.asarray(x) for x in ask(logits, np.take_along_axis(tokens, orders, axis=1).astype(np.int32), filters))
  place = np.argsort(orders, axis=1)
  log_probs, model_log_probs, ids, ids_log_probs = (
      np.take_along_axis(x, place if x.ndim == 2 else place[..., None], axis=1) for x in by_place)
  differences = np.where(steps > 0, np.abs(model_log_probs - drawn_log_probs), 0).max(axis=1)
  return [Alternatives(*of_text) for of_text in zip(log_probs, ids, ids_log_probs, differences.tolist())]


@functools.cache
def _program(everywhere, k):
  """(logits [B, L, V], tokens [B, L], filters) -> of the tokens, the log-probabilities with filters and without; the k likeliest."""

  def ask(logits, tokens, filters):
    of = lambda log_probs: jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]
    filtered = jax.nn.log_softmax(filters(logits))
    plain = jax.nn.log_softmax(filters_lib.Filters(filters.vocab_size)(logits))
    likeliest, ids = jax.lax.top_k(filtered, k)
    return of(filtered), of(plain), ids.astype(jnp.int32), likeliest

  return jax.jit(ask, out_shardings=everywhere)
