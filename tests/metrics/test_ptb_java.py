from __future__ import annotations

import gzip
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

from capvid.errors import MetricError
from capvid.metrics import java as ptb_java
from capvid.scoring.scorer import score
from capvid.text.tokenization import ptb_tokenize

needs_jar = pytest.mark.skipif(
    importlib.util.find_spec("pycocoevalcap") is None or shutil.which("java") is None,
    reason="needs Java and pycocoevalcap",
)


def test_missing_java_or_jar_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda name: None)
        with pytest.raises(MetricError, match=r"Java is not installed; .* --tokenizer builtin"):
            score({"v": "a"}, {"v": ["a"]}, tokenizer="ptb")
    monkeypatch.setattr(ptb_java, "java_program", lambda: "java")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MetricError, match=r"its jar is not installed; pip install pycocoevalcap==1\.2"):
        score({"v": "a"}, {"v": ["a"]}, tokenizer="ptb")


def write_fake_java(folder: Path, code: str) -> str:
    program = folder / "java"
    program.write_text(f"#!{sys.executable}\nimport sys\n{code}\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for Java is a script")
def test_failing_java_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptb_java, "_jar", lambda: tmp_path / "a.jar")
    broken = write_fake_java(tmp_path, "sys.exit('no memory')")
    monkeypatch.setattr(ptb_java, "java_program", lambda: broken)
    with pytest.raises(MetricError, match=r"Java failed \(no memory\)"):
        ptb_java.tokenize(["a"])
    write_fake_java(tmp_path, "print('a')")
    with pytest.raises(MetricError, match="1 lines came back for 2 captions"):
        ptb_java.tokenize(["a", "b"])
    write_fake_java(tmp_path, "print(open(sys.argv[-1], encoding='utf-8').read().lower(), end='')")
    tokenized = ptb_java.tokenize(["A\u2028dog , runs .", "", "-LRB- B\rc\u0085d \ud83d"])
    assert tokenized == ["a dog runs", "", "-lrb- b c d"]  # an unpaired surrogate has become a question mark
    assert ptb_java.tokenize([]) == []


@needs_jar
def test_line_breaks_do_not_shift_captions() -> None:
    captions = ["a\u2028man's dog", "b\r\nc", "", "d\u0085e\vf", "(g)", "caf\u00e9"]
    assert ptb_java.tokenize(captions) == ["a man 's dog", "b c", "", "d e f", "-lrb- g -rrb-", "caf\u00e9"]
    assert "pycocoevalcap" not in sys.modules
    assert score({"v": ["a", "b"]}, {"v": ["a b", "A, b!"]}, tokenizer="ptb").corpus["ROUGE_L"] == 1
    assert "version" in ptb_java.java_version()


@pytest.mark.slow
@needs_jar
@pytest.mark.shared
def test_tokens_equal_the_published_ones(shared_data: Path) -> None:
    pairs = json.loads((shared_data / "metrics" / "cases" / "ptb_tokens.json").read_text(encoding="utf-8"))
    tokenized = ptb_java.tokenize([raw for raw, _ in pairs])
    # a dot at the end of a line may depend on the line below it
    assert sum(ours != tokens for ours, (_, tokens) in zip(tokenized, pairs, strict=True)) <= 1


@pytest.mark.slow
@needs_jar
@pytest.mark.shared
def test_builtin_tokens_of_real_captions_equal_those_of_the_program(shared_data: Path) -> None:
    """The others depend on capital letters, or on the text after a dot."""
    folder = shared_data / "data" / "annotations"
    captions = []
    for name in ("activitynet/train", "activitynet/val_1", "msrvtt/train_val_videodatainfo"):
        with gzip.open(folder / f"{name}.json.gz", "rt", encoding="utf-8") as file:
            data = json.load(file)
        rows = data["sentences"] if "sentences" in data else data.values()
        captions += [text for row in rows for text in row.get("sentences", [row.get("caption")])]
    pairs = zip(captions, ptb_java.tokenize(captions), strict=True)
    assert len(captions) > 190_000
    assert sum(" ".join(ptb_tokenize(caption)) != tokens for caption, tokens in pairs) <= 6
