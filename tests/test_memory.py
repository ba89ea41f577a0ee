"""Freed memory stays in the process, and is not faulted in again, until it is given back."""

import platform
import subprocess
import sys

import pytest

from conftest import ROOT

SCRIPT = """
import resource, sys
import numpy as np
from aogpt_jax import memory
if sys.argv[1] == "kept":
  memory.keep_freed()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for i in range(10):
  if i == 2:
    before = faults()
  blocks = [np.ones(3 << 20) for _ in range(4)]  # 24 MiB each, which live at the same time
  del blocks
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tells glibc's malloc what to do")
def test_blocks_that_are_allocated_again_are_not_faulted_in_again():
  def faults(how):
    return int(subprocess.run([sys.executable, "-c", SCRIPT, how], cwd=ROOT, capture_output=True, text=True, check=True).stdout)

  given_back, kept = faults("given back"), faults("kept")
  assert given_back > 1000 and kept < given_back / 20


GIVEN_BACK = """
import pathlib, re
import numpy as np
from aogpt_jax import memory
memory.keep_freed()
resident = lambda: int(re.search(r"VmRSS:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
before = resident()
blocks = [np.ones(3 << 20) for _ in range(8)]
del blocks
kept = resident() - before
memory.give_back()
print(kept, resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tells glibc's malloc what to do")
def test_memory_that_is_kept_is_given_back_on_demand():
  done = subprocess.run([sys.executable, "-c", GIVEN_BACK], cwd=ROOT, capture_output=True, text=True, check=True)
  kept, after = map(int, done.stdout.split())  # KiB, of 8 blocks of 24 MiB
  assert kept > 150 << 10 and after < 20 << 10
