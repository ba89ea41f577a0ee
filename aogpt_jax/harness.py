"""The lm-evaluation-harness for a run's model: python -m aogpt_jax.harness --workdir=DIR --tasks=lambada_openai,piqa [...]

All other arguments are the harness's own, e.g. --num_fewshot, --limit, --batch_size, --include_path, --use_cache, --output_path;
further ones of the model go into --model_args: weights=raw, max_gen_toks=64, seed=1. In Python, importing this module registers the
model as "aogpt_jax" with the harness.

Likelihoods are exact: the context comes first, left to right, and the continuation after it. Texts are drawn left to right, too.
"""

from collections.abc import Iterator, Sequence
import sys
from typing import Any

try:
  from lm_eval import __main__ as lm_eval_main
  from lm_eval.api import model as lm_eval_model
  from lm_eval.api import registry
except ImportError as e:
  if __name__ != "__main__":
    raise
  sys.exit(f"error: lm-evaluation-harness can't be imported ({e}); pip install 'aogpt_jax[lm-eval]'")
import jax
import ml_collections
import numpy as np

from aogpt_jax import config as config_lib
from aogpt_jax import console
from aogpt_jax import sharding
from aogpt_jax.evaluation import continuations
from aogpt_jax.sampling import prompts
from aogpt_jax.sampling import texts
from aogpt_jax.training import checkpoints

NAME = "aogpt_jax"
_BATCH_SIZE = 16
# How a task may say how many tokens are drawn at most.
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@registry.register_model(NAME)
class Adapter(lm_eval_model.TemplateLM):
  """A decoder of a run, as the harness asks models.

  Args:
    workdir: of the run.
    weights: ema or raw.
    batch_size: sequences at once; a multiple of the devices is made of it.
    max_gen_toks: tokens drawn at most, where a task does not say.
    seed: of texts that are drawn at a temperature.
    device, max_batch_size: what the harness always says; JAX chooses the devices, and batches are as large as given.

  Raises:
    OSError: there is no checkpoint that can be restored.
    ConfigError: an argument that can't be.
  """

  def __init__(self, workdir: str, weights: str = "ema", batch_size: int | str = _BATCH_SIZE, max_gen_toks: int = 128,
               seed: int = 0, device: str | None = None, max_batch_size: int | None = None):
    super().__init__()
    del device, max_batch_size
    if not str(batch_size).isdigit() or int(batch_size) < 1:
      raise config_lib.ConfigError(f"batch_size={batch_size}: must be a number of at least 1.")
    if weights not in checkpoints.WEIGHTS:
      raise config_lib.ConfigError(f"weights={weights}: must be one of {', '.join(checkpoints.WEIGHTS)}.")
    self._mesh = sharding.make_mesh(_split_over_all_devices())
    self.batch_size = -(-int(batch_size) // self._mesh.size) * self._mesh.size
    self._model, self._params = checkpoints.load_model(str(workdir), self._mesh, weights)
    self._tokenizer = checkpoints.load_tokenizer(str(workdir))
    self._max_gen_toks, self._seed = max_gen_toks, seed

  @property
  def eot_token_id(self) -> int:
    """The boundary between documents; before a text without a context, there is one."""
    return self._tokenizer.boundary_id

  @property
  def max_length(self) -> int:
    return self._model.block_size

  @property
  def tokenizer_name(self) -> str:
    return f"{self._tokenizer.name}-{self._tokenizer.fingerprint[:12]}"

  def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
    del add_special_tokens, kwargs  # no text has the boundary in it
    return self._tokenizer.encode(string).tolist()

  def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs: Any) -> list[tuple[float, bool]]:
    del disable_tqdm, kwargs
    found = self._score([(context, continuation) for _, context, continuation in requests], "log-likelihoods")
    for (pair, *_), answer in zip(requests, found):
      self.cache_hook.add_partial("loglikelihood", pair, answer)
    return found

  def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
    """log p of whole texts after the boundary, in nats; longer ones than a block in windows."""
    del disable_tqdm
    found = self._score([([self.prefix_token_id], self.tok_encode(*request.args)) for request in requests], "texts")
    for request, (nats, _) in zip(requests, found):
      self.cache_hook.add_partial("loglikelihood_rolling", request.args, nats)
    return [nats for nats, _ in found]

  def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
    """What the sampler draws after each context, up to the boundary, a text to stop at, or the tokens that there are at most."""
    del disable_tqdm
    asked = [(self.tok_encode(context) or [self.prefix_token_id], _Generation(kwargs, self._max_gen_toks, self.max_length))
             for context, kwargs in (request.args for request in requests)]
    settings = sorted({generation.sampler for _, generation in asked})
    progress = console.Progress("drawing", len(requests), "texts")
    found, done, batches = [""] * len(requests), 0, 0
    for sampler in settings:
      chosen = [i for i, (_, generation) in enumerate(asked) if generation.sampler == sampler]
      chosen.sort(key=lambda i: -asked[i][1].length(asked[i][0]))
      for start in range(0, len(chosen), self.batch_size):
        batch = chosen[start : start + self.batch_size]
        batches += 1
        for i, text in zip(batch, self._draw([asked[i] for i in batch], dict(sampler), (self._seed + batches) % 2**32)):
          found[i] = text
          self.cache_hook.add_partial("generate_until", requests[i].args, text)
        done += len(batch)
        progress(done)
    return found

  def _score(self, pairs, what: str) -> list[tuple[float, bool]]:
    total = sum(len([*continuations.windows(context, continuation, self.max_length)]) for context, continuation in pairs)
    return continuations.score(
        self._model, self._params, pairs, num_tokens=self._tokenizer.vocab_size, mesh=self._mesh, batch_size=self.batch_size,
        progress=console.Progress(f"scoring {what}", total))

  def _draw(self, asked: Sequence[tuple[list[int], "_Generation"]], sampler: dict[str, Any], seed: int) -> Iterator[str]:
    """The texts drawn after some contexts with the same settings; no longer than until all of them have come to their end."""
    given = []
    for context, generation in asked:
      length = generation.length(context)
      kept = context[len(context) + generation.limit - length :] if length > generation.limit else []
      tokens = np.zeros(length, np.int32)
      tokens[: len(kept)] = kept
      given.append(prompts.Prompt(tokens, np.arange(length) < len(kept)))
    given += given[-1:] * (self.batch_size - len(given))  # one program
    drawn = []
    for batch in texts.stream_generate(self._model, self._params, self._tokenizer, given, order="left_to_right", seed=seed,
                                       batch_size=self.batch_size, mesh=self._mesh, **sampler):
      drawn = [generation.cut(text.ids, int(prompt.known.sum()), self._tokenizer)
               for (_, generation), text, prompt in zip(asked, batch, given)]
      if all(is_over for _, is_over in drawn):
        break
    return (text for text, _ in drawn)


