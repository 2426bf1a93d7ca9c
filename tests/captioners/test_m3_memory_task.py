"""M3's memory on a synthetic task: a word depends on one twenty words before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from variants import all_real

from capvid.captioners.base import build

SYMBOLS, FIRST, LAG = 8, 4, 20
FILLER, QUESTION = FIRST + SYMBOLS, FIRST + SYMBOLS + 1


def sentences(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return tokens (N, 23) of a symbol, twenty fillers and a question, and the symbols (N,) as answers."""
    symbols = torch.randint(SYMBOLS, (count, 1), generator=generator)
    start = torch.ones(count, 1, dtype=torch.long)
    fillers = torch.full((count, LAG), FILLER)
    question = torch.full((count, 1), QUESTION)
    return torch.cat([start, FIRST + symbols, fillers, question], 1), symbols.squeeze(1)


def accuracy_after_training(name: str, seed: int, **options: int) -> float:
    """Return the accuracy on 500 new questions after at most 160 batches of 32."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    sizes = {"embedding": 16, "hidden": 16, "attention": 4, "output": 16, "dropout": 0.0}
    captioner = build(name, {"vocabulary_size": QUESTION + 1, "feature_width": 2, **sizes, **options})
    optimizer = torch.optim.Adam(captioner.parameters(), lr=0.01)

    def answers(words: Tensor) -> Tensor:
        count = len(words)
        last = captioner.teacher_forced(torch.ones(count, 1, 2), all_real(count, 1), words)[:, -1]
        return captioner.logits(last)[:, FIRST : FIRST + SYMBOLS]

    mastered = 0  # consecutive batches with a low loss
    for _ in range(160):
        words, symbols = sentences(32, generator)
        loss = F.cross_entropy(answers(words), symbols)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(captioner.parameters(), 1.0)
        optimizer.step()
        mastered = mastered + 1 if loss < 0.1 else 0
        if mastered == 5:
            break
    words, symbols = sentences(500, generator)
    with torch.no_grad():
        return (answers(words).argmax(-1) == symbols).float().mean().item()


@pytest.mark.slow
def test_memory_recalls_a_word_after_twenty_others() -> None:
    """The LSTM alone forgets the symbol; memory rows persist until they are erased.

    In so few batches, M3 learns it from about every second initialisation.
    """
    assert any(accuracy_after_training("m3", seed, memory_rows=32, memory_width=16) > 0.95 for seed in (4, 5))
    assert accuracy_after_training("soft-attention", 4) < 0.5
