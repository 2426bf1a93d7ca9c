"""Folders of chat models with wrong files: one line that names the file, in bounded time and memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_chat_models import CHAT_MODELS

from capvid.decoding.caption_generator import Clip
from capvid.decoding.decoding_options import DecodingOptions
from capvid.errors import CapvidError, CheckpointError
from capvid.vlm import prompt_rendering
from capvid.vlm.chat import load_chat_model

Changes = dict[str, Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("models")
    for name, make in CHAT_MODELS.items():
        make(home / name)
    return {name: home / name for name in CHAT_MODELS}


def changed(folder: Path, target: Path, file: str, change: str | Changes) -> Path:
    """Copy a model, and replace a file's text, or values of a JSON file by dotted names."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    path = target / file
    if isinstance(change, str):
        path.write_text(change)
        return target
    document = json.loads(path.read_text())
    for name, value in change.items():
        *outer, last = name.split(".")
        table = document
        for key in outer:
            table = table[key]
        table[last] = value
    path.write_text(json.dumps(document))
    return target


def clip() -> Clip:
    frames = np.random.default_rng(0).integers(0, 255, (4, 56, 84, 3), dtype=np.uint8)
    return Clip(frames=frames, times=np.arange(4) * 0.5, start=0.0, end=2.0)


def caption(folder: Path) -> str:
    model = load_chat_model(folder, device="cpu", precision="fp32")
    options = DecodingOptions(beam_size=1, max_length=4)
    (answer,) = model.generate([clip()], ["describe this"], options)
    assert not isinstance(answer, Exception)
    return answer[0].text


