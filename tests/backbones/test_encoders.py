"""Transformers that encode images and clips: equal to the libraries' own, usable from clip to captioner."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import timm
import torch
import transformers
from encoders import ENCODERS, shallow, write_pinned_models
from hub_server import COMMIT, FakeHub, environment
from safetensors.torch import save, save_file
from test_all_backbones import with_random_weights
from torch import Tensor
from toy import write_video

from capvid.backbones import backbone as backbone_module
from capvid.backbones.backbone import load_backbone
from capvid.backbones.catalog import BackboneEntry, Clip, backbone_entry, backbones, build_network
from capvid.backbones.weights import find_weights
from capvid.features.extraction import extract
from capvid.features.feature_file import load_features
from capvid.hub import client

# as capvid's command, but without padding batches to eight frames
COMMAND = """
import sys
from capvid.backbones import backbone
backbone._CPU_BATCH = {4: 1, 2: 1}
from capvid.cli.app import main
sys.exit(main(sys.argv[1:]))
"""


def library_output(
    entry: BackboneEntry, state: dict[str, torch.Tensor], inputs: torch.Tensor
) -> torch.Tensor:
    """Compute the default layer with the network that the library builds, initialised and complete."""
    if entry.kind == "timm":
        network: Any = timm.create_model(entry.architecture, **{"num_classes": 0, **entry.config})
        network.eval().load_state_dict(state)
        return network(inputs)
    if entry.kind == "clip":
        config = transformers.CLIPVisionConfig(**entry.config)
        network = transformers.CLIPVisionModelWithProjection(config).eval()
        network.load_state_dict(state)
        return network(pixel_values=inputs).image_embeds
    config = transformers.VJEPA2Config(**entry.config, pred_num_hidden_layers=1)
    network = transformers.VJEPA2Model(config).eval()
    network.encoder.load_state_dict(state)
    return network.get_vision_features(inputs.transpose(1, 2)).mean(1)


@pytest.mark.parametrize("name", ENCODERS)
def test_one_block_extracts_from_a_video_what_the_library_computes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = shallow(backbones()[name], 1)
    if entry.clip:
        entry = dataclasses.replace(entry, clip=Clip(frames=2, stride=4))
    weights = tmp_path / "weights.safetensors"
    module = with_random_weights(build_network(entry, entry.default_layer))
    save_file(module.state_dict(), weights)
    monkeypatch.setattr(backbone_module, "backbone_entry", lambda name: entry)
    monkeypatch.setattr(backbone_module, "_CPU_BATCH", {4: 1})
    backbone = load_backbone(name, weights=weights, precision="fp32")
    inputs: list[Tensor] = []
    backbone.module.register_forward_pre_hook(lambda _, arguments: inputs.extend(arguments))
    video = write_video(tmp_path / "clip.mp4", seed=0)
    (result,) = extract(video, backbone, "uniform:1", workers=1, dtype="float32")
    assert result.features is not None, result.error
    (features,) = result.features.streams
    assert features.shape == (1, entry.layers[entry.default_layer].width)
    with torch.inference_mode():
        expected = library_output(entry, module.network.state_dict(), inputs[0]).numpy()
    np.testing.assert_allclose(features, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    assert features.std() > 0


@pytest.mark.parametrize("name", ["dinov3-small", "dinov3-base", "videomae-base", "siglip2-base"])
@pytest.mark.parametrize("cached", [False, True])
def test_a_licence_of_its_own_is_stated_before_the_download(
    name: str, cached: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entry = backbone_entry(name)
    stated = []

    def fetch(*_: object, **__: object) -> Path:
        stated.extend(caplog.messages)
        return Path(__file__)

    monkeypatch.setenv("CAPVID_WEIGHTS", "")
    monkeypatch.setattr(client, "cached", lambda *_, **__: Path(__file__) if cached else None)
    monkeypatch.setattr(client, "fetch", fetch)
    find_weights(entry, None, ())
    note = f"note: the weights of {name} have a licence of their own: {entry.licence}; `capvid models {name}`"
    assert [text.removesuffix(" says more") for text in stated] == (
        [] if cached or name == "siglip2-base" else [note]
    )


def test_sizes_are_those_of_the_configurations_of_transformers() -> None:
    """V-JEPA 2's defaults are those of this network; of CLIP's, the number of weights is known."""
    vjepa2 = backbone_entry("vjepa2-large")
    defaults = transformers.VJEPA2Config()
    assert {name: getattr(defaults, name) for name in vjepa2.config} == dict(vjepa2.config)
    clip = build_network(backbone_entry("clip-vit-l14"), "image_embeds")
    assert sum(parameter.numel() for parameter in clip.parameters()) == 303_966_208


def test_preprocessing_is_that_of_transformers() -> None:
    processor = transformers.VJEPA2VideoProcessor()
    preprocess = backbone_entry("vjepa2-large").preprocess
    assert preprocess.resize == processor.size["shortest_edge"]
    assert preprocess.crop == processor.crop_size["height"]
    assert (preprocess.mean, preprocess.std) == (tuple(processor.image_mean), tuple(processor.image_std))
    assert preprocess.interpolation == processor.resample.name.lower() == "bilinear"
    for name in ("clip-vit-b32", "clip-vit-l14"):
        clip, preprocess = transformers.CLIPImageProcessor(), backbone_entry(name).preprocess
        assert (preprocess.resize, preprocess.crop) == (clip.size["shortest_edge"], clip.crop_size["height"])
        assert (preprocess.mean, preprocess.std) == (tuple(clip.image_mean), tuple(clip.image_std))
        assert preprocess.interpolation == clip.resample.name.lower() == "bicubic"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    server = FakeHub()
    yield server
    server.close()


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(None, marks=[pytest.mark.exhaustive, pytest.mark.timeout(900)]),
    ],
)
def test_from_the_hub_to_a_captioner(name: str, blocks: int | None, tmp_path: Path, hub: FakeHub) -> None:
    """With random weights: downloaded at a pinned commit, then used offline."""
    entry = backbone_entry(name) if blocks is None else shallow(backbone_entry(name), blocks)
    module = with_random_weights(build_network(entry, entry.default_layer)).half()
    repository = entry.source.removeprefix("hub:")
    hub.put(save(module.state_dict()), entry.file, repository=repository)
    del module
    models = write_pinned_models(tmp_path / "models.toml", name, COMMIT, blocks)
    rows = [{"id": split, "split": split, "captions": ["a man is running"]} for split in ("train", "val")]
    (tmp_path / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    videos = [write_video(tmp_path / "videos" / f"{row['id']}.mp4", seed=n) for n, row in enumerate(rows)]

    def run(*arguments: object, offline: bool = True) -> str:
        endpoint = "http://127.0.0.1:9" if offline else hub.url
        settings = environment(tmp_path / "hf", endpoint, offline=offline) | {"CAPVID_MODELS": str(models)}
        done = forked.run(COMMAND, arguments, env=settings, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stderr

    extraction = ["--backbone", name, "--frames", 1, "-o", "features"]
    err = run("extract", videos[0], *extraction, offline=False)
    assert ("have a licence of their own" in err) == (not entry.is_free)
    assert f"HEAD /{repository}/resolve/{COMMIT}/{entry.file}" in hub.requests
    asked = len(hub.requests)
    assert "licence" not in run("extract", videos[1], *extraction)
    assert len(hub.requests) == asked
    features = load_features(tmp_path / "features" / "train.safetensors").streams[0]
    assert features.shape == (1, entry.layers[entry.default_layer].width)
    settings = ["--set", "training.epochs=1"]
    run("train", "m3-tiny", "--data", "captions.jsonl", "--features", "features", "-o", "run", *settings)
    run("caption", videos[0], "--model", "run", "--min-length", 1, "-o", "caption.txt")
    assert (tmp_path / "caption.txt").read_text().strip()
