"""The page of findings: claims of the paper beside what models trained here say, with tables, pictures and verdicts.

Everything on the page is computed from results of units (see results.py): a verdict too, so that it can't say what its numbers
don't.
"""

from collections.abc import Callable, Sequence
import dataclasses
import math
import pathlib
from typing import Any

import numpy as np

from aogpt_jax import pictures
from aogpt_jax.evaluation import held_out

# Two-sided 95% quantiles of Student's t, by the number of seeds: with three, errors are themselves uncertain.
_T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}


class Results:
  """Figures of arms with several seeds each; a figure is named by its path in a unit's result, as "final/any_order"."""

  def __init__(self, units: Sequence[dict[str, Any]]):
    self.units = sorted(units, key=lambda unit: (unit["arm"], unit["seed"]))

  def longer(self) -> "Results":
    """Of the arms that were trained again for longer, named long_ARM there and ARM here."""
    prefix = "long_"
    return Results([unit | {"arm": unit["arm"].removeprefix(prefix)} for unit in self.units if unit["arm"].startswith(prefix)])

  def has(self, *arms: str) -> bool:
    return all(any(unit["arm"] == arm for unit in self.units) for arm in arms)

  def has_all(self, arms: Sequence[str], seeds: set[int]) -> bool:
    """Whether every one of these arms has all of these seeds."""
    return all(self.of(arm).keys() == seeds for arm in arms)

  def of(self, arm: str) -> dict[int, dict[str, Any]]:
    """The results of an arm by seed."""
    return {unit["seed"]: unit for unit in self.units if unit["arm"] == arm}

  def values(self, arm: str, figure: str) -> dict[int, float]:
    """A figure by seed."""
    found = {}
    for seed, unit in self.of(arm).items():
      for key in figure.split("/"):
        unit = unit[key]
      found[seed] = unit
    return found

  def cell(self, arm: str, figure: str, digits: int = 3) -> str:
    """Mean and standard deviation over the seeds."""
    x = np.array(list(self.values(arm, figure).values()))
    return f"{x.mean():.{digits}f}" + (f" ± {x.std(ddof=1):.{digits}f}" if len(x) > 1 else "")

  def still_fell(self, arm: str, distribution: str = "any_order") -> str:
    """By how much the mean loss of an arm fell between its last two evaluations during training."""
    curves = [unit["curves"][distribution][-2:] for unit in self.of(arm).values()]
    return f"{np.mean([before - last for (_, before), (_, last) in curves]):.3f}"

  def difference(self, one: tuple[str, str], other: tuple[str, str]) -> "Difference":
    """Of two (arm, figure), seed by seed: the same seed has the same data in the same order."""
    a, b = (self.values(*x) for x in (one, other))
    return Difference(np.array([a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]))


