"""Training as events for TensorBoard: ``tensorboard --logdir RUN`` draws them, also while training goes on.

Every point stands at the number of batches that were learned from, so that those of steps and of epochs share
an axis and a run that is resumed takes back what it lost: it is cut off the files, and a TensorBoard that saw
it drops it, as the later file says from which step on it begins. Scores are fractions, as in the log.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

from capvid.errors import TrainingError
from capvid.training.progress import EpochResult

if TYPE_CHECKING:
    from tensorboardX.proto.event_pb2 import Event

EVENTS = "events"
_NAME = "events.out.tfevents.{:06d}"  # TensorBoard reads them in the order of their names
_HEAD, _TAIL = 12, 4  # bytes of an event's length and its checksum, and of the checksum of its bytes


class Events:
    """A reporter that writes events; a context that closes the file.

    Tags are ``steps/...`` (the loss is the mean of the epoch so far), ``epochs/...`` and ``test/...``. A run
    that begins removes the events of the one before it; one that goes on writes a further file.

    Args:
        folder: for the files; made if need be.
        every: least number of seconds between two points of steps; the last step of an epoch is always one.

    Raises:
        TrainingError: from all that is told to it, where the events cannot be written.
    """

    def __init__(self, folder: Path, *, every: float = 1.0) -> None:
        self.folder, self.every = folder, every
        self._file: IO[bytes] | None = None
        self._batches = 0
        self._step = 0
        self._written = -every

    def __enter__(self) -> Events:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def started(self, *, batches: int, epoch: int, batch: int, **_: int) -> None:
        """Begin a file, and take back what older ones say of the steps to come."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._batches = batches
        self._step = (epoch - 1) * batches + batch
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            older = sorted(self.folder.glob("events.out.tfevents.*"))
            for path in older:
                if self._step:
                    _cut(path, self._step)
                else:
                    path.unlink()
            numbers = [int(path.suffix[1:]) for path in older if path.suffix[1:].isdecimal()]
            number = 1 + max(numbers, default=0) if self._step else 1
            self._file = (self.folder / _NAME.format(number)).open("xb", buffering=0)
        except OSError as error:
            raise self._failed(error) from error
        self._write(Event(file_version="brain.Event:2"), step=0)
        self._write(Event(session_log=SessionLog(status=SessionLog.START)), step=self._step + 1)

    def stepped(
        self, *, epoch: int, batch: int, loss: float, captions_per_second: float, learning_rate: float
    ) -> None:
        """Write a point, if the last one is long enough ago."""
        self._step = (epoch - 1) * self._batches + batch
        now = time.monotonic()
        if now - self._written >= self.every or batch == self._batches:
            self._written = now
            values = {
                "loss": loss,
                "captions_per_second": captions_per_second,
                "learning_rate": learning_rate,
            }
            self._scalars("steps", values, self._step)

    def finished_epoch(self, result: EpochResult) -> None:
        """Write what the epoch gave, and what the captioner says."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import text

        values = {
            "loss": result.loss,
            "val_cider": result.cider,
            "seconds": result.seconds,
            "captions_per_second": result.captions_per_second,
        }
        self._scalars("epochs", values, self._step)
        # indented text is shown as it is, whatever signs are in it
        said = [
            f"    {video}: {caption if isinstance(caption, str) else '. '.join(caption)}"
            for video, caption in result.samples.items()
        ]
        self._write(Event(summary=text("epochs/samples", "\n".join(said))), step=self._step)

    def finished(self, best: EpochResult, scores: Mapping[str, float]) -> None:
        """Write the scores on the test split, a step beyond the last so that a resumed run replaces them."""
        if scores:
            self._scalars("test", scores, self._step + 1)

    def _scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        points = [
            Summary.Value(tag=f"{group}/{name}", simple_value=float(value)) for name, value in values.items()
        ]
        self._write(Event(summary=Summary(value=points)), step=step)

    def _write(self, event: Event, *, step: int) -> None:
        """Append an event: its length and bytes, each followed by a checksum."""
        from tensorboardX.record_writer import masked_crc32c

        assert self._file is not None, "started comes first"
        event.wall_time, event.step = time.time(), step
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        record = b"".join(
            [length, struct.pack("<I", masked_crc32c(length)), data, struct.pack("<I", masked_crc32c(data))]
        )
        try:
            while record:  # a disk that is nearly full takes a part at first
                record = record[self._file.write(record) :]
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> TrainingError:
        return TrainingError(
            f"{self.folder}: events cannot be written ({error.strerror})",
            remedy="make room or the folder writable, and go on with --resume",
        )


def _cut(path: Path, step: int) -> None:
    """Cut off a file what comes after ``step``, or is damaged."""
    from google.protobuf.message import DecodeError
    from tensorboardX.proto.event_pb2 import Event

    data, kept = path.read_bytes(), 0
    while kept + _HEAD <= len(data):
        (length,) = struct.unpack_from("<Q", data, kept)
        end = kept + _HEAD + length + _TAIL
        try:
            whole = end <= len(data) and Event.FromString(data[kept + _HEAD : end - _TAIL]).step <= step
        except DecodeError:
            whole = False
        if not whole:
            break
        kept = end
    os.truncate(path, kept)
