"""The config: every field with its unit and meaning, and the checks that run before anything is compiled.

The defaults are AO-GPT small as released. A file in configs/ takes `default_config()` and sets what differs.
"""

from collections.abc import Iterator
import difflib
import math
import pathlib
import re
from typing import Any

import ml_collections
from ml_collections import config_dict

from aogpt_jax import orders
from aogpt_jax import samplers
from aogpt_jax.data import tokenizers
from aogpt_jax.data import zero_shot


LONGEST = 1 << 20  # tokens of a sequence: what is longer is a mistake, and would take gigabytes to be looked at
# Preset -> devices along data, fsdp and tensor; -1: all that are left.
MESH_PRESETS = {"dp": (-1, 1, 1), "fsdp": (1, -1, 1), "tp": (1, 1, -1), "fsdp_tp": (1, -1, 2)}
# Architecture -> what it can be trained by; see aogpt_jax/objectives.py.
OBJECTIVES = {"decoder": ("any_order", "context_average"), "encoder": ("ao", "lambda_dce", "score_entropy")}


class ConfigError(ValueError):
  """A field is unknown, out of range or contradicts another one; the message names it and the fix."""


def default_config() -> ml_collections.ConfigDict:
  """AO-GPT small (12 layers x 768, 170,605,952 parameters), the released recipe."""
  c = config_dict.create
  return c(
      seed=0,  # of the initialisation, the data order and the token orders
      steps=250_000,  # updates in all; a run that is started again goes on to this number
      batch_size=1024,  # sequences per update, over all devices and micro-batches
      micro_batches=1,  # an update's batch is run in this many parts, one after another, to save memory
      orders="mix(0.1)",  # distribution of the training orders, or a schedule of it: see aogpt_jax/orders.py for the names
      # What training minimises: of a decoder any_order, or context_average, which averages probabilities over 4 orders of a
      # context at 4 times the cost; of an encoder ao (RADD), whose known tokens are the beginning of such an
      # order, lambda_dce (MDLM, MD4) or score_entropy (SEDD), which mask each token by itself; see aogpt_jax/objectives.py.
      objective="any_order",
      # What the parameters start from where the workdir has no checkpoint: those of the newest checkpoint of another WORKDIR, or of
      # GPT-2 of Hugging Face as gpt2:NAME or gpt2:DIRECTORY; "": random.
      init_from="",
      init_weights="ema",  # ema | raw: which of that run's parameters
      init_optimizer="reset",  # reset | kept: whether the moments of that run's optimiser are taken over
      model=c(
          architecture="decoder",  # of AO-GPT; or encoder, a masked diffusion model on the same blocks
          layers=12,  # L, transformer blocks
          width=768,  # D
          heads=12,  # H; divides the width
          block_size=1024,  # T, tokens per sequence
          vocab_size=50304,  # V, rows of the token table: the tokenizer's ids, padded; padding is never sampled
          num_tokens=0,  # V', of an encoder: the tokenizer's ids, and its mask's id; 0: those of bytes or gpt2
          cond_width=128,  # C, width of the target-position table
          # How an entry is told its target position: adaln; or a row of width D that is added to the input (input), the same one
          # again before every layer (layer_shared), or one of another table before each (layer_distinct).
          target="adaln",
          gate_init=0.0,  # initial bias of the adaLN gates; 0 is the paper's, 1 starts with open residual branches
          norm="rms",  # of the blocks and before the head: rms, or layer, as sigma-GPT
          qk_norm=True,  # RMSNorm on queries and keys
          activation="gelu",  # of the MLP: gelu (exact), or gelu_tanh, its approximation in GPT-2
          tied_head=False,  # the head is the token table, without a bias, as sigma-GPT's
          bias=True,  # in all Dense layers and LayerNorms
          weight_init="truncated_normal",  # of kernels and embeddings: cut at 3 standard deviations; or normal, as sigma-GPT's
          position_init="normal",  # of position and target tables: normal, as other weights, is the paper's; sinusoid learns sooner
          dtype="bfloat16",  # of the matmuls: float32 or bfloat16
          param_dtype="float32",  # of parameters, optimiser state and EMA
          # Among the entries of a pass: xla runs everywhere; cudnn on NVIDIA GPUs, in bfloat16; splash on TPUs, for a block_size of a
          # multiple of 128; auto takes these where they run, by the devices of the mesh. A loaded model always does: see attention.py.
          attention="auto",
          # What the backward pass computes again, for less memory: nothing (none), what is no matmul with parameters (dots), or
          # whole blocks (full), for a third more compute.
          remat="none",
          scan_layers=True,  # one compiled block for all layers; False unrolls them: faster steps, slower compilation
          # Entries of a sequence whose logits a loss has at the same time; 0: all, -1: as many as take a device 128 MiB. If these are all
          # entries, the backward pass has them still, else it computes them again.
          head_chunk=-1,
      ),
      optimizer=c(
          learning_rate=6e-4,  # peak, after the warm-up
          final_learning_rate=6e-5,  # at the end of the cosine decay, and after it
          warmup_steps=2000,  # updates; linear from 0
          decay_steps=500_000,  # updates at which the decay ends, warm-up included
          beta1=0.9,  # decay of the average of gradients in AdamW
          beta2=0.95,  # and of their squares
          eps=1e-8,  # added to the root of that
          weight_decay=0.05,  # decoupled, times the learning rate
          # (regex of a parameter's full path, whether it decays); the first match counts, every parameter needs one.
          weight_decay_rules=((r".*/(kernel|embedding)", True), (r".*/(bias|scale)", False)),
          clip_norm=1.0,  # global norm to which a larger gradient is scaled down
          ema_decay=0.9999,  # largest decay of the parameters' moving average; 0 makes it the parameters
          # Updates, in the whole run, that are left out because their loss or gradient is not finite; the next one stops the run.
          skip_nonfinite=0,
      ),
      data=c(
          source="tfds:huggingface:openwebtext",  # stdlib | files:GLOB | lines:GLOB | tfds:NAME and others; see data/sources.py
          text_field="text",  # of a JSONL line or a TFDS example
          # Of a JSONL line or CSV record that is an example: a prompt, given first, and a completion, which alone is learnt and
          # scored. A prompt with blanks, as "The [[]] of", takes an answer for each from a list. "": there are documents.
          prompt_field="",
          completion_field="completion",  # of the completions, where there are prompts
          train_split="train",  # of a TFDS data set; slices such as train[:99%] are allowed
          validation_split="",  # "": held out of the training split by a hash of the document
          test_split="",  # likewise
          validation_fraction=0.005,  # of the documents, where they are held out by hash
          test_fraction=0.005,  # likewise
          tokenizer="gpt2",  # bytes | gpt2 | path of a tiktoken rank file
          cache_dir="~/.cache/aogpt_jax",  # where tokenised and packed data is kept
          tfds_data_dir="",  # where prepared TFDS data sets lie; "": TFDS's default
          workers=0,  # processes that tokenise; 0: this one
          prefetch=4,  # batches read ahead
      ),
      mesh=c(
          # How all devices share the work: dp splits the batch, fsdp the batch and the parameters, tp heads, MLP and vocabulary;
          # fsdp_tp these over `tensor` devices, 2 where it is 1, and the rest over all others. "": as the numbers below say.
          preset="",
          data=-1,  # devices along which the batch is split; -1: all that the other axes leave
          fsdp=1,  # devices along which the batch and the parameters are split; or -1
          tensor=1,  # devices along which heads, MLP and vocabulary are split; or -1
      ),
      # (logical axis of a parameter, mesh axis or "" for none): see aogpt_jax/sharding.py for the names.
      sharding_rules=(
          ("embed", "fsdp"),
          ("heads", "tensor"),
          ("mlp", "tensor"),
          ("vocab", "tensor"),
      ),
      eval=c(
          every_steps=2000,  # updates between evaluations while it trains
          batch_size=64,  # sequences scored at once
          sequences=1024,  # at most, spread evenly over the split; 0: all
          # Of the orders in which the text is scored: names as for training orders, but no schedules.
          distributions=("left_to_right", "uniform"),
          orders=4,  # R, orders per sequence of a distribution that has several; K of the importance-weighted bound
          masks=16,  # passes per sequence from which an encoder's likelihood in uniform order is estimated; 0: T passes an order
          # What follows is of --mode=eval and of the evaluation after training, on all sequences.
          split="validation",  # train | validation | test
          limit=0,  # sequences, at most, spread evenly over the split; 0: all
          # Of another text to score, all of files:GLOB or this split of tfds:NAME; "": the run's own held-out text. Records are
          # examples where the run's own are.
          source="",
          ensemble=1,  # M, orders of each token's context over which its probability is averaged; 1: no ensemble
          gap=0,  # M, of the mixture in the gap to masked diffusion, at least 2; 0: no gap
          targets=0,  # tokens of each sequence whose contexts are permuted for these two, at random; 0: all, which is exact
          lanes=32,  # contexts that a device runs at the same time for them; each needs the cache of a sequence
          weights="ema",  # ema | raw: the moving average of the parameters, or those of the last update
          seed=0,  # of all orders and permutations, also at the evaluations during training
          zero_shot=c(  # where it names data sets, --mode=eval scores these and nothing of the run's own
              datasets=(),  # lambada, wikitext2, ptb, wikitext103, lm1b; of TFDS, or NAME=FILE in its published format
              models=("run",),  # run, and gpt2:NAME or gpt2:DIRECTORY for GPT-2 of Hugging Face
              recipe="sedd",  # sedd as the published figures, which drops remainders; exact scores every token
              detokenize=True,  # by the rules of each data set
              end_of_text=True,  # the boundary after each row
              split="",  # of TFDS data sets, as train or test[:10%]; "": what the protocol scores
              shards=8,  # of the recipe sedd: parts of the data set
              map_batch=1000,  # rows of a part that the recipe sedd packs together, dropping what is left
          ),
          # With a judge, generated texts are measured, of files or, where there are steps, of a sweep; for them, --mode=eval needs no
          # other text, and takes none.
          generative=c(
              judge="",  # gpt2 | gpt2-medium | gpt2-large | gpt2-xl | ORGANISATION/NAME | directory of such a model; "": none
              dtype="float32",  # of the judge's matmuls: float32 or bfloat16
              tokenizer="gpt2",  # the judge's: gpt2 | path of a tiktoken rank file
              batch_size=8,  # texts scored at once, at most
              samples="",  # glob: .jsonl with a field "text", any other file is a text; "": the run's samples.jsonl
              steps=(),  # S of each column of the sweep, as (64, 128); (): no sweep
              filters=((1.0, 1.0), (0.95, 0.9), (0.95, 0.7)),  # (top_p, temperature) of each row
              seeds=1,  # for each, from sample.seed on
              num_samples=64,  # texts drawn for each
              order="uniform",  # of generation; what is not said here is as in `sample`, but for prompts
          ),
      ),
      sample=c(
          num_samples=2,  # texts drawn for each prompt and order; at each evaluation without a prompt
          batch_size=32,  # texts drawn at once, at most; has no say in what is drawn
          prompt="",  # not at evaluations: a text in which [[n]] stands for n tokens to be drawn; see sampling/prompts.py
          prompt_file="",  # instead of prompt: a file with a prompt a line, or .jsonl with a field "prompt"; - standard input
          length=0,  # tokens of a text; 0: block_size, or the prompt's length where it has blanks
          # Of generation: names as for training orders, or explicit((3, 0, 2, 1)), but no schedules.
          orders=("left_to_right", "uniform"),
          # plan, which knows beforehand what is drawn in which step; speculative, as a plan of one token a step but in fewer passes;
          # burst, of sigma-GPT, which is not exact; or adaptive, the surest tokens first. The last two choose orders themselves.
          sampler="plan",
          steps=0,  # S, in which a text is drawn; 0: as many as it has tokens. Of plan and adaptive, as the next two
          counts="fixed",  # of tokens in each step: fixed, or binomial as in the masked-diffusion process
          schedule="linear",  # of the noise level over the steps: linear or cosine
          spaced=False,  # of plan: positions revealed together are spread evenly over those that are open
          contexts=1,  # M, of plan: orders of the known tokens over which probabilities are averaged; above 1, M full passes a step
          window=4,  # w, of speculative: tokens drafted at once
          checks=4,  # of burst: random orders in which a draft is checked, each a full pass
          criterion="margin",  # of adaptive: probability of the likeliest token, its margin to the next, or entropy
          noise=0.0,  # of adaptive: scale of Gumbel noise that is added to that
          candidates=0,  # of adaptive: open positions that are asked in a step, a random subset; 0: all
          temperature=1.0,  # divides the logits; 0 takes the most probable token
          top_p=1.0,  # keeps the most probable tokens while the mass before them is below it; 1 keeps all
          top_p_rule="standard",  # reference: as the PyTorch code, which drops the token that crosses top_p
          top_k=0,  # keeps the k most probable tokens; 0 keeps all
          seed=0,  # of the orders, the numbers of tokens in each step and the tokens
      ),
      checkpoint=c(
          every_steps=2000,  # updates; the last one is always saved
          keep=2,  # newest checkpoints kept
          keep_every_steps=0,  # updates; checkpoints at multiples of this are kept for good; 0: none
      ),
      log=c(
          every_steps=10,  # updates between records of the loss
          tensorboard=True,  # event files in WORKDIR/tensorboard, beside metrics.jsonl, where tensorboardX is installed
          wandb=False,  # also to Weights & Biases, where wandb is installed; see docs/monitoring.md
          spike=10.0,  # a warning names each step whose gradient norm is so many times the median of those before; 0: none
          profile=(),  # (a, b): a trace of the steps a to b, for TensorBoard and Perfetto, in WORKDIR/profile; (): none
      ),
      compilation_cache="~/.cache/aogpt_jax/xla",  # where compiled programs are kept for the next start; "": nowhere
  )


