"""Generative perplexity of texts, beside what their sampler was and how varied they are.

Perplexity alone says little: it falls with the temperature and with top-p, down to one token again and again. So each figure has
the entropy of its texts and the settings that they were drawn with beside it; for texts of other origin these are "unknown".
"""

from collections.abc import Callable, Sequence
import dataclasses
import glob
import hashlib
import json
import pathlib
from typing import Any

from aogpt_jax import config as config_lib
from aogpt_jax import console
from aogpt_jax import records
from aogpt_jax import samplers
from aogpt_jax.data import tokenizers
from aogpt_jax.evaluation import generative_sweep
from aogpt_jax.evaluation import held_out
from aogpt_jax.evaluation import judge as judge_lib
from aogpt_jax.run import Run

# What is known of the sampler of a text: fields of a line of samples.jsonl, or of its field `sampler`.
SETTINGS = ("order", "seed", "steps", "temperature", "top_p", "top_p_rule", "top_k", "counts", "schedule", "contexts", "dtype",
            "weights", "checkpoint_step")
UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Sample:
  """A text, what messages call it, and the SETTINGS that it was drawn with."""

  text: str
  name: str
  settings: dict[str, Any]


def evaluate(run: Run, load: Callable[[str], tuple[Any, int]]) -> list[pathlib.Path]:
  """Measures and shows what config.eval.generative asks for: texts of files or, where it has steps, of a sweep.

  Args:
    run: whose files are scored, or whose model draws.
    load: gives the run's parameters and their step, by the name of the weights.

  Returns:
    The files that it has written: results as JSON, and of a sweep its cells and a picture too.

  Raises:
    ConfigError: a field can't be used; the message says which and what to do.
    OSError: files that can't be read or written, or no network.
  """
  options = run.config.eval.generative
  judge = lambda: load_judge(run, options.judge, "config.eval.generative.judge")
  if options.steps:
    params, step = load(run.config.eval.weights)
    return generative_sweep.evaluate(run, judge(), params, step)
  pattern = options.samples or glob.escape(str(run.workdir / "samples.jsonl"))
  try:
    samples, files = read_samples(pattern)
  except (ValueError, FileNotFoundError) as e:
    raise config_lib.ConfigError(f"config.eval.generative.samples: {e}") from None
  return _measure(run, judge(), pattern, samples, files)


def read_samples(pattern: str) -> tuple[list[Sample], dict[str, str]]:
  """Texts of files.

  Args:
    pattern: a glob. A file that ends in .jsonl has a text in the field "text" of each line; any other file is one text.

  Returns:
    The texts, and the sha256 hex digest of each file.

  Raises:
    FileNotFoundError: no file matches.
    ValueError: a line is no JSON object with a text, or a file is not UTF-8.
  """
  paths = [pathlib.Path(path) for path in sorted(glob.glob(str(pathlib.Path(pattern).expanduser()), recursive=True))]
  paths = [path for path in paths if path.is_file()]
  if not paths:
    raise FileNotFoundError(f"{pattern} matches no file; give .jsonl files with a field \"text\", or files of a text each.")
  samples, files = [], {}
  for path in paths:
    content = path.read_bytes()
    files[str(path)] = hashlib.sha256(content).hexdigest()
    try:
      text = content.decode("utf-8")
    except UnicodeDecodeError as e:
      raise ValueError(f"{path}: is not UTF-8 (byte {e.start}); convert it.") from None
    if path.suffix != ".jsonl":
      samples.append(Sample(text, str(path), dict.fromkeys(SETTINGS, UNKNOWN)))
      continue
    for number, line in enumerate(text.split("\n"), 1):
      if line.strip():
        samples.append(_sample(line, f"{path}:{number}"))
  return samples, files


def _sample(line: str, name: str) -> Sample:
  try:
    record = records.value(line)
    record["text"].encode()  # no half of a surrogate pair, which is no text
  except (ValueError, TypeError, KeyError, AttributeError):
    raise ValueError(f'{name}: is no JSON object with a text in the field "text", as {{"text": "Once upon a time"}}.') from None
  sampler = record.get("sampler")
  sampler = sampler if isinstance(sampler, dict) else {}
  known = record | sampler
  # Beside what all texts have, what this one's sampler reads.
  own = {field: sampler[field] for field in ("sampler", *samplers.DEFAULTS) if field in sampler and field not in SETTINGS}
  return Sample(record["text"], name, {field: known.get(field, UNKNOWN) for field in SETTINGS} | own)


