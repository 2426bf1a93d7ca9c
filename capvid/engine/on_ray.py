"""A large run on a Ray cluster, by Ray Data: the stages as pools of actors, with Ray's queues between them.

Inputs go in by small blocks. Actors that decode keep one process that can be killed each; actors that compute
have the captioner, or the backbones, whose weights lie once on each machine; others write shards. What is
lost with an actor or a machine is done again by Ray; what takes every actor with it that works on it is given
up at last, each video by itself. Inputs are taken in waves, so that no number of them fills the memory.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from capvid import __version__
from capvid.engine.actors import Computing, Counted, Decoding, Tally, Writing, table_of, things_of
from capvid.engine.quiet import without_chatter
from capvid.errors import CapvidError, UsageError, VideoError
from capvid.features.ahead import Video
from capvid.features.parts import DecodeStage
from capvid.output.shards import ShardFolder
from capvid.video.inputs import VideoInput

if TYPE_CHECKING:
    from capvid.engine.jobs import Job

_PATIENCE = 10.0  # seconds for a cluster to answer
WAVE = 100_000  # inputs that are handed to Ray together
_BLOCK = 8  # videos of which an actor takes care at once, at most
_WRITERS = 4  # actors that write shards, at most
_TRIES = 4  # of a block whose actors die while they work on it


def run_on_ray(
    job: Job,
    folder: ShardFolder,
    inputs: Iterable[VideoInput],
    *,
    per_file: int,
    timeout: float | None,
    address: str | None = None,
    gpu: bool | None = None,
) -> Generator[Counted, None, None]:
    """Do the job and give each row as soon as it is in a shard.

    Args:
        job: what is done; its networks are on the CPU.
        folder: for the shards, which every machine of the cluster can write to.
        inputs: taken by waves; every machine can read them.
        per_file: videos in a shard.
        timeout: seconds after which a video is given up; None waits for ever.
        address: of the cluster; None takes what ``RAY_ADDRESS`` says, or this machine alone.
        gpu: whether to compute on GPUs; None does so if the cluster has some.

    Raises:
        UsageError: Ray is not installed, or there is no cluster at the address.
        CapvidError: what concerns all inputs, such as a folder that cannot be written.
    """
    todo = iter(inputs)
    first = next(todo, None)
    if first is None:  # nothing to begin a cluster for
        return
    todo = chain([first], todo)
    from capvid.engine.sharing import take_apart

    with ExitStack() as stack:
        stack.enter_context(without_chatter())
        ray = begin_ray(address)
        stack.callback(ray.shutdown)
        rest, arrays = take_apart(job)
        packed = [ray.put(rest), ray.put(arrays)]
        try:
            while wave := list(islice(todo, WAVE)):
                plan = _Plan.of(ray.cluster_resources(), gpu=gpu, per_file=per_file)
                size = plan.block(len(wave))
                tally = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Tally).remote(_TRIES)
                lost = yield from _wave(job.decoding, packed, folder, wave, plan, size, timeout, tally)
                if lost:  # by what one of each block did
                    lost = yield from _wave(job.decoding, packed, folder, lost, plan, 1, timeout, tally)
                yield from _given_up(job, folder, lost)
        except ray.exceptions.RayError as error:
            raise _cause(error) from error


def begin_ray(address: str | None) -> Any:
    """Connect to a cluster, or begin one on this machine, and give Ray.

    Raises:
        UsageError: Ray is not installed, or there is no cluster at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody
    os.environ.setdefault("RAY_DATA_USAGE_DISABLED", "1")
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UsageError(
            f"--engine ray needs Ray Data ({error})", remedy="pip install 'capvid[ray]'"
        ) from error
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = address or os.environ.get("RAY_ADDRESS") or "local"  # not whatever else runs here
    if address == "local":
        quiet["include_dashboard"] = False
    try:
        _knock(address)
        ray.init(address=address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"no Ray cluster at {address} ({error})",
            remedy="start one with: ray start --head",
        ) from error
    for name in ("ray", "ray.data"):  # what concerns the user is an error of ours
        logging.getLogger(name).setLevel(logging.CRITICAL)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.log_internal_stack_trace = False
    context.enable_stats_summary_collection = False
    return ray


