"""The processes of a run: that all are there, what they agree on, and that all of them end when one does.

A run has one process on each host of a TPU pod, one for each GPU under SLURM, or as many as the flags of aogpt_jax.main say.
Before `jax.distributed`, which ends a process without a reason where another one is missing, they answer a roll call: each
connects to process 0 on the coordinator's port. These connections stay open while the run lasts. Small values are gathered over
them, and the system closes one when its process ends, however it ends: that is how the others know, at once, which one it was.

jax's own connection to its coordination service goes through a socket of the same process. Where process 0 ends, the library
would abort the others with a stack trace before they can say why; it does not, as long as that socket is open.
"""

import dataclasses
import json
import logging
import os
import pathlib
import queue
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
from typing import Any
import uuid

from absl import logging as absl_logging
import jax

from aogpt_jax import console

# A host that is no longer there closes nothing. The system asks after it when it has been silent for so many seconds, and gives
# it up after so many questions.
_SILENCE, _QUESTIONS = 10, 4
# Later than that: where both know of an end, ours is the message that names the process. A stopped process is silent only here.
_HEARTBEAT_SECONDS = 60
# An answer to the roll call may come so much later than the time that it was due.
_GRACE_SECONDS = 5.0
# In which a file system of a network shows one host what another has written.
_SEEN_SECONDS = 3.0
# jax's names of the clusters that are detected; it knows others, whose detection asks for packages or for a flag.
_DETECTED = ("slurm", "tpu", "gcetpu", "gketpu")


class ClusterError(RuntimeError):
  """The processes of a run do not come together; the message says which, why, and what to do."""


@dataclasses.dataclass(frozen=True)
class Place:
  """Of one process in a run of several."""

  coordinator: str  # HOST:PORT of process 0
  count: int
  index: int
  local_devices: tuple[int, ...] = ()  # (): all that the process sees

  @property
  def host(self) -> str:
    return self.coordinator.rpartition(":")[0].strip("[]")

  @property
  def port(self) -> int:
    return int(self.coordinator.rpartition(":")[2])


def find(coordinator: str = "", num_processes: int = 0, process_id: int = -1) -> Place | None:
  """This process's place in a run of several; None where it is the only one.

  Where the arguments are not given, jax's detection of Cloud TPU pods and of SLURM says it: on a TPU the metadata server, or in
  GKE the variables TPU_WORKER_HOSTNAMES and TPU_WORKER_ID; under SLURM the variables of a job step (SLURM_STEP_NODELIST,
  SLURM_NTASKS, SLURM_PROCID, and SLURM_LOCALID for the GPU of a process).

  Args:
    coordinator: HOST:PORT of process 0, as the others reach it; the port must be free there.
    num_processes: of the run; 1 is a run of this process alone, whatever is detected.
    process_id: from 0.

  Raises:
    ClusterError: arguments that are missing or do not fit, or a cluster that can't be read.
  """
  given = {"--coordinator": bool(coordinator), "--num_processes": num_processes > 0, "--process_id": process_id >= 0}
  if num_processes == 1 and not coordinator and process_id <= 0:
    return None
  if not any(given.values()):
    return _detected()
  if not all(given.values()):
    missing = ", ".join(flag for flag, there in given.items() if not there)
    raise ClusterError(f"{missing}: is missing; give all of {', '.join(given)}, or none of them on a TPU pod or under SLURM.")
  host, _, port = coordinator.rpartition(":")
  if not host or not port.isdecimal() or not 0 < int(port) < 65536:
    raise ClusterError(f"--coordinator={coordinator}: is not HOST:PORT with a port from 1 to 65535, as 10.0.0.1:8476.")
  if process_id >= num_processes:
    raise ClusterError(f"--process_id={process_id}: must be below --num_processes={num_processes}.")
  return Place(coordinator, num_processes, process_id) if num_processes > 1 else None


def _detected() -> Place | None:
  """The place that the cluster gives this process, by jax's own rules."""
  from jax._src import clusters  # what jax.distributed.initialize asks; there is no public name for it
  for environment in clusters.ClusterEnv._cluster_types:  # pylint: disable=protected-access
    if environment.name not in _DETECTED:
      continue
    try:
      if not environment.is_env_present():
        continue
      count, index = environment.get_process_count(), environment.get_process_id()
      if count == 1:
        return None
      coordinator = environment.get_coordinator_address(
          timeout_secs=60, override_coordinator_port=os.environ.get("JAX_COORDINATOR_PORT"))
      local = environment.get_local_process_id() if environment.name == "slurm" else None
    except Exception as e:  # pylint: disable=broad-exception-caught  # of whatever the environment holds
      raise ClusterError(f"the {environment.name} cluster that this process is in can't be read ({type(e).__name__}: {e}); give "
                         "--coordinator, --num_processes and --process_id, or --num_processes=1.") from None
    return Place(coordinator, count, index, () if local is None else (local,))
  return None


