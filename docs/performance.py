"""Writes docs/performance.md, its pictures and the table of the README from what the benchmarks have left in docs/performance/:

    python docs/performance.py

It measures nothing. A benchmark whose file is not there has the command that makes it in its place, and no row in the README.
"""

from collections.abc import Callable, Iterable, Sequence
import json
import pathlib
from typing import Any

DOCS = pathlib.Path(__file__).resolve().parent
RESULTS = DOCS / "performance"
README = DOCS.parent / "README.md"
# What makes the file of a section, but for --json=docs/performance/NAME.json.
COMMANDS = {
    "training": "python benchmarks/training.py --pytorch=DIR",
    "sampling": "python benchmarks/sampling.py --pytorch=DIR --encoder_passes=3",
    "ensemble": "python benchmarks/ensemble.py",
    "loader": "python benchmarks/loader.py",
    "startup": "python benchmarks/startup.py",
    "scaling": "python benchmarks/scaling.py",
    "tpu": "python benchmarks/tpu_program.py",
    "convert": "python benchmarks/convert.py",
    "first_run": "python benchmarks/first_run.py",
}
HEAD = """# Performance

<!-- Written by `python docs/performance.py` from docs/performance/*.json. Run the command of a section, and then that. -->

Each section is of one benchmark. Its command rewrites a file in `docs/performance/`, in which are the machine, the medians and
all single figures; `python docs/performance.py` then writes this page and its pictures from these files alone. Where things are
compared, each runs in a process of its own, in turn with the others; a time is the median of its runs, a ratio the median of those
of the pairs that ran beside each other, and in parentheses is between what the single ones lie. Compiling is kept apart. DIR is a
checkout of the PyTorch code of the paper, scxue/AO-GPT-MDM. `--quick` goes through a benchmark at the smallest sizes, in seconds.
"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  lines = [head, ("---",) * len(head), *rows]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def median(figures: dict[str, Any], form: str = "{:.2f}") -> str:
  return form.format(figures["median"])


def spread(figures: dict[str, Any], form: str = "{:.2f}") -> str:
  """The median, and between what the single figures lie."""
  return f"{form.format(figures['median'])} ({form.format(min(figures['all']))} to {form.format(max(figures['all']))})"


def training(results: dict[str, Any]) -> str:
  rows = []
  for size, r in results.items():
    own, peer = r["aogpt_jax"], r.get("PyTorch code")
    part = own["gflops"]["median"] / own["roof_gflops"]["median"]
    rows.append((size.replace("x", " x "), median(own["seconds"], "{:.3f}"), f"{own['tokens_per_second']:,.0f}",
                 median(peer["seconds"], "{:.3f}") if peer else "-", spread(r["ratio"]) if peer else "-",
                 f"{own['gflops']['median']:.0f} of {own['roof_gflops']['median']:.0f}: {part:.0%}", f"{own['peak_mib']:,.0f}",
                 f"{peer['peak_mib']:,.0f}" if peer else "-", f"{own['first_step_seconds']:.1f}"))
  head = ("layers x width x T x batch", "s a step", "tokens/s", "PyTorch, s a step", "times its tokens/s", "GFLOP/s of the roof",
          "peak MiB", "of PyTorch", "compiling, s")
  return f"""\
A step is orders, loss, gradient, clipping, AdamW and EMA, in float32, on all cores, in both; the PyTorch code is run eagerly, as
its trainer does. The roof is what XLA reaches in one matrix product of the MLP's shape on the same machine, measured beside each
run; GFLOP/s are of the matrix products that the model needs, whatever is computed beside them.

{table(head, rows)}

