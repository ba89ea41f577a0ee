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
  start = time.perf_counter()
  ours = contexts.nll(model, params, tokens, targets, orders)
  seconds = time.perf_counter() - start

  rng, all_passes = np.random.default_rng(1), args.block_size * (args.contexts - 1)
  tokens, differences, full_seconds = jnp.asarray(tokens, jnp.int32), [], []
  for n in range(args.full_passes + 1):
    i, m = rng.integers(args.block_size), rng.integers(args.contexts - 1)
    start = time.perf_counter()
    theirs = np.asarray(full(tokens, jnp.asarray(orders[:, i, m])))[:, i]
    full_seconds += [time.perf_counter() - start] if n else []  # the first one compiles
    differences.append(float(np.abs(theirs - ours[:, i, m]).max()))
  peer = float(np.mean(full_seconds)) * all_passes
  record = dict(vars(args), seconds=seconds, full_passes_seconds=peer, ratio=peer / seconds, largest_difference=max(differences),
                device=jax.devices()[0].device_kind)
  if args.json:
    print(json.dumps(record))
  else:
    print(f"aogpt_jax.evaluation.contexts      {seconds:8.1f} s")
    print(f"{all_passes:,} full passes                 {peer:8.1f} s, from {args.full_passes} of them")
    print(f"ratio                              {peer / seconds:8.2f}")
    print(f"largest difference                 {max(differences):8.1e} nats")


if __name__ == "__main__":
  main()
