from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_chat_models import CHAT_MODELS

from capvid.decoding.caption_generator import Clip
from capvid.decoding.decoding_options import ChatOptions, DecodingOptions
from capvid.vlm.chat import ChatModel, load_chat_model

PROMPT = ChatOptions().prompt
OPTIONS = {
    "greedy": DecodingOptions(beam_size=1, max_length=8),
    "beams": DecodingOptions(beam_size=3, num_captions=2, max_length=8),
    "sampling": DecodingOptions(beam_size=1, temperature=0.8, num_captions=2, max_length=8, seed=3),
}


@pytest.fixture(scope="module", params=list(CHAT_MODELS))
def chat_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatModel:
    folder = tmp_path_factory.mktemp(request.param)
    CHAT_MODELS[request.param](folder)
    return load_chat_model(folder, device="cpu")


def clips() -> list[Clip]:
    generator = np.random.default_rng(0)
    return [
        Clip(
            frames=generator.integers(0, 255, (n, 56, 84, 3), dtype=np.uint8),
            times=3 + np.arange(n) * 0.5,
            start=3.0,
            end=3 + n * 0.5,
        )
        for n in (4, 7, 1, 4)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_captions_do_not_depend_on_the_batch(chat_model: ChatModel, options: DecodingOptions) -> None:
    together = chat_model.generate(clips(), [PROMPT] * 4, options)
    for clip, captions in zip(clips(), together, strict=True):
        (alone,) = chat_model.generate([clip], [PROMPT], options)
        assert [caption.text for caption in captions] == [caption.text for caption in alone]
        for one, other in zip(captions, alone, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_logprobs_are_those_of_the_model(chat_model: ChatModel, options: DecodingOptions) -> None:
    """A plain forward pass over prompt and caption gives the same log-probabilities."""
    clip = clips()[0]
    (captions,) = chat_model.generate([clip], [PROMPT], options)
    tokenizer = chat_model.processor.tokenizer
    for caption in captions:
        inputs: dict[str, Any] = dict(chat_model.inputs([clip], [PROMPT]))
        prompt = inputs["input_ids"]
        words = tokenizer(caption.text, add_special_tokens=False, return_tensors="pt")["input_ids"].long()
        ended = len(words[0]) < options.max_length
        end = torch.tensor([[tokenizer.eos_token_id]] if ended else [[]], dtype=torch.long)
        answer = torch.cat([words, end], 1)
        inputs["input_ids"] = torch.cat([prompt, answer], 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in inputs:
                inputs[name] = torch.cat([inputs[name], torch.zeros_like(answer)], 1)
        with torch.no_grad():
            logits = chat_model.model(**inputs).logits[0, prompt.shape[1] - 1 : -1].float()
        logprobs = logits.log_softmax(-1).gather(1, answer[0].unsqueeze(1)).squeeze(1)
        assert caption.logprob == pytest.approx(float(logprobs.sum()), abs=1e-3)
        assert [w.logprob for w in caption.words] == pytest.approx(
            logprobs[: len(words[0])].tolist(), abs=1e-3
        )
