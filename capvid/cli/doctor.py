"""``capvid doctor``: what is on this machine, and what to do about what is not."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import typer

from capvid.cli._terminal import print_line
from capvid.errors import CapvidError


def doctor() -> None:
    """Look at versions, devices, codecs, cache, Java and the Hub.

    Each line says how something stands; below a gap stands what to do about it. The exit code is 1 if capvid
    cannot be used, 0 otherwise.
    """
    broken = False
    for finding in diagnose():
        print_line(f"{finding.state.value:<6}  {finding.topic:<14}  {finding.found}")
        if finding.remedy:
            print_line(f"{'':<6}  {'':<14}  -> {finding.remedy}")
        broken = broken or finding.state is State.BROKEN
    if broken:
        raise typer.Exit(1)


PATIENCE = 5.0  # seconds, for the Hub and for Java
LITTLE = 2 * 1024**3  # bytes of disk
CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg1video", "mpeg2video", "mpeg4", "gif")
PACKAGES = (
    "torchvision",
    "timm",
    "transformers",
    "huggingface-hub",
    "safetensors",
    "accelerate",
    "nltk",
    "ruptures",
)


class State(Enum):
    """How something stands: as it should, missing but not needed by all, or not usable at all."""

    OK = "ok"
    GAP = "gap"
    BROKEN = "broken"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic: what it is.
        state: how it stands.
        found: what was found.
        remedy: what to do about a gap; empty where there is nothing to do.
    """

    topic: str
    state: State
    found: str
    remedy: str = ""


def diagnose() -> Iterator[Finding]:
    """Look at one thing after another; those that take longest come last."""
    for topic, look in _LOOKS.items():
        try:
            yield look(topic)
        except Exception as error:  # one broken library must not hide the state of the others
            reason = str(error) if isinstance(error, CapvidError | OSError | ImportError) else repr(error)
            yield Finding(topic=topic, state=State.BROKEN, found=" ".join(reason.split()))


def _software(topic: str) -> Finding:
    from capvid.version import __version__

    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return Finding(topic=topic, state=State.OK, found=f"{__version__} on {system}")


def _packages(topic: str) -> Finding:
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return Finding(
            topic=topic,
            state=State.BROKEN,
            found=f"without {', '.join(missing)}",
            remedy=f"pip install {' '.join(missing)}",
        )
    return Finding(topic=topic, state=State.OK, found=", ".join(found))


def _torch(topic: str) -> Finding:
    import torch

    return Finding(
        topic=topic, state=State.OK, found=f"{torch.__version__}, {torch.get_num_threads()} threads"
    )


def _accelerator(topic: str) -> Finding:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        return Finding(topic=topic, state=State.OK, found=", ".join(names))
    if torch.backends.mps.is_available():
        return Finding(topic=topic, state=State.OK, found="Apple MPS")
    built = torch.version.cuda
    remedy = "install a driver for it, if there is a GPU in this machine" if built else ""
    return Finding(
        topic=topic, state=State.GAP, found="none; everything runs on the processor", remedy=remedy
    )


def _codecs(topic: str) -> Finding:
    import av

    missing = [name for name in CODECS if not _decodes(name)]
    ffmpeg = ".".join(map(str, av.library_versions["libavcodec"]))
    found = f"PyAV {av.__version__} (libavcodec {ffmpeg})"
    if missing:
        return Finding(
            topic=topic,
            state=State.GAP,
            found=f"{found} cannot decode {', '.join(missing)}",
            remedy="pip install --upgrade --only-binary av av",
        )
    return Finding(topic=topic, state=State.OK, found=f"{found} decodes {', '.join(CODECS)}")


def _decodes(codec: str) -> bool:
    import av

    try:
        av.codec.Codec(codec, "r")
    except ValueError:
        return False
    return True


