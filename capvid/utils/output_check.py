"""Check of outputs before any work: none may replace an input, or a file of another kind.

A video whose name is given to ``-o`` by mistake cannot be restored. Every command therefore passes all its
outputs and inputs to :func:`check_outputs` as soon as it knows them.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from capvid.errors import UsageError
from capvid.utils.files import open_regular
from capvid.utils.storage import Blob, VideoPath, is_url, parse_path, protocol_of

Output = tuple[str, VideoPath | str]  # an option, and a path or address
Kind = Literal["text", "image", "weights", "features"]

_HEAD = 4096  # bytes that show the kind of a file
_SIGNATURES = (  # offset, bytes and kind of what is not text
    (0, b"\x89PNG", "an image"),
    (0, b"\xff\xd8\xff", "an image"),
    (0, b"GIF8", "an image"),
    (0, b"II*\0", "an image"),
    (0, b"MM\0*", "an image"),
    (8, b"WEBP", "an image"),
    (4, b"ftyp", "a video"),
    (4, b"moov", "a video"),
    (4, b"mdat", "a video"),
    (0, b"\x1a\x45\xdf\xa3", "a video"),  # Matroska, WebM
    (8, b"AVI ", "a video"),
    (0, b"FLV\x01", "a video"),
    (0, b"OggS", "a video"),
    (0, b"\0\0\x01\xba", "a video"),  # MPEG program stream
    (0, b"\0\0\x01\xb3", "a video"),
    (188, b"G", "a video"),  # MPEG transport stream
    (0, b"\x30\x26\xb2\x75", "a video"),  # ASF, WMV
    (0, b"PK\x03\x04", "an archive"),  # or a checkpoint of torch.save
    (0, b"\x1f\x8b", "an archive"),
    (0, b"BZh", "an archive"),
    (0, b"\xfd7zXZ", "an archive"),
    (0, b"7z\xbc\xaf", "an archive"),
    (0, b"\x28\xb5\x2f\xfd", "an archive"),  # Zstandard
    (257, b"ustar", "an archive"),
    (0, b"PAR1", "a Parquet file"),
    (5, b"\0\0\0{", "a checkpoint"),  # safetensors: 8 bytes of length, and its header
    (0, b"\x80\x02", "a checkpoint"),  # pickle, as torch.save once wrote
    (0, b"\x89HDF", "a checkpoint"),
    (0, b"GGUF", "a checkpoint"),
)
_VIDEOS = (
    ".3g2 .3gp .asf .avi .divx .flv .gif .m2ts .m4v .mkv .mov .mp4 .mpeg .mpg .mts .ogv .ts .vob .webm .wmv"
)
_SUFFIXES = {  # for what has no signature, is empty, or does not exist yet
    **dict.fromkeys(_VIDEOS.split(), "a video"),
    **dict.fromkeys((".bmp", ".heic", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"), "an image"),
    **dict.fromkeys((".7z", ".bz2", ".gz", ".tar", ".tgz", ".xz", ".zip", ".zst"), "an archive"),
    **dict.fromkeys((".ckpt", ".h5", ".pkl", ".pt", ".pth", ".safetensors"), "a checkpoint"),
    ".parquet": "a Parquet file",
}
_EXPECTED = {
    "text": ("text",),
    "image": ("an image", "a document", "text"),  # PNG, PDF, SVG
    "weights": ("a checkpoint",),
    "features": ("features", "text", "a binary file"),  # the last two are damaged features
}
_SPELLINGS = {"s3a": "s3", "gcs": "gs", "abfss": "abfs"}  # of protocols
_CONTROLS = set(range(32)) - set(b"\t\n\f\r\x1b")  # in no text


def check_outputs(
    outputs: Iterable[Output],
    inputs: Iterable[VideoPath | str],
    *,
    kind: Kind | None = "text",
) -> None:
    """Refuse an output that is an input or another output, or would replace a file of another kind.

    Files are compared, not names: links, hard links and ``..`` make no difference. Names that differ only in
    case or Unicode normalization are one, as on file systems that do not distinguish them.

    Args:
        outputs: paths or addresses to be written, each with the option or role that messages name.
        inputs: paths and addresses that are read; a member of an archive stands for the archive. They are
            iterated once, in constant memory.
        kind: what is written; None does not look at what existing files hold.

    Raises:
        UsageError: such an output.
    """
    files: dict[tuple[int, int], Output] = {}  # by device and inode
    named: dict[str, list[tuple[tuple[int, int] | None, Output]]] = {}  # by name without case, with folder
    addresses: dict[str, Output] = {}
    for option, path in outputs:
        local = _local(path)
        if local is None:
            addresses[_address(path)] = (option, path)
            continue
        if kind is not None:
            _check_kind(option, local, kind)
        (name, folder), identity = _name_and_folder(local), _identity(local)
        same = [files[identity]] if identity in files else []
        same += [each for other, each in named.get(name, ()) if other == folder]
        for other_option, other_path in same:
            if option != other_option:  # otherwise files of several videos, which their own rules keep apart
                problem = f"{path}: {option} and {other_option} ({other_path}) are one file"
                raise UsageError(problem, remedy="give them two names")
        named.setdefault(name, []).append((folder, (option, path)))
        if identity is not None:
            files[identity] = (option, path)
    for path in inputs:
        local = _local(path)
        if local is None:
            match = addresses.get(_address(path)) if addresses else None
        else:
            identity = _identity(local)
            match = None if identity is None else files.get(identity)
            if match is None and _fold(local.name) in named:
                name, folder = _name_and_folder(local)
                match = next((each for other, each in named.get(name, ()) if other == folder), None)
        if match is not None:
            option, output = match
            also = "" if os.fspath(path) == os.fspath(output) else f" as {path}"
            problem = f"{output}: is the file that is read{also}"
            raise UsageError(problem, remedy=f"give another name with {option}")


def model_files(folder: Path) -> Iterator[Path]:
    """Yield the files of the model in a folder, or in the ``best`` of a run folder."""
    for path in (folder, folder / "best"):
        if any((path / name).is_file() for name in ("captioner.json", "config.json")):
            yield from path.glob("*")


def _check_kind(option: str, path: Path, kind: Kind) -> None:
    """Refuse a path with the name or the content of something else than ``kind``."""
    content, by_name = content_kind(path), _SUFFIXES.get(path.suffix.lower(), "")
    problem = by_name if kind == "text" else ""
    if content and content not in _EXPECTED[kind]:
        problem = content
    if problem:
        exists = f"is {problem}, which {option} would replace" if content else f"is the name of {problem}"
        raise UsageError(f"{path}: {exists}", remedy=f"give another name with {option}")


def content_kind(path: Path) -> str:
    """Return the kind of a file's content; an empty string if there is no regular file, or an empty one."""
    try:
        with open_regular(path) as file:
            head = file.read(_HEAD)
    except (OSError, ValueError):  # what cannot be read is reported when it is written
        return ""
    if not head or head.startswith((b"\xff\xfe", b"\xfe\xff")):  # UTF-16
        return "text" if head else ""
    if _CONTROLS.isdisjoint(head):
        return "a document" if head.startswith(b"%PDF") else "text"
    kind = next((kind for at, mark, kind in _SIGNATURES if head.startswith(mark, at)), "a binary file")
    return "features" if kind == "a checkpoint" and b'"capvid":' in head else kind


