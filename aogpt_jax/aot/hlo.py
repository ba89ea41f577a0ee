"""What devices send each other in a compiled program, and what it multiplies in float32; read from its text."""

import collections
from collections.abc import Iterator
import dataclasses
import math
import re

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all", "ragged-all-to-all",
          "collective-broadcast")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{")
# Greedy up to the opcode, which is the first word before a parenthesis after the type.
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_COMPARED = re.compile(r"ROOT .* compare\(%([\w.\-]+), %([\w.\-]+)\), direction=LT")
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\]|mesh\[([^\]]*)\] \{([^}]*)\})")


@dataclasses.dataclass(frozen=True)
class Collective:
  """Collectives of one kind on arrays of one shape.

  Attributes:
    kind: as XLA calls it.
    shape: of the whole that is gathered, reduced, scattered or sent, as "bf16[1024,3072]".
    devices: how many take part together; 2 for collective-permute.
    count: how often it runs in a step, counting the passes of loops.
    bytes: that a device receives for all of these.
  """

  kind: str
  shape: str
  devices: int
  count: int
  bytes: int


def collectives(text: str, devices: int) -> tuple[Collective, ...]:
  """Collectives of a step, those that bring the most bytes first.

  Args:
    text: `as_text()` of the compiled program.
    devices: that it runs on.

  Raises:
    ValueError: it has a loop whose passes are not known.
  """
  # One that runs beside other work, a piece in each fusion or pass of a loop, is as many instructions of one channel; the first of
  # them runs as often as the whole.
  pieces: dict[str, dict[str, tuple[int, list[tuple[str, str, int, int]]]]] = {}
  for name, opcode, result, rest, times in _instructions(text):
    kind = opcode.removesuffix("-start")
    if kind not in _KINDS:
      continue
    ways = 2 if kind == "collective-permute" else _group_size(rest, devices)
    moved = []
    for shape, size in _moved(kind, opcode, result, ways):
      received = {"all-reduce": 2 * size * (ways - 1) // ways, "collective-permute": size}.get(kind, size * (ways - 1) // ways)
      moved.append((kind, shape, ways, received))
    channel = re.search(r"channel_id=(\d+)", rest)
    instructions = pieces.setdefault(channel[1] if channel else name, {})
    before, _ = instructions.get(name, (0, None))
    instructions[name] = before + times, moved
  totals = collections.defaultdict(lambda: [0, 0])
  for instructions in pieces.values():
    times, moved = min(instructions.values(), key=lambda piece: piece[0])
    for *key, received in moved:
      totals[tuple(key)][0] += times
      totals[tuple(key)][1] += times * received
  return tuple(sorted((Collective(*key, *total) for key, total in totals.items()), key=lambda c: -c.bytes))


def float32_products(text: str) -> int:
  """Matrix products of float32 operands in a step, counting the passes of loops."""
  types = _types(text)
  count = 0
  for _, opcode, _, rest, times in _instructions(text):
    if opcode in ("dot", "convolution"):
      operands = re.findall(r"%([\w.\-]+)", rest.split(")")[0])
      count += times * any(types.get(operand, "").startswith("f32") for operand in operands)
  return count


def _moved(kind: str, opcode: str, result: str, ways: int) -> list[tuple[str, int]]:
  """(shape, bytes) of each array that a collective moves: the larger side of it, which is the whole."""
  shapes = [(f"{dtype}[{dims}]", _bytes(dtype, dims)) for dtype, dims in _SHAPE.findall(result)]
  if opcode.endswith("-start") and kind in ("all-gather", "collective-permute"):
    # (operands, results, contexts): results are the second half of the arrays.
    arrays = [shape for shape in shapes if not re.fullmatch(r"[us]32\[\]", shape[0])]
    shapes = arrays[len(arrays) // 2:]
  if kind == "reduce-scatter":  # its operands are the whole
    shapes = [(f"{shape} x {ways}", size * ways) for shape, size in shapes]
  return shapes


def _group_size(rest: str, devices: int) -> int:
  groups = _GROUPS.search(rest)
  if not groups:
    return devices
  listed, size, mesh, axes = groups.groups()
  if listed or size:
    return len(listed.split(",")) if listed else int(size)
  sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh))
  return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", axes))


def _bytes(dtype: str, dims: str) -> int:
  bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
  return math.prod(int(n) for n in dims.split(",") if n) * bits // 8


def _types(text: str) -> dict[str, str]:
  return dict(re.findall(r"%([\w.\-]+) = ([\w\[\],]+)", text))


def _instructions(text: str) -> Iterator[tuple[str, str, str, str, int]]:
  """(name, opcode, type of the result, operands and attributes, times) of what a step runs."""
  computations: dict[str, list[str]] = {}
  entry = current = ""
  for line in text.splitlines():
    if started := _COMPUTATION.match(line):
      current = started[2]
      computations[current] = []
      entry = current if started[1] else entry
    elif current:
      computations[current].append(line)

  def walk(name: str, times: int) -> Iterator[tuple[str, str, str, str, int]]:
    for line in computations.get(name, ()):
      instruction = _INSTRUCTION.match(line)
      if not instruction:
        continue
      own, result, opcode, rest = instruction.groups()
      yield own, opcode, result, rest, times
      called = dict(_CALLED.findall(rest))
      inner = times * _passes(computations[called["condition"]]) if opcode == "while" else times
      callees = list(called.values())
      for branches in _BRANCHES.findall(rest):
        callees += re.findall(r"%([\w.\-]+)", branches)
      for callee in callees:
        yield from walk(callee, inner)

  return walk(entry, 1)


def _passes(condition: list[str]) -> int:
  """Passes of a loop that counts from 0 up to a constant, as all of scan and of XLA's own do here."""
  compared = next((found for line in condition if (found := _COMPARED.search(line))), None)
  for line in condition if compared else ():
    if bound := re.search(rf"%{re.escape(compared[2])} = \S+ constant\((\d+)\)", line):
      return int(bound[1])
  raise ValueError("a loop does not count up to a constant, so that its passes are not known.")
