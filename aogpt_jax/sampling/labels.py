"""What a token is called where it is shown by itself: nothing of it is invisible, and no control character stays one."""

import unicodedata

from aogpt_jax import console

# Signs for tokens of which nothing would be seen; others than these show their code points.
_SIGNS = {" ": "\u2423", "\n": "\u21b5", "\t": "\u21e5"}
# Categories of characters that leave no ink of their own: marks, separators, controls, formats, and what is no character.
_INVISIBLE = ("Mn", "Me", "Zs", "Zl", "Zp", "Cc", "Cf", "Cn", "Co", "Cs")


def of_bytes(content: bytes) -> str | list[str]:
  """The label of a token: its text; or [its text, the sign that is shown in its place], where it is no text or none to be seen."""
  try:
    return of_text(content.decode())
  except UnicodeDecodeError:  # a part of a character
    return ["", console.printable(content.decode(errors="backslashreplace"))]


def of_text(text: str) -> str | list[str]:
  """The label of a text; see `of_bytes`."""
  if any(unicodedata.category(c) not in _INVISIBLE for c in text):
    return console.printable(text)
  return [console.printable(text), "".join(_SIGNS.get(c, f"U+{ord(c):04X}") for c in text)]
