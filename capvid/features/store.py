"""The features of a whole data set, from folders of feature files and from packed files.

A packed file is one safetensors file with a tensor (T, D) per video id and, where the numbers are
quantised, a tensor ``scale`` (D,). Its metadata may name ``backbone``, ``layer`` and ``dequantise``; a
fragment after the path supplies what the metadata lacks, as in
``x3d.safetensors#backbone=x3d-xs&dequantise=scale*u**2``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from capvid import __version__
from capvid.errors import FeatureFileError, UsageError
from capvid.features.file import (
    HEADER_KEY,
    FeatureHeader,
    Features,
    StreamHeader,
    header_in,
    load_features,
    load_times,
    open_safetensors,
    read_tensor,
    stream_length,
)
from capvid.features.registry import canonical_backbone
from capvid.features.views import viewed

_SCALE = "scale"
_DEQUANTISE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "scale*u": lambda scale, u: scale * u,
    "scale*u**2": lambda scale, u: scale * u**2,
}
_SAME_AS = {"tensor.float()*scale": "scale*u", "u*scale": "scale*u", "u**2*scale": "scale*u**2"}
_FRAGMENT_KEYS = ("backbone", "layer", "dequantise", "sampling", "preprocess", "weights_sha256")


class _Source(Protocol):
    """One ``--features`` argument."""

    path: Path

    def ids(self) -> Iterable[str]:
        """Give the ids of the videos it holds."""

    def length(self, video: str) -> int:
        """Give the number of frames T of a video."""

    def times(self, video: str) -> np.ndarray | None:
        """Give the times (T,) of a video's frames in seconds, if they are known."""

    def header(self, video: str) -> FeatureHeader:
        """Give how a video's features were made."""

    def get(self, video: str) -> Features:
        """Read a video's features."""


class FeatureStore:
    """The features of many videos, read when asked for.

    Sources that hold the same video are streams of the same frames, in the order given; sources that hold
    different videos extend the store. All headers are read and compared at opening. Augmented views that
    lack a stream of their video are left out.

    Args:
        sources: folders of feature files (a video's id is the file's path in the folder without its suffix),
            feature files of one video, and packed files, these with a fragment if need be.

    Attributes:
        incomplete: the keys of the views that are left out.

    Raises:
        FeatureFileError: a source cannot be read, or videos have streams of other kinds or lengths.
        UsageError: a fragment that is not understood.
    """

    def __init__(self, sources: Sequence[Path | str]) -> None:
        if not sources:
            raise UsageError("no features were given", remedy="name a folder or file of features")
        self._holders: dict[str, list[_Source]] = {}
        for source in map(_open_source, sources):
            for video in source.ids():
                self._holders.setdefault(video, []).append(source)
        self.incomplete = [key for key in self._holders if self._lacks_streams(key)]
        for key in self.incomplete:
            del self._holders[key]
        self._header = self._common_header()

    @property
    def header(self) -> FeatureHeader:
        """How the features of every video were made, as far as it is known."""
        return self._header

    def ids(self) -> list[str]:
        """Give the ids of all videos, in the order of the sources."""
        return list(self._holders)

    def __contains__(self, video: object) -> bool:
        return video in self._holders

    def __len__(self) -> int:
        return len(self._holders)

    def length(self, video: str) -> int:
        """Give the number of frames T of a video, without reading them.

        Raises:
            FeatureFileError: no source holds the video.
        """
        return self._sources(video)[0].length(video)

    def times(self, video: str) -> np.ndarray | None:
        """Read the times (T,) of a video's frames in seconds, if a source knows them.

        Raises:
            FeatureFileError: no source holds the video, or its file cannot be read.
        """
        found = (source.times(video) for source in self._sources(video))
        return next((times for times in found if times is not None), None)

    def get(self, video: str) -> Features:
        """Read the features of one video: every stream (T, D) or (T, L, D) float32.

        Raises:
            FeatureFileError: no source holds the video, or its tensors cannot be read.
        """
        parts = [source.get(video) for source in self._sources(video)]
        return Features(
            header=self._header,
            streams=tuple(stream for part in parts for stream in part.streams),
            times=next((part.times for part in parts if part.times is not None), None),
            video=video,
            duration=next((part.duration for part in parts if part.duration is not None), None),
        )

    def _sources(self, video: str) -> Sequence[_Source]:
        if video not in self._holders:
            raise FeatureFileError(f"no features of the video {video!r}", remedy="extract them first")
        return self._holders[video]

    def _lacks_streams(self, key: str) -> bool:
        """Whether this is a view of a video that has more streams."""
        video = viewed(key)
        return video in self._holders and self._streams(key) < self._streams(video)

    def _streams(self, video: str) -> int:
        return sum(len(source.header(video).streams) for source in self._holders[video])

    def _common_header(self) -> FeatureHeader:
        common: FeatureHeader | None = None
        first = ""
        for video, sources in self._holders.items():
            header = self._video_header(video, sources)
            if common is None:
                common, first = header, video
                continue
            differing = common.mismatches(header)
            if differing:
                raise FeatureFileError(
                    f"the features of {first} and {video} are of different kinds "
                    f"({', '.join(differing).replace('trained on', first + ' has')})",
                    remedy="give every video the same streams in the same order",
                )
            common = _filled(common, header)
        if common is None:
            raise FeatureFileError("the features given hold no video")
        return common

    @staticmethod
    def _video_header(video: str, sources: Sequence[_Source]) -> FeatureHeader:
        lengths = [source.length(video) for source in sources]
        if len(set(lengths)) > 1:
            found = ", ".join(f"{n} in {s.path}" for n, s in zip(lengths, sources, strict=True))
            raise FeatureFileError(
                f"{video}: streams of different lengths ({found})",
                remedy="extract all streams with one sampling",
            )
        headers = [source.header(video) for source in sources]
        streams = tuple(stream for header in headers for stream in header.streams)
        named = [(stream.backbone, stream.layer) for stream in streams if stream.backbone and stream.layer]
        if len(set(named)) < len(named):
            raise FeatureFileError(
                f"{video}: the same backbone and layer is in {' and in '.join(str(s.path) for s in sources)}",
                remedy="give each stream once",
            )
        samplings = {header.sampling for header in headers if header.sampling}
        if len(samplings) > 1:
            raise FeatureFileError(
                f"{video}: streams sampled in different ways: {', '.join(sorted(samplings))}"
            )
        return replace(headers[0], streams=streams, sampling=next(iter(samplings), None))


