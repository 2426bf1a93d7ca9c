"""What ``capvid train`` does before it trains, when it is given videos: their features."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from capvid.cli import common
from capvid.cli.extract import extract_into, read_sampling
from capvid.cli.given import Given
from capvid.errors import DataError

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from capvid.data.captions import CaptionedVideo

NAMED = 5  # videos that a message names


def extract_features_of(
    data: Sequence[CaptionedVideo],
    videos: Sequence[Path],
    folder: Path,
    *,
    backbones: Sequence[str],
    sampling: str | None,
    weights: Path | None,
    device: torch.device,
    accelerator: Accelerator,
) -> list[CaptionedVideo]:
    """Extract the features of a data set's videos into a folder; what is there is not made again.

    Args:
        data: the data set, whose ids are the videos' paths in their folder without suffix.
        videos: files and folders.
        folder: for the files of features.
        backbones: names, a stream each.
        sampling: which frames; None takes 28 of each video.
        weights: the backbones' weights: a file, or the folder they are in.
        device: where the backbones compute.
        accelerator: the processes that share the videos among them.

    Returns:
        those of the data that have features now; how many have none is said on stderr.

    Raises:
        DataError: there are no videos of the data.
    """
    from capvid.features.backbones import load_backbone

    batch = common.Batch(verb="extracted", many=True)
    wanted = {video.id for video in data}
    found = Given(inputs=list(map(str, videos))).videos(batch, recursive=True, fail_fast=False)
    named = [video for video in found if video.key in wanted]
    if not named:
        example = f"; {found[0].path} would be {found[0].key!r}" if found else ""
        raise DataError(
            f"none of the {len(found)} videos is one of the data, such as {data[0].id!r}{example}",
            remedy="let ids be the paths of videos in their folder, without suffix",
        )
    loaded = [load_backbone(name, weights=weights, device=device) for name in backbones]
    extract_into(
        folder,
        named[accelerator.process_index :: accelerator.num_processes],
        loaded,
        read_sampling(sampling, frames=None, clean=False),
        batch,
        workers=common.default_workers(),
    )
    batch.summarise()
    accelerator.wait_for_everyone()
    kept = [video for video in data if (folder / f"{video.id}.safetensors").is_file()]
    missing = sorted(wanted - {video.id for video in kept})
    if missing:
        shown = ", ".join(missing[:NAMED]) + (", ..." if len(missing) > NAMED else "")
        batch.say(
            f"warning: {len(missing)} of {len(wanted)} videos of the data have no features and are left out"
            f" ({shown})"
        )
    return kept
