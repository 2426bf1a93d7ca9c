"""Feature files: the features of one video as safetensors, with a header of everything they depend on.

Files are not trusted: functions raise FeatureFileError for a missing, damaged or too large file.

Array shapes: T frames, L locations of a feature map, D width of a stream.
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

from capvid.backbones.catalog import StreamHeader
from capvid.errors import FeatureFileError, FeatureMismatchError
from capvid.utils.files import atomic_path, open_regular
from capvid.utils.validation import limits, parse_json

FORMAT_VERSION = 1
HEADER_KEY = "capvid"
_VIDEO_KEY, _DURATION_KEY, _VIEW_KEY = "video", "duration", "view"
_DTYPES = {"float16": np.float16, "float32": np.float32}
_REQUIRED = (_VIDEO_KEY, "dtype", "capvid_version", "width")  # fields that must not be None
_MAX_STREAMS = 100
_MAX_VIEWS = 1_000_000
_MAX_TIME = 1e13  # seconds; larger times in float64 no longer distinguish frames
_AGAIN = "extract the features again"
# in names: control characters, and surrogates except those that stand for bytes of a file name
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udc7f\udd00-\udfff]")
_TENSOR_ERRORS = (SafetensorError, ValueError, TypeError, KeyError, AttributeError, OverflowError)


@dataclass(frozen=True, kw_only=True)
class FeatureHeader:
    """Everything that features depend on. A checkpoint contains the header of its training features.

    Attributes:
        streams: one header per stream.
        sampling: which frames were sampled; None if unknown.
        reader: video reader; None if unknown.
        dtype: stored type, float16 or float32.
        capvid_version: version of capvid that wrote the features.
        format_version: version of the file format.
    """

    streams: tuple[StreamHeader, ...]
    sampling: str | None
    reader: str | None
    dtype: str
    capvid_version: str
    format_version: int = FORMAT_VERSION

    @property
    def width(self) -> int:
        """Width of all streams, concatenated."""
        return sum([stream.width for stream in self.streams])

    @property
    def locations(self) -> int:
        """L of feature maps (T, L, D); 0 for vectors (T, D)."""
        return self.streams[0].locations or 0

    def check_alike(self) -> None:
        """Raise FeatureFileError unless the streams can be concatenated."""
        if len({stream.locations for stream in self.streams}) > 1:
            shapes = ", ".join(
                f"{stream.backbone or 'a stream'} "
                + (f"maps of {stream.locations} locations" if stream.locations else "one vector per frame")
                for stream in self.streams
            )
            raise FeatureFileError(
                f"streams that cannot be concatenated ({shapes})",
                remedy="extract layers that all give vectors, or maps of the same size",
            )

    def to_json(self) -> str:
        """Return the header as one line of JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> FeatureHeader:
        """Parse the header of a file, which is not trusted, and check all its fields."""
        try:
            values = parse_json(text)
            if not isinstance(values, dict):
                raise ValueError("not an object")
            version = values["format_version"]
            if version != FORMAT_VERSION:
                raise FeatureFileError(
                    f"feature header of format {version}, but this version of capvid reads {FORMAT_VERSION}",
                    remedy="extract the features again, or update capvid",
                )
            fields: list[tuple[str, str, Any]] = [("", _VIDEO_KEY, values.pop(_VIDEO_KEY, ""))]
            for key in (_DURATION_KEY, _VIEW_KEY):
                values.pop(key, None)
            listed = values.pop("streams")
            if not isinstance(listed, list) or not 1 <= len(listed) <= _MAX_STREAMS:
                raise ValueError(f"streams is not a list of 1 to {_MAX_STREAMS}")
            header = cls(streams=tuple([StreamHeader(**stream) for stream in listed]), **values)
            for name in ("sampling", "reader", "dtype", "capvid_version"):
                fields.append(("", name, getattr(header, name)))
            for number, stream in enumerate(header.streams, start=1):
                fields += [(f"stream {number} ", name, value) for name, value in vars(stream).items()]
            for prefix, name, value in fields:
                if value is None and name not in _REQUIRED:
                    continue
                if name in ("width", "locations"):
                    if type(value) is not int or value < 1:
                        raise ValueError(f"{prefix}{name} is {reprlib.repr(value)}, not a positive integer")
                elif not isinstance(value, str):
                    raise ValueError(f"{prefix}{name} is {reprlib.repr(value)}, not text")
                elif _UNPRINTABLE.search(value):
                    raise ValueError(f"{prefix}{name} {ascii(value)[:60]} contains unprintable characters")
            return header
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FeatureFileError(f"the feature header is not valid ({error})", remedy=_AGAIN) from error

    def mismatches(self, other: FeatureHeader) -> list[str]:
        """Describe each field in which ``other`` differs from this header of training features.

        Unknown fields (``None``) never differ; versions, reader and dtype are not compared.
        """
        if len(self.streams) != len(other.streams):
            trained, got = (
                f"{len(header.streams)} "
                f"({' + '.join(stream.backbone or f'{stream.width} wide' for stream in header.streams)})"
                for header in (self, other)
            )
            return [f"streams: trained on {trained}, got {got}"]
        differing = []
        for number, (ours, theirs) in enumerate(zip(self.streams, other.streams, strict=True), start=1):
            prefix = f"stream {number} " if len(self.streams) > 1 else ""
            differing += [prefix + text for text in ours.mismatches(theirs)]
        if None not in (self.sampling, other.sampling) and self.sampling != other.sampling:
            differing.append(f"sampling: trained on {self.sampling}, got {other.sampling}")
        return differing

    def require_match(self, other: FeatureHeader) -> None:
        """Raise FeatureMismatchError, naming each differing field, unless ``other`` matches this header."""
        if differing := self.mismatches(other):
            remedy = "extract them with the captioner's backbone, layer and sampling"
            if all(stream.backbone for stream in self.streams):
                remedy += f": {self.extract_command()}"
            problem = f"the features are not those the captioner was trained on: {', '.join(differing)}"
            raise FeatureMismatchError(problem, remedy=remedy)

    def extract_command(self) -> str:
        """Return the command that extracts such features."""
        backbones = [f"--backbone {stream.backbone}" for stream in self.streams]
        layers = [f"--layer {stream.layer}" for stream in self.streams if stream.layer]
        layers = layers if len(layers) == len(backbones) else []
        sampling = [f"--sampling {self.sampling}"] if self.sampling else []
        return " ".join(["capvid extract VIDEOS", *backbones, *layers, *sampling, "-o FEATURES"])


