"""Seconds for the NLL of every token of a batch under M orders of its context, beside full forward passes.

  python benchmarks/ensemble.py [--vocab_size=50304,512] [--contexts=8] [--full_passes=24] [--repeats=3] [--quick] [--json=FILE]

A full pass over a permuted order gives one entry for one of the permutations, so that T * (M - 1) of them are needed beside the
one in the drawn order. As many as are asked for are timed, and the time of all is in proportion; their numbers are compared with
ours. Random float32 weights. Both run in processes of their own, in turn; the first run of each, which compiles, does not count.
"""

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
from aogpt_jax import objectives
from aogpt_jax.evaluation import contexts
from aogpt_jax.training import step as step_lib


def random_model(args, vocab_size):
  """A model whose every part has an effect."""
  config = config_lib.default_config()
  config.model.update(layers=args.layers, width=args.width, heads=args.width // 64, block_size=args.block_size,
                      vocab_size=vocab_size, dtype="float32", gate_init=1.0)
  model = build_model(config)
  return model, jax.jit(lambda: nn.unbox(step_lib.init_params(model, 0)))()


def inputs(args, vocab_size, seed):
  """Tokens [B, T], every target [B, T] and M - 1 orders of each one's context [B, T, M - 1, T]."""
  rng = np.random.default_rng(seed)
  permutations = lambda *shape: rng.permuted(np.broadcast_to(np.arange(args.block_size), (*shape, args.block_size)), axis=-1)
  tokens = rng.integers(0, vocab_size, (args.batch_size, args.block_size))
  targets = np.broadcast_to(np.arange(args.block_size), tokens.shape)
  orders = permutations(args.batch_size)
  return tokens, targets, contexts.in_order_of(orders, targets, permutations(args.batch_size, args.contexts - 1))


def timed(function):
  """What a function returns, seconds, and seconds of CPU time, which other work on the machine changes less."""
  start, cpu = time.perf_counter(), time.process_time()
  value = function()
  return value, {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}


def contestant(name, args):
  """(vocab_size, entries) -> seconds of all, and the NLL [B] of some entries: positions and numbers of orders, [N, 2]."""
  memory.keep_freed()  # as main does
  ready = {}

  def prepare(vocab_size):
    model, params = random_model(args, vocab_size)
    full = jax.jit(lambda tokens, orders: objectives.any_order_nll(model, params, tokens, orders))
    return model, params, full, *inputs(args, vocab_size, seed=0)

  def answer(vocab_size, entries):
    model, params, full, tokens, targets, orders = ready.get(vocab_size) or ready.setdefault(vocab_size, prepare(vocab_size))
    if name == "aogpt_jax":
      nll, times = timed(lambda: contexts.nll(model, params, tokens, targets, orders))
      return times | {"nll": [nll[:, i, m].tolist() for i, m in entries]}
    on_device = jnp.asarray(tokens, jnp.int32)
    nll, times = timed(lambda: [np.asarray(full(on_device, jnp.asarray(orders[:, i, m])))[:, i].tolist() for i, m in entries])
    share = args.block_size * (args.contexts - 1) / len(entries)
    return {field: value * share for field, value in times.items()} | {"nll": nll}

  return answer


def main():
  parser = paired.parser(__doc__, repeats=3)
  parser.add_argument("--vocab_size", default="50304,512", help="V")
  parser.add_argument("--layers", type=int, default=6)
  parser.add_argument("--width", type=int, default=384, help="D; heads are of 64")
  parser.add_argument("--block_size", type=int, default=256, help="T, tokens")
  parser.add_argument("--batch_size", type=int, default=4, help="sequences")
  parser.add_argument("--contexts", type=int, default=8, help="M, the drawn order among them")
  parser.add_argument("--full_passes", type=int, default=24, help="full passes that are timed, in each run")
  args = parser.parse_args()
  if args.quick:
    args.layers, args.width, args.block_size, args.batch_size, args.contexts, args.full_passes = 1, 64, 16, 2, 3, 4
    args.vocab_size, args.repeats = "64", 1
  if args.serve:
    return paired.serve(contestant(args.serve, args))
  rng, results, rows = np.random.default_rng(1), {}, []
  entries = np.stack([rng.integers(n, size=args.full_passes) for n in (args.block_size, args.contexts - 1)], axis=1)
  for vocab_size in [int(v) for v in args.vocab_size.split(",")]:
    with paired.contestants(("aogpt_jax", "full passes")) as contestants:
      runs = paired.in_turn(contestants, args.repeats, vocab_size=vocab_size, entries=entries.tolist())
    own, full = runs.values()
    difference = float(np.abs(np.subtract(own.first["nll"], full.first["nll"])).max())
    results[str(vocab_size)] = found = {
        "ratio": paired.ratio(full, own), "cpu_ratio": paired.ratio(full, own, "cpu_seconds"), "largest_difference": difference,
        **{name: r.figures() | {"cpu_seconds": paired.figures(r.all("cpu_seconds"))} for name, r in runs.items()}}
    seconds = own.median("seconds")
    rows.append((str(vocab_size), f"{seconds:.1f}", f"{full.median('seconds'):.1f}", f"{found['ratio']['median']:.2f}",
                 f"{found['cpu_ratio']['median']:.2f}", f"{own.first['seconds'] - seconds:.1f}", f"{difference:.1e}"))
    print(f"V = {vocab_size}: ratio {found['ratio']['median']:.2f}", file=sys.stderr)
  title = (f"{args.layers} x {args.width}, T = {args.block_size}, batch {args.batch_size}, M = {args.contexts}, float32; "
           f"{args.full_passes} of {args.block_size * (args.contexts - 1):,} full passes timed")
  head = ("V", "aogpt_jax, s", "full passes, s", "ratio", "of CPU time", "compiling, s", "largest difference, nats")
  paired.report(args, {"title": title, "vocabularies": results}, f"{title}\n{paired.table(head, rows)}")


if __name__ == "__main__":
  main()
