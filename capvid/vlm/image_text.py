"""Image-text encoders: CLIP and SigLIP of transformers, both towers, from the Hub or a folder.

SigLIP 2's checkpoints of a fixed resolution are of transformers' type ``siglip``.

Array shapes: B texts, T frames, L tokens, D width of the shared space.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from capvid.backbones.backbone import Backbone
from capvid.backbones.catalog import Layer, encoders
from capvid.backbones.weights import load_weights
from capvid.decoding.caption_generator import Caption, CaptionGenerator, Clip, Described
from capvid.errors import CapvidError, CheckpointError, FeatureMismatchError, RunError, UsageError
from capvid.features.extraction import ExtractionResult
from capvid.features.prefetch import Video, View
from capvid.hub import client as hub
from capvid.metrics.clip_score import PROMPT, TextEmbedding, clip_score, normalise_rows, video_embedding
from capvid.utils.registry import did_you_mean
from capvid.video.frame_sampling import Sampling
from capvid.vlm.git import (
    GIT_CONFIG,
    GIT_WEIGHTS,
    build_network,
    check_files,
    first_line,
    image_backbone,
    model_type,
    quiet,
    read_preprocess,
    weights_file,
)

DEFAULT_ENCODER = "clip"
_TYPES = ("clip", "siglip")
_PREPROCESS = "preprocessor_config.json"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[0-9a-f]{40})?", re.ASCII)
_BUCKET = 8  # captions are padded to a multiple of this number of tokens


class _ImageTower(nn.Module):
    """Images (T, 3, h, w) to embeddings (T, D)."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.vision, self.projection = network.vision_model, nn.Identity()
        if network.config.model_type == "clip":
            self.projection = network.visual_projection

    def forward(self, images: Tensor) -> Tensor:
        """Compute (T, D)."""
        pooled: Tensor = self.projection(self.vision(pixel_values=images).pooler_output)
        return pooled


