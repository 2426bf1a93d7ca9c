from __future__ import annotations

import dataclasses
import io
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from fast_paths import where_fast
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch_file
from safetensors.torch import save_file

from capvid.backbones import backbone as module
from capvid.backbones.backbone import Backbone, load_backbone
from capvid.backbones.catalog import backbone_entry
from capvid.backbones.googlenet import LAYERS, GoogLeNet
from capvid.backbones.preprocessing import normalise, prepare
from capvid.backbones.weights import local_weights
from capvid.errors import UsageError, WeightsError
from capvid.utils.files import sha256_file

GOOGLENET = backbone_entry("googlenet")
RESNET = backbone_entry("resnet50")


@pytest.fixture(autouse=True)
def no_weights_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CAPVID_WEIGHTS", raising=False)
    monkeypatch.setenv("CAPVID_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def random_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    network = GoogLeNet()
    for parameter in network.parameters():
        if parameter.ndim > 1:  # so that the picture, and not the biases, decides the output
            torch.nn.init.kaiming_normal_(parameter)
    path = tmp_path_factory.mktemp("weights") / "bvlc_googlenet.safetensors"
    save_file(network.state_dict(), path)
    return path


@pytest.fixture
def known(random_weights: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The random weights, with the registry expecting their digest."""
    entry = dataclasses.replace(GOOGLENET, sha256=sha256_file(random_weights))
    monkeypatch.setattr(module, "backbone_entry", lambda name: entry)
    return random_weights


def triangle_resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Bilinear resizing with antialiasing, (H, W) float64, one output pixel after the other."""
    for axis, length in enumerate(size):
        image = np.moveaxis(image, axis, 0)
        ratio = len(image) / length
        support = max(ratio, 1.0)
        rows = []
        for target in range(length):
            centre = (target + 0.5) * ratio
            distance = np.abs(np.arange(len(image)) + 0.5 - centre) / support
            weight = np.clip(1 - distance, 0, None)
            rows.append(np.tensordot(weight / weight.sum(), image, axes=1))
        image = np.moveaxis(np.stack(rows), 0, axis)
    return image


@pytest.mark.parametrize(
    ("height", "width", "size"), [(300, 500, (256, 426)), (90, 60, (384, 256)), (256, 256, (256, 256))]
)
def test_frames_are_resized_and_cropped(height: int, width: int, size: tuple[int, int]) -> None:
    frames = np.random.default_rng(1).integers(0, 256, (1, height, width, 3), dtype=np.uint8)
    found = prepare(frames, GOOGLENET.preprocess)
    assert found.shape == (1, 224, 224, 3) and found.dtype == np.uint8
    top, left = (size[0] - 224) // 2, (size[1] - 224) // 2
    for channel in range(3):
        resized = triangle_resize(frames[0, :, :, channel].astype(np.float64), size)
        expected = resized[top : top + 224, left : left + 224]
        assert np.abs(found[0, :, :, channel] - expected).max() < 1.01


def test_googlenet_takes_bgr_minus_mean() -> None:
    crops = torch.tensor([10, 20, 30], dtype=torch.uint8).view(1, 3, 1, 1)
    found = normalise(crops, GOOGLENET.preprocess).flatten()
    torch.testing.assert_close(found, torch.tensor([30.0 - 104, 20 - 117, 10 - 123]))


def test_resnet_takes_rgb_over_255_less_mean_by_std() -> None:
    crops = torch.tensor([10, 20, 30], dtype=torch.uint8).view(1, 3, 1, 1)
    expected = [(10 / 255 - 0.485) / 0.229, (20 / 255 - 0.456) / 0.224, (30 / 255 - 0.406) / 0.225]
    torch.testing.assert_close(normalise(crops, RESNET.preprocess).flatten(), torch.tensor(expected))
    assert (crops.flatten() == torch.tensor([10, 20, 30])).all()


@pytest.mark.parametrize("layer", LAYERS)
def test_features_are_the_networks_output_for_the_prepared_frames(known: Path, layer: str) -> None:
    backbone = load_backbone("googlenet", layer=layer, weights=known, precision="fp32")
    frames = np.random.default_rng(2).integers(0, 256, (3, 60, 80, 3), dtype=np.uint8)
    found = backbone(frames)
    network = GoogLeNet().eval()
    network.load_state_dict(load_torch_file(known))
    with torch.inference_mode():
        images = torch.from_numpy(prepare(frames, GOOGLENET.preprocess)).permute(0, 3, 1, 2).flip(1).float()
        images -= torch.tensor([104.0, 117, 123]).view(3, 1, 1)
        expected = network(images, (layer,))[layer].numpy()
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    assert np.abs(found[0] - found[2]).max() > 0.01 * np.abs(found).max()
    size = GOOGLENET.layers[layer]
    assert (backbone.header.width, backbone.header.locations) == (size.width, size.locations)
    assert found.shape == (3, *([size.locations] if size.locations else []), size.width)
    assert backbone.header.weights_sha256 == sha256_file(known)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", where_fast("fp16"), where_fast("bf16")])
def test_features_do_not_depend_on_the_batch(known: Path, precision: str) -> None:
    """Not in their last digit: which frames are computed together is chance."""
    backbone = load_backbone("googlenet", weights=known, precision=precision)
    frames = np.random.default_rng(3).integers(0, 256, (11, 64, 64, 3), dtype=np.uint8)
    whole = backbone(frames)
    for first, last, batch in ((3, 11, 32), (7, 8, 2)):
        np.testing.assert_array_equal(backbone(frames[first:last], batch_size=batch), whole[first:last])
    assert np.abs(whole[0] - whole[4]).max() > 0.01 * whole.max()


@pytest.mark.parametrize("precision", [where_fast("bf16"), "auto"])
def test_elsewhere_it_computes_as_precisely_as_was_asked_for(known: Path, precision: str) -> None:
    there = load_backbone("googlenet", weights=known, precision=precision).on("meta")
    asked = {"bf16": torch.bfloat16, "auto": torch.float32}[precision]
    assert there.dtype == asked and {p.dtype for p in there.module.parameters()} == {asked}
    assert there.header.precision == str(asked).removeprefix("torch.")


def test_weights_are_sought_in_order(known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(*parts: str) -> Path:
        path = tmp_path.joinpath(*parts) / GOOGLENET.file
        path.parent.mkdir(parents=True)
        os.link(known, path)
        return path

    assert local_weights("googlenet") is None
    cached = put("cache", "weights")
    assert local_weights("googlenet") == cached
    elsewhere = put("variable")
    monkeypatch.setenv("CAPVID_WEIGHTS", os.pathsep.join([str(tmp_path / "gone"), str(elsewhere)]))
    assert local_weights("googlenet") == elsewhere
    monkeypatch.setenv("CAPVID_WEIGHTS", str(elsewhere.parent))
    assert local_weights("googlenet") == elsewhere
    searched = put("run", "weights")
    assert local_weights("googlenet", search=[searched.parent]) == searched
    assert local_weights("googlenet", search=[searched]) == searched
    assert local_weights("googlenet", weights=known, search=[searched]) == known
    assert local_weights("googlenet", weights=known.parent) == known
    assert load_backbone("googlenet").header.weights_sha256 == sha256_file(known)


def test_missing_weights_say_what_where_and_how(tmp_path: Path) -> None:
    with pytest.raises(WeightsError) as caught:
        load_backbone("googlenet", search=[tmp_path / "run" / "weights"])
    text = str(caught.value)
    assert "bvlc_googlenet.safetensors is not in" in text
    assert str(tmp_path / "run" / "weights") in text and str(tmp_path / "cache" / "weights") in text
    assert "--weights FILE" in text and "CAPVID_WEIGHTS" in text
    with pytest.raises(WeightsError, match=r"given\.safetensors: no such weights file of googlenet"):
        load_backbone("googlenet", weights=tmp_path / "given.safetensors")


def test_other_weights_are_refused(random_weights: Path) -> None:
    with pytest.raises(WeightsError, match=r"not the weights of googlenet \(sha256 .*expected c058c6d5c42e"):
        load_backbone("googlenet", weights=random_weights)


def test_a_file_that_changes_is_verified_again(known: Path, tmp_path: Path) -> None:
    copy = tmp_path / GOOGLENET.file
    copy.write_bytes(known.read_bytes())
    load_backbone("googlenet", weights=copy)
    with copy.open("ab") as stream:
        stream.write(b"\x00")
    with pytest.raises(WeightsError, match="not the weights of googlenet"):
        load_backbone("googlenet", weights=copy)


def test_files_that_are_no_weights_of_the_network(tmp_path: Path) -> None:
    (tmp_path / "resnet50.safetensors").write_bytes(b"PK\x03\x04" + b"\x00" * 60)
    with pytest.raises(WeightsError, match="not a readable safetensors file"):
        load_backbone("resnet50", search=[tmp_path])
    save_file({"conv1.weight": torch.zeros(1)}, tmp_path / "resnet50.safetensors")
    with pytest.raises(WeightsError, match=r"tensors missing, 1 of another shape"):
        load_backbone("resnet50", search=[tmp_path])


def test_colour_grid_needs_no_weights_and_averages_fields() -> None:
    frames = np.zeros((2, 64, 64, 3), np.uint8)
    frames[0, :8, 8:16] = (255, 51, 0)  # the second field of the first row
    backbone = load_backbone("colour-grid")
    found = backbone(frames)
    expected = np.full((2, 3, 8, 8), -2.0)  # black is (0 - 0.5) / 0.25
    expected[0, :, 0, 1] = [2.0, -1.2, -2.0]
    np.testing.assert_allclose(found, expected.reshape(2, 192), atol=1e-5)
    assert backbone.header.weights_sha256 is None


def test_unknown_layer() -> None:
    with pytest.raises(UsageError, match="no layer 'pool6'"):
        load_backbone("googlenet", layer="pool6")


@pytest.fixture(scope="module")
def real_googlenet(shared_data: Path) -> Backbone:
    return load_backbone("googlenet", search=[shared_data / "data" / "weights"])


@pytest.mark.slow
@pytest.mark.shared
def test_frames_of_real_videos_give_the_features_kept_with_them(
    shared_data: Path, real_googlenet: Backbone
) -> None:
    """The features were made from larger frames, so that they agree as pictures of two sizes do."""
    from PIL import Image

    folder = shared_data / "data" / "msrvtt-frames"
    kept = load_file(folder / "googlenet_pool5-val.safetensors")
    videos = [json.loads(line) for line in (folder / "videos-val.jsonl").read_text().splitlines()[:6]]
    found, expected = [], []
    with zipfile.ZipFile(folder / "frames-val.zip") as archive:
        for video in videos:
            names = video["frames"][:2]
            frames = [np.array(Image.open(io.BytesIO(archive.read(name))).convert("RGB")) for name in names]
            found.append(real_googlenet(np.stack(frames)))
            expected.append(kept[video["id"]][: len(names)] * kept["scale"])
    mine, theirs = np.concatenate(found), np.concatenate(expected)
    matrix = np.corrcoef(mine, theirs)[: len(mine), len(mine) :]
    assert np.diag(matrix).min() > 0.8
    assert np.diag(matrix).mean() > 0.9
    others = matrix[~np.eye(len(matrix), dtype=bool)]
    assert others.mean() < 0.5
