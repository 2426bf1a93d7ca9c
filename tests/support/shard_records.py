"""Records of sharded runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_jsonl_shards(out: Path) -> list[dict[str, Any]]:
    """Return the records of all JSON Lines shards."""
    return [json.loads(line) for path in sorted(out.glob("captions-*.jsonl")) for line in path.open("rb")]


def index_by_video(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Map each video to its record, and check that no video occurs twice."""
    assert len({record["video"] for record in records}) == len(records)
    return {record["video"]: record for record in records}
