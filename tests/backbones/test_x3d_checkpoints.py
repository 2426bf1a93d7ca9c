"""X3D-XS in PyTorchVideo's layouts: conversion, fingerprint, and download from a server of our own."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from weights_server import WeightsServer
from x3d_checkpoint import Tensors, make_fingerprint, models_file, plain_network, random_checkpoint

from capvid.backbones import catalog
from capvid.backbones import weights as module
from capvid.backbones.backbone import load_backbone
from capvid.backbones.catalog import BUNDLED, backbone_entry
from capvid.backbones.clip_networks import X3DXS
from capvid.backbones.conversion import convert
from capvid.backbones.weights import fetch_web
from capvid.backbones.x3d_checkpoints import differing_tensors, fold_batch_norms
from capvid.errors import WeightsError
from capvid.utils.files import sha256_file

FIRST, SECOND = backbone_entry("x3d-xs").urls


@pytest.fixture(scope="module")
def checkpoint() -> Tensors:
    return random_checkpoint(efficient=True)


@pytest.mark.parametrize("efficient", [False, True])
@torch.inference_mode()
def test_folded_weights_compute_what_the_network_with_normalisation_does(
    tmp_path: Path, efficient: bool
) -> None:
    tensors = random_checkpoint(efficient=efficient)
    renamed = {f"module.{name}": tensor for name, tensor in tensors.items()}
    path = tmp_path / "x3d.pyth"
    torch.save(tensors if efficient else {"model_state": renamed, "epoch": 300}, path)
    conversion = convert(path, backbone="x3d-xs")
    assert (conversion.left_out, len(conversion.tensors)) == ((), 234)
    network = X3DXS().eval()
    network.load_state_dict(dict(conversion.tensors))
    clips = torch.randn(2, 3, 4, 96, 64)
    expected = plain_network(tensors, clips)
    found = network(clips, ("fc",))["fc"]
    assert expected.std(0).mean() > 1e-3  # the clips decide
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "lost", ["s3.pathway0_res1.layers.conv_1.kernel.bn.running_var", "head.lin_5.kernel.conv.weight"]
)
def test_incomplete_checkpoints_are_refused(tmp_path: Path, checkpoint: Tensors, lost: str) -> None:
    torch.save({name: tensor for name, tensor in checkpoint.items() if name != lost}, tmp_path / "x3d.pyth")
    with pytest.raises(WeightsError, match="of 234 tensors are missing"):
        convert(tmp_path / "x3d.pyth", backbone="x3d-xs")


def test_normalisation_of_another_width_is_refused(tmp_path: Path, checkpoint: Tensors) -> None:
    name = "s3.pathway0_res1.layers.conv_1.kernel.bn.running_var"
    torch.save(checkpoint | {name: torch.ones(7)}, tmp_path / "x3d.pyth")
    with pytest.raises(WeightsError, match=r"1 of 234|2 of 234 tensors are missing: blocks\.4\.b"):
        convert(tmp_path / "x3d.pyth", backbone="x3d-xs")


@pytest.mark.shared
def test_the_fingerprint_is_that_of_the_weights_the_captioners_were_trained_with(shared_data: Path) -> None:
    entry = backbone_entry("x3d-xs")
    tensors = load_file(shared_data / "data" / "weights" / entry.file)
    shipped, made = load_file(BUNDLED / str(entry.fingerprint)), make_fingerprint(tensors)
    assert shipped.keys() == made.keys() and all(torch.equal(shipped[name], made[name]) for name in made)
    assert (BUNDLED / str(entry.fingerprint)).stat().st_size < 20_000
    torch.manual_seed(0)
    original = {}  # as the weights may have been before they were rounded
    for name, tensor in tensors.items():
        axes = [axis for axis in range(tensor.ndim) if axis != 2]
        step = tensor.float().abs().amax(axes, keepdim=True) / 127 if name.endswith("weight") else 0
        original[name] = tensor.float() + step * (torch.rand(tensor.shape) - 0.5)
    assert differing_tensors(entry, original) == []
    other = original["fc.weight"][torch.randperm(400)]
    assert differing_tensors(entry, original | {"fc.weight": other}) == ["fc.weight"]
    assert "conv5.weight" in differing_tensors(entry, {})


def test_random_weights_are_recognised_as_others(checkpoint: Tensors) -> None:
    entry = backbone_entry("x3d-xs")
    assert len(differing_tensors(entry, fold_batch_norms(checkpoint))) > 200


def test_other_weights_are_converted_but_not_loaded(tmp_path: Path, checkpoint: Tensors) -> None:
    torch.save(checkpoint, tmp_path / "x3d.pyth")
    path = tmp_path / "x3d.safetensors"
    convert(tmp_path / "x3d.pyth", backbone="x3d-xs").save(path)
    for file in (path, tmp_path / "x3d.pyth"):
        with pytest.raises(WeightsError, match="not the weights of x3d-xs that captioners are trained with"):
            load_backbone("x3d-xs", weights=file)


# Downloads


@pytest.fixture
def server() -> Iterator[WeightsServer]:
    started = WeightsServer()
    yield started
    started.close()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, checkpoint: Tensors) -> tuple[Path, bytes]:
    """The folder of the reference, and the file that the server has."""
    folder = tmp_path_factory.mktemp("published")
    torch.save(checkpoint, folder / "file")
    return folder, (folder / "file").read_bytes()


@pytest.fixture
def cache(
    tmp_path: Path,
    server: WeightsServer,
    published: tuple[Path, bytes],
    checkpoint: Tensors,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Register the server in this process, and return the folder of the cache that weights go to."""
    models = models_file(published[0], server.url, checkpoint)
    monkeypatch.setenv("CAPVID_MODELS", str(models))
    monkeypatch.setenv("CAPVID_CACHE", str(tmp_path))
    monkeypatch.delenv("CAPVID_WEIGHTS", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    catalog._read_models.cache_clear()
    return tmp_path / "weights"


def test_the_first_use_downloads_and_pins(
    cache: Path,
    server: WeightsServer,
    published: tuple[Path, bytes],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.files[FIRST] = published[1]
    backbone = load_backbone("x3d-xs", precision="fp32")
    reference = load_backbone("x3d-xs", weights=published[0], precision="fp32")
    assert server.requests == [FIRST]
    assert caplog.messages == [
        f"note: downloaded the weights of x3d-xs (15 MB) from {server.url}/{FIRST}, once"
    ]
    assert backbone.header == reference.header  # features of both may be mixed
    clips = np.random.default_rng(0).integers(0, 256, (2, 4, 60, 80, 3), dtype=np.uint8)
    moving, rounded = backbone(clips), reference(clips)
    assert 0 < np.abs(moving - rounded).max() < 0.2 * np.abs(rounded).max()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert np.array_equal(load_backbone("x3d-xs", precision="fp32")(clips), moving)
    assert server.requests == [FIRST]
    record = json.loads((cache.parent / "hf" / "capvid-digests.json").read_text())
    assert record == {f"{server.url}/{FIRST}": sha256_file(cache / FIRST)}
    with (cache / FIRST).open("ab") as file:
        file.write(b" ")
    with pytest.raises(WeightsError, match="has changed since its download"):
        load_backbone("x3d-xs")


def test_the_second_address_is_tried_where_the_first_has_other_weights(
    cache: Path, server: WeightsServer, published: tuple[Path, bytes], tmp_path: Path
) -> None:
    torch.save(random_checkpoint(efficient=True, seed=1), tmp_path / "other")
    server.files |= {FIRST: (tmp_path / "other").read_bytes(), SECOND: published[1]}
    assert fetch_web(backbone_entry("x3d-xs")) == cache / SECOND
    assert server.requests == [FIRST, SECOND]
    assert sorted(path.name for path in cache.iterdir() if path.suffix == ".pyth") == [SECOND]


def test_weights_that_changed_on_the_server(
    cache: Path, server: WeightsServer, published: tuple[Path, bytes], checkpoint: Tensors, tmp_path: Path
) -> None:
    server.files[FIRST] = published[1]
    fetch_web(backbone_entry("x3d-xs")).unlink()
    torch.save(checkpoint | {"more": torch.zeros(1)}, tmp_path / "changed")
    server.files[FIRST] = (tmp_path / "changed").read_bytes()
    with pytest.raises(WeightsError, match=f"{FIRST} has changed since its first download"):
        fetch_web(backbone_entry("x3d-xs"))
    assert not list(cache.glob("*.pyth"))


def test_what_is_no_checkpoint_is_not_unpickled(cache: Path, server: WeightsServer) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (cache / "touched",)

    server.files |= {FIRST: pickle.dumps(Evil()), SECOND: b"<html>not found</html>"}
    with pytest.raises(WeightsError, match=r"not a readable checkpoint|more than tensors"):
        fetch_web(backbone_entry("x3d-xs"))
    assert not (cache / "touched").exists() and not list(cache.glob("*.pyth"))


@pytest.mark.parametrize("fault", ["hang", "drip", "cut", "endless", "none"])
def test_failures_leave_nothing_and_are_not_repeated_at_once(
    cache: Path,
    server: WeightsServer,
    published: tuple[Path, bytes],
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = backbone_entry("x3d-xs")
    monkeypatch.setattr(module, "WEB_SECONDS", 0.5)
    server.files, server.fault = ({FIRST: published[1]}, fault) if fault != "none" else ({}, "")
    with pytest.raises(WeightsError, match=f"cannot be downloaded.*download {server.url}/{FIRST} elsewhere"):
        fetch_web(entry, insist=False)
    assert not list(cache.glob("*.pyth"))
    asked = len(server.requests)
    server.fault, server.files = "", {FIRST: published[1]}
    with pytest.raises(WeightsError, match="could not be downloaded lately"):
        fetch_web(entry, insist=False)
    assert len(server.requests) == asked
    record = json.loads((cache / "x3d-xs.failed.json").read_text())
    (cache / "x3d-xs.failed.json").write_text(json.dumps(record | {"until": time.time() - 1}))
    monkeypatch.setattr(module, "WEB_SECONDS", 30.0)
    assert fetch_web(entry, insist=False) == cache / FIRST
    assert not (cache / "x3d-xs.failed.json").exists()


def test_what_was_asked_for_by_name_is_tried_again(
    cache: Path, server: WeightsServer, published: tuple[Path, bytes]
) -> None:
    cache.mkdir()
    for text in ('{"until": 1e12, "reason": "x"}', "[]", "{", '{"until": "nan"}'):
        (cache / "x3d-xs.failed.json").write_text(text)
        with pytest.raises(WeightsError, match="HTTP Error 404"):
            fetch_web(backbone_entry("x3d-xs"))


def test_offline_asks_nobody(cache: Path, server: WeightsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(WeightsError, match="HF_HUB_OFFLINE forbids downloads; download http"):
        load_backbone("x3d-xs")
    assert server.requests == []


def test_the_published_file_can_be_given(
    cache: Path, published: tuple[Path, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / FIRST).write_bytes(published[1])
    by_option = load_backbone("x3d-xs", weights=folder / FIRST)
    monkeypatch.setenv("CAPVID_WEIGHTS", str(folder))
    assert load_backbone("x3d-xs").header == by_option.header
    torch.save(random_checkpoint(efficient=False), folder / FIRST)
    with pytest.raises(WeightsError, match="not the weights of x3d-xs that captioners are trained with"):
        load_backbone("x3d-xs")


def test_a_cache_that_cannot_be_written(
    server: WeightsServer, cache: Path, published: tuple[Path, bytes]
) -> None:
    server.files[FIRST] = published[1]
    cache.write_text("a file where the folder should be")
    with pytest.raises(WeightsError, match="cannot be downloaded"):
        fetch_web(backbone_entry("x3d-xs"))
