"""METEOR 1.5 by the published program, to check :mod:`capvid.metrics.meteor.meteor_scorer` against."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

from capvid.errors import DataError
from capvid.metrics.meteor.english import data_folder, jar_in

# The program dies where numbers have a decimal comma, so language and country are set.
_OPTIONS = ("-Xmx2G", "-Duser.language=en", "-Duser.country=US", "-Dfile.encoding=UTF-8")
_ARGUMENTS = ("-", "-", "-stdio", "-l", "en", "-norm")
_SEPARATOR = " ||| "


def meteor_scores(
    predictions: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> tuple[float, dict[str, float]]:
    """METEOR of tokenised captions, as :func:`capvid.metrics.meteor.meteor_scorer.meteor_scores` but by Java.

    One process takes all captions, and is ended whatever happens.

    Raises:
        DataError: there is no ``java`` command or no jar, or the program failed; the message says how.
    """
    lines = [
        _SEPARATOR.join(["SCORE", *map(_reference, captions), _prediction(predictions[video])])
        for video, captions in references.items()
    ]
    with _program() as (process, errors):
        counts = list(_answers(process, lines, len(lines), errors))
        evaluate = [_SEPARATOR.join(["EVAL", *counts])]
        values = [float(line) for line in _answers(process, evaluate, len(lines) + 1, errors)]
    return values[-1], dict(zip(references, values[:-1], strict=True))


def _prediction(text: str) -> str:
    """Return a prediction as the COCO code passes it: without separators."""
    return re.sub("[\r\n]", " ", text.replace("|||", ""))


def _reference(text: str) -> str:
    """Return a reference on one line; the program would separate its bars anyway."""
    return re.sub("[\r\n]", " ", text.replace("|", " | "))


@contextmanager
def _program() -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """Start the program; return it and the file of its error output."""
    jar = jar_in(data_folder())
    java = shutil.which("java")
    if java is None:
        raise DataError(
            "METEOR's own program needs Java, and there is no java command",
            remedy="install a Java runtime, or let capvid compute METEOR itself",
        )
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            [java, *_OPTIONS, "-jar", str(jar), *_ARGUMENTS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            errors="replace",
        )
        try:
            yield process, errors
        finally:
            process.kill()
            process.communicate()


def _answers(
    process: subprocess.Popen[str], lines: Iterable[str], count: int, errors: IO[str]
) -> Iterator[str]:
    """Send lines and yield ``count`` lines of the answer; neither side ever waits for the other to read."""
    assert process.stdin is not None and process.stdout is not None
    writer = threading.Thread(target=_send, args=(process.stdin, lines), daemon=True)
    writer.start()
    for _ in range(count):
        line = process.stdout.readline()
        if not line.endswith("\n"):
            process.wait()
            errors.seek(0)
            message = errors.read().strip().split("\n")[0] or f"exit code {process.returncode}"
            raise DataError(
                f"METEOR's own program failed: {message}", remedy="let capvid compute METEOR itself"
            )
        yield line.strip()
    writer.join()


def _send(stream: IO[str], lines: Iterable[str]) -> None:
    try:
        for line in lines:
            stream.write(f"{line}\n")
        stream.flush()
    except (OSError, ValueError):
        pass  # the program has ended, which the reader reports
