"""MART against its authors' code at the sizes of the paper: greedy decoding and a training step.

Both have the same weights, and frames of 3072 values. Videos are as long as those of ActivityNet Captions
(segments, two frames per second, words; the first of the checkout's train.json), or, with ``--full``, all of
three segments with 98 frames and 20 words. When decoding, no sentence ends early. The layout of the paper has
weights of its own. Runs alternate in one process; medians of wall and processor time. A training step is
forward pass, backward pass, clipping and optimizer; the authors' loop also has torch detect anomalies, which
is left out here, as is their average of the weights.

``python benchmarks/mart_authors.py CHECKOUT`` with a checkout of github.com/jayleicn/recurrent-transformer.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from capvid.captioners.authors_weights import CLS, PAD, SEP, SPECIAL_ROWS, VID, from_authors
from capvid.captioners.base import ParagraphCaptioner, build
from capvid.datasets.batches import Batch
from capvid.decoding.beam_search import decode_paragraphs
from capvid.decoding.decoding_options import DecodingOptions
from capvid.training.objectives import TeacherForcedLoss
from capvid.training.optimization import OPTIMIZERS, bf16_in_hardware, clip_gradients
from capvid.training.recipe import load_recipe
from capvid.utils.device import keep_freed_memory

WORDS, FRAMES, LENGTH, WIDTH = 3500, 98, 22, 3072
ROWS = [*SPECIAL_ROWS, *range(7, WORDS), CLS, SEP, VID]
SIZES = {"hidden": 768, "heads": 12, "layers": 2, "feed_forward": 768, "word_width": 300}
Run = Callable[[], object]


class Config(dict[str, Any]):
    """What the authors take from ``easydict``."""

    __getattr__ = dict.__getitem__


def their_model(checkout: Path) -> tuple[nn.Module, Any, Any]:
    """Return the authors' MART, their optimizer class and their translator of that model."""
    sys.path.insert(0, str(checkout))
    easydict: Any = types.ModuleType("easydict")
    easydict.EasyDict = lambda **values: Config(values)
    sys.modules.setdefault("easydict", easydict)
    from src.rtransformer import model, optimization  # type: ignore[import-not-found]
    from src.translator import Translator  # type: ignore[import-not-found]

    sizes = {"vocab_size": WORDS, "word_vec_size": 300, "video_feature_size": WIDTH, "hidden_size": 768}
    sizes |= {
        "intermediate_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "type_vocab_size": 2,
    }
    sizes |= {"max_v_len": FRAMES + 2, "max_t_len": LENGTH, "max_position_embeddings": FRAMES + 2 + LENGTH}
    rates = ("hidden_dropout_prob", "attention_probs_dropout_prob", "memory_dropout_prob", "label_smoothing")
    other = {"layer_norm_eps": 1e-12, "initializer_range": 0.02, "share_wd_cls_weight": False}
    config = Config(**sizes, n_memory_cells=1, **dict.fromkeys(rates, 0.1), **other)
    module = model.RecursiveTransformer(config)
    with torch.no_grad():
        module.decoder.bias[:6] = -1e4  # no sentence ends early
    translator = Translator(types.SimpleNamespace(cuda=False), {"model_cfg": config}, model=module)
    return module, optimization.BertAdam, translator


