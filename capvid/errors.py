"""Errors a user can cause or mend. Each one says what, where and what to do, on one line."""

from __future__ import annotations

import copyreg
import errno
import os
import re
import traceback
from pathlib import Path
from typing import Any

_MAX_TEXT = 1000  # characters of a message
_LONG_WORD = re.compile(r"[^\s/]{256,}")  # longer than the name of a file can be


class CapvidError(Exception):
    """Base of every error that capvid raises on purpose.

    Args:
        message: what went wrong and where, without a full stop.
        remedy: what to do about it, without a full stop.
        kind: word for JSON records; by default that of the class.

    Attributes:
        trace: formatted traceback of the bug behind an internal error; empty for all other errors.
    """

    exit_code = 1
    kind = "error"
    trace = ""

    def __init__(self, message: str, *, remedy: str = "", kind: str = "") -> None:
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy
        if kind:
            self.kind = kind

    def __str__(self) -> str:
        message = shorten(self.message)
        return " ".join((f"{message}; {self.remedy}" if self.remedy else message).split())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without calling ``__init__``, whose arguments differ from class to class."""
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


def shorten(text: str) -> str:
    """Return a message with each foreign value in it cut to 200 characters, and a long one in its middle."""
    text = _LONG_WORD.sub(lambda match: f"{match[0][:100]}...{match[0][-97:]}", text)
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 203]}...{text[-200:]}"


class UsageError(CapvidError):
    """An option or argument that cannot be used as given."""

    exit_code = 2
    kind = "usage"


class VideoError(CapvidError):
    """A video that cannot be read.

    Attributes:
        path: path or address of the video.
        kind: ``missing``, ``empty``, ``not-a-video``, ``no-video-stream``, ``unsupported-codec``,
            ``truncated``, ``encrypted``, ``incomplete`` (a part of a fragmented video), ``decoder`` (it
            crashed, or did not end in time), or ``unreadable``.
    """

    kind = "unreadable"

    def __init__(
        self, path: str | os.PathLike[str], message: str, *, remedy: str = "", kind: str = ""
    ) -> None:
        super().__init__(f"{path}: {message}", remedy=remedy, kind=kind)
        self.path = Path(path) if isinstance(path, str) else path


class TruncatedVideoError(VideoError):
    """A file that ends too early, or whose data is damaged."""

    kind = "truncated"


class FeatureFileError(CapvidError):
    """A features file that cannot be read or lacks what was asked of it."""

    kind = "features"


class FeatureMismatchError(CapvidError):
    """Features made otherwise than those a captioner was trained on."""

    kind = "feature-mismatch"


class WeightsError(CapvidError):
    """Weights that are missing, damaged, or not the ones expected."""

    kind = "weights"


class HubError(WeightsError):
    """The Hugging Face Hub could not be reached or has no such file."""

    kind = "hub"


class CheckpointError(CapvidError):
    """A captioner checkpoint that is missing, incomplete or not readable."""

    kind = "checkpoint"


class DataError(CapvidError):
    """A data set that cannot be used; the message names file and line."""

    kind = "data"


class MetricError(CapvidError):
    """A metric or tokenizer that is not installed, or a program of theirs that failed."""

    kind = "metric"


class TrainingError(CapvidError):
    """Training that cannot go on; what was saved before is kept.

    Attributes:
        kind: ``diverged`` if the loss is not a number any more, ``memory``, or ``training``.
    """

    kind = "training"


class AnswerError(CapvidError):
    """An answer of a chat model that is not a caption.

    Args:
        outcome: a key of :data:`ANSWER_OUTCOMES`; ``kind`` is ``answer-`` and this word.
        message: what is wrong with the answer, with the model's or the server's words.
        remedy: what to do about it.
    """

    def __init__(self, outcome: str, message: str, *, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy, kind=f"answer-{outcome}")


ANSWER_OUTCOMES = {  # what can be wrong with an answer, and how a summary calls it
    "truncated": "cut at --max-length",
    "empty": "empty",
    "blocked": "blocked",
    "refusal": "refused",
    "invalid": "invalid",
}


class RunError(CapvidError):
    """An error that concerns every input, such as too little device memory; it ends the run."""


class RemoteError(RuntimeError):
    """An exception of another process, as text because not every exception can be pickled.

    Attributes:
        trace: its formatted traceback.
    """

    def __init__(self, reason: str, trace: str) -> None:
        super().__init__(reason, trace)
        self.trace = trace

    def __str__(self) -> str:
        return str(self.args[0])

    @classmethod
    def of(cls, error: BaseException) -> RemoteError:
        """Convert an exception that was just caught."""
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return cls(reason, "".join(traceback.format_exception(error)))


_DISK_FULL = {errno.ENOSPC, errno.EROFS, getattr(errno, "EDQUOT", errno.ENOSPC)}


def input_error(path: str | os.PathLike[str], cause: Exception) -> CapvidError:
    """Return the error of an input by what was raised while it was handled; of a bug, with its traceback.

    Args:
        path: path or address of the input.
        cause: the exception, which was just caught.

    Raises:
        Exception: ``cause`` itself if it concerns every input: a closed stdout, a full disk, a RunError.
    """
    if is_disk_full(cause) or isinstance(cause, BrokenPipeError | RunError):
        raise cause
    if isinstance(cause, CapvidError):
        return cause
    if isinstance(cause, MemoryError) or str(cause).startswith("MemoryError"):  # the latter of a worker
        return CapvidError(
            f"{path}: too little memory for this input", remedy="try it alone with --workers 1"
        )
    if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
        what, _, remedy = shortage(cause).partition("; ")
        raise RunError(f"{path}: {what}", remedy=remedy) from cause
    if isinstance(cause, OSError) and cause.errno == errno.ENAMETOOLONG:
        return CapvidError(f"{path}: no file can have such a long name", remedy="give its path")
    remote = cause if isinstance(cause, RemoteError) else RemoteError.of(cause)
    error = CapvidError(
        f"{path}: internal error: {remote}",
        remedy="please report; --debug shows the traceback",
        kind="internal",
    )
    # as text: the exception itself would keep the arrays of its frames in memory
    error.trace = remote.trace
    return error


_SHORTAGES = (  # by what the error says
    (("Too many open files",), "too many open files", "raise the limit with ulimit -n"),
    (
        ("MemoryError", "Cannot allocate memory", "failed to map segment", "not enough memory"),
        "too little memory",
        "close other programs, or raise the limit with ulimit -v",
    ),
    (("can't start new thread",), "no more threads can be started", "raise the limit with ulimit -u or -v"),
)


def shortage(error: BaseException) -> str:
    """Return which resource of the machine is used up, and what to do; empty for other errors."""
    text = f"{type(error).__name__}: {error}"
    for signs, what, remedy in _SHORTAGES:
        if any(sign in text for sign in signs):
            return f"{what}; {remedy}"
    return ""


def is_disk_full(error: Exception) -> bool:
    """Whether nothing can be written to a disk any more."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL
