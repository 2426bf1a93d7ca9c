"""Rescoring of finished captions, by every captioner in every variant."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from variants import VARIANTS, all_real, clip, make

from capvid.captioners.base import CAPTIONERS, Captioner, Carried, ParagraphCaptioner, State, Trace
from capvid.decoding.decoding_options import Hypothesis
from capvid.decoding.rescoring import in_double, rescore
from capvid.text.vocabulary import BOS, EOS

SENTENCES = [
    Hypothesis([5, 7, 5, 9], [0.0] * 5, 0.5),
    Hypothesis([4], [0.0, 0.0], 0.25),
    Hypothesis([], [0.0], 0),
]
PARAGRAPHS = [variant for variant, (name, _) in VARIANTS.items() if CAPTIONERS[name].paragraphs]


def word_by_word(
    captioner: Captioner, features: Tensor, tokens: list[int], carried: Carried | None = None
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Return the log-probabilities of the tokens and EOS, and the trace of each step."""
    mask = all_real(1, features.shape[1])
    paragraphs = isinstance(captioner, ParagraphCaptioner)
    state = captioner.encode(features, mask, carried) if paragraphs else captioner.encode(features, mask)
    logprobs, traces = [], []
    for word, following in zip([BOS, *tokens], [*tokens, EOS], strict=True):
        logits, state, trace = captioner.step(torch.tensor([word]), state)
        total = sum(torch.exp(logit).item() for logit in logits[0])
        logprobs.append(logits[0, following].item() - torch.tensor(total, dtype=torch.float64).log().item())
        traces.append(trace)
    return logprobs, traces


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_rescoring_equals_stepping(variant: str) -> None:
    captioner = make(variant)
    features = clip(captioner, 1, 4)
    (rescored,) = rescore(captioner, features, all_real(1, 4), [SENTENCES], trace=True)
    for sentence, original in zip(rescored, SENTENCES, strict=True):
        assert (sentence.tokens, sentence.score) == (original.tokens, original.score)
        logprobs, traces = word_by_word(captioner, features, original.tokens)
        assert sentence.logprobs == pytest.approx(logprobs, abs=1e-9)
        assert sentence.trace is not None and set(sentence.trace) == set(traces[0])
        if variant != "ham-no-attention":
            assert sentence.trace["attention"].shape == (len(logprobs), 4)
        for name, table in sentence.trace.items():
            for row, step in zip(table, traces, strict=True):
                expected = step[name][0]
                assert torch.allclose(
                    row[..., : expected.shape[-1]] if expected.dim() else row, expected, atol=1e-9
                )
                assert not row[expected.shape[-1] :].any() if expected.dim() else True


def test_growing_traces_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    captioner = make("soft-attention")
    step = captioner.step

    def growing_step(tokens: Tensor, state: State) -> tuple[Tensor, State, Trace]:
        logits, after, _ = step(tokens, state)
        return logits, after, {"grown": torch.full((len(tokens), after.words), float(after.words))}

    monkeypatch.setattr(captioner, "step", growing_step)
    (rescored,) = rescore(captioner, clip(captioner, 1, 4), all_real(1, 4), [SENTENCES], trace=True)
    for sentence in rescored:
        assert sentence.trace is not None
        steps = range(1, len(sentence.tokens) + 2)
        expected = [[float(n)] * n + [0.0] * (steps[-1] - n) for n in steps]
        assert sentence.trace["grown"].tolist() == expected


@pytest.mark.parametrize("variant", PARAGRAPHS)
@torch.no_grad()
def test_rescoring_uses_the_carried_memory(variant: str) -> None:
    captioner = make(variant)
    assert isinstance(captioner, ParagraphCaptioner)
    features, mask = clip(captioner, 1, 4), all_real(1, 4)
    carried = None
    if captioner.recurrent:
        first = captioner.encode(clip(captioner, 1, 3), all_real(1, 3))
        carried = captioner.remember(first, torch.tensor([[BOS, 6, 8]]))
    (rescored,) = rescore(captioner, features, mask, [SENTENCES], carried=carried)
    for sentence in rescored:
        assert sentence.trace is None
        expected, _ = word_by_word(captioner, features, sentence.tokens, carried)
        assert sentence.logprobs == pytest.approx(expected, abs=1e-9)
    if captioner.recurrent:
        (without_memory,) = rescore(captioner, features, mask, [SENTENCES])
        assert without_memory[0].logprobs != pytest.approx(rescored[0].logprobs, abs=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_rescoring_does_not_depend_on_the_batch(variant: str) -> None:
    """Computed in float64 and rounded to float32, log-probabilities and traces are bit-identical."""
    captioner = make(variant).float()
    precise = in_double(captioner, torch.device("cpu"))
    assert precise is not None and next(captioner.parameters()).dtype == torch.float32
    generator = torch.Generator().manual_seed(4)
    lengths = torch.arange(7) % 4 + 1
    features = clip(captioner, 7, 4).float()
    mask = torch.arange(4) < lengths.unsqueeze(1)
    sentences = [
        [
            Hypothesis(torch.randint(4, 11, (int(n),), generator=generator).tolist(), [], 0.0)
            for n in torch.randint(0, 6, (1 + video % 3,), generator=generator)
        ]
        for video in range(7)
    ]
    batched = rescore(precise, features, mask, sentences, trace=True)
    order = torch.tensor([6, 2, 0])
    subset = rescore(precise, features[order], mask[order], [sentences[video] for video in order], trace=True)
    for video in range(7):
        frames = features[video : video + 1, : lengths[video]]
        (single,) = rescore(precise, frames, all_real(1, int(lengths[video])), [sentences[video]], trace=True)
        results = [
            batched[video],
            *(
                hypotheses
                for video_index, hypotheses in zip(order, subset, strict=True)
                if video_index == video
            ),
        ]
        for hypotheses in results:
            assert [h.tokens for h in hypotheses] == [h.tokens for h in sentences[video]]
            for sentence, expected in zip(hypotheses, single, strict=True):
                assert torch.equal(torch.tensor(sentence.logprobs), torch.tensor(expected.logprobs))
                for name, tensor in expected.trace.items():
                    assert torch.equal(sentence.trace[name].float(), tensor.float()), name


def test_no_float64_copy_of_large_captioners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large captioners, and devices without float64, get no float64 copy."""
    captioner = make("m3")
    assert in_double(captioner, torch.device("mps")) is None
    monkeypatch.setattr("capvid.decoding.rescoring.MOST_WEIGHTS", 10)
    assert in_double(captioner, torch.device("cpu")) is None
