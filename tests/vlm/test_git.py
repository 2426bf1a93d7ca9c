"""GIT in the form of transformers: from a folder and from the Hub, against transformers' own captions."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
from git_repository import FRAMES, PREPROCESS, SIDE, Reference, respelled, save_git
from hub_server import COMMIT, FakeHub, environment
from toy import write_video

import capvid
from capvid.backbones.catalog import StreamHeader
from capvid.backbones.preprocessing import prepare
from capvid.errors import CapvidError, CheckpointError, FeatureMismatchError, UsageError
from capvid.features.feature_file import FeatureHeader, Features, save_features
from capvid.output.results import CaptionResult
from capvid.vlm.git import read_preprocess

NAME = "anna/git-toy"
NOWHERE = "http://127.0.0.1:9"
SAY = """
import json, sys, warnings
import capvid
from capvid.errors import CapvidError
clip, *names = sys.argv[1:]
for name in names:
    try:
        pipeline = capvid.load(name, device="cpu", workers=1)
        print(json.dumps({"text": pipeline(clip), "model": pipeline.model}))
    except CapvidError as error:
        print(json.dumps({"error": str(error), "kind": error.kind}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_git(tmp_path_factory.mktemp("git") / "a folder")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("clips")
    lengths = (13, 17, 23, 28)  # no frame is as far from a middle as the next one
    return [write_video(place / f"{n}.mp4", seed=n, frames=n, size=(96, 64)) for n in lengths]


def results(model: object, paths: list[Path], **options: Any) -> list[CaptionResult]:
    found = list(capvid.load(model, device="cpu", **options).stream(paths))
    for result in found:
        if result.error is not None:
            raise result.error
    return found


def ours_of(pipeline: capvid.CaptionPipeline, tokens: list[int]) -> list[int]:
    """Numbers of the tokenizer in capvid's order."""
    order = pipeline.generator.checkpoint.captioner.order.tolist()
    return [order.index(token) for token in tokens]


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 4])
def test_captions_are_those_of_transformers(
    folder: Path, reference: Reference, clips: list[Path], beams: int
) -> None:
    pipeline = capvid.load(folder, device="cpu", beam_size=beams, max_length=40, attention=True)
    said = list(pipeline.stream(clips))
    for clip, result in zip(clips, said, strict=True):
        pixels = reference.pixels(reference.spread(reference.frames(clip)))
        tokens = reference.generate(pixels, beams=beams)
        (caption,) = result.captions
        assert caption.text == reference.text(tokens)
        logprobs = reference.logprobs(pixels, tokens)
        assert caption.logprob == pytest.approx(sum(logprobs), abs=1e-4)
        assert [word.word for word in caption.words] == caption.text.split()
        assert sum(word.logprob for word in caption.words) == pytest.approx(sum(logprobs[:-1]), abs=1e-4)
        assert caption.traces is not None
        expected = reference.attention(pixels, tokens)
        _, words = pipeline.generator.checkpoint.vocabulary.sentence(ours_of(pipeline, tokens[1:-1]))
        rows = [expected[places].mean(0) for _, places in words]
        np.testing.assert_allclose(caption.traces["attention"], [*rows, expected[-1]], atol=1e-5)
    assert len({result.captions[0].text for result in said}) > 1


def test_pieces_become_words(folder: Path) -> None:
    vocabulary = capvid.load(folder, device="cpu").generator.checkpoint.vocabulary
    pieces = ["a", "run", "##ning", "dog", "'", "s", "ball", "##s", "."]
    text, words = vocabulary.sentence(vocabulary.encode(pieces))
    assert text.replace(" ", "") == "arunningdog'sballs."
    assert [word for word, _ in words] == text.split()
    assert ("running", [1, 2]) in words
    assert [place for _, places in words for place in places] == list(range(len(pieces)))
    assert vocabulary.sentence([]) == ("", [])
    assert vocabulary.sentence(vocabulary.encode(["##ing", "##s"])) == ("##ings", [("##ings", [0, 1])])


@pytest.mark.parametrize("size", [(32, 32), (320, 180), (97, 131), (40, 33)])
def test_pixels_are_those_of_the_image_processor(folder: Path, size: tuple[int, int]) -> None:
    """To one of 255 levels: where only the centre is resized, or by torchvision, rounding differs."""
    from transformers import VideoMAEImageProcessor

    frames = np.random.default_rng(0).integers(0, 256, (2, *size[::-1], 3), np.uint8)
    processor = VideoMAEImageProcessor.from_pretrained(folder)
    theirs = processor(list(frames), return_tensors="np").pixel_values[0]  # (2, 3, 32, 32)
    ours = prepare(frames, read_preprocess(folder)).transpose(0, 3, 1, 2)
    levels = (theirs * 0.5 + 0.5) * 255
    assert np.abs(levels - ours).max() < 1.01
    assert np.abs(levels - ours).mean() < 0.1
    whole = (Reference.pixels(frames).numpy()[0] * 0.5 + 0.5) * 255
    assert np.abs(whole - ours).max() < 1.01
    assert np.abs(whole - ours).mean() < 0.1


