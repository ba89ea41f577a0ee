"""Tokens per second of a training step, beside that of the PyTorch code at the same size.

  python benchmarks/training.py [--pytorch=DIR] [--repeats=5] [--sizes=6x384x256x8,4x256x1024x4] [--quick] [--json=FILE]

A step is everything that an update does in both: orders, loss, gradient, clipping, AdamW and EMA, in float32, on all cores. Each runs
in a process of its own, in turn; compiling and warming up are left out. A size is layers x width x T x batch. The peer is
model_AOGPT_AdaLN6_NoRep_cond_128_trunc_qknorm.py with ema.py of scxue/AO-GPT-MDM, eager, as its trainer calls them; without
--pytorch, ours runs alone.

GFLOP/s are of the matmuls that the model needs (aogpt_jax.training.flops), and beside them the rate of one matmul of the MLP's
shape on this machine: that is the roof.
"""

import contextlib
import sys
import time

import paired

PEER = "model_AOGPT_AdaLN6_NoRep_cond_128_trunc_qknorm"
HEAD = 64  # width of a head
LEARNING_RATE, DECAY, WEIGHT_DECAY = 1e-3, 0.9999, 0.1


def ours(vocab_size: int):
  """(size, steps) -> seconds of so many steps."""
  import jax  # pylint: disable=import-outside-toplevel
  from aogpt_jax import build_model, sharding  # pylint: disable=import-outside-toplevel
  from aogpt_jax import config as config_lib  # pylint: disable=import-outside-toplevel
  from aogpt_jax import memory  # pylint: disable=import-outside-toplevel
  from aogpt_jax.training import flops  # pylint: disable=import-outside-toplevel
  from aogpt_jax.training import loop  # pylint: disable=import-outside-toplevel
  from aogpt_jax.training import step as step_lib  # pylint: disable=import-outside-toplevel

  memory.keep_freed()  # as main does
  ready = {}

  def prepare(size):
    layers, width, length, batch = size
    config = config_lib.default_config()
    config.batch_size, config.orders = batch, "uniform"
    config.model.update(layers=layers, width=width, heads=width // HEAD, block_size=length, vocab_size=vocab_size, dtype="float32",
                        scan_layers=False)
    config.optimizer.update(learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY, ema_decay=DECAY)
    mesh = sharding.make_mesh(config)
    model = build_model(config, mesh)
    trainer = step_lib.make_trainer(config, model, mesh)
    start = time.perf_counter()
    state = trainer.init()
    tokens = jax.random.randint(jax.random.key(0), (batch, length), 0, vocab_size)
    tokens = jax.device_put(tokens, sharding.batch_sharding(mesh))
    step = trainer.step.lower(state, tokens).compile()
    memory.give_back()  # as the training loop
    state, metrics = step(state, tokens)
    jax.block_until_ready(metrics)
    return {"state": state, "tokens": tokens, "step": step, "first": time.perf_counter() - start,
            "flops": flops.per_token(config) * batch * length, "roof": paired.matmul_rate(batch * length, width, 4 * width)}

  def answer(size, steps):
    run = ready.get(tuple(size)) or ready.setdefault(tuple(size), prepare(size))
    start = time.perf_counter()
    for _ in range(steps):
      run["state"], metrics = run["step"](run["state"], run["tokens"])
      jax.block_until_ready(metrics)  # this and the next as the training loop on a CPU
      time.sleep(loop.FREED_AFTER)
    loss = float(metrics["loss"])
    seconds = (time.perf_counter() - start) / steps
    return {"seconds": seconds, "loss": loss, "first_step_seconds": run["first"], "gflops": run["flops"] / seconds / 1e9,
            "roof_gflops": run["roof"]() / 1e9}

  return answer


