"""Texts drawn from a model: any prompts, number of samples and order, in batches; all at once, or as they become known."""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import json
import operator
import time
from typing import Any
import zlib

from flax import linen as nn
import jax
from jax.sharding import Mesh
import ml_collections
import numpy as np

from aogpt_jax import console
from aogpt_jax import orders
from aogpt_jax import samplers
from aogpt_jax.data import tokenizers
from aogpt_jax.sampling import adaptive
from aogpt_jax.sampling import burst
from aogpt_jax.sampling import decode
from aogpt_jax.sampling import entries
from aogpt_jax.sampling import filters as filters_lib
from aogpt_jax.sampling import plan as plan_lib
from aogpt_jax.sampling import prompts as prompts_lib
from aogpt_jax.sampling import speculative

# By `config.sample.sampler`; they take a plan, and what `samplers.SAMPLERS` says beside what they have in common.
STREAMS = {"plan": decode.stream, "speculative": speculative.stream, "burst": burst.stream, "adaptive": adaptive.stream}
# Settings that the plan is made of.
_OF_PLAN = ("steps", "counts", "schedule", "spaced")
UNKNOWN = "\u00b7"  # stands in a text for a token that is not drawn yet


@dataclasses.dataclass(frozen=True)
class Text:
  """One text of L tokens, complete or as far as it is drawn.

  Attributes:
    prompt_index: which of the prompts it was drawn for, from 0.
    sample_index: which of the prompt's samples it is, from 0.
    seed: with the two indices and the order, all that the text depends on besides the model and its filters.
    prompt: as it was written.
    order: the distribution that its generation order was drawn from, or the sampler where that has chosen it.
    text: what the tokens say; UNKNOWN for each that is not drawn yet.
    ids: [L], by position; -1 where a token is not drawn yet.
    positions: [L], in the order in which they are drawn, the given ones first; where the sampler chooses it, as far as it has.
    steps: [L], by position, the step in which a token was drawn, from 1; 0 for given tokens and those not drawn yet.
    log_probs: [L], by position, log p(token | tokens before it) of the model without filters, in nats; 0 where steps are 0.
    evaluations: steps that draw a token of this text, each a forward pass that it shares with the rest of its batch; of burst
      sampling, two for each round. Those so far, where only the tokens drawn tell how many there will be.
    sampler: what else it was drawn with: dtype of the model's matmuls, and the arguments of `generate` that the sampler reads, as given.
  """

  prompt_index: int
  sample_index: int
  seed: int
  prompt: str
  order: str
  text: str
  ids: list[int]
  positions: list[int]
  steps: list[int]
  log_probs: list[float]
  evaluations: int
  sampler: dict[str, Any]

  @property
  def complete(self) -> bool:
    return -1 not in self.ids


