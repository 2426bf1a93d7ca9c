"""Captioning by segments, with captioners of sentences and of paragraphs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pysrt
import pytest
import torch
import webvtt
from toy import Run, Toy, capvid, save_toy_captioner, toy, toy_files, video_files, write_images

from capvid.backbones.backbone import load_backbone
from capvid.captioners.base import build
from capvid.captioners.checkpoint import load_checkpoint, save_checkpoint
from capvid.captioners.layers import pad_segments
from capvid.decoding.beam_search import as_tokens, decode, decode_paragraphs
from capvid.decoding.decoding_options import DecodingOptions
from capvid.errors import DataError
from capvid.features.feature_file import save_features
from capvid.output.results import CaptionResult
from capvid.pipeline import load
from capvid.video.frame_sampling import UniformSampling
from capvid.video.readers import open_video

__all__ = ["capvid", "toy", "toy_files", "video_files"]


@pytest.fixture
def long_video(tmp_path: Path) -> Path:
    """Write a video of three scenes of 3, 4 and 5 seconds, at 10 frames per second."""
    generator, images = np.random.default_rng(5), []
    for seconds in (3, 4, 5):
        texture = generator.integers(0, 256, (6, 8, 3)).repeat(8, 0).repeat(8, 1).astype(np.uint8)
        images += [np.roll(texture, number // 4, 1) for number in range(10 * seconds)]
    return write_images(tmp_path / "long vidéo.mp4", images, bit_rate=4_000_000)


def save_mart(folder: Path, base: Path) -> Path:
    """Save a MART with random weights for the features, and with the words, of the captioner in ``base``."""
    checkpoint = load_checkpoint(base)
    torch.manual_seed(4)
    sizes = {
        "vocabulary_size": len(checkpoint.vocabulary),
        "feature_width": checkpoint.header.width,
        "hidden": 16,
        "heads": 2,
    }
    sizes |= {"layers": 2, "feed_forward": 16, "word_width": 8, "memory_length": 2, "dropout": 0.0}
    captioner = build("mart", {**sizes, "standardise": True})
    captioner.standardise.load_state_dict(checkpoint.captioner.standardise.state_dict())
    with torch.no_grad():
        for parameter in captioner.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    save_checkpoint(folder, captioner, checkpoint.vocabulary, checkpoint.header, {"max_frames": 4})
    return folder


@pytest.fixture(scope="session")
def mart(toy_files: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a MART for the toy's features."""
    return save_mart(tmp_path_factory.mktemp("mart"), toy_files.model)


def single_result(results: list[CaptionResult]) -> CaptionResult:
    (result,) = results
    assert result.error is None, result.error
    return result


def separate_features(toy: Toy, path: Path, spans: list[tuple[float, float]]) -> list[torch.Tensor]:
    """Return the features (T, D) of four frames of each segment, read separately."""
    backbone = load_backbone("toy", weights=toy.weights)
    features = []
    with open_video(path) as source:
        times = source.frame_times()
        for start, end in spans:
            indices = [n for n, time in enumerate(times) if start <= time < end]
            chosen = [indices[position] for position in UniformSampling(4).choose(times[indices])]
            features.append(torch.from_numpy(backbone(source.read(chosen))).half().float())
    return features


@pytest.mark.slow
def test_each_segment_is_captioned_like_a_video(toy: Toy, long_video: Path) -> None:
    result = single_result(
        list(load(toy.model, segments=3, beam_size=2, num_captions=2).stream([long_video]))
    )
    assert result.paragraph and result.duration == pytest.approx(12)
    spans = [(segment.start, segment.end) for segment in result.segments]
    assert [start for start, _ in spans] == pytest.approx([0, 4, 8]) and spans[-1][1] == result.duration
    checkpoint = load_checkpoint(toy.model)
    for segment, features in zip(result.segments, separate_features(toy, long_video, spans), strict=True):
        mask = torch.ones(1, len(features), dtype=torch.bool)
        options = DecodingOptions(beam_size=2, num_captions=2)
        (expected,) = decode(checkpoint.captioner, features.unsqueeze(0), mask, options)
        assert [c.text for c in segment.captions] == [
            " ".join(checkpoint.vocabulary.decode(h.tokens)) for h in expected
        ]
        assert segment.captions[0].logprob == pytest.approx(expected[0].logprob, abs=1e-2)
    best = [segment.captions[0] for segment in result.segments]
    (paragraph,) = result.captions
    assert paragraph.text == " ".join(f"{c.text[0].upper()}{c.text[1:]}." for c in best)
    assert paragraph.logprob == sum(c.logprob for c in best)
    assert paragraph.words == tuple(word for c in best for word in c.words)


