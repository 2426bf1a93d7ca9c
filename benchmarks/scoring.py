"""Seconds of tokenizer, BLEU, ROUGE_L and CIDEr-D, in capvid and in pycocoevalcap, and of the processes.

python benchmarks/scoring.py CASE.json PYTHON [VIDEOS] [REFERENCES]

CASE.json holds ``{"references": {id: [caption]}, "predictions": {id: caption}}``; its captions are resampled
to 2990 videos with 20 references. PYTHON is an interpreter with pycocoevalcap and Java;
both score the same captions, alternating, three times; the best time of each part counts. The last line
compares all of ``capvid score`` with a process of pycocoevalcap, start and reading included.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RUNS = 3


def resample(case: dict[str, Any], videos: int, count: int) -> dict[str, Any]:
    """Resample a case to ``videos`` videos with ``count`` references each, deterministically."""
    draw = random.Random(0)
    ids = list(case["references"])
    chosen = [ids[i % len(ids)] for i in range(videos)]
    return {
        "references": {
            f"v{i}": draw.choices(case["references"][one], k=count) for i, one in enumerate(chosen)
        },
        "predictions": {f"v{i}": case["predictions"][one] for i, one in enumerate(chosen)},
    }


def theirs(case: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Return seconds and corpus score of each part of pycocoevalcap."""
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    start = time.perf_counter()
    tokenizer = PTBTokenizer()
    references = tokenizer.tokenize(
        {video: [{"caption": text} for text in texts] for video, texts in case["references"].items()}
    )
    predictions = tokenizer.tokenize(
        {video: [{"caption": text}] for video, text in case["predictions"].items()}
    )
    parts = {"tokenizer": (time.perf_counter() - start, 0.0)}
    for name, scorer in (("BLEU", Bleu(4)), ("ROUGE_L", Rouge()), ("CIDEr-D", Cider())):
        start = time.perf_counter()
        corpus, _ = scorer.compute_score(references, predictions, *([0] if name == "BLEU" else []))
        parts[name] = (time.perf_counter() - start, corpus[-1] if name == "BLEU" else float(corpus))
    return parts


def ours(case: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Return seconds and corpus score of each part of capvid."""
    from capvid.metrics.bleu import bleu_scores
    from capvid.metrics.cider import CiderD
    from capvid.metrics.rouge import rouge_l
    from capvid.text import tokenization as tokenize

    tokenize._tokens.cache_clear()
    start = time.perf_counter()
    references = {
        video: [" ".join(tokenize.ptb_tokenize(text)) for text in texts]
        for video, texts in case["references"].items()
    }
    predictions = {
        video: " ".join(tokenize.ptb_tokenize(text)) for video, text in case["predictions"].items()
    }
    parts = {"tokenizer": (time.perf_counter() - start, 0.0)}
    start = time.perf_counter()
    bleu = bleu_scores(predictions, references)[0][-1]
    parts["BLEU"] = (time.perf_counter() - start, bleu)
    start = time.perf_counter()
    rouge = rouge_l(predictions, references)[0]
    parts["ROUGE_L"] = (time.perf_counter() - start, rouge)
    start = time.perf_counter()
    cider = CiderD(references, tokenizer="none").score(predictions)[0]
    parts["CIDEr-D"] = (time.perf_counter() - start, cider)
    return parts


def in_process(python: str, path: str, which: str) -> dict[str, tuple[float, float]]:
    done = subprocess.run([python, __file__, f"--{which}", path], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def command(folder: str, case: dict[str, Any]) -> list[str]:
    """Write the case as files and return the command that scores them."""
    for name, captions in case.items():
        Path(folder, f"{name}.json").write_text(json.dumps(captions), encoding="utf-8")
    files = [f"{folder}/predictions.json", f"{folder}/references.json"]
    return [
        sys.executable,
        "-m",
        "capvid",
        "score",
        *files,
        "--metrics",
        "bleu,rouge,cider",
        "--format=json",
    ]


def seconds(arguments: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(arguments, capture_output=True, check=True)
    return time.perf_counter() - start


def main() -> None:
    if sys.argv[1] in ("--ours", "--theirs"):
        case = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
        print(json.dumps((ours if sys.argv[1] == "--ours" else theirs)(case)))
        return
    source, python = sys.argv[1:3]
    videos, count = (int(text) for text in (*sys.argv[3:5], "2990", "20")[:2])
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/case.json"
        case = resample(json.loads(Path(source).read_text(encoding="utf-8")), videos, count)
        Path(path).write_text(json.dumps(case), encoding="utf-8")
        runs = [
            (in_process(python, path, "theirs"), in_process(sys.executable, path, "ours"))
            for _ in range(RUNS)
        ]
        score = command(folder, case)
        processes = [(seconds([python, __file__, "--theirs", path]), seconds(score)) for _ in range(RUNS)]
    best = [{part: min(run[side][part][0] for run in runs) for part in runs[0][side]} for side in (0, 1)]
    print(f"{videos} videos, {count} references each; seconds, best of {RUNS}")
    for part in best[0]:
        agree = "" if part == "tokenizer" else f"  {runs[0][0][part][1]:.9f} and {runs[0][1][part][1]:.9f}"
        print(f"{part:10} {best[0][part]:6.2f} {best[1][part]:6.2f}{agree}")
    totals = [sum(parts.values()) for parts in best]
    print(f"{'total':10} {totals[0]:6.2f} {totals[1]:6.2f}  {totals[0] / totals[1]:.1f} times as fast")
    theirs_best, ours_best = (min(run[side] for run in processes) for side in (0, 1))
    ratio = theirs_best / ours_best
    print(f"{'process':10} {theirs_best:6.2f} {ours_best:6.2f}  {ratio:.1f} times as fast")


if __name__ == "__main__":
    main()
