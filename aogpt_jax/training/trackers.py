"""Where a run can be watched beside its own files: TensorBoard and Weights & Biases. A run goes on without either."""

from collections.abc import Iterator
import contextlib
import html
import json
import os
import pathlib
import struct
import sys
from typing import Any, Protocol
import uuid

import ml_collections

from aogpt_jax import config as config_lib
from aogpt_jax import console
from aogpt_jax.evaluation import held_out

BOARD = "tensorboard"  # the directory of the event files
_WANDB_ID = "wandb_id.txt"
# Seconds that the end of a run waits for W&B to upload what is left; `wandb sync` can do it later.
_UPLOAD_SECONDS = 60.0


class Tracker(Protocol):

  def scalars(self, step: int, values: dict[str, float]) -> None:
    """Values of a step by their names, which have a group before a slash."""

  def text(self, step: int, name: str, text: str) -> None:
    """A text of a step."""

  def close(self) -> None:
    """Writes what is left."""


def trackers(workdir: pathlib.Path, step: int, config: ml_collections.ConfigDict) -> list[Tracker]:
  """Those that config.log asks for, but for what is not installed or can't be used, with a line that says so.

  Args:
    workdir: of the run.
    step: updates done at the start of this process; what was recorded beyond it is dropped, as it will come again. -1: all is.
    config: of the run.
  """
  found = []
  if config.log.tensorboard:
    try:
      found.append(TensorBoard(workdir / BOARD, step, config))
    except ImportError:
      console.say("config.log.tensorboard: tensorboardX is not installed (pip install tensorboardX); the run goes on without "
                  "event files, and metrics.jsonl has all figures")
  if config.log.wandb:
    try:
      found.append(WeightsAndBiases(workdir, step, config))
    except ImportError:
      console.say("config.log.wandb: wandb is not installed (pip install 'aogpt_jax[wandb]'); the run goes on without it")
    except Exception as e:  # pylint: disable=broad-exception-caught  # a service that is not ours must not end a run
      console.say(f"config.log.wandb: Weights & Biases can't be used ({_line(e)}); the run goes on without it")
  return found


class TensorBoard:
  """Event files with scalars, texts and the run's hyper-parameters."""

  def __init__(self, directory: pathlib.Path, step: int, config: ml_collections.ConfigDict):
    with _not_imported("torch"):  # which tensorboardX takes where it can: seconds, to write tensors that there are none of
      import tensorboardX  # Here: it costs half a second, which only a run that wants it should pay.
      from tensorboardX import summary

    drop_after(directory, step)
    # A name of its own: else a start within the same second would replace the file.
    self._writer = tensorboardX.SummaryWriter(str(directory), purge_step=step + 1, filename_suffix=f".{uuid.uuid4().hex[:8]}")
    names = [f"eval/{held_out.label(spec)}/nats_per_token" for spec in config.eval.distributions]
    *start, self._end = summary.hparams(_hyperparameters(config), dict.fromkeys([*names, "train/loss"]))
    for part in start:
      self._writer.file_writer.add_summary(part, max(step, 0))
    self._step = max(step, 0)

  def scalars(self, step: int, values: dict[str, float]) -> None:
    self._step = step
    for name, value in values.items():
      self._writer.add_scalar(name, value, step)

  def text(self, step: int, name: str, text: str) -> None:
    self._writer.add_text(name, "    " + text.replace("\n", "\n    "), step)  # as a Markdown code block

  def close(self) -> None:
    self._writer.file_writer.add_summary(self._end, self._step)
    self._writer.close()


@contextlib.contextmanager
def _not_imported(package: str) -> Iterator[None]:
  """Within, an import of a package fails as if it were not installed, unless it has been imported before."""
  if package in sys.modules:
    yield
    return
  sys.modules[package] = None
  try:
    yield
  finally:
    del sys.modules[package]


