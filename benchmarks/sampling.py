"""Seconds to draw a batch of texts, against the number of steps: cached decoding, the PyTorch code, and an encoder of equal size.

  python benchmarks/sampling.py [--pytorch=DIR] [--steps=64,256,1024] [--repeats=5] [--picture=FILE] [--json]

Peers, in the same run:
* the cached sampler of the PyTorch code (scxue/AO-GPT-MDM), where --pytorch gives a checkout of it and torch is installed. It runs in a
  process of its own, as it comes (--eager switches its torch.compile off), warmed up, on as many threads;
* an encoder: the same blocks with bidirectional attention and a mask row, which sees the whole text in each step, and asks for the logits
  of the positions that the step reveals alone. All its passes are alike, so that it runs --encoder_passes of them, at each number of
  steps, and their mean time is multiplied by the steps.

All have random weights of the same shapes, and reveal the same numbers of tokens in each step. Runs alternate; times are medians, ratios
the medians of the pairs' ratios. Compiling is left out.
"""

import argparse
import contextlib
import functools
import io
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from aogpt_jax import build_model
from aogpt_jax import config as config_lib
from aogpt_jax.sampling import decode
from aogpt_jax.sampling import filters
from aogpt_jax.sampling import plan
from aogpt_jax.training import step as step_lib


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


class PyTorch:
  """The PyTorch code in a process that waits between runs: steps -> seconds of a batch."""

  def __init__(self, args: argparse.Namespace):
    environment = dict(os.environ, **({"TORCHDYNAMO_DISABLE": "1"} if args.eager else {}))
    self._process = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--serve"], env=environment, text=True,
                                     stdin=subprocess.PIPE, stdout=subprocess.PIPE)

  def __call__(self, steps: int) -> float:
    print(steps, file=self._process.stdin, flush=True)
    line = self._process.stdout.readline()
    if not line:
      sys.exit("error: the PyTorch code stopped; what it printed is above.")
    return float(line)

  def close(self) -> None:
    self._process.communicate()


def serve(args: argparse.Namespace) -> None:
  """The other end of `PyTorch`: reads numbers of steps, prints seconds."""
  sys.path.insert(0, args.pytorch)
  with contextlib.redirect_stdout(io.StringIO()):  # it prints the shapes of its cache
    import model_AOGPT_generate  # pylint: disable=import-outside-toplevel,import-error
    import torch  # pylint: disable=import-outside-toplevel,import-error
    torch.set_num_threads(os.process_cpu_count() if hasattr(os, "process_cpu_count") else len(os.sched_getaffinity(0)))
    net = model_AOGPT_generate.AOGPT(model_AOGPT_generate.AOGPTConfig(
        block_size=args.block_size, vocab_size=args.vocab_size, n_layer=args.layers, n_head=args.heads, n_embd=args.width)).eval()
  for line in sys.stdin:
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
      net.generate(args.batch_size, int(line), "cpu", topp=1.0, temperature=1.0)
    print(time.perf_counter() - start, flush=True)


def draw(path: str, title: str, seconds: dict[str, dict[int, list[float]]]) -> None:
  """Time against steps, both logarithmic, as figure 4 of the paper."""
  from matplotlib import ticker  # pylint: disable=import-outside-toplevel
  from matplotlib.figure import Figure  # pylint: disable=import-outside-toplevel
  figure = Figure(figsize=(6, 4), layout="constrained")
  axes = figure.subplots()
  axes.set(title=title, xlabel="steps", ylabel="seconds to draw the batch", xscale="log", yscale="log")
  for (name, times), marker in zip(seconds.items(), "os^"):
    axes.plot(times.keys(), [statistics.median(t) for t in times.values()], marker=marker, label=name)
  axes.set_xticks(list(times), [str(s) for s in times])
  axes.xaxis.set_minor_locator(ticker.NullLocator())
  axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
  axes.grid(alpha=0.3, which="both")
  axes.legend()
  figure.savefig(path, dpi=130)


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--layers", type=int, default=6)
  parser.add_argument("--width", type=int, default=384)
  parser.add_argument("--heads", type=int, default=6)
  parser.add_argument("--block_size", type=int, default=1024, help="T, tokens; the PyTorch code wants 1024")
  parser.add_argument("--vocab_size", type=int, default=512)
  parser.add_argument("--batch_size", type=int, default=4, help="texts")
  parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of ours and the encoder")
  parser.add_argument("--counts", default="fixed", choices=("fixed", "binomial"), help="of ours; the PyTorch code has fixed ones")
  parser.add_argument("--steps", default="64,128,256,512,1024")
  parser.add_argument("--repeats", type=int, default=3, help="runs of each")
  parser.add_argument("--pytorch", default="", help="directory of the PyTorch code")
  parser.add_argument("--eager", action="store_true", help="without its torch.compile")
  parser.add_argument("--encoder_passes", type=int, default=4, help="0: no encoder")
  parser.add_argument("--picture", default="", help="PNG file to draw")
  parser.add_argument("--json", action="store_true", help="print one JSON object")
  parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.pytorch and not (pathlib.Path(args.pytorch) / "model_AOGPT_generate.py").is_file():
    sys.exit(f"error: --pytorch={args.pytorch}: has no model_AOGPT_generate.py; give a checkout of scxue/AO-GPT-MDM.")
  if args.serve:
    return serve(args)
  config = config_lib.default_config()
  config.model.update(layers=args.layers, width=args.width, heads=args.heads, block_size=args.block_size,
                      vocab_size=args.vocab_size, dtype=args.dtype)
  samplers = {"aogpt_jax, cached": cached_sampler(build_model(config), args.batch_size, args.counts)}
  if args.pytorch:
    samplers["PyTorch code, cached"] = PyTorch(args)
  if args.encoder_passes:
    config.objective = "ao"
    config.model.update(architecture="encoder", num_tokens=args.vocab_size - 1)
    samplers["encoder"] = encoder_sampler(build_model(config), args.batch_size, args.encoder_passes)
  steps = [int(s) for s in args.steps.split(",")]
  seconds = {name: {s: [] for s in steps} for name in samplers}
  ours, *peers = seconds
  for s in steps:
    for name, sampler in samplers.items():
      sampler(s)  # compiles
    for _ in range(args.repeats):
      for name, sampler in samplers.items():
        seconds[name][s].append(sampler(s))
    print(f"steps {s}: " + ", ".join(f"{name} {statistics.median(t[s]):.2f} s" for name, t in seconds.items()), file=sys.stderr)
  ratios = {p: {s: statistics.median(a / b for a, b in zip(seconds[p][s], seconds[ours][s])) for s in steps} for p in peers}
  title = f"{args.layers} x {args.width}, T = {args.block_size}, batch {args.batch_size}, {args.dtype}, {jax.devices()[0].device_kind}"
  if args.picture:
    draw(args.picture, title, seconds)
  if args.json:
    print(json.dumps(dict(vars(args), seconds=seconds, ratios=ratios)))
  else:
    print(f"{title}: seconds (times ours)\n{'steps':>6}" + "".join(f"{name:>28}" for name in seconds))
    for s in steps:
      row = [f"{statistics.median(t[s]):.2f}" + (f" ({ratios[n][s]:.1f})" if n in ratios else "") for n, t in seconds.items()]
      print(f"{s:>6}" + "".join(f"{cell:>28}" for cell in row))


if __name__ == "__main__":
  main()
