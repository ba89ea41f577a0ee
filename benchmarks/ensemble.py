"""Seconds for the NLL of every token of a batch under M orders of its context, beside full forward passes.

  python benchmarks/ensemble.py [--vocab_size=50304] [--contexts=8] [--full_passes=24] [--json]

A full pass over a permuted order gives one entry for one of the permutations, so that T * (M - 1) of them are needed beside the
one in the drawn order. As many as are asked for are timed, among the contexts that were scored before, and their numbers are
compared; the time of all is in proportion. Random float32 weights.
Ours has its compilation in its seconds, full passes have not.
"""

import argparse
import json
import time

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from aogpt_jax import build_model
from aogpt_jax import config as config_lib
from aogpt_jax import objectives
from aogpt_jax.evaluation import contexts
from aogpt_jax.training import step as step_lib


def random_model(args):
  """A model whose every part has an effect."""
  config = config_lib.default_config()
  config.model.update(layers=args.layers, width=args.width, heads=args.width // 64, block_size=args.block_size,
                      vocab_size=args.vocab_size, dtype="float32", gate_init=1.0)
  model = build_model(config)
  return model, jax.jit(lambda: nn.unbox(step_lib.init_params(model, 0)))()


def inputs(args, seed):
  """Tokens [B, T], every target [B, T] and M - 1 orders of each one's context [B, T, M - 1, T]."""
  rng = np.random.default_rng(seed)
  permutations = lambda *shape: rng.permuted(np.broadcast_to(np.arange(args.block_size), (*shape, args.block_size)), axis=-1)
  tokens = rng.integers(0, args.vocab_size, (args.batch_size, args.block_size))
  targets = np.broadcast_to(np.arange(args.block_size), tokens.shape)
  orders = permutations(args.batch_size)
  return tokens, targets, contexts.in_order_of(orders, targets, permutations(args.batch_size, args.contexts - 1))


def timed(function):
  """What a function returns, seconds, and seconds of CPU time, which other work on the machine changes less."""
  start, cpu = time.perf_counter(), time.process_time()
  value = function()
  return value, time.perf_counter() - start, time.process_time() - cpu


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--vocab_size", type=int, default=50304, help="V")
  parser.add_argument("--layers", type=int, default=6)
  parser.add_argument("--width", type=int, default=384, help="D; heads are of 64")
  parser.add_argument("--block_size", type=int, default=256, help="T, tokens")
  parser.add_argument("--batch_size", type=int, default=4, help="sequences")
  parser.add_argument("--contexts", type=int, default=8, help="M, the drawn order among them")
  parser.add_argument("--full_passes", type=int, default=24, help="full passes that are timed")
  parser.add_argument("--json", action="store_true", help="print one JSON object")
  args = parser.parse_args()
  model, params = random_model(args)

  full = jax.jit(lambda tokens, orders: objectives.any_order_nll(model, params, tokens, orders))
  tokens, targets, orders = inputs(args, seed=0)
  on_device, rng = jnp.asarray(tokens, jnp.int32), np.random.default_rng(1)

  def full_pass():
    i, m = rng.integers(args.block_size), rng.integers(args.contexts - 1)
    return i, m, np.asarray(full(on_device, jnp.asarray(orders[:, i, m])))[:, i]

  full_pass()  # compiles
  # Half of the full passes before and half after, since a shared machine is not always equally fast.
  half = args.full_passes // 2
  before, *first = timed(lambda: [full_pass() for _ in range(half)])
  ours, *own = timed(lambda: contexts.nll(model, params, tokens, targets, orders))
  after, *second = timed(lambda: [full_pass() for _ in range(half)])
  all_passes = args.block_size * (args.contexts - 1)
  peer = [(x + y) / (2 * half) * all_passes for x, y in zip(first, second)]
  difference = max(float(np.abs(theirs - ours[:, i, m]).max()) for i, m, theirs in before + after)
  record = dict(vars(args), seconds=own[0], full_passes_seconds=peer[0], ratio=peer[0] / own[0], cpu_seconds=own[1],
                full_passes_cpu_seconds=peer[1], largest_difference=difference, device=jax.devices()[0].device_kind)
  if args.json:
    print(json.dumps(record))
  else:
    print(f"aogpt_jax.evaluation.contexts      {own[0]:8.1f} s   {own[1]:8.1f} s of CPU time")
    print(f"{all_passes:,} full passes                 {peer[0]:8.1f} s   {peer[1]:8.1f} s, from {2 * half} of them")
    print(f"ratio                              {peer[0] / own[0]:8.2f}     {peer[1] / own[1]:8.2f}")
    print(f"largest difference                 {difference:8.1e} nats")


if __name__ == "__main__":
  main()
