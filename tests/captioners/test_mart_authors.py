"""The authors' layout of the MART paper's transformers against the authors' own code.

Skipped unless CAPVID_MART_AUTHORS names a checkout of github.com/jayleicn/recurrent-transformer.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from capvid.captioners.authors_weights import (
    CLS,
    PAD,
    SEP,
    SPECIAL_ROWS,
    VID,
    from_authors,
    read_authors_checkpoint,
)
from capvid.captioners.base import Captioner, ParagraphCaptioner, build
from capvid.datasets.batches import Batch
from capvid.decoding.beam_search import decode_paragraphs
from capvid.decoding.decoding_options import DecodingOptions
from capvid.training.objectives import TeacherForcedLoss
from capvid.training.optimization import OPTIMIZERS, learning_rate_factor
from capvid.training.recipe import TrainingOptions

CHECKOUT = os.environ.get("CAPVID_MART_AUTHORS", "")
pytestmark = pytest.mark.skipif(not CHECKOUT, reason="CAPVID_MART_AUTHORS names no checkout")

WORDS, FRAMES, LENGTH, WIDTH, SEGMENTS = 40, 9, 8, 11, 3
SIZES: dict[str, Any] = {"hidden": 24, "heads": 4, "layers": 2, "feed_forward": 24, "word_width": 10}
# The marks are no words here; to have the same softmax, words stand for them.
ROWS = [*SPECIAL_ROWS, *range(7, WORDS), CLS, SEP, VID]


class Config(dict):
    """What the authors take from ``easydict``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@pytest.fixture(scope="module")
def authors() -> Any:
    """The authors' modules."""
    sys.path.insert(0, str(Path(CHECKOUT)))
    easydict = types.ModuleType("easydict")
    easydict.EasyDict = lambda **values: Config(values)  # type: ignore[attr-defined]
    sys.modules.setdefault("easydict", easydict)
    from src.rtransformer import masked_transformer, model, optimization  # type: ignore[import-not-found]
    from src.translator import Translator  # type: ignore[import-not-found]

    yield types.SimpleNamespace(
        model=model, masked=masked_transformer, optimization=optimization, translator=Translator
    )
    sys.path.remove(str(Path(CHECKOUT)))


def config(**changes: Any) -> Config:
    options = {
        "xl_grad": False,
        "hidden_size": SIZES["hidden"],
        "intermediate_size": SIZES["feed_forward"],
        "vocab_size": WORDS,
        "word_vec_size": SIZES["word_width"],
        "video_feature_size": WIDTH,
        "max_position_embeddings": FRAMES + 2 + LENGTH,
        "max_v_len": FRAMES + 2,
        "max_t_len": LENGTH,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "memory_dropout_prob": 0.0,
        "num_hidden_layers": SIZES["layers"],
        "num_attention_heads": SIZES["heads"],
        "n_memory_cells": 2,
        "initializer_range": 0.02,
        "label_smoothing": 0.1,
        "share_wd_cls_weight": False,
    }
    return Config(options | changes)


def spread(module: torch.nn.Module) -> torch.nn.Module:
    """Give all weights values that saturate nonlinearities."""
    torch.manual_seed(4)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(1.0 if "orm.weight" in name else 0.0, 0.4)
    return module.eval()


def ours(theirs: torch.nn.Module) -> ParagraphCaptioner:
    """Return our captioner with the weights of ``theirs``."""
    sizes = {"vocabulary_size": WORDS, "feature_width": WIDTH, "dropout": 0.0}
    places = {"text_start": FRAMES + 2, "text_length": LENGTH}
    if type(theirs).__name__ == "TransformerXL":
        own, name = {"recurrent_gradient": theirs.config.xl_grad}, "transformer-xl-authors"
    elif type(theirs).__name__ == "MTransformer":
        own, name = {}, "vanilla-transformer-authors"
    else:
        own, name = {"memory_length": 2}, "mart-authors"
    captioner = build(name, {**sizes, **places, **SIZES, **own})
    captioner.load_state_dict(from_authors(theirs.state_dict(), ROWS))
    assert isinstance(captioner, ParagraphCaptioner)
    return captioner.eval()


