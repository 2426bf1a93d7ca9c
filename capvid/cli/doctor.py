"""``capvid doctor``: diagnostics of this machine, and how to fix them."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import typer

from capvid.cli._terminal import print_line
from capvid.errors import CapvidError


def doctor() -> None:
    """Check versions, devices, codecs, cache, Java and the Hub.

    Each line shows the state of one of them: ok, gap (missing, but not needed by all) or broken; the line
    below a gap says what to do about it. The exit code is 1 if capvid cannot be used, 0 otherwise.
    """
    states = []
    for topic, state, text, remedy in diagnose():
        states.append(state)
        print_line(f"{state:<6}  {topic:<14}  {text}")
        if remedy:
            print_line(f"{'':<6}  {'':<14}  -> {remedy}")
    if BROKEN in states:
        raise typer.Exit(1)


OK, GAP, BROKEN = "ok", "gap", "broken"
TIMEOUT = 5.0  # seconds, for the Hub and for Java
MIN_FREE = 2 * 1024**3  # bytes of disk
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

Check = tuple[str, str, str]  # state, text, remedy


def diagnose() -> Iterator[tuple[str, str, str, str]]:
    """Yield topic, state, text and remedy of each check; those that take longest come last."""
    for topic, check in _CHECKS.items():
        try:
            yield topic, *check()
        except Exception as error:  # one broken library must not hide the state of the others
            reason = str(error) if isinstance(error, CapvidError | OSError | ImportError) else repr(error)
            yield topic, BROKEN, " ".join(reason.split()), ""


def _software() -> Check:
    from capvid.version import __version__

    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return OK, f"{__version__} on {system}", ""


def _packages() -> Check:
    installed, missing = [], []
    for name in PACKAGES:
        try:
            installed.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return BROKEN, f"without {', '.join(missing)}", f"pip install {' '.join(missing)}"
    return OK, ", ".join(installed), ""


def _torch() -> Check:
    import torch

    return OK, f"{torch.__version__}, {torch.get_num_threads()} threads", ""


def _accelerator() -> Check:
    import torch

    if torch.cuda.is_available():
        return OK, ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))), ""
    if torch.backends.mps.is_available():
        return OK, "Apple MPS", ""
    remedy = "install a driver for it, if there is a GPU in this machine" if torch.version.cuda else ""
    return GAP, "none; everything runs on the processor", remedy


def _memory() -> Check:
    from capvid.utils.device import free_memory

    free, where = free_memory()
    billions = free / (4e9 if where == "of RAM" else 2e9) / 1.2
    text = f"{free / 1e9:.1f} GB {where} are free, for chat models of up to {billions:.1f} billion weights"
    return OK, text, ""


def _codecs() -> Check:
    import av

    missing = []
    for name in CODECS:
        try:
            av.codec.Codec(name, "r")
        except ValueError:
            missing.append(name)
    ffmpeg = ".".join(map(str, av.library_versions["libavcodec"]))
    text = f"PyAV {av.__version__} (libavcodec {ffmpeg})"
    if missing:
        remedy = "pip install --upgrade --only-binary av av"
        return GAP, f"{text} cannot decode {', '.join(missing)}", remedy
    return OK, f"{text} decodes {', '.join(CODECS)}", ""


def _decord() -> Check:
    try:
        return OK, version("decord"), ""
    except PackageNotFoundError:
        text = "not installed; only asked where PyAV cannot open a file"
        return GAP, text, "pip install decord, where there is one for this platform"


def _bundled() -> Check:
    from capvid.backbones.catalog import captioners, default_captioners
    from capvid.backbones.weights import local_weights
    from capvid.checkpoints.lookup import model_folder

    names = [name for name, entry in captioners().items() if entry.bundled]
    for name in names:
        model_folder(name)  # raises if its files are damaged
    if local_weights("capvid-small") is None:
        return BROKEN, "the weights of capvid-small are not there", "install capvid again"
    return OK, f"{', '.join(names)} (by default {' or '.join(default_captioners())})", ""


def _cache() -> Check:
    from huggingface_hub import constants

    folder = Path(constants.HF_HOME)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    text = f"{folder}, {free / 1024**3:.0f} GB free"
    if not os.access(existing, os.W_OK):
        return GAP, f"{folder} cannot be written to", "let HF_HOME name a folder that can"
    return (GAP, text, "make room, or move it with HF_HOME") if free < MIN_FREE else (OK, text, "")


def _meteor() -> Check:
    if find_spec("pycocoevalcap") is None:
        return GAP, "its data are not installed", "pip install 'capvid[meteor]'"
    return OK, f"data of pycocoevalcap {version('pycocoevalcap')}", ""


def _java() -> Check:
    remedy = (
        "install a Java runtime, if you want to score with the papers' own programs; nothing else needs it"
    )
    java = shutil.which("java")
    if java is None:
        return GAP, "none", remedy
    command = [java, "-version"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=True
        )
    except (subprocess.SubprocessError, OSError) as error:
        return GAP, f"{java} does not run ({error})", remedy
    return OK, ((done.stderr or done.stdout).splitlines() or [java])[0], ""


def _hub() -> Check:
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return GAP, "not asked: HF_HUB_OFFLINE is set", "unset it to download"
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception as error:  # each version of the client raises connection errors of its own
        remedy = "what comes with capvid needs no network; else check the connection, or HF_ENDPOINT"
        return GAP, f"{constants.ENDPOINT} cannot be reached ({type(error).__name__})", remedy
    token = "there is a token" if get_token() else "no token (only needed to push, and for private models)"
    return OK, f"{constants.ENDPOINT} answers; {token}", ""


_CHECKS: dict[str, Callable[[], Check]] = {
    "capvid": _software,
    "bundled models": _bundled,
    "torch": _torch,
    "accelerator": _accelerator,
    "memory": _memory,
    "packages": _packages,
    "video codecs": _codecs,
    "decord": _decord,
    "cache": _cache,
    "METEOR": _meteor,
    "Java": _java,
    "Hub": _hub,
}
