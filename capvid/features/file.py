"""The features of one video as a safetensors file with a header that says how they were made.

Notation for tensor shapes: T frames, L locations of a feature map, D width of a stream.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from capvid.errors import FeatureFileError, FeatureMismatchError
from capvid.features.held import HeldFile
from capvid.features.registry import canonical_backbone
from capvid.files import atomic_path

FORMAT_VERSION = 1
HEADER_KEY = "capvid"
_VIDEO_KEY, _DURATION_KEY, _VIEW_KEY = "video", "duration", "view"
_DTYPES = {"float16": np.float16, "float32": np.float32}


@dataclass(frozen=True, kw_only=True)
class StreamHeader:
    """What one stream of features is: every field that its numbers depend on, ``None`` where not known.

    ``locations`` is L for feature maps (T, L, D) and ``None`` for vectors (T, D); it and ``width`` (D) are
    always known. ``precision``, in which the network computed, is never a mismatch.
    """

    backbone: str | None
    layer: str | None
    width: int
    locations: int | None = None
    weights_sha256: str | None = None
    preprocess: str | None = None
    precision: str | None = None

    def mismatches(self, other: StreamHeader) -> list[str]:
        """Name each field in which ``other`` differs from this one; unknown fields never differ."""
        pairs: list[tuple[str, Any, Any]] = [
            ("backbone", canonical_backbone(self.backbone), canonical_backbone(other.backbone)),
            ("layer", self.layer, other.layer),
            ("weights_sha256", self.weights_sha256, other.weights_sha256),
            ("preprocess", self.preprocess, other.preprocess),
        ]
        differing = [item for item in pairs if None not in item and item[1] != item[2]]
        differing += [
            (name, mine, theirs)
            for name, mine, theirs in (
                ("width", self.width, other.width),
                ("locations", self.locations or "none", other.locations or "none"),
            )
            if mine != theirs
        ]
        return [f"{name}: trained on {mine}, got {theirs}" for name, mine, theirs in differing]

    def filled(self, other: StreamHeader) -> StreamHeader:
        """Take from ``other`` what is not known here."""
        known = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        return StreamHeader(**{**dataclasses.asdict(other), **known})


@dataclass(frozen=True, kw_only=True)
class FeatureHeader:
    """How features were made. A captioner keeps the header of those it was trained on."""

    streams: tuple[StreamHeader, ...]
    sampling: str | None
    reader: str | None
    dtype: str
    capvid_version: str
    format_version: int = FORMAT_VERSION

    @property
    def width(self) -> int:
        """The width of all streams beside each other."""
        return sum(stream.width for stream in self.streams)

    @property
    def locations(self) -> int:
        """L of feature maps (T, L, D); 0 for one vector per frame (T, D)."""
        return self.streams[0].locations or 0

    def check_alike(self) -> None:
        """Raise FeatureFileError unless all streams can stand beside each other."""
        if len({stream.locations for stream in self.streams}) > 1:
            shapes = ", ".join(
                f"{stream.backbone or 'a stream'} "
                + (f"maps of {stream.locations} locations" if stream.locations else "one vector per frame")
                for stream in self.streams
            )
            raise FeatureFileError(
                f"streams that cannot stand beside each other ({shapes})",
                remedy="extract layers that all give vectors, or maps of one size",
            )

    def to_json(self) -> str:
        """Give the header as one line of JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> FeatureHeader:
        """Read a header back.

        Raises:
            FeatureFileError: not JSON, or not the fields of a header that this version knows.
        """
        try:
            values = json.loads(text)
            version = values["format_version"]
            if version != FORMAT_VERSION:
                raise FeatureFileError(
                    f"feature header of format {version}, while this capvid reads format {FORMAT_VERSION}",
                    remedy="extract the features again, or update capvid",
                )
            for key in (_VIDEO_KEY, _DURATION_KEY, _VIEW_KEY):
                values.pop(key, None)
            streams = tuple(StreamHeader(**stream) for stream in values.pop("streams"))
            if not streams or not all(isinstance(stream.width, int) for stream in streams):
                raise ValueError("no streams, or a stream without its width")
            return cls(streams=streams, **values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FeatureFileError(
                f"the feature header is not valid ({error})", remedy="extract the features again"
            ) from error

    def mismatches(self, other: FeatureHeader) -> list[str]:
        """Name each field in which ``other`` differs from the header trained on (``self``).

        ``None`` on either side is unknown and never differs; versions, reader and dtype are not compared;
        the number of streams and their widths always are.
        """
        if len(self.streams) != len(other.streams):
            mine, theirs = (
                " + ".join(stream.backbone or f"{stream.width} wide" for stream in header.streams)
                for header in (self, other)
            )
            return [f"streams: trained on {len(self.streams)} ({mine}), got {len(other.streams)} ({theirs})"]
        found = []
        for number, (mine_, theirs_) in enumerate(zip(self.streams, other.streams, strict=True), start=1):
            prefix = f"stream {number} " if len(self.streams) > 1 else ""
            found += [prefix + text for text in mine_.mismatches(theirs_)]
        if None not in (self.sampling, other.sampling) and self.sampling != other.sampling:
            found.append(f"sampling: trained on {self.sampling}, got {other.sampling}")
        return found

    def checked(self, other: FeatureHeader) -> None:
        """Accept ``other`` as features like those trained on.

        Raises:
            FeatureMismatchError: it differs; the message names each differing field.
        """
        found = self.mismatches(other)
        if found:
            raise FeatureMismatchError(
                f"the features are not those the captioner was trained on: {', '.join(found)}",
                remedy="extract them with the captioner's backbone, layer and sampling",
            )


@dataclass(frozen=True, kw_only=True)
class Features:
    """The features of one video.

    Attributes:
        header: how they were made, one entry per stream.
        streams: float32 arrays (T, D) or (T, L, D), all with the same T >= 1.
        times: float64 (T,), seconds, presentation time of each frame; ``None`` where not known.
        video: name of the video.
        duration: of the video, in seconds; ``None`` where not known.
        view: number of the augmented view that the frames were seen in; 0 as they are.
    """

    header: FeatureHeader
    streams: tuple[np.ndarray, ...]
    times: np.ndarray | None
    video: str
    duration: float | None = None
    view: int = 0

    def __post_init__(self) -> None:
        if len(self.streams) != len(self.header.streams):
            raise FeatureFileError(
                f"{self.video}: {len(self.streams)} streams, but the header names {len(self.header.streams)}"
            )
        for header, stream in zip(self.header.streams, self.streams, strict=True):
            expected = (header.width,) if header.locations is None else (header.locations, header.width)
            if stream.ndim != 1 + len(expected) or stream.shape[1:] != expected or not len(stream):
                wanted = ", ".join(("T", *map(str, expected)))
                raise FeatureFileError(
                    f"{self.video}: a stream has the shape {stream.shape}, expected ({wanted})"
                )
        lengths = {len(stream) for stream in self.streams}
        if self.times is not None:
            lengths.add(len(self.times))
        if len(lengths) > 1:
            raise FeatureFileError(f"{self.video}: streams or times of different lengths {sorted(lengths)}")

    def __len__(self) -> int:
        return len(self.streams[0])

    @property
    def seconds(self) -> float | None:
        """How long the video is; about how long where the file does not say so, from its frames' times."""
        if self.duration is not None or self.times is None:
            return self.duration
        return float(self.times[-1] + (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1))

    def concatenated(self) -> np.ndarray:
        """Give all streams side by side: (T, sum of D) float32, or (T, L, sum of D) if they are maps.

        Raises:
            FeatureFileError: maps beside vectors, or maps with other locations.
        """
        self.header.check_alike()
        return np.concatenate(self.streams, axis=-1, dtype=np.float32)


def save_features(path: str | Path, features: Features) -> None:
    """Write one video's features in ``header.dtype`` (float16 or float32), atomically.

    Raises:
        FeatureFileError: another dtype, a value that float16 cannot hold or that is not finite, or a folder
            that cannot be written.
    """
    data = features_to_bytes(features, name=path)
    try:
        with atomic_path(path) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise FeatureFileError(f"{path}: cannot be written ({error.strerror or error})") from error


def features_to_bytes(features: Features, *, name: str | Path = "") -> bytes:
    """Give the bytes of one video's file of features.

    Raises:
        FeatureFileError: another dtype, or a value that float16 cannot hold or that is not finite; it names
            the file, or the video.
    """
    from safetensors.numpy import save

    name = name or features.video
    dtype = _DTYPES.get(features.header.dtype)
    if dtype is None:
        raise FeatureFileError(
            f"{name}: features cannot be stored as {features.header.dtype}", remedy="use float16 or float32"
        )
    tensors = {}
    for index, stream in enumerate(features.streams):
        with np.errstate(over="ignore"):
            stored = np.ascontiguousarray(stream, dtype=dtype)
        if not np.isfinite(stored).all():
            cause = "float16 cannot hold" if np.isfinite(stream).all() else "are not finite"
            raise FeatureFileError(f"{name}: stream {index + 1} has values that {cause}")
        tensors[f"stream{index}"] = stored
    if features.times is not None:
        tensors["times"] = np.ascontiguousarray(features.times, dtype=np.float64)
    # one entry, since the order in which safetensors writes several is not always the same
    header = {**dataclasses.asdict(features.header), _VIDEO_KEY: features.video}
    if features.duration is not None:
        header[_DURATION_KEY] = round(features.duration, 6)
    if features.view:
        header[_VIEW_KEY] = features.view
    data: bytes = save(tensors, metadata={HEADER_KEY: json.dumps(header, sort_keys=True)})
    return data


def features_from_bytes(data: bytes, *, name: str = "features") -> Features:
    """Read one video's features, as float32, from the bytes of their file.

    Raises:
        FeatureFileError: they are none, or damaged.
    """
    from safetensors import SafetensorError

    try:
        held = HeldFile(data)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise FeatureFileError(f"{name}: not a whole file of features ({error})") from error
    return _read(name, held)


def load_features(path: str | Path) -> Features:
    """Read one video's features, as float32.

    Raises:
        FeatureFileError: missing, not safetensors, cut short, without header, or with other tensors than
            the header names.
    """
    with open_safetensors(path) as handle:
        return _read(path, handle)


def _read(path: str | Path, handle: Any) -> Features:
    """The features in a safetensors file that is open."""
    from safetensors import SafetensorError

    header = header_in(path, handle.metadata())
    names = set(handle.keys())
    try:
        streams = tuple(
            handle.get_tensor(f"stream{index}").astype(np.float32) for index in range(len(header.streams))
        )
        times = handle.get_tensor("times").astype(np.float64) if "times" in names else None
    except (SafetensorError, TypeError, KeyError) as error:
        raise FeatureFileError(
            f"{path}: the tensors named by its header cannot be read ({error})",
            remedy="extract the features again",
        ) from error
    facts = json.loads(handle.metadata()[HEADER_KEY])
    video, duration = facts.get(_VIDEO_KEY, Path(path).stem), facts.get(_DURATION_KEY)
    view = facts.get(_VIEW_KEY, 0)
    if not all(np.isfinite(stream).all() for stream in streams):
        raise FeatureFileError(f"{path}: has values that are not finite", remedy="extract the features again")
    try:
        return Features(
            header=header, streams=streams, times=times, video=video, duration=duration, view=view
        )
    except FeatureFileError as error:
        raise FeatureFileError(
            f"{path}: {error.message}", remedy=error.remedy or "extract the features again"
        ) from error


def load_times(path: str | Path) -> np.ndarray | None:
    """Read the times (T,) of one video's frames in seconds, if they are known, and nothing else.

    Raises:
        FeatureFileError: missing, not safetensors, or cut short.
    """
    with open_safetensors(path) as handle:
        return handle.get_tensor("times").astype(np.float64) if "times" in handle.keys() else None  # noqa: SIM118


def load_header(path: str | Path) -> FeatureHeader:
    """Read how one video's features were made, and see that they are all there, without reading them.

    Raises:
        FeatureFileError: missing, not safetensors, cut short, without header or a stream that it names.
    """
    with open_safetensors(path) as handle:
        header = header_in(path, handle.metadata())
        if not {f"stream{index}" for index in range(len(header.streams))} <= set(handle.keys()):
            raise FeatureFileError(f"{path}: lacks a stream", remedy="extract the features again")
    return header


def open_safetensors(path: str | Path) -> Any:
    """Open a safetensors file for numpy; close it, or use it as a context manager.

    Raises:
        FeatureFileError: there is no such file, or it is not a whole safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        if not Path(path).is_file():
            raise FileNotFoundError
        return safe_open(str(path), framework="np")
    except FileNotFoundError as error:
        raise FeatureFileError(f"{path}: no such features file") from error
    except (SafetensorError, OSError) as error:
        raise FeatureFileError(
            f"{path}: not a readable safetensors file ({error})",
            remedy="it may be cut short; extract the features again",
        ) from error


def header_in(path: str | Path, metadata: Mapping[str, str] | None) -> FeatureHeader:
    """Read the header from a features file's metadata.

    Raises:
        FeatureFileError: no header, or one that is not valid.
    """
    if not metadata or HEADER_KEY not in metadata:
        raise FeatureFileError(
            f"{path}: a safetensors file without a capvid header",
            remedy="extract the features with capvid, or give a packed file with its backbone and layer",
        )
    try:
        return FeatureHeader.from_json(metadata[HEADER_KEY])
    except FeatureFileError as error:
        raise FeatureFileError(f"{path}: {error.message}", remedy=error.remedy) from error