def generate(
    model: nn.Module, params: Any, tokenizer: tokenizers.Tokenizer,
    prompts: str | prompts_lib.Prompt | Sequence[str | prompts_lib.Prompt] = "", *, num_samples: int = 1, length: int = 0,
    order: str | Sequence[int] = "left_to_right", sampler: str = "plan", steps: int = 0, counts: str = "fixed",
    schedule: str = "linear", spaced: bool = False, contexts: int = 1, window: int = 4, checks: int = 4, criterion: str = "margin",
    noise: float = 0.0, candidates: int = 0, temperature: float = 1.0, top_p: float = 1.0, top_p_rule: str = "standard",
    top_k: int = 0, seed: int = 0, batch_size: int = 32, mesh: Mesh | None = None,
) -> list[Text]:
  """Draws texts; says how long it will take where it takes long.

  A text depends on the seed, the place of its prompt, its own number among the prompt's samples and the order. What else is
  drawn, `batch_size` and the devices change it by the rounding of floats at most.

  Args:
    model: a decoder or an encoder, of blocks of T tokens.
    params: its parameters.
    tokenizer: of the text that the model was trained on.
    prompts: one or several, of any lengths: texts, in which [[n]] stands for n tokens to be drawn, or `Prompt(tokens, known)`
      with given tokens at any positions.
    num_samples: texts for each prompt.
    length: tokens of each text; what a written prompt leaves is drawn behind it. 0: T, or the prompt's length where it has
      blanks.
    order: in which tokens are drawn: the name of a distribution (see orders.py), or a permutation of 0..L-1; "uniform" with
      samplers that choose it.
    sampler: "plan", which knows beforehand what is drawn in which step; "speculative", which draws as a plan of one token a step
      does, in fewer passes; "burst", sigma-GPT's, which is not exact; or "adaptive", which draws the surest tokens first. It
      refuses what follows where it is of another sampler, unless it is the default.
    steps: S, in which a text is drawn; 0: L. Of plan and adaptive, as counts and schedule.
    counts: "fixed" numbers of tokens in each step, or "binomial" as in the masked-diffusion process.
    schedule: of the noise level over the steps, "linear" or "cosine".
    spaced: whether positions that a plan reveals together are spread evenly over those that are open.
    contexts: M, of a plan: orders of the known tokens over which probabilities are averaged; above 1, each step costs M full passes.
    window: w, of speculative: tokens that are drafted at once.
    checks: of burst: random orders in which a draft is checked.
    criterion: of adaptive: "probability" of the most probable token, its "margin" to the next, or "entropy".
    noise: of adaptive: the scale of Gumbel noise that is added to that.
    candidates: of adaptive: open positions that are asked in a step, a random subset; 0: all.
    temperature: divides the logits; 0 takes the most probable token.
    top_p: keeps the most probable tokens while the mass before them is below it; 1 keeps all.
    top_p_rule: "standard", or "reference" as the PyTorch code, which drops the token that crosses top_p.
    top_k: keeps the k most probable tokens; 0 keeps all.
    seed: of the orders, the numbers of tokens in each step and the tokens.
    batch_size: texts drawn at once, at most.
    mesh: over which the batch is split; None: where the parameters are.

  Returns:
    `num_samples` texts for the first prompt, then for the second, ...

  Raises:
    ValueError: an argument out of range, or a prompt that is too long; before anything is compiled.
  """
  prompts = _given(prompts, tokenizer, length, model.block_size)
  progress = console.Progress("sampling", tokens_to_draw(prompts, num_samples), "tokens")
  texts, done = [], 0
  for batch in stream_generate(
      model, params, tokenizer, prompts, num_samples=num_samples, length=length, order=order, sampler=sampler, steps=steps,
      counts=counts, schedule=schedule, spaced=spaced, contexts=contexts, window=window, checks=checks, criterion=criterion,
      noise=noise, candidates=candidates, temperature=temperature, top_p=top_p, top_p_rule=top_p_rule, top_k=top_k, seed=seed,
      batch_size=batch_size, mesh=mesh, parts=8):
    progress(done + tokens_drawn(batch))
    if all(text.complete for text in batch):
      texts += batch
      done += tokens_drawn(batch)
  return texts


