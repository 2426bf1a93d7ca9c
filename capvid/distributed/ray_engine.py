"""Large runs on a Ray cluster, by Ray Data: a pool of actors for each stage, with Ray's queues between them.

Inputs enter in small blocks. Decoding actors keep one process each that can be killed; computing actors hold
the captioner, or the backbones; writing actors write shards. Ray repeats what is lost with an actor or a
machine. A video whose actors die, again and again, is given up. Inputs are taken in waves, so that their
number does not fill the memory.

Blocks travel between actors as a column of pickled objects: inputs, decoded videos, rows. An error that
concerns all inputs travels the same way, and so do the inputs of blocks that are given up. The processes of a
machine share the memory of a job's weights: tensors become arrays, which a Ray object store holds once per
machine and other processes see in place.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import re
import socket
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from itertools import chain, islice
from typing import Any

import numpy as np

from capvid.distributed.jobs import Job
from capvid.errors import CapvidError, UsageError, VideoError
from capvid.features.prefetch import DecodeStage, Video
from capvid.output.shards import Row, ShardFolder
from capvid.version import __version__
from capvid.video.input_set import VideoInput
from capvid.video.worker_pool import WorkerPool

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
        problem = f"no Ray cluster at {address} ({error})"
        raise UsageError(problem, remedy="start one with: ray start --head") from error
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


class Tally:
    """Actor that counts attempts at each block, which may kill every process that works on it."""

    def __init__(self, tries: int) -> None:
        self._tries = tries
        self._attempts: Counter[str] = Counter()

    def begin(self, block: str) -> bool:
        """Count an attempt and return whether it may be made."""
        self._attempts[block] += 1
        return self._attempts[block] <= self._tries

    def end(self, block: str) -> None:
        """Forget the attempts of a block that is done or given up."""
        del self._attempts[block]


class Decoding:
    """Actor that decodes, in a process of its own that can be killed."""

    def __init__(
        self, stage: DecodeStage, timeout: float | None, folder: str, version: str, tally: Any
    ) -> None:
        if version != __version__:
            raise UsageError(
                f"the cluster has capvid {__version__}, and this is {version}", remedy="install the same"
            )
        _change_folder(folder)
        self.stage = stage
        self.pool = WorkerPool(1, timeout=timeout)
        self.tally = tally

    def __call__(self, table: Any) -> Any:
        """Decode a block of inputs into the parts of each video; only segmented videos have several."""
        inputs: list[VideoInput] = list(unpack(table))

        def decode() -> list[list[Video]]:
            videos: list[list[Video]] = []
            for part in self.stage.videos(self.pool, inputs):
                if not videos or len(videos[-1]) == videos[-1][0].num_chunks:
                    videos.append([])
                videos[-1].append(part)
            return videos

        return _attempt(decode, inputs, self.tally, "decoding")


class Computing:
    """Actor with the captioner, or the backbones."""

    def __init__(self, packed_job: Sequence[Any], folder: str, tally: Any) -> None:
        import ray
        import torch

        _change_folder(folder)
        torch.set_num_threads(1)  # there are as many actors as cores
        job: Job = put_together(*(ray.get(ref) for ref in packed_job))
        self.job = job.on("cuda" if ray.get_gpu_ids() and torch.cuda.is_available() else "cpu")
        self.tally = tally

    def __call__(self, table: Any) -> Any:
        """Compute the rows of a block of decoded videos; pass on a block that was given up."""
        videos: list[list[Video]] = list(unpack(table))
        if not all(isinstance(parts, list) for parts in videos):
            return table
        inputs = [VideoInput(parts[0].path, parts[0].name) for parts in videos]
        return _attempt(lambda: self.job.rows(chain.from_iterable(videos)), inputs, self.tally, "computing")


class Writing:
    """Actor that writes shards."""

    def __init__(self, shards: ShardFolder, folder: str) -> None:
        _change_folder(folder)
        shards.check()
        self.shards = shards

    def __call__(self, table: Any) -> Any:
        """Write the rows of a block as a shard and return their outcomes; pass on everything else."""
        objects = list(unpack(table))
        rows = [each for each in objects if isinstance(each, Row)]
        others = [each for each in objects if not isinstance(each, Row)]
        return pack([*others, *_collect(lambda: write_shard(self.shards, rows))]) if rows else table


def write_shard(shards: ShardFolder, rows: Iterable[Row]) -> list[Row]:
    """Write a shard, with errors for rows that cannot be encoded, and return the rows without their data."""
    checked = [shards.checked(row) for row in rows]
    shards.write(checked)
    return [row.without_data() for row in checked]


def _change_folder(folder: str) -> None:
    """Resolve relative paths as in the process that began the run."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise UsageError(
            f"{folder}: is not on every machine of the cluster", remedy="begin in a folder that all share"
        ) from error


