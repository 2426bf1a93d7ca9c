"""A toy captioner on a toy backbone with random weights, and small generated videos."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

SENTENCE = "a man woman dog is are running cooking playing guitar the in on park kitchen ball"
MODELS = """
[backbones.toy]
kind = "capvid-small"
source = "file:toy.safetensors"
licence = "none"
origin = "random numbers"
description = "a small network with random weights, on small images"
default_layer = "embedding"

[backbones.toy.layers]
"embedding" = 1280
"maps" = [4, 352]

[backbones.toy.preprocess]
resize = 144
crop = 128
order = "RGB"
scale = 255.0
mean = [0.45, 0.45, 0.45]
std = [0.225, 0.225, 0.225]
"""


@dataclass(frozen=True)
class Toy:
    """Paths of the toy's models file, backbone weights and captioner folder."""

    models: Path
    weights: Path
    model: Path


def write_images(path: Path, images: Iterable[np.ndarray], *, bit_rate: int | None = None) -> Path:
    """Write an MPEG-4 video of images (H, W, 3) at 10 frames per second."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    first, *others = images
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.height, stream.width, stream.pix_fmt = *first.shape[:2], "yuv420p"
        if bit_rate is not None:
            stream.bit_rate = bit_rate
        for image in (first, *others):
            for packet in stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def write_video(path: Path, *, seed: int, frames: int = 12, size: tuple[int, int] = (64, 48)) -> Path:
    """Write a video of noise that gets brighter from frame to frame."""
    texture = np.random.default_rng(seed).integers(0, 128, (size[1], size[0], 3))
    return write_images(path, ((texture + 127 * n // frames).astype(np.uint8) for n in range(frames)))


@pytest.fixture(scope="session")
def toy_files(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """Write the toy's files once; the fixture ``toy`` registers them."""
    import torch
    from safetensors.torch import save_file

    from capvid.backbones.capvid_small import CapvidSmall

    folder = tmp_path_factory.mktemp("toy")
    models = folder / "models.toml"
    models.write_text(MODELS)
    torch.manual_seed(0)
    weights = folder / "toy.safetensors"
    network = CapvidSmall()
    gains = {block.project: 0.2 if block.residual else 1.0 for block in network.blocks}
    for module in network.modules():
        if isinstance(module, torch.nn.Conv2d):  # He et al. (2015); with torch's own, all videos look alike
            std = (gains.get(module, 2.0) / module.weight[0].numel()) ** 0.5
            torch.nn.init.normal_(module.weight, std=std)
            torch.nn.init.zeros_(module.bias)
    save_file(network.state_dict(), weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAPVID_MODELS", str(models))
        save_toy_captioner(folder / "run", weights=weights)
    return Toy(models=models, weights=weights, model=folder / "run")


def save_toy_captioner(
    folder: Path,
    *,
    backbone: str = "toy",
    weights: Path | None = None,
    seed: int = 1,
    sampling: str | None = "uniform:4",
    **info: object,
) -> None:
    """Save a captioner with random weights whose header names a backbone; ``info`` are further notes."""
    import torch

    from capvid.backbones.backbone import load_backbone
    from capvid.captioners.base import build
    from capvid.captioners.checkpoint import save_checkpoint
    from capvid.features.feature_file import FeatureHeader
    from capvid.text.vocabulary import EOS, Vocabulary

    network = load_backbone(backbone, weights=weights)
    header = FeatureHeader(
        streams=(network.header,), sampling=sampling, reader=None, dtype="float32", capvid_version="0"
    )
    vocabulary = Vocabulary(SENTENCE.split())
    torch.manual_seed(seed)
    sizes = {"vocabulary_size": len(vocabulary), "feature_width": network.header.width}
    sizes |= {"embedding": 16, "hidden": 24, "attention": 16, "output": 16}
    captioner = build("soft-attention", {"dropout": 0.0, "standardise": True, **sizes})
    images = np.random.default_rng(0).integers(0, 256, (8, 6, 8, 3), dtype=np.uint8)
    captioner.standardise.fit(torch.from_numpy(network(images)))
    with torch.no_grad():  # larger weights and a late EOS, so that captions differ between videos
        for parameter in captioner.parameters():
            parameter.mul_(3)
        captioner.output.vocabulary.bias[EOS] -= 3
    save_checkpoint(folder, captioner, vocabulary, header, {"max_frames": 4, **info})


@pytest.fixture
def toy(toy_files: Toy, monkeypatch: pytest.MonkeyPatch) -> Toy:
    """Register the toy backbone and captioner in this process and its children."""
    monkeypatch.setenv("CAPVID_MODELS", str(toy_files.models))
    monkeypatch.setenv("CAPVID_WEIGHTS", str(toy_files.weights))
    return toy_files


@pytest.fixture(scope="session")
def video_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Write five videos of different lengths, the first with fewer frames than the four sampled."""
    folder = tmp_path_factory.mktemp("videos")
    return [write_video(folder / f"v{n}.mp4", seed=n, frames=3 + 4 * n) for n in range(5)]


@pytest.fixture
def bad_files(tmp_path: Path) -> dict[str, Path]:
    """Write files that are not videos; map each defect to its path."""
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "text.mp4").write_text("not a video, but text long enough for its format to be probed\n" * 20)
    (folder / "empty.mp4").touch()
    return {
        "text": folder / "text.mp4",
        "empty": folder / "empty.mp4",
        "missing": folder / "missing.mp4",
    }


Run = Callable[..., tuple[int, str, str]]


TIME = re.compile(r" in \d+\.\d s \(\d+\.\d a second\)")


@pytest.fixture
def capvid(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs the command in this process: exit code, stdout, stderr without times."""
    from capvid.cli.app import main

    monkeypatch.delenv("CAPVID_DEBUG", raising=False)

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, TIME.sub("", captured.err)

    return run