def load_judge(run: Run, name: str, field: str) -> judge_lib.Judge:
  """A GPT-2 by its name on the hub or its directory, with config.eval.generative.{tokenizer,dtype,batch_size}.

  Raises:
    ConfigError: it can't be loaded; the message begins with `field`.
  """
  options = run.config.eval.generative
  try:
    tokenizer = tokenizers.load(options.tokenizer)
  except (OSError, ValueError) as e:
    raise config_lib.ConfigError(str(e).replace("data.tokenizer", "config.eval.generative.tokenizer")) from None
  try:
    return judge_lib.load(name, tokenizer, dtype=options.dtype, mesh=run.mesh, batch_size=options.batch_size)
  except (OSError, ValueError, ImportError) as e:
    raise config_lib.ConfigError(f"{field}: {e}") from None


def _measure(run, judge, pattern, samples, files) -> list[pathlib.Path]:
  """Scores texts, those of equal settings together."""
  texts = [judge.encode(sample.text) for sample in samples]
  if not any(len(text) > 1 for text in texts):
    raise config_lib.ConfigError(f"config.eval.generative.samples: none of the {len(texts)} texts of {pattern} has two tokens or "
                                 "more, so that there is nothing to score; give others.")
  nats = judge.nll(texts, generative_sweep.progress(judge, texts))
  groups = {}
  for i, sample in enumerate(samples):
    # The seed names texts, and does not tell samplers apart.
    key = json.dumps(sample.settings | {"seed": 0})
    groups.setdefault(key, []).append(i)
  found, warnings = [], []
  for members in groups.values():
    of = lambda values: [values[i] for i in members]  # pylint: disable=cell-var-from-loop
    seeds = list({json.dumps(sample.settings["seed"]): sample.settings["seed"] for sample in of(samples)}.values())
    score = judge_lib.summarise(of(nats), of(texts), judge.model.block_size)
    warnings += judge_lib.warnings(of(texts), [sample.name for sample in of(samples)], judge.model.block_size)
    sampler = samples[members[0]].settings | {"seed": seeds[0] if len(seeds) == 1 else seeds}
    found.append({"sampler": sampler, "samples": len(members), **generative_sweep.fields(score)})
  console.say(f"\n{pattern} under {judge.name}, {judge.record['dtype']}, without the first token of each text\n{table(found)}")
  console.say("\n".join(["", *warnings, ""]) if warnings else "")
  record = {"judge": judge.record, "pattern": pattern, "files": files, "results": found, "warnings": warnings,
            "generative": run.config.eval.generative.to_dict()}
  path = run.workdir / "generative.json"
  generative_sweep.write(path, json.dumps(record, indent=2) + "\n")
  return [path]


def table(found: Sequence[dict[str, Any]]) -> str:
  """Results, a row for each sampler, and below what is known of the samplers. Standard errors are over the texts."""
  rows = [("sampler", "texts", "tokens", "perplexity", "", "exp(mean NLL)", "", "token entropy", "distinct-1", "-2", "-3", "-4",
           "repetition")]
  number = lambda x, digits: "-" if x is None else f"{x:.{digits}f}"
  error = lambda x: "" if x is None else f"+- {x:.2f}"
  for i, r in enumerate(found, 1):
    s = r["statistics"]
    rows.append((
        f"{i}: {r['sampler']['order']}", f"{r['texts']:,}", f"{r['tokens']:,}",
        number(r["perplexity"], 2), error(r["perplexity_stderr"]),
        number(r["token_perplexity"], 2), error(r["token_perplexity_stderr"]), number(s["entropy"], 3),
        *(number(s["distinct"][str(n)], 3) for n in (1, 2, 3, 4)), number(s["repetition"], 3)))
  lines = held_out.aligned(rows)
  for i, r in enumerate(found, 1):
    lines.append(f"{i}: " + ", ".join(f"{name} {value}" for name, value in r["sampler"].items()))
  return "\n".join(lines)