JINJA = "chat_template.jinja"
TEMPLATES = {
    "syntax": ("{% for x in %}", "TemplateSyntaxError: Expected an expression"),
    "undefined": ("{{ nothing.at_all }}", "UndefinedError: 'nothing' is undefined"),
    "raise": ("{{ raise_exception('no\nvideos') }}", "TemplateError: no videos"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "nesting": ("{% if 1 %}" * 5000 + "{% endif %}" * 5000, "RecursionError"),
    "loop": ("{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3, "it does not end within 2 seconds"),
    "memory": ("{{ 'x' * 10**10 }}", "it needs too much memory"),
    "text": ("{{ 'x' * 10**7 }}", "it needs too much memory"),
    "length": ("x" * 2_000_000, "it is longer than a template can be"),
}


def slow_unless(default: Iterable[str], names: Iterable[str]) -> list[Any]:
    """Return parameters of which only those in ``default`` belong to the default tier."""
    return [name if name in default else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("kind", slow_unless(TEMPLATES.keys() - {"text", "nesting"}, TEMPLATES))
def test_templates_that_fail(
    kind: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, reason = TEMPLATES[kind]
    folder = changed(folders["gemma3"], tmp_path / "model", JINJA, template)
    with monkeypatch.context() as patch, pytest.raises(CheckpointError) as raised:
        if kind == "loop":
            caption(folders["gemma3"])  # starts the process, which takes a while
            patch.setattr(prompt_rendering, "_TIMEOUT", 2)
            patch.setattr(prompt_rendering._pool(os.getpid()), "timeout", 2)
        caption(folder)
    assert str(raised.value).startswith(f"{folder / JINJA}: the chat template fails ({reason}")
    caption(folders["gemma3"])  # with a new process


G, C, P = "generation_config.json", "config.json", "processor_config.json"
IMAGE, VIDEO = "image_processor", "video_processor"
FIT, DAMAGED = "do not fit together", "damaged or incomplete"
VALUES: list[tuple[str, str, str, Any, str]] = [  # model, file, name, value and reason
    ("gemma3", G, "repetition_penalty", "high", "repetition_penalty must be from 0.01 to 100"),
    ("gemma3", G, "top_p", 7, "top_p must be from 0 to 1.0, got 7"),
    ("gemma3", G, "max_length", "long", "max_length must be from 1"),
    ("gemma3", G, "eos_token_id", 10**9, "eos_token_id must be from 0 to 26, got 1000000000"),
    ("gemma3", G, "eos_token_id", [1, "x"], "eos_token_id must be from 0"),
    ("gemma3", G, "pad_token_id", -7, "pad_token_id must be from 0"),
    ("gemma3", G, "suppress_tokens", [5, 999], "suppress_tokens must be from 0"),
    ("gemma3", G, "bad_words_ids", [[3], [-1]], "bad_words_ids must be from 0"),
    ("gemma3", C, "num_labels", 10**9, "num_labels must be an integer between 1 and 100000"),
    ("gemma3", C, "text_config.num_labels", 10**9, "text_config.num_labels must be an integer"),
    ("gemma3", C, "text_config.pad_token_id", 10**9, DAMAGED),
    ("gemma3", C, "id2label", {"a": "b"}, DAMAGED),
    ("gemma3", C, "image_token_index", 9, FIT),
    ("gemma3", C, "image_token_index", "x", DAMAGED),
    ("qwen2_5_vl", C, "video_token_id", 9, FIT),
    ("gemma3", "tokenizer.json", "model.vocab.describe", 3000, "has token 3000, and config.json has 27"),
    ("gemma3", "tokenizer.json", "model", {"type": "none"}, DAMAGED),
    ("gemma3", P, "image_seq_length", 10**9, "image_seq_length must be an integer between 1"),
    ("gemma3", P, "image_seq_length", 5, FIT),
    ("smolvlm", P, "image_seq_len", -1, "image_seq_len must be an integer between 1"),
    ("smolvlm", P, "image_seq_len", 9, FIT),
    ("gemma3", P, f"{IMAGE}.size.height", 10**6, "image_processor.size.height must be an integer"),
    ("gemma3", P, f"{IMAGE}.size.width", "x", "image_processor.size.width must be an integer"),
    ("gemma3", P, f"{IMAGE}.size", {}, DAMAGED),
    ("gemma3", P, f"{IMAGE}.size", {"height": 28, "width": 28}, FIT),
    ("gemma3", P, f"{IMAGE}.size", {"height": 4096, "width": 4096}, "it makes 201326592 bytes of a frame"),
    ("smolvlm", P, f"{VIDEO}.size.longest_edge", 30000, "longest_edge must be at most 4096, got 30000"),
    ("smolvlm", P, f"{VIDEO}.max_image_size.longest_edge", 30000, "longest_edge must be an integer"),
    ("qwen2_5_vl", P, f"{VIDEO}.size.shortest_edge", 1 << 24, "shortest_edge must be an integer"),
    ("qwen2_5_vl", P, f"{VIDEO}.patch_size", 0, "patch_size must be an integer"),
    ("qwen2_5_vl", P, f"{VIDEO}.merge_size", 3, FIT),
    ("gemma3", P, f"{IMAGE}.image_mean", [0.5, 1], DAMAGED),
    ("gemma3", P, f"{IMAGE}.image_std", "x", DAMAGED),
    ("gemma3", P, "processor_class", "NoSuchProcessor", "there is no processor of images"),
]


@pytest.mark.parametrize(("model", "file", "name", "value", "reason"), VALUES)
def test_values_that_are_wrong(
    model: str, file: str, name: str, value: Any, reason: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = changed(folders[model], tmp_path / "model", file, {name: value})
    with pytest.raises(CapvidError) as raised:
        caption(folder)
    message = str(raised.value)
    assert file in message and str(folder) in message and reason in message and len(message) < 500


BEGIN = "<bos>"


def with_bos(folder: Path, target: Path, *, added: bool, printed: bool) -> Path:
    """Copy a model whose tokenizer adds a begin token, or whose template prints it, or both."""
    changed(folder, target, "tokenizer_config.json", {"bos_token": BEGIN})
    path = target / "tokenizer.json"
    document = json.loads(path.read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary[BEGIN] = vocabulary.pop("system")
    token = {"content": BEGIN, "id": vocabulary[BEGIN], "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    document["added_tokens"].append({**flags, **token})
    if added:
        single = [{"SpecialToken": {"id": BEGIN, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        special = {BEGIN: {"id": BEGIN, "ids": [token["id"]], "tokens": [BEGIN]}}
        document["post_processor"] = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": pair,
            "special_tokens": special,
        }
    path.write_text(json.dumps(document))
    if printed:
        template = target / JINJA
        template.write_text("{{ bos_token }} " + template.read_text())
    return target


@pytest.mark.parametrize("printed", [False, True], ids=["", "printed"])
@pytest.mark.parametrize("added", [False, True], ids=["", "added"])
@pytest.mark.parametrize("name", slow_unless(["gemma3", "qwen2_5_vl"], CHAT_MODELS))
def test_tokens_are_those_of_the_library(
    name: str, added: bool, printed: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Also where the tokenizer adds a begin token, the template prints it, or both."""
    from transformers import AutoProcessor

    folder = with_bos(folders[name], tmp_path / "model", added=added, printed=printed)
    model = load_chat_model(folder, device="cpu", precision="fp32")
    ids = model.inputs([clip()], ["describe this video"])["input_ids"]
    processor = AutoProcessor.from_pretrained(folder)
    frames = list(torch.from_numpy(clip().frames).permute(0, 3, 1, 2))
    text = {"type": "text", "text": "describe this video"}
    media: list[dict[str, Any]] = [{"type": "image", "image": frame} for frame in frames]
    options: dict[str, Any] = {}
    if model.takes_videos:
        from capvid.vlm.chat import _metadata

        media = [{"type": "video", "video": torch.stack(frames)}]
        options = {"video_metadata": [_metadata(clip())], "do_sample_frames": False}
    expected = processor.apply_chat_template(
        [{"role": "user", "content": [*media, text]}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs=options,
    )["input_ids"]
    assert ids.tolist() == expected.tolist()
    assert ids[0].tolist().count(processor.tokenizer.bos_token_id) == (
        added or (printed and name != "smolvlm")
    )
