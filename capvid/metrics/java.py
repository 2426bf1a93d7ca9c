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
from contextlib import suppress
from pathlib import Path
from typing import IO

from capvid.errors import DataError, MetricError
from capvid.metrics.meteor.english import JAR, data_folder
from capvid.text.tokenization import PUNCTUATION

_PTB_JAR = "tokenizer/stanford-corenlp-3.4.1.jar"
_BRACKETS = ("-LRB-", "-RRB-", "-LCB-", "-RCB-")  # in upper case, as the published code drops them
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
    dropped = {"", *PUNCTUATION, *_BRACKETS}
    return [" ".join(token for token in line.rstrip().split(" ") if token not in dropped) for line in lines]


def java_program() -> str:
    """Return the path of Java; raise MetricError if it is not installed."""
    java = shutil.which("java")
    if java is None:
        raise MetricError("Java is not installed", remedy=REMEDY)
    return java


def java_version() -> str:
    """Return the first line of the output of ``java -version``; raise MetricError without Java."""
    done = subprocess.run([java_program(), "-version"], capture_output=True, check=False)
    return (done.stderr or done.stdout).decode("utf-8", "replace").partition("\n")[0].strip()


def _jar() -> Path:
    spec = importlib.util.find_spec("pycocoevalcap")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        jar = Path(folder) / _PTB_JAR
        if jar.is_file():
            return jar
    raise MetricError("PTBTokenizer: its jar is not installed", remedy=REMEDY)


# The program fails in locales with a decimal comma, so set language and country.
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
    lines = []
    for video, captions in references.items():
        # As the COCO code passes them: predictions without separators; the program parts references at bars.
        texts = [*(text.replace("|", " | ") for text in captions), predictions[video].replace("|||", "")]
        lines.append(_SEPARATOR.join(["SCORE", *(re.sub("[\r\n]", " ", text) for text in texts)]))
    jar = data_folder() / JAR
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
            counts = list(_answers(process, lines, len(lines), errors))
            evaluate = [_SEPARATOR.join(["EVAL", *counts])]
            values = [float(line) for line in _answers(process, evaluate, len(lines) + 1, errors)]
        finally:
            process.kill()
            process.communicate()
    return values[-1], dict(zip(references, values[:-1], strict=True))


def _answers(
    process: subprocess.Popen[str], lines: Iterable[str], count: int, errors: IO[str]
) -> Iterator[str]:
    """Send lines and yield ``count`` lines of output, without deadlock between the two pipes."""
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None

    def send() -> None:
        # The program may end early: the reader below reports that.
        with suppress(OSError, ValueError):
            stdin.writelines(f"{line}\n" for line in lines)
            stdin.flush()

    writer = threading.Thread(target=send, daemon=True)
    writer.start()
    for _ in range(count):
        line = stdout.readline()
        if not line.endswith("\n"):
            process.wait()
            errors.seek(0)
            message = errors.read().strip().split("\n")[0] or f"exit code {process.returncode}"
            raise DataError(
                f"METEOR's own program failed: {message}", remedy="let capvid compute METEOR itself"
            )
        yield line.strip()
    writer.join()
