from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from toy import Toy, bad_files, save_toy_captioner, toy, toy_files, video_files

import capvid
from capvid.backbones.backbone import load_backbone
from capvid.captioners.base import Captioner, build
from capvid.captioners.checkpoint import load_checkpoint
from capvid.checkpoints.lookup import revision
from capvid.decoding.beam_search import decode
from capvid.decoding.caption_generator import FeatureCaptionGenerator
from capvid.decoding.decoding_options import DecodingOptions, Hypothesis
from capvid.errors import (
    CapvidError,
    CheckpointError,
    FeatureMismatchError,
    RunError,
    UsageError,
    VideoError,
    WeightsError,
)
from capvid.features.extraction import ExtractionResult, extract
from capvid.features.feature_file import save_features
from capvid.pipeline import CaptionPipeline, load
from capvid.video.frame_sampling import UniformSampling
from capvid.video.readers import open_video, read_frames

__all__ = ["bad_files", "toy", "toy_files", "video_files"]


@pytest.mark.slow
def test_pipeline_equals_its_stages_in_sequence(toy: Toy, video_files: list[Path]) -> None:
    """The pipeline equals reading, extracting and decoding in sequence."""
    checkpoint = load_checkpoint(toy.model)
    backbone = load_backbone("toy", weights=toy.weights)
    options = DecodingOptions(beam_size=3, num_captions=2)
    pipeline = load(toy.model, device="cpu", beam_size=3, num_captions=2)
    for result in pipeline.stream(video_files):
        features = torch.from_numpy(backbone(read_frames(result.path, UniformSampling(4)).frames))
        features = features.half().float()  # as in feature files
        mask = torch.ones(1, len(features), dtype=torch.bool)
        (expected,) = decode(checkpoint.captioner, features.unsqueeze(0), mask, options)
        assert (result.status, result.error) == ("ok", None)
        assert result.model == f"soft-attention@{revision(toy.model)}"
        assert len(result.captions) == 2
        for caption, hypothesis in zip(result.captions, expected, strict=True):
            words = checkpoint.vocabulary.decode(hypothesis.tokens)
            assert caption.text == " ".join(words)
            assert [word.word for word in caption.words] == words
            assert [w.logprob for w in caption.words] == pytest.approx(hypothesis.logprobs[:-1], abs=2e-3)
            assert caption.logprob == pytest.approx(sum(hypothesis.logprobs), abs=1e-2)


@pytest.mark.slow
def test_batch_size_does_not_change_captions(toy: Toy, video_files: list[Path]) -> None:
    results_by_size = [list(load(toy.model, batch_size=size).stream(video_files)) for size in (1, 2, 8)]
    for one, two, eight in zip(*results_by_size, strict=True):
        assert one.path == two.path == eight.path
        assert one.captions[0].text == two.captions[0].text == eight.captions[0].text
        assert one.captions[0].logprob == pytest.approx(eight.captions[0].logprob, abs=1e-2)
    assert len({result.captions[0].text for result in results_by_size[0]}) > 1, (
        "all captions are equal, which tests nothing"
    )