def _filled(header: FeatureHeader, other: FeatureHeader) -> FeatureHeader:
    """Take from ``other`` what ``header`` does not know."""
    if header == other:
        return header
    streams = tuple(a.filled(b) for a, b in zip(header.streams, other.streams, strict=True))
    sampling, reader = header.sampling or other.sampling, header.reader or other.reader
    return replace(header, streams=streams, sampling=sampling, reader=reader)


def _open_source(source: Path | str) -> _Source:
    path, fragment = Path(source), ""
    if not path.exists() and "#" in str(source):
        name, _, fragment = str(source).rpartition("#")
        path = Path(name)
    given = _parse_fragment(str(source), fragment)
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
        return _FileSource(path, files, given)
    handle = open_safetensors(path)
    if HEADER_KEY in (handle.metadata() or {}):
        return _FileSource(path, {path.stem: path}, given)
    return _PackedSource(path, handle, given)


def _parse_fragment(source: str, fragment: str) -> dict[str, str]:
    given = {}
    for item in filter(None, fragment.split("&")):
        key, equals, value = item.partition("=")
        if key not in _FRAGMENT_KEYS or not equals or not value:
            raise UsageError(
                f"{source}: {item!r} is not understood after the #",
                remedy=f"use key=value with the keys {', '.join(_FRAGMENT_KEYS)}, joined by &",
            )
        given[key] = value
    return given


@dataclass(frozen=True)
class _Summary:
    """What is kept of each feature file: one header object serves all files that have the same."""

    header: FeatureHeader
    length: int