@pytest.mark.slow
def test_paragraphs_carry_memory_between_segments(toy: Toy, mart: Path, long_video: Path) -> None:
    result = single_result(list(load(mart, segments=3, attention=True).stream([long_video])))
    spans = [(segment.start, segment.end) for segment in result.segments]
    clips = separate_features(toy, long_video, spans)
    checkpoint = load_checkpoint(mart)
    captioner = checkpoint.captioner
    (expected,) = decode_paragraphs(captioner, *pad_segments([clips]), DecodingOptions())
    carried, previous = None, None
    for segment, clip, (best, *_) in zip(result.segments, clips, expected, strict=True):
        caption = segment.captions[0]
        assert caption.text == " ".join(checkpoint.vocabulary.decode(best.tokens))
        assert caption.logprob == pytest.approx(best.logprob, abs=1e-2)
        assert caption.traces is not None
        assert caption.traces["attention"].shape == (len(caption.words) + 1, 4)
        assert caption.traces["memory"].shape == (len(caption.words) + 1, 2)
        with torch.no_grad():
            state = captioner.encode(clip.unsqueeze(0), torch.ones(1, 4, dtype=torch.bool), carried)
            carried = captioner.remember(state, as_tokens([best.tokens], torch.device("cpu")))
        for layer, change in enumerate(segment.memory_change):
            old = state.video[f"memory.{layer}"]
            new = carried[f"memory.{layer}"]
            expected_change = ((new - old) ** 2).sum().sqrt() / (old**2).sum().sqrt()
            assert change == pytest.approx(expected_change.item(), rel=1e-2)
            if previous is not None:
                assert torch.equal(old, previous[f"memory.{layer}"])
        assert len(segment.memory_change) == 2
        previous = carried


@pytest.mark.slow
def test_paragraph_captioner_segments_automatically(long_video: Path, tmp_path: Path) -> None:
    save_toy_captioner(tmp_path / "base", backbone="colour-grid")  # whose features tell the scenes apart
    mart = save_mart(tmp_path / "mart", tmp_path / "base")
    pipeline = load(mart)
    assert pipeline.settings["segments"] == "auto"
    result = single_result(list(pipeline.stream([long_video])))
    spans = [(segment.start, segment.end) for segment in result.segments]
    assert spans[0][0] == 0 and spans[-1][1] == result.duration
    assert all(end == start for (_, end), (start, _) in pairwise(spans))
    assert any(abs(start - 7) < 0.3 for start, _ in spans)  # start of the last scene
    assert len(single_result(list(load(mart, segments=1).stream([long_video]))).segments) == 1


@pytest.mark.slow
def test_batches_workers_and_order_do_not_change_captions(
    toy: Toy, mart: Path, long_video: Path, video_files: list[Path]
) -> None:
    videos = [video_files[4], long_video, video_files[3], video_files[2]]
    for model in (toy.model, mart):
        results = list(load(model, segments=3, batch_size=1, workers=1).stream(videos))
        reversed_results = list(load(model, segments=3, batch_size=8, workers=2).stream(reversed(videos)))
        for result, other in zip(results, reversed(reversed_results), strict=True):
            assert result.path == other.path
            for segment, other_segment in zip(result.segments, other.segments, strict=True):
                assert segment.captions == other_segment.captions  # including bit-identical log-probabilities
                assert segment.memory_change == other_segment.memory_change


