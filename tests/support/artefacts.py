"""The kinds of files that capvid reads: how to write, mutate and read each of them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mutations import (
    Mutation,
    mutate_bytes,
    mutate_json,
    mutate_lines,
    mutate_safetensors,
    mutate_tar,
    mutate_toml,
)

WORDS = ("a", "man", "woman", "dog", "is", "running", "on", "park", "ball")


@dataclass(frozen=True)
class Artefact:
    """One kind of file.

    Attributes:
        write: writes valid files into an empty folder and returns the one to mutate.
        mutate: changes the content of that file.
        read: reads it the way the product does; it may raise only errors meant for users.
        mutants: number of mutants per run.
        splice: name of the artefact whose bytes may be joined with this one's.
    """

    write: Callable[[Path], Path]
    mutate: Mutation
    read: Callable[[Path], object]
    mutants: int = 100
    splice: str = ""


def _content(name: str, content: str | bytes, folder: Path) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def _text(name: str, content: str | bytes) -> Callable[[Path], Path]:
    return partial(_content, name, content)


# Videos


def _video(name: str, codec: str, pixels: str, folder: Path) -> Path:
    import av

    path = folder / name
    noise = np.random.default_rng(0).integers(0, 200, (48, 64, 3))
    with av.open(str(path), "w", options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream(codec, rate=10, options={"g": "4"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, pixels
        for number in range(6):
            frame = av.VideoFrame.from_ndarray((noise + 9 * number).astype(np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def read_video(path: Path) -> None:
    """Decode a video as ``caption`` does, whole and in segments, and as ``extract --sampling fps:2`` does."""
    from capvid.backbones.catalog import backbone_entry
    from capvid.features.prefetch import View, decode_video, read_timeline
    from capvid.video.frame_sampling import RateSampling, UniformSampling
    from capvid.video.segmentation import AutoSegments

    views = [View(preprocess=backbone_entry("colour-grid").preprocess)]
    times, duration, _ = read_timeline(path, "auto")
    AutoSegments().choose(path, times, duration, UniformSampling(4))
    decode_video(path, UniformSampling(4), views, "auto")
    decode_video(path, RateSampling(2.0), views, "auto", True)


# Archives


def _zip(folder: Path) -> Path:
    from PIL import Image

    path = folder / "frames.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for number, suffix in enumerate(("jpg", "jpg", "png", "webp")):
            stream = io.BytesIO()
            noise = np.random.default_rng(number).integers(0, 255, (24, 32, 3), dtype=np.uint8)
            Image.fromarray(noise).save(stream, {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}[suffix])
            kind = zipfile.ZIP_DEFLATED if number % 2 else zipfile.ZIP_STORED
            member = zipfile.ZipInfo(f"video{number // 2}/{number}.{suffix}")  # has a fixed date
            archive.writestr(member, stream.getvalue(), kind)
    return path


def read_zip(path: Path) -> None:
    """Read every folder of images in a zip file; one that fails must not hide the next."""
    from capvid.video.image_reader import image_folders

    _read_each(read_video, image_folders(path))


def _tar(folder: Path) -> Path:
    path = folder / "shard.tar"
    video = _video("clip.mp4", "mpeg4", "yuv420p", folder)
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("a/one.mp4", "b/" + "é" * 60 + ".mp4"):  # the second needs an extended header
            member = tarfile.TarInfo(name)
            member.size = video.stat().st_size
            with video.open("rb") as stream:
                archive.addfile(member, stream)
    video.unlink()
    return path


def read_tar(path: Path) -> None:
    """Decode the first members of a tar archive."""
    from capvid.video.input_lists import members

    _read_each(read_video, [member for _, member in zip(range(3), members(path), strict=False)])


def _read_each(read: Callable[[Any], None], inputs: list[Any]) -> None:
    from capvid.errors import CapvidError

    for item in inputs:
        try:
            read(item)
        except CapvidError as error:
            if error.kind == "internal":
                raise


# Features and captioners


def _header(*, maps: bool = False, width: int = 6) -> Any:
    from capvid.backbones.catalog import StreamHeader
    from capvid.features.feature_file import FeatureHeader

    stream = StreamHeader(backbone="colour-grid", layer="grid", width=width, locations=4 if maps else None)
    return FeatureHeader(
        streams=(stream,), sampling="uniform:4", reader="pyav", dtype="float32", capvid_version="0"
    )


def _features(folder: Path, *, maps: bool = False) -> Path:
    from capvid.features.feature_file import Features, save_features

    shape = (5, 4, 6) if maps else (5, 6)
    values = np.random.default_rng(0).random(shape, dtype=np.float32)
    path = folder / "clip.safetensors"
    save_features(
        path,
        Features(
            header=_header(maps=maps), streams=(values,), times=np.arange(5.0), video="clip", duration=5.0
        ),
    )
    return path


def read_features(path: Path) -> None:
    """Read a feature file on its own, and as part of a dataset."""
    from capvid.features.feature_file import load_features, load_header, load_times
    from capvid.features.feature_store import FeatureStore
    from capvid.video.frame_sampling import UniformSampling
    from capvid.video.segmentation import AutoSegments

    def one(read: Callable[[Any], Any]) -> None:
        features = read(path)
        if hasattr(features, "concatenated"):
            features.concatenated()
            features.header.to_json()
            if features.times is not None and features.seconds is not None:
                AutoSegments().choose(path, features.times, features.seconds, UniformSampling(4))

    def from_store(path: Path) -> Any:
        store = FeatureStore([path])
        return [(store.length(name), store.times(name), store.get(name)) for name in store.ids()]

    _read_each(one, [load_header, load_times, from_store])
    one(load_features)


def _packed(folder: Path) -> Path:
    from safetensors.numpy import save_file

    generator = np.random.default_rng(0)
    path = folder / "packed.safetensors"
    tensors = {f"v{n}": generator.random((3, 6), dtype=np.float32) for n in range(3)}
    save_file(tensors, path, metadata={"sampling": "uniform:3"})
    return path


def read_packed(path: Path) -> None:
    """Read every video of a packed feature file."""
    from capvid.features.feature_store import FeatureStore

    store = FeatureStore([path])
    for name in store.ids():
        store.length(name), store.times(name), store.get(name)


_LSTM: dict[str, Any] = {"embedding": 4, "hidden": 6, "attention": 3}
_STACK: dict[str, Any] = {"hidden": 6, "heads": 2, "layers": 2, "feed_forward": 5, "word_width": 3}
CAPTIONERS: dict[str, dict[str, Any]] = {
    "soft-attention": {**_LSTM, "output": 7},
    "m3": {**_LSTM, "output": 7, "memory_rows": 4, "memory_width": 3},
    "kv-memory": {**_LSTM, "encoder_hidden": 3},
    "ham": {**_LSTM, "memory_width": 4, "bottleneck": 3, "locations": 4},
    "dense-lstm": {**_LSTM, "projection": 4, "encoder": 3},
    "mart": {**_STACK, "memory_length": 2},
    "vanilla-transformer": _STACK,
    "transformer-xl": _STACK,
}


def _captioner(name: str, file: str, folder: Path) -> Path:
    import torch

    from capvid.captioners.base import build
    from capvid.captioners.checkpoint import save_checkpoint
    from capvid.text.vocabulary import Vocabulary
    from capvid.training.recipe import load_recipe

    _features(folder, maps=name == "ham")
    vocabulary = Vocabulary(WORDS)
    torch.manual_seed(0)
    sizes = {"vocabulary_size": len(vocabulary), "feature_width": 6, **CAPTIONERS[name]}
    info = load_recipe(f"{name}-small").for_captioning()  # type: ignore[union-attr]
    save_checkpoint(folder, build(name, sizes), vocabulary, _header(maps=name == "ham"), info)
    return folder / file


def read_captioner(path: Path) -> None:
    """Load a captioner and caption a feature file with it."""
    from capvid.output.results import make_record
    from capvid.pipeline import load

    pipeline = load(path.parent, device="cpu", workers=1)
    (result,) = pipeline.stream([path.parent / "clip.safetensors"])
    if result.error is not None:
        raise result.error
    json.dumps(make_record(result, pipeline.settings)).encode()


def _checkpoint(folder: Path) -> Path:
    import torch

    torch.save({"state_dict": {"conv1.weight": torch.zeros(4, 3, 3, 3)}, "epoch": 3}, folder / "weights.pth")
    return folder / "weights.pth"


def read_weights(path: Path) -> None:
    """Read the tensors of a downloaded checkpoint."""
    from capvid.utils.tensor_files import read_tensors

    read_tensors(path)


# Outputs of earlier runs


def _manifest(folder: Path) -> Path:
    from capvid.output.manifest import Manifest
    from capvid.output.results import CaptionResult
    from capvid.utils.files import MANIFEST

    with Manifest(folder / MANIFEST, model="m3@0", settings={"beam_size": 5}) as manifest:
        for name in ("a.mp4", "b.mp4", "é.mp4"):
            clip = _content(name, "no video", folder)
            _content(f"{name}.json", "{}", folder)
            result = CaptionResult(path=clip, model="m3@0", status="ok", captions=(), error=None)
            manifest.note(result, f"{name}.json")
    return folder / MANIFEST


def read_manifest(path: Path) -> None:
    """Continue a run: query finished videos, note another result, and rewrite the manifest."""
    from capvid.output.manifest import Manifest
    from capvid.output.results import CaptionResult

    with Manifest(path, model="m3@0", settings={"beam_size": 5}) as manifest:
        for name in ("a.mp4", "b.mp4", "é.mp4", "new.mp4"):
            manifest.is_done(path.parent / name, f"{name}.json")
        new = CaptionResult(path=path.parent / "new.mp4", model="m3@0", status="ok", captions=(), error=None)
        manifest.note(new, "new.mp4.json")


def _rows(*, features: Any) -> list[Any]:
    from capvid.output.shards import Row

    word = {"word": "a", "logprob": -0.5, "attention": [0.25, 0.75]}
    caption = {"text": "a", "logprob": -1.5, "mean_logprob": -0.75, "confidence": 0.25, "words": [word]}
    rows = []
    for name, ok in (("a.mp4", True), ("é.mp4", True), ("b.mp4", False)):
        record: dict[str, Any] = {
            "schema_version": 1,
            "video": name,
            "status": "ok" if ok else "error",
            "duration": 1.25 if ok else None,
            "error": None if ok else {"kind": "missing", "message": f"{name}: missing", "remedy": ""},
        }
        if features is None:
            record |= {"model": {"name": "m3", "revision": None}, "settings": {"beam_size": 5}}
            record["captions"] = [{**caption, "times": [0.0, 0.5]}] if ok else []
        error = None if ok else "missing"
        rows.append(Row(video=name, key=name, record=record, features=features if ok else None, error=error))
    return rows


def _shard_folder(form: str, folder: Path) -> Any:
    from capvid.output.shards import SHARD_FORMATS, ShardFolder

    head = {"model": "m3@0", "settings": {"a": 1}}
    shard_format = SHARD_FORMATS[form.replace("-", "/")]()
    return ShardFolder(str(folder), kind=form.partition("-")[0], form=shard_format, head=head)


def _shards(form: str, suffix: str, folder: Path) -> Path:
    features = None
    if form.startswith("features"):
        from capvid.features.feature_file import load_features

        file = _features(folder)
        features = load_features(file)
        file.unlink()
    shards = _shard_folder(form, folder)
    shards.begin(overwrite=False)
    name = shards.write(_rows(features=features))
    return folder / (suffix if suffix.startswith("capvid") else name + suffix)


def read_shards(form: str, path: Path) -> None:
    """Continue a sharded run: read the finished videos, and drop the failed ones."""
    shards = _shard_folder(form, path.parent)
    shards.begin(overwrite=False)
    shards.done()
    shards.done(retry_failed=True)
    shards.done()


# Texts


def read_recipe(path: Path) -> None:
    """Load a recipe and serialise it, as a training run does."""
    from capvid.training.recipe import load_recipe

    recipe = load_recipe(str(path))
    json.dumps(recipe.to_dict())


def read_config(path: Path) -> None:
    """Read option defaults."""

    from capvid.cli._options import read_config
    from capvid.cli.app import root_command

    read_config(path, root_command())


def read_segments(path: Path) -> None:
    """Read segments and apply them to two videos."""
    from capvid.video.frame_sampling import UniformSampling
    from capvid.video.segmentation import read_segments

    segments = read_segments(path)
    times = np.arange(40) / 4
    for name in ("a.mp4", "b.mp4"):
        segments.choose(Path(name), times, 10.0, UniformSampling(4))
    segments.spans(Path("a.mp4"), np.zeros((40, 3), np.float32), times, 10.0)


def read_list(path: Path) -> None:
    """Read a list of inputs."""
    from capvid.video.input_lists import read_list

    for entry in read_list(path):
        str(entry)


def read_dataset(dataset: str, path: Path) -> None:
    """Read a dataset, strictly and leaving out the rows that cannot be used."""
    from capvid.datasets.dataset import load_data

    target = path if dataset in ("jsonl", "tsv", "coco") else path.parent
    load_data([f"{dataset}:{target}"], skip_bad=True, keep_going=True)
    load_data([f"{dataset}:{target}"])


def read_references(path: Path) -> None:
    """Read references of captions and of paragraphs."""
    from capvid.scoring.references import load_references

    _read_each(lambda paragraphs: load_references([str(path)], paragraphs=paragraphs), [False, True])  # type: ignore[arg-type, return-value]


def read_dense(path: Path) -> None:
    from capvid.scoring.dense import read_timed_sentences

    read_timed_sentences(path)


def read_predictions(path: Path) -> None:
    """Match predictions with references and score them by CIDEr-D."""
    from capvid.scoring.references import ReferenceSet, load_predictions

    wanted = ReferenceSet(
        {"a": ["a man"], "b": ["a dog"], "1": ["a ball"]}, ["a", "b", "1"], {}, ["references"]
    )
    _read_each(
        lambda paragraphs: load_predictions(path, wanted, paragraphs=paragraphs, missing="empty"),  # type: ignore[arg-type, return-value]
        [False, True],
    )


def _csv(rows: list[list[Any]], delimiter: str = ",") -> str:
    stream = io.StringIO()
    csv.writer(stream, delimiter=delimiter).writerows(rows)
    return stream.getvalue()


def _lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _parquet_list(folder: Path) -> Path:
    import pyarrow as pa
    from pyarrow import parquet

    path = folder / "list.parquet"
    parquet.write_table(pa.table({"video": ["a.mp4", "é.mp4", None], "n": [1, 2, 3]}), path)
    return path


def _charades(folder: Path) -> Path:
    _content("Charades_v1_test.csv", "id,script,descriptions,length\nb,x,a dog,3\n", folder)
    rows = [
        ["id", "script", "descriptions", "length"],
        ["a", "x", "a man;a dog\nis here", 3],
        ["c", "", "a", 2],
    ]
    return _content("Charades_v1_train.csv", _csv(rows), folder)


def _msvd(mutated: str, folder: Path) -> Path:
    _content("sents_train_lc_nopunc.txt", "vid1\ta man\nvid1\ta man is running\nvid2\ta dog\n", folder)
    _content("youtube_mapping.txt", "clip_0_10 vid1\nclip_5_9 vid2\n", folder)
    return folder / mutated


_COCO = {
    "images": [{"id": 1, "file_name": "a.jpg"}, {"id": 2, "file_name": "b.jpg", "split": "val"}],
    "annotations": [{"image_id": 1, "caption": "a man"}, {"image_id": 2, "caption": "a dog", "id": 7}],
}
_MSRVTT = {
    "videos": [{"video_id": "a", "split": "train"}, {"video_id": "b", "split": "validate"}],
    "sentences": [{"video_id": "a", "caption": "a man"}, {"video_id": "b", "caption": "a dog", "sen_id": 3}],
}
_ACTIVITYNET = {
    "v_a": {"duration": 9.5, "timestamps": [[0, 4], [4.5, 9]], "sentences": ["A man runs.", " He stops."]},
    "v_b": {"duration": 5, "timestamps": [[1, 2]], "sentences": ["A dog."]},
}
_YOUCOOK2 = {
    "database": {
        "a": {
            "subset": "training",
            "duration": 9.5,
            "annotations": [{"id": 0, "segment": [0, 4], "sentence": "cut a ball"}],
        },
        "b": {"subset": "validation", "annotations": [{"segment": [1, 3], "sentence": "cook"}]},
    }
}
_JSONL = (
    {"id": "a", "split": "train", "captions": ["a man", "a dog is running"]},
    {"id": "b", "split": "val", "segments": [{"start": 0, "end": 4}], "paragraphs": [["a man runs"]]},
)
_RESULTS = [{"image_id": "a", "caption": "a man"}, {"image_id": 1, "caption": "a ball"}]
_RECORDS = (
    {"video": "a.mp4", "status": "ok", "captions": [{"text": "a man", "logprob": -1.5}], "caption": "a man"},
    {"video": "b.mp4", "status": "error", "captions": [], "error": {"kind": "missing", "message": "x"}},
)
_SEGMENTS = {"a.mp4": [{"start": 0, "end": 4}, [4, "0:09"]], "b.mp4": [[1.5, 3]]}
_CONFIG = """
[caption]
beam = 3
output-dir = "captions"
timeout = 60.0

