"""A GIT from its files: the network of transformers as a backbone that sees frames and a captioner."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from capvid import __version__
from capvid.captioners.base import CaptionerConfig
from capvid.captioners.checkpoint import Checkpoint
from capvid.captioners.git import FRAME_PLACES, GIT
from capvid.errors import CheckpointError
from capvid.features.backbones import Backbone
from capvid.features.file import FeatureHeader, StreamHeader
from capvid.features.libraries import Named
from capvid.features.registry import BackboneEntry, Layer, Preprocess
from capvid.features.tensors import read_tensors
from capvid.features.weights import fill_from
from capvid.files import file_digest
from capvid.git_files import GIT_CONFIG, check_files, read_preprocess, weights_file
from capvid.limits import limits
from capvid.text.wordpieces import WordPieces

LAYER = "image_encoder"
_WIDEST = 8  # bytes in memory of a byte in a file: half precision, and layers that share their weights


def load_git(folder: Path, *, name: str, device: torch.device) -> tuple[Checkpoint, Backbone]:
    """Load the captioner, and the backbone that makes its features: the image encoder of the same network.

    Args:
        folder: with the files that transformers saves.
        name: by which features and errors call the backbone.
        device: where both compute.

    Raises:
        CheckpointError: a file is missing or damaged, or asks for what capvid does not do.
        WeightsError: the weights are damaged, or not all there.
    """
    check_files(folder)
    preprocess, path = read_preprocess(folder), weights_file(folder)
    config, tokenizer = _read(folder)
    size = preprocess.size or (preprocess.crop, preprocess.crop)
    if size != (config.vision_config.image_size,) * 2:
        raise CheckpointError(
            f"{folder}: frames are made {size[0]} x {size[1]}, and the network sees squares of "
            f"{config.vision_config.image_size}",
            remedy="ask who published it",
        )
    network = _network(config, path, name).to(device).eval().requires_grad_(False)
    backbone = _backbone(network, config, preprocess, name=name, digest=file_digest(path), device=device)
    frames = config.num_image_with_embedding or 1
    order = _order(config, tokenizer)
    header = FeatureHeader(
        streams=(backbone.header,),
        sampling=f"uniform:{frames}",
        reader=None,
        dtype="float32",
        capvid_version=__version__,
    )
    sizes = CaptionerConfig(
        vocabulary_size=len(order),
        feature_width=backbone.header.width,
        locations=backbone.header.locations or 0,
    )
    checkpoint = Checkpoint(
        captioner=GIT(sizes, network, frames=frames, order=order).eval(),
        vocabulary=WordPieces(tokenizer, order),
        header=header,
        name=GIT.name,
        info={"max_frames": frames, "frames": "spread", "max_words": config.max_position_embeddings - 1},
        folder=folder,
        sees=True,
    )
    return checkpoint, backbone


def _read(folder: Path) -> tuple[Any, Any]:
    """Configuration and tokenizer, by transformers; nothing of the folder is ever run."""
    from transformers import BertTokenizerFast, GitConfig  # type: ignore[attr-defined]
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        config = GitConfig.from_json_file(str(folder / GIT_CONFIG))
        tokenizer = BertTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        return config, tokenizer
    except Exception as error:  # whatever the library makes of a damaged file
        lines = str(error).strip().splitlines()
        raise CheckpointError(
            f"{folder}: not the files of a GIT ({lines[0] if lines else type(error).__name__})",
            remedy="copy it anew, or ask who published it",
        ) from error
    finally:
        logging.set_verbosity(level)


class _Published(Named):
    """The network, whose tensors for the places of frames the file may spell in another version's way."""

    def __init__(self, network: Any, spelled: str) -> None:
        super().__init__(network)
        self.spelled = spelled

    def published(self, name: str) -> str:
        """Give the name that a tensor of the network has in the file."""
        for spelling in FRAME_PLACES:
            name = name.replace(spelling, self.spelled)
        return name


def _network(config: Any, path: Path, name: str) -> Any:
    """``GitForCausalLM`` with its weights.

    Raises:
        CheckpointError: there is no such network.
        WeightsError: the file cannot be read, or is of another network.
    """
    from transformers import GitForCausalLM

    size = path.stat().st_size
    if size > limits().model_bytes:
        raise CheckpointError(f"{path}: {size} bytes, more than the limit model-bytes")
    tensors = read_tensors(path)
    try:
        with torch.device("meta"):
            network = GitForCausalLM(config)
        needed = sum(tensor.nbytes for tensor in network.state_dict().values())
        if needed > _WIDEST * size:
            raise ValueError(f"it takes {needed} bytes, and {path.name} has {size}")
        network = network.to_empty(device="cpu")
    except (ValueError, TypeError, KeyError, RuntimeError, ZeroDivisionError) as error:
        lines = str(error).strip().splitlines()
        raise CheckpointError(
            f"{path.parent / GIT_CONFIG}: no such network ({lines[0] if lines else type(error).__name__})",
            remedy="ask who published it",
        ) from error
    for key, buffer in network.named_buffers():
        if key.endswith("position_ids"):
            buffer.copy_(torch.arange(buffer.shape[-1]))
    spelled = next((one for one in FRAME_PLACES if any(one in key for key in tensors)), FRAME_PLACES[0])
    fill_from(_Published(network, spelled), tensors, path, name)
    return network


def _order(config: Any, tokenizer: Any) -> list[int]:
    """The tokenizer's numbers of padding, start, end and unknown, then of all other tokens."""
    ends = config.eos_token_id
    end = ends[0] if isinstance(ends, list) else ends
    first = [tokenizer.pad_token_id, config.bos_token_id, end, tokenizer.unk_token_id]
    rest = set(range(config.vocab_size))
    if len({*first} & rest) < len(first):
        raise CheckpointError(
            f"{config.model_type}: padding, start, end and unknown are the tokens {first}",
            remedy="ask who published it",
        )
    return [*first, *sorted(rest - {*first})]


class _ImageEncoder(nn.Module):
    """The tokens that GIT's image encoder makes of a frame, (N, 3, h, w) -> (N, L, D)."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, images: Tensor) -> Tensor:
        """Compute the tokens of images."""
        tokens: Tensor = self.encoder(pixel_values=images).last_hidden_state
        return tokens


def _backbone(
    network: Any, config: Any, preprocess: Preprocess, *, name: str, digest: str, device: torch.device
) -> Backbone:
    """The image encoder as a backbone, which no registry knows."""
    vision = config.vision_config
    size = Layer(width=vision.hidden_size, locations=(vision.image_size // vision.patch_size) ** 2 + 1)
    entry = BackboneEntry(
        name=name,
        kind=GIT.name,
        source="none",
        file="",
        licence="",
        origin="",
        description="",
        default_layer=LAYER,
        layers=MappingProxyType({LAYER: size}),
        preprocess=preprocess,
    )
    header = StreamHeader(
        backbone=name,
        layer=LAYER,
        width=size.width,
        locations=size.locations,
        weights_sha256=digest,
        preprocess=entry.describe_input(),
        precision="float32",
    )
    return Backbone(
        entry=entry,
        layer=LAYER,
        module=_ImageEncoder(network.git.image_encoder),
        header=header,
        device=device,
    )
