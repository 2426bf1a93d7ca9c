"""Captions per second of every captioner, greedy and with five beams, and the gain from MART's cache.

Batches of 64 videos (paragraphs: three segments each), sentences of nine words, random weights at the sizes
of the small recipes; medians of interleaved runs. The matrix products of the five beams are also timed
alone, as a lower bound of the search. ``python benchmarks/decoding.py --help`` for options.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from made import SEGMENTS, features_for, make
from products import products_of
from torch import Tensor

from capvid.captioners.base import CAPTIONERS, Captioner, ParagraphCaptioner
from capvid.decoding.beam_search import decode, decode_paragraphs
from capvid.decoding.decoding_options import DecodingOptions
from capvid.text.vocabulary import BOS, SPECIAL
from capvid.training.recipe import load_recipe
from capvid.utils.device import keep_freed_memory

VIDEOS, WORDS = 64, 9


def medians(runs: Mapping[str, Callable[[], object]], device: torch.device, repeats: int) -> dict[str, float]:
    """Return the median seconds of every run; the runs are interleaved."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}


def options_for(beams: int) -> DecodingOptions:
    """Return search options with ``beams`` beams for sentences of nine words."""
    return DecodingOptions(beam_size=beams, min_length=WORDS, max_length=WORDS)


def decoding(captioner: Captioner, device: torch.device, beams: int) -> Callable[[], object]:
    """Return a function that generates captions for all videos."""
    options = options_for(beams)
    if isinstance(captioner, ParagraphCaptioner):
        features, mask = features_for(captioner, VIDEOS, SEGMENTS)
        segments = torch.full((VIDEOS,), SEGMENTS, device=device)
        paragraphs, inputs = captioner, (features.to(device), mask.to(device), segments)
        return lambda: decode_paragraphs(paragraphs, *inputs, options)
    features, mask = features_for(captioner, VIDEOS)
    arguments = features.to(device), mask.to(device)
    return lambda: decode(captioner, *arguments, options)


@torch.inference_mode()
def uncached(captioner: ParagraphCaptioner, features: Tensor, mask: Tensor) -> Tensor:
    """Return greedy paragraphs (B, S, words), running the full stack over video and text for every word."""
    carried, sentences = None, []
    for segment in range(SEGMENTS):
        tokens = torch.full((VIDEOS, 1), BOS, device=features.device)
        for _ in range(WORDS):
            state = captioner.encode(features[:, segment], mask[:, segment], carried)
            hidden, _ = captioner.read(state, tokens)
            word = captioner.logits(hidden[:, -1])[:, len(SPECIAL) :].argmax(-1) + len(SPECIAL)
            tokens = torch.cat([tokens, word.unsqueeze(1)], 1)
        state = captioner.encode(features[:, segment], mask[:, segment], carried)
        carried = captioner.remember(state, tokens)
        sentences.append(tokens[:, 1:])
    return torch.stack(sentences, 1)


def cached_words(device: torch.device, frames: int, repeats: int) -> dict[str, float]:
    """Return the seconds of MART's greedy paragraphs for all videos, cached and uncached."""
    captioner = make(load_recipe("mart-small")).to(device).eval()
    if not isinstance(captioner, ParagraphCaptioner):
        raise TypeError("mart writes paragraphs")
    paragraphs = captioner
    features, mask = (t.to(device) for t in features_for(captioner, VIDEOS, SEGMENTS, frames=frames))
    segments = torch.full((VIDEOS,), SEGMENTS, device=device)
    runs = {
        "cached": lambda: decode_paragraphs(paragraphs, features, mask, segments, options_for(1)),
        "uncached": lambda: uncached(paragraphs, features, mask),
    }
    hypotheses = decode_paragraphs(paragraphs, features, mask, segments, options_for(1))
    same = [[sentence[0].tokens for sentence in video] for video in hypotheses]
    if same != uncached(paragraphs, features, mask).tolist():
        raise RuntimeError("cached and uncached decoding differ")
    return medians(runs, device, repeats)


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--captioner", action="append", choices=sorted(CAPTIONERS), help="default: all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    device = torch.device(options.device)
    keep_freed_memory()  # as the command does
    print(f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}; captions per second")
    heads = ("beam 5 / greedy time", "products / greedy time")
    print(f"{'captioner':20} {'greedy':>8} {'beam 5':>8} {heads[0]:>22} {heads[1]:>22}")
    for name in options.captioner or CAPTIONERS:
        torch.manual_seed(1)
        captioner = make(load_recipe(f"{name}-small")).to(device).eval()
        runs = {str(beams): decoding(captioner, device, beams) for beams in (1, 5)}
        seconds = medians({**runs, "products": products_of(runs["5"])}, device, options.repeats)
        count = VIDEOS * (SEGMENTS if captioner.paragraphs else 1)
        speeds = " ".join(f"{count / seconds[beams]:8.0f}" for beams in ("1", "5"))
        ratios = " ".join(f"{seconds[key] / seconds['1']:22.1f}" for key in ("5", "products"))
        print(f"{name:20} {speeds} {ratios}", flush=True)
    for frames in (8, 100):
        seconds = cached_words(device, frames, options.repeats)
        ratio = seconds["uncached"] / seconds["cached"]
        print(
            f"mart, {frames} frames per segment, {VIDEOS} paragraphs, greedy: {seconds['cached']:.2f} s; "
            f"full stack for every word {seconds['uncached']:.2f} s, {ratio:.1f} times as long"
        )


if __name__ == "__main__":
    main()