[data.check]
skip-bad = true
"""


def _recipe_text(name: str) -> bytes:
    from capvid.training.recipe import RECIPES

    return (RECIPES / f"{name}.toml").read_bytes()


def _recipe(name: str, folder: Path) -> Path:
    return _content("recipe.toml", _recipe_text(name), folder)


def _dataset(dataset: str, write: Callable[[Path], Path], mutate: Mutation) -> Artefact:
    return Artefact(write, mutate, partial(read_dataset, dataset), 130)


_VIDEOS = {
    "mp4": ("mpeg4", "yuv420p"),
    "mkv": ("libx264", "yuv420p"),
    "avi": ("mjpeg", "yuvj420p"),
    "ts": ("mpeg2video", "yuv420p"),
    "gif": ("gif", "rgb8"),
    "webm": ("libvpx", "yuv420p"),
}
_SHARDS = {
    "captions-jsonl": mutate_lines,
    "captions-parquet": mutate_bytes,
    "features-webdataset": mutate_tar,
    "features-parquet": mutate_bytes,
}

ARTEFACTS: dict[str, Artefact] = {
    **{
        f"video-{suffix}": Artefact(
            partial(_video, f"clip.{suffix}", *how), mutate_bytes, read_video, 170, f"video-{other}"
        )
        for (suffix, how), other in zip(_VIDEOS.items(), [*list(_VIDEOS)[1:], "mp4"], strict=True)
    },
    "archive-zip": Artefact(_zip, mutate_bytes, read_zip, 150),
    "archive-tar": Artefact(_tar, mutate_tar, read_tar, 100),
    "features": Artefact(_features, mutate_safetensors, read_features, 300),
    "features-maps": Artefact(
        partial(_features, maps=True), mutate_safetensors, read_features, 100, "features"
    ),
    "features-packed": Artefact(_packed, mutate_safetensors, read_packed, 150, "features"),
    **{
        f"captioner-json-{name}": Artefact(
            partial(_captioner, name, "captioner.json"), mutate_json, read_captioner, 80
        )
        for name in CAPTIONERS
    },
    "captioner-weights": Artefact(
        partial(_captioner, "m3", "captioner.safetensors"),
        mutate_safetensors,
        read_captioner,
        100,
        "features",
    ),
    "weights-pth": Artefact(_checkpoint, mutate_bytes, read_weights, 100, "features"),
    "manifest": Artefact(_manifest, mutate_lines, read_manifest, 250),
    **{
        f"shards-index-{form}": Artefact(
            partial(_shards, form, "capvid-shards.json"), mutate_json, partial(read_shards, form), 70
        )
        for form in _SHARDS
    },
    **{
        f"shards-{form}": Artefact(partial(_shards, form, ""), mutate, partial(read_shards, form), 80)
        for form, mutate in _SHARDS.items()
    },
    "shards-members": Artefact(
        partial(_shards, "features-webdataset", ".jsonl"),
        mutate_lines,
        partial(read_shards, "features-webdataset"),
    ),
    **{
        f"recipe-{name}": Artefact(partial(_recipe, name), mutate_toml, read_recipe, 120)
        for name in ("m3-small", "mart-small")
    },
    "config": Artefact(_text("capvid.toml", _CONFIG), mutate_toml, read_config, 150),
    "segments-json": Artefact(_text("segments.json", json.dumps(_SEGMENTS)), mutate_json, read_segments, 200),
    "segments-csv": Artefact(
        _text("segments.csv", "video,start,end\na.mp4,0,4\nb.mp4,4,1:02\n"), mutate_bytes, read_segments
    ),
    "list-txt": Artefact(_text("list.txt", "a.mp4\n/b/é.mp4\nhttps://x/c.mp4\n"), mutate_bytes, read_list),
    "list-csv": Artefact(_text("list.csv", "n,video\n1,a.mp4\n2,é.mp4\n"), mutate_bytes, read_list),
    "list-parquet": Artefact(_parquet_list, mutate_bytes, read_list, 100, "shards-captions-parquet"),
    "data-jsonl": _dataset("jsonl", _text("data.jsonl", _lines(*_JSONL)), mutate_lines),
    "data-tsv": _dataset("tsv", _text("data.tsv", "a\ta man\nb\ta dog\n"), mutate_bytes),
    "data-coco": _dataset("coco", _text("captions.json", json.dumps(_COCO)), mutate_json),
    "data-coco-gz": _dataset(
        "coco", _text("captions.json.gz", gzip.compress(json.dumps(_COCO).encode(), mtime=0)), mutate_bytes
    ),
    "data-msvd": _dataset("msvd", partial(_msvd, "sents_train_lc_nopunc.txt"), mutate_bytes),
    "data-msvd-mapping": _dataset("msvd", partial(_msvd, "youtube_mapping.txt"), mutate_bytes),
    "data-msrvtt": _dataset(
        "msrvtt", _text("train_val_videodatainfo.json", json.dumps(_MSRVTT)), mutate_json
    ),
    "data-charades": _dataset("charades", _charades, mutate_bytes),
    "data-activitynet": _dataset("activitynet", _text("train.json", json.dumps(_ACTIVITYNET)), mutate_json),
    "data-youcook2": _dataset(
        "youcook2", _text("youcookii_annotations_trainval.json", json.dumps(_YOUCOOK2)), mutate_json
    ),
    **{
        f"references-{name}": Artefact(
            _text("references.json", json.dumps(tree)), mutate_json, read_references
        )
        for name, tree in {
            "coco": _COCO,
            "msrvtt": _MSRVTT,
            "activitynet": _ACTIVITYNET,
            "youcook2": _YOUCOOK2,
            "captions": {"a": ["a man", "a dog"], "b": ["a ball"]},
        }.items()
    },
    "references-jsonl": Artefact(_text("references.jsonl", _lines(*_JSONL)), mutate_lines, read_references),
    "predictions-coco": Artefact(
        _text("predictions.json", json.dumps(_RESULTS)), mutate_json, read_predictions
    ),
    "predictions-object": Artefact(
        _text("predictions.json", json.dumps({"version": "1", "results": {"a": ["a man"], "b": ["a dog"]}})),
        mutate_json,
        read_predictions,
    ),
    "dense-results": Artefact(
        _text(
            "events.json",
            json.dumps({"version": "1", "results": {"a": [{"timestamp": [0, 1.5], "sentence": "a man"}]}}),
        ),
        mutate_json,
        read_dense,
    ),
    "dense-annotations": Artefact(_text("events.json", json.dumps(_ACTIVITYNET)), mutate_json, read_dense),
    "dense-records": Artefact(
        _text(
            "events.jsonl",
            _lines(
                {"video": "a.mp4", "segments": [{"start": 0, "end": 1.5, "caption": "a man"}]},
                {"video": "b.mp4", "duration": 3, "captions": [{"text": "a dog"}]},
            ),
        ),
        mutate_lines,
        read_dense,
    ),
    "predictions-jsonl": Artefact(
        _text("predictions.jsonl", _lines(*_RECORDS)), mutate_lines, read_predictions
    ),
    "predictions-csv": Artefact(
        _text("predictions.csv", 'video,caption,logprob\na.mp4,a man,-1.5\nb,"a dog, 2",-2\n'),
        mutate_bytes,
        read_predictions,
    ),
}