def paragraphs(seed: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Return features (B, S, T, D), mask (B, S, T), and sentences (B, S, L) in our tokens with their ends."""
    torch.manual_seed(seed)
    features = torch.randn(4, SEGMENTS, FRAMES, WIDTH)
    frames, lengths = torch.randint(1, FRAMES + 1, (4, SEGMENTS)), torch.randint(1, LENGTH - 1, (4, SEGMENTS))
    frames[0], lengths[0] = FRAMES, LENGTH - 2
    mask = torch.arange(FRAMES) < frames.unsqueeze(-1)
    words = torch.randint(4, WORDS - 3, (4, SEGMENTS, LENGTH))
    words[..., 0] = 1
    position = torch.arange(LENGTH)
    words = words.masked_fill(position == lengths.unsqueeze(-1) + 1, 2)
    return features * mask.unsqueeze(-1), mask, words.masked_fill(position > lengths.unsqueeze(-1) + 1, 0)


def their_inputs(features: Tensor, mask: Tensor, words: Tensor) -> list[list[Tensor]]:
    """Return, by segment, the authors' tokens, features, masks, types and labels."""
    ids = torch.tensor(ROWS)[words]  # (B, S, L) in their numbers
    result: list[list[Tensor]] = [[] for _ in range(5)]
    for segment in range(SEGMENTS):
        real, count = mask[:, segment], mask[:, segment].sum(1, keepdim=True)
        position = torch.arange(FRAMES + 2).expand(len(real), -1)
        video = torch.where(position <= count, VID, PAD).masked_fill(position == 0, CLS)
        video = video.masked_fill(position == count + 1, SEP)
        text = ids[:, segment]
        labels = torch.nn.functional.pad(text[:, 1:], (0, 1)).masked_fill(
            torch.nn.functional.pad(words[:, segment, 1:], (0, 1)) == 0, -1
        )
        frames = torch.nn.functional.pad(features[:, segment], (0, 0, 1, 1 + LENGTH))
        kinds = torch.cat([torch.zeros_like(video), torch.ones_like(text)], 1)
        ignored = torch.full_like(video, -1)
        valid = torch.cat([position <= count + 1, words[:, segment] != 0], 1).float()
        for part, tensor in zip(
            result,
            (torch.cat([video, text], 1), frames, valid, kinds, torch.cat([ignored, labels], 1)),
            strict=True,
        ):
            part.append(tensor)
    return result


def our_batch(features: Tensor, mask: Tensor, words: Tensor) -> Batch:
    inputs = words.masked_fill(words == 2, 0)[..., :-1]
    return Batch(features, mask, inputs, words[..., 1:])


def loss_of(captioner: Captioner, batch: Batch, smoothing: float = 0.1) -> Tensor:
    """Return our loss with the authors' label smoothing, less the entropy of its targets."""
    loss = TeacherForcedLoss(captioner, smoothing * WORDS / (WORDS - 1))(batch)
    share = torch.tensor(smoothing / (WORDS - 1), dtype=torch.float64)
    entropy = -(WORDS - 1) * share * share.log() - (1 - smoothing) * torch.tensor(1 - smoothing).log()
    return loss - (batch.targets != 0).sum() * entropy.float()


@pytest.fixture(scope="module")
def mart(authors: Any) -> Any:
    return spread(authors.model.RecursiveTransformer(config()))


@pytest.fixture(scope="module", params=["mart", "transformer-xl", "transformer-xl-gradient"])
def theirs(authors: Any, request: pytest.FixtureRequest, mart: Any) -> Any:
    """One of their recurrent models."""
    if request.param == "mart":
        return mart

    class TransformerXL(authors.model.TransformerXL):
        def make_mask(self, *arguments: Any) -> Tensor:
            """Return their mask of bytes as PyTorch wants it now."""
            return super().make_mask(*arguments).bool()

    return spread(TransformerXL(config(xl_grad=request.param.endswith("gradient"))))


def compare_gradients(captioner: Captioner, their_model: torch.nn.Module, *, marks: int = 0) -> None:
    """Compare all gradients but those of the ``marks`` in the last rows of the embedding."""
    gradients = {name: p.grad for name, p in their_model.named_parameters() if p.grad is not None}
    expected = from_authors(gradients, ROWS)
    for name, parameter in captioner.named_parameters():
        assert parameter.grad is not None, name
        rows = len(parameter) - marks if name == "embedding.weight" else len(parameter)
        torch.testing.assert_close(
            parameter.grad[:rows],
            expected[name][:rows],
            atol=2e-4,
            rtol=1e-4,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def test_logits_of_three_segments(theirs: Any) -> None:
    features, mask, words = paragraphs()
    _, expected = theirs(*their_inputs(features, mask, words))
    captioner, batch = ours(theirs), our_batch(features, mask, words)
    logits = captioner(batch.features, batch.mask, batch.inputs)  # (B, S, L, V)
    for segment, their_logits in enumerate(expected):
        real = batch.inputs[:, segment] != 0
        aligned = their_logits[:, FRAMES + 2 : -1][..., ROWS]
        torch.testing.assert_close(logits[:, segment][real], aligned[real], atol=1e-5, rtol=0)


def test_loss_and_its_gradient(theirs: Any) -> None:
    features, mask, words = paragraphs()
    captioner, their_model = ours(theirs), copy.deepcopy(theirs)
    expected, _ = their_model(*their_inputs(features, mask, words))
    loss = loss_of(captioner, our_batch(features, mask, words))
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-6)
    loss.backward()
    expected.backward()
    compare_gradients(captioner, their_model, marks=3)  # ours are a parameter of their own


@pytest.mark.parametrize("end_bias", [-9.0, 3.0])
def test_greedy_captions(authors: Any, theirs: Any, end_bias: float) -> None:
    features, mask, words = paragraphs()
    their_model = copy.deepcopy(theirs)
    with torch.no_grad():  # tokens that capvid never generates
        their_model.decoder.bias[[PAD, CLS, SEP, VID, 4]] = -1e4
        their_model.decoder.bias[5] += end_bias
    opt = types.SimpleNamespace(cuda=False, recurrent=True)
    translator = authors.translator(opt, {"model_cfg": their_model.config}, model=their_model)
    translate = translator.translate_batch_greedy
    if type(theirs).__name__ == "TransformerXL":
        translate = translator.translate_batch_greedy_xl
    expected = translate(*their_inputs(features, mask, words)[:4], their_model)
    options = DecodingOptions(beam_size=1, max_length=LENGTH - 1)
    decoded = decode_paragraphs(ours(their_model), features, mask, torch.full((4,), SEGMENTS), options)
    ends = 0
    for video in range(4):
        for segment in range(SEGMENTS):
            ids = [i for i in expected[segment][video].tolist() if i][1:]
            caption = [ROWS.index(i) for i in ids if i != 5]
            ends += 5 in ids
            assert decoded[video][segment][0].tokens == caption
    assert 0 < ends < 4 * SEGMENTS if end_bias > 0 else not ends


@pytest.fixture(scope="module")
def masked(authors: Any) -> Any:
    """Their masked transformer, with other norms and no embeddings."""
    module = spread(authors.masked.MTransformer(config()))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "gamma" in name:
                parameter += 1
    return module


def single_inputs(features: Tensor, mask: Tensor, words: Tensor) -> list[Tensor]:
    """Return their features, mask, words, mask and labels of one segment, without marks."""
    text = torch.tensor(ROWS)[words]
    labels = torch.nn.functional.pad(text[:, 1:], (0, 1)).masked_fill(
        torch.nn.functional.pad(words[:, 1:], (0, 1)) == 0, -1
    )
    frames = torch.nn.functional.pad(features, (0, 0, 0, 2))
    valid = torch.nn.functional.pad(mask.float(), (0, 2))
    return [frames, valid, text, (words != 0).float(), labels]


def test_masked_transformer(masked: Any) -> None:
    """Logits, loss and gradients of three segments."""
    features, mask, words = paragraphs()
    captioner, batch = ours(masked), our_batch(features, mask, words)
    their_model = copy.deepcopy(masked)
    losses = []
    logits = captioner(batch.features, batch.mask, batch.inputs)
    for segment in range(SEGMENTS):
        inputs = single_inputs(features[:, segment], mask[:, segment], words[:, segment])
        loss, expected = their_model(*inputs)
        losses.append(loss)
        real = batch.inputs[:, segment] != 0
        torch.testing.assert_close(
            logits[:, segment][real], expected[:, :-1][..., ROWS][real], atol=1e-5, rtol=0
        )
    loss = loss_of(captioner, batch)
    torch.testing.assert_close(loss, torch.stack(losses).sum(), atol=1e-5, rtol=1e-6)
    loss.backward()
    torch.stack(losses).sum().backward()
    compare_gradients(captioner, their_model)


@pytest.mark.parametrize("end_bias", [-9.0, 9.0])
def test_greedy_captions_of_the_masked_transformer(authors: Any, masked: Any, end_bias: float) -> None:
    features, mask, words = paragraphs()
    their_model = copy.deepcopy(masked)
    with torch.no_grad():
        their_model.decoder.out.bias[[PAD, CLS, SEP, VID, 4]] = -1e4
        their_model.decoder.out.bias[5] += end_bias
    options = DecodingOptions(beam_size=1, max_length=LENGTH - 1)
    decoded = decode_paragraphs(ours(their_model), features, mask, torch.full((4,), SEGMENTS), options)
    ends = 0
    for segment in range(SEGMENTS):
        inputs = single_inputs(features[:, segment], mask[:, segment], words[:, segment])
        translate = authors.translator.translate_batch_single_sentence_untied_greedy
        for video, row in enumerate(translate(*inputs, their_model).tolist()):
            ended = 5 in row
            caption = row[1 : row.index(5)] if ended else row[1:]
            ends += ended
            assert decoded[video][segment][0].tokens == [ROWS.index(i) for i in caption]
    assert 0 < ends < 4 * SEGMENTS if end_bias > 0 else not ends


def test_converted_checkpoint(theirs: Any, tmp_path: Path) -> None:
    """A checkpoint as their train.py saves it gives the same logits after conversion."""
    convert_and_compare(theirs, tmp_path)


def test_converted_checkpoint_of_the_masked_transformer(masked: Any, tmp_path: Path) -> None:
    convert_and_compare(masked, tmp_path)


def convert_and_compare(theirs: Any, tmp_path: Path) -> None:
    names = ("[PAD]", "[CLS]", "[SEP]", "[VID]", "[BOS]", "[EOS]", "[UNK]")
    words = {word: number for number, word in enumerate([*names, *(f"word{n}" for n in range(7, WORDS))])}
    (tmp_path / "word2idx.json").write_text(json.dumps(words))
    opt = types.SimpleNamespace(lr=1e-4)
    content = {"model": theirs.state_dict(), "model_cfg": dict(theirs.config), "opt": vars(opt), "epoch": 0}
    torch.save(content, tmp_path / "model.chkpt")
    checkpoint = read_authors_checkpoint(tmp_path / "model.chkpt", tmp_path / "word2idx.json")
    features, mask, sentences = paragraphs()
    batch = our_batch(features, mask, sentences)
    expected = ours(theirs)(batch.features, batch.mask, batch.inputs)[..., :-3]
    actual = checkpoint.captioner(batch.features, batch.mask, batch.inputs)
    torch.testing.assert_close(actual, expected)


def test_bert_adam_and_its_schedule(authors: Any, mart: Any) -> None:
    """Five steps of their training and of ours end at the same weights."""
    theirs, captioner = copy.deepcopy(mart), ours(mart)
    features, mask, words = paragraphs()
    spared = ["bias", "LayerNorm.bias", "LayerNorm.weight"]
    named = list(theirs.named_parameters())
    groups = [
        {
            "params": [p for name, p in named if any(part in name for part in spared) != decays],
            "weight_decay": 0.01 * decays,
        }
        for decays in (True, False)
    ]
    their_optimizer = authors.optimization.BertAdam(groups, lr=1e-3, warmup=0.4, t_total=5)
    options = TrainingOptions(
        optimizer="bert-adam", schedule="bert", warmup=0.4, learning_rate=1e-3, weight_decay=0.01
    )
    optimizer = OPTIMIZERS["bert-adam"](captioner, options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor(options, 5))
    for _ in range(5):
        their_optimizer.zero_grad()
        optimizer.zero_grad()
        theirs(*their_inputs(features, mask, words))[0].backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1)
        their_optimizer.step()
        loss_of(captioner, our_batch(features, mask, words)).backward()
        torch.nn.utils.clip_grad_norm_(captioner.parameters(), 1)
        optimizer.step()
        schedule.step()
    expected = from_authors(theirs.state_dict(), ROWS)
    for name, weight in captioner.state_dict().items():
        if name != "embedding.weight" and "key.bias" not in name:  # no output depends on the latter
            torch.testing.assert_close(
                weight, expected[name], atol=1e-4, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
            )