![GFLOP/s of the model's matrix products in a training step, and the roof](performance/training.png)
"""


def sampling(results: dict[str, Any]) -> str:
  steps = results["steps"]
  peers = list(next(iter(steps.values()))["ratios"])
  rows = [(s, median(r["aogpt_jax"]["seconds"]),
           *(cell for p in peers for cell in (median(r[p]["seconds"]), spread(r["ratios"][p], "{:.1f}")))) for s, r in steps.items()]
  head = ("steps", "aogpt_jax, s", *(cell for p in peers for cell in (f"{p}, s", "times ours")))
  return f"""\
Seconds to draw a batch in random orders, by the number of steps: {results["title"]}. The PyTorch code is its cached sampler; the
encoder has the same blocks with bidirectional attention, sees the whole text in each step, and computes the logits that the step
asks for.

{table(head, rows)}

![Seconds to draw the batch against the number of steps](performance/sampling.png)
"""


def ensemble(results: dict[str, Any]) -> str:
  rows = [(v, median(r["aogpt_jax"]["seconds"], "{:.1f}"), median(r["full passes"]["seconds"], "{:.1f}"), spread(r["ratio"]),
           spread(r["cpu_ratio"]), f"{r['aogpt_jax']['first_seconds']:.1f}", f"{r['largest_difference']:.0e}")
          for v, r in results["vocabularies"].items()]
  head = ("V", "aogpt_jax, s", "full passes, s", "times as fast", "of CPU time", "first run, with compiling, s",
          "largest difference, nats")
  return f"""\
Seconds for the NLL of each token after M orders of its context, beside full passes over permuted sequences, of which each gives
one of the numbers of a sequence: {results["title"]}.

{table(head, rows)}
"""


def loader(results: dict[str, Any]) -> str:
  rows = [(name, spread(r["tokens_per_second"], "{:,.0f}"), f"{r['peak_mib']:,.0f}") for name, r in results["loaders"].items()]
  waiting = results["waiting"]
  step, data = (f"{waiting[field] * 1e3:.3g}" for field in ("step_seconds", "data_seconds"))
  return f"""\
Batches of {results["batch_size"]} rows of {results["block_size"]:,} tokens, in a random order, out of the same packed files.

{table(("loader", "tokens/s", "peak MiB"), rows)}

Ours reads {spread(results["ratio"])} times as fast.

Training `configs/tiny.py`, whose steps are the shortest of all configs, takes {step} ms a step, of which it waits {data} ms for the
loader: {waiting["share"]:.2%} (means over {waiting["steps"]} steps). Every run records the same as `data_seconds` in `metrics.jsonl`.
"""


def startup(results: dict[str, Any]) -> str:
  rows = [("`import aogpt_jax`" if name == "aogpt_jax" else f"import of {name}", spread(r), "")
          for name, r in results["imports"].items()]
  rows += [(f"first step of `configs/tiny.py`, {name}", *(spread(r[field]) for field in ("process_seconds", "step_seconds")))
           for name, r in results["first_step"].items()]
  return f"""\
Seconds from the start of a process, with Python's bytecode compiled, and of the step itself. Cold is with an empty
`config.compilation_cache`, warm with the one that the cold start left; the text is packed already.

{table(("", "from the start of the process", "of the step, with compiling"), rows)}

`import aogpt_jax` loads {", ".join(results["loaded"]) or "none"} of {", ".join(results["not_to_be_loaded"])}.
"""


def scaling(results: dict[str, Any]) -> str:
  rows = []
  for what, axes in results["growth"].items():
    for name, r in axes.items():
      share = r["first_seconds"][-1] - r["seconds"][-1]["median"]
      rows.append((what, name, ", ".join(map(str, r["sizes"])), ", ".join(f"{s['median']:.3g}" for s in r["seconds"]),
                   f"{r['exponent']:.2f}", f"{r['flops_exponent']:.2f}", f"{max(share, 0.0):.1f}"))
  base = ", ".join(f"{name} = {value}" for name, value in results["base"].items())
  head = ("", "changed", "sizes", "seconds", "exponent of time", "of FLOPs", "compiling the largest, s")
  return f"""\
One of the length T, the layers L and the batch B is changed, the others stay as they are: {base}, width {results["width"]}, V =
{results["vocab_size"]}, float32. Texts are drawn a token at a time. An exponent is the slope of log time against log size by least
squares. In theory it is that of the FLOPs: 1 in B; a little below 1 in L, as the head does not grow; between 1 and 2 in T, as
attention grows with its square. Time grows more slowly than FLOPs where there is a part that does not grow, or where larger matrix
products run faster; so when a token is drawn, for which all weights are read, however many texts there are.

{table(head, rows)}

![Seconds against T, L and B, and the FLOPs scaled to them](performance/scaling.png)
"""


def tpu(results: dict[str, Any]) -> str:
  gib, rows, moves = 2**30, [], []
  for variant, r in results["variants"].items():
    moved = sum(m["bytes"] for m in r["movements"])
    rows.append((f"`{variant.replace(', ', '`, `')}`", f"{r['sequences']} x {r['micro_batches']}", f"{r['weights']:.4f}",
                 f"{r['attention_flops']:.4f}", f"{r['memory'] / gib:.2f}", f"{r['least_accessed'] / gib:,.0f}",
                 *((f"{r['accessed'] / gib:,.0f}", f"{moved / r['accessed']:.2%}") if r["accessed"] else ("not known",) * 2),
                 f"{r['compile_seconds']:.0f}"))
    moves += [(f"`{variant.replace(', ', '`, `')}`", m["kind"], f"`{m['shape']}`", f"{m['count']:,}",
               f"{m['bytes'] / r['accessed']:.2%}", f"`{m['source'].split('/', 1)[-1]}`") for m in r["movements"]]
  head = ("", "sequences a chip x micro-batches", "FLOPs with weights", "of attention", "GiB a chip needs",
          "least GiB read and written", "GiB by the compiled text", "of these by copies and transposes", "compiling, s")
  listed = table(("", "", "of", "times in a step", "of all bytes", "in"), moves) if moves else "There is none."
  return f"""\
`configs/medium.py`, `mesh.preset=fsdp`, on {results["topology"]}, by the TPU's compiler; nothing of it has run on one. FLOPs are
those of the matrix products of the jaxpr, with the passes of loops multiplied, over those of the formula
(`aogpt_jax/training/flops.py`): with weights, and of attention, in which Splash computes the scores again in its backward pass, in two
kernels. Unless `model.head_chunk=0`, the loss computes its logits again in the backward pass, since they do not all lie in memory at
once. The least bytes are those of the [roofline](scaling.md#what-the-least-time-of-a-step-assumes); those of the compiled text are of
every instruction's operands and results that lie in a chip's memory.

{table(head, rows)}

Copies, transposes and fusions of nothing but these, of each that takes at least 0.1% of the bytes:

{listed}

Of a v5e:4x4, without remat none takes 1%. With `remat=full` there is little else to read and write, and these do:

* `f32[4,16,1024,128]`: the log-sum-exp of each query, of which Splash's forward kernel writes 128 equal ones, a lane each. In the
  backward pass one of them is needed, as a row and as a column. It is the kernel's interface, and not ours.
* `bf16[4,1024,1024]` after `gather`: the modulation of each entry is gathered as rows of its width, while the compiler keeps the
  residual stream with T innermost. To gather and to turn moves less than a product per entry, which the gathers replace.
* `bf16[4,1024,1024]` and `bf16[4,1024,3,16,64]` without a name: what goes into the products that give the gradients of weights,
  which sum over T; T is made the innermost, and the parts are read into the chip's fast memory while other products run.
"""


def convert(results: dict[str, Any]) -> str:
  rows = [(name, *(median(r[field], form) for field, form in (
      ("file_gib", "{:.2f}"), ("seconds", "{:.1f}"), ("peak_gib", "{:.2f}"), ("peak_files", "{:.2f}"))))
          for name, r in results["conversions"].items()]
  return f"""\
A file of the PyTorch code with random weights and their average, {results["layers"]} layers x {results["width"]}, V = 50304, converted{
    ", with the state of AdamW" if results["with_optimizer"] else ""}. Pages of the mapped file count as memory, although the system
can take them back.

{table(("", "GiB of the file", "s", "peak GiB", "in sizes of the file"), rows)}
"""


def first_run(results: dict[str, Any]) -> str:
  losses = [(name.replace("_", " "), *(median(results[f"{name}.{field}"], "{:.3f}") for field in (
      "nats_per_token", "stderr_sequences", "bits_per_byte"))) for name in ("left_to_right", "any_order")]
  return f"""\
`configs/tiny.py` from the start of the process to its end - data, compiling, training, evaluation, samples - takes {
    median(results["seconds"], "{:.0f}")} s, and {results["peak_mib"]:,.0f} MiB at most. The validation text itself has a unigram entropy of {
    median(results["unigram"], "{:.3f}")} nats a byte, and a bigram entropy of {median(results["bigram"], "{:.3f}")}.

{table(("", "nats/byte", "standard error", "bits/byte"), losses)}
"""


SECTIONS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "training": ("Training step", training),
    "sampling": ("Sampling", sampling),
    "ensemble": ("Ensembles over orders of the context", ensemble),
    "loader": ("Loader", loader),
    "startup": ("Start-up", startup),
    "scaling": ("Growth", scaling),
    "tpu": ("The compiled program of a TPU", tpu),
    "convert": ("Converting checkpoints", convert),
    "first_run": ("The first command of the README", first_run),
}


def read(directory: pathlib.Path) -> dict[str, dict[str, Any]]:
  """What there is, by the name of the section."""
  paths = {name: directory / f"{name}.json" for name in SECTIONS}
  return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}


def machine(record: dict[str, Any]) -> str:
  facts = dict(record["facts"])
  load = facts.pop("load_before")
  processor, threads = facts.pop("processor"), facts.pop("threads")
  versions = ", ".join(f"{name} {version}" for name, version in facts.items() if name != "jaxlib")
  return f"{record['date']}: {processor}, {threads} threads, {versions}; load before it {load}."


def section(name: str, record: dict[str, Any] | None) -> str:
  heading, write = SECTIONS[name]
  command = record["command"] if record else COMMANDS[name]
  made = f"```sh\n{command} --json=docs/performance/{name}.json\n```\n"
  if record is None:
    return f"## {heading}\n\nNot measured yet; this does:\n\n{made}"
  return f"## {heading}\n\n{write(record['results'])}\n{made}\n{machine(record)}\n"


def page(directory: pathlib.Path = RESULTS) -> str:
  records = read(directory)
  return "\n".join([HEAD, *(section(name, records.get(name)) for name in SECTIONS)])


BEGIN, END = "<!-- measured: python docs/performance.py -->", "<!-- end of measured -->"


def _listed(figures: Iterable[dict[str, Any]], form: str) -> str:
  return ", ".join(median(f, form) for f in figures)


def readme(records: dict[str, dict[str, Any]]) -> str:
  """What the README has between BEGIN and END: the machine, and a row for each of the main figures."""
  rows = []

  def add(name: str, what: str, figure: str) -> None:
    rows.append((what, figure, f"`{records[name]['command']}`"))

  if "first_run" in records:
    r = records["first_run"]["results"]
    for order, label in (("left_to_right", "left to right"), ("any_order", "any order, {orders} orders a sequence")):
      loss, error, bits, orders = (r[f"{order}.{field}"] for field in ("nats_per_token", "stderr_sequences", "bits_per_byte", "orders"))
      add("first_run", f"tiny, {label.format(orders=median(orders, '{:.0f}'))}",
          f"{median(loss, '{:.3f}')} ± {median(error, '{:.3f}')} nats/byte, {median(bits)} bits/byte")
    add("first_run", "the validation text itself: unigram, bigram entropy",
        f"{median(r['unigram'], '{:.3f}')}, {median(r['bigram'], '{:.3f}')} nats/byte")
    minutes, seconds = divmod(round(r["seconds"]["median"]), 60)
    add("first_run", "the whole of it: data, compiling, training, evaluation, samples", f"{minutes} min {seconds} s")
  if "training" in records:
    for size, r in records["training"]["results"].items():
      layers, width, length, batch = size.split("x")
      beside = f", {spread(r['ratio'])} times the PyTorch code" if "ratio" in r else ""
      add("training", f"training step, {layers} layers x {width}, T = {length}, batch {batch}, float32",
          f"{r['aogpt_jax']['tokens_per_second']:,.0f} tokens/s{beside}")
  if "sampling" in records:
    r = records["sampling"]["results"]
    steps = list(r["steps"].values())
    add("sampling", f"drawing a batch of texts, {r['title']}, in {', '.join(r['steps'])} steps",
        f"{_listed((s['aogpt_jax']['seconds'] for s in steps), '{:.2f}')} s")
    peers = {"PyTorch code": "times the cached sampler of the PyTorch code, run in turn",
             "encoder": "times an encoder of equal size, which runs the whole text in each step"}
    for peer, label in peers.items():
      if peer in steps[0]["ratios"]:
        add("sampling", label, _listed((s["ratios"][peer] for s in steps), "{:.1f}" if peer != "encoder" else "{:.0f}"))
  if "ensemble" in records:
    title = records["ensemble"]["results"]["title"].split(";")[0]
    for vocab_size, r in records["ensemble"]["results"]["vocabularies"].items():
      add("ensemble", f"NLL of each token after M orders of its context, {title}, V = {vocab_size}",
          f"{median(r['aogpt_jax']['seconds'], '{:.0f}')} s, {spread(r['ratio'], '{:.1f}')} times full passes of the same model")
  if "loader" in records:
    r = records["loader"]["results"]
    own = r["loaders"]["aogpt_jax"]["tokens_per_second"]["median"] / 1e6
    add("loader", f"training loader, T = {r['block_size']}, batch {r['batch_size']}",
        f"{own:.1f} M tokens/s, {spread(r['ratio'], '{:.1f}')} times plain `tfds.data_source` + Grain")
  if "convert" in records:
    for name, label in (("to a workdir", "converting a file of the PyTorch code, {gib} GiB, to a workdir"), ("back", "and back")):
      r = records["convert"]["results"]["conversions"][name]
      add("convert", label.format(gib=median(r["file_gib"])), f"{median(r['seconds'], '{:.0f}')} s, peak memory {median(r['peak_files'])} times the file")
  return "\n\n".join([BEGIN, table(("", "", "command"), rows), END]) if rows else f"{BEGIN}\n\n{END}"


def with_table(text: str, records: dict[str, dict[str, Any]]) -> str:
  """The README with its table anew."""
  head, rest = text.split(BEGIN)
  return head + readme(records) + rest.split(END)[1]


def figure(width: float, height: float) -> Any:
  from matplotlib.figure import Figure  # pylint: disable=import-outside-toplevel  # the page itself needs none
  return Figure(figsize=(width, height), layout="constrained")


def draw_training(results: dict[str, Any]) -> Any:
  drawn = figure(6, 0.8 + 0.9 * len(results))
  axes = drawn.subplots()
  for i, (size, r) in enumerate(results.items()):
    own = r["aogpt_jax"]
    rate, roof = own["gflops"]["median"], own["roof_gflops"]["median"]
    bars = [("aogpt_jax", rate, "C0")]
    if "PyTorch code" in r:
      bars.append(("PyTorch code", rate * own["seconds"]["median"] / r["PyTorch code"]["seconds"]["median"], "C1"))
    for j, (name, value, color) in enumerate(bars):
      axes.barh(i + 0.36 * j - 0.18, value, 0.34, color=color, label=name if i == 0 else None)
      axes.text(value, i + 0.36 * j - 0.18, f" {value:.0f}, {value / roof:.0%} ", va="center", ha="right", color="white")
    axes.plot([roof, roof], [i - 0.4, i + 0.4], color="k", lw=2, label="one matrix product" if i == 0 else None)
  axes.set_yticks(range(len(results)), [size.replace("x", " x ") for size in results])
  axes.invert_yaxis()
  axes.set(xlabel="GFLOP/s of the model's matrix products", xlim=(0, None))
  axes.legend(loc="upper center", bbox_to_anchor=(0.4, 1.3), ncols=3, frameon=False)
  return drawn


def draw_sampling(results: dict[str, Any]) -> Any:
  from matplotlib import ticker  # pylint: disable=import-outside-toplevel
  steps = results["steps"]
  drawn = figure(6, 4)
  axes = drawn.subplots()
  for name, marker in zip([name for name in next(iter(steps.values())) if name != "ratios"], "os^"):
    axes.plot([int(s) for s in steps], [r[name]["seconds"]["median"] for r in steps.values()], marker=marker, label=name)
  axes.set(title=results["title"], xlabel="steps", ylabel="seconds to draw the batch", xscale="log", yscale="log")
  axes.set_xticks([int(s) for s in steps], list(steps))
  axes.xaxis.set_minor_locator(ticker.NullLocator())
  axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
  axes.grid(alpha=0.3, which="both")
  axes.legend()
  return drawn


def draw_scaling(results: dict[str, Any]) -> Any:
  drawn = figure(9, 4)
  for axes, (what, by_axis) in zip(drawn.subplots(1, len(results["growth"])), results["growth"].items()):
    for (name, r), marker in zip(by_axis.items(), "os^"):
      relative = [size / results["base"][name] for size in r["sizes"]]
      seconds = [s["median"] for s in r["seconds"]]
      line, = axes.plot(relative, seconds, marker=marker, label=f"{name}: {r['exponent']:.2f}, FLOPs {r['flops_exponent']:.2f}")
      axes.plot(relative, [f * seconds[-1] / r["flops"][-1] for f in r["flops"]], "--", color=line.get_color(), alpha=0.5)
    axes.set(title=what, xlabel="times the size of the base", yscale="log", ylabel="seconds (dashed: FLOPs, scaled to the last)")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend(title="exponent")
  return drawn


PICTURES = {"training": draw_training, "sampling": draw_sampling, "scaling": draw_scaling}


def main() -> None:
  records = read(RESULTS)
  for name, record in records.items():
    if name in PICTURES:
      PICTURES[name](record["results"]).savefig(RESULTS / f"{name}.png", dpi=110, metadata={"Software": None})
  (DOCS / "performance.md").write_text(page(), encoding="utf-8")
  README.write_text(with_table(README.read_text(encoding="utf-8"), records), encoding="utf-8")


if __name__ == "__main__":
  main()