def _attempt(work: Callable[[], Iterable[Any]], inputs: Sequence[VideoInput], tally: Any, stage: str) -> Any:
    """Return the outcome of work on a block of inputs; the inputs if it has killed too many actors."""
    import ray

    block = f"{stage} {len(inputs)} {inputs[0].path}"
    allowed = ray.get(tally.begin.remote(block))
    outcome = _collect(work) if allowed else inputs
    tally.end.remote(block)
    return pack(outcome)


def _collect(work: Callable[[], Iterable[Any]]) -> list[Any]:
    """Return the outcome of work; an error takes its place and is raised where the run was begun."""
    try:
        return list(work())
    except CapvidError as error:
        return [error]
    except Exception as error:
        return [CapvidError(f"the run on Ray failed ({type(error).__name__}: {error})")]


def pack(objects: Iterable[Any]) -> Any:
    """Return a table with a column of pickled objects."""
    import pyarrow as pa

    return pa.table(
        {"object": pa.array([pickle.dumps(each, protocol=5) for each in objects], pa.large_binary())}
    )


def unpack(table: Any) -> Iterator[Any]:
    """Yield the objects of a table, which this run has packed itself."""
    for value in table.column("object"):
        yield pickle.loads(value.as_buffer())


def take_apart(value: Any) -> tuple[bytes, list[np.ndarray]]:
    """Return the pickle of a value without its tensors, and these as arrays in memory order."""
    import torch
    from ray import cloudpickle
    from torch import Tensor, nn

    arrays: list[np.ndarray] = []
    indices: dict[int, int] = {}
    tensors: list[Tensor] = []  # kept alive, so that no id is used twice

    class Pickler(cloudpickle.CloudPickler):
        def persistent_id(self, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return None
            order = sorted(range(value.dim()), key=lambda dim: -value.stride()[dim])
            if id(value) not in indices:
                indices[id(value)] = len(arrays)
                tensors.append(value)
                data = value.detach().cpu().permute(order).contiguous()
                # Numpy has no bfloat16: integers of the same size take its place.
                bits = torch.int16 if data.dtype is torch.bfloat16 else data.dtype
                arrays.append(data.view(bits).numpy())
            dtype = str(value.dtype).removeprefix("torch.")
            return indices[id(value)], order, dtype, isinstance(value, nn.Parameter)

    file = io.BytesIO()
    Pickler(file, protocol=5).dump(value)
    return file.getvalue(), arrays


def put_together(rest: bytes, arrays: Sequence[np.ndarray]) -> Any:
    """Return the value; its tensors are on the CPU, need no gradient and share memory with ``arrays``."""
    import torch
    from torch import Tensor, nn

    tensors: dict[int, Tensor] = {}

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, key: Any) -> Any:
            index, order, dtype, is_parameter = key
            if index not in tensors:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the arrays are read-only, and nobody writes to them
                    tensor = torch.from_numpy(arrays[index])
                tensor = tensor.view(getattr(torch, dtype)).permute(np.argsort(order).tolist())
                tensors[index] = nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
            return tensors[index]

    return Unpickler(io.BytesIO(rest)).load()


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
