"""Own memory: captioners of paragraphs learn to go on from the sentences that they write themselves.

The references' sentences tell what is in a video. A captioner whose memory holds them in training comes to
read there what it should see in the frames, and when it captions, the memory holds no more than its own
sentences. So these are put into the memory in training as well, as scheduled sampling does with words
(Bengio et al., arXiv:1506.03099). They say nothing that the frames do not; what is left to learn from them is
what has been said already. For that, each segment is taught the sentence, among those that the video's
paragraphs have for it, that repeats the least of what the captioner said before.

Notation for tensor shapes: B videos, S segments, L words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from capvid.captioners.base import Captioner, ParagraphCaptioner
from capvid.data.batches import Batch, in_segments
from capvid.decoding import DecodingOptions, decode_paragraphs
from capvid.decoding.paragraphs import as_tokens
from capvid.text.vocabulary import PAD

REPEATED = 3  # words in a row that are said again


def with_own_memory(captioner: Captioner, batch: Batch, *, max_length: int) -> Batch:
    """The batch with the sentences that ``captioner`` writes, greedily, to be remembered.

    The targets are those that repeat the least of them. Nothing changes for captioners that remember nothing.
    """
    if not isinstance(captioner, ParagraphCaptioner) or not captioner.recurrent:
        return batch
    followed = (batch.inputs != PAD).any(-1).sum(1) - 1  # (B,) segments that another one follows
    if not (followed > 0).any() or not (batch.targets != PAD).any():
        return batch
    greedy = DecodingOptions(max_length=max_length)
    found = decode_paragraphs(captioner, batch.features[:, :-1], batch.mask[:, :-1], followed, greedy)
    captioner.train()
    said = [[hypotheses[0].tokens for hypotheses in video] for video in found]
    segments, device = batch.inputs.shape[1], batch.inputs.device
    taught = [fresh(paragraphs, own) for paragraphs, own in zip(batch.paragraphs, said, strict=True)]
    inputs, targets = in_segments(taught, segments)
    padded = [own[k] if k < len(own) else [] for own in said for k in range(segments - 1)]
    remembered = as_tokens(padded, device).unflatten(0, (len(said), segments - 1))
    return replace(batch, inputs=inputs.to(device), targets=targets.to(device), remembered=remembered)


def fresh(paragraphs: Sequence[Sequence[list[int]]], said: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each segment the sentence, of all ``paragraphs``, that repeats least of what was ``said`` before.

    Where several do, the first.
    """
    chosen: list[list[int]] = []
    before: set[tuple[int, ...]] = set()
    for segment, sentences in enumerate(zip(*paragraphs, strict=True)):
        chosen.append(min(sentences, key=lambda sentence: len(before & _grams(sentence))))
        before |= _grams(said[segment]) if segment < len(said) else set()
    return chosen


def _grams(sentence: Sequence[int]) -> set[tuple[int, ...]]:
    return set(zip(*(sentence[first:] for first in range(REPEATED)), strict=False))
