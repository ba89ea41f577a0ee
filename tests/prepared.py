"""A process that has imported what the programs import, and forks one for each program to be run: imports take seconds each time.

Started as `python tests/prepared.py FD`; reads requests from the socket of this descriptor, a JSON object a line, and answers each
with the status that the program has ended with.
"""

import gc
import json
import os
import runpy
import signal
import socket
import sys

import jax
from ml_collections import config_flags  # noqa: F401

# What the programs import, without the modules that are programs: these define flags.
from aogpt_jax import run  # noqa: F401
from aogpt_jax.aot import report  # noqa: F401
from aogpt_jax.evaluation import generative, zero_shot  # noqa: F401
from aogpt_jax.sampling import output, page, picture  # noqa: F401
from aogpt_jax.training import curves, loop  # noqa: F401


def serve(connection: socket.socket) -> dict:
  """Returns in a forked process, with its request."""
  gc.freeze()  # a child that looked for garbage in what we share would copy it
  requests = connection.makefile("r")
  for line in requests:
    request = json.loads(line)
    process = os.fork()
    if not process:
      return request
    _, status = os.waitpid(process, 0)
    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
  os._exit(0)


def become(request: dict) -> None:
  """Standard streams, directory and arguments of a program that was started by itself."""
  signal.signal(signal.SIGINT, signal.default_int_handler)
  for descriptor, (path, mode) in enumerate(zip(request["streams"], (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY), strict=True)):
    opened = os.open(path, mode)
    os.dup2(opened, descriptor)
    os.close(opened)
  jax.config.update("jax_log_compiles", request["logs_compilations"])
  os.chdir(request["directory"])
  sys.path[0] = request["directory"]
  sys.argv = [request["module"], *request["arguments"]]


if __name__ == "__main__":
  with socket.socket(fileno=int(sys.argv[1])) as ours:
    asked = serve(ours)
  become(asked)
  runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