@dataclass(frozen=True, kw_only=True)
class Features:
    """The features of one video.

    Attributes:
        header: everything they depend on.
        streams: float32 arrays (T, D) or (T, L, D), all with the same T >= 1.
        times: presentation times (T,) in seconds, float64; ``None`` if unknown.
        video: name of the video.
        duration: length of the video in seconds; ``None`` if unknown.
        view: number of the augmented view; 0 for the original.
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
            if not stream.shape or stream.shape[1:] != header.inner or not len(stream):
                expected = ", ".join(("T", *map(str, header.inner)))
                raise FeatureFileError(
                    f"{self.video}: a stream has the shape {stream.shape}, expected ({expected})"
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
        """Length of the video; if unknown, an estimate from the times of its frames."""
        if self.duration is not None or self.times is None:
            return self.duration
        return float(self.times[-1] + (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1))

    def concatenated(self) -> np.ndarray:
        """Return the streams concatenated: (T, sum of D) float32, or (T, L, sum of D) if they are maps.

        Raises:
            FeatureFileError: the streams are vectors and maps, or maps of different sizes.
        """
        self.header.check_alike()
        return np.concatenate(self.streams, axis=-1, dtype=np.float32)


def save_features(path: str | Path, features: Features) -> None:
    """Write a feature file in ``header.dtype``, atomically.

    Raises:
        FeatureFileError: the features cannot be stored in that dtype, or the file cannot be written.
    """
    data = features_to_bytes(features, name=path)
    try:
        with atomic_path(path) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise FeatureFileError(f"{path}: cannot be written ({error.strerror or error})") from error


def features_to_bytes(features: Features, *, name: str | Path = "") -> bytes:
    """Return the bytes of a feature file; errors begin with ``name``, by default the video's."""
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
    # one metadata entry, since safetensors may write several in any order
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


def load_features(path: str | Path) -> Features:
    """Read a feature file; streams become float32.

    Raises:
        FeatureFileError: the file is missing or damaged, or its tensors do not match its header.
    """
    with open_safetensors(path) as handle:
        return _read(path, handle)


