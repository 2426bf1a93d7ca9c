"""Large runs of ``capvid extract`` and ``capvid caption``: results in shards, here or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from capvid.cli._inputs import InputSet
from capvid.cli._options import RuntimeOptions, ShardingOptions
from capvid.cli._progress import GOES_ON, Batch, check_writable_folder
from capvid.errors import CapvidError, UsageError

if TYPE_CHECKING:
    from capvid.distributed.jobs import Job
    from capvid.video.input_set import VideoInput

VIDEOS_PER_FILE = {"captions": 1000, "features": 100}
SHARD_FORMATS = ("parquet", "webdataset")  # formats that exist as shards only


def wants_shards(sharding: ShardingOptions, folder: str | None, form: str | None) -> bool:
    """Whether results go into shards, for which there must be a folder.

    Raises:
        UsageError: options that exclude each other.
    """
    from capvid.utils.storage import Storage

    on_ray = sharding.engine == "ray"
    if sharding.ray_address and not on_ray:
        raise UsageError("--ray-address is for --engine ray", remedy="give that too, or leave it out")
    remote = folder is not None and Storage(folder).local is None
    sharded = on_ray or sharding.videos_per_file is not None or sharding.retry_failed or remote
    sharded = sharded or form in SHARD_FORMATS
    if sharded and folder is None:
        raise UsageError("shards need a folder or an address that takes them", remedy="give --output-dir")
    return sharded


def run_sharded(
    make_job: Callable[[str], Job],
    inputs: InputSet,
    batch: Batch,
    folder: str,
    form: str,
    options: tuple[RuntimeOptions, ShardingOptions],
) -> None:
    """Do a job for all videos that are not in the shards yet, and count them in ``batch``.

    Args:
        make_job: function that makes the job on a device.
        inputs: the videos.
        batch: counts what is done and what fails.
        folder: path or address for the shards.
        form: name of the shards' format.
        options: how the run is computed.

    Raises:
        UsageError: the engine is missing, or the folder holds something else.
        CapvidError: an error that concerns all videos.
    """
    from capvid.output.shards import HEAD, SHARD_FORMATS, ShardFolder
    from capvid.utils.digests import identity
    from capvid.utils.files import remove_leftovers
    from capvid.utils.storage import Storage

    runtime, sharding = options
    on_ray, overwrite = sharding.engine == "ray", inputs.options.overwrite
    if overwrite and inputs.part is not None:
        raise UsageError(
            "--overwrite would remove the shards of all parts",
            remedy="choose another folder, or empty it first",
        )
    if on_ray:
        _check_ray(runtime)
    local = Storage(folder).local
    if local is not None:
        check_writable_folder(local)
        remove_leftovers([local / HEAD])
    batch.interrupted = GOES_ON
    job = make_job("cpu" if on_ray else runtime.device)  # on Ray each actor moves its own networks
    shards = ShardFolder(folder, kind=job.kind, form=SHARD_FORMATS[f"{job.kind}/{form}"](), head=job.head)
    shards.begin(overwrite=overwrite)
    done = shards.done(retry_failed=sharding.retry_failed)

    def todo() -> Iterator[VideoInput]:
        for video in inputs.stream(batch):
            if identity(video.path) in done:
                batch.skipped += 1
            else:
                yield video

    per_file = sharding.videos_per_file or VIDEOS_PER_FILE[job.kind]
    settings: dict[str, Any] = {"per_file": per_file, "timeout": runtime.seconds}
    if on_ray:
        from capvid.distributed.ray_engine import run_on_ray

        gpu = None if runtime.device == "auto" else runtime.device.startswith("cuda")
        rows = run_on_ray(job, shards, todo(), address=sharding.ray_address, gpu=gpu, **settings)
    else:
        from capvid.distributed.jobs import run_here

        rows = run_here(job, shards, todo(), workers=runtime.num_workers, **settings)
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
            if inputs.options.fail_fast:
                return


def _check_ray(runtime: RuntimeOptions) -> None:
    """Check that Ray is installed, before anything is loaded.

    Raises:
        UsageError: it is not, or options concern this machine alone.
    """
    from importlib.util import find_spec

    if find_spec("ray") is None:
        raise UsageError("--engine ray needs Ray Data", remedy="pip install 'capvid[ray]'")
    if runtime.workers is not None:
        raise UsageError("--workers is for --engine local", remedy="leave it out: Ray shares out the cores")
    if runtime.device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {runtime.device} with --engine ray", remedy="use auto, cpu or cuda")
