"""Feature store: the features of a dataset, from folders of feature files and from packed files.

A packed file is one safetensors file with a tensor (T, D) per video id and, if quantised, a tensor ``scale``
(D,). Its metadata may contain ``backbone``, ``layer`` and ``dequantise``; a fragment after the path adds
missing entries, as in ``x3d.safetensors#backbone=x3d-xs&dequantise=scale*u**2``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from capvid.backbones.catalog import StreamHeader, canonical_backbone
from capvid.errors import FeatureFileError, UsageError
from capvid.features.feature_file import (
    HEADER_KEY,
    FeatureHeader,
    Features,
    header_in,
    load_features,
    load_times,
    open_safetensors,
    read_tensor,
    stream_length,
)
from capvid.version import __version__

_SCALE = "scale"
_DEQUANTISE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "scale*u": lambda scale, u: scale * u,
    "scale*u**2": lambda scale, u: scale * u**2,
}
_SAME_AS = {"tensor.float()*scale": "scale*u", "u*scale": "scale*u", "u**2*scale": "scale*u**2"}
_FRAGMENT_KEYS = ("backbone", "layer", "dequantise", "sampling", "preprocess", "weights_sha256")


class FeatureStore:
    """The features of many videos, read on demand.

    Sources of the same video contribute streams of the same frames, in order; sources of different videos
    extend the store. All headers are read and compared when the store is opened.

    Args:
        sources: folders of feature files (a video's id is the relative path without suffix), single feature
            files, and packed files, optionally with a fragment.

    Attributes:
        header: everything that the features of all videos depend on, as far as known.
        incomplete: keys of augmented views that lack a stream of their video and are left out.

    Raises:
        FeatureFileError: a source cannot be read, or videos have streams of different kinds or lengths.
        UsageError: a fragment is invalid.
    """

    def __init__(self, sources: Sequence[Path | str]) -> None:
        if not sources:
            raise UsageError("no features were given", remedy="name a folder or file of features")
        self._sources_by_id: dict[str, list[_Source]] = {}
        for source in map(_open_source, sources):
            for video in source.lengths:
                self._sources_by_id.setdefault(video, []).append(source)
        counts = {
            video: sum(len(source.headers[video].streams) for source in of_video)
            for video, of_video in self._sources_by_id.items()
        }
        self.incomplete = [key for key in counts if counts[key] < counts.get(video_of_view(key) or "", 0)]
        for key in self.incomplete:
            del self._sources_by_id[key]
        self.header = self._common_header()

    def ids(self) -> list[str]:
        """Return the ids of all videos, in the order of the sources."""
        return list(self._sources_by_id)

    def __contains__(self, video: object) -> bool:
        return video in self._sources_by_id

    def __len__(self) -> int:
        return len(self._sources_by_id)

    def length(self, video: str) -> int:
        """Return the number of frames T of a video, without reading them."""
        return self._sources(video)[0].lengths[video]

    def times(self, video: str) -> np.ndarray | None:
        """Read the times (T,) of a video's frames in seconds; None if no source has them."""
        by_source = (source.times(video) for source in self._sources(video))
        return next((times for times in by_source if times is not None), None)

    def get(self, video: str) -> Features:
        """Read the features of one video: every stream (T, D) or (T, L, D) float32."""
        by_source = [source.get(video) for source in self._sources(video)]
        return Features(
            header=self.header,
            streams=tuple(stream for features in by_source for stream in features.streams),
            times=next((features.times for features in by_source if features.times is not None), None),
            video=video,
            duration=next(
                (features.duration for features in by_source if features.duration is not None), None
            ),
        )

    def _sources(self, video: str) -> Sequence[_Source]:
        if video not in self._sources_by_id:
            raise FeatureFileError(f"no features of the video {video!r}", remedy="extract them first")
        return self._sources_by_id[video]

    def _common_header(self) -> FeatureHeader:
        """Return the header of all videos, its unknown fields completed; raise if the headers differ."""
        common: FeatureHeader | None = None
        first = ""
        for video, sources in self._sources_by_id.items():
            header = _video_header(video, sources)
            if common is None:
                common, first = header, video
            elif differing := common.mismatches(header):
                raise FeatureFileError(
                    f"the features of {first} and {video} are of different kinds "
                    f"({', '.join(differing).replace('trained on', first + ' has')})",
                    remedy="give every video the same streams in the same order",
                )
            elif header != common:  # complete the fields that are not known yet
                both = zip(common.streams, header.streams, strict=True)
                common = replace(
                    common,
                    streams=tuple(stream.with_defaults(other) for stream, other in both),
                    sampling=common.sampling or header.sampling,
                    reader=common.reader or header.reader,
                )
        if common is None:
            raise FeatureFileError("the features contain no video")
        return common


def _video_header(video: str, sources: Sequence[_Source]) -> FeatureHeader:
    """Return the header of all streams of a video; raise if they do not fit together."""
    lengths = [source.lengths[video] for source in sources]
    if len(set(lengths)) > 1:
        counts = ", ".join(f"{n} in {s.path}" for n, s in zip(lengths, sources, strict=True))
        problem = f"{video}: streams of different lengths ({counts})"
        raise FeatureFileError(problem, remedy="extract all streams with one sampling")
    headers = [source.headers[video] for source in sources]
    streams = tuple(stream for header in headers for stream in header.streams)
    named = [(stream.backbone, stream.layer) for stream in streams if stream.backbone and stream.layer]
    if len(set(named)) < len(named):
        paths = " and in ".join(str(source.path) for source in sources)
        problem = f"{video}: the same backbone and layer is in {paths}"
        raise FeatureFileError(problem, remedy="give each stream once")
    samplings = {header.sampling for header in headers if header.sampling}
    if len(samplings) > 1:
        raise FeatureFileError(f"{video}: streams sampled in different ways: {', '.join(sorted(samplings))}")
    return replace(headers[0], streams=streams, sampling=next(iter(samplings), None))


def _open_source(source: Path | str) -> _Source:
    """Open a folder, a feature file or a packed file, optionally with a fragment after the path."""
    path, fragment = Path(source), ""
    if not path.exists() and "#" in str(source):
        name, _, fragment = str(source).rpartition("#")
        path = Path(name)
    settings = {}
    for item in filter(None, fragment.split("&")):
        key, _, value = item.partition("=")
        if key not in _FRAGMENT_KEYS or not value:
            raise UsageError(
                f"{source}: {item!r} after the # is not valid",
                remedy=f"use key=value with the keys {', '.join(_FRAGMENT_KEYS)}, joined by &",
            )
        settings[key] = value
    if not path.exists():
        raise FeatureFileError(f"{path}: no such file or folder of features")
    if path.is_dir():
        files = {
            file.relative_to(path).with_suffix("").as_posix(): file
            for file in sorted(path.rglob("*.safetensors"))
            if not any(part.startswith(".") for part in file.relative_to(path).parts)
        }
        if not files:
            raise FeatureFileError(f"{path}: no feature files (.safetensors) in this folder")
    else:
        handle = open_safetensors(path)
        if HEADER_KEY not in (handle.metadata() or {}):
            return _PackedSource(path, handle, settings)
        files = {path.stem: path}
    if settings:
        raise UsageError(f"{path}: feature files contain these entries already", remedy="leave out the #...")
    return _FileSource(path, files)


class _FileSource:
    """Feature files, one per video; ``lengths`` (T) and ``headers`` are by video id."""

    def __init__(self, path: Path, files: Mapping[str, Path]) -> None:
        self.path = path
        self._files = files
        self.lengths: dict[str, int] = {}
        self.headers: dict[str, FeatureHeader] = {}
        shared: dict[FeatureHeader, FeatureHeader] = {}  # equal headers are stored once
        for video, file in files.items():
            with open_safetensors(file) as handle:
                header = header_in(file, handle.metadata())
                self.lengths[video] = stream_length(file, handle, header)
            self.headers[video] = shared.setdefault(header, header)

    def times(self, video: str) -> np.ndarray | None:
        return load_times(self._files[video])

    def get(self, video: str) -> Features:
        return load_features(self._files[video])


class _PackedSource:
    """One file with a tensor per video, which stays open; attributes and methods as in _FileSource."""

    def __init__(self, path: Path, handle: Any, settings: Mapping[str, str]) -> None:
        self.path = path
        self._handle = handle
        names = list(handle.keys())
        shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in names if name != _SCALE}
        for video, shape in shapes.items():
            if len(shape) not in (2, 3) or 0 in shape:
                raise FeatureFileError(f"{path}: {video} has the shape {shape}, expected (T, D) or (T, L, D)")
        metadata = self._merge_metadata(handle.metadata() or {}, settings)
        self._scale = self._read(_SCALE).astype(np.float32) if _SCALE in names else None
        formula = metadata.pop("dequantise", None)
        name = _canonical("dequantise", formula or "scale*u")
        if name not in _DEQUANTISE:
            problem = f"{path}: dequantise {formula!r} is not known"
            raise FeatureFileError(problem, remedy=f"use one of {', '.join(_DEQUANTISE)}")
        if self._scale is None and formula is not None:
            raise FeatureFileError(f"{path}: dequantise needs a tensor named {_SCALE}, and there is none")
        self._dequantise = _DEQUANTISE[name]
        sampling = metadata.pop("sampling", None)
        fields: dict[str, Any] = {"backbone": None, "layer": None, **metadata}
        fields["backbone"] = canonical_backbone(fields["backbone"])
        headers = {}
        for inner in {shape[1:] for shape in shapes.values()}:
            locations = inner[0] if len(inner) == 2 else None
            stream = StreamHeader(width=inner[-1], locations=locations, **fields)
            headers[inner] = FeatureHeader(
                streams=(stream,),
                sampling=sampling,
                reader=None,
                dtype="float32",
                capvid_version=__version__,
            )
        self.lengths = {video: shape[0] for video, shape in shapes.items()}
        self.headers = {video: headers[shape[1:]] for video, shape in shapes.items()}

    def times(self, video: str) -> np.ndarray | None:
        return None

    def get(self, video: str) -> Features:
        values = self._read(video).astype(np.float32)
        if self._scale is not None:
            values = self._dequantise(self._scale, values)
        if not np.isfinite(values).all():
            raise FeatureFileError(f"{self.path}: {video} has values that are not finite")
        return Features(header=self.headers[video], streams=(values,), times=None, video=video)

    def _read(self, name: str) -> np.ndarray:
        return read_tensor(self.path, self._handle, name, "F16", "F32", "F64", "U8", "I8", "U16", "I16")

    def _merge_metadata(self, metadata: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
        """Return the entries of the metadata and of the fragment, which must not contradict each other."""
        merged = {key: metadata[key] for key in _FRAGMENT_KEYS if key in metadata}
        for key, value in settings.items():
            if key in merged and _canonical(key, value) != _canonical(key, merged[key]):
                problem = f"{self.path}: {key} is {merged[key]!r} in the file and {value!r} after the #"
                raise FeatureFileError(problem, remedy=f"leave out {key}")
            merged[key] = value
        return merged


def _canonical(key: str, value: str) -> str | None:
    """Return the same value for all spellings of a backbone or a formula."""
    if key == "backbone":
        return canonical_backbone(value)
    if key == "dequantise":
        formula = "".join(value.split())
        return _SAME_AS.get(formula, formula)
    return value


_Source = _FileSource | _PackedSource
Views = Mapping[str, Sequence[str]]  # keys of augmented views, by video id
NO_VIEWS: Views = MappingProxyType({})


def view_key(key: str, number: int) -> str:
    """Return the key of an augmented view: ``KEY@1`` for the first view of the video ``KEY``."""
    return f"{key}@{number}"


def video_of_view(key: str) -> str | None:
    """Return the key of the video if ``key`` has the form of a view's key, otherwise ``None``."""
    match = re.fullmatch(r"(.+)@[1-9][0-9]*", key, re.DOTALL)
    return match[1] if match else None


def views_of(videos: Collection[str], keys: Iterable[str]) -> dict[str, list[str]]:
    """Group the keys of augmented views by video id, in the order of their numbers.

    Args:
        videos: ids of all videos of the dataset; none of these is a view of another.
        keys: keys of features.
    """
    ids, views = set(videos), dict[str, list[str]]()
    for key in keys:
        video = video_of_view(key)
        if video in ids and key not in ids:
            views.setdefault(video, []).append(key)
    return {video: sorted(keys, key=lambda key: int(key.rpartition("@")[2])) for video, keys in views.items()}
