"""Actors of a run on Ray: decoding, computing and writing, and one that counts attempts.

Blocks travel between actors as a column of pickled objects: inputs, decoded videos, rows. An error that
concerns all inputs travels the same way, and so do the inputs of blocks that are given up.

The processes of a machine share the memory of a job's weights: tensors become arrays, which a Ray object
store holds once per machine and other processes see in place. The rest of the pickle is small.
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from capvid.errors import CapvidError, UsageError
from capvid.features.prefetch import DecodeStage, Video
from capvid.output.shards import Row, ShardFolder
from capvid.version import __version__
from capvid.video.input_set import VideoInput
from capvid.video.worker_pool import WorkerPool

if TYPE_CHECKING:
    from capvid.distributed.jobs import Job


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
