"""Pictures drawn by matplotlib, which a run can do without: where it is not installed, there is none, and a line that says so."""

from typing import Any

from aogpt_jax import console

_missing_is_said = False


def new(width: float, height: float, dpi: int = 150) -> Any | None:
  """An empty matplotlib figure of so many inches, to be saved by `savefig`; None, and a line, where there is no matplotlib."""
  global _missing_is_said
  try:
    from matplotlib import figure  # Here: it costs half a second. The figure has no global state and needs no display.
  except ImportError:
    if not _missing_is_said:
      console.say("matplotlib is not installed, so that no PNG is drawn; the figures are in the run's files, and "
                  "`python -m aogpt_jax.report WORKDIR` draws them without it")
    _missing_is_said = True
    return None
  return figure.Figure(figsize=(width, height), dpi=dpi, layout="constrained")