class _FileSource:
    """Feature files, one per video."""

    def __init__(self, path: Path, files: Mapping[str, Path], given: Mapping[str, str]) -> None:
        if given:
            raise UsageError(
                f"{path}: feature files say themselves what they are", remedy="leave out the #..."
            )
        self.path = path
        self._files = files
        shared: dict[FeatureHeader, FeatureHeader] = {}
        self._summaries = {}
        for video, file in files.items():
            with open_safetensors(file) as handle:
                header = header_in(file, handle.metadata())
                length = stream_length(file, handle, header)
            self._summaries[video] = _Summary(shared.setdefault(header, header), length)

    def ids(self) -> Iterable[str]:
        return self._files

    def length(self, video: str) -> int:
        return self._summaries[video].length

    def header(self, video: str) -> FeatureHeader:
        return self._summaries[video].header

    def times(self, video: str) -> np.ndarray | None:
        return load_times(self._files[video])

    def get(self, video: str) -> Features:
        return load_features(self._files[video])


class _PackedSource:
    """One file with a tensor per video; it stays open."""

    def __init__(self, path: Path, handle: Any, given: Mapping[str, str]) -> None:
        self.path = path
        self._handle = handle
        names = list(handle.keys())
        self._shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in names if name != _SCALE}
        for video, shape in self._shapes.items():
            if len(shape) not in (2, 3) or 0 in shape:
                raise FeatureFileError(f"{path}: {video} has the shape {shape}, expected (T, D) or (T, L, D)")
        facts = self._facts(handle.metadata() or {}, given)
        self._scale = self._read(_SCALE).astype(np.float32) if _SCALE in names else None
        self._dequantise = self._formula(facts.pop("dequantise", None))
        sampling = facts.pop("sampling", None)
        self._headers = {
            inner: FeatureHeader(
                streams=(_packed_stream(inner, facts),),
                sampling=sampling,
                reader=None,
                dtype="float32",
                capvid_version=__version__,
            )
            for inner in {shape[1:] for shape in self._shapes.values()}
        }

    def ids(self) -> Iterable[str]:
        return self._shapes

    def length(self, video: str) -> int:
        return self._shapes[video][0]

    def times(self, video: str) -> np.ndarray | None:
        return None

    def header(self, video: str) -> FeatureHeader:
        return self._headers[self._shapes[video][1:]]

    def get(self, video: str) -> Features:
        values = self._read(video).astype(np.float32)
        if self._scale is not None:
            values = self._dequantise(self._scale, values)
        if not np.isfinite(values).all():
            raise FeatureFileError(f"{self.path}: {video} has values that are not finite")
        return Features(header=self.header(video), streams=(values,), times=None, video=video)

    def _read(self, name: str) -> np.ndarray:
        return read_tensor(self.path, self._handle, name, "F16", "F32", "F64", "U8", "I8", "U16", "I16")

    def _facts(self, metadata: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
        facts = {key: metadata[key] for key in _FRAGMENT_KEYS if key in metadata}
        for key, value in given.items():
            same = {value} if key not in facts else {_canonical(key, value), _canonical(key, facts[key])}
            if len(same) > 1:
                raise FeatureFileError(
                    f"{self.path}: {key} is {facts[key]!r} in the file and {value!r} after the #",
                    remedy=f"leave out {key}",
                )
            facts[key] = value
        return facts

    def _formula(self, text: str | None) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        name = _canonical("dequantise", text or "scale*u")
        if name not in _DEQUANTISE:
            raise FeatureFileError(
                f"{self.path}: dequantise {text!r} is not known",
                remedy=f"use one of {', '.join(_DEQUANTISE)}",
            )
        if self._scale is None and text is not None:
            raise FeatureFileError(
                f"{self.path}: dequantise needs a tensor named {_SCALE}, and there is none"
            )
        return _DEQUANTISE[name]


def _canonical(key: str, value: str) -> str | None:
    if key == "backbone":
        return canonical_backbone(value)
    if key == "dequantise":
        bare = "".join(value.split())
        return _SAME_AS.get(bare, bare)
    return value


def _packed_stream(inner: tuple[int, ...], facts: Mapping[str, str]) -> StreamHeader:
    return StreamHeader(
        backbone=canonical_backbone(facts.get("backbone")),
        layer=facts.get("layer"),
        width=inner[-1],
        locations=inner[0] if len(inner) == 2 else None,
        weights_sha256=facts.get("weights_sha256"),
        preprocess=facts.get("preprocess"),
    )
