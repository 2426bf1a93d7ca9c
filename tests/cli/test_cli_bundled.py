"""The models that come with capvid."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from toy import Run

import capvid
from capvid.backbones.backbone import load_backbone
from capvid.backbones.catalog import BUNDLED as BUNDLED
from capvid.backbones.catalog import backbones, captioners, default_captioners, model_card
from capvid.checkpoints.lookup import load_captioner, model_folder
from capvid.errors import CheckpointError
from capvid.utils.files import sha256_file

CLIP = Path(__file__).parents[2] / "examples" / "car.mp4"
TRAINED = [name for name, entry in captioners().items() if entry.bundled]
OFFLINE = [name for name in TRAINED if not name.endswith("-motion")]  # all they need is in the package
BACKBONES = [entry for entry in backbones().values() if entry.source.startswith("bundled:")]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "socket", deny)
    monkeypatch.setattr(socket, "create_connection", deny)
    monkeypatch.setattr(socket, "getaddrinfo", deny)


def test_captions_a_clip_without_model_option_or_network(
    capvid: Run,
    no_network: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("CAPVID_WEIGHTS", raising=False)
    monkeypatch.setenv("CAPVID_CACHE", str(tmp_path))
    code, out, err = capvid("caption", str(CLIP))
    assert (code, err) == (0, "")
    (note,) = caplog.messages
    assert note.startswith(
        "note: captioning with kv-memory instead of m3-motion: the weights of x3d-xs are not"
    )
    assert out.endswith("\n")
    assert len(out.split()) >= 3
    assert "<" not in out


@pytest.mark.parametrize("name", TRAINED)
def test_bundled_captioners_match_the_registry(name: str) -> None:
    entry, folder = captioners()[name], model_folder(name)
    weights = folder / "captioner.safetensors"
    assert (weights.stat().st_size, sha256_file(weights)) == (entry.bytes, entry.sha256)
    assert model_card(name) is not None
    label = load_captioner(folder, None, weights=None, device=torch.device("cpu"))[2]
    assert label.startswith(f"{name}@")
    header = json.loads((folder / "captioner.json").read_text(encoding="utf-8"))["features"]
    motion = [] if name in OFFLINE else ["x3d-xs"]
    assert [stream["backbone"] for stream in header["streams"]] == ["capvid-small", *motion]
    if name in OFFLINE:
        assert capvid.load(name).model.startswith(f"{name}@")


def test_default_captioner_is_bundled() -> None:
    assert set(default_captioners()) <= set(TRAINED)
    assert model_folder(None) == model_folder(default_captioners()[-1])  # nothing is downloaded in tests


def test_every_family_is_bundled_with_one_vocabulary() -> None:
    assert set(TRAINED) >= {"m3", "kv-memory", "ham", "dense-lstm", "mart"}
    configs = (
        json.loads((model_folder(name) / "captioner.json").read_text(encoding="utf-8")) for name in TRAINED
    )
    assert len({tuple(config["vocabulary"]) for config in configs}) == 1


def test_bundled_files_stay_below_48_mb() -> None:
    assert sum(path.stat().st_size for path in BUNDLED.rglob("*") if path.is_file()) <= 48_000_000


@pytest.mark.parametrize("name", OFFLINE)
def test_bundled_captioners_caption_a_clip(name: str, no_network: None) -> None:
    text = capvid.load(name)(CLIP)
    assert len(text.split()) >= 3
    assert "<" not in text


@pytest.mark.shared
@pytest.mark.parametrize("name", sorted(set(TRAINED) - set(OFFLINE)))
def test_captioners_with_motion_caption_a_clip(
    name: str, no_network: None, monkeypatch: pytest.MonkeyPatch, shared_data: Path
) -> None:
    monkeypatch.setenv("CAPVID_WEIGHTS", str(shared_data / "data" / "weights"))
    text = capvid.load(name)(CLIP)
    assert "car" in text.split()


@pytest.mark.slow
@pytest.mark.parametrize("name", OFFLINE)
def test_unreadable_batch_does_not_stop_the_stream(name: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"not a video at all" * 50)
    results = list(capvid.load(name, device="cpu", batch_size=1).stream([broken, CLIP, broken]))
    assert [result.status for result in results] == ["error", "ok", "error"]


@pytest.mark.parametrize("entry", BACKBONES, ids=lambda entry: entry.name)
def test_bundled_backbones_match_the_registry(entry: Any) -> None:
    path = BUNDLED / entry.file
    assert (path.stat().st_size, sha256_file(path)) == (entry.bytes, entry.sha256)
    assert all(tensor.dtype in (torch.float16, torch.int64) for tensor in load_file(path).values())
    assert model_card(entry.name) is not None
    frames = np.random.default_rng(0).integers(0, 256, (2, 90, 120, 3), np.uint8)
    features = load_backbone(entry.name)(frames)
    assert features.shape == (2, entry.layers[entry.default_layer].width)
    assert np.isfinite(features).all()
    assert not np.allclose(features[0], features[1])


@pytest.mark.slow
def test_batch_size_does_not_change_captions() -> None:
    clips = [CLIP, CLIP, CLIP]
    expected = capvid.load(batch_size=1)(CLIP)
    texts = [result.captions[0].text for result in capvid.load(batch_size=8).stream(clips)]
    assert texts == [expected] * 3


def test_damaged_bundled_model_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = default_captioners()[-1]
    folder = tmp_path / str(captioners()[name].source).partition(":")[2]
    folder.mkdir()
    (folder / "captioner.safetensors").write_bytes(b"other bytes")
    monkeypatch.setattr("capvid.checkpoints.lookup.BUNDLED", tmp_path)
    with pytest.raises(CheckpointError, match="damaged"):
        model_folder(name)
    with pytest.raises(CheckpointError, match="nor a captioner that comes trained"):
        model_folder("nothing-of-that-name")


def test_model_card_is_printed(capvid: Run) -> None:
    code, out, _ = capvid("models", default_captioners()[0])
    assert code == 0
    card = model_card(default_captioners()[0])
    assert card is not None
    assert card.splitlines()[0] in out
    for heading in ("Training data", "Figures", "What it gets wrong", "People"):
        assert heading in card
