"""Weights published by torchvision, in torch's download folder (``TORCH_HOME``).

The name of such a file ends with the first digits of its SHA-256, which are always checked; the full digest
is recorded at the first use, as for files of the Hub. ``HF_HUB_OFFLINE`` forbids these downloads too.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from capvid.errors import UsageError, WeightsError
from capvid.hub.client import record
from capvid.utils.files import sha256_file


def fetch(source: str) -> Path:
    """Return the file of torchvision weights, downloading it unless it is cached.

    Args:
        source: ``torchvision:ENUM.MEMBER``, such as ``torchvision:R3D_18_Weights.KINETICS400_V1``.

    Raises:
        UsageError: torchvision has no such weights.
        WeightsError: the file cannot be downloaded, or has another digest.
    """
    url = _url(source)
    path = _target(url)
    match = re.search(r"-([0-9a-f]{8,})\.\w+$", url)  # such as s3d-d76dad2f.pth
    expected = match[1] if match else ""
    if not path.is_file():
        _download(url, path, expected)
    digest = sha256_file(path)
    if digest.startswith(expected):
        expected = record(url, digest)
    if not digest.startswith(expected):
        raise WeightsError(
            f"{path}: not the file of {url} (sha256 {digest[:12]}..., expected {expected[:12]}...)",
            remedy="delete it and try again; if it stays so, do not trust the file",
        )
    return path


def cached(source: str) -> Path | None:
    """Return the file that ``fetch`` would return if it is cached, without verification.

    Raises:
        UsageError: torchvision has no such weights.
    """
    if not any(_folder().glob("*")):  # checked before torchvision is imported, which takes seconds
        return None
    path = _target(_url(source))
    return path if path.is_file() else None


def _url(source: str) -> str:
    from torchvision.models import get_weight

    try:
        return str(get_weight(source.removeprefix("torchvision:")).url)
    except (KeyError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{source}: the installed torchvision has no such weights",
            remedy="write it as torchvision:ENUM.MEMBER, or upgrade torchvision",
        ) from error


def _target(url: str) -> Path:
    return _folder() / url.rpartition("/")[2]


def _folder() -> Path:
    """Return torch's download folder; torch itself is asked only if it is imported already."""
    if "torch" in sys.modules:
        return Path(sys.modules["torch"].hub.get_dir()) / "checkpoints"
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("TORCH_HOME", str(Path(cache) / "torch"))
    return Path(home).expanduser() / "hub" / "checkpoints"


def _download(url: str, path: Path, digest_prefix: str) -> None:
    import torch
    from huggingface_hub import constants

    remedy = f"download {url} elsewhere and put it at {path}, or give it with --weights FILE"
    if constants.HF_HUB_OFFLINE:
        raise WeightsError(f"{path.name}: not there, and HF_HUB_OFFLINE forbids downloads", remedy=remedy)
    terminal = bool(sys.stderr and sys.stderr.isatty())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), hash_prefix=digest_prefix or None, progress=terminal)
    except (OSError, RuntimeError, EOFError, ValueError) as error:  # RuntimeError: another digest
        cause = " ".join(str(error).split()) or type(error).__name__
        raise WeightsError(f"{path.name}: cannot be downloaded ({cause})", remedy=remedy) from error
