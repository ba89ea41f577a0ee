"""Seconds to draw a batch of texts, against the number of steps: cached decoding, the PyTorch code, and an encoder of equal size.

  python benchmarks/sampling.py [--pytorch=DIR] [--steps=64,256,1024] [--repeats=3] [--quick] [--json=FILE]

Peers, in the same run:
* the cached sampler of the PyTorch code (scxue/AO-GPT-MDM), where --pytorch gives a checkout of it, as it comes (--eager switches its
  torch.compile off), on as many threads;
* an encoder: the same blocks with bidirectional attention and a mask row, which sees the whole text in each step, and asks for the logits
  of the positions that the step reveals alone. All its passes are alike, so that it runs --encoder_passes of them, at each number of
  steps, and their mean time is multiplied by the steps.

All have random weights of the same shapes, and reveal the same numbers of tokens in each step. Each runs in a process of its own, in
turn; times are medians, ratios the medians of the pairs' ratios. Compiling is left out.
"""

import contextlib
import functools
import io
import sys
import time

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import paired
from aogpt_jax import build_model
from aogpt_jax import config as config_lib
from aogpt_jax import memory
from aogpt_jax.sampling import decode
from aogpt_jax.sampling import filters
from aogpt_jax.sampling import plan
from aogpt_jax.training import step as step_lib

PEER = "model_AOGPT_generate"


def encoder_sampler(model: nn.Module, batch: int, passes: int):
  """steps -> seconds of `steps` passes."""
  params = jax.jit(lambda: nn.unbox(step_lib.init_params(model, 0)))()
  length, drawn_from = model.block_size, filters.Filters(model.num_tokens)

  @functools.partial(jax.jit, static_argnames="group")
  def run(params, orders, group):
    def step(k, tokens):
      # Where fewer passes are run than there are steps, the last ones.
      asked = jax.lax.dynamic_slice_in_dim(orders, length - (k + 1) * group, group, axis=1)
      logits = model.apply({"params": params}, tokens, asked)
      keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(k * asked.size + jnp.arange(asked.size))
      new = filters.draw(keys.reshape(asked.shape), drawn_from(logits))
      return tokens.at[jnp.arange(batch)[:, None], asked].set(new)

    return jax.lax.fori_loop(0, min(passes, length // group), step, jnp.full((batch, length), model.mask_id, jnp.int32))

  orders = jnp.asarray(random_orders(batch, length))

  def seconds(steps: int) -> float:
    group = max(length // steps, 1)
    start = time.perf_counter()
    jax.block_until_ready(run(params, orders, group))
    return (time.perf_counter() - start) / min(passes, length // group) * steps

  return seconds


def cached_sampler(model: nn.Module, batch: int, counts: str):
  """steps -> seconds of a batch."""
  params = jax.jit(lambda: nn.unbox(step_lib.init_params(model, 0)))()
  length = model.block_size
  orders = random_orders(batch, length)
  keys = jax.random.split(jax.random.key(0), batch)

  def seconds(steps: int) -> float:
    start = time.perf_counter()
    made = plan.make_plan(orders, np.zeros(orders.shape, bool), steps, counts=counts)
    decode.sample(model, params, made, np.zeros(orders.shape, int), keys, filters.Filters(model.vocab_size))
    return time.perf_counter() - start

  return seconds


def random_orders(batch: int, length: int) -> np.ndarray:
  rng = np.random.default_rng(0)
  return np.stack([rng.permutation(length) for _ in range(batch)])


def pytorch(args):
  """The same of the PyTorch code."""
  sys.path.insert(0, args.pytorch)
  import torch  # pylint: disable=import-outside-toplevel,import-error
  torch.set_num_threads(paired.THREADS)
  with contextlib.redirect_stdout(io.StringIO()):  # it prints the shapes of its cache
    model_lib = __import__(PEER)
    net = model_lib.AOGPT(model_lib.AOGPTConfig(block_size=args.block_size, vocab_size=args.vocab_size, n_layer=args.layers,
                                                n_head=args.heads, n_embd=args.width)).eval()

  def seconds(steps: int) -> float:
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
      net.generate(args.batch_size, steps, "cpu", topp=1.0, temperature=1.0)
    return time.perf_counter() - start

  return seconds


def sampler(name, args):
  """steps -> seconds of a batch, of a contestant."""
  if name == "PyTorch code":
    return pytorch(args)
  memory.keep_freed()  # as main does
  config = config_lib.default_config()
  config.model.update(layers=args.layers, width=args.width, heads=args.heads, block_size=args.block_size,
                      vocab_size=args.vocab_size, dtype=args.dtype)
  if name == "aogpt_jax":
    return cached_sampler(build_model(config), args.batch_size, args.counts)
  config.objective = "ao"
  config.model.update(architecture="encoder", num_tokens=args.vocab_size - 1)
  return encoder_sampler(build_model(config), args.batch_size, args.encoder_passes)


def main():
  parser = paired.parser(__doc__, repeats=3)
  parser.add_argument("--layers", type=int, default=6)
  parser.add_argument("--width", type=int, default=384)
  parser.add_argument("--heads", type=int, default=6)
  parser.add_argument("--block_size", type=int, default=1024, help="T, tokens; the PyTorch code wants 1024")
  parser.add_argument("--vocab_size", type=int, default=512)
  parser.add_argument("--batch_size", type=int, default=4, help="texts")
  parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of ours and the encoder")
  parser.add_argument("--counts", default="fixed", choices=("fixed", "binomial"), help="of ours; the PyTorch code has fixed ones")
  parser.add_argument("--steps", default="64,128,256,512,1024")
  parser.add_argument("--pytorch", default="", help="directory of the PyTorch code")
  parser.add_argument("--eager", action="store_true", help="without its torch.compile")
  parser.add_argument("--encoder_passes", type=int, default=4, help="0: no encoder")
  args = parser.parse_args()
  paired.check_peer(args.pytorch, f"{PEER}.py")
  if args.quick:
    args.layers, args.width, args.heads, args.batch_size, args.steps, args.repeats = 1, 64, 1, 1, "4,16", 1
    args.block_size = args.block_size if args.pytorch else 32
  if args.serve:
    run = sampler(args.serve, args)
    return paired.serve(lambda steps: {"seconds": run(steps)})
  names = ["aogpt_jax", *["PyTorch code"] * bool(args.pytorch), *["encoder"] * bool(args.encoder_passes)]
  results, rows = {}, []
  with paired.contestants(names, {"TORCHDYNAMO_DISABLE": "1"} if args.eager else {}) as contestants:
    for steps in [int(s) for s in args.steps.split(",")]:
      runs = paired.in_turn(contestants, args.repeats, steps=steps)
      ratios = {name: paired.ratio(runs[name], runs["aogpt_jax"]) for name in names[1:]}
      results[str(steps)] = {name: r.figures() for name, r in runs.items()} | {"ratios": ratios}
      times = {name: f" ({r['median']:.1f})" for name, r in ratios.items()}
      rows.append((str(steps), *(f"{r.median('seconds'):.2f}" + times.get(name, "") for name, r in runs.items())))
      print(f"steps {steps}: " + ", ".join(f"{name} {r.median('seconds'):.2f} s" for name, r in runs.items()), file=sys.stderr)
  title = f"{args.layers} x {args.width}, T = {args.block_size}, batch {args.batch_size}, V = {args.vocab_size}, {args.dtype}"
  text = f"{title}: seconds (times ours)\n" + paired.table(("steps", *names), rows)
  paired.report(args, {"title": title, "steps": results}, text)


if __name__ == "__main__":
  main()