class _Link:
  """A connection on which each line is a JSON value."""

  def __init__(self, connection: socket.socket):
    self._socket, self._rest, self._sending = connection, b"", threading.Lock()
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", _SILENCE), ("TCP_KEEPINTVL", _SILENCE // 2), ("TCP_KEEPCNT", _QUESTIONS),
                          ("TCP_USER_TIMEOUT", 1000 * (_SILENCE + _QUESTIONS * _SILENCE // 2))):
      if hasattr(socket, option):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

  def fileno(self) -> int:
    return self._socket.fileno()

  def send(self, message: Any) -> None:
    """A message to an end that is gone is lost; reading says that it is gone."""
    with self._sending:
      try:
        self._socket.sendall(json.dumps(message).encode() + b"\n")
      except OSError:
        pass

  def read(self) -> list[Any] | None:
    """What has come; waits for something. None where the other end is closed, or speaks no JSON."""
    try:
      data = self._socket.recv(65536)
      *lines, self._rest = (self._rest + data).split(b"\n")
      return [json.loads(line) for line in lines] if data else None
    except (OSError, ValueError):
      return None

  def close(self) -> None:
    self._socket.close()


def _call_roll(place: Place, timeout: float) -> dict[int, _Link]:
  """Waits, on process 0, until every other one has come; returns their connections."""
  try:
    listener = _listener(place.port)
  except OSError as e:
    raise ClusterError(f"--coordinator={place.coordinator}: process 0 can't listen on port {place.port} ({e.strerror}); give one "
                       "that is free.") from None
  links: dict[int, _Link] = {}
  hosts, deadline = {0: socket.gethostname()}, time.monotonic() + timeout
  with listener, selectors.DefaultSelector() as ready:

    def refuse(line: str):
      for link in links.values():
        link.send({"refused": line})
      for key in [*ready.get_map().values()]:
        if key.fileobj is not listener:
          key.fileobj.close()
      raise ClusterError(line)

    ready.register(listener, selectors.EVENT_READ)
    while len(links) < place.count - 1:
      left = deadline - time.monotonic()
      if left <= 0:
        refuse(_missing([i for i in range(1, place.count) if i not in links], place.count, timeout))
      for key, _ in ready.select(left):
        if key.fileobj is listener:
          ready.register(_Link(listener.accept()[0]), selectors.EVENT_READ)
          continue
        link, messages = key.fileobj, key.fileobj.read()
        hello = messages[0] if messages else None
        if not isinstance(hello, dict) or hello.keys() != {"process", "count", "left", "host"}:
          if messages != []:  # half a line is none yet
            ready.unregister(link)
            link.close()
            links = {i: other for i, other in links.items() if other is not link}  # one that has gone is missing again
          continue
        index, theirs = hello["process"], hello["count"]
        if theirs != place.count:
          link.send({"refused": (line := f"--num_processes: process {index} on {hello['host']} was started with {theirs}, and "
                                         f"process 0 with {place.count}; give all the same.")})
          refuse(line)
        if index in links or index == 0:
          link.send({"refused": (line := f"--process_id={index}: two processes have it, on {hosts[index]} and {hello['host']}; "
                                         "give each its own.")})
          refuse(line)
        links[index], hosts[index] = link, hello["host"]
        deadline = min(deadline, time.monotonic() + hello["left"])
  for link in links.values():
    link.send({"complete": True})
  return links


def _missing(indices: list[int], count: int, timeout: float) -> str:
  which = f"process{'es' if len(indices) > 1 else ''} {', '.join(map(str, indices))} of {count}"
  return (f"{which} did not start within --start_timeout={timeout:g} seconds of the first; see why there, and start all of them "
          "again.")


def _listener(port: int) -> socket.socket:
  if socket.has_dualstack_ipv6():
    try:
      return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    except OSError as e:
      if isinstance(e, PermissionError) or "in use" in (e.strerror or ""):
        raise
  return socket.create_server(("", port), backlog=1024)


def _answer_roll(place: Place, timeout: float) -> _Link:
  """Reports to process 0, and waits until it says that all have come; returns the connection to it."""
  deadline = time.monotonic() + timeout
  while True:
    try:
      link = _Link(socket.create_connection((place.host, place.port), timeout=max(min(deadline - time.monotonic(), 5.0), 0.1)))
      break
    except (OSError, UnicodeError) as e:
      if time.monotonic() >= deadline:
        raise ClusterError(f"--coordinator={place.coordinator}: {_missing([0], place.count, timeout)} Nothing answers there "
                           f"({e}).") from None
      time.sleep(0.1)
  link.send({"process": place.index, "count": place.count, "left": deadline - time.monotonic(), "host": socket.gethostname()})
  messages = []
  with selectors.DefaultSelector() as ready:
    ready.register(link, selectors.EVENT_READ)
    while messages == [] and ready.select(max(deadline + _GRACE_SECONDS - time.monotonic(), 0.0)):
      messages = link.read()
  answer = messages[0] if messages else {}
  if answer == {"complete": True}:
    return link
  link.close()
  if isinstance(answer, dict) and "refused" in answer:
    raise ClusterError(answer["refused"])
  what = "does not answer the roll call" if messages == [] else "has ended, or is no process 0 of this program"
  raise ClusterError(f"--coordinator={place.coordinator}: what listens there {what}; see what it is.")


class _Channel:
  """The connections of a run's processes, each to process 0, while the run lasts."""

  def __init__(self, place: Place, links: dict[int, _Link]):
    self.place, self._links, self._ending, self._leaving = place, links, threading.Lock(), False
    self._values = {index: queue.SimpleQueue() for index in links}
    threading.Thread(target=self._watch, daemon=True, name="cluster").start()

  def gather(self, value: Any) -> list[Any]:
    if self.place.index == 0:
      values = [value, *(self._values[index].get() for index in sorted(self._links))]
      for link in self._links.values():
        link.send({"value": values})
      return values
    self._links[0].send({"value": value})
    return self._values[0].get()

  def leave(self) -> None:
    self.gather(None)
    self._leaving = True
    self.gather(None)  # before a connection closes, all know that it may

  def _watch(self) -> None:
    ready = selectors.DefaultSelector()
    for index, link in self._links.items():
      ready.register(link, selectors.EVENT_READ, index)
    while ready.get_map():
      for key, _ in ready.select():
        messages = key.fileobj.read()
        if messages is None:
          ready.unregister(key.fileobj)
          if not self._leaving:
            self._lost(key.data, "")
        for message in messages or ():
          if "value" in message:
            self._values[key.data].put(message["value"])
          else:
            self._lost(message["ended"], message["why"])

  def _lost(self, index: int, why: str) -> None:
    what = f": {why}" if why else "; start all of them again, and the run goes on from its newest checkpoint."
    self.end(f"error: process {index} of {self.place.count} has ended{what}", 1, index, why)

  def end(self, line: str, status: int, index: int, why: str) -> None:
    """Ends this process at once, and tells the others that process `index` has ended; the first call counts."""
    self._ending.acquire()  # and is never released
    for link in self._links.values():
      link.send({"ended": index, "why": why})
    sys.stdout.flush()
    if line:
      os.write(2, f"process {self.place.index}: {line}\n".encode())
    os._exit(status)  # jax's way out waits for the others


_channel: _Channel | None = None


def join(place: Place | None, start_timeout: float) -> None:
  """Brings the processes of a run together, by a roll call and `jax.distributed`; before anything touches a device.

  Args:
    place: of `find`; None does nothing.
    start_timeout: seconds after the start of the first process in which all must have come.

  Raises:
    ClusterError: on every process that has started, in that time: which ones are missing, or why they do not fit.
  """
  global _channel
  if place is None:
    return
  links = _call_roll(place, start_timeout) if place.index == 0 else {0: _answer_roll(place, start_timeout)}
  channel = _Channel(place, links)
  # SIGTERM is ours, see `Termination`; and no proxy stands between a process and itself.
  jax.config.update("jax_enable_preemption_service", False)
  jax.config.update("jax_check_proxy_envs", False)
  with tempfile.TemporaryDirectory() as directory:
    path = os.path.join(directory, "coordinator")
    _relay(path, (place.host, place.port) if place.index else ("localhost", place.port))
    try:
      jax.distributed.initialize(
          f"unix:{path}", place.count, place.index, local_device_ids=place.local_devices or None,
          cluster_detection_method="deactivate", initialization_timeout=60, heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
          shutdown_timeout_seconds=_HEARTBEAT_SECONDS, coordinator_bind_address=f"[::]:{place.port}")
    except Exception as e:  # pylint: disable=broad-exception-caught  # it raises exceptions of many types
      channel.end(f"error: jax.distributed does not start: {e}", 1, place.index, "jax.distributed does not start")
  _channel = channel
  # Other processes than the first speak only where something is wrong, and say who they are.
  absl_logging.get_absl_handler().setFormatter(logging.Formatter(f"process {place.index}: %(levelname)s: %(message)s"))


def _relay(path: str, address: tuple[str, int]) -> None:
  """Carries what connects to a socket file to an address, and keeps it open where the address closes."""
  listener = socket.socket(socket.AF_UNIX)
  listener.bind(path)
  listener.listen()

  def carry(source: socket.socket, target: socket.socket, closes: bool) -> None:
    try:
      while data := source.recv(1 << 16):
        target.sendall(data)
      if closes:
        target.shutdown(socket.SHUT_WR)
    except OSError:
      pass  # one of them is gone; the other connections of this process tell

  def accept() -> None:
    while True:
      near, _ = listener.accept()
      while True:  # process 0 may not be listening yet
        try:
          far = socket.create_connection(address)
          break
        except OSError:
          time.sleep(0.05)
      for source, target, closes in ((near, far, True), (far, near, False)):
        threading.Thread(target=carry, args=(source, target, closes), daemon=True).start()

  threading.Thread(target=accept, daemon=True).start()


def gather(value: Any) -> list[Any]:
  """The values of all processes, by their ids; each process calls it as often, from its main thread.

  A small value that JSON can hold. It takes a message to process 0 and back, no device, and waits for ever; a process that ends
  meanwhile ends all.
  """
  return _channel.gather(value) if _channel else [value]


def shares(directory: pathlib.Path) -> bool:
  """Whether a directory, which exists, is the same one for all processes."""
  if _channel is None:
    return True
  mark = directory / f".{gather(uuid.uuid4().hex)[0]}"
  if _channel.place.index == 0:
    mark.touch()
  gather(None)
  deadline = time.monotonic() + _SEEN_SECONDS
  while not (seen := mark.name in os.listdir(directory)) and time.monotonic() < deadline:
    time.sleep(0.1)
  seen = all(gather(seen))
  if _channel.place.index == 0:
    mark.unlink()
  return seen


def leave() -> None:
  """Ends the run of several processes when all have come here."""
  global _channel
  if _channel:
    _channel.leave()
    jax.distributed.shutdown()
    _channel = None


def end(line: str) -> None:
  """Ends this process with status 1 and a line on standard error, and with it all others of its run; "" where all is said.

  Raises:
    SystemExit: in a run of one process.
  """
  console.clear()
  if _channel:
    _channel.end(line, 1, _channel.place.index, line.removeprefix("error: "))
  sys.exit(line or 1)


def wait_for_the_end(seconds: float = 5.0) -> None:
  """Gives the end of another process, of which a collective knows first, the time to be known by name; that ends this one too."""
  if _channel:
    time.sleep(seconds)


class Terminated(Exception):
  """A run has stopped because one of its processes got SIGTERM or SIGINT; the message says what is saved."""

  def __init__(self, message: str, number: int):
    """`number`: of the signal."""
    super().__init__(message)
    self.number = number


class Termination:
  """While it is open, SIGTERM or a first SIGINT does not end the process; the run asks whether any of its processes got one.

  A second SIGINT raises KeyboardInterrupt, as the first does elsewhere.
  """

  def __init__(self):
    self._asked, self._before = 0, {}

  def _note(self, number: int, frame: Any) -> None:
    if number == signal.SIGINT and self._asked == signal.SIGINT:
      signal.default_int_handler(number, frame)
    self._asked = number
    if number == signal.SIGINT:
      os.write(2, b"\ninterrupt: the state is saved after this step; once more, and it is not\n")

  def reached(self) -> int:
    """The signal's number, or 0; the same on all processes, each of which asks after every step."""
    return max(gather(self._asked))

  def __enter__(self) -> "Termination":
    if threading.current_thread() is threading.main_thread():  # others can't
      for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) != signal.SIG_IGN:  # as the shell has it for what runs in the background
          self._before[number] = signal.signal(number, self._note)
    return self

  def __exit__(self, *_) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)