@dataclasses.dataclass(frozen=True)
class Difference:
  """A difference between two arms, one for each seed."""

  by_seed: np.ndarray

  @property
  def mean(self) -> float:
    return float(self.by_seed.mean())

  @property
  def margin(self) -> float:
    """Half of the 95% interval of the mean, by Student's t over the seeds; nan for one seed."""
    n = len(self.by_seed)
    return _T95.get(n, 2.0) * float(self.by_seed.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan

  @property
  def sign(self) -> int:
    """1 or -1 where the interval lies on one side of 0, else 0."""
    return int(np.sign(self.mean)) if abs(self.mean) > self.margin else 0

  def __str__(self) -> str:
    n = len(self.by_seed)
    same = int((np.sign(self.by_seed) == np.sign(self.mean)).sum())
    return f"{self.mean:+.3f} ± {self.margin:.3f} (95% interval; {same} of {n} seeds on this side)"


def verdict(expected: Sequence[tuple[Difference, int]]) -> str:
  """Holds where each difference has the sign that the claim says, does not hold where one has the other, else is open."""
  signs = [(difference.sign, sign) for difference, sign in expected]
  if any(found == -sign for found, sign in signs):
    return "Does not hold at this size."
  if all(found == sign for found, sign in signs):
    return "Holds."
  return "Open: the seeds do not decide it."


@dataclasses.dataclass(frozen=True)
class Section:
  """What the page says of one claim.

  Attributes:
    name: of its picture.
    title: of the section.
    claim: the paper's, or the question.
    arms: that it needs, with their labels.
    curves: (arm, distribution) of the picture's lines, with their labels.
    body: results -> the verdict, sentences below it, and the rows of a table, headings first.
  """

  name: str
  title: str
  claim: str
  arms: tuple[str, ...]
  curves: dict[str, tuple[str, str]]
  body: Callable[[Results], tuple[str, list[str], list[tuple[str, ...]]]]


LTR, ANY = "final/left_to_right", "final/any_order"


def _orders(r: Results):
  own = {"left_to_right": LTR, "block_wise": "final/block_wise(4)", "fixed_random": "final/fixed_random(1)", "uniform": ANY}
  rows = [("trained in", "loss in its own order", "left to right", "any order")]
  rows += [(arm.replace("_", " "), *(r.cell(arm, figure) for figure in (own[arm], LTR, ANY))) for arm in own]
  of = lambda a, b: r.difference((a, own[a]), (b, own[b]))
  any_slower, fixed_slower = of("uniform", "left_to_right"), of("fixed_random", "left_to_right")
  above, below = of("block_wise", "left_to_right"), of("fixed_random", "block_wise")
  lines = [f"Any order − left to right, each in its own order: {any_slower}.",
           f"One fixed random order − left to right: {fixed_slower}.",
           f"Block-wise − left to right: {above}; fixed random − block-wise: {below}."]
  return verdict([(any_slower, 1), (fixed_slower, 1), (above, 1), (below, 1)]), lines, rows


def _mixture(r: Results):
  arms = {"uniform": "0", "mix_0.1": "10%", "mix_0.5": "50%", "left_to_right": "100%"}
  rows = [("left-to-right data", "left to right", "any order")]
  rows += [(label, r.cell(arm, LTR), r.cell(arm, ANY)) for arm, label in arms.items() if r.has(arm)]
  ltr, any_order = (r.difference(("mix_0.1", figure), ("uniform", figure)) for figure in (LTR, ANY))
  return verdict([(ltr, -1), (any_order, -1)]), [
      f"10% − none, left to right: {ltr}.", f"10% − none, any order: {any_order}."], rows


def _targets(r: Results):
  arms = {"uniform": "adaLN", "target_input": "input", "target_layer_shared": "every layer, one table",
          "target_layer_distinct": "every layer, a table each", "sigma_gpt": "sigma-GPT (input)"}
  rows = [("target", "parameters", "any order", "left to right")]
  size = lambda arm: next(iter(r.of(arm).values()))["parameters"]
  rows += [(label, f"{size(arm):,}", r.cell(arm, ANY), r.cell(arm, LTR)) for arm, label in arms.items()]
  differences = {label: r.difference(("uniform", ANY), (arm, ANY)) for arm, label in arms.items() if arm != "uniform"}
  return verdict([(d, -1) for d in differences.values()]), [f"adaLN − {label}: {d}." for label, d in differences.items()], rows


def _ema(r: Results):
  arms = {"ema_0": "none", "ema_0.99": "0.99", "uniform": "0.9999"}
  rows = [("largest decay", "any order", "left to right")]
  rows += [(label, r.cell(arm, ANY), r.cell(arm, LTR)) for arm, label in arms.items()]
  none = [r.difference((arm, ANY), ("ema_0", ANY)) for arm in ("ema_0.99", "uniform")]
  best = [r.difference(("uniform", ANY), ("ema_0.99", ANY))]
  steps = next(iter(r.of("uniform").values()))["steps"]
  lines = [f"{label} − none: {d}." for label, d in zip(("0.99", "0.9999"), none)]
  lines.append(f"0.9999 − 0.99: {best[0]}.")
  lines.append(f"The decay after n updates is at most (1 + n) / (10 + n), {(1 + steps) / (10 + steps):.4f} at the end here: 0.999 "
               "and 0.9999 can't be told apart in so few.")
  return verdict([(d, -1) for d in (*none, *best)]), lines, rows


def _encoder(r: Results):
  rows = [("model", "any order"), ("decoder", r.cell("uniform", ANY))]
  rows += [(f"decoder, {m} context orders", r.cell("uniform", f"ensemble/{m}")) for m in (2, 4, 8)]
  rows.append(("encoder", r.cell("encoder_ao", ANY)))
  gap = r.difference(("uniform", ANY), ("encoder_ao", ANY))
  left = r.difference(("uniform", "ensemble/8"), ("encoder_ao", ANY))
  closes = r.difference(("uniform", "ensemble/8"), ("uniform", "ensemble/1"))
  lines = [f"Decoder − encoder: {gap}.", f"Decoder with 8 context orders − encoder: {left}.",
           f"8 context orders − 1, decoder: {closes}.",
           f"In the last fifth of training, the decoder's loss still fell by {r.still_fell('uniform')}, the encoder's by "
           f"{r.still_fell('encoder_ao')}: this compares how far they have come in so many tokens, not where they would end."]
  if gap.sign > 0:
    share = 1 - left.mean / gap.mean
    lines.append(f"The ensemble closes {100 * share:.0f}% of the gap.")
    if share < 0.5:
      return "Holds in part: the decoder is above the encoder, and the ensemble closes less than half of it.", lines, rows
  return verdict([(gap, 1), (closes, -1)]), lines, rows


def _mixture_by_architecture(r: Results):
  arms = {("decoder", "0"): "uniform", ("encoder", "0"): "encoder_ao", ("decoder", "10%"): "mix_0.1",
          ("encoder", "10%"): "encoder_ao_mix_0.1"}
  rows = [("model", "left-to-right data", "left to right", "any order")]
  rows += [(*key, r.cell(arm, LTR), r.cell(arm, ANY)) for key, arm in arms.items()]
  lines = []
  for share, decoder, encoder in (("none", "uniform", "encoder_ao"), ("10%", "mix_0.1", "encoder_ao_mix_0.1")):
    for label, figure in (("left to right", LTR), ("any order", ANY)):
      lines.append(f"Decoder − encoder, {share}, {label}: {r.difference((decoder, figure), (encoder, figure))}.")
  fair = r.difference(("mix_0.1", LTR), ("encoder_ao_mix_0.1", LTR))
  unfair = r.difference(("mix_0.1", LTR), ("encoder_ao", LTR))
  word = {1: "above", 0: "not told apart from", -1: "below"}
  return (f"Left to right, the decoder with 10% is {word[unfair.sign]} the encoder with none, as the paper compares them, and "
          f"{word[fair.sign]} the encoder with 10%."), lines, rows


def _gap(r: Results):
  rows = [("model", "any-order loss", "random − any order", "sorted − any order", "mixture of 8 − any order")]
  for arm, label in (("uniform", "decoder"), ("mix_0.1", "decoder, 10% left to right"), ("encoder_ao", "encoder")):
    rows.append((label, r.cell(arm, "gap/ao"), *(r.cell(arm, f"gap/{rule}", 4) for rule in ("random", "sorted", "mixture"))))
  zero = lambda arm, rule: Difference(np.array(list(r.values(arm, f"gap/{rule}").values())))
  mixture, ordered = zero("uniform", "mixture"), zero("uniform", "sorted")
  largest = max(abs(x) for rule in ("random", "sorted", "mixture") for x in r.values("encoder_ao", f"gap/{rule}").values())
  lines = [f"Decoder, mixture of 8 − any order: {mixture}; sorted − any order: {ordered}.",
           f"Encoder: every difference is 0; the largest measured is {largest:.1e} nats."]
  return ("Holds." if mixture.sign < 0 and largest < 1e-4 else verdict([(mixture, -1)])), lines, rows


def _objectives(r: Results):
  arms = {"encoder_ao": "ao (RADD)", "encoder_lambda_dce": "lambda_dce (MDLM, MD4)",
          "encoder_score_entropy": "score_entropy (SEDD)"}
  rows = [("objective", "any order", "left to right")]
  rows += [(label, r.cell(arm, ANY), r.cell(arm, LTR)) for arm, label in arms.items()]
  lines = [f"{label} − ao: {r.difference((arm, ANY), ('encoder_ao', ANY))}." for arm, label in list(arms.items())[1:]]
  fell = ", ".join(f"{label} by {r.still_fell(arm)}" for arm, label in arms.items())
  lines += [f"In the last fifth of training, losses still fell: {fell}.",
            "The score-entropy model is evaluated by what its scores normalise to."]
  return "A comparison, with no claim of the paper's to test.", lines, rows


def _order_types(r: Results):
  types = ("left_to_right", "right_to_left", "block_wise(4)", "fixed_random(1)", "any_order")
  curves = {t: {seed: dict(unit["curves"][t]) for seed, unit in r.of("uniform").items()} for t in types}
  steps = sorted(next(iter(curves["any_order"].values())))
  rows = [("evaluated in", *(f"{step:,} steps" for step in steps))]
  for t in types:
    cells = [np.array([of[step] for of in curves[t].values()]) for step in steps]
    rows.append((t.replace("_", " "), *(f"{x.mean():.3f}" + (f" ± {x.std(ddof=1):.3f}" if len(x) > 1 else "") for x in cells)))
  any_order, ltr = curves["any_order"], curves["left_to_right"]
  at = lambda step: Difference(np.array([any_order[seed][step] - ltr[seed][step] for seed in any_order]))
  first, last = at(steps[0]), at(steps[-1])
  trained = r.difference(("uniform", LTR), ("left_to_right", LTR))
  lines = [f"Any order − left to right, in one model that is trained in any order: {first} after {steps[0]:,} steps, {last} at "
           "the end.",
           "Left to right, what that model has above one that is trained left to right for as long, which is what optimisation "
           f"costs: {trained}."]
  easier = {1: "left to right is the easier order", 0: "left to right is not told apart from any order",
            -1: "left to right is the harder order"}[last.sign]
  slower = "learns it in fewer steps" if trained.sign > 0 else "does not learn it in fewer steps"
  return f"To one model trained in any order, {easier}; a model trained left to right alone {slower}.", lines, rows


def _urn(r: Results):
  rows = [("data", "trained left to right, left to right", "trained in any order, any order", "difference")]
  differences = {}
  for label, ltr, any_order in (("English prose", "left_to_right", "uniform"), ("urn", "urn_left_to_right", "urn_uniform")):
    differences[label] = r.difference((any_order, ANY), (ltr, LTR))
    d = differences[label]
    rows.append((label, r.cell(ltr, LTR), r.cell(any_order, ANY), f"{d.mean:+.3f} ± {d.margin:.3f}"))
  prose, urn = differences.values()
  share = urn.mean / prose.mean
  lines = [f"Any order − left to right: prose {prose}; urn {urn}.",
           f"On the urn, {100 * share:.0f}% of the handicap on prose is left."]
  return verdict([(prose, 1), (Difference(prose.by_seed - urn.by_seed), 1)]), lines, rows


def _contexts(r: Results):
  rows = [("training", "any order", "8 context orders", "left to right")]
  rows += [(label, r.cell(arm, ANY), r.cell(arm, "ensemble/8"), r.cell(arm, LTR))
           for arm, label in (("uniform", "one order"), ("contexts_4", "probabilities averaged over 4 context orders"))]
  one, eight = (r.difference(("contexts_4", figure), ("uniform", figure)) for figure in (ANY, "ensemble/8"))
  lines = [f"Averaged − one order: any order {one}; with 8 context orders {eight}.",
           "Equal passes: each update has a quarter of the sequences, 4 times."]
  word = {-1: "lower", 0: "not told apart", 1: "higher"}
  return f"Any-order loss {word[one.sign]}, ensemble loss {word[eight.sign]}.", lines, rows


SECTIONS = (
    Section("orders", "Orders", "Any-order training converges more slowly than left to right; a fixed random order is slow too, "
            "and block-wise lies between.", ("left_to_right", "uniform", "fixed_random", "block_wise"),
            {"left to right": ("left_to_right", "left_to_right"), "block-wise": ("block_wise", "block_wise(4)"),
             "fixed random": ("fixed_random", "fixed_random(1)"), "any order": ("uniform", "any_order")}, _orders),
    Section("mixture", "Left-to-right data", "10% left-to-right data lowers both losses.",
            ("uniform", "mix_0.1", "left_to_right"),
            {f"{label}, {d.replace('_', ' ')}": (arm, d) for arm, label in (
                ("uniform", "none"), ("mix_0.1", "10%")) for d in ("any_order", "left_to_right")}, _mixture),
    Section("targets", "Target positions", "Telling the target through adaLN beats adding it to the input or before every layer.",
            ("uniform", "target_input", "target_layer_shared", "target_layer_distinct", "sigma_gpt"),
            {"adaLN": ("uniform", "any_order"), "input": ("target_input", "any_order"),
             "every layer, one table": ("target_layer_shared", "any_order"),
             "every layer, a table each": ("target_layer_distinct", "any_order"), "sigma-GPT": ("sigma_gpt", "any_order")},
            _targets),
    Section("ema", "Averages of the parameters", "EMA 0.9999 is best, and every EMA beats none.",
            ("uniform", "ema_0", "ema_0.99"),
            {"none": ("ema_0", "any_order"), "0.99": ("ema_0.99", "any_order"),
             "0.9999": ("uniform", "any_order")}, _ema),
    Section("architecture", "Decoder and encoder", "The decoder's any-order loss is above the encoder's, and averages over "
            "context orders close most of the gap.", ("uniform", "encoder_ao"),
            {"decoder": ("uniform", "any_order"), "encoder": ("encoder_ao", "any_order")}, _encoder),
    Section("equal_mixture", "Decoder and encoder at equal mixtures", "The paper gives 10% left-to-right data to the decoder "
            "alone. What if the encoder gets it too?", ("uniform", "encoder_ao", "mix_0.1", "encoder_ao_mix_0.1"),
            {f"{label}, {share}": (arm, "left_to_right") for label, share, arm in (
                ("decoder", "0", "uniform"), ("decoder", "10%", "mix_0.1"), ("encoder", "0", "encoder_ao"),
                ("encoder", "10%", "encoder_ao_mix_0.1"))}, _mixture_by_architecture),
    Section("gap", "The gap to masked diffusion", "A decoder's loss depends on the order of its context, so that a mixture of "
            "orders is below it; an encoder's does not.", ("uniform", "mix_0.1", "encoder_ao"), {}, _gap),
    Section("objectives", "Objectives of encoders", "How do the losses of RADD, MDLM and SEDD compare on the same network?",
            ("encoder_ao", "encoder_lambda_dce", "encoder_score_entropy"),
            {"ao": ("encoder_ao", "any_order"), "lambda_dce": ("encoder_lambda_dce", "any_order"),
             "score_entropy": ("encoder_score_entropy", "any_order")}, _objectives),
    Section("order_types", "Slow optimisation or less informative orders", "Is any-order loss high because it is learnt "
            "slowly, or because other orders tell less?", ("uniform", "left_to_right"),
            {t.replace("_", " "): ("uniform", t) for t in (
                "left_to_right", "right_to_left", "block_wise(4)", "fixed_random(1)", "any_order")}, _order_types),
    Section("urn", "Data with no natural order", "On exchangeable data any-order training should lose its handicap. Each text is "
            "drawn from a Pólya urn: its letters can be permuted without changing its probability.",
            ("uniform", "left_to_right", "urn_uniform", "urn_left_to_right"),
            {"left to right": ("urn_left_to_right", "left_to_right"), "any order": ("urn_uniform", "any_order")}, _urn),
    Section("contexts", "Training with averages over context orders", "What if training averages the probability over context "
            "orders, as the ensemble does?", ("uniform", "contexts_4"),
            {"one order": ("uniform", "any_order"), "4 context orders": ("contexts_4", "any_order")}, _contexts),
)


def write(path: pathlib.Path, results: Results, about: dict[str, Any]) -> list[pathlib.Path]:
  """Writes the page and its pictures beside it, in a directory of the page's name; returns the paths.

  Args:
    path: of the page, in Markdown.
    results: of all units.
    about: what the page says of how they were made: command, seeds, machine, core_seconds.
  """
  directory = path.with_suffix("")
  directory.mkdir(parents=True, exist_ok=True)
  written, chapters, summary = [], [], [("", "claim or question", "verdict")]
  longer, seeds = results.longer(), {unit["seed"] for unit in results.units}
  for section in SECTIONS:
    of_section = longer if longer.has_all(section.arms, seeds) else results
    if not of_section.has(*section.arms):
      continue
    word, lines, rows = section.body(of_section)
    parts = [f"## {section.title}", section.claim, f"**{word}**", held_out.markdown(rows),
             "\n".join(f"* {line}" for line in [*lines, _trained(of_section, section.arms)])]
    picture = _draw(directory / f"{section.name}.png", of_section, section.curves) if section.curves else None
    if picture:
      text = f"{section.title}: loss against tokens of training, for {', '.join(section.curves)}"
      parts.insert(3, f"![{text}]({directory.name}/{picture.name})")
      written.append(picture)
    chapters.append("\n\n".join(parts))
    summary.append((f"[{section.title}](#{section.title.lower().replace(' ', '-')})", section.claim, word))
  head = ["# Findings", _introduction(results, about), held_out.markdown(summary)]
  path.write_text("\n\n".join([*head, *chapters]) + "\n", encoding="utf-8")
  return [path, *written]


def _trained(results: Results, arms: Sequence[str]) -> str:
  """For how long the arms of a section were trained."""
  units = [unit for arm in arms for unit in results.of(arm).values()]
  steps, tokens = ({f"{x:,}" for x in of} for of in (
      (unit["steps"] for unit in units), (unit["steps"] * unit["tokens_per_step"] for unit in units)))
  return f"Each model: {' or '.join(sorted(steps))} steps, {' or '.join(sorted(tokens))} tokens."


def _introduction(results: Results, about: dict[str, Any]) -> str:
  base = next(unit for unit in results.units if unit["arm"] == "uniform")
  return (
      "What the paper (Xue et al., arXiv 2506.19935) found with models of hundreds of millions of parameters, tested again at a size "
      f"that fits two cores: {base['parameters']:,} parameters, updates of {base['tokens_per_step']:,} tokens, blocks of "
      f"{base['block_size']} bytes of English prose, {about['seeds']} seeds. So small a test can contradict a claim about large "
      "models no more than it can prove one; each verdict is of this size.\n\n"
      f"Made by `{about['command']}`: {about['units']} runs that took {about['core_seconds'] / 3600:.1f} core hours on a machine with "
      f"{about['machine']}, {about['versions']}. Losses are of {base['sequences']:,} validation sequences, with EMA weights, in nats per token; ± in "
      "tables is the standard deviation over seeds, and differences are paired by seed. A claim holds where the 95% interval of each "
      "of its differences lies on the claimed side of 0, and does not hold where one lies on the other side.")


def _draw(path: pathlib.Path, results: Results, curves: dict[str, tuple[str, str]]) -> pathlib.Path | None:
  """Mean over the seeds of each curve, with a band of one standard deviation; None without matplotlib."""
  fig = pictures.new(7, 4, dpi=120)
  if fig is None:
    return None
  axes = fig.subplots()
  for label, (arm, distribution) in curves.items():
    by_seed = [np.array(unit["curves"][distribution]) for unit in results.of(arm).values()]
    tokens = by_seed[0][:, 0] * next(iter(results.of(arm).values()))["tokens_per_step"] / 1e6
    values = np.stack([curve[:, 1] for curve in by_seed])
    (line,) = axes.plot(tokens, values.mean(axis=0), marker="o", markersize=3, label=label)
    if len(values) > 1:
      spread = values.std(axis=0, ddof=1)
      low, high = values.mean(axis=0) - spread, values.mean(axis=0) + spread
      axes.fill_between(tokens, low, high, alpha=0.25, color=line.get_color(), lw=0)
  axes.set(xlabel="tokens of training, in millions", ylabel="nats per token, validation text, EMA")
  axes.grid(alpha=0.25)
  axes.legend(fontsize=8)
  fig.savefig(path)
  return path
