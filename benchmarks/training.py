"""Training samples per second of every captioner, at the sizes of its small recipe.

A sample is a caption (of a paragraph: a sentence) with its video's frames; a step is forward pass, backward
pass, clipping and optimizer on random batches. ``python benchmarks/training.py --help`` for options.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from made import SEGMENTS, VOCABULARY, features_for, make

from capvid.captioners.base import CAPTIONERS, Captioner
from capvid.datasets.batches import Batch
from capvid.text.vocabulary import BOS, EOS, PAD
from capvid.training.objectives import TeacherForcedLoss
from capvid.training.optimization import OPTIMIZERS, bf16_in_hardware, clip_gradients
from capvid.training.recipe import load_recipe
from capvid.utils.device import keep_freed_memory

WORDS = 9


def random_batch(captioner: Captioner, size: int) -> Batch:
    """Return a batch of ``size`` captions, or paragraphs."""
    outer = (size, SEGMENTS) if captioner.paragraphs else (size,)
    features, mask = features_for(captioner, *outer)
    tokens = torch.randint(EOS + 2, VOCABULARY, (*outer, WORDS))
    inputs = torch.cat([torch.full((*outer, 1), BOS), tokens], -1)
    targets = torch.cat([tokens, torch.full((*outer, 1), EOS)], -1)
    return Batch(features, mask, inputs, targets)


def samples_per_second(name: str, device: torch.device, *, bf16: bool, steps: int) -> tuple[float, int]:
    """Return the median speed of ``steps`` steps and the number of parameters."""
    torch.manual_seed(1)
    recipe = load_recipe(f"{name}-small")
    captioner = make(recipe).to(device).train()
    optimizer = OPTIMIZERS[recipe.training.optimizer](captioner, recipe.training)
    batch = random_batch(captioner, recipe.training.batch_size).to(device)
    objective = TeacherForcedLoss(captioner, recipe.training.label_smoothing)
    words = int((batch.targets != PAD).sum())
    seconds = []
    for _ in range(steps + 2):  # two warm-up steps
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = objective(batch) / words
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        clip_gradients(captioner, recipe.training)
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    sentences = batch.inputs[..., 0].numel()
    parameters = sum(parameter.numel() for parameter in captioner.parameters())
    return sentences / statistics.median(seconds[2:]), parameters


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--captioner", action="append", choices=sorted(CAPTIONERS), help="default: all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=7)
    options = parser.parse_args()
    device = torch.device(options.device)
    keep_freed_memory()  # as the command does
    precisions = [False, True] if bf16_in_hardware(device) else [False]
    print(f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'captioner':20} {'weights':>9} " + " ".join(f"{'bf16' if b else 'fp32':>8}" for b in precisions))
    for name in options.captioner or CAPTIONERS:
        results = [samples_per_second(name, device, bf16=b, steps=options.steps) for b in precisions]
        weights = f"{results[0][1] / 1e6:.2f} M"
        print(f"{name:20} {weights:>9} " + " ".join(f"{speed:8.0f}" for speed, _ in results), flush=True)


if __name__ == "__main__":
    main()