def _hyperparameters(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """The fields that make a run what it is, and how long it is."""
  values = config_lib.determining(config) | {"steps": config.steps}
  return {field: value if isinstance(value, (bool, int, float, str)) else repr(value) for field, value in values.items()}


def drop_after(directory: pathlib.Path, step: int) -> None:
  """Takes out of event files all that is of later steps, and the hyper-parameters, which each start writes anew.

  A run that was killed repeats the steps since its newest checkpoint. TensorBoard can pass over what they leave behind; those who
  read the files themselves should not have to.
  """
  from google.protobuf import message
  from tensorboardX.proto import event_pb2

  for path in sorted(directory.glob("events.out.tfevents.*")):
    kept, has_values, content = [], False, path.read_bytes()
    for record in _records(content):
      try:
        event = event_pb2.Event.FromString(record[12:-4])
      except message.DecodeError:  # damaged: of no use to TensorBoard either
        continue
      is_summary = event.HasField("summary")
      if is_summary and (event.step > step or any(value.tag.startswith("_hparams_/") for value in event.summary.value)):
        continue
      has_values |= is_summary
      kept.append(record)
    if not has_values:
      path.unlink()
    elif sum(map(len, kept)) < len(content):
      temporary = path.with_name(f"dropping.{path.name}")
      temporary.write_bytes(b"".join(kept))
      os.replace(temporary, path)


def _records(content: bytes) -> Iterator[bytes]:
  """The whole records of an event file: a length and its checksum, that many bytes, and theirs. The last one may be cut off."""
  start = 0
  while start + 12 <= len(content):
    (length,) = struct.unpack_from("<Q", content, start)
    end = start + 16 + length
    if end > len(content):
      return
    yield content[start:end]
    start = end


class WeightsAndBiases:
  """A run of Weights & Biases, which goes on under its id when the run is started again.

  Its own settings come from its environment variables, such as WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE. Without an API key or a
  network, what it gets is kept in WORKDIR/wandb, for `wandb sync`.
  """

  def __init__(self, workdir: pathlib.Path, step: int, config: ml_collections.ConfigDict):
    import wandb  # Here: it is an optional extra.

    self._wandb, self._broken = wandb, False
    path = workdir / _WANDB_ID
    is_known = step >= 0 and path.exists()
    identity = path.read_text(encoding="utf-8").strip() if is_known else uuid.uuid4().hex[:12]
    path.write_text(identity + "\n", encoding="utf-8")
    mode = os.environ.get("WANDB_MODE") or _mode(wandb, workdir)
    with contextlib.redirect_stdout(sys.stderr):
      self._run = wandb.init(
          project=os.environ.get("WANDB_PROJECT", "aogpt_jax"), name=workdir.name, id=identity, dir=str(workdir), mode=mode,
          resume="allow" if mode == "online" else None, config=json.loads(json.dumps(config.to_dict())),
          settings=wandb.Settings(console="off", silent=True, finish_timeout=_UPLOAD_SECONDS))
    self._from = self._run.step  # of a run that was killed: W&B has the steps before, and takes none of them twice

  def scalars(self, step: int, values: dict[str, float]) -> None:
    self._log(step, values)

  def text(self, step: int, name: str, text: str) -> None:
    self._log(step, {name: self._wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)})

  def _log(self, step: int, values: dict[str, Any]) -> None:
    if self._broken or step < self._from:
      return
    try:
      self._run.log(values, step=step)
    except Exception as e:  # pylint: disable=broad-exception-caught
      self._broken = True
      console.say(f"config.log.wandb: Weights & Biases has failed ({_line(e)}); the run goes on without it")

  def close(self) -> None:
    try:
      self._run.finish(exit_code=int(sys.exception() is not None))
    except Exception as e:  # pylint: disable=broad-exception-caught
      console.say(f"config.log.wandb: Weights & Biases has failed at the end ({_line(e)})")


def _mode(wandb: Any, workdir: pathlib.Path) -> str:
  """online where there is an API key that the server takes, else offline; nobody is asked for one in the middle of a start."""
  why = "there is no API key; `wandb login` takes one"
  try:
    if wandb.login(prompt=False):
      return "online"
  except Exception as e:  # pylint: disable=broad-exception-caught  # no network, or a key that is none
    why = _line(e)
  console.say(f"config.log.wandb: offline, since {why}; what it gets is kept in {workdir}/wandb, for `wandb sync`")
  return "offline"


def _line(error: Exception) -> str:
  return (str(error).splitlines() or [""])[0][:200] or type(error).__name__