def videos(checkout: Path | None, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return frames (B, S, 98, 3072), mask, and sentences (B, S, 22) with ends; full without ``checkout``."""
    lengths = [[(FRAMES, LENGTH - 2)] * 3] * count
    if checkout:
        content = json.loads((checkout / "densevid_eval/anet_data/train.json").read_text())
        lengths = [
            [
                (min(FRAMES, int(2 * (end - start)) + 1), min(LENGTH - 2, len(sentence.split())))
                for (start, end), sentence in zip(
                    video["timestamps"][:6], video["sentences"][:6], strict=True
                )
            ]
            for video in list(content.values())[:count]
        ]
    shape = count, max(map(len, lengths))
    mask, sentences = (
        torch.zeros(*shape, FRAMES, dtype=torch.bool),
        torch.zeros(*shape, LENGTH, dtype=torch.long),
    )
    for video, segments in enumerate(lengths):
        for segment, (frames, words) in enumerate(segments):
            mask[video, segment, :frames] = True
            sentences[video, segment, 0], sentences[video, segment, words + 1] = 1, 2
            sentences[video, segment, 1 : words + 1] = torch.randint(4, WORDS - 3, (words,))
    return torch.randn(*mask.shape, WIDTH) * mask.unsqueeze(-1), mask, sentences


def their_inputs(features: Tensor, mask: Tensor, sentences: Tensor) -> list[list[Tensor]]:
    """Return the authors' tokens, features, masks, types and labels of each segment."""
    result: list[list[Tensor]] = [[] for _ in range(5)]
    position = torch.arange(FRAMES + 2)
    for segment in range(mask.shape[1]):
        last = mask[:, segment].sum(1, keepdim=True) + 1
        video = torch.where(position < last, VID, PAD).masked_fill(position == 0, CLS)
        video = video.masked_fill(position == last, SEP)
        text = torch.tensor(ROWS)[sentences[:, segment]]
        labels = nn.functional.pad(text[:, 1:], (0, 1)).masked_fill(
            nn.functional.pad(sentences[:, segment, 1:], (0, 1)) == 0, -1
        )
        frames = nn.functional.pad(features[:, segment], (0, 0, 1, 1 + LENGTH))
        parts = (
            torch.cat([video, text], 1),
            frames,
            torch.cat([position <= last, sentences[:, segment] != 0], 1).float(),
            torch.cat([torch.zeros_like(video), torch.ones_like(text)], 1),
            torch.cat([torch.full_like(video, -1), labels], 1),
        )
        for part, tensor in zip(result, parts, strict=True):
            part.append(tensor)
    return result


def their_step(module: Any, optimizer_class: Any, inputs: list[list[Tensor]]) -> Run:
    """Return a function that makes a training step as the authors' loop does."""
    named = [(name, p, "bias" in name or "LayerNorm.weight" in name) for name, p in module.named_parameters()]
    groups = [
        {"params": [p for _, p, plain in named if plain != decays], "weight_decay": 0.01 * decays}
        for decays in (True, False)
    ]
    optimizer = optimizer_class(groups, lr=1e-4, warmup=0.1, t_total=10_000)

    def step() -> None:
        module.train()
        optimizer.zero_grad()
        module(*inputs)[0].backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()

    return step


def our_step(captioner: nn.Module, recipe: str, batch: Batch, *, bf16: bool = False) -> Run:
    """Return a function that makes a training step of ``recipe``."""
    options = load_recipe(recipe).training
    optimizer, objective = (
        OPTIMIZERS[options.optimizer](captioner, options),
        TeacherForcedLoss(captioner, 0.1),
    )

    def step() -> None:
        captioner.train()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = objective(batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        clip_gradients(captioner, options)
        optimizer.step()

    return step


def measure(runs: dict[str, Run], repeats: dict[str, int]) -> dict[str, tuple[float, float]]:
    """Return median wall and processor seconds of the alternated runs, the first of each left out."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for number in range(max(repeats.values()) + 1):
        for name, run in runs.items():
            if number <= repeats[name]:
                wall, processor = time.perf_counter(), time.process_time()
                run()
                seconds[name].append((time.perf_counter() - wall, time.process_time() - processor))
    return {
        name: (statistics.median(w for w, _ in rows[1:]), statistics.median(p for _, p in rows[1:]))
        for name, rows in seconds.items()
    }


def report(title: str, runs: dict[str, Run], repeats: dict[str, int]) -> None:
    """Measure and print a table, with ratios to the first run."""
    results = measure(runs, repeats)
    base = results[next(iter(results))]
    print(f"{title:24} {'wall':>8} {'ratio':>6} {'processor':>10} {'ratio':>6}")
    for name, (wall, processor) in results.items():
        ratios = base[0] / wall, base[1] / processor
        print(f"{name:24} {wall:7.2f}s {ratios[0]:6.2f} {processor:9.2f}s {ratios[1]:6.2f}", flush=True)


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--full", action="store_true", help="all videos as long as the paper allows")
    parser.add_argument("--videos", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--decodings", type=int, default=3, help="of ours; the authors' runs twice")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of their use of torch
    keep_freed_memory()  # as the command does
    torch.manual_seed(1)
    module, optimizer_class, translator = their_model(options.checkout.resolve())
    sizes = {"vocabulary_size": WORDS, "feature_width": WIDTH, **SIZES}
    authors, paper = build("mart-authors", sizes), build("mart", sizes)
    authors.load_state_dict(from_authors(module.state_dict(), ROWS))
    with torch.no_grad():
        paper.vocabulary.bias[:4] = -1e4  # type: ignore[index]
    features, mask, sentences = videos(None if options.full else options.checkout, options.videos)
    inputs = their_inputs(features, mask, sentences)
    greedy = DecodingOptions(beam_size=1, max_length=LENGTH - 1)
    segments = mask.any(-1).sum(1)

    def decode(captioner: Any) -> list[list[list[int]]]:
        assert isinstance(captioner, ParagraphCaptioner)
        paragraphs = decode_paragraphs(captioner, features, mask, segments, greedy)
        return [[sentence[0].tokens for sentence in video] for video in paragraphs]

    def translate() -> list[list[list[int]]]:
        module.eval()
        decoded = translator.translate_batch_greedy(*copy.deepcopy(inputs[:4]), module)
        words = torch.stack(decoded, 1)[..., 1:].tolist()  # without the start token
        return [
            [[ROWS.index(word) for word in sentence] for sentence in video[:count]]
            for video, count in zip(words, segments, strict=True)
        ]

    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {options.videos} videos")
    decodings = {"authors' code": translate, "capvid, authors' layout": lambda: decode(authors)}
    runs: dict[str, Run] = {**decodings, "capvid": lambda: decode(paper)}
    print(f"greedy captions of both are the same: {translate() == decode(authors)}")
    report("greedy decoding", runs, {**dict.fromkeys(runs, options.decodings), "authors' code": 1})
    batch = Batch(features, mask, sentences.masked_fill(sentences == 2, 0)[..., :-1], sentences[..., 1:])
    runs = {
        "authors' code": their_step(module, optimizer_class, inputs),
        "capvid, authors' layout": our_step(authors, "mart-activitynet-authors", batch),
        "capvid": our_step(paper, "mart-activitynet", batch),
    }
    if bf16_in_hardware(torch.device("cpu")):
        runs["capvid, bfloat16"] = our_step(paper, "mart-activitynet", batch, bf16=True)
    report("training step", runs, dict.fromkeys(runs, options.steps))


if __name__ == "__main__":
    main()