def test_features_are_segmented_by_their_times(toy: Toy, long_video: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    from capvid.features.extraction import extract
    from capvid.video.frame_sampling import RateSampling

    backbones = [load_backbone("toy", weights=toy.weights)]
    (extracted,) = extract([long_video], backbones, RateSampling(2))
    assert extracted.features is not None
    features = replace(extracted.features, header=replace(extracted.features.header, sampling=None))
    save_features(tmp_path / "v.safetensors", features)
    result = single_result(list(load(toy.model, segments=2).stream([tmp_path / "v.safetensors"])))
    assert [segment.frames.tolist() for segment in result.segments] == [[1, 4, 7, 10], [13, 16, 19, 22]]
    save_features(tmp_path / "w.safetensors", replace(features, times=None))
    (failed,) = load(toy.model, segments=2).stream([tmp_path / "w.safetensors"])
    assert isinstance(failed.error, DataError) and "segments need times" in str(failed.error)


@pytest.mark.slow
def test_outputs_contain_the_segment_times(
    capvid: Run, toy: Toy, long_video: Path, video_files: list[Path], tmp_path: Path
) -> None:
    videos = [long_video, video_files[4]]
    for form in ("srt", "vtt", "json", "csv", "txt"):
        whole = ["--max-cue", 0, "--line-width", 0] if form in ("srt", "vtt") else []
        code, _, err = capvid("caption", *videos, "--model", toy.model, "--segments", 3, "--format", form,
                              "--output-dir", tmp_path / form, *whole)  # fmt: skip
        assert (code, err) == (0, "2 captioned\n")
    for video in videos:
        record = json.loads((tmp_path / "json" / f"{video.stem}.json").read_text("utf-8"))
        assert record["settings"]["segments"] == "3"
        segments = record["segments"]
        assert segments[0]["start"] == 0 and segments[-1]["end"] == record["duration"]
        assert all(first["end"] == second["start"] for first, second in pairwise(segments))
        expected = [(round(1000 * s["start"]), round(1000 * s["end"]), s["caption"]) for s in segments]
        srt = pysrt.open(str(tmp_path / "srt" / f"{video.stem}.srt"), encoding="utf-8")
        assert [(cue.start.ordinal, cue.end.ordinal, cue.text) for cue in srt] == expected
        vtt = webvtt.read(str(tmp_path / "vtt" / f"{video.stem}.vtt"))
        cues = [(c.start_in_seconds, c.end_in_seconds, c.text) for c in vtt]
        assert [c[2] for c in cues] == [w[2] for w in expected] and len(cues) == 3
        rows = (tmp_path / "csv" / f"{video.stem}.csv").read_text("utf-8").splitlines()[1:]
        assert len(rows) == 3 and f",{segments[1]['start']:.3f},{segments[1]['end']:.3f}," in rows[1]
        text = (tmp_path / "txt" / f"{video.stem}.txt").read_text("utf-8")
        assert text == record["captions"][0]["text"] + "\n"


@pytest.mark.slow
def test_changed_segments_recaption_the_videos(
    capvid: Run, toy: Toy, video_files: list[Path], tmp_path: Path
) -> None:
    run = ("caption", *video_files[3:], "--model", toy.model, "--output-dir", tmp_path / "out")
    table = tmp_path / "segments.csv"
    table.write_text("start,end\n0,0.5\n0.5,1\n")
    assert capvid(*run, "--segments", table)[2] == "2 captioned\n"
    assert capvid(*run, "--segments", table)[2] == "0 captioned, 2 skipped (already done)\n"
    table.write_text("start,end\n0,0.4\n0.4,1\n")
    assert capvid(*run, "--segments", table)[2] == "2 captioned\n"
    assert capvid(*run)[2] == "2 captioned\n"


def test_invalid_segments_print_one_error_line(
    capvid: Run, toy: Toy, video_files: list[Path], tmp_path: Path
) -> None:
    for text, message in (
        ("0", "0 segments cannot be made"),
        ("none.csv", "none.csv: no such file of segments"),
    ):
        code, out, err = capvid("caption", video_files[0], "--model", toy.model, "--segments", text)
        assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    table = tmp_path / "segments.csv"
    table.write_text("start,end\n0,0.1\n60,90\n")
    code, out, err = capvid("caption", video_files[0], "--model", toy.model, "--segments", table)
    assert (code, out) == (1, "") and "a segment from 60 to 90 s" in err and err.count("\n") == 1
    table.write_text("start,end\n0,x\n")
    code, out, err = capvid("caption", video_files[0], "--model", toy.model, "--segments", table)
    assert (code, out) == (1, "") and "line 2: no start and end" in err and err.count("\n") == 1


def test_a_prefix_belongs_to_the_caption_of_the_video(toy: Toy, long_video: Path) -> None:
    (plain,) = load(toy.model, segments=2).stream([long_video])
    (affixed,) = load(toy.model, segments=2, prefix="film: ", suffix=" (end)").stream([long_video])
    assert affixed.captions[0].text == f"film: {plain.captions[0].text} (end)"
    assert [s.captions[0].text for s in affixed.segments] == [s.captions[0].text for s in plain.segments]
    (whole,) = load(toy.model, prefix="film: ").stream([long_video])
    assert whole.segments[0].captions == whole.captions and whole.captions[0].text.startswith("film: ")
