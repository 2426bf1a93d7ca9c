from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
from safetensors.numpy import load_file
from toy import Run, capvid

from capvid.backbones.catalog import StreamHeader
from capvid.features.feature_file import FeatureHeader, Features, save_features

__all__ = ["capvid"]

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
CLIP = EXAMPLES / "car.mp4"


def decode_clip(path: Path) -> tuple[list[np.ndarray], list[float]]:
    """Return all frames of a clip and their times in seconds."""
    with av.open(str(path)) as container:
        frames = list(container.decode(video=0))
    return [frame.to_ndarray(format="rgb24") for frame in frames], [float(frame.time) for frame in frames]


def test_clip_is_small_and_streamable() -> None:
    data = CLIP.read_bytes()
    assert len(data) <= 300_000
    assert 0 < data.find(b"moov") < data.find(b"mdat")


@pytest.mark.slow
def test_clip_matches_its_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / "draw_clip.py"))["draw"](tmp_path / "car.mp4")
    (drawn_frames, times), (stored_frames, stored_times) = (
        decode_clip(tmp_path / "car.mp4"),
        decode_clip(CLIP),
    )
    assert times == stored_times and len(times) == 120 and times[-1] == 5.95
    assert drawn_frames[0].shape == stored_frames[0].shape == (240, 320, 3)
    for number in (0, 60, 119):  # encoders differ slightly
        assert np.abs(drawn_frames[number].astype(int) - stored_frames[number]).mean() < 8
    assert np.abs(drawn_frames[0].astype(int) - drawn_frames[119]).mean() > 8


def write_text_tower(folder: Path) -> None:
    """Write the text side of a small CLIP with random weights, whose tokens are letters."""
    import torch
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    letters = [chr(ord("a") + number) for number in range(26)]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = CLIPTextConfig(**sizes, vocab_size=54, bos_token_id=52, eos_token_id=53, projection_dim=8)
    CLIPTextModelWithProjection(config).save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")


@pytest.mark.slow
def test_concept_scores_are_values_of_the_key_value_memory(tmp_path: Path, capvid: Run) -> None:
    write_text_tower(tmp_path / "clip")
    generator = np.random.default_rng(0)
    stream = StreamHeader(backbone="clip-vit-l14", layer="image_embeds", width=8)
    header = FeatureHeader(
        streams=(stream,), sampling="uniform:3", reader=None, dtype="float32", capvid_version="0"
    )
    images = generator.normal(size=(4, 3, 8)).astype(np.float32)
    (tmp_path / "features").mkdir()
    rows = []
    for number, frames in enumerate(images):
        features = Features(header=header, streams=(frames,), times=None, video=f"v{number}")
        save_features(tmp_path / "features" / f"v{number}.safetensors", features)
        split = "val" if number == 3 else "train"
        rows.append({"id": f"v{number}", "split": split, "captions": ["a dog is running"]})
    (tmp_path / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "concepts.txt").write_text("dog\nrunning\nkitchen\n")
    script, output = EXAMPLES / "concept_scores.py", tmp_path / "concepts.safetensors"
    paths = [tmp_path / "features", tmp_path / "concepts.txt", output]
    subprocess.run([sys.executable, script, *paths, "--model", tmp_path / "clip"], check=True)
    words = runpy.run_path(str(script))["embed_words"](["dog", "running", "kitchen"], str(tmp_path / "clip"))
    scores = load_file(output)
    for number, frames in enumerate(images):
        for row, frame in zip(scores[f"v{number}"], frames, strict=True):
            cosines = words.numpy() @ frame / np.linalg.norm(frame)
            expected = np.exp(100 * cosines) / np.exp(100 * cosines).sum()
            np.testing.assert_allclose(row, expected, rtol=1e-3, atol=1e-6)
    settings = [
        f"model.{name}=16" for name in ("embedding", "hidden", "encoder_hidden", "attention", "projection")
    ]
    settings += ["training.epochs=1", "data.min_count=1", "data.sampling=uniform:3"]
    options = [option for setting in settings for option in ("--set", setting)]
    data = ["--data", tmp_path / "captions.jsonl", "--features", paths[0], "--values", output]
    code, _, err = capvid("train", "kv-memory-msrvtt-clip", *data, "-o", tmp_path / "run", *options)
    assert code == 0, err
    config = json.loads((tmp_path / "run" / "best" / "captioner.json").read_text())
    assert config["config"]["value_width"] == 3
