from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from fast_paths import needs_fp16
from safetensors.numpy import load_file
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from capvid.backbones import backbone as module
from capvid.backbones.backbone import Backbone, load_backbone
from capvid.backbones.catalog import backbone_entry
from capvid.backbones.clip_networks import X3D_LAYERS, X3DXS, Block
from capvid.errors import UsageError
from capvid.features.extraction import views_of
from capvid.utils.files import sha256_file
from capvid.video.frame_sampling import UniformSampling
from capvid.video.readers import read_frames

ENTRY = backbone_entry("x3d-xs")


def convolution(x: np.ndarray, layer: torch.nn.Conv3d, *, depthwise: bool) -> np.ndarray:
    """A 3D convolution of (C, T, H, W), one number after the other."""
    weight, bias = layer.weight.detach().numpy(), layer.bias.detach().numpy()  # type: ignore[union-attr]
    kernel, stride = weight.shape[2:], layer.stride
    padded = np.pad(x, [(0, 0), *((size // 2, size // 2) for size in kernel)])
    sizes = [-(-size // step) for size, step in zip(x.shape[1:], stride, strict=True)]
    y = np.empty((len(weight), *sizes))
    for out, *place in np.ndindex(*y.shape):
        cut = tuple(slice(p * s, p * s + k) for p, s, k in zip(place, stride, kernel, strict=True))
        seen = padded[out : out + 1] if depthwise else padded
        y[(out, *place)] = (seen[(slice(None), *cut)] * weight[out]).sum() + bias[out]
    return y


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize(("width", "out", "squeeze", "stride"), [(3, 5, 2, 2), (4, 4, None, 1), (4, 4, 3, 1)])
@torch.inference_mode()
def test_a_blocks_arithmetic(width: int, out: int, squeeze: int | None, stride: int) -> None:
    torch.manual_seed(width)
    block = Block(width, out, 6, squeeze=squeeze, stride=stride)
    clips = torch.randn(2, width, 3, 4, 5)
    found = block(clips).numpy()
    assert (block.se is None, block.proj is None) == (squeeze is None, stride == 1)
    for clip, mine in zip(clips.double().numpy(), found, strict=True):
        y = np.maximum(convolution(clip, block.a, depthwise=False), 0)
        y = convolution(y, block.b, depthwise=True)
        if block.se is not None:
            means = y.mean((1, 2, 3), keepdims=True)
            hidden = np.maximum(convolution(means, block.se.fc1, depthwise=False), 0)
            y = y * sigmoid(convolution(hidden, block.se.fc2, depthwise=False))
        y = convolution(y * sigmoid(y), block.c, depthwise=False)
        shortcut = clip if block.proj is None else convolution(clip, block.proj, depthwise=False)
        np.testing.assert_allclose(mine, np.maximum(y + shortcut, 0), atol=1e-5)


def random_network() -> X3DXS:
    torch.manual_seed(0)
    network = X3DXS().eval().requires_grad_(False)
    for parameter in network.parameters():
        if parameter.ndim > 1:  # so that the pictures, and not the biases, decide the output
            torch.nn.init.kaiming_normal_(parameter)
    return network


@torch.inference_mode()
def test_the_network_is_what_3d_convolutions_give() -> None:
    """From the first frames to the classes with plain 3D convolutions and the tensors of the weights file."""
    network = random_network()
    tensors = network.state_dict()
    clips = torch.randn(2, 3, 4, 64, 48)

    def conv(x: Tensor, name: str, **options: object) -> Tensor:
        return F.conv3d(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"], **options)  # type: ignore[arg-type]

    x = conv(clips, "stem_xy", stride=(1, 2, 2), padding=(0, 1, 1))
    x = conv(x, "stem_t", padding=(2, 0, 0), groups=24).relu()
    firsts = (0, 3, 8, 19)
    for number in range(26):
        name = f"blocks.{number}"
        stride = (1, 2, 2) if number in firsts else 1
        y = conv(x, f"{name}.a").relu()
        y = conv(y, f"{name}.b", stride=stride, padding=1, groups=y.shape[1])
        if (number - max(first for first in firsts if first <= number)) % 2 == 0:
            means = conv(y.mean((2, 3, 4), keepdim=True), f"{name}.se.fc1").relu()
            y = y * conv(means, f"{name}.se.fc2").sigmoid()
        y = conv(y * y.sigmoid(), f"{name}.c")
        x = (y + (conv(x, f"{name}.proj", stride=stride) if number in firsts else x)).relu()
    pooled = conv(x, "conv5").relu().mean((2, 3, 4))
    features = (pooled @ tensors["lin5.weight"].flatten(1).T + tensors["lin5.bias"]).relu()
    logits = features @ tensors["fc.weight"].T + tensors["fc.bias"]
    found = network(clips, X3D_LAYERS)
    both = torch.cat([features, logits.log_softmax(1)], 1)
    for layer, expected in zip(X3D_LAYERS, (pooled, features, logits, both), strict=True):
        assert found[layer].shape == (2, ENTRY.layers[layer].width)
        torch.testing.assert_close(found[layer], expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))
    assert pooled.std() > 0
    assert list(network(clips[:1])) == ["conv5"]


@pytest.fixture(scope="module")
def random_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / ENTRY.file
    save_file({name: tensor.half() for name, tensor in random_network().state_dict().items()}, path)
    return path


@pytest.fixture
def backbone(random_weights: Path, monkeypatch: pytest.MonkeyPatch) -> Backbone:
    entry = dataclasses.replace(ENTRY, sha256=sha256_file(random_weights))
    monkeypatch.setattr(module, "backbone_entry", lambda name: entry)
    return load_backbone("x3d-xs", weights=random_weights)


def test_stills_are_repeated_and_windows_taken_as_they_are(backbone: Backbone) -> None:
    windows = np.random.default_rng(0).integers(0, 256, (3, 4, 40, 60, 3), dtype=np.uint8)
    moving = backbone(windows)
    assert moving.shape == (3, 432) and moving.dtype == np.float32
    still = backbone(windows[:, 0])
    repeated = backbone(np.repeat(windows[:, :1], 4, axis=1))
    np.testing.assert_allclose(still, repeated, atol=1e-5 * still.max())
    assert np.abs(moving - still).max() > 0.01 * still.max()
    np.testing.assert_allclose(backbone(windows, batch_size=4), moving, atol=1e-5 * moving.max())
    backwards = backbone(windows[:, ::-1].copy())
    assert np.abs(backwards - moving).max() > 0.001 * moving.max()


def test_other_windows_are_refused(backbone: Backbone) -> None:
    with pytest.raises(UsageError, match=r"x3d-xs takes frames \(T, H, W, 3\) or \(T, 4, H, W, 3\), got"):
        backbone(np.zeros((2, 3, 8, 8, 3), np.uint8))
    with pytest.raises(UsageError, match=r"colour-grid takes frames \(T, H, W, 3\), got \(2, 4, 8, 8, 3\)"):
        dataclasses.replace(backbone, entry=backbone_entry("colour-grid"))(
            np.zeros((2, 4, 8, 8, 3), np.uint8)
        )


def test_the_header_names_the_window(backbone: Backbone) -> None:
    assert backbone.header.preprocess == (
        "short side 160 bilinear, centre 160, RGB / 255 minus (0.45, 0.45, 0.45), "
        "over (0.225, 0.225, 0.225), 4 frames 0.4 s apart"
    )
    clip = ENTRY.clip
    assert clip is not None
    other = dataclasses.replace(ENTRY, clip=dataclasses.replace(clip, stride=6)).describe_input()
    (differs,) = backbone.header.mismatches(dataclasses.replace(backbone.header, preprocess=other))
    assert differs.startswith("preprocess: ") and differs.endswith("4 frames 0.2 s apart")


@pytest.fixture(scope="module")
def weights(shared_data: Path) -> Path:
    return shared_data / "data" / "weights"


@torch.inference_mode()
@pytest.mark.shared
def test_stills_give_the_features_kept_with_them(shared_data: Path, weights: Path) -> None:
    """The features were kept as whole numbers u <= 255, scale * u**2: u must be met to its rounding."""
    from PIL import Image

    folder = shared_data / "data" / "msrvtt-frames"
    kept = load_file(folder / "x3d_xs_conv5-val.safetensors")
    network = load_backbone("x3d-xs", weights=weights, precision="fp32").module
    videos = [json.loads(line) for line in (folder / "videos-val.jsonl").read_text().splitlines()[:5]]
    with zipfile.ZipFile(folder / "frames-val.zip") as archive:
        for video in videos:
            names = video["frames"][:3]
            frames = [np.array(Image.open(io.BytesIO(archive.read(name))).convert("RGB")) for name in names]
            images = (torch.from_numpy(np.stack(frames)) / 255 - 0.45) / 0.225  # (T, 144, 192, 3)
            clips = images.permute(0, 3, 1, 2)[:, :, None].expand(-1, -1, 4, -1, -1)
            rounded = np.sqrt(network(clips).numpy() / kept["scale"])
            np.testing.assert_allclose(rounded, kept[video["id"]][: len(names)], rtol=0, atol=0.53)


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize(
    ("clip", "name", "least", "precision"),
    [
        ("flipping_a_pancake.mkv", "flipping pancake", 0.5, "fp32"),
        pytest.param("flipping_a_pancake.mkv", "flipping pancake", 0.5, "fp16", marks=needs_fp16),
        ("v_GGSY1Qvo990.mp4", "clean and jerk", 0.85, "fp32"),
    ],
)
def test_real_videos_are_recognised_by_their_motion(
    shared_data: Path, weights: Path, clip: str, name: str, least: float, precision: str
) -> None:
    backbone = load_backbone("x3d-xs", layer="fc", weights=weights, precision=precision)
    (view,) = views_of([backbone])
    windows = view.windows(UniformSampling(5))
    assert windows is not None
    path = shared_data / "data" / "clips" / clip
    sampled = read_frames(path, UniformSampling(5), windows=[windows])
    logits = backbone.compute(sampled.windows[0]), backbone(sampled.frames)
    moving, still = (torch.from_numpy(given).softmax(1).mean(0) for given in logits)  # (400,)
    number = json.loads((weights / "k400_classnames.json").read_text()).index(name)
    assert int(moving.argmax()) == number
    assert moving[number] > max(least, still[number] + 0.1)
