"""How the time of a training step and of drawing texts grows with the length, the layers and the batch, beside its FLOPs.

  python benchmarks/scaling.py [--repeats=3] [--picture=FILE] [--quick] [--json]

One of T, L and B is changed at a time. An exponent is the slope of log time against log size by least squares, beside that of the FLOPs
of the matmuls (aogpt_jax.training.flops for a step; for drawing a token at a time, two FLOPs a weight and token, and attention to what
is drawn). Where time grows more slowly than the FLOPs, there is a part that does not grow.
"""

import argparse
import json
import statistics
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


def slope(sizes, values) -> float:
  return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def draw(path, results):
  from matplotlib.figure import Figure  # pylint: disable=import-outside-toplevel
  figure = Figure(figsize=(9, 5), layout="constrained")
  for axes, (what, by_axis) in zip(figure.subplots(1, len(results)), results.items()):
    for (name, r), marker in zip(by_axis.items(), "os^"):
      line, = axes.plot(r["sizes"], r["seconds"], marker=marker, label=f"{name}: {r['exponent']:.2f}, FLOPs {r['flops_exponent']:.2f}")
      axes.plot(r["sizes"], np.array(r["flops"]) * r["seconds"][-1] / r["flops"][-1], "--", color=line.get_color(), alpha=0.5)
    axes.set(title=what, xscale="log", yscale="log", xlabel="size", ylabel="seconds (dashed: FLOPs, scaled to the last)")
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3, which="both")
    axes.legend(title="exponent")
  figure.savefig(path, dpi=130)


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--repeats", type=int, default=3)
  parser.add_argument("--picture", default="", help="PNG file to draw")
  parser.add_argument("--quick", action="store_true", help="tiny sizes, once: that all of it works")
  parser.add_argument("--json", action="store_true", help="print one JSON object")
  args = parser.parse_args()
  memory.keep_freed()
  base, sizes = (({"T": 16, "L": 1, "B": 1}, {"T": (16, 32), "B": (1, 2)}) if args.quick else (BASE, SIZES))
  args.repeats = 1 if args.quick else args.repeats
  results = {}
  for what, start in (("a training step", training), ("drawing a batch", sampling)):
    results[what] = {}
    for name, values in sizes.items():
      runs = [start(base | {name: value}) for value in values]
      for run, _ in runs:
        run()  # compiles
      times = [[] for _ in runs]
      for _ in range(args.repeats):
        for (run, _), seconds in zip(runs, times):
          begin = time.perf_counter()
          run()
          seconds.append(time.perf_counter() - begin)
      seconds, work = [statistics.median(t) for t in times], [w for _, w in runs]
      results[what][name] = {"sizes": values, "seconds": seconds, "flops": work, "exponent": slope(values, seconds),
                             "flops_exponent": slope(values, work)}
      print(f"{what}, {name} = {values}: {', '.join(f'{s:.3g}' for s in seconds)} s", file=sys.stderr)
  if args.picture:
    draw(args.picture, results)
  if args.json:
    print(json.dumps({"arguments": vars(args), "facts": paired.facts(), "base": base, "width": WIDTH, "vocab_size": VOCAB,
                      "results": results}))
    return
  paired.print_facts()
  for what, by_axis in results.items():
    for name, r in by_axis.items():
      print(f"{what:18}{name} = {r['sizes']}: exponent {r['exponent']:.2f}, of the FLOPs {r['flops_exponent']:.2f}")


if __name__ == "__main__":
  main()
