"""Candidates ordered by their agreement with the frames (``--rerank``)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_encoders import ENCODERS
from toy import Run, Toy, bad_files, capvid, toy, toy_files, video_files

from capvid import load
from capvid.errors import UsageError
from capvid.metrics.clip_score import PROMPT, clip_score, video_embedding
from capvid.video.frame_sampling import UniformSampling
from capvid.video.readers import read_frames
from capvid.vlm.image_text import load_encoder

__all__ = ["bad_files", "capvid", "toy", "toy_files", "video_files"]


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("towers") / "clip"
    ENCODERS["clip"](folder)
    return str(folder)


def test_the_candidate_that_fits_the_frames_best_comes_first(
    toy: Toy, video_files: list[Path], bad_files: dict[str, Path], tower: str
) -> None:
    options = {"num_captions": 5, "beam_size": 5, "device": "cpu", "workers": 1, "batch_size": 2}
    inputs = [video_files[0], bad_files["text"], *video_files[1:]]
    with load(toy.model, **options) as plain, load(toy.model, rerank=tower, **options) as reranking:
        likeliest = list(plain.stream(inputs))
        reranked = list(reranking.stream(inputs))
        assert reranking.settings == {**plain.settings, "rerank": tower}
    encoder = load_encoder(tower)
    moved = 0
    for before, after in zip(likeliest, reranked, strict=True):
        assert before.path == after.path and before.status == after.status
        if after.error is not None:
            continue
        frames = read_frames(Path(str(after.path)), UniformSampling(4)).frames
        video = video_embedding(encoder.images(frames))
        scored = [
            (float(text.sentence @ video), candidate)
            for candidate in before.captions
            for text in encoder.embed([PROMPT + candidate.text])
        ]
        scored.sort(key=lambda pair: -pair[0])
        expected = [
            replace(candidate, clip_score=after.captions[n].clip_score)
            for n, (_, candidate) in enumerate(scored)
        ]
        assert list(after.captions) == expected  # texts, words and log-probabilities are those of decoding
        for caption in after.captions:
            sentence = encoder.embed([PROMPT + caption.text])[0].sentence
            assert caption.clip_score == pytest.approx(clip_score(sentence, video), abs=1e-6)
        moved += after.captions[0].text != before.captions[0].text
    assert moved


def test_json_has_the_score_and_segments_are_reranked_each(
    capvid: Run, toy: Toy, video_files: list[Path], tower: str
) -> None:
    options = ["--model", toy.model, "--format", "json", "--num-captions", 6, "--rerank", tower]
    code, out, _ = capvid("caption", video_files[2], *options, "--segments", 2)
    record = json.loads(out)
    assert code == 0 and record["settings"]["rerank"] == tower and record["settings"]["beam_size"] == 6
    for segment in record["segments"]:
        scores = [caption["clip_score"] for caption in segment["captions"]]
        assert len(scores) == 6 and scores == sorted(scores, reverse=True)
        assert all("logprob" in caption for caption in segment["captions"])
    assert "clip_score" not in capvid("caption", video_files[2], *options[:-2], "--beam", 6)[1]


def test_feature_files_have_no_frames_to_rerank_by(
    capvid: Run, toy: Toy, video_files: list[Path], tower: str, tmp_path: Path
) -> None:
    options = ["--backbone", "toy", "--sampling", "uniform:4", "-o", tmp_path]
    assert capvid("extract", video_files[1], *options)[0] == 0
    features = next(tmp_path.glob("*.safetensors"))
    code, _, err = capvid("caption", features, "--model", toy.model, "--num-captions", 3, "--rerank", tower)
    assert code == 1 and "rerank needs frames, not features" in err


def test_one_candidate_cannot_be_reranked(toy: Toy, tower: str) -> None:
    with pytest.raises(UsageError, match="rerank needs several candidates"):
        load(toy.model, rerank=tower)
