"""Java programs behind published scores: Stanford's PTBTokenizer and METEOR 1.5.

Their jars come with the package pycocoevalcap, whose modules are not imported.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from capvid.errors import DataError, MetricError
from capvid.metrics.meteor.english import data_folder, jar_in
from capvid.text.tokenization import PUNCTUATION

_JAR = "tokenizer/stanford-corenlp-3.4.1.jar"
_ESCAPED = frozenset({"-LRB-", "-RRB-", "-LCB-", "-RCB-"})
_BREAKS = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")  # the tokenizer may begin a line at any of these
_OPTIONS = ("-Dfile.encoding=UTF-8", "-Duser.language=en", "-Duser.country=US", "-XX:+UseSerialGC")
REMEDY = "pip install pycocoevalcap==1.2 and install Java, or use --tokenizer builtin"


def tokenize(captions: Sequence[str]) -> list[str]:
    """Tokenize captions, all in one run of Java: lower case, punctuation dropped, joined by spaces.

    Line breaks of any kind become spaces, so that captions stay in order.

    Raises:
        MetricError: Java or the jar is missing, or Java fails.
    """
    if not captions:
        return []
    java, jar = java_program(), _jar()
    text = "".join(f"{_BREAKS.sub(' ', caption)}\n" for caption in captions)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "captions.txt"
        path.write_bytes(text.encode("utf-8", "replace"))
        command = [java, *_OPTIONS, "-cp", str(jar), "edu.stanford.nlp.process.PTBTokenizer"]
        command += ["-encoding", "UTF-8", "-preserveLines", "-lowerCase", str(path)]
        done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        messages = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise MetricError(
            f"PTBTokenizer: Java failed ({messages[-1] if messages else done.returncode})", remedy=REMEDY
        )
    lines = done.stdout.decode("utf-8").removesuffix("\n").split("\n")
    if len(lines) != len(captions):
        raise MetricError(
            f"PTBTokenizer: {len(lines)} lines came back for {len(captions)} captions",
            remedy="use --tokenizer builtin",
        )
    return [" ".join(token for token in line.rstrip().split(" ") if _is_word(token)) for line in lines]


def _is_word(token: str) -> bool:
    return bool(token) and token not in PUNCTUATION and token not in _ESCAPED


def java_program() -> str:
    """Return the path of Java.

    Raises:
        MetricError: it is not installed.
    """
    java = shutil.which("java")
    if java is None:
        raise MetricError("Java is not installed", remedy=REMEDY)
    return java


def java_version() -> str:
    """Return the first line of the output of ``java -version``.

    Raises:
        MetricError: Java is not installed.
    """
    done = subprocess.run([java_program(), "-version"], capture_output=True, check=False)
    return (done.stderr or done.stdout).decode("utf-8", "replace").partition("\n")[0].strip()


def _jar() -> Path:
    spec = importlib.util.find_spec("pycocoevalcap")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        jar = Path(folder) / _JAR
        if jar.is_file():
            return jar
    raise MetricError("PTBTokenizer: its jar is not installed", remedy=REMEDY)


# The program fails where numbers have a decimal comma, so set language and country.
_METEOR_OPTIONS = ("-Xmx2G", "-Duser.language=en", "-Duser.country=US", "-Dfile.encoding=UTF-8")
_METEOR_ARGUMENTS = ("-", "-", "-stdio", "-l", "en", "-norm")
_SEPARATOR = " ||| "


def meteor_scores(
    predictions: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> tuple[float, dict[str, float]]:
    """Compute METEOR as :func:`capvid.metrics.meteor.meteor_scorer.meteor_scores` does, but with Java.

    One process scores all captions; it never outlives the call.

    Raises:
        DataError: no ``java`` command or no jar, or the program failed.
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
    """Return a reference on one line; the program separates bars anyway."""
    return re.sub("[\r\n]", " ", text.replace("|", " | "))


@contextmanager
def _program() -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """Start the program; return its process and the file of its stderr."""
    jar = jar_in(data_folder())
    java = shutil.which("java")
    if java is None:
        raise DataError(
            "METEOR's own program needs Java, and there is no java command",
            remedy="install a Java runtime, or let capvid compute METEOR itself",
        )
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            [java, *_METEOR_OPTIONS, "-jar", str(jar), *_METEOR_ARGUMENTS],
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
    """Send lines and yield ``count`` lines of output, without deadlock between the two pipes."""
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
        pass  # the program ended, which the reader reports
