"""``capvid.train``: from a recipe, data and features to a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_training import SMALL_M3, SilentReporter, write_dataset

import capvid
from capvid.backbones.catalog import StreamHeader
from capvid.captioners.checkpoint import load_checkpoint
from capvid.datasets.dataset import CaptionedVideo
from capvid.decoding.caption_generator import FeatureCaptionGenerator
from capvid.decoding.decoding_options import DecodingOptions
from capvid.errors import DataError, UsageError
from capvid.features.feature_file import FeatureHeader, Features, save_features
from capvid.features.feature_store import FeatureStore
from capvid.training.recipe import load_recipe
from capvid.training.runs import sampling_mismatch

SETTINGS = [*SMALL_M3, "training.epochs=2"]


def write_specs(folder: Path) -> list[str]:
    videos, _ = write_dataset(folder)
    rows = [{"id": v.id, "split": v.split, "captions": v.captions} for v in videos]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [f"jsonl:{folder / 'data.jsonl'}"]


def test_train_is_silent_and_returns_the_result(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    specs, features = write_specs(tmp_path), [tmp_path / "features.safetensors"]
    result = capvid.train("m3-small", specs, features, tmp_path / "run", settings=SETTINGS)
    assert capfd.readouterr() == ("", "")
    info = load_checkpoint(tmp_path / "run").info
    assert (result.folder, result.epoch, result.val_cider) == (
        tmp_path / "run",
        info["epoch"],
        info["val_cider"],
    )
    assert (result.scores, result.captions, result.trials) == ({}, {}, ())
    assert (tmp_path / "run" / "README.md").read_text().startswith("---\nlibrary_name: capvid")
    assert list((tmp_path / "run" / "events").iterdir())

    with pytest.raises(UsageError, match="holds a training run already"):
        capvid.train("m3-small", specs, features, tmp_path / "run", settings=SETTINGS)
    resumed = capvid.train("m3-small", specs, features, tmp_path / "run", settings=SETTINGS, resume=True)
    assert resumed == result


def test_train_accepts_recipes_videos_and_reporters(tmp_path: Path) -> None:
    videos, _ = write_dataset(tmp_path)
    reporter, features = SilentReporter(), [str(tmp_path / "features.safetensors")]
    recipe = load_recipe("m3-small", [*SETTINGS, "search.model.hidden=[16,24]"])
    first = capvid.train(recipe, videos, features, tmp_path / "a", reporter=reporter)
    assert [row.cider for row in reporter.results][first.epoch - 1] == first.val_cider
    by_name = capvid.train("m3-small", write_specs(tmp_path), features, tmp_path / "b", settings=SETTINGS)
    assert first.val_cider == by_name.val_cider
    assert (tmp_path / "a/last/captioner.safetensors").read_bytes() == (
        tmp_path / "b/last/captioner.safetensors"
    ).read_bytes()
    fine_tuned = capvid.train(
        "m3-small", videos, features, tmp_path / "fine", settings=SETTINGS, self_critical=tmp_path / "a"
    )
    assert fine_tuned.val_cider >= first.val_cider
    best = capvid.train(recipe, videos, features, tmp_path / "search", search=2)
    assert best.val_cider == max(trial.value for trial in best.trials)
    assert load_checkpoint(tmp_path / "search").info["epoch"] == best.epoch


def test_skipped_rows_are_noted(tmp_path: Path) -> None:
    specs, features = write_specs(tmp_path), [tmp_path / "features.safetensors"]
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write('\n{"id": 3}\n')
    with pytest.raises(DataError):
        capvid.train("m3-small", specs, features, tmp_path / "run", settings=SETTINGS)
    notes: list[str] = []
    options = {"skip_bad": True, "note": notes.append}
    capvid.train("m3-small", specs, features, tmp_path / "run", settings=SETTINGS, **options)
    assert any(line.startswith("1 row of the data is left out (") for line in notes)


def test_even_frames_are_stored_and_used_for_captions(tmp_path: Path) -> None:
    specs, features = write_specs(tmp_path), [tmp_path / "features.safetensors"]
    even = [*SETTINGS, "training.epochs=1", "data.frames=even", "data.max_frames=2"]
    capvid.train("m3-small", specs, features, tmp_path / "run", settings=even)
    checkpoint = load_checkpoint(tmp_path / "run")
    assert checkpoint.frames(torch.arange(7)).tolist() == [0, 6]
    generator = FeatureCaptionGenerator(
        checkpoint, [], device=torch.device("cpu"), options=DecodingOptions(beam_size=1)
    )
    assert generator.frames(7).tolist() == [0, 6]


@pytest.mark.parametrize(
    ("sampling", "note"),
    [
        ("uniform:3", None),
        ("uniform:28", "at most 3 frames per video; the recipe expects capvid extract --sampling uniform:28"),
        ("fps:2", None),  # the features do not say how they were sampled
    ],
)
def test_features_with_fewer_frames_than_the_recipe_expects_are_noted(
    tmp_path: Path, sampling: str, note: str | None
) -> None:
    videos, store = write_dataset(tmp_path)
    line = sampling_mismatch(sampling, store, videos)
    assert line.endswith(note) if note else not line
    if note:
        notes: list[str] = []
        settings = [*SETTINGS, "training.epochs=1", f"data.sampling={sampling}"]
        features = [tmp_path / "features.safetensors"]
        capvid.train("m3-small", videos, features, tmp_path / "run", settings=settings, note=notes.append)
        assert notes == [line]


def test_features_of_another_rate_are_noted(tmp_path: Path) -> None:
    stream = StreamHeader(backbone=None, layer=None, width=2)
    header = FeatureHeader(
        streams=(stream,), sampling="fps:1", reader=None, dtype="float32", capvid_version="0"
    )
    frames = np.zeros((5, 2), dtype=np.float32)
    save_features(
        tmp_path / "v.safetensors", Features(header=header, streams=(frames,), times=None, video="v")
    )
    store, videos = FeatureStore([tmp_path]), [CaptionedVideo("v", "train", ("a dog",))]
    assert sampling_mismatch("fps:1", store, videos) == ""
    assert "frames sampled by fps:1; the recipe expects" in sampling_mismatch("fps:2", store, videos)


def test_captions_are_learned_in_the_words_of_the_recipes_tokenizer(tmp_path: Path) -> None:
    videos, _ = write_dataset(tmp_path)
    videos = [
        replace(video, captions=tuple(f"{text}, isn't it?" for text in video.captions)) for video in videos
    ]
    features = [tmp_path / "features.safetensors"]
    settings = [*SETTINGS, "training.epochs=1"]
    wordpunct = [*settings, "data.tokenizer=wordpunct"]
    for name, own, others in (("scorer", "n't", "?"), ("wordpunct", "?", "n't")):
        chosen = [*settings, f"data.tokenizer={name}"]
        capvid.train("m3-small", videos, features, tmp_path / name, settings=chosen)
        known = load_checkpoint(tmp_path / name).vocabulary.words
        assert own in known and others not in known
    # sampled captions are rewarded as text: their punctuation costs nothing
    start = tmp_path / "wordpunct"
    critical = [*wordpunct, "self_critical.epochs=1"]
    capvid.train("m3-small", videos, features, tmp_path / "b", settings=critical, self_critical=start)