def check(config: ml_collections.ConfigDict) -> None:
  """Raises ConfigError, one line per problem, each naming the field, its value and the fix."""
  problems = list(_unknown(config, default_config(), "config")) or list(_problems(config))
  if problems:
    raise ConfigError("\n".join(problems))


def _unknown(given: Any, known: Any, path: str) -> Iterator[str]:
  for name in given:
    if name not in known:
      yield _no_such_field(name, known, path)
    elif isinstance(known[name], config_dict.ConfigDict):
      if isinstance(given[name], config_dict.ConfigDict):
        yield from _unknown(given[name], known[name], f"{path}.{name}")
      else:
        yield f"{path}.{name}: is {given[name]!r}, but has the fields {', '.join(known[name])}; set those."
    elif not _same_type(given[name], known[name]):
      yield (f"{path}.{name}: {given[name]!r} is of type {type(given[name]).__name__}; "
             f"give a {type(known[name]).__name__} such as {known[name]!r}.")
  for name in known:
    if name not in given:
      yield f"{path}.{name}: is missing; start from aogpt_jax.config.default_config()."


def _no_such_field(name: str, known: config_dict.ConfigDict, path: str) -> str:
  near = difflib.get_close_matches(name, list(known), n=1)
  hint = f"did you mean {path}.{near[0]}?" if near else f"{path} has {', '.join(known)}."
  return f"{path}.{name}: there is no such field; {hint}"


