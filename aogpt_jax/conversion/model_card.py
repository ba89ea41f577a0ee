"""The model card of an export: origin, weights, steps, and the evaluations that the run's workdir has of them."""

import pathlib
from typing import Any

from aogpt_jax import records
from aogpt_jax.conversion import published


def write(p: published.Published, weights: str, origin: str, parameters: int, fingerprint: str, workdir: pathlib.Path) -> str:
  """The card in Markdown.

  Args:
    p: the model.
    weights: ema | raw.
    origin: where the weights are from, a sentence.
    parameters: how many numbers they are.
    fingerprint: as `fingerprint.describe` has it.
    workdir: of the run; evaluations of other steps or weights in it are left out.
  """
  m = p.model_args
  told = "adaLN" if p.kind == "AO-GPT" else "a row that is added to the input"
  average = {"ema": f"the moving average of the parameters, with decay {p.settings.get('ema_rate')}",
             "raw": "the parameters after the last update"}[weights]
  lines = [
      "---", "library_name: aogpt_jax", "pipeline_tag: text-generation", "tags:", "- any-order", "- masked-diffusion", "---", "",
      f"# {p.kind}, {m['n_layer']} layers x {m['n_embd']}", "",
      f"A causal decoder that predicts the tokens of a text in any order, told its target positions by {told}: the {p.kind} of "
      "[Any-Order GPT as Masked Diffusion Model](https://arxiv.org/abs/2506.19935).", "",
      "| | |", "|---|---|", f"| Origin | {origin} |", f"| Weights | {weights}: {average} |", f"| Steps | {p.step:,} updates |",
      f"| Parameters | {parameters:,} |", f"| Block size | {m['block_size']:,} tokens |",
      f"| Vocabulary | {m['vocab_size']:,} rows |", f"| Heads | {m['n_head']} |",
      f"| Training orders | {p.settings.get('orders', 'not said')} |", f"| Fingerprint | {fingerprint} |", "",
      "## Evaluation", "", *(_evaluation(workdir, p.step, weights) or ["None is known of these weights."]), "", "## Use", "",
      "```sh", "python -m aogpt_jax.convert --safetensors=THIS_DIRECTORY --output=DIR",
      "python -m aogpt_jax.main --config=DIR/config.py --workdir=DIR --mode=sample", "```", "",
      "The tensors have the names and layouts of the paper's PyTorch code."]
  return "\n".join(lines) + "\n"


def _evaluation(workdir: pathlib.Path, step: int, weights: str) -> list[str]:
  rows = []
  for path in sorted(workdir.glob("eval_*.json")):
    record = _json(path)
    if (record.get("step"), record.get("weights")) != (step, weights):
      continue
    for name, result in record.items():
      if isinstance(result, dict) and "stderr_sequences" in result:
        rows.append((f"{record.get('source')}, {record.get('split')}", name.replace("_", " "), result))
  zero_shot = _json(workdir / "zero_shot.json")
  for score in zero_shot.get("scores", ()) if zero_shot.get("step") == step else ():
    if score["model"] == workdir.resolve().name and score["weights"] == weights:
      order = score["order"].replace("_", " ") + (f", {score['contexts']} contexts" if score["contexts"] > 1 else "")
      rows.append((f"{score['dataset']} (recipe {score['recipe_hash']})", order, score))
  if not rows:
    return []
  number = lambda x, digits: "" if x is None else f"{x:.{digits}f}"
  return ["| text | order | nats per token | perplexity | bits per byte |", "|---|---|---|---|---|", *(
      f"| {text} | {order} | {number(r['nats_per_token'], 4)} | {number(r['perplexity'], 2)} | {number(r['bits_per_byte'], 4)} |"
      for text, order, r in rows)]


def _json(path: pathlib.Path) -> dict[str, Any]:
  """A file that an evaluation wrote; {} where it is not there or half written."""
  try:
    record = records.read(path)
  except (OSError, ValueError):
    return {}
  return record if isinstance(record, dict) else {}
