"""Large runs on a Ray cluster, by Ray Data: a pool of actors for each stage, with Ray's queues between them.

Inputs enter in small blocks. Decoding actors keep one process each that can be killed; computing actors hold
the captioner, or the backbones, whose weights are in memory once per machine; writing actors write shards.
Ray repeats what is lost with an actor or a machine. A video whose actors die, again and again, is given up.
Inputs are taken in waves, so that their number does not fill the memory.
"""

from __future__ import annotations

import io
import logging
import os
import re
import socket
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from capvid.distributed.ray_actors import (
    Computing,
    Decoding,
    Tally,
    Writing,
    pack,
    take_apart,
    unpack,
    write_shard,
)
from capvid.errors import CapvidError, UsageError, VideoError
from capvid.features.prefetch import Video
from capvid.version import __version__
from capvid.video.input_set import VideoInput

if TYPE_CHECKING:
    from capvid.distributed.jobs import Job
    from capvid.output.shards import Row, ShardFolder


WAVE = 100_000  # inputs that are handed to Ray together
_CONNECT_TIMEOUT = 10.0  # seconds for a cluster to answer
_MAX_BLOCK = 8  # videos
_MAX_WRITERS = 4
_TRIES = 4  # for a block whose actors die


def run_on_ray(
    job: Job,
    folder: ShardFolder,
    inputs: Iterable[VideoInput],
    *,
    per_file: int,
    timeout: float | None,
    address: str | None = None,
    gpu: bool | None = None,
) -> Generator[Row, None, None]:
    """Run a job on a cluster and yield each row, without its data, as soon as it is in a shard.

    Args:
        job: what to compute; its networks are on the CPU.
        folder: folder of the shards, which every machine of the cluster can write to.
        inputs: inputs, taken in waves; every machine can read them.
        per_file: videos in a shard.
        timeout: seconds before a video is abandoned; None disables the limit.
        address: address of the cluster; None uses ``RAY_ADDRESS``, or this machine alone.
        gpu: whether to compute on GPUs; None does so if the cluster has any.

    Raises:
        UsageError: Ray is not installed, or there is no cluster at the address.
        CapvidError: an error that concerns all inputs, such as a folder that cannot be written.
    """
    remaining = iter(inputs)
    first = next(remaining, None)
    if first is None:  # no need to start a cluster
        return
    remaining = chain([first], remaining)
    with ExitStack() as stack:
        stack.enter_context(without_chatter())
        ray = begin_ray(address)
        stack.callback(ray.shutdown)
        rest, arrays = take_apart(job)
        packed_job = [ray.put(rest), ray.put(arrays)]
        try:
            while wave := list(islice(remaining, WAVE)):
                cpus, gpus = _processors(ray.cluster_resources(), gpu=gpu)
                tally = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Tally).remote(_TRIES)
                cwd = os.getcwd()  # noqa: PTH109
                stages = (
                    (Decoding, (job.decoding, timeout, cwd, __version__, tally), None),
                    (Computing, (packed_job, cwd, tally), None),
                    (Writing, (folder, cwd), per_file),
                )
                size = _block_size(len(wave), cpus=cpus, per_file=per_file)
                given_up = yield from _run_stages(stages, wave, size, cpus, gpus)
                if given_up:  # because of one video in each block
                    given_up = yield from _run_stages(stages, given_up, 1, cpus, gpus)
                if given_up:
                    why = "the processes that worked on it died, one after the other"
                    fix = "see whether there is memory enough"
                    errors = [(each, VideoError(each.path, why, remedy=fix)) for each in given_up]
                    failed = [Video(path=each.path, name=each.key, error=error) for each, error in errors]
                    yield from write_shard(folder, job.rows(failed))
        except ray.exceptions.RayError as error:
            raise _cause(error) from error


def begin_ray(address: str | None) -> Any:
    """Connect to a cluster, or start one on this machine, and return the module ``ray``.

    Raises:
        UsageError: Ray is not installed, or there is no cluster at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
    os.environ.setdefault("RAY_DATA_USAGE_DISABLED", "1")
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UsageError(
            f"--engine ray needs Ray Data ({error})", remedy="pip install 'capvid[ray]'"
        ) from error
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = address or os.environ.get("RAY_ADDRESS") or "local"  # not whatever else runs here
    if address == "local":
        options["include_dashboard"] = False
    try:
        _knock(address)
        ray.init(address=address, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"no Ray cluster at {address} ({error})",
            remedy="start one with: ray start --head",
        ) from error
    for name in ("ray", "ray.data"):  # errors that concern the user are raised by capvid
        logging.getLogger(name).setLevel(logging.CRITICAL)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.log_internal_stack_trace = False
    context.enable_stats_summary_collection = False
    return ray


def _knock(address: str) -> None:
    """Check that something answers at ``HOST:PORT``, where Ray would retry for minutes.

    Raises:
        OSError: nothing answers.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT).close()


