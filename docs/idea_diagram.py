"""Draws docs/idea.svg, the entries of a decoder with their orders and targets:

    python docs/idea_diagram.py
"""

from collections.abc import Iterator
import html
import pathlib

WORDS = ("the", "cat", "sat", "on", "mats")
ORDER = (2, 0, 4, 1, 3)
WIDTH, HEIGHT = 880, 812
INK, SOFT, TOKEN, TARGET, QUERY = "#1f2328", "#59636e", "#0a58a8", "#9a4a00", "#1a6b3c"
PAPER = {TOKEN: "#dcebfa", TARGET: "#fbe7d3", QUERY: "#dcf1e3", SOFT: "#eceff2"}
COLUMN, FIRST = 104, 160  # of entries, in pixels
GRID = 730


def text(x: float, y: float, words: str, color: str = INK, size: int = 15, anchor: str = "middle", weight: str = "normal") -> str:
  return (f'<text x="{x:g}" y="{y:g}" fill="{color}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}">'
          f"{html.escape(words)}</text>")


def box(x: float, y: float, words: str, color: str, width: float = COLUMN - 14, dashed: bool = False) -> str:
  """A box centred on x, with its top at y."""
  dash = ' stroke-dasharray="5 3"' if dashed else ""
  return (f'<rect x="{x - width / 2:g}" y="{y:g}" width="{width:g}" height="28" rx="5" fill="{PAPER[color]}" stroke="{color}"'
          f'{dash}/>{text(x, y + 19, words, color)}')


def arrow(x: float, y: float, to: float) -> str:
  return f'<path d="M{x:g} {y:g}V{to - 7:g}" stroke="{SOFT}" stroke-width="1.5" marker-end="url(#head)" fill="none"/>'


def token(position: int) -> str:
  return f"{WORDS[position]} @{position}"


def held(entry: int) -> str:
  return "start" if entry == 0 else token(ORDER[entry - 1])


def at(column: int) -> float:
  return FIRST + COLUMN * (column + 0.5)


def grid(x: float, y: float, rows: list[list[bool]], size: int = 18) -> Iterator[str]:
  """What each entry, a row, sees."""
  for i, row in enumerate(rows):
    for j, sees in enumerate(row):
      yield (f'<rect x="{x + j * size:g}" y="{y + i * size:g}" width="{size - 3}" height="{size - 3}" rx="2" '
             f'fill="{SOFT if sees else PAPER[SOFT]}"/>')


def labels(y: float, names: dict[float, str]) -> Iterator[str]:
  """What rows are, at the left."""
  for offset, name in names.items():
    yield text(20, y + offset, name, SOFT, anchor="start")


def heading(y: float, words: str) -> str:
  return text(20, y, words, size=17, anchor="start", weight="bold")


def training(top: float) -> Iterator[str]:
  length = len(WORDS)
  yield heading(top, "Training and scoring: one causal pass over T entries")
  y = top + 24
  yield from labels(y, {19: "text", 48: "is predicted at", 92: "entry", 126: "holds", 166: "is told its target", 258: "predicts"})
  for position in range(length):
    yield box(at(position), y, token(position), SOFT)
    yield text(at(position), y + 48, f"i = {ORDER.index(position)}", SOFT)
  for i in range(length):
    yield text(at(i), y + 92, f"i = {i}", SOFT)
    yield box(at(i), y + 107, held(i), TOKEN)
    yield box(at(i), y + 147, f"position {ORDER[i]}", TARGET)
    yield arrow(at(i), y + 177, y + 199)
    yield arrow(at(i), y + 221, y + 239)
    yield box(at(i), y + 239, token(ORDER[i]), TOKEN)
  yield (f'<rect x="{FIRST + 7}" y="{y + 199:g}" width="{COLUMN * length - 14}" height="22" rx="5" fill="{PAPER[SOFT]}" '
         f'stroke="{SOFT}"/>')
  yield text(FIRST + COLUMN * length / 2, y + 215, "causal decoder", INK, 14)
  yield text(GRID + 44, y + 92, "who sees whom", SOFT)
  yield from grid(GRID, y + 107, [[j <= i for j in range(length)] for i in range(length)])
  yield text(FIRST + 7, y + 292, f"{token(ORDER[-1])} comes last. Nothing is predicted after it, so it is in no entry.", SOFT, 14,
             "start")


def step(y: float, run: range, queries: int, sees: list[list[bool]], about: str) -> Iterator[str]:
  """A pass of sampling over the entries `run`, of which the last ones are queries, against the cache of those before."""
  yield from labels(y, {19: "holds", 59: "is told its target", 121: "draws"})
  for i in range(run.stop):
    is_new, is_query = i in run, i >= run.stop - queries
    extra = is_query and i > run.stop - queries
    yield box(at(i), y, held(run.stop - queries if is_query else i), QUERY if extra else TOKEN if is_new else SOFT, dashed=extra)
    yield box(at(i), y + 40, f"position {ORDER[i]}", QUERY if extra else TARGET if is_new else SOFT, dashed=extra)
    if is_query:
      yield arrow(at(i), y + 70, y + 102)
      yield box(at(i), y + 102, token(ORDER[i]), TOKEN)
    else:
      yield text(at(i), y + 90, "enters it" if is_new else "in the cache", SOFT, 13)
  yield from grid(GRID, y + 14, sees)
  yield text(FIRST + 7, y + 157, about, SOFT, 14, "start")


def sampling(top: float) -> Iterator[str]:
  """A step that draws two tokens, and the next."""
  yield f'<path d="M20 {top - 30:g}H{WIDTH - 20}" stroke="{PAPER[SOFT]}" stroke-width="2"/>'
  yield heading(top, f"Sampling: two tokens are known, and one pass draws positions {ORDER[2]} and {ORDER[3]} in parallel")
  yield from step(top + 20, range(2, 4), 2, [[True, True, True, False], [True, True, False, True]],
                  "Both queries hold the last known token. The first is a true entry and stays; the other is dropped.")
  top += 218
  yield heading(top, "The next pass: what was drawn enters the cache, as in training")
  yield from step(top + 20, range(3, 5), 1, [[j <= i for j in range(5)] for i in (3, 4)],
                  f"{token(ORDER[3])} was drawn without a look at {token(ORDER[2])}; {token(ORDER[4])} sees both.")


def picture() -> str:
  # On a sheet of its own, so that it can be read on any background.
  return "\n".join([
      f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
      'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" role="img">',
      "<title>Entries, orders and targets of an any-order decoder</title>",
      '<defs><marker id="head" viewBox="0 0 8 8" refX="1" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
      f'<path d="M0 0L8 4L0 8z" fill="{SOFT}"/></marker></defs>',
      f'<rect x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="12" fill="#ffffff" stroke="#c8ced4"/>',
      *training(36), *sampling(400), "</svg>", ""])


if __name__ == "__main__":
  pathlib.Path(__file__).with_name("idea.svg").write_text(picture(), encoding="utf-8")
