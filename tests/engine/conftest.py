"""A captioner that needs no network to look at pictures, and many short videos."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from toy import SENTENCE, bad_files, capvid, toy, toy_files, video_files, write_video

__all__ = ["bad_files", "capvid", "toy", "toy_files", "video_files"]

KINDS = 12  # different videos, of which the others are copies


@pytest.fixture(scope="session")
def quick_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A captioner with random weights that looks at the colours of pictures."""
    import torch

    from capvid.captioners import build
    from capvid.captioners.checkpoint import save_checkpoint
    from capvid.features.backbones import load_backbone
    from capvid.features.file import FeatureHeader
    from capvid.text.vocabulary import EOS, Vocabulary

    folder = tmp_path_factory.mktemp("quick") / "run"
    backbone = load_backbone("colour-grid")
    header = FeatureHeader(
        streams=(backbone.header,), sampling="uniform:4", reader=None, dtype="float32", capvid_version="0"
    )
    vocabulary = Vocabulary(SENTENCE.split())
    torch.manual_seed(1)
    sizes = {"embedding": 16, "hidden": 24, "attention": 16, "output": 16, "feature_width": 192}
    captioner = build(
        "soft-attention", {"vocabulary_size": len(vocabulary), "dropout": 0.0, "standardise": True, **sizes}
    )
    pictures = np.random.default_rng(0).integers(0, 256, (8, 6, 8, 3), dtype=np.uint8)
    captioner.standardise.fit(torch.from_numpy(backbone(pictures)))
    with torch.no_grad():  # larger weights, so that videos differ in their captions, and a late end
        for parameter in captioner.parameters():
            parameter.mul_(3)
        captioner.output.vocabulary.bias[EOS] -= 3
    save_checkpoint(folder, captioner, vocabulary, header, {"max_frames": 4})
    return folder


@pytest.fixture(scope="session")
def many_videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 300 short videos, of which 20 are broken."""
    folder = tmp_path_factory.mktemp("many") / "clips"
    kinds = [write_video(folder.parent / f"{n}.mp4", seed=n, frames=4 + n) for n in range(KINDS)]
    for number in range(280):
        path = folder / f"{number % 7}" / f"clip {number:03}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(kinds[number % KINDS], path)
    for number in range(20):
        path = folder / "broken" / f"{number:02}.mp4"
        path.parent.mkdir(exist_ok=True)
        whole = kinds[number % KINDS].read_bytes()
        path.write_bytes([b"", b"no video at all\n" * 50, whole[:200], whole[-200:]][number % 4])
    return folder