def _knock(address: str) -> None:
    """See whether anything answers at ``HOST:PORT``, where Ray would try for minutes.

    Raises:
        OSError: nothing does.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What there is to share out."""

    cpus: int
    gpus: int
    per_file: int

    @classmethod
    def of(cls, resources: Mapping[str, float], *, gpu: bool | None, per_file: int) -> _Plan:
        """Plan by what a cluster has now.

        Raises:
            UsageError: there is to be a GPU, and there is none.
        """
        gpus = int(resources.get("GPU", 0)) if gpu is not False else 0
        if gpu and not gpus:
            raise UsageError("--device cuda: the cluster has no GPU", remedy="leave out --device")
        return cls(cpus=max(1, int(resources.get("CPU", 1))), gpus=gpus, per_file=per_file)

    def block(self, videos: int) -> int:
        """Videos in a block of so many: a divisor of a shard's, so that blocks fill shards."""
        most = max(1, min(_BLOCK, videos // (4 * self.cpus)))
        return next(size for size in range(most, 0, -1) if self.per_file % size == 0)


def _wave(
    decoding: DecodeStage,
    packed: Sequence[Any],
    folder: ShardFolder,
    wave: Sequence[VideoInput],
    plan: _Plan,
    size: int,
    timeout: float | None,
    tally: Any,
) -> Generator[Counted, None, list[VideoInput]]:
    """Do so many inputs, in blocks of a size, and return those of blocks that ended too many actors."""
    import pyarrow as pa
    import ray
    from ray.data import ActorPoolStrategy, from_arrow_refs

    starts = range(0, len(wave), size)
    blocks = [ray.put(table_of(wave[start : start + size])) for start in starts]
    most = min(len(blocks), plan.cpus)
    # Half a core for each, so that after a machine is lost its actors have a place on others, and what waits
    # for them does not wait for ever. Pools of one size: what Ray stops for a while it would load again.
    decoders = ActorPoolStrategy(size=most)
    models = ActorPoolStrategy(size=min(most, plan.gpus or most))
    decode = {"num_cpus": 0.5 if plan.gpus else 0}
    place: dict[str, Any] = {"num_gpus": 1, "num_cpus": 0} if plan.gpus else {"num_cpus": 0.5}
    where = os.getcwd()  # noqa: PTH109
    kind: dict[str, Any] = {"batch_format": "pyarrow", "batch_size": None, "zero_copy_batch": True}
    data: Any = from_arrow_refs(blocks)  # type: ignore[arg-type]
    data = data.map_batches(
        Decoding,
        fn_constructor_args=(decoding, timeout, where, __version__, tally),
        compute=decoders,
        **decode,
        **kind,
    )
    data = data.map_batches(
        Computing, fn_constructor_args=(list(packed), where, tally), compute=models, **place, **kind
    )
    writers = ActorPoolStrategy(min_size=1, max_size=_WRITERS)
    kind["batch_size"] = plan.per_file
    data = data.map_batches(Writing, fn_constructor_args=(folder, where), compute=writers, num_cpus=0, **kind)
    lost = []
    for batch in data.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
        assert isinstance(batch, pa.Table)
        for thing in things_of(batch):
            if isinstance(thing, CapvidError):
                raise thing
            if isinstance(thing, VideoInput):
                lost.append(thing)
            else:
                yield thing
    return lost


def _given_up(job: Job, folder: ShardFolder, lost: Sequence[VideoInput]) -> Iterator[Counted]:
    """Write a shard of videos that nobody could work on."""
    if not lost:
        return
    why = "the processes that worked on it died, one after the other", "see whether there is memory enough"
    failed = [
        Video(path=v.path, name=v.key, decoded=None, error=VideoError(v.path, why[0], remedy=why[1]))
        for v in lost
    ]
    rows = list(job.rows(failed))
    folder.write(rows)
    yield from map(Counted.of, rows)


def _cause(error: BaseException) -> CapvidError:
    """What a task or an actor failed by, as an error that can be shown."""
    seen: BaseException | None = error
    while seen is not None:
        cause = getattr(seen, "cause", None)
        if isinstance(seen, CapvidError) and not isinstance(cause, BaseException):
            return seen
        seen = cause if isinstance(cause, BaseException) and cause is not seen else seen.__cause__
    text = str(error)
    if own := re.findall(rf"^{re.escape(CapvidError.__module__)}\.\w+: (.+)$", text, re.MULTILINE):
        return CapvidError(own[-1])  # where an actor could not even begin, there is only this text
    lines = [line for line in text.splitlines() if line.strip()]
    return CapvidError(f"the run on Ray failed ({lines[-1].strip() if lines else type(error).__name__})")
