"""Writes docs/reproduction.md from the paper's numbers in aogpt_jax/evaluation/published.py and the configs:

    python docs/reproduction.py
"""

import pathlib
import runpy

from aogpt_jax.evaluation import published
from aogpt_jax.training import flops

DOCS = pathlib.Path(__file__).resolve().parent
CHIPS, CHIP, UTILISATION = 64, "TPU v5e", 0.4  # what hours are reckoned for, as in the docstrings of the configs
# What is trained at the paper's size, and what for.
RUNS = (
    ("medium", "tables 1 and 2, AO-GPT"), ("small", "table 1, AO-GPT"),
    ("medium_sigma_gpt", "table 1, sigma-GPT"), ("small_sigma_gpt", "table 1, sigma-GPT"),
    ("small_radd", "table 1, RADD"), ("small_sedd", "table 1, SEDD"), ("small_mdlm", "no table; MDLM and MD4"),
    ("small_left_to_right", "order ablation"), ("small_any_order", "order ablation"), ("small_block_wise", "order ablation"),
    ("small_fixed_random_1", "order ablation; `_2` and `_3` likewise"),
    ("small_targets", "ablation of target positions"), ("small_ema", "ablation of averages"),
    ("small_left_to_right_share", "ablation of left-to-right data"),
)
# A claim of the paper, what trains it at the paper's size, and its heading in findings.md.
CLAIMS = (
    ("any-order training converges more slowly than left to right; a fixed random order is slow too, block-wise lies between",
     "`small_left_to_right`, `small_any_order`, `small_block_wise`, `small_fixed_random_{1,2,3}`", "Orders"),
    ("10% left-to-right data lowers both losses", "`small_left_to_right_share`", "Left-to-right data"),
    ("the adaLN target beats the input target and the per-layer ones", "`small_targets`", "Target positions"),
    ("EMA 0.9999 is best, and every EMA beats none", "`small_ema`", "Averages of the parameters"),
    ("the decoder's any-order loss is above the encoder's, and the ensemble closes most of the gap", "`small`, `small_radd`",
     "Decoder and encoder"),
)
ORDERS = {"left_to_right": "left to right", "any_order": "any order"}
PAGE = """# Reproduction

<!-- Written by `python docs/reproduction.py`. Change that script or what it reads, and run it again. -->

What the paper ([Xue et al., arXiv 2506.19935](https://arxiv.org/abs/2506.19935)) reports, what was measured with this code, and what
has not been, for want of hardware. Published figures are those of `aogpt_jax/evaluation/published.py`.

## What was measured here

| | where | command |
|---|---|---|
| agreement with the PyTorch code: logits, likelihoods, training steps, parameter counts | [README](../README.md#agreement) | `python -m pytest tests/test_golden.py` |
| the tiny model: losses, time | [README](../README.md#measured) | `python -m aogpt_jax.main --config=configs/tiny.py` |
| the paper's findings at a size for two cores, three seeds | [findings](findings.md) | `python -m aogpt_jax.findings --config=configs/findings.py --jobs=2` |
| time of sampling, beside the PyTorch code and an encoder, on a CPU | [README](../README.md#measured) | `python benchmarks/sampling.py --encoder_passes=3` |
| memory, collectives and the least time of a step, compiled for TPUs that are not there | [scaling](scaling.md) | `python -m aogpt_jax.main --config=configs/medium.py --mode=aot --topology=v5e:4x4` |

No model of the paper's sizes has been trained with this code, and none of its checkpoints has been evaluated with it: nothing below
this line but the published figures is measured.

## What needs hardware, and how much

Model FLOPs of `aogpt_jax/training/flops.py`; hours on {chips} {chip} chips at an assumed {utilisation:.0%} of their bfloat16 peak. A sweep is
started by `aogpt_jax.sweep` and has several units; its figures are of all of them. Tokens per step, steps and what to expect are in the
docstring of each config.

{needs}

How to choose a slice, and what fits on it, is in [scaling.md](scaling.md); how to start a run there, in [launch/](../launch/README.md).

## Table 1: zero-shot perplexity

Published, blocks of 1,024 tokens of GPT-2's tokenizer. All AO-GPT models were trained with 10% left-to-right data, the encoders were
not. M: orders of the context over which probabilities are averaged.

{zero_shot}

Of a run of this code, or of a [published checkpoint](checkpoints.md#from-a-published-checkpoint) that has been converted to
`runs/medium`; the published figures come beside:

```sh
python -m aogpt_jax.main --config=configs/medium.py --mode=eval --config.eval.orders=1 \\
    --config.eval.zero_shot.datasets="('lambada', 'wikitext2', 'ptb', 'wikitext103', 'lm1b')" \\
    --config.eval.zero_shot.models="('run', 'gpt2:gpt2-medium')"
python -m aogpt_jax.main --config=configs/medium.py --mode=eval --config.eval.orders=1 --config.eval.ensemble=8 \\
    --config.eval.zero_shot.datasets="('ptb=ptb.test.txt',)"
```

The data sets come from TFDS, which needs a network once, or from files in their published formats, as `ptb` does here. The recipe `sedd`
packs and drops as the published code does; `--config.eval.zero_shot.recipe=exact` scores every token.

## Table 2: generative perplexity

Published: medium, texts of 1,024 tokens, under GPT-2 large, by steps.

{generative}

```sh
python -m aogpt_jax.main --config=configs/medium.py --mode=eval --config.eval.generative.judge=gpt2-large \\
    --config.eval.generative.steps='(64, 128, 256, 512, 1024)'
```

fills the same table, with the entropy of the texts beside it: a perplexity alone can be had by repetition.

## Speed of sampling

Published: about 25 times SEDD at batch 32. An independent check (Eso-LM, batch 512, T = 1024) has 12.2, 16.7, 20.4 and 23.4 times at 64,
128, 256 and 1024 steps. Measured here, on a CPU, against an encoder of equal size: [README](../README.md#measured). On an accelerator:

```sh
python benchmarks/accelerator.py --output=results
```

## Findings

{claims}

```sh
python -m aogpt_jax.sweep --config=configs/small_targets.py --print     # a command for each unit, to be run where there is hardware
python -m aogpt_jax.findings --config=configs/findings.py --redraw      # the page from its results, without training
```
"""


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
  lines = [head, ("---",) * len(head), *rows]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def needs() -> str:
  rows = []
  for name, what in RUNS:
    file = runpy.run_path(str(DOCS.parent / "configs" / f"{name}.py"))
    config = file["get_config"]()
    units = len(list(file["sweep"]())) if "sweep" in file else 1
    per_token = flops.per_token(config)
    total = per_token * config.steps * config.batch_size * config.model.block_size * units
    hours = total / (flops.peak(CHIP) * CHIPS * UTILISATION) / 3600
    command = f"python -m aogpt_jax.{'main' if units == 1 else 'sweep'} --config=configs/{name}.py"
    rows.append((what, f"`{command}`", str(units), f"{per_token:.2e}", f"{total:.1e}", f"{hours:.2g}"))
  return table(("for", "command", "runs", "FLOPs per token", "FLOPs in all", "hours"), rows)


def zero_shot() -> str:
  rows = [(ORDERS[order], model, size, *(f"{value:.2f}" for value in values))
          for (order, model, size), values in published.ZERO_SHOT.items()]
  return table(("order", "model", "size", "LAMBADA", "WikiText2", "PTB", "WikiText103", "1BW"), rows)


def generative() -> str:
  rows, steps = [], None
  for (top_p, temperature), models in published.GENERATIVE_PERPLEXITY.items():
    for model, values in models.items():
      steps = tuple(map(str, values))
      rows.append((f"{top_p:g}", f"{temperature:g}", model, *(f"{value:.3f}" for value in values.values())))
  return table(("top-p", "temperature", "model", *steps), rows)


def claims() -> str:
  rows = [(claim, configs, f"[{heading}](findings.md#{heading.lower().replace(' ', '-')})") for claim, configs, heading in CLAIMS]
  return table(("the paper's claim", "configs at its size", "tested at a small size"), rows)


def page() -> str:
  return PAGE.format(chips=CHIPS, chip=CHIP, utilisation=UTILISATION, needs=needs(), zero_shot=zero_shot(), generative=generative(),
                     claims=claims())


if __name__ == "__main__":
  (DOCS / "reproduction.md").write_text(page(), encoding="utf-8")