def _decord(topic: str) -> Finding:
    try:
        return Finding(topic=topic, state=State.OK, found=version("decord"))
    except PackageNotFoundError:
        return Finding(
            topic=topic,
            state=State.GAP,
            found="not installed; only asked where PyAV cannot open a file",
            remedy="pip install decord, where there is one for this platform",
        )


def _bundled(topic: str) -> Finding:
    from capvid.backbones.catalog import captioners, default_captioner
    from capvid.backbones.weights import local_weights
    from capvid.checkpoints.lookup import model_folder

    names = [name for name, entry in captioners().items() if entry.bundled]
    for name in names:
        model_folder(name)  # raises if its files are not as they should be
    if local_weights("capvid-small") is None:
        return Finding(
            topic=topic,
            state=State.BROKEN,
            found="the weights of capvid-small are not there",
            remedy="install capvid again",
        )
    return Finding(
        topic=topic, state=State.OK, found=f"{', '.join(names)} (by default {default_captioner()})"
    )


def _cache(topic: str) -> Finding:
    from huggingface_hub import constants

    folder = Path(constants.HF_HOME)
    there = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(there).free
    found = f"{folder}, {free / 1024**3:.0f} GB free"
    if not os.access(there, os.W_OK):
        return Finding(
            topic=topic,
            state=State.GAP,
            found=f"{folder} cannot be written to",
            remedy="let HF_HOME name a folder that can",
        )
    if free < LITTLE:
        return Finding(topic=topic, state=State.GAP, found=found, remedy="make room, or move it with HF_HOME")
    return Finding(topic=topic, state=State.OK, found=found)


def _meteor(topic: str) -> Finding:
    if find_spec("pycocoevalcap") is None:
        return Finding(
            topic=topic,
            state=State.GAP,
            found="its data are not installed",
            remedy="pip install 'capvid[meteor]'",
        )
    return Finding(topic=topic, state=State.OK, found=f"data of pycocoevalcap {version('pycocoevalcap')}")


def _java(topic: str) -> Finding:
    remedy = (
        "install a Java runtime, if you want to score with the papers' own programs; nothing else needs it"
    )
    java = shutil.which("java")
    if java is None:
        return Finding(topic=topic, state=State.GAP, found="none", remedy=remedy)
    try:
        done = subprocess.run(
            [java, "-version"], capture_output=True, text=True, errors="replace", timeout=PATIENCE, check=True
        )
    except (subprocess.SubprocessError, OSError) as error:
        return Finding(topic=topic, state=State.GAP, found=f"{java} does not run ({error})", remedy=remedy)
    said = (done.stderr or done.stdout).splitlines()
    return Finding(topic=topic, state=State.OK, found=said[0] if said else java)


def _hub(topic: str) -> Finding:
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    place = constants.ENDPOINT
    if constants.HF_HUB_OFFLINE:
        return Finding(
            topic=topic,
            state=State.GAP,
            found="not asked: HF_HUB_OFFLINE is set",
            remedy="unset it to download",
        )
    try:
        get_session().head(place, timeout=PATIENCE)
    except Exception as error:  # whatever the client's own kind of connection error is
        reason = type(error).__name__
        return Finding(
            topic=topic,
            state=State.GAP,
            found=f"{place} cannot be reached ({reason})",
            remedy="what comes with capvid needs no network; else check the connection, or HF_ENDPOINT",
        )
    return Finding(topic=topic, state=State.OK, found=f"{place} answers; {_token()}")


def _token() -> str:
    from huggingface_hub import get_token

    return "there is a token" if get_token() else "no token (only needed to push, and for private models)"


_LOOKS: dict[str, Callable[[str], Finding]] = {
    "capvid": _software,
    "bundled models": _bundled,
    "torch": _torch,
    "accelerator": _accelerator,
    "packages": _packages,
    "video codecs": _codecs,
    "decord": _decord,
    "cache": _cache,
    "METEOR": _meteor,
    "Java": _java,
    "Hub": _hub,
}
