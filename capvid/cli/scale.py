"""Large runs of ``capvid extract`` and ``capvid caption``: results in shards, here or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capvid.cli import common
from capvid.errors import CapvidError, UsageError

if TYPE_CHECKING:
    from capvid.cli.given import Given
    from capvid.engine.jobs import Job
    from capvid.video.inputs import VideoInput

VIDEOS_PER_FILE = {"captions": 1000, "features": 100}


class Engine(str, Enum):
    """Where a large run takes place."""

    local = "local"
    ray = "ray"


EngineOption = Annotated[
    Engine,
    typer.Option(
        "--engine", help="Where the work is done: on this machine, or on a Ray cluster (see docs/scale.md)."
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="ADDRESS",
        show_default="RAY_ADDRESS, else this machine",
        help="Of the Ray cluster: auto or HOST:PORT.",
    ),
]
VideosPerFile = Annotated[
    int | None,
    typer.Option(
        "--videos-per-file",
        min=1,
        max=common.MAX_VIDEOS_PER_FILE,
        show_default="a file for each; 1000 captions or 100 features in shards",
        help="Gather so many videos in each file of JSON lines, Parquet or WebDataset.",
    ),
]
RetryFailed = Annotated[
    bool, typer.Option("--retry-failed", help="Of what is in shards already, try again what failed.")
]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How a large run is done.

    Attributes:
        engine: where it takes place.
        ray_address: of the cluster.
        per_file: videos in a shard, if that was said.
        retry_failed: whether to try again what failed.
        device: where to compute; on Ray ``auto`` takes GPUs if the cluster has some.
        workers: processes that decode, here, if that was said.
        timeout: seconds after which a video is given up; None waits for ever.
        recursive: whether to look into the folders of a folder.
        overwrite: also do what is done, and remove all shards first.
        fail_fast: stop at the first video that fails.
    """

    engine: Engine
    ray_address: str | None
    per_file: int | None
    retry_failed: bool
    device: str
    workers: int | None
    timeout: float | None
    recursive: bool
    overwrite: bool
    fail_fast: bool

    @property
    def loads_on(self) -> str:
        """The device on which networks are loaded: on Ray each actor moves its own."""
        return "cpu" if self.engine is Engine.ray else self.device

    def wants_shards(self, folder: str | None, form: str | None) -> bool:
        """Whether results go into shards, for which there must be a folder.

        Raises:
            UsageError: options that do not go together.
        """
        from capvid.storage import Storage

        if self.ray_address and self.engine is not Engine.ray:
            raise UsageError("--ray-address is for --engine ray", remedy="give that too, or leave it out")
        at_address = folder is not None and Storage(folder).local is None
        wanted = (
            self.engine is Engine.ray
            or self.per_file is not None
            or self.retry_failed
            or at_address
            or form in ("parquet", "webdataset")
        )
        if wanted and folder is None:
            raise UsageError("shards need a folder or an address that takes them", remedy="give --output-dir")
        return wanted


def run_sharded(
    make_job: Callable[[], Job],
    given: Given,
    batch: common.Batch,
    folder: str,
    form: str,
    scale: Scale,
) -> None:
    """Do a job for all videos that are not in the shards yet, and count them in ``batch``.

    Args:
        make_job: makes the job when it is known that the engine is there.
        given: the inputs.
        batch: is told of what is done and what fails.
        folder: path or address for the shards.
        form: name of the shards' format.
        scale: how it is done.

    Raises:
        UsageError: the engine is not there, or the folder holds something else.
        CapvidError: what concerns all videos.
    """
    from capvid.digests import identity
    from capvid.files import remove_leftovers
    from capvid.output.shards import HEAD, ShardFolder
    from capvid.storage import Storage

    if scale.overwrite and given.part is not None:
        raise UsageError(
            "--overwrite would remove the shards of all parts",
            remedy="choose another folder, or empty it first",
        )
    if scale.engine is Engine.ray:
        _check_ray(scale)
    local = Storage(folder).local
    if local is not None:
        common.check_writable_folder(local)
        remove_leftovers([local / HEAD])
    batch.interrupted = common.GOES_ON
    job = make_job()
    shards = ShardFolder(folder, kind=job.kind, form=job.formats[form](), head=job.head)
    shards.begin(overwrite=scale.overwrite)
    done = shards.done(retry_failed=scale.retry_failed)

    def todo() -> Iterator[VideoInput]:
        for video in given.stream(batch, recursive=scale.recursive, fail_fast=scale.fail_fast):
            if identity(video.path) in done:
                batch.skipped += 1
            else:
                yield video

    how: dict[str, Any] = {"per_file": scale.per_file or VIDEOS_PER_FILE[job.kind], "timeout": scale.timeout}
    rows: Generator[Any, None, None]
    if scale.engine is Engine.ray:
        from capvid.engine.on_ray import run_on_ray

        gpu = None if scale.device == "auto" else scale.device.startswith("cuda")
        rows = run_on_ray(job, shards, todo(), address=scale.ray_address, gpu=gpu, **how)
    else:
        from capvid.engine.local import run_here

        rows = run_here(job, shards, todo(), workers=scale.workers or common.default_workers(), **how)
    _count(rows, batch, fail_fast=scale.fail_fast)


def _count(rows: Generator[Any, None, None], batch: common.Batch, *, fail_fast: bool) -> None:
    """Count rows as they come."""
    with closing(rows), batch.progress(None, data_on_stdout=False):
        for row in rows:
            batch.advance()
            batch.lost(row.video, row.lost)
            if row.error is None:
                batch.done += 1
                batch.generic += row.generic
                continue
            error = CapvidError(row.error)
            error.trace = row.trace
            batch.failed(error)
            if fail_fast:
                return


def _check_ray(scale: Scale) -> None:
    """See that Ray is there, before anything is loaded.

    Raises:
        UsageError: it is not, or options are for this machine alone.
    """
    from importlib.util import find_spec

    if find_spec("ray") is None:
        raise UsageError("--engine ray needs Ray Data", remedy="pip install 'capvid[ray]'")
    if scale.workers is not None:
        raise UsageError("--workers is for --engine local", remedy="leave it out: Ray shares out the cores")
    if scale.device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {scale.device} with --engine ray", remedy="use auto, cpu or cuda")