class _Generation:
  """How a text is to be drawn, from a task's settings."""

  def __init__(self, kwargs: dict[str, Any], default_limit: int, block_size: int):
    kwargs = dict(kwargs)
    until = kwargs.pop("until", None) or []
    self.until = [until] if isinstance(until, str) else list(until)
    limits = [kwargs.pop(name) for name in _LIMITS if name in kwargs]
    self.limit = int((limits or [default_limit])[0])
    if not 1 <= self.limit <= block_size:
      raise config_lib.ConfigError(f"{self.limit} tokens are to be drawn at most; the model's blocks have {block_size}: set "
                                   "--gen_kwargs=max_gen_toks=N.")
    self._block_size = block_size
    do_sample = kwargs.pop("do_sample", None)  # where a task does not say, it is what a temperature above 0 means
    temperature = float(kwargs.pop("temperature", 1.0 if do_sample else 0.0))
    sampler = {"temperature": 0.0 if do_sample is False else temperature, "top_p": float(kwargs.pop("top_p", 1.0)),
               "top_k": int(kwargs.pop("top_k", 0))}
    if kwargs:
      raise config_lib.ConfigError(f"the sampler has no {', '.join(sorted(kwargs))}; set --gen_kwargs to what it has: until, "
                                   f"do_sample, temperature, top_p, top_k, {_LIMITS[0]}.")
    self.sampler = tuple(sorted(sampler.items()))

  def length(self, context: list[int]) -> int:
    """Tokens of the whole text; of the context, so many of the last are kept as there is room for."""
    return min(len(context) + self.limit, self._block_size)

  def cut(self, ids: list[int], known: int, tokenizer) -> tuple[str, bool]:
    """What is drawn so far, and whether it has come to its end."""
    drawn, is_over = ids[known:], -1 not in ids
    for end in (-1, tokenizer.boundary_id):
      if end in drawn:
        is_over |= end != -1
        drawn = drawn[: drawn.index(end)]
    text = tokenizer.decode(drawn)
    ends = [text.index(stop) for stop in self.until if stop and stop in text]
    return text[: min(ends)] if ends else text, is_over or bool(ends)


def _split_over_all_devices() -> ml_collections.ConfigDict:
  config = config_lib.default_config()
  config.batch_size = config.eval.batch_size = jax.device_count()
  return config


def main(argv: list[str]) -> None:
  """The harness's own command, with this model in place of --model and --workdir among the arguments of the model."""
  workdir, model_args, others = None, [], []
  arguments = iter(argv[1:])
  for argument in arguments:
    name, equals, value = argument.partition("=")
    if name not in ("--workdir", "--model_args"):
      others.append(argument)
      continue
    value = value if equals else next(arguments, "")
    if name == "--workdir":
      workdir = value
    else:
      model_args.append(value)
  if not workdir or "," in workdir or "=" in workdir:
    sys.exit(f"error: --workdir={workdir or ''}: give the directory of a run, without commas and equals signs in its name")
  if not {"--batch_size", "-b"} & {argument.partition("=")[0] for argument in others}:
    others += ["--batch_size", str(_BATCH_SIZE)]  # else the harness says 1
  sys.argv = [argv[0], "--model", NAME, "--model_args", ",".join([f"workdir={workdir}", *model_args]), *others]
  try:
    lm_eval_main.cli_evaluate()
  except (config_lib.ConfigError, FileNotFoundError) as e:
    sys.exit(f"error: {e}")


if __name__ == "__main__":
  main(sys.argv)