@pytest.mark.slow
def test_feature_files_form_larger_batches_than_videos(
    toy: Toy, video_files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = load_backbone("toy", weights=toy.weights)
    extracted = next(extract(video_files[:1], [backbone], UniformSampling(4)))
    assert extracted.features is not None
    files = [tmp_path / f"{number}.safetensors" for number in range(20)]
    for file in files:
        save_features(file, extracted.features)
    sizes = []

    def counting_decode(
        captioner: Captioner, features: torch.Tensor, *arguments: Any
    ) -> list[list[Hypothesis]]:
        sizes.append(len(features))
        return decode(captioner, features, *arguments)

    monkeypatch.setattr("capvid.decoding.caption_generator.decode", counting_decode)
    results = list(load(toy.model, batch_size=2).stream([*files, *video_files[:3]]))
    assert len({result.captions[0].text for result in results[:21]}) == 1
    # 8 feature files, which is as much as the one video of the first batch; the other 12, which count an
    # eighth, with a video; the rest
    assert sizes == [8, 13, 2]


def test_the_first_batches_are_small(toy: Toy, video_files: list[Path]) -> None:
    with load(toy.model, batch_size=8) as pipeline:
        (features,) = pipeline.features_of(pipeline.decoding.videos(pipeline._pool, video_files[:1]))
        taken: list[int] = []

        def inputs() -> Iterator[ExtractionResult]:
            for number in range(20):
                taken.append(number)
                yield features

        results = pipeline.describe(inputs(), first_soon=True)
        before = [len(taken) for _ in results]
    assert sorted(set(before)) == [1, 3, 7, 15, 20]


@pytest.mark.slow
def test_calling_the_pipeline_returns_a_caption(toy: Toy, video_files: list[Path], tmp_path: Path) -> None:
    pipeline = capvid.load(toy.model, device="cpu")
    assert pipeline(video_files[1]) == next(pipeline.stream([video_files[1]])).captions[0].text
    assert pipeline(str(video_files[1])) == pipeline(video_files[1])
    with pytest.raises(VideoError):
        pipeline(tmp_path / "none.mp4")


@pytest.mark.slow
def test_failures_keep_their_position(toy: Toy, video_files: list[Path], bad_files: dict[str, Path]) -> None:
    paths = [bad_files["empty"], video_files[0], bad_files["missing"], video_files[1]]
    for size in (1, 3):
        results = list(load(toy.model, batch_size=size).stream(paths))
        assert [result.path for result in results] == paths
        assert [result.status for result in results] == ["error", "ok", "error", "ok"]
        assert [result.error.kind for result in results[::2] if result.error] == ["empty", "missing"]
        assert results[0].captions == ()


@pytest.mark.slow
def test_paths_are_consumed_lazily(toy: Toy, video_files: list[Path], tmp_path: Path) -> None:
    """An endless iterable of videos and feature files is consumed lazily, in order."""
    pipeline = load(toy.model, batch_size=2, workers=1)
    extracted = next(
        extract(video_files[:1], pipeline.generator.loaded_backbones, pipeline.sampling)
    ).features
    assert extracted is not None
    save_features(tmp_path / "f.safetensors", extracted)
    taken: list[Path] = []

    def endless() -> Iterator[Path]:
        for number in count():
            kinds = [tmp_path / "f.safetensors", video_files[0], tmp_path / "none.mp4", video_files[1]]
            taken.append(kinds[number % 4])
            yield taken[-1]

    results = list(islice(pipeline.stream(endless()), 30))
    assert [result.path for result in results] == taken[:30]
    assert len(taken) < 50
    assert [result.status for result in results[:8]] == ["ok", "ok", "error", "ok"] * 2
    assert results[0].captions == results[1].captions
    assert [result.path for result in pipeline.stream(taken[:9])] == taken[
        :9
    ]  # the last one is a feature file
    assert list(pipeline.stream([])) == []


@pytest.mark.slow
def test_caption_features_equals_captioning_videos(toy: Toy, video_files: list[Path]) -> None:
    pipeline = load(toy.model, num_captions=2)
    videos = list(extract(video_files, pipeline.generator.loaded_backbones, pipeline.sampling))
    features = [video.features for video in videos if video.features is not None]
    expected = [result.captions for result in pipeline.stream(video_files)]
    assert pipeline.caption_features(features) == expected
    assert pipeline.caption_features([item.concatenated() for item in features]) == expected
    assert pipeline.caption_features([]) == []
    width = features[0].concatenated().shape[1]
    with pytest.raises(
        FeatureMismatchError, match=rf"\(3, 5\), and the captioner was trained on \(T, {width}\)"
    ):
        pipeline.caption_features([np.zeros((3, 5))])
    with pytest.raises(FeatureMismatchError, match="sampling: trained on"):
        pipeline.caption_features(
            [replace(features[0], header=replace(features[0].header, sampling="fps:1"))]
        )


def test_features_in_memory_are_captioned_like_their_file(toy: Toy, video_files: list[Path]) -> None:
    pipeline = load(toy.model, max_frames=3)
    (video,) = extract(video_files[:1], pipeline.generator.loaded_backbones, pipeline.sampling)
    assert video.features is not None
    (expected,) = pipeline.stream(video_files[:1])
    assert pipeline.caption_features([video.features]) == [expected.captions]
    assert pipeline.generator.settings["max_frames"] == 3
    assert "max_frames" not in load(toy.model).generator.settings


def test_results_are_yielded_early(toy: Toy, video_files: list[Path]) -> None:
    results = load(toy.model, batch_size=2, workers=1).stream([*video_files, Path("none.mp4")])
    first = next(results)
    assert first.path == video_files[0]
    results.close()


@pytest.mark.slow
def test_weights_stored_in_the_run_are_used(
    toy: Toy, video_files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CAPVID_WEIGHTS")
    monkeypatch.setenv("CAPVID_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    shutil.copytree(toy.model, run / "best")
    with pytest.raises(WeightsError, match=r"toy\.safetensors"):
        load(run)(video_files[0])
    (run / "weights").mkdir()
    os.link(toy.weights, run / "weights" / "toy.safetensors")
    assert load(run)(video_files[0]) == load(toy.model, weights=toy.weights)(video_files[0])


def test_weights_with_another_digest_are_refused(toy: Toy, video_files: list[Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(toy.weights)
    tensors[min(tensors)] += 1
    save_file(tensors, tmp_path / "toy.safetensors")
    with pytest.raises(FeatureMismatchError, match="weights_sha256: trained on"):
        load(toy.model, weights=tmp_path / "toy.safetensors")(video_files[0])


def test_default_sampling_is_that_of_training(toy: Toy, tmp_path: Path) -> None:
    save_toy_captioner(tmp_path, weights=toy.weights, sampling=None)
    assert load(tmp_path).sampling.spec() == "uniform:4"  # the maximum number of frames in training


def test_features_of_unknown_backbones_are_refused(
    toy: Toy, video_files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_toy_captioner(tmp_path, weights=toy.weights)
    file = tmp_path / "captioner.json"
    text = file.read_text()
    for name, message in (
        ('"i3d"', "features of i3d, which capvid cannot make"),
        ("null", "does not say which"),
    ):
        file.write_text(text.replace('"backbone": "toy"', f'"backbone": {name}'))
        assert file.read_text() != text
        with pytest.raises(FeatureMismatchError, match=message):
            load(tmp_path)(video_files[0])


def test_revision_depends_on_the_weights(toy: Toy, tmp_path: Path) -> None:
    save_toy_captioner(tmp_path / "same", weights=toy.weights)
    save_toy_captioner(tmp_path / "other", weights=toy.weights, seed=2)
    assert revision(tmp_path / "same") == revision(toy.model) != revision(tmp_path / "other")


def test_invalid_options_are_refused(toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        load(tmp_path / "none")
    with pytest.raises(UsageError, match="3 captions"):
        load(toy.model, beam_size=2, num_captions=3)
    for invalid in ({"batch_size": 0}, {"workers": 0}):
        with pytest.raises(UsageError, match="at least 1"):
            load(toy.model, **invalid)
    assert isinstance(load(toy.model), CaptionPipeline)


def test_decoding_options_default_to_those_of_the_checkpoint(toy: Toy, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(toy.model, folder)
    config = json.loads((folder / "captioner.json").read_text())

    def with_decoding(decoding: object) -> Path:
        config["info"]["decoding"] = decoding
        (folder / "captioner.json").write_text(json.dumps(config))
        return folder

    assert load(toy.model).generator.options.specificity == 0
    searched = load(with_decoding({"beam_size": 3, "max_length": 30, "num_captions": 2}))
    assert searched.generator.options == DecodingOptions(beam_size=3, max_length=30)
    assert load(folder, beam_size=2, min_length=25).generator.options == DecodingOptions(
        beam_size=2, max_length=30, min_length=25
    )
    assert load(with_decoding({"specificity": 0.25})).generator.options == DecodingOptions(specificity=0.25)
    assert load(folder).settings["specificity"] == 0.25
    assert load(folder, specificity=0).generator.options.specificity == 0
    assert load(with_decoding({"length_penalty": 1.3})).generator.options == DecodingOptions(
        length_penalty=1.3
    )
    assert load(folder, length_penalty=0.5).generator.options.length_penalty == 0.5
    assert load(with_decoding({"no_repeat_words": True})).generator.options == DecodingOptions(
        no_repeat_words=True
    )
    assert load(folder, no_repeat_words=False).generator.options == DecodingOptions()
    for damaged in ({"specificity": -1}, {"specificity": "x"}, [0.5]):
        with pytest.raises(CheckpointError, match="its decoding options are damaged; train it again"):
            load(with_decoding(damaged))


def test_unsupported_specificity_is_refused_early(toy: Toy) -> None:
    checkpoint = load_checkpoint(toy.model)
    config = {**checkpoint.captioner.config.to_dict(), "standardise": False}
    with pytest.raises(UsageError, match=r"specificity = 0.1: expected a captioner .* standardise = true"):
        FeatureCaptionGenerator(
            replace(checkpoint, captioner=build("soft-attention", config)),
            [],
            device=torch.device("cpu"),
            options=DecodingOptions(specificity=0.1),
        )


@pytest.mark.slow
def test_calibrated_captioner_states_its_confidence(
    toy: Toy, video_files: list[Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(toy.model, folder)
    uncalibrated = list(load(folder).stream(video_files))
    assert {result.captions[0].confidence for result in uncalibrated} == {None}
    average = [0.125] * 1280
    calibration = {"average": average, "intercept": 1.0, "per_logprob": 0.5, "per_information": 0.25}
    calibration |= {"videos": 100, "right": 0.5, "flagged": 0.5, "right_flagged": 0.25, "right_others": 0.75}
    config = json.loads((folder / "captioner.json").read_text())
    config["info"]["confidence"] = calibration
    (folder / "captioner.json").write_text(json.dumps(config))
    checkpoint = load_checkpoint(folder)
    mask = torch.ones(1, 1, dtype=torch.bool)
    for result in load(folder).stream(video_files):
        caption = result.captions[0]
        state, word, average_logprob = checkpoint.captioner.encode(torch.tensor([[average]]), mask), 1, 0.0
        tokens = [*checkpoint.vocabulary.encode(caption.text.split()), 2]
        for following in tokens:  # word by word, given the average video
            logits, state, _ = checkpoint.captioner.step(torch.tensor([word]), state)
            average_logprob += float(logits.detach()[0].log_softmax(-1)[following])
            word = following
        odds = 1 + 0.5 * caption.logprob / len(tokens) + 0.25 * (caption.logprob - average_logprob)
        assert caption.confidence == pytest.approx(1 / (1 + np.exp(-odds)), abs=1e-4)


@pytest.mark.parametrize("segments", [None, 2])
def test_frame_arrays_are_captioned_like_their_video(
    toy: Toy, video_files: list[Path], segments: int | None
) -> None:
    with open_video(video_files[1]) as source:
        times = source.frame_times()
        frames = source.read(range(len(times)))
    with load(toy.model, segments=segments) as captioner:
        expected = captioner(video_files[1])
        assert captioner(frames, times) == captioner(torch.from_numpy(frames), times.tolist()) == expected
        assert isinstance(captioner(frames), str)


def test_bytes_files_and_lists_of_frames_are_captioned_like_their_video(
    toy: Toy, video_files: list[Path], tmp_path: Path
) -> None:
    with open_video(video_files[1]) as source:
        times = source.frame_times()
        frames = list(source.read(range(len(times))))
    images = [Image.fromarray(frame).convert("RGBA") for frame in frames]
    data = video_files[1].read_bytes()
    with load(toy.model) as captioner:
        expected = captioner(video_files[1])
        assert captioner(data) == captioner(bytearray(data)) == captioner(io.BytesIO(data)) == expected
        with video_files[1].open("rb") as file:
            assert captioner(file) == expected
        assert captioner(frames, times) == captioner(tuple(frames), times) == expected
        assert captioner(images, times) == captioner(list(map(torch.from_numpy, frames)), times) == expected
        (tmp_path / "text.mp4").write_text("no video")
        with (tmp_path / "text.mp4").open("rb") as file, pytest.raises(VideoError) as caught:
            captioner(file)
        assert str(caught.value).startswith(f"{tmp_path / 'text.mp4'}: ")
        with pytest.raises(VideoError, match=r"^bytes: "):
            captioner(b"no video")


def test_the_size_of_what_is_in_memory_is_limited(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    captioner = load(toy.model)
    frame = np.zeros((48, 64, 3), np.uint8)
    for frames, problem in (
        ([], "an empty list of frames; give RGB frames of one size"),
        ([frame, frame[:40]], "frame 1 of the list: 64 x 40 pixels, and the first has 64 x 48"),
        ([frame, frame / 255], r"frame 1 of the list: ndarray float64 \(48, 64, 3\)"),
        ([frame, "b.jpg"], "frame 1 of the list: str;"),
    ):
        with pytest.raises(UsageError, match=problem):
            captioner(frames)
    with pytest.raises(UsageError, match=r"^file: not open in binary mode"):
        captioner(io.StringIO("text"))
    monkeypatch.setenv("CAPVID_LIMIT_FRAME_PIXELS", "3000")
    monkeypatch.setenv("CAPVID_LIMIT_REMOTE_BYTES", "100")
    with pytest.raises(UsageError, match="frame 0 of the list: 64 x 48 pixels, more than the limit of 3000"):
        captioner([Image.fromarray(frame)])
    with pytest.raises(CapvidError, match="bytes: larger than the limit of 100 bytes"):
        captioner(bytes(101))


def test_invalid_call_arguments_are_refused(toy: Toy) -> None:
    captioner = load(toy.model)
    frames = np.zeros((4, 48, 64, 3), np.uint8)
    for invalid, shape in (
        (frames[0], r"uint8 \(48, 64, 3\)"),
        (frames / 255, "float64"),
        (7, "int"),
    ):
        with pytest.raises(UsageError, match=rf"expected a path, or frames \(T, H, W, 3\) .* got {shape}"):
            captioner(invalid)
    with pytest.raises(UsageError, match="expected 4 ascending times"):
        captioner(frames, [0, 1, 1])
    for times in ("abc", [0, 1, "x", 3], [0, 1, float("nan"), 3], [0, 2, 1, 3], 7):
        with pytest.raises(UsageError, match="expected 4 ascending times"):
            captioner(frames, times)


def test_workers_stop_with_the_captioner(toy: Toy, video_files: list[Path]) -> None:
    others = {child.pid for child in psutil.Process().children()}
    with load(toy.model, workers=1) as captioner:
        assert repr(captioner).startswith("CaptionPipeline('")
        captioner(video_files[0])
        workers = {child.pid for child in psutil.Process().children()} - others
        captioner(video_files[1])
        assert {child.pid for child in psutil.Process().children()} - others == workers
    assert not workers & {child.pid for child in psutil.Process().children() if child.is_running()}
    captioner(video_files[0])  # restarts the workers
    captioner.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_is_told_to_load_for_itself(toy: Toy, video_files: list[Path]) -> None:
    """PyTorch and the workers' threads do not survive a fork, and a call would wait for them forever."""
    with load(toy.model, workers=1) as captioner:
        expected = captioner(video_files[0])
        reader, writer = os.pipe()
        if not (child := os.fork()):
            errors = []
            for call in (captioner, captioner._pool.submit, lambda path: list(captioner.stream([path]))):
                try:
                    call(video_files[0])
                except RunError as error:
                    errors.append(str(error))
            captioner.close()
            os.write(writer, "\n".join(errors).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            errors = pipe.read().splitlines()
        os.waitpid(child, 0)
        assert len(errors) == 3 and "before this process was forked" in errors[0]
        assert "gunicorn: without --preload" in errors[0]
        workers = captioner._pool._workers
        assert all(worker._process is None or worker._process.poll() is None for worker in workers)
        assert captioner(video_files[0]) == expected
