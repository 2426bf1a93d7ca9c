"""Results of the chunks of one video, merged."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from capvid.features.extraction import ExtractionResult, merge_chunks
from capvid.features.feature_file import FeatureHeader, Features, StreamHeader


def test_most_lost_frames_of_any_chunk_count() -> None:
    stream = StreamHeader(backbone=None, layer=None, width=2)
    header = FeatureHeader(streams=(stream,), sampling=None, reader=None, dtype="float32", capvid_version="0")
    chunks = [
        ExtractionResult(
            path=Path("video.mp4"),
            features=Features(
                streams=(np.full((1, 2), number, np.float32),),
                times=np.array([float(number)]),
                header=header,
                video="video",
            ),
            error=None,
            lost=lost,
            thumbnails=(bytes([number]),),
        )
        for number, lost in enumerate((0, 3, 2))
    ]
    merged = merge_chunks(chunks)
    assert merged.lost == 3 and merged.thumbnails == (b"\0", b"\1", b"\2")
    assert merged.features is not None and merged.features.streams[0][:, 0].tolist() == [0, 1, 2]
