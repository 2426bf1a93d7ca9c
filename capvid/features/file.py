"""The features of one video as a safetensors file with a header that says how they were made.

Notation for tensor shapes: T frames, L locations of a feature map, D width of a stream.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from capvid.errors import FeatureFileError, FeatureMismatchError
from capvid.features.held import HeldFile
from capvid.features.registry import canonical_backbone
from capvid.files import atomic_path, open_regular
from capvid.limits import limits
from capvid.parsing import parse_json

FORMAT_VERSION = 1
HEADER_KEY = "capvid"
_VIDEO_KEY, _DURATION_KEY, _VIEW_KEY = "video", "duration", "view"
_DTYPES = {"float16": np.float16, "float32": np.float32}
_MOST_STREAMS = 100
_MOST_VIEWS = 1_000_000
_LATEST = 1e13  # seconds; beyond it, times in float64 no longer tell frames apart
# in names: control characters, and halves of characters but those that stand for bytes of a file name
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udc7f\udd00-\udfff]")


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

    @property
    def inner(self) -> tuple[int, ...]:
        """The shape of one frame: (D,) or (L, D)."""
        return (self.width,) if self.locations is None else (self.locations, self.width)

    def check_types(self, prefix: str) -> None:
        """Raise ValueError, naming the field after ``prefix``, where a field is not of its type."""
        for name in ("backbone", "layer", "weights_sha256", "preprocess", "precision"):
            _check_text(prefix + name, getattr(self, name), optional=True)
        for name in ("width", "locations"):
            value = getattr(self, name)
            if not (name == "locations" and value is None) and (type(value) is not int or value < 1):
                raise ValueError(f"{prefix}{name} is {reprlib.repr(value)}, not a positive whole number")

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
            values = parse_json(text)
            if not isinstance(values, dict):
                raise ValueError("not an object")
            version = values["format_version"]
            if version != FORMAT_VERSION:
                raise FeatureFileError(
                    f"feature header of format {version}, while this capvid reads format {FORMAT_VERSION}",
                    remedy="extract the features again, or update capvid",
                )
            for key in (_VIDEO_KEY, _DURATION_KEY, _VIEW_KEY):
                values.pop(key, None)
            listed = values.pop("streams")
            if not isinstance(listed, list) or not 1 <= len(listed) <= _MOST_STREAMS:
                raise ValueError(f"streams is not a list of 1 to {_MOST_STREAMS}")
            streams = tuple(StreamHeader(**stream) for stream in listed)
            for number, stream in enumerate(streams):
                stream.check_types(f"stream {number + 1} ")
            header = cls(streams=streams, **values)
            for name in ("sampling", "reader", "dtype", "capvid_version"):
                optional = name in ("sampling", "reader")
                _check_text(name, getattr(header, name), optional=optional)
            return header
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
            expected = header.inner
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
    header = {
        **dataclasses.asdict(features.header),
        _VIDEO_KEY: _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", features.video),
    }
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
    try:
        held = HeldFile(data)
    except _TENSOR_ERRORS as error:
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
    header = header_in(path, handle.metadata())
    streams = tuple(
        read_tensor(path, handle, f"stream{index}", "F16", "F32").astype(np.float32)
        for index in range(len(header.streams))
    )
    times = read_times(path, handle)
    facts = parse_json(handle.metadata()[HEADER_KEY])
    try:
        video, duration, view = _facts(facts, default_name=Path(path).stem)
    except ValueError as error:
        raise FeatureFileError(f"{path}: {error}", remedy="extract the features again") from error
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


def _facts(header: Mapping[str, Any], *, default_name: str) -> tuple[str, float | None, int]:
    """Return the video's name, duration and view of a header; ValueError names the field that is wrong."""
    video = header.get(_VIDEO_KEY, _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", default_name))
    _check_text(_VIDEO_KEY, video)
    duration = header.get(_DURATION_KEY)
    if duration is not None and not (type(duration) in (int, float) and 0 <= duration <= _LATEST):
        raise ValueError(f"{_DURATION_KEY} is {reprlib.repr(duration)}, not a number of seconds")
    view = header.get(_VIEW_KEY, 0)
    if type(view) is not int or not 0 <= view <= _MOST_VIEWS:
        raise ValueError(f"{_VIEW_KEY} is {reprlib.repr(view)}, not the number of a view")
    return video, None if duration is None else float(duration), view


def _check_text(name: str, value: Any, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not isinstance(value, str):
        raise ValueError(f"{name} is {reprlib.repr(value)}, not text")
    if _UNPRINTABLE.search(value):
        raise ValueError(f"{name} {ascii(value)[:60]} holds characters that cannot be printed")


_TENSOR_ERRORS = (SafetensorError, ValueError, TypeError, KeyError, AttributeError, OverflowError)


def read_tensor(path: str | Path, handle: Any, name: str, *dtypes: str) -> np.ndarray:
    """Read one tensor of an open file, of one of the ``dtypes`` as safetensors calls them.

    Raises:
        FeatureFileError: there is no such tensor, it cannot be read, or is of another dtype.
    """
    try:
        dtype = handle.get_slice(name).get_dtype()  # before the tensor takes memory
        if dtype in dtypes:
            tensor: np.ndarray = handle.get_tensor(name)
            return tensor
    except _TENSOR_ERRORS as error:
        raise FeatureFileError(
            f"{path}: {name} cannot be read ({error})", remedy="extract the features again"
        ) from error
    raise FeatureFileError(
        f"{path}: {name} is {dtype}, expected {' or '.join(dtypes)}", remedy="extract the features again"
    )


def read_times(path: str | Path, handle: Any) -> np.ndarray | None:
    """Read the times (T,) of the frames in seconds from an open file, if it holds them.

    Raises:
        FeatureFileError: they cannot be read, are not finite or not in ascending order.
    """
    if "times" not in handle.keys():  # noqa: SIM118 - the handle is no mapping
        return None
    times = read_tensor(path, handle, "times", "F64", "F32").astype(np.float64)
    wrong = ""
    if times.ndim != 1 or not len(times):
        wrong = f"the shape {times.shape}, expected (T,)"
    elif not (np.abs(times) <= _LATEST).all():
        wrong = "values that are not seconds"
    elif (np.diff(times) < 0).any():
        wrong = "values that are not in ascending order"
    if wrong:
        raise FeatureFileError(f"{path}: times has {wrong}", remedy="extract the features again")
    return times


def load_times(path: str | Path) -> np.ndarray | None:
    """Read the times (T,) of one video's frames in seconds, if they are known, and nothing else.

    Raises:
        FeatureFileError: missing, not safetensors, or cut short.
    """
    with open_safetensors(path) as handle:
        return read_times(path, handle)


def stream_length(path: str | Path, handle: Any, header: FeatureHeader) -> int:
    """Return the number of frames T of the streams in an open file, without reading them.

    Raises:
        FeatureFileError: a stream is missing, or of another shape than the header says.
    """
    lengths = set()
    for index, stream in enumerate(header.streams):
        try:
            shape = tuple(handle.get_slice(f"stream{index}").get_shape())
        except _TENSOR_ERRORS as error:
            raise FeatureFileError(
                f"{path}: has no stream{index} ({error})", remedy="extract the features again"
            ) from error
        if shape[1:] != stream.inner or not shape[0]:
            wanted = ", ".join(("T", *map(str, stream.inner)))
            raise FeatureFileError(
                f"{path}: stream{index} has the shape {shape}, expected ({wanted})",
                remedy="extract the features again",
            )
        lengths.add(shape[0])
    if len(lengths) > 1:
        raise FeatureFileError(
            f"{path}: streams of different lengths {sorted(lengths)}", remedy="extract the features again"
        )
    return int(lengths.pop())


def load_header(path: str | Path) -> FeatureHeader:
    """Read how one video's features were made, and see that they are all there, without reading them.

    Raises:
        FeatureFileError: missing, not safetensors, cut short, without header or a stream that it names.
    """
    with open_safetensors(path) as handle:
        header = header_in(path, handle.metadata())
        stream_length(path, handle, header)
    return header


def open_safetensors(path: str | Path) -> Any:
    """Open a safetensors file for numpy; close it, or use it as a context manager.

    Raises:
        FeatureFileError: there is no such file, or it is not a whole safetensors file.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
        if size > limits().feature_bytes:
            raise FeatureFileError(
                f"{path}: larger than the limit of {limits().feature_bytes} bytes",
                remedy="see the limits in the configuration",
            )
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