@dataclass(frozen=True, eq=False)
class ImageTextEncoder:
    """Both towers of an image-text encoder.

    Attributes:
        name: name and revision for records.
        network: ``CLIPModel`` or ``SiglipModel`` of transformers.
        tokenizer: its tokenizer.
        images: the image tower.
        batch_size: texts per batch, to which smaller batches are filled up: no embedding depends on others.
    """

    name: str
    network: Any
    tokenizer: Any
    images: Backbone
    batch_size: int = 16
    _shortened: set[str] = field(default_factory=set)

    @property
    def view(self) -> View:
        """What the image tower sees of a video."""
        return View(preprocess=self.images.entry.preprocess)

    @property
    def is_clip(self) -> bool:
        """Whether it is CLIP, not SigLIP."""
        return bool(self.network.config.model_type == "clip")

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a text, start and end included."""
        return int(self.network.config.text_config.max_position_embeddings)

    @property
    def num_shortened(self) -> int:
        """Number of captions so far that were cut to ``max_tokens``, with or without CLIPScore's prompt."""
        return len({text.lower().removeprefix(PROMPT.lower()) for text in self._shortened})

    def on(self, device: torch.device | str) -> ImageTextEncoder:
        """Move both towers to another device."""
        return replace(self, network=self.network.to(device), images=self.images.on(device))

    def tokenize(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the tokens of each text; of one that is too long the first ones and the end."""
        if not self.is_clip:  # SigLIP was trained on lower case; CLIP's tokenizer lowers it
            texts = [text.lower() for text in texts]
        with quiet():
            numbers = self.tokenizer(list(texts))["input_ids"]
        for row, (text, ids) in enumerate(zip(texts, numbers, strict=True)):
            if len(ids) > self.max_tokens:
                self._shortened.add(text)
                numbers[row] = [*ids[: self.max_tokens - 1], ids[-1]]
        return list(map(tuple, numbers))

    @torch.inference_mode()
    def embed(self, texts: Sequence[str]) -> list[TextEmbedding]:
        """Return the embeddings of texts.

        Raises:
            RunError: the device has not enough memory.
        """
        tokens = self.tokenize(texts)
        groups: dict[int, list[int]] = {}
        for row, ids in enumerate(tokens):
            length = self.max_tokens  # SigLIP sees the padding, to the length of training
            if self.is_clip:  # a token sees only those before it
                length = min(length, -(-len(ids) // _BUCKET) * _BUCKET)
            groups.setdefault(length, []).append(row)
        embeddings: dict[int, TextEmbedding] = {}
        for length, rows in groups.items():
            for start in range(0, len(rows), self.batch_size):
                batch = rows[start : start + self.batch_size]
                pooled, each = self._compute([tokens[row] for row in batch], length)
                for row, sentence, words in zip(batch, pooled, each, strict=False):
                    ids = tokens[row]
                    embeddings[row] = TextEmbedding(ids, sentence, words[: len(ids)])
        return [embeddings[row] for row in range(len(texts))]

    def _compute(self, tokens: Sequence[tuple[int, ...]], length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return normalised embeddings of sentences (B, D) and their tokens (B, L, D), B = ``batch_size``."""
        device = self.images.device
        ids = torch.full((self.batch_size, length), self.tokenizer.pad_token_id)
        for row, numbers in enumerate([*tokens, *[tokens[0]] * (self.batch_size - len(tokens))]):
            ids[row, : len(numbers)] = torch.tensor(numbers)
        try:
            output = self.network.text_model(input_ids=ids.to(device))
            pooled, each = output.pooler_output, output.last_hidden_state  # (B, Z), (B, L, Z)
            if self.is_clip:
                pooled, each = map(self.network.text_projection, (pooled, each))
            else:
                each = self.network.text_model.head(each)
        except torch.OutOfMemoryError as error:
            raise RunError(f"{device} has not enough memory for {self.name}", remedy="use the CPU") from error
        return normalise_rows(pooled.float().cpu().numpy()), normalise_rows(each.float().cpu().numpy())


def load_encoder(name: str = DEFAULT_ENCODER, *, device: torch.device | str = "cpu") -> ImageTextEncoder:
    """Load an image-text encoder.

    Args:
        name: name in ``models.toml``, folder of the files that transformers saves, or ``OWNER/NAME[@COMMIT]``
            on the Hugging Face Hub.
        device: where both towers compute.

    Raises:
        UsageError: there is no such encoder.
        HubError: it cannot be downloaded.
        CheckpointError: a file is damaged, or the model is of another type.
        WeightsError: its weights are damaged or incomplete.
    """
    folder, label = Path(name), name
    if not folder.is_dir():
        source = encoders().get(name, f"hub:{name}" if _HUB_NAME.fullmatch(name) else "")
        if not source:
            remedy = did_you_mean(name, encoders()) or f"use {', '.join(encoders())}, or a folder"
            raise UsageError(f"unknown image-text encoder {name!r}", remedy=remedy)
        folder = _download(source)
        label = f"{name.partition('@')[0]}@{folder.name[:12]}"
    kind = model_type(folder)
    if kind not in _TYPES:
        problem = f"{folder}: no image-text encoder (its type is {kind}, not {' or '.join(_TYPES)})"
        raise CheckpointError(problem, remedy="take CLIP, or SigLIP of a fixed resolution")
    check_files(folder)
    path = weights_file(folder)
    network, tokenizer = _build(folder, path)
    load_weights(network, path, label)
    network = network.to(device).eval().requires_grad_(False)
    if tokenizer.pad_token_id is None:
        raise CheckpointError(f"{folder}: the tokenizer has no padding", remedy="ask who published it")
    vision = network.config.vision_config
    preprocess = read_preprocess(folder, side=vision.image_size)
    layer = Layer(width=network.config.projection_dim if kind == "clip" else vision.hidden_size)
    images = image_backbone(_ImageTower(network), layer, preprocess, path, label)
    return ImageTextEncoder(label, network, tokenizer, images)


def _download(source: str) -> Path:
    """Fetch the files of an encoder, all from one commit, and return their folder."""
    repository, _, revision = source.removeprefix("hub:").partition("@")
    repo = hub.HubRepository(
        repository=repository,
        revision=revision or None,
        all_files=True,
        instead="name a folder with its files",
    )
    folder = hub.fetch(repo, GIT_CONFIG).parent
    repo = replace(repo, revision=folder.name)  # named by the commit
    for filename in (_PREPROCESS, *_TOKENIZER):
        hub.fetch(repo, filename)
    hub.fetch(repo, GIT_WEIGHTS[0], alternatives=GIT_WEIGHTS[1:])
    return folder


def _build(folder: Path, path: Path) -> tuple[Any, Any]:
    """Build the network without weights, and its tokenizer; no code of the folder is ever run."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, **local)
            config = AutoConfig.from_pretrained(folder, **local)
            make = partial(AutoModel.from_config, config, torch_dtype=torch.float32)
            return build_network(make, path), tokenizer
    except Exception as error:  # anything that the library raises for damaged files
        problem = f"{folder}: damaged or incomplete ({first_line(error)})"
        raise CheckpointError(problem, remedy="download it again") from error


@dataclass(frozen=True, eq=False)
class Reranker:
    """Orders the candidates of each segment by how well they fit its frames.

    A paragraph captioner continues its likeliest sentences, whichever are preferred here.
    """

    encoder: ImageTextEncoder

    def on(self, device: torch.device | str) -> Reranker:
        """Move the encoder to another device."""
        return Reranker(self.encoder.on(device))

    def features_of(
        self, generator: CaptionGenerator, videos: Iterable[Video], sampling: Sampling
    ) -> Iterator[ExtractionResult]:
        """Yield what the generator captions, with the frames' embeddings, from videos decoded once.

        The encoder's crops follow those of the generator's views.
        """
        arrays: list[np.ndarray] = []  # of the videos that the generator has taken, chunk by chunk
        counts: list[int] = []  # number of these arrays by input

        def own_crops() -> Iterator[Video]:
            count = 0
            number = 0
            for video in videos:
                if video.decoded is not None:
                    *crops, frames = video.decoded.crops
                    arrays.append(self.encoder.images.compute(frames))
                    video = replace(video, decoded=replace(video.decoded, crops=tuple(crops)))
                    count += 1
                number += 1
                if number == video.num_chunks:
                    counts.append(count)
                    count = number = 0
                yield video

        for result in generator.features_of(own_crops(), sampling):
            count = counts.pop(0)
            taken, arrays[:count] = arrays[:count], []
            yield replace(result, embeddings=np.concatenate(taken)) if taken else result

    def rank(self, clip: Clip, captions: Sequence[Caption]) -> tuple[Caption, ...]:
        """Return the captions of a segment with their CLIPScore, the best first.

        Raises:
            FeatureMismatchError: its frames are unknown, since it comes from a feature file.
        """
        if clip.embeddings is None:
            raise FeatureMismatchError("rerank needs frames, not features", remedy="give the video")
        video = video_embedding(clip.embeddings)
        texts = self.encoder.embed([PROMPT + caption.text for caption in captions])
        order = sorted(range(len(texts)), key=lambda row: -float(texts[row].sentence @ video))
        return tuple(
            [replace(captions[row], clip_score=clip_score(texts[row].sentence, video)) for row in order]
        )

    def rank_video(
        self, clips: Sequence[Clip], described: Sequence[Described] | Exception
    ) -> Sequence[Described] | Exception:
        """Rank the captions of each segment of a video; an error stays or becomes the result."""
        if isinstance(described, Exception):
            return described
        try:
            return [
                (self.rank(clip, captions), change)
                for clip, (captions, change) in zip(clips, described, strict=True)
            ]
        except RunError:
            raise
        except CapvidError as error:
            return error
