"""What became of one video, on its way into a shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from capvid.digests import shown
from capvid.errors import CapvidError
from capvid.output.records import error_record, make_record

if TYPE_CHECKING:
    from capvid.results import CaptionResult


@dataclass(frozen=True, kw_only=True)
class Row:
    """What became of one video.

    Attributes:
        video: its path or address, as it is shown.
        record: all that is said of it, as JSON has it.
        key: names it in a shard that needs names.
        features: the bytes of its file of features, if these are what it has.
        error: why it failed, on one line; None if it did not.
        lost: how many of its frames could not be decoded.
        generic: whether its captions are likely to be generic.
        trace: formatted traceback of the bug behind an internal error.
    """

    video: str
    record: Mapping[str, Any]
    key: str = ""
    features: bytes | None = None
    error: str | None = None
    lost: int = 0
    generic: bool = False
    trace: str = ""

    def failed(self, error: CapvidError) -> Row:
        """Return the row of the same video with an error instead of captions or features."""
        record = {key: value for key, value in self.record.items() if key != "segments"}
        record |= {"status": "error", "duration": None, "error": error_record(error)}
        if "captions" in record:
            record["captions"] = []
        return replace(self, record=record, features=None, error=str(error), generic=False, trace=error.trace)


def caption_row(result: CaptionResult, settings: Mapping[str, Any], *, attention: bool = False) -> Row:
    """Give the record of one result (:func:`~capvid.output.records.make_record`) as a row."""
    return Row(
        video=shown(result.path),
        record=make_record(result, settings, attention=attention),
        error=None if result.error is None else str(result.error),
        lost=result.lost,
        generic=any(segment.captions[0].generic for segment in result.segments),
        trace="" if result.error is None else result.error.trace,
    )
