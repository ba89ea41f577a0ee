"""Host memory: what a step frees is kept for the next one, and what only the start needed is given back."""

import ctypes

# Parameters of mallopt(3), in malloc.h of glibc.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8


def keep_freed() -> None:
  """Tells glibc's malloc to keep freed memory in the process; does nothing where malloc is another.

  On a CPU, XLA allocates the temporary buffers of a program at each of its calls. By default, glibc gives such large blocks back to
  the kernel as soon as they are free, which then hands out zeroed pages again, one fault each: on one core, a third of the time of
  a small training step.
  """
  mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
  if mallopt is not None:
    mallopt(_ARENA_MAX, 1)  # the heaps that other threads than the first would have keep no block of over 32 MiB
    mallopt(_MMAP_THRESHOLD, 2**31 - 1)  # bytes; below, blocks are of the heap,
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)  # of which less than so much free memory at its end is kept
    mallopt(_TOP_PAD, 64 << 20)  # and which grows by so much more than is asked for


def give_back() -> None:
  """Gives memory that is free, and that `keep_freed` has kept, back to the kernel; does nothing where malloc is not glibc's.

  Worth it once what comes next is known to need less: initialising and compiling use memory that no step asks for again.
  """
  trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
  if trim is not None:
    trim(0)