def _local(path: VideoPath | str) -> Path | None:
    """Return the local file of a path, or of the archive that holds it; None for an address."""
    path = parse_path(path)
    if isinstance(path, Path):
        return path
    if is_url(path.url):
        return Path(path.url.partition("://")[2]) if protocol_of(path.url) == "local" else None
    return Path(path.url)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a file, or of the archive that a path leads into; None if there is none."""
    for each in (path, *path.parents):
        try:
            status = os.stat(each)  # noqa: PTH116
            return (status.st_dev, status.st_ino)
        except NotADirectoryError:  # a folder of images in a zip file
            continue
        except (OSError, ValueError):
            return None
    return None


def _fold(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def _name_and_folder(path: Path) -> tuple[str, tuple[int, int] | None]:
    """Return the name of a file without case, links resolved, and the identity of its folder."""
    try:
        path = Path(os.path.realpath(path))
    except ValueError:  # a NUL in the name
        return path.name, None
    return _fold(path.name), _identity(path.parent)


def _address(path: VideoPath | str) -> str:
    """Return the address of an object, or of the archive that holds it, in one spelling."""
    blob = parse_path(path)
    url = blob.url if isinstance(blob, Blob) else os.fspath(blob)
    protocol = protocol_of(url)
    return f"{_SPELLINGS.get(protocol, protocol)}://{url.partition('://')[2].rstrip('/')}"