def check_field(path: str) -> None:
  """Raises ConfigError where a dotted path such as "model.width" names no field."""
  known, prefix = default_config(), "config"
  for name in path.split("."):
    if not isinstance(known, config_dict.ConfigDict):
      raise ConfigError(f"config.{path}: {prefix} is one value and has no fields; set that.")
    if name not in known:
      raise ConfigError(_no_such_field(name, known, prefix))
    known, prefix = known[name], f"{prefix}.{name}"


def _same_type(value: Any, example: Any) -> bool:
  if isinstance(example, float):
    return isinstance(value, (int, float)) and not isinstance(value, bool)
  return type(value) is type(example)


def _problems(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields what is out of range, then what contradicts."""

  def out_of_range(fields: str, wanted: str, is_ok) -> Iterator[str]:
    for field in fields.split():
      value = config
      for part in field.split("."):
        value = value[part]
      if not is_ok(value):
        yield f"config.{field}: is {value!r}; it must be {wanted}."

  mistyped = list(out_of_range("eval.distributions eval.zero_shot.datasets eval.zero_shot.models sample.orders",
                               "a tuple of texts, as ('uniform',)", lambda x: all(isinstance(text, str) for text in x)))
  if mistyped:  # what follows reads them as texts
    yield from mistyped
    return
  yield from out_of_range(
      "steps batch_size micro_batches model.layers model.width model.heads model.block_size model.vocab_size "
      "model.cond_width optimizer.decay_steps data.prefetch eval.every_steps eval.batch_size "
      "eval.orders eval.ensemble eval.lanes eval.zero_shot.shards eval.zero_shot.map_batch eval.generative.batch_size "
      "eval.generative.seeds eval.generative.num_samples sample.num_samples sample.batch_size "
      "checkpoint.every_steps checkpoint.keep log.every_steps",
      "at least 1", lambda x: x >= 1)
  yield from out_of_range(
      "seed model.num_tokens optimizer.warmup_steps optimizer.weight_decay data.workers eval.sequences eval.masks eval.limit "
      "eval.targets eval.seed sample.length sample.temperature sample.top_k sample.seed checkpoint.keep_every_steps "
      "optimizer.skip_nonfinite",
      "0 or more", lambda x: x >= 0)
  yield from out_of_range("model.block_size", f"at most {LONGEST:,}", lambda x: x <= LONGEST)
  yield from out_of_range("model.head_chunk", "-1 (chosen), 0 (all) or more", lambda x: x >= -1)
  yield from out_of_range("seed eval.seed sample.seed", "below 2**32", lambda x: x < 2**32)
  yield from out_of_range(
      "optimizer.learning_rate optimizer.final_learning_rate optimizer.eps optimizer.clip_norm",
      "above 0", lambda x: x > 0)
  yield from out_of_range(
      "optimizer.beta1 optimizer.beta2 optimizer.ema_decay data.validation_fraction data.test_fraction",
      "at least 0 and below 1", lambda x: 0 <= x < 1)
  yield from out_of_range("sample.top_p", "from 0 to 1", lambda x: 0 <= x <= 1)
  yield from out_of_range("log.spike", "0 (no warnings) or above 1, and finite", lambda x: x == 0 or 1 < x < math.inf)
  yield from out_of_range("eval.gap", "0 (no gap) or at least 2", lambda x: x == 0 or x >= 2)
  yield from out_of_range(
      "mesh.data mesh.fsdp mesh.tensor", "-1 (all devices left) or at least 1", lambda x: x == -1 or x >= 1)
  yield from out_of_range(
      "optimizer.learning_rate optimizer.final_learning_rate optimizer.eps optimizer.weight_decay sample.temperature "
      "model.gate_init", "finite", math.isfinite)
  yield from out_of_range(
      "optimizer.weight_decay_rules", "pairs of a regular expression and True or False, as (('.*/kernel', True),)",
      lambda rules: _are_pairs(rules, str, bool) and all(_is_regex(pattern) for pattern, _ in rules))
  yield from out_of_range(
      "log.profile", "() or the first and the last step of a trace, as (10, 12)",
      lambda steps: not steps or len(steps) == 2 and all(type(n) is int for n in steps) and 1 <= steps[0] <= steps[1])
  yield from out_of_range(
      "sharding_rules", "pairs of a logical and a mesh axis, as (('embed', 'fsdp'),)",
      lambda rules: _are_pairs(rules, str, str))
  yield from out_of_range(
      "eval.generative.steps", "different numbers of steps, at least 1, as (64, 128)",
      lambda steps: all(type(s) is int and s >= 1 for s in steps) and len({*steps}) == len(steps))
  yield from out_of_range(
      "eval.generative.filters", "different pairs of top_p, from 0 to 1, and temperature, 0 or more, as ((0.95, 0.9),)",
      lambda filters: filters and _are_pairs(filters, (int, float), (int, float)) and len({*filters}) == len(filters) and all(
          0 <= top_p <= 1 and 0 <= temperature < math.inf for top_p, temperature in filters))
  for field, choices in (
      ("mesh.preset", ("", *MESH_PRESETS)),
      ("model.architecture", tuple(OBJECTIVES)),
      ("objective", sum(OBJECTIVES.values(), ())),
      ("model.target", ("adaln", "input", "layer_shared", "layer_distinct")),
      ("model.norm", ("rms", "layer")),
      ("model.activation", ("gelu", "gelu_tanh")),
      ("model.weight_init", ("truncated_normal", "normal")),
      ("model.position_init", ("normal", "sinusoid")),
      ("model.remat", ("none", "dots", "full")),
      ("model.dtype", ("float32", "bfloat16")),
      ("model.attention", ("auto", "xla", "cudnn", "splash")),
      ("model.param_dtype", ("float32", "bfloat16")),
      ("eval.generative.dtype", ("float32", "bfloat16")),
      ("sample.counts", ("fixed", "binomial")),
      ("sample.schedule", ("linear", "cosine")),
      ("sample.top_p_rule", ("standard", "reference")),
      ("eval.split", ("train", "validation", "test")),
      ("eval.weights", ("ema", "raw")),
      ("init_weights", ("ema", "raw")),
      ("init_optimizer", ("reset", "kept")),
      ("eval.zero_shot.recipe", zero_shot.RECIPES),
  ):
    yield from out_of_range(field, f"one of {', '.join(choices)}", lambda x: x in choices)  # pylint: disable=cell-var-from-loop

  m, s = config.model, config.sample
  for name, problem in samplers.problems(s.sampler, s):
    yield f"config.sample.{name}: {problem}"
  if s.sampler in samplers.CHOOSE_ORDERS and s.orders != ("uniform",):
    yield f"config.sample.orders: are {s.orders}, and config.sample.sampler = {s.sampler} chooses them; set it to ('uniform',)."
  if config.eval.generative.steps and "steps" not in samplers.SAMPLERS.get(s.sampler, ("steps",)):
    yield (f"config.eval.generative.steps: {config.eval.generative.steps} are of a sweep over steps, and config.sample.sampler = "
           f"{s.sampler} has none; set one of them to its default.")
  if m.architecture in OBJECTIVES:
    yield from _misfits(config)
  if m.param_dtype == "bfloat16" and config.optimizer.ema_decay > 0.99:
    yield (f"config.model.param_dtype: in bfloat16 an average with config.optimizer.ema_decay = {config.optimizer.ema_decay} "
           "never moves, since its updates round to nothing; use float32.")
  if m.heads >= 1 and m.width % m.heads:
    yield f"config.model.heads: {m.heads} does not divide config.model.width = {m.width}; choose heads that do."
  problem = attention_problem(m, m.attention)
  if problem:
    yield f"config.model.attention: {problem}"
  if m.gate_init and m.target != "adaln":
    yield (f"config.model.gate_init: {m.gate_init} is of the gates of adaLN, and config.model.target = {m.target} has none; "
           "set it to 0.0.")
  if m.gate_init and not m.bias:
    yield (f"config.model.gate_init: {m.gate_init} is of the biases of the gates, and config.model.bias = False leaves none; "
           "set it to 0.0.")
  if config.micro_batches >= 1 and config.batch_size % config.micro_batches:
    yield (f"config.micro_batches: {config.micro_batches} does not divide config.batch_size = {config.batch_size}; "
           "choose a number that does.")
  axes = {axis: config.mesh[axis] for axis in ("data", "fsdp", "tensor")}
  if not config.mesh.preset and list(axes.values()).count(-1) > 1:
    yield (f"config.mesh: {' x '.join(f'{axis}={n}' for axis, n in axes.items())} leaves the rest of the devices to more than one "
           "axis; set one of them to -1 and the others to numbers.")
  for axis, n in axes.items():
    if config.mesh.preset in MESH_PRESETS and n != {"data": -1}.get(axis, 1) and (config.mesh.preset, axis) != ("fsdp_tp", "tensor"):
      yield (f"config.mesh.{axis}: {n} is given beside config.mesh.preset = {config.mesh.preset}, which says it too; set it back "
             'to its default, or preset to "".')
  if config.mesh.preset == "fsdp_tp" and axes["tensor"] == -1:
    yield "config.mesh.tensor: -1 leaves no devices to fsdp of config.mesh.preset = fsdp_tp; give a number, or take the preset tp."
  if config.init_from.startswith("gpt2:") and config.init_optimizer == "kept":
    yield (f"config.init_optimizer: is kept, and config.init_from = {config.init_from} has no optimiser's state; set it to "
           "reset.")
  o = config.optimizer
  if o.warmup_steps >= o.decay_steps:
    yield (f"config.optimizer.warmup_steps: {o.warmup_steps} leaves no decay before config.optimizer.decay_steps = "
           f"{o.decay_steps}; make it smaller.")
  if o.final_learning_rate > o.learning_rate:
    yield (f"config.optimizer.final_learning_rate: {o.final_learning_rate} is above config.optimizer.learning_rate = "
           f"{o.learning_rate}; make it smaller.")
  if config.data.validation_fraction + config.data.test_fraction >= 1:
    yield "config.data.validation_fraction: with test_fraction it leaves no documents to train on; make them smaller."
  if not config.data.source:
    yield "config.data.source: is empty; give stdlib, stdlib_source, files:GLOB or tfds:NAME."
  if config.data.prompt_field or config.data.source.startswith("sudoku:"):
    yield from _examples_misfits(config)
  vocab_size = tokenizers.known_vocab_size(config.data.tokenizer)
  if vocab_size and m.vocab_size < vocab_size:
    yield (f"config.model.vocab_size: {m.vocab_size} is below the {vocab_size} ids of "
           f"config.data.tokenizer = {config.data.tokenizer}; set it to {-(-vocab_size // 64) * 64}.")
  if config.sample.length > m.block_size:
    yield (f"config.sample.length: {config.sample.length} is above config.model.block_size = {m.block_size}; "
           "make it smaller, or 0 for block_size.")
  if config.sample.prompt and config.sample.prompt_file:
    yield (f"config.sample.prompt: {config.sample.prompt!r} is given beside config.sample.prompt_file = "
           f"{config.sample.prompt_file}; give one of them.")
  if not config.sample.orders:
    yield "config.sample.orders: is (); give at least one, as ('uniform',)."
  if not config.eval.distributions:
    yield "config.eval.distributions: is (); give at least one, as ('uniform',)."
  if config.eval.targets > m.block_size:
    yield (f"config.eval.targets: {config.eval.targets} is above config.model.block_size = {m.block_size}; make it smaller, or 0 "
           "for all tokens.")
  g = config.eval.generative
  if g.samples and g.steps:
    yield (f"config.eval.generative.samples: {g.samples!r} is given beside config.eval.generative.steps = {g.steps}, for which "
           "texts are drawn; give one of them.")
  if config.sample.seed + g.seeds > 2**32:
    yield (f"config.eval.generative.seeds: {g.seeds} from config.sample.seed = {config.sample.seed} on do not stay below 2**32; "
           "make one of them smaller.")
  zero_shot_config = config.eval.zero_shot
  for spec in zero_shot_config.datasets:
    try:
      zero_shot.parse(spec)
    except ValueError as e:
      yield f"config.eval.zero_shot.datasets: {e}"
  for spec in zero_shot_config.models:
    if spec != "run" and not (spec.startswith("gpt2:") and len(spec) > 5):
      yield f"config.eval.zero_shot.models: {spec!r} is neither run nor gpt2:NAME; give for example ('run', 'gpt2:gpt2-medium')."
  if zero_shot_config.datasets and not zero_shot_config.models:
    yield "config.eval.zero_shot.models: is (); give at least one, as ('run',)."
  if zero_shot_config.datasets and config.eval.gap:
    yield f"config.eval.gap: {config.eval.gap} is of whole blocks, not of config.eval.zero_shot.datasets; set it to 0."
  specs = [("orders", config.orders)] + [(f"eval.distributions[{i}]", s) for i, s in enumerate(config.eval.distributions)]
  specs += [(f"sample.orders[{i}]", s) for i, s in enumerate(config.sample.orders)] + [("eval.generative.order", g.order)]
  for field, spec in specs:
    try:
      orders.parse(spec)
      if field != "orders":
        orders.check_constant(spec)
      length = (config.sample.length if field == "eval.generative.order" else 0) or m.block_size
      if not field.startswith("sample") and 1 <= length <= LONGEST:  # texts that are drawn are of other lengths too: see run.py
        orders.check(spec, length)
    except ValueError as e:
      yield f"config.{field}: {e}"


def _examples_misfits(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields what does not fit data of prompts and completions."""
  given = (f"config.data.prompt_field = {config.data.prompt_field}" if config.data.prompt_field
           else f"config.data.source = {config.data.source}")
  if config.data.prompt_field and not config.data.source.startswith("files:"):
    yield (f"config.data.prompt_field: {config.data.prompt_field} is of records in files, and config.data.source = "
           f"{config.data.source}; give files:GLOB of .jsonl or .csv files.")
  if config.data.prompt_field and not config.data.completion_field:
    yield f"config.data.completion_field: is empty beside {given}; name the field of the completions."
  if config.objective != "any_order":
    yield f"config.objective: {config.objective} has no prompts, and {given}; set it to any_order."
  for field, value, default in (("eval.ensemble", config.eval.ensemble, 1), ("eval.gap", config.eval.gap, 0)):
    if value != default and not config.eval.zero_shot.datasets:
      yield f"config.{field}: {value} is of texts without prompts, and {given}; set it to {default}."
def attention_problem(model: ml_collections.ConfigDict, name: str) -> str:
  """Why an implementation of attention can't run the blocks of `config.model` on any device, with the fix; "" where it can."""
  head_dim = model.width // max(model.heads, 1)
  if name == "cudnn" and model.dtype != "bfloat16":
    return f"cudnn computes in bfloat16, not in config.model.dtype = {model.dtype}; set it to auto or xla."
  if name == "cudnn" and (head_dim % 8 or head_dim > 128):
    return (f"cudnn takes heads of a multiple of 8 up to 128, not of {head_dim} = config.model.width / heads; choose such heads, or "
            "set it to auto or xla.")
  if name == "splash" and model.block_size % 128:
    return (f"splash takes a multiple of 128 entries, not config.model.block_size = {model.block_size}; choose such a block_size, or "
            "set it to auto or xla.")
  return ""


def _misfits(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields what does not fit the architecture."""
  m, known = config.model, tokenizers.known_vocab_size(config.data.tokenizer)
  architecture = f"config.model.architecture = {m.architecture}"
  objectives = OBJECTIVES[m.architecture]
  if config.objective in sum(OBJECTIVES.values(), ()) and config.objective not in objectives:
    yield f"config.objective: {config.objective} does not fit {architecture}; set it to {' or '.join(objectives)}."
  if m.architecture == "decoder":
    if m.num_tokens:
      yield f"config.model.num_tokens: {m.num_tokens} is of an encoder, and {architecture}; set it to 0."
    return
  for field, default in (("target", "adaln"), ("norm", "rms"), ("qk_norm", True), ("activation", "gelu"),
                         ("tied_head", False), ("bias", True), ("weight_init", "truncated_normal")):
    if m[field] != default:
      yield f"config.model.{field}: {m[field]} is of a decoder, and {architecture}; set it to {default}."
  if not m.num_tokens and config.data.tokenizer not in tokenizers.VOCAB_SIZES:  # a checkpoint is to do without the file
    yield (f"config.model.num_tokens: is 0; with config.data.tokenizer = {config.data.tokenizer}, set it to "
           f"{known or 'the number of its ids'}.")
  if m.num_tokens and known and m.num_tokens != known:
    yield (f"config.model.num_tokens: {m.num_tokens} is not the number of ids of config.data.tokenizer = "
           f"{config.data.tokenizer}; set it to {known}.")
  if (m.num_tokens or known) == m.vocab_size:  # fewer rows are a mistake with any architecture
    yield (f"config.model.vocab_size: {m.vocab_size} leaves no row for the mask of an encoder; set it to "
           f"{(m.vocab_size // 64 + 1) * 64}.")
  if config.objective in ("lambda_dce", "score_entropy") and config.orders != "uniform":
    yield (f"config.orders: {config.orders} has no effect on config.objective = {config.objective}, which masks each token by "
           "itself; set it to uniform.")
  if config.sample.sampler in samplers.OF_DECODERS:
    yield (f"config.sample.sampler: {config.sample.sampler} checks several tokens in one causal pass, and {architecture} has none; "
           "set it to plan or adaptive.")
  for field, value, why in (("eval.ensemble", config.eval.ensemble, "averages over orders of the context"),
                            ("sample.contexts", config.sample.contexts, "averages over orders of the known tokens")):
    if value > 1:
      yield f"config.{field}: {value} {why}, which are one and the same to an encoder; set it to 1."


def _are_pairs(rules: tuple, first: type | tuple[type, ...], second: type | tuple[type, ...]) -> bool:
  return all(isinstance(r, tuple) and len(r) == 2 and isinstance(r[0], first) and isinstance(r[1], second) for r in rules)


def _is_regex(pattern: str) -> bool:
  try:
    re.compile(pattern)
  except re.error:
    return False
  return True


def from_dict(fields: dict[str, Any]) -> ml_collections.ConfigDict:
  """Inverse of `ConfigDict.to_dict()`, also after a way through JSON (which has no tuples, as a config has no lists)."""

  def convert(value):
    if isinstance(value, dict):
      return from_dict(value)
    return tuple(map(convert, value)) if isinstance(value, (list, tuple)) else value

  return ml_collections.ConfigDict({name: convert(value) for name, value in fields.items()})


FILE = "config.py"  # in the workdir of a run


def write_file(config: ml_collections.ConfigDict, workdir: pathlib.Path, about: str, command: str) -> None:
  """Writes a config file that says what a config says; its docstring says what it is of, and has a command that uses it."""
  default = flat(default_config())
  plain = lambda text: re.sub(r"[^\w ./:,=@+-]", "_", text)  # it becomes code
  lines = [f"  config.{path} = {value!r}" for path, value in flat(config).items() if value != default[path]]
  (workdir / FILE).write_text("\n".join([
      f'"""{plain(about)}.', "", f"    {plain(command)}", '"""', "", "import ml_collections", "",
      "from aogpt_jax import config as config_lib", "", "", "def get_config() -> ml_collections.ConfigDict:",
      "  config = config_lib.default_config()", *lines, "  return config", ""]), encoding="utf-8")


def completed(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """A config of an older version of this code with the fields that were added since, whose defaults are what it did."""
  whole = default_config()
  with whole.unlocked(), whole.ignore_type():
    whole.update(config)
    if isinstance(whole.model.remat, bool):  # as it was once
      whole.model.remat = "full" if whole.model.remat else "none"
  return whole


# What a run may change when it is started again; anything else would make it another run.
FREE_TO_CHANGE = ("steps", "micro_batches", "optimizer.skip_nonfinite", "data.cache_dir", "data.tfds_data_dir", "data.workers",
                  "data.prefetch", "mesh", "sharding_rules", "eval", "sample", "checkpoint", "log", "compilation_cache",
                  "model.attention", "model.remat", "model.scan_layers", "model.head_chunk")


def differences(ours: ml_collections.ConfigDict, theirs: ml_collections.ConfigDict) -> list[str]:
  """Fields on which two configs describe different runs, as 'config.FIELD: OURS, was THEIRS'."""
  a, b = determining(ours), determining(theirs)
  return [f"config.{f}: {a.get(f)!r}, was {b.get(f)!r}" for f in sorted(a.keys() | b.keys()) if a.get(f) != b.get(f)]


def determining(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """The fields that a run can't change without becoming another one, by their dotted paths."""
  return {field: value for field, value in flat(config).items()
          if not any(field == free or field.startswith(free + ".") for free in FREE_TO_CHANGE)}


def flat(config: ml_collections.ConfigDict, prefix: str = "") -> dict[str, Any]:
  """The values of all fields by their dotted paths, such as "model.width"."""
  fields = {}
  for name in config:
    value = config[name]
    fields |= flat(value, f"{prefix}{name}.") if isinstance(value, config_dict.ConfigDict) else {prefix + name: value}
  return fields