def _read(path: str | Path, handle: Any) -> Features:
    """Read the features in an open safetensors file."""
    header = header_in(path, handle.metadata())
    streams = tuple(
        read_tensor(path, handle, f"stream{index}", "F16", "F32").astype(np.float32)
        for index in range(len(header.streams))
    )
    times = read_times(path, handle)
    metadata = parse_json(handle.metadata()[HEADER_KEY])
    video = metadata.get(_VIDEO_KEY, _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", Path(path).stem))
    duration, view = metadata.get(_DURATION_KEY), metadata.get(_VIEW_KEY, 0)
    try:
        if duration is not None and not (type(duration) in (int, float) and 0 <= duration <= _MAX_TIME):
            raise ValueError(f"{_DURATION_KEY} is {reprlib.repr(duration)}, not a number of seconds")
        if type(view) is not int or not 0 <= view <= _MAX_VIEWS:
            raise ValueError(f"{_VIEW_KEY} is {reprlib.repr(view)}, not the number of a view")
        if not all(np.isfinite(stream).all() for stream in streams):
            raise ValueError("has values that are not finite")
        duration = None if duration is None else float(duration)
        return Features(
            header=header, streams=streams, times=times, video=video, duration=duration, view=view
        )
    except (ValueError, FeatureFileError) as error:
        message = error.message if isinstance(error, FeatureFileError) else error
        raise FeatureFileError(f"{path}: {message}", remedy=_AGAIN) from error


def read_tensor(path: str | Path, handle: Any, name: str, *dtypes: str) -> np.ndarray:
    """Read a tensor of an open file if it has one of the ``dtypes``, by their names in safetensors."""
    try:
        dtype = handle.get_slice(name).get_dtype()  # checked before the tensor takes memory
        if dtype in dtypes:
            tensor: np.ndarray = handle.get_tensor(name)
            return tensor
    except _TENSOR_ERRORS as error:
        raise FeatureFileError(f"{path}: {name} cannot be read ({error})", remedy=_AGAIN) from error
    raise FeatureFileError(f"{path}: {name} is {dtype}, expected {' or '.join(dtypes)}", remedy=_AGAIN)


def read_times(path: str | Path, handle: Any) -> np.ndarray | None:
    """Read the times (T,) in seconds from an open file; None if it has none."""
    if "times" not in handle.keys():  # noqa: SIM118 - the handle is no mapping
        return None
    times = read_tensor(path, handle, "times", "F64", "F32").astype(np.float64)
    if times.ndim != 1 or not len(times):
        problem = f"the shape {times.shape}, expected (T,)"
    elif not (np.abs(times) <= _MAX_TIME).all():
        problem = "values that are not seconds"
    elif (np.diff(times) < 0).any():
        problem = "values that are not in ascending order"
    else:
        return times
    raise FeatureFileError(f"{path}: times has {problem}", remedy=_AGAIN)


def load_times(path: str | Path) -> np.ndarray | None:
    """Read only the times (T,) of a feature file in seconds; None if it has none."""
    with open_safetensors(path) as handle:
        return read_times(path, handle)


def stream_length(path: str | Path, handle: Any, header: FeatureHeader) -> int:
    """Return the number of frames T in an open file, without reading its streams."""
    lengths = set()
    for index, stream in enumerate(header.streams):
        try:
            shape = tuple(handle.get_slice(f"stream{index}").get_shape())
        except _TENSOR_ERRORS as error:
            raise FeatureFileError(f"{path}: has no stream{index} ({error})", remedy=_AGAIN) from error
        if shape[1:] != stream.inner or not shape[0]:
            expected = ", ".join(("T", *map(str, stream.inner)))
            problem = f"stream{index} has the shape {shape}, expected ({expected})"
            raise FeatureFileError(f"{path}: {problem}", remedy=_AGAIN)
        lengths.add(shape[0])
    if len(lengths) > 1:
        raise FeatureFileError(f"{path}: streams of different lengths {sorted(lengths)}", remedy=_AGAIN)
    return int(lengths.pop())


def load_header(path: str | Path) -> FeatureHeader:
    """Read the header of a feature file, and check the shapes of its streams without reading them."""
    with open_safetensors(path) as handle:
        header = header_in(path, handle.metadata())
        stream_length(path, handle, header)
    return header


def open_safetensors(path: str | Path) -> Any:
    """Open a safetensors file for numpy, as a context manager."""
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
        raise FeatureFileError(f"{path}: no such feature file") from error
    except (SafetensorError, OSError) as error:
        problem = f"{path}: not a readable safetensors file ({error})"
        raise FeatureFileError(problem, remedy="it may be truncated; extract the features again") from error


def header_in(path: str | Path, metadata: Mapping[str, str] | None) -> FeatureHeader:
    """Parse the header in the metadata of the file at ``path``."""
    if not metadata or HEADER_KEY not in metadata:
        raise FeatureFileError(
            f"{path}: a safetensors file without capvid's header",
            remedy="extract the features with capvid, or give a packed file with its backbone and layer",
        )
    try:
        return FeatureHeader.from_json(metadata[HEADER_KEY])
    except FeatureFileError as error:
        raise FeatureFileError(f"{path}: {error.message}", remedy=error.remedy) from error
