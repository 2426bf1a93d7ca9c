"""The actors of a run on Ray: those that decode, compute and write shards, and one that keeps a tally.

What goes from one to the next is a column of any objects. An error that concerns all inputs goes the same
way, and so do the inputs of blocks that are given up.
"""

from __future__ import annotations

import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from capvid import __version__
from capvid.errors import CapvidError, UsageError
from capvid.features.ahead import Video
from capvid.features.parts import DecodeStage
from capvid.output.rows import Row
from capvid.output.shards import ShardFolder
from capvid.video.inputs import VideoInput
from capvid.video.workers import WorkerPool

if TYPE_CHECKING:
    from capvid.engine.jobs import Job


@dataclass(frozen=True, kw_only=True)
class Counted:
    """A row that is in a shard, as far as it is to be counted."""

    video: str
    error: str | None
    lost: int
    generic: bool
    trace: str

    @classmethod
    def of(cls, row: Row) -> Counted:
        """Take from a row what is counted."""
        return cls(video=row.video, error=row.error, lost=row.lost, generic=row.generic, trace=row.trace)


class Tally:
    """An actor that knows how often each block was begun and not ended: its videos may end every process.

    Args:
        tries: how often a block may be begun.
    """

    def __init__(self, tries: int) -> None:
        self._tries = tries
        self._begun: Counter[str] = Counter()

    def begin(self, block: str) -> bool:
        """Whether a block may be begun."""
        self._begun[block] += 1
        return self._begun[block] <= self._tries

    def end(self, block: str) -> None:
        """It is over."""
        del self._begun[block]


class Decoding:
    """An actor that decodes, in a process of its own that can be killed."""

    def __init__(
        self, stage: DecodeStage, timeout: float | None, where: str, version: str, tally: Any
    ) -> None:
        if version != __version__:
            raise UsageError(
                f"the cluster has capvid {__version__}, and this is {version}", remedy="install the same"
            )
        _go_to(where)
        self.stage = stage
        self.pool = WorkerPool(1, timeout=timeout)
        self.tally = tally

    def __call__(self, table: Any) -> Any:
        """Decode the videos of a block: the parts of each, which are one but for those in segments."""
        inputs = list(things_of(table))
        return _tried(self._decoded, inputs, inputs, self.tally, "decoding")

    def _decoded(self, inputs: Iterable[VideoInput]) -> list[list[Video]]:
        whole: list[list[Video]] = []
        for video in self.stage.videos(self.pool, inputs):
            if not whole or len(whole[-1]) == whole[-1][0].parts:
                whole.append([])
            whole[-1].append(video)
        return whole


class Computing:
    """An actor with the captioner, or the backbones."""

    def __init__(self, packed: Sequence[Any], where: str, tally: Any) -> None:
        import ray
        import torch

        from capvid.engine.sharing import put_together

        _go_to(where)
        torch.set_num_threads(1)  # there are as many actors as cores
        job: Job = put_together(*(ray.get(ref) for ref in packed))
        self.job = job.on("cuda" if ray.get_gpu_ids() and torch.cuda.is_available() else "cpu")
        self.tally = tally

    def __call__(self, table: Any) -> Any:
        """Make the rows of decoded videos."""
        found = list(things_of(table))
        if not all(isinstance(thing, list) for thing in found):
            return table  # there is nothing to work on
        inputs = [VideoInput(parts[0].path, parts[0].name) for parts in found]
        return _tried(self._rows, found, inputs, self.tally, "computing")

    def _rows(self, videos: Sequence[list[Video]]) -> Iterator[Row]:
        return self.job.rows(chain.from_iterable(videos))


class Writing:
    """An actor that writes shards."""

    def __init__(self, folder: ShardFolder, where: str) -> None:
        _go_to(where)
        folder.check()
        self.folder = folder

    def __call__(self, table: Any) -> Any:
        """Write a shard, and give what is to be counted of it."""
        found = list(things_of(table))
        rows = [thing for thing in found if isinstance(thing, Row)]
        others = [thing for thing in found if not isinstance(thing, Row)]
        return table_of(others + _safely(self._written, rows)) if rows else table

    def _written(self, rows: Sequence[Row]) -> Iterator[Counted]:
        checked = [self.folder.checked(row) for row in rows]
        self.folder.write(checked)
        return map(Counted.of, checked)


def _go_to(folder: str) -> None:
    """Let relative paths mean what they mean to whoever gave them."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise UsageError(
            f"{folder}: is not on every machine of the cluster", remedy="begin in a folder that all share"
        ) from error


def _tried(
    work: Callable[[Sequence[Any]], Iterable[Any]],
    things: Sequence[Any],
    inputs: Sequence[VideoInput],
    tally: Any,
    stage: str,
) -> Any:
    """Work on a block that is made of inputs; give these where it has ended too many actors."""
    import ray

    block = f"{stage} {len(inputs)} {inputs[0].path}"
    may = ray.get(tally.begin.remote(block))
    done = _safely(work, things) if may else inputs
    tally.end.remote(block)
    return table_of(done)


def _safely(work: Callable[[Sequence[Any]], Iterable[Any]], things: Sequence[Any]) -> list[Any]:
    """Work on things; an error goes the way that they would go, and is raised where the run was begun."""
    try:
        return list(work(things))
    except CapvidError as error:
        return [error]
    except Exception as error:
        return [CapvidError(f"the run on Ray failed ({type(error).__name__}: {error})")]


def table_of(things: Sequence[Any]) -> Any:
    """Any objects as a column of a table; what comes out of it was put in by this run."""
    import pyarrow as pa

    return pa.table({"thing": pa.array([pickle.dumps(t, protocol=5) for t in things], pa.large_binary())})


def things_of(table: Any) -> Iterator[Any]:
    """The objects again."""
    for value in table.column("thing"):
        yield pickle.loads(value.as_buffer())