def pytorch(directory: str, vocab_size: int):
  """The same of the PyTorch code."""
  sys.path.insert(0, directory)
  import ema as ema_lib  # pylint: disable=import-outside-toplevel,import-error
  import torch  # pylint: disable=import-outside-toplevel,import-error
  model_lib = __import__(PEER)
  torch.set_num_threads(paired.THREADS)
  ready = {}

  def prepare(size):
    layers, width, length, batch = size
    with contextlib.redirect_stdout(sys.stderr):
      net = model_lib.AOGPT(model_lib.AOGPTConfig(block_size=length, vocab_size=vocab_size, n_layer=layers, n_head=width // HEAD,
                                                  n_embd=width)).train()
      optimizer = net.configure_optimizers(WEIGHT_DECAY, LEARNING_RATE, (0.9, 0.95), "cpu")
    return {"net": net, "optimizer": optimizer, "ema": ema_lib.ExponentialMovingAverage(net.parameters(), decay=DECAY),
            "tokens": torch.randint(0, vocab_size, (batch, length))}

  def answer(size, steps):
    run = ready.get(tuple(size)) or ready.setdefault(tuple(size), prepare(size))
    start = time.perf_counter()
    for _ in range(steps):
      _, loss = run["net"](run["tokens"], mode="Random")
      loss.backward()
      torch.nn.utils.clip_grad_norm_(run["net"].parameters(), 1.0)
      run["optimizer"].step()
      run["optimizer"].zero_grad(set_to_none=True)
      run["ema"].update(run["net"].parameters())
    return {"seconds": (time.perf_counter() - start) / steps, "loss": loss.item()}

  return answer


def main():
  parser = paired.parser(__doc__, repeats=5)
  parser.add_argument("--sizes", default="6x384x256x8,4x256x1024x4", help="layers x width x T x batch")
  parser.add_argument("--vocab_size", type=int, default=512)
  parser.add_argument("--steps", type=int, default=3, help="of a run")
  parser.add_argument("--pytorch", default="", help="directory of the PyTorch code")
  args = parser.parse_args()
  paired.check_peer(args.pytorch, f"{PEER}.py")
  if args.quick:
    args.sizes, args.repeats, args.steps = "1x64x32x2", 1, 1
  if args.serve:
    return paired.serve(ours(args.vocab_size) if args.serve == "aogpt_jax" else pytorch(args.pytorch, args.vocab_size))
  results, rows = {}, []
  for text in args.sizes.split(","):
    size = [int(n) for n in text.split("x")]
    tokens = size[2] * size[3]
    # A process for each size: the peak of memory is of this size alone.
    with paired.contestants(["aogpt_jax", *["PyTorch code"] * bool(args.pytorch)]) as contestants:
      runs = paired.in_turn(contestants, args.repeats, size=size, steps=args.steps)
    own, peer = runs["aogpt_jax"], runs.get("PyTorch code")
    results[text] = {name: r.figures() | {"tokens_per_second": tokens / r.median("seconds")} for name, r in runs.items()}
    results[text]["aogpt_jax"] |= {"first_step_seconds": own.first["first_step_seconds"]} | {
        field: paired.figures(own.all(field)) for field in ("gflops", "roof_gflops")}
    if peer:
      results[text]["ratio"] = paired.ratio(peer, own)
    for name, r in runs.items():
      seconds, roof = r.median("seconds"), ("", "")
      if r is own:
        roof = f"{own.median('gflops'):.0f} of {own.median('roof_gflops'):.0f}", f"{own.first['first_step_seconds']:.1f}"
      times = f"{results[text]['ratio']['median']:.2f}" if peer and r is own else ""
      peak = f"{r.counted[-1]['peak_mib']:,.0f}"
      rows.append((f"{text} {name}", f"{seconds:.3f}", f"{tokens / seconds:,.0f}", times, *roof, peak))
  head = ("layers x width x T x batch", "s a step", "tokens/s", "times peer", "GFLOP/s of roof", "compiling, s", "peak MiB")
  paired.report(args, results, paired.table(head, rows))


if __name__ == "__main__":
  main()
