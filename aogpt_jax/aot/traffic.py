"""What a compiled program reads and writes in a device's memory, and what of that only moves or lays out again; from its text.

Counted are the operands and results of each instruction and fusion that lie in the memory, not on the chip (TPU programs mark
those). Of an operand of which a fusion takes a slice, the slice counts; of a result that is updated in place, the update.
"""

import collections
import dataclasses
import re

from aogpt_jax.aot import hlo

# What runs computations of its own, whose instructions count in its place.
_CONTROL = ("while", "conditional", "call", "async-start")
# What touches no memory.
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id", "iota",
         "opt-barrier", "optimization-barrier")
# What computes nothing: a fusion of these alone only moves.
_MOVING = (*_FREE, "copy", "transpose", "reshape", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad",
           "broadcast", "reverse", "convert")
_LAYS_OUT = ("copy", "transpose", "reshape")
_ARRAY = re.compile(r"\b(?:pred|[a-z]+\d+[a-z0-9]*)\[[\d,]*\](?:\{[^}]*\})?")


@dataclasses.dataclass(frozen=True)
class Movement:
  """Copies and transposes of arrays of one shape that come of one line of the source.

  Attributes:
    kind: "copy", "transpose", or "fusion" of nothing but such.
    shape: of what is written, as "bf16[1024,3072]{1,0}", with the order of its dimensions in memory from the innermost on.
    source: what it is part of, as JAX calls it.
    count: how often it runs in a step, counting the passes of loops.
    bytes: that are read and written by all of these.
  """

  kind: str
  shape: str
  source: str
  count: int
  bytes: int


def movements(text: str) -> tuple[tuple[Movement, ...], int]:
  """Copies and transposes of a step, those of the most bytes first; and the bytes that all of the step reads and writes.

  Args:
    text: `as_text()` of the compiled program.

  Raises:
    ValueError: it has a loop whose passes are not known.
  """
  program = hlo.parse(text)
  results = {i.name: i.result for computation in program.computations.values() for i in computation}
  found, total = collections.defaultdict(lambda: [0, 0]), 0
  for instruction, times in program.run(into=_CONTROL):
    size = _accessed(program, instruction, results)
    total += times * size
    kind = _kind(program, instruction)
    if kind and size:
      shape = re.sub(r":[^}]*", "", _ARRAY.search(instruction.result)[0])
      key = kind, shape, _source(program, instruction)
      found[key][0] += times
      found[key][1] += times * size
  return tuple(sorted((Movement(*key, *counts) for key, counts in found.items()), key=lambda m: -m.bytes)), total


def _accessed(program: hlo.Program, instruction: hlo.Instruction, results: dict[str, str]) -> int:
  """Bytes that one run of an instruction reads and writes in the memory."""
  if instruction.opcode in _FREE or instruction.opcode in _CONTROL or instruction.opcode.endswith(("-done", "-update")):
    return 0
  if 'custom_call_target="AllocateBuffer"' in instruction.rest:
    return 0
  operands = [_in_memory(results.get(name, "")) for name in instruction.operands]
  written = _in_memory(instruction.result)
  if instruction.opcode == "slice-start":  # ((whole), part, context)
    part = _ARRAY.findall(instruction.result)[1]
    return hlo.shapes(part)[0][1] + _in_memory(part)
  if instruction.opcode.endswith("-start"):  # its result is a tuple with its operands
    written = max(written - sum(operands), 0)
  if instruction.opcode == "dynamic-slice":
    return 2 * written
  if instruction.opcode == "dynamic-update-slice":
    return 2 * operands[1]
  if instruction.opcode == "fusion":
    inside = program.computations[instruction.called["calls"]]
    return sum(_read(inside, i, size) for i, size in enumerate(operands)) + _written(inside, written)
  return sum(operands) + written


def _in_memory(types: str) -> int:
  """Bytes of the arrays of a type that are not in a space of their own, S(1) and so on, which is on the chip."""
  return sum(hlo.shapes(array)[0][1] for array in _ARRAY.findall(types) if "S(" not in array)


def _read(inside: list[hlo.Instruction], number: int, size: int) -> int:
  """Of an operand of a fusion, the bytes that it reads."""
  name = next((i.name for i in inside if i.opcode == "parameter" and i.rest.startswith(f"{number})")), None)
  read, names = 0, {name}
  for instruction in inside:  # in the order in which they run
    if not names.intersection(instruction.operands):
      continue
    if instruction.opcode == "bitcast":
      names.add(instruction.name)
    elif instruction.opcode == "dynamic-slice" and instruction.operands[0] in names:
      read += _bytes(instruction.result)
    elif instruction.opcode == "dynamic-update-slice" and instruction.operands[0] in names:
      pass  # in place
    else:
      return size
  return min(read, size)


def _written(inside: list[hlo.Instruction], size: int) -> int:
  """Of the result of a fusion, the bytes that it writes."""
  results = {i.name: i for i in inside}
  root = next(i for i in inside if i.is_root)
  while root.opcode == "bitcast":
    root = results[root.operands[0]]
  if root.opcode == "dynamic-update-slice":
    return min(size, _bytes(results[root.operands[1]].result))
  return size


def _bytes(types: str) -> int:
  return sum(size for _, size in hlo.shapes(types))


def _kind(program: hlo.Program, instruction: hlo.Instruction) -> str:
  """What sort of movement it is, "" for what computes."""
  if instruction.opcode in ("copy", "transpose"):
    return instruction.opcode
  if instruction.opcode == "fusion":
    opcodes = {i.opcode for i in program.computations[instruction.called["calls"]]}
    if opcodes.issubset(_MOVING) and opcodes.intersection(_LAYS_OUT):
      return "fusion"
  return ""


def _source(program: hlo.Program, instruction: hlo.Instruction) -> str:
  """The operation of JAX that an instruction comes of, without its numbers."""
  name = re.search(r'op_name="([^"]*)"', instruction.rest)
  if not name and instruction.opcode == "fusion":
    names = (re.search(r'op_name="([^"]*)"', i.rest) for i in program.computations[instruction.called["calls"]])
    name = next(filter(None, names), None)
  return name[1] if name else ""
