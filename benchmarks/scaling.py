"""How the time of a training step and of drawing texts grows with the length, the layers and the batch, beside its FLOPs.

  python benchmarks/scaling.py [--repeats=3] [--quick] [--json=FILE]

One of T, L and B is changed at a time. An exponent is the slope of log time against log size by least squares, beside that of the FLOPs
of the matmuls (aogpt_jax.training.flops for a step; for drawing a token at a time, two FLOPs a weight and token, and attention to what
is drawn). Where time grows more slowly than the FLOPs, there is a part that does not grow.
"""

import sys
import time

from flax import linen as nn
import jax
import numpy as np

import paired
from aogpt_jax import build_model
from aogpt_jax import config as config_lib
from aogpt_jax import memory
from aogpt_jax import sharding
from aogpt_jax.sampling import decode
from aogpt_jax.sampling import filters
from aogpt_jax.sampling import plan
from aogpt_jax.training import flops
from aogpt_jax.training import step as step_lib

WIDTH, VOCAB = 256, 512
BASE = {"T": 512, "L": 2, "B": 4}
SIZES = {"T": (256, 512, 1024, 2048), "L": (1, 2, 4, 8), "B": (1, 2, 4, 8)}


def config_of(size):
  config = config_lib.default_config()
  config.batch_size, config.orders = size["B"], "uniform"
  config.model.update(layers=size["L"], width=WIDTH, heads=WIDTH // 64, block_size=size["T"], vocab_size=VOCAB, dtype="float32",
                      scan_layers=False)
  return config


def training(size):
  """A function that runs a step, and the step's FLOPs."""
  config = config_of(size)
  mesh = sharding.make_mesh(config)
  trainer = step_lib.make_trainer(config, build_model(config, mesh), mesh)
  tokens = jax.device_put(np.zeros((size["B"], size["T"]), np.int32), sharding.batch_sharding(mesh))
  state = [trainer.init()]

  def run():
    state[0], metrics = trainer.step(state[0], tokens)
    jax.block_until_ready(metrics)

  return run, flops.per_token(config) * size["B"] * size["T"]


def sampling(size):
  """A function that draws a batch, a token at a time, and its FLOPs."""
  config = config_of(size)
  model = build_model(config)
  params = jax.jit(lambda: nn.unbox(step_lib.init_params(model, 0)))()
  rng = np.random.default_rng(0)
  orders = np.stack([rng.permutation(size["T"]) for _ in range(size["B"])])
  made = plan.make_plan(orders, np.zeros(orders.shape, bool), size["T"])
  keys = jax.random.split(jax.random.key(0), size["B"])
  weights = 2 * (size["L"] * 12 * WIDTH**2 + WIDTH * VOCAB) * size["T"] * size["B"]
  attention = 2 * size["L"] * size["T"] ** 2 * WIDTH * size["B"]
  return lambda: decode.sample(model, params, made, np.zeros(orders.shape, int), keys, filters.Filters(VOCAB)), weights + attention


def seconds_of(run) -> float:
  start = time.perf_counter()
  run()
  return time.perf_counter() - start


def slope(sizes, values) -> float:
  return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def main():
  args = paired.parser(__doc__, repeats=3).parse_args()
  memory.keep_freed()
  base, sizes = (({"T": 16, "L": 1, "B": 1}, {"T": (16, 32)}) if args.quick else (BASE, SIZES))
  args.repeats = 1 if args.quick else args.repeats
  results, rows = {}, []
  for what, start in (("training step", training), ("drawing a batch", sampling)):
    results[what], started = {}, {}
    for name, values in sizes.items():
      keys = [tuple((base | {name: value}).items()) for value in values]
      for key in keys:
        if key not in started:
          run, work = start(dict(key))
          started[key] = run, work, seconds_of(run)  # compiles
      times = [[] for _ in keys]
      for _ in range(args.repeats):
        for key, seconds in zip(keys, times):
          seconds.append(seconds_of(started[key][0]))
      _, work, first = zip(*(started[key] for key in keys))
      seconds = [paired.figures(t) for t in times]
      medians = [s["median"] for s in seconds]
      results[what][name] = found = {
          "sizes": values, "seconds": seconds, "first_seconds": first, "flops": work, "exponent": slope(values, medians),
          "flops_exponent": slope(values, work)}
      rows.append((what, name, ", ".join(map(str, values)), ", ".join(f"{s:.3g}" for s in medians), f"{found['exponent']:.2f}",
                   f"{found['flops_exponent']:.2f}"))
      print(f"{what}, {name} = {rows[-1][2]}: {rows[-1][3]} s", file=sys.stderr)
  head = ("", "of", "sizes", "seconds", "exponent", "of the FLOPs")
  paired.report(args, {"base": base, "width": WIDTH, "vocab_size": VOCAB, "growth": results}, paired.table(head, rows))


if __name__ == "__main__":
  main()
