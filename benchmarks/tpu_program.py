"""The training step of configs/medium.py as the compiler makes it for a TPU: FLOPs against the formula, and bytes that only move.

  python benchmarks/tpu_program.py [--topology=v5e:4x4] [--quick] [--json=FILE]

No TPU is needed, but the TPU compiler: pip install 'aogpt_jax[aot]'. FLOPs are those of the matrix products in the jaxpr, with
the passes of loops multiplied, over those of aogpt_jax.training.flops. Bytes are what a step reads and writes in the memory of a
chip, by the compiled text, and what of that are copies, transposes, and fusions of nothing but these (aogpt_jax/aot/traffic.py).
--quick is a model of two layers on one chip; without the TPU compiler, it does nothing.
"""

import dataclasses
import importlib.util
import pathlib
import runpy
import sys

import paired
from aogpt_jax import config as config_lib
from aogpt_jax.aot import processes
from aogpt_jax.aot import topology

ROOT = pathlib.Path(__file__).resolve().parents[1]
# What is compiled, beside mesh.preset=fsdp. The first is for the count of FLOPs, with nothing that is computed again.
VARIANTS = {
    "remat=none, head_chunk=0": dict(micro_batches=32, remat="none", head_chunk=0),
    "remat=none": dict(micro_batches=32, remat="none", head_chunk=-1),
    "remat=full": dict(micro_batches=16, remat="full", head_chunk=-1),
}
TOY = dict(layers=2, width=128, heads=2, block_size=256, vocab_size=512, cond_width=32)


def config_of(variant, quick):
  config = runpy.run_path(str(ROOT / "configs" / "medium.py"))["get_config"]()
  config.mesh.preset = "fsdp"
  config.micro_batches = variant["micro_batches"]
  config.model.update(remat=variant["remat"], head_chunk=variant["head_chunk"])
  if quick:
    config.update(batch_size=4, micro_batches=2)
    config.model.update(TOY)
    config.data.tokenizer = "bytes"
  config_lib.check(config)
  return config


def main():
  parser = paired.parser(__doc__, repeats=1)
  parser.add_argument("--topology", default="v5e:4x4")
  args = parser.parse_args()
  if importlib.util.find_spec("libtpu") is None:
    print("the TPU compiler is not installed: pip install 'aogpt_jax[aot]'")
    sys.exit(not args.quick)
  variants, name = VARIANTS, args.topology
  if args.quick:
    variants, name = {"remat=none, head_chunk=0": VARIANTS["remat=none, head_chunk=0"]}, "v5e:1x1"
  results, rows = {}, []
  for variant, settings in variants.items():
    print(f"compiling {variant} for {name} ...", file=sys.stderr, flush=True)
    step = processes.training(config_of(settings, args.quick), name)
    if step.error or step.program.error or step.roofline is None:
      sys.exit(f"error: {variant}: {step.error or step.program.error or step.unread}")
    r = step.roofline
    formula = r.formula_weights + r.formula_attention
    results[variant] = found = {
        "micro_batches": step.micro_batches, "sequences": step.sequences, "attention": step.attention,
        "memory": step.program.total, "compile_seconds": step.program.seconds, "weights": r.weights / r.formula_weights,
        "attention_flops": r.attention / r.formula_attention, "flops": (r.weights + r.attention) / formula, "formula": formula,
        "accessed": step.accessed, "least_accessed": r.memory * topology.chip(name).memory_bandwidth,
        "movements": [dataclasses.asdict(m) for m in step.movements], "unread": step.unread}
    moved = sum(m.bytes for m in step.movements)
    rows.append((variant, f"{step.sequences} x {step.micro_batches}",
                 *(f"{found[part]:.4f}" for part in ("weights", "attention_flops", "flops")), f"{step.program.total / topology.GIB:.2f}",
                 *((f"{step.accessed / topology.GIB:.1f}", f"{moved / step.accessed:.2%}") if step.accessed else ("-", "-"))))
  head = ("toy" if args.quick else "medium", "sequences x micro-batches", "FLOPs of weights", "of attention", "of both",
          "GiB needed", "GiB read and written", "by copies")
  listed = "".join(f"\n{variant}: {m['kind']} {m['shape']} {m['count']:,} x, {m['bytes'] / r['accessed']:.2%}, {m['source']}"
                   for variant, r in results.items() for m in r["movements"])
  paired.report(args, {"topology": name, "variants": results}, f"{name}\n{paired.table(head, rows)}{listed}")


if __name__ == "__main__":
  main()
