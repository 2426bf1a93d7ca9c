"""Stanford's PTBTokenizer, the tokenizer of the published scores, run by Java.

Its jar comes with the package pycocoevalcap, whose modules are not imported.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from capvid.errors import MetricError
from capvid.text.tokenization import PUNCTUATION

_JAR = "tokenizer/stanford-corenlp-3.4.1.jar"
_ESCAPED = frozenset({"-LRB-", "-RRB-", "-LCB-", "-RCB-"})
_BREAKS = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")  # at any of these the tokenizer may begin a line
_OPTIONS = ("-Dfile.encoding=UTF-8", "-Duser.language=en", "-Duser.country=US", "-XX:+UseSerialGC")
REMEDY = "pip install pycocoevalcap==1.2 and install Java, or use --tokenizer builtin"


def tokenise(captions: Sequence[str]) -> list[str]:
    """Tokenise captions, all in one run of Java: lower case, punctuation dropped, joined by spaces.

    Line breaks of any kind are spaces, so that a caption never moves into another's place.

    Raises:
        MetricError: Java or the jar is not there, or Java fails.
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
    """Give the path of Java.

    Raises:
        MetricError: it is not installed.
    """
    java = shutil.which("java")
    if java is None:
        raise MetricError("Java is not installed", remedy=REMEDY)
    return java


def java_version() -> str:
    """Give the first line of what ``java -version`` says.

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
