"""Training and sampling at full size on an accelerator: tokens/s, MFU and memory, as a table and as JSON.

    python benchmarks/accelerator.py --output=results             # on all devices of this machine; minutes
    python benchmarks/accelerator.py --output=results --dry_run   # the same at toy sizes, on any machine

It trains configs/small.py for 50 steps and configs/medium.py for 20, on random tokens, at the largest batch that fits, split over all
devices by fsdp; then it draws 32 texts by configs/medium.py in 64, 128, 256, 512 and 1024 steps. Parameters are initial ones: the
time does not depend on them. Each part is a process of its own, so that its peak of memory is its own, and one that fails stops no
other.

Tokens/s are of all steps but the first two, which compile and warm up. MFU, model FLOP utilisation, is

    tokens/s x FLOPs per token / (devices x peak FLOP/s of a device in bfloat16)

with both of aogpt_jax/training/flops.py: 6 FLOPs per token and matmul weight, and attention's, of which what is masked counts
nothing; recomputation counts nothing. Sampling is timed at its second run; the first compiles.
"""

import argparse
import json
import pathlib
import runpy
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
TRAINED = {"small": 50, "medium": 20}  # config -> steps
SAMPLED, TEXTS, STEPS = "medium", 32, (64, 128, 256, 512, 1024)
IDS = 50257  # of GPT-2's tokenizer
TOY = dict(layers=1, width=16, heads=2, block_size=16, vocab_size=IDS + 7, cond_width=8)


def load(name: str, dry_run: bool):
  config = runpy.run_path(str(ROOT / "configs" / f"{name}.py"))["get_config"]()
  if dry_run:
    config.model.update(TOY)
    config.model.dtype = "float32"  # bfloat16 is slow on CPUs
  config.mesh.preset = "fsdp"
  return config


def train(name: str, dry_run: bool) -> dict:
  import jax  # pylint: disable=import-outside-toplevel  # not in the process that starts the others: a TPU has one owner
  import numpy as np  # pylint: disable=import-outside-toplevel

  from aogpt_jax import config as config_lib  # pylint: disable=import-outside-toplevel
  from aogpt_jax import models  # pylint: disable=import-outside-toplevel
  from aogpt_jax import sharding  # pylint: disable=import-outside-toplevel
  from aogpt_jax.training import flops  # pylint: disable=import-outside-toplevel
  from aogpt_jax.training import step as step_lib  # pylint: disable=import-outside-toplevel

  config, steps = load(name, dry_run), 4 if dry_run else TRAINED[name]
  mesh = sharding.make_mesh(config)
  model = models.build_model(config, mesh)
  placed = sharding.batch_sharding(mesh)
  limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
  largest = None
  for sequences in (2**i for i in range(1 if dry_run else 12)):  # a device
    config.batch_size = sequences * mesh.size
    config_lib.check(config)
    trainer = step_lib.make_trainer(config, model, mesh)
    tokens = jax.ShapeDtypeStruct((config.batch_size, config.model.block_size), "int32", sharding=placed)
    try:
      compiled = trainer.step.lower(trainer.shapes, tokens).compile()
    except jax.errors.JaxRuntimeError as e:
      if "RESOURCE_EXHAUSTED" not in str(e):
        raise
      break
    m = compiled.memory_analysis()
    needed = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
    if limit and needed > limit:
      break
    largest = sequences, trainer, compiled, needed
  if largest is None:
    raise RuntimeError(f"{name}: not one sequence a device fits.")
  sequences, trainer, compiled, needed = largest
  batch = np.random.default_rng(0).integers(0, IDS, (sequences * mesh.size, config.model.block_size), np.int32)
  tokens, state = jax.device_put(batch, placed), trainer.init()
  for step in range(steps):
    if step == 2:
      jax.block_until_ready(state)
      start = time.perf_counter()
    state, metrics = compiled(state, tokens)
  loss = float(jax.block_until_ready(metrics)["loss"])
  jax.block_until_ready(state)
  tokens_per_second = (steps - 2) * batch.size / (time.perf_counter() - start)
  peak = flops.peak(jax.devices()[0].device_kind)
  return dict(
      part=f"training {name}", device=jax.devices()[0].device_kind, devices=mesh.size, attention=model.backend.name, steps=steps,
      sequences_per_device=sequences, loss=loss, tokens_per_second=tokens_per_second,
      mfu=peak and tokens_per_second * flops.per_token(config) / (peak * mesh.size), needed_bytes=needed, peak_bytes=peak_bytes(jax))