def _processors(resources: Mapping[str, float], *, gpu: bool | None) -> tuple[int, int]:
    """Return the numbers of CPUs and GPUs to use of a cluster.

    Raises:
        UsageError: a GPU is required, and there is none.
    """
    gpus = int(resources.get("GPU", 0)) if gpu is not False else 0
    if gpu and not gpus:
        raise UsageError("--device cuda: the cluster has no GPU", remedy="leave out --device")
    return max(1, int(resources.get("CPU", 1))), gpus


def _block_size(videos: int, *, cpus: int, per_file: int) -> int:
    """Return the number of videos in a block: a divisor of ``per_file``, so that blocks fill shards."""
    largest = max(1, min(_MAX_BLOCK, videos // (4 * cpus)))
    return next(size for size in range(largest, 0, -1) if per_file % size == 0)


def _run_stages(
    stages: Iterable[tuple[type, tuple[Any, ...], int | None]],
    inputs: Sequence[VideoInput],
    size: int,
    cpus: int,
    gpus: int,
) -> Generator[Row, None, list[VideoInput]]:
    """Yield the rows of inputs; return the inputs of blocks that were given up.

    Args:
        stages: actor class, its arguments, and objects per call, None for a block, of the three stages.
        inputs: videos.
        size: number of videos in a block.
        cpus: number of cores to use.
        gpus: number of GPUs to use.
    """
    import pyarrow as pa
    import ray
    from ray.data import ActorPoolStrategy, from_arrow_refs

    blocks = [ray.put(pack(inputs[start : start + size])) for start in range(0, len(inputs), size)]
    actors = min(len(blocks), cpus)
    # Half a core for each actor, so that the actors of a lost machine fit on others, and what waits for them
    # does not wait for ever. Pools have a fixed size: Ray would stop actors for a while and load them again.
    pools: list[dict[str, Any]] = [
        {"compute": ActorPoolStrategy(size=actors), "num_cpus": 0.5 if gpus else 0},
        {"compute": ActorPoolStrategy(size=min(actors, gpus or actors)), "num_cpus": 0 if gpus else 0.5},
        {"compute": ActorPoolStrategy(min_size=1, max_size=_MAX_WRITERS), "num_cpus": 0},
    ]
    if gpus:
        pools[1]["num_gpus"] = 1
    data: Any = from_arrow_refs(blocks)  # type: ignore[arg-type]
    for (actor, arguments, batch_size), pool in zip(stages, pools, strict=True):
        data = data.map_batches(
            actor,
            fn_constructor_args=arguments,
            batch_format="pyarrow",
            batch_size=batch_size,
            zero_copy_batch=True,
            **pool,
        )
    given_up = []
    for batch in data.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
        assert isinstance(batch, pa.Table)
        for outcome in unpack(batch):
            if isinstance(outcome, CapvidError):
                raise outcome
            if isinstance(outcome, VideoInput):
                given_up.append(outcome)
            else:
                yield outcome
    return given_up


def _cause(error: BaseException) -> CapvidError:
    """Return the error behind one of Ray's as an error for the user."""
    current: BaseException | None = error
    while current is not None:
        cause = getattr(current, "cause", None)
        if isinstance(current, CapvidError) and not isinstance(cause, BaseException):
            return current
        current = cause if isinstance(cause, BaseException) and cause is not current else current.__cause__
    text = str(error)
    if messages := re.findall(rf"^{re.escape(CapvidError.__module__)}\.\w+: (.+)$", text, re.MULTILINE):
        return CapvidError(messages[-1])  # if an actor cannot even begin, there is only this text
    lines = [line for line in text.splitlines() if line.strip()]
    return CapvidError(f"the run on Ray failed ({lines[-1].strip() if lines else type(error).__name__})")


_CHATTER = re.compile(r"(\x1b\[\d+m)*\((raylet|autoscaler|gcs_server)[^)]*\)")  # prefix of Ray's own lines


class _QuietStream(io.TextIOWrapper):
    """Text stream that drops Ray's own lines."""

    _dropped = False

    def write(self, text: str) -> int:
        """Write text that is not Ray's."""
        if _CHATTER.match(text):
            self._dropped = not text.endswith("\n")
            return len(text)
        if self._dropped and text == "\n":
            self._dropped = False
            return 1
        return super().write(text)


@contextmanager
def without_chatter() -> Iterator[None]:
    """Hide what Ray's core writes to the file descriptor of stderr, and its news of workers.

    Everything else that Python writes to stdout and stderr is kept. ``CAPVID_DEBUG`` shows everything.
    """
    if os.environ.get("CAPVID_DEBUG"):
        yield
        return

    def filtered(stream: Any, descriptor: int) -> Any:
        try:
            if stream.fileno() != descriptor:
                return stream
        except (OSError, ValueError, AttributeError):
            return stream
        file = os.fdopen(os.dup(descriptor), "wb", buffering=0)
        return _QuietStream(file, write_through=True, encoding=stream.encoding, errors=stream.errors)

    sys.stdout.flush()
    sys.stderr.flush()
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        with redirect_stdout(filtered(sys.stdout, 1)), redirect_stderr(filtered(sys.stderr, 2)):
            os.dup2(null, 2)
            yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)
