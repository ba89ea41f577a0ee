"""Writes a page that shows a run, or compares several, finished or not:

    python -m aogpt_jax.report WORKDIR [WORKDIR ...] [--output=report.html] [--noattention] [--samples=8]

The page is one HTML file that needs no network: losses, learning rate, throughput, attention, samples, evaluations, config and
environment. Of several runs it says what differs in their configs, and which has the lower loss. It reads what the runs have
written, and changes nothing of theirs; it runs on the CPU, so that it can be made while they train.
"""

import pathlib
import sys

from absl import app
from absl import flags
from absl import logging
import jax

from aogpt_jax import console
from aogpt_jax import pages
from aogpt_jax.data import loader
from aogpt_jax.data import packing
from aogpt_jax.data import tokenizers
from aogpt_jax.evaluation import attended
from aogpt_jax.report import page
from aogpt_jax.report import runs
from aogpt_jax.training import checkpoints

_OUTPUT = flags.DEFINE_string("output", "", "The page; WORKDIR/report.html by default, of several runs report.html.")
_ATTENTION = flags.DEFINE_bool("attention", True, "Load each model, and show what it attends to on held-out sequences.")
_SAMPLES = flags.DEFINE_integer("samples", 8, "Texts shown of each run, at most.", lower_bound=1)
_QUIET = flags.DEFINE_bool("quiet", False, "Print nothing but warnings and errors.")

# Of the sequences on which attention is computed, together.
_TOKENS = 8192


def _attention(record: runs.RunRecord) -> page.Attention:
  """The attention of a run's newest model in two orders, or why there is none to show."""
  if not _ATTENTION.value:
    return "It is left out, as --noattention asks."
  if not record.saved:
    return "It is left out: there is no checkpoint."
  config = record.config
  if config is None:
    return "It is left out, since the config is not known."
  if config.model.architecture != "decoder":
    return "It is left out: an encoder sees all known tokens at once, and knows no order of theirs."
  if config.data.prompt_field:
    return "It is left out: the run's texts are examples with prompts, of different lengths."
  try:
    packed = packing.find(config.data, tokenizers.load(config.data.tokenizer), config.model.block_size)
    if packed is None or "validation" not in packed.num_sequences:
      return f"It is left out: the run's packed validation text is not in {config.data.cache_dir}."
    rows = loader.Rows(packed, "validation")
    tokens = rows.read(loader.evenly_spread(len(rows), max(1, min(16, _TOKENS // config.model.block_size))))
    model, params = checkpoints.load_model(record.workdir)
  except (ValueError, OSError, ImportError, RuntimeError) as e:
    return f"It is left out: {e}"
  specs = ("left_to_right", "uniform")
  progress = console.Progress(f"attention of {record.name}", len(specs) * len(tokens), "sequences")
  found = {}
  for i, spec in enumerate(specs):
    found[spec] = attended.evaluate(model, params, tokens, spec, progress=lambda done: progress(i * len(tokens) + done))
  return found


def main(argv: list[str]) -> None:
  console.be_quiet(_QUIET.value)
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)  # the libraries' own lines would bury ours
  jax.config.update("jax_platforms", "cpu")  # accelerators are left to the runs
  if len(argv) < 2:
    sys.exit("error: give the workdir of a run, or of several: python -m aogpt_jax.report runs/tiny")
  workdirs = [pathlib.Path(path).expanduser() for path in argv[1:]]
  if len({path.resolve() for path in workdirs}) < len(workdirs):
    sys.exit("error: the same workdir is given twice; give each run once.")
  try:
    records = [runs.read(path, name) for path, name in zip(workdirs, runs.names(workdirs))]
    output = pages.file("--output", _OUTPUT.value or str(workdirs[0] / "report.html" if len(workdirs) == 1 else "report.html"))
  except (ValueError, OSError) as e:
    sys.exit(f"error: {e}")
  for record in records:
    for problem in record.problems:
      console.say(f"{record.name}: {problem}")
  try:
    content = page.html_page(records, [_attention(record) for record in records], _SAMPLES.value)
  except KeyboardInterrupt:
    console.clear()
    sys.exit("interrupted; nothing was written")
  output.write_text(content, encoding="utf-8")
  console.say(f"written:\n  {output}")


def _parse_flags(argv: list[str]) -> list[str]:
  try:
    return flags.FLAGS(argv)
  except flags.Error as e:
    sys.exit(f"error: {e}")


if __name__ == "__main__":
  app.run(main, flags_parser=_parse_flags)
