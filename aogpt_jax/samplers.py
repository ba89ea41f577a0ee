"""The samplers by name, and which settings belong to which."""

from collections.abc import Iterator, Mapping
import math
from typing import Any

# Settings of `config.sample`, beside those that all samplers have, and their defaults.
DEFAULTS = dict(steps=0, counts="fixed", schedule="linear", spaced=False, contexts=1, window=4, checks=4, criterion="margin",
                noise=0.0, candidates=0)
# Sampler -> those that it reads; see aogpt_jax/sampling/ for what each of them does.
SAMPLERS = {
    "plan": ("steps", "counts", "schedule", "spaced", "contexts"),
    "speculative": ("window",),
    "burst": ("checks",),
    "adaptive": ("steps", "counts", "schedule", "criterion", "noise", "candidates"),
}
# What an order adapts to: how sure the model is of the token at an open position.
CRITERIA = ("probability", "margin", "entropy")
# Those that check several tokens in one causal pass, which an encoder has none of.
OF_DECODERS = ("speculative", "burst")
# Those that find their order themselves.
CHOOSE_ORDERS = ("burst", "adaptive")


def problems(sampler: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
  """Yields (setting, what is wrong with it and how to fix it) for settings that a sampler does not read, or out of range."""
  if sampler not in SAMPLERS:
    yield "sampler", f"is {sampler!r}; it must be one of {', '.join(SAMPLERS)}."
    return
  least = {"steps": 0, "contexts": 1, "window": 1, "checks": 1, "candidates": 0, "noise": 0}
  for name, default in DEFAULTS.items():
    value = settings[name]
    if name in least and not least[name] <= value < math.inf:
      yield name, f"is {value}; it must be at least {least[name]}" + (" and finite." if name == "noise" else ".")
    elif name == "criterion" and value not in CRITERIA:
      yield name, f"is {value!r}; it must be one of {', '.join(CRITERIA)}."
    elif name not in SAMPLERS[sampler] and value != default:
      of = " or ".join(other for other, names in SAMPLERS.items() if name in names)
      yield name, f"is {value!r}, which is of sampler {of}, and sampler is {sampler}; set it to {default!r}."