def test_batches_do_not_change_what_is_said(folder: Path, clips: list[Path]) -> None:
    options = {"beam_size": 3, "num_captions": 3}
    together = results(folder, clips, batch_size=4, **options)
    alone = [result for clip in clips for result in results(folder, [clip], batch_size=1, **options)]
    assert [result.captions for result in together] == [result.captions for result in alone]
    assert all(len({caption.text for caption in result.captions}) == 3 for result in together)


@pytest.mark.slow
def test_samples_depend_on_the_seed_alone(folder: Path, clips: list[Path]) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "top_p": 0.95, "num_captions": 3}
    first, second = (
        [
            {caption.text for caption in result.captions}
            for result in results(folder, paths, seed=1, **options)
        ]
        for paths in (clips, clips[::-1])
    )
    assert first == second[::-1]
    (other,) = results(folder, clips[:1], seed=2, **options)
    assert {caption.text for caption in other.captions} != first[0]


def test_lengths_and_repetition(folder: Path, clips: list[Path]) -> None:
    for result in results(folder, clips, min_length=6, max_length=8, no_repeat_ngram=1):
        words = result.captions[0].text.replace(".", " . ").split()
        assert len(words) <= 8
        assert len(set(words)) == len(words)
    with pytest.raises(UsageError, match="63 words at most"):
        capvid.load(folder, device="cpu", max_length=64)
    with pytest.raises(UsageError, match="--weights"):
        capvid.load(folder, device="cpu", weights=folder)


@pytest.mark.slow
def test_segments_and_short_videos(
    folder: Path, reference: Reference, clips: list[Path], tmp_path: Path
) -> None:
    (result,) = results(folder, clips[3:], segments=2, beam_size=1, max_length=40, thumbnails=True)
    frames = reference.frames(clips[3])
    assert len(result.segments) == 2
    assert result.times is not None and len(result.thumbnails) == len(result.times)
    for segment in result.segments:
        seen = [frames[round(float(result.times[place]) * 10)] for place in segment.frames]  # 10 a second
        assert len(seen) == FRAMES
        pixels = reference.pixels(seen)
        tokens = reference.generate(pixels, beams=1)
        assert segment.captions[0].text == reference.text(tokens)
        assert segment.captions[0].logprob == pytest.approx(sum(reference.logprobs(pixels, tokens)), abs=1e-4)

    short = write_video(tmp_path / "short.mp4", seed=9, frames=3, size=(96, 64))
    (result,) = results(folder, [short], beam_size=1, max_length=40, attention=True)
    pixels = reference.pixels(reference.spread(reference.frames(short)))  # each frame twice
    tokens = reference.generate(pixels, beams=1)
    (caption,) = result.captions
    assert caption.text == reference.text(tokens)
    assert caption.traces is not None
    expected = reference.attention(pixels, tokens).reshape(len(tokens) - 1, 3, 2).sum(-1)
    np.testing.assert_allclose(caption.traces["attention"][-1], expected[-1], atol=1e-5)


def test_features_of_others_are_refused(folder: Path, clips: list[Path], tmp_path: Path) -> None:
    header = FeatureHeader(
        streams=(StreamHeader(backbone="colour-grid", layer="grid", width=192),),
        sampling="uniform:6",
        reader=None,
        dtype="float16",
        capvid_version="0",
    )
    features = Features(header=header, streams=(np.zeros((6, 192), np.float32),), times=None, video="clip")
    path = tmp_path / "clip.safetensors"
    save_features(path, features)
    pipeline = capvid.load(folder, device="cpu")
    refused, said = pipeline.stream([path, clips[0]])
    assert said.error is None
    assert isinstance(refused.error, FeatureMismatchError)
    assert "git takes videos" in str(refused.error) and "give the video" in str(refused.error)
    with pytest.raises(FeatureMismatchError, match="git takes videos"):
        pipeline.caption_features([features])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"do_resize": False}, "do_resize is off"),
        ({"resample": 0}, "knows"),
        ({"size": {"height": 64, "width": 64}}, "size"),
        ({"crop_size": {"height": 16, "width": 16}}, "16 x 16"),
        ({"image_mean": 0.5}, "knows"),
    ],
)
def test_preprocessing_that_is_not_understood(
    folder: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "preprocessor_config.json").write_text(json.dumps(PREPROCESS | change))
    with pytest.raises(CapvidError, match=message):
        capvid.load(other, device="cpu")


def test_ways_of_writing_the_same_preprocessing(folder: Path, tmp_path: Path) -> None:
    expected = read_preprocess(folder)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps(PREPROCESS | {"size": SIDE, "crop_size": SIDE})
    )
    assert read_preprocess(tmp_path) == expected
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": PREPROCESS}))
    assert read_preprocess(tmp_path) == expected


def say(*names: str, clip: Path, home: Path, endpoint: str, offline: bool = False) -> list[dict[str, str]]:
    """Caption by each model in one process of its own."""
    done = forked.run(SAY, [clip, *names], env=environment(home, endpoint, offline=offline))
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("unpickled",))