def stream_generate(
    model: nn.Module, params: Any, tokenizer: tokenizers.Tokenizer,
    prompts: str | prompts_lib.Prompt | Sequence[str | prompts_lib.Prompt] = "", *, num_samples: int = 1, length: int = 0,
    order: str | Sequence[int] = "left_to_right", sampler: str = "plan", steps: int = 0, counts: str = "fixed",
    schedule: str = "linear", spaced: bool = False, contexts: int = 1, window: int = 4, checks: int = 4, criterion: str = "margin",
    noise: float = 0.0, candidates: int = 0, temperature: float = 1.0, top_p: float = 1.0, top_p_rule: str = "standard",
    top_k: int = 0, seed: int = 0, batch_size: int = 32, mesh: Mesh | None = None, parts: int = 64,
) -> Iterator[list[Text]]:
  """Like `generate`, but yields the texts of a batch again and again as they grow, then those of the next batch.

  A batch is yielded about `parts` times, or less often where it is drawn in no time; the last time, all its texts are complete.
  """
  for name, value, least in (("num_samples", num_samples, 1), ("batch_size", batch_size, 1), ("parts", parts, 1), ("seed", seed, 0)):
    if value < least:
      raise ValueError(f"{name} is {value}; it must be at least {least}.")
  if seed >= 2**32:
    raise ValueError(f"seed is {seed}; it must be below 2**32.")
  settings = dict(steps=steps, counts=counts, schedule=schedule, spaced=spaced, contexts=contexts, window=window, checks=checks,
                  criterion=criterion, noise=noise, candidates=candidates)
  for name, problem in samplers.problems(sampler, settings):
    raise ValueError(f"{name} {problem}")
  if sampler in samplers.OF_DECODERS:
    entries.check_decoder(model, sampler)
  if sampler in samplers.CHOOSE_ORDERS and order != "uniform":
    raise ValueError(f"order is {order!r}, and sampler {sampler} chooses it; give 'uniform'.")
  given = _given(prompts, tokenizer, length, model.block_size)
  spec = order if isinstance(order, str) else f"explicit({tuple(map(operator.index, order))})"
  orders.check_constant(spec)
  for tokens in {len(prompt.tokens) for prompt in given}:
    orders.check(spec, tokens)
  # Raises what is wrong with the arguments left now, and not at the first batch.
  plan_lib.make_plan(np.zeros((1, 1)), np.zeros((1, 1), bool), steps or 1, counts=counts, schedule=schedule)
  filters = filters_lib.Filters(tokenizer.vocab_size, temperature=temperature, top_p=top_p, top_k=top_k, top_p_rule=top_p_rule)
  read = {name: settings[name] for name in samplers.SAMPLERS[sampler]}
  about = dict(dtype=np.dtype(model.dtype).name, sampler=sampler, **read, temperature=temperature, top_p=top_p,
               top_p_rule=top_p_rule, top_k=top_k)
  own = {name: value for name, value in read.items() if name not in _OF_PLAN}

  def batches():
    rows = [(p, s) for p in range(len(given)) for s in range(num_samples)]
    size = -(-len(rows) // -(-len(rows) // batch_size))  # as many batches as it takes, all of one size: one program
    for start in range(0, len(rows), size):
      batch = rows[start : start + size]
      filled = np.array(batch + batch[-1:] * (size - len(batch)), np.int32).T
      prompts = [given[p] for p in filled[0]]
      drawn_orders = {length: np.asarray(_draw_orders(spec, length, np.uint32(seed), *filled))
                      for length in {len(prompt.tokens) for prompt in prompts}}
      plans = []
      for b, (prompt, p, s) in enumerate(zip(prompts, *filled)):
        order = drawn_orders[len(prompt.tokens)][b]
        plans.append(plan_lib.make_plan(order[None], prompt.known[None], steps or len(order), counts=counts, schedule=schedule,
                                        spaced=spaced, rng=np.random.default_rng((seed, p, s))))
      plan = _together(plans, model.block_size)
      tokens = np.stack([np.pad(prompt.tokens, (0, plan.orders.shape[1] - len(prompt.tokens))) for prompt in prompts])
      stream = STREAMS[sampler](model, params, plan, tokens, _keys(spec, np.uint32(seed), *filled), filters, mesh=mesh, parts=parts,
                                **own)
      for samples in _not_too_often(stream):
        columns = samples.tokens, samples.log_probs, samples.steps, samples.orders
        texts = [
            _text(prompt, tokenizer, *(x[: len(prompt.tokens)] for x in row), prompt_index=p, sample_index=s, seed=seed,
                  order=sampler if sampler in samplers.CHOOSE_ORDERS else spec, evaluations=int(evaluations), sampler=about)
            for (p, s), prompt, evaluations, *row in zip(batch, prompts, samples.evaluations_each, *columns)]
        yield texts
        if all(text.complete for text in texts):
          break  # what the stream may have left is of the rows that fill the batch up

  return batches()


def _not_too_often(stream: Iterator[entries.Samples]) -> Iterator[entries.Samples]:
  """Passes over samples before the last so that what is done with them takes a fifth of the time at most.

  With several processes it passes over none: their clocks differ, and what they draw together ends with what they have seen.
  """
  passed_over, again = None, 0.0
  for samples in stream:
    now = time.monotonic()
    passed_over = samples if now < again and jax.process_count() == 1 else None
    if passed_over is None:
      yield samples
      done = time.monotonic()
      again = done + 4 * (done - now)
  if passed_over is not None:
    yield passed_over


def _text(prompt, tokenizer, ids, log_probs, steps, positions, **fields) -> Text:
  ids = np.where(prompt.known, prompt.tokens, ids)
  return Text(prompt=prompt.text, text="".join(piece for piece, _ in pieces(ids, tokenizer)), ids=ids.tolist(),
              positions=positions.tolist(), steps=steps.tolist(), log_probs=[round(x, 6) for x in log_probs.tolist()], **fields)


def _given(prompts, tokenizer, length, block_size) -> list[prompts_lib.Prompt]:
  """The prompts as tokens; those that are so already are only checked."""
  if not 0 <= length <= block_size:
    raise ValueError(f"length is {length}; it must be from 0 to {block_size}, the tokens of the model's blocks.")
  prompts = [prompts] if isinstance(prompts, (str, prompts_lib.Prompt)) else prompts
  given = [prompts_lib.parse(prompt, tokenizer, length, block_size, f"prompts[{i}]") if isinstance(prompt, str) else prompt
           for i, prompt in enumerate(prompts)]
  if not given:
    raise ValueError("prompts is empty; give at least one, which may be the empty text.")
  for i, prompt in enumerate(given):
    if len(prompt.tokens) > block_size:
      raise ValueError(f"prompts[{i}]: is of {len(prompt.tokens)} tokens; the model's blocks have {block_size}.")
    if prompt.tokens.min() < 0 or prompt.tokens.max() >= tokenizer.vocab_size:
      raise ValueError(f"prompts[{i}]: has tokens from {prompt.tokens.min()} to {prompt.tokens.max()}; the tokenizer's ids are "
                       f"0 to {tokenizer.vocab_size - 1}.")
  return given


def tokens_to_draw(prompts: Sequence[prompts_lib.Prompt], num_samples: int) -> int:
  return num_samples * sum(int((~prompt.known).sum()) for prompt in prompts)


def tokens_drawn(texts: Sequence[Text]) -> int:
  return sum(step > 0 for text in texts for step in text.steps)


@functools.partial(jax.jit, static_argnames=("spec", "length"))
def _draw_orders(spec, length, seed, prompts, samples):
  key, _ = jax.random.split(orders.root_key(seed))
  return jax.vmap(lambda p, s: orders.draw(spec, key, p, s[None], length)[0])(prompts, samples)


@functools.partial(jax.jit, static_argnames=("spec",))
def _keys(spec, seed, prompts, samples):
  _, key = jax.random.split(orders.root_key(seed))
  key = jax.random.fold_in(key, zlib.crc32(spec.encode()))  # else a text would have the noise of one in another order
  return jax.vmap(lambda p, s: jax.random.fold_in(jax.random.fold_in(key, p), s))(prompts, samples)


def _together(plans: list[plan_lib.Plan], block_size: int) -> plan_lib.Plan:
  """One plan [B, L] of plans [1, L'] for texts of any lengths.

  The positions past the end of a text come last in its order, and in no step. L is a power of two or T: few programs.
  """
  longest = max(plan.orders.shape[1] for plan in plans)
  length = min(1 << (longest - 1).bit_length(), block_size)
  table = np.zeros((max(plan.steps.max(initial=0) for plan in plans), len(plans)), np.int32)
  for b, plan in enumerate(plans):
    table[plan.steps - 1, b] = plan.counts[:, 0]
  busy = np.flatnonzero(table.any(axis=1))
  return plan_lib.Plan(
      np.stack([np.append(plan.orders[0], np.arange(plan.orders.shape[1], length, dtype=np.int32)) for plan in plans]),
      np.concatenate([plan.known for plan in plans]), table[busy], (busy + 1).astype(np.int32))


def options(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """The arguments of `generate` that a config's section `sample` gives: all but the prompts and the order."""
  return {name: config[name] for name in config if name not in ("prompt", "prompt_file", "orders")}


def pieces(ids: Sequence[int], tokenizer: tokenizers.Tokenizer) -> list[tuple[str, bool]]:
  """What token ids say, in pieces that are known or, where ids are -1, UNKNOWN for each token.

  Bytes at the edge of what is known, which are no character without their unknown neighbours, are UNKNOWN too.
  """
  tokens = np.asarray(ids)
  runs = np.split(tokens, np.flatnonzero(np.diff(tokens >= 0)) + 1)
  result = []
  for i, run in enumerate(runs):
    if run[0] < 0:
      result.append((UNKNOWN * len(run), False))
      continue
    text = tokenizer.decode(run)
    before = len(text) - len(text.lstrip("\ufffd")) if i > 0 else 0
    after = len(text) - len(text.rstrip("\ufffd")) if i < len(runs) - 1 and before < len(text) else 0
    result += [(UNKNOWN * before, False), (text[before : len(text) - after], True), (UNKNOWN * after, False)]
  return [(text, known) for text, known in result if text]


def readable(texts: Sequence[Text], name_prompts: bool = False) -> str:
  """The texts under headings, without what would do something to a terminal."""
  return "".join(f"{heading(text, name_prompts)}\n{console.printable(text.text)}\n" for text in texts)


def heading(text: Text, name_prompts: bool) -> str:
  """E.g. "--- uniform, 16 evaluations, prompt 2, sample 1 ---"; numbers from 1."""
  order = text.order if len(text.order) <= 40 else text.order[:37] + "..."
  prompt = f", prompt {text.prompt_index + 1}" if name_prompts else ""
  return f"--- {order}, {text.evaluations} evaluations{prompt}, sample {text.sample_index + 1} ---"


def json_lines(texts: Sequence[Text]) -> str:
  """A JSON object per text, with the fields of Text."""
  return "".join(json.dumps(dataclasses.asdict(text), ensure_ascii=False) + "\n" for text in texts)