def sample(name: str, dry_run: bool) -> dict:
  from flax import linen as nn  # pylint: disable=import-outside-toplevel
  import jax  # pylint: disable=import-outside-toplevel
  import numpy as np  # pylint: disable=import-outside-toplevel

  from aogpt_jax import models  # pylint: disable=import-outside-toplevel
  from aogpt_jax import sharding  # pylint: disable=import-outside-toplevel
  from aogpt_jax.sampling import decode  # pylint: disable=import-outside-toplevel
  from aogpt_jax.sampling import filters  # pylint: disable=import-outside-toplevel
  from aogpt_jax.sampling import plan  # pylint: disable=import-outside-toplevel
  from aogpt_jax.training import step as step_lib  # pylint: disable=import-outside-toplevel

  config, texts, numbers = load(name, dry_run), 2 if dry_run else TEXTS, (4, 8) if dry_run else STEPS
  mesh = sharding.make_mesh(config)
  model = models.build_model(config, mesh)
  boxed = jax.eval_shape(lambda: step_lib.init_params(model, 0))
  shardings = sharding.parameter_shardings(boxed, mesh, config.sharding_rules)
  params = jax.jit(lambda: nn.unbox(step_lib.init_params(model, 0)), out_shardings=shardings)()
  rng, length = np.random.default_rng(0), config.model.block_size
  orders = np.stack([rng.permutation(length) for _ in range(texts)])
  keys, nothing = jax.random.split(jax.random.key(0), texts), np.zeros(orders.shape, bool)
  seconds = {}
  for steps in numbers:
    for _ in range(2):  # the first compiles
      start = time.perf_counter()
      made = plan.make_plan(orders, nothing, steps, counts="fixed")
      decode.sample(model, params, made, np.zeros(orders.shape, int), keys, filters.Filters(IDS), mesh=mesh)
      seconds[steps] = time.perf_counter() - start
  return dict(part=f"sampling {name}", device=jax.devices()[0].device_kind, devices=mesh.size, texts=texts, length=length,
              seconds=seconds, tokens_per_second={s: texts * length / t for s, t in seconds.items()}, peak_bytes=peak_bytes(jax))


def peak_bytes(jax) -> int | None:
  """Most memory in use on a device; None where it does not say, as a CPU."""
  stats = [device.memory_stats() for device in jax.local_devices()]
  return max(s["peak_bytes_in_use"] for s in stats) if all(stats) else None


def table(results: list[dict]) -> str:
  gib = lambda n: "-" if n is None else f"{n / 2**30:.2f}"
  lines = [f"{'part':<18}{'steps':>6}{'sequences a device':>20}{'tokens/s':>12}{'MFU':>7}{'peak GiB':>10}"]
  for r in results:
    if "error" in r:
      lines.append(f"{r['part']:<18}failed: {r['error']}")
    elif "seconds" in r:
      lines += [f"{r['part']:<18}{s:>6}{'':>20}{r['tokens_per_second'][s]:>12,.0f}{'':>7}{gib(r['peak_bytes']):>10}"
                for s in r["seconds"]]
    else:
      mfu = "-" if r["mfu"] is None else f"{r['mfu']:.1%}"
      lines.append(f"{r['part']:<18}{r['steps']:>6}{r['sequences_per_device']:>20}{r['tokens_per_second']:>12,.0f}{mfu:>7}"
                   f"{gib(r['peak_bytes']):>10}")
  return "\n".join(lines)


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--output", required=True, help="directory for accelerator.json and accelerator.txt")
  parser.add_argument("--dry_run", action="store_true", help="toy sizes, few steps")
  parser.add_argument("--part", default="", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.part:
    what, name = args.part.split()
    return print("\n" + json.dumps({"training": train, "sampling": sample}[what](name, args.dry_run)), flush=True)
  output = pathlib.Path(args.output)
  output.mkdir(parents=True, exist_ok=True)
  results = []
  for part in (*(f"training {name}" for name in TRAINED), f"sampling {SAMPLED}"):
    print(f"{part} ...", file=sys.stderr, flush=True)
    process = subprocess.run([sys.executable, __file__, *sys.argv[1:], f"--part={part}"], text=True, stdout=subprocess.PIPE,
                             check=False)
    if process.returncode:
      results.append(dict(part=part, error=f"exit status {process.returncode}; the reason is above"))
    else:
      results.append(json.loads(process.stdout.splitlines()[-1]))
    # After each part: what is measured stays, whatever comes next.
    (output / "accelerator.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    (output / "accelerator.txt").write_text(table(results) + "\n", encoding="utf-8")
  print(table(results))
  sys.exit(any("error" in r for r in results))


if __name__ == "__main__":
  main()