def repositories(folder: Path, place: Path) -> dict[str, dict[str, bytes]]:
    """Files of repositories, good and bad, by name."""
    import torch
    from safetensors.torch import load_file

    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    weights = files.pop("model.safetensors")
    tensors = load_file(folder / "model.safetensors")
    torch.save(respelled(tensors), place / "whole.bin")
    torch.save(dict(list(tensors.items())[:-3]), place / "part.bin")
    whole, part = ((place / name).read_bytes() for name in ("whole.bin", "part.bin"))
    llama = json.dumps({"model_type": "llama", "auto_map": {"AutoModel": "modeling.Evil"}}).encode()
    odd = json.dumps(json.loads(files["config.json"]) | {"hidden_size": 7}).encode()
    both = {"model.safetensors": weights, "pytorch_model.bin": b"not asked for", "modeling.py": b"exit()"}
    return {
        NAME: files | both,
        "anna/bin": files | {"pytorch_model.bin": whole},
        "anna/llama": {"config.json": llama},
        "anna/plain": {"config.json": b"[1]"},
        "anna/nothing": {"README.md": b"nothing"},
        "anna/cut": files | {"model.safetensors": weights[:-9]},
        "anna/part": files | {"pytorch_model.bin": part},
        "anna/evil": files | {"pytorch_model.bin": pickle.dumps({"a": Evil()}, protocol=2)},
        "anna/none": files,
        "anna/odd": files | {"model.safetensors": weights, "config.json": odd},
    }


@pytest.fixture(scope="module")
def hub(
    folder: Path, clips: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[FakeHub, Path, dict[str, dict[str, str]]]]:
    """The Hub after each repository was asked for, the cache, and what was said by each."""
    server, home = FakeHub(), tmp_path_factory.mktemp("home")
    (home / "hub").mkdir()
    (home / "hub" / "version.txt").write_text("1")  # else old transformers says that it moves files
    known = repositories(folder, home)
    for name, files in known.items():
        for path, content in files.items():
            server.put(content, path, repository=name)
    said = say(*known, clip=clips[0], home=home, endpoint=server.url)
    yield server, home, dict(zip(known, said, strict=True))
    server.close()


@pytest.mark.slow
def test_from_the_hub(
    hub: tuple[FakeHub, Path, dict[str, dict[str, str]]], folder: Path, clips: list[Path]
) -> None:
    server, home, said = hub
    text = results(folder, clips[:1])[0].captions[0].text
    right = {"text": text, "model": f"{NAME}@{COMMIT[:12]}"}
    assert said[NAME] == right
    assert said["anna/bin"] == {"text": text, "model": f"anna/bin@{COMMIT[:12]}"}
    fetched = {request.rpartition("/")[2] for request in server.requests if f"GET /storage/{NAME}" in request}
    assert fetched == {path.name for path in folder.iterdir()}
    records = json.loads((home / "capvid-digests.json").read_text())
    assert records[f"{NAME}@main"] == COMMIT
    assert f"{NAME}@{COMMIT}/model.safetensors" in records

    other = "microsoft/git-base-vatex"
    with ThreadPoolExecutor() as threads:
        there = threads.submit(say, other, clip=clips[0], home=home, endpoint=NOWHERE)
        names = (NAME, f"{NAME}@{COMMIT}", other)
        again = say(*names, clip=clips[0], home=home, endpoint=NOWHERE, offline=True)
        (away,) = there.result()
    assert again[:2] == [right, right]
    assert f"{other} at main: config.json is not in the cache" in again[2]["error"]
    assert f"`hf download {other}`" in again[2]["error"]
    assert f"config.json cannot be downloaded from {NOWHERE}" in away["error"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "anna/llama",
            f"at {COMMIT[:8]}: a model of the type llama, which capvid cannot use; give a captioner",
        ),
        (
            "anna/plain",
            f"at {COMMIT[:8]}: no captioner; give a captioner that capvid trained, a GIT",
        ),
        (
            "anna/nothing",
            "at main: no captioner (neither captioner.json nor config.json is there)",
        ),
        ("anna/cut", "model.safetensors: not a readable safetensors file"),
        ("anna/part", "pytorch_model.bin: not the weights of anna/part (3 tensors missing"),
        ("anna/evil", "pytorch_model.bin: holds more than tensors"),
        ("anna/none", "has no such file (pytorch_model.bin)"),
        ("anna/odd", "config.json: no such network"),
    ],
)
def test_repositories_that_cannot_be_used(
    hub: tuple[FakeHub, Path, dict[str, dict[str, str]]], name: str, message: str
) -> None:
    answer = hub[2][name]
    assert message in answer["error"] and "\n" not in answer["error"]
    assert answer["kind"] in ("hub", "weights", "checkpoint")


@pytest.mark.slow
def test_other_captioners_do_not_load_transformers() -> None:
    code = "import sys, capvid; capvid.load('kv-memory', device='cpu'); print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_folders_of_other_models_name_their_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="a model of the type llama, which capvid cannot use"):
        capvid.load(tmp_path)
    (tmp_path / "config.json").write_text(f'{{"model_type": "{1000 * "q"}"}}')
    with pytest.raises(CheckpointError, match="no captioner in this folder"):
        capvid.load(tmp_path)
