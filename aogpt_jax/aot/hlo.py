"""A compiled program, read from its text: what it runs how often, what devices send each other, what it multiplies in float32."""

import collections
from collections.abc import Collection, Iterator
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
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\]|mesh\[([^\]]*)\] \{([^}]*)\})")


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One instruction of a computation.

  Attributes:
    name: of it, and of its result.
    opcode: as XLA calls it.
    result: its type, or a tuple of types, with layouts.
    rest: operands and attributes.
    is_root: whether its result is that of its computation.
  """

  name: str
  opcode: str
  result: str
  rest: str
  is_root: bool

  @property
  def operands(self) -> list[str]:
    """The names of its operands."""
    depth = end = 0
    for end, letter in enumerate(self.rest):  # layouts have parentheses, too
      depth += (letter == "(") - (letter == ")")
      if depth < 0:
        break
    return re.findall(r"%([\w.\-]+)", self.rest[:end])

  @property
  def called(self) -> dict[str, str]:
    """Computations that it calls, by what for; but those of a choice."""
    return dict(_CALLED.findall(self.rest))


@dataclasses.dataclass(frozen=True)
class Program:
  """The computations of a program, by name, and which of them is run."""

  computations: dict[str, list[Instruction]]
  entry: str

  def run(self, into: Collection[str] | None = None) -> Iterator[tuple[Instruction, int]]:
    """Each instruction of a step, with how often it runs, counting the passes of loops.

    Args:
      into: opcodes of those whose called computations are told too; None: all.

    Raises:
      ValueError: it has a loop whose passes are not known.
    """
    yield from self._walk(self.entry, 1, into)

  def _walk(self, name: str, times: int, into: Collection[str] | None) -> Iterator[tuple[Instruction, int]]:
    for instruction in self.computations.get(name, ()):
      yield instruction, times
      if into is not None and instruction.opcode not in into:
        continue
      called = instruction.called
      inner = times * _passes(self.computations[called["condition"]]) if instruction.opcode == "while" else times
      callees = list(called.values())
      for branches in _BRANCHES.findall(instruction.rest):
        callees += re.findall(r"%([\w.\-]+)", branches)
      for callee in callees:
        yield from self._walk(callee, inner, into)


def parse(text: str) -> Program:
  """The program whose `as_text()` is given."""
  computations: dict[str, list[Instruction]] = {}
  entry = current = ""
  for line in text.splitlines():
    if started := _COMPUTATION.match(line):
      current = started[2]
      computations[current] = []
      entry = current if started[1] else entry
    elif current and (found := _INSTRUCTION.match(line)):
      name, result, opcode, rest = found.groups()
      computations[current].append(Instruction(name, opcode, result, rest, line.lstrip().startswith("ROOT ")))
  return Program(computations, entry)


def shapes(types: str) -> list[tuple[str, int]]:
  """(shape, bytes) of each array of a type, as ("f32[8,4]", 128)."""
  return [(f"{dtype}[{dims}]", _bytes(dtype, dims)) for dtype, dims in _SHAPE.findall(types)]


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
  for instruction, times in parse(text).run():
    name, opcode, result, rest = instruction.name, instruction.opcode, instruction.result, instruction.rest
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
  program, count = parse(text), 0
  types = {i.name: i.result for computation in program.computations.values() for i in computation}
  for instruction, times in program.run():
    if instruction.opcode in ("dot", "convolution"):
      count += times * any(types.get(operand, "").startswith("f32") for operand in instruction.operands)
  return count


def _moved(kind: str, opcode: str, result: str, ways: int) -> list[tuple[str, int]]:
  """(shape, bytes) of each array that a collective moves: the larger side of it, which is the whole."""
  moved = shapes(result)
  if opcode.endswith("-start") and kind in ("all-gather", "collective-permute"):
    # (operands, results, contexts): results are the second half of the arrays.
    arrays = [shape for shape in moved if not re.fullmatch(r"[us]32\[\]", shape[0])]
    moved = arrays[len(arrays) // 2:]
  if kind == "reduce-scatter":  # its operands are the whole
    moved = [(f"{shape} x {ways}", size * ways) for shape, size in moved]
  return moved


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


def _passes(condition: list[Instruction]) -> int:
  """Passes of a loop that counts from 0 up to a constant, as all of scan and of XLA's own do here."""
  compared = next((i.operands[1] for i in condition if i.is_root and i.opcode == "compare" and "direction=LT" in i.rest), None)
  for instruction in condition:
    if instruction.name == compared and instruction.opcode == "constant":
      return int(instruction.rest.partition(")")[0])
  raise ValueError("a loop does not count up to a constant, so that its passes are not known.")
