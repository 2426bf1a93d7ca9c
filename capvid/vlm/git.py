"""GIT: a generative image-to-text transformer (Wang et al., TMLR 2022, arXiv:2205.14100), as published.

One transformer for image tokens and text: the frames see each other, a word sees all frames and the words
before it (section 3.1, the seq2seq mask). The image tokens come from GIT's image encoder, plus a vector for
the frame's position in the video. The layers are those of transformers; here they run word by word, so that
the frames' keys and values are computed once for a video and shared by all of its captions.

Notation for tensor shapes: B captions, V videos of K captions each, T frames, F frames that the network was
trained on, L locations, S = F * L image tokens, n words, H heads, d width of a head, Z width of the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capvid.backbones.backbone import Backbone
from capvid.backbones.catalog import BackboneEntry, Layer, Preprocess, StreamHeader
from capvid.backbones.networks import Named
from capvid.backbones.weights import load_weights
from capvid.captioners.base import Captioner, CaptionerConfig, State, Trace
from capvid.captioners.checkpoint import Checkpoint
from capvid.captioners.layers import at_least_one_frame
from capvid.errors import CheckpointError
from capvid.features.feature_file import FeatureHeader
from capvid.text.vocabulary import SPECIAL, Vocabulary
from capvid.utils.files import read_regular, sha256_file
from capvid.utils.tensor_files import read_tensors
from capvid.utils.validation import LARGEST, MIB, limits, parse_json, short
from capvid.version import __version__

GIT_TYPE = "git"  # transformers' name of the type
USABLE = (
    "give a captioner that capvid trained, a GIT such as microsoft/git-base-vatex, or a chat model with the "
    "Hub's tag image-text-to-text or video-text-to-text"
)
GIT_CONFIG = "config.json"
GIT_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_PREPROCESS = ("preprocessor_config.json", "processor_config.json")
PROCESSOR = (*_PREPROCESS, "video_preprocessor_config.json")
GIT_REQUIRED = (_PREPROCESS, ("tokenizer.json", "vocab.txt"), GIT_WEIGHTS)  # the first of each that exists
GIT_OPTIONAL = ("tokenizer_config.json", "special_tokens_map.json")
_TEXT_BYTES = 64 * MIB  # of a configuration or a vocabulary
_SIZES = ("_size", "_heads", "_channels", "_position_embeddings", "_dim")
MAX_SIDE, MAX_AREA = 4096, 1 << 20  # of frames that are made larger than they are
_MOST = {  # largest sizes in config.json
    "num_hidden_layers": 256,
    "num_layers": 256,
    "depth": 256,
    "num_image_with_embedding": 1000,
    "image_size": MAX_SIDE,
    "max_position_embeddings": 1 << 22,
    "num_labels": 100_000,
    "num_experts": 4096,
    "num_local_experts": 4096,
    "n_routed_experts": 4096,
}
_MOST_PROCESSED = {  # and in the files of a processor
    **dict.fromkeys(("height", "width", "size", "crop_size", "image_size", "max_image_size"), MAX_SIDE),
    **dict.fromkeys(("patch_size", "temporal_patch_size", "merge_size", "image_grid_pinpoints"), MAX_SIDE),
    **dict.fromkeys(("shortest_edge", "min_pixels"), MAX_AREA),  # some models count the pixels of a frame
    **dict.fromkeys(("longest_edge", "max_pixels"), 1 << 28),
    **dict.fromkeys(("image_seq_len", "image_seq_length", "num_image_tokens"), 1 << 14),
    "max_patches": 1024,
}
_FILTERS = {2: "bilinear", 3: "bicubic"}  # by Pillow's numbers
LAYER = "image_encoder"
FRAME_POSITIONS = ("img_temporal_embedding", "img_temperal_embedding")  # spellings of transformers' versions
_MAX_TYPE = 100  # characters
LARGEST_RATIO = 8  # bytes in memory per byte in a file: half precision, and layers that share their weights
_INSIDE = "##"  # prefix of a piece that continues a word


class GIT(Captioner):
    """GIT of transformers as a captioner of image tokens (T, L, D).

    Args:
        config: vocabulary size, and L and D of the image tokens.
        network: ``GitForCausalLM`` of transformers.
        frames: F; the middles of F equal slices of the video are taken, with repetition if it is shorter.
        order: the network's id of each token of the vocabulary.
    """

    name = "git"
    config_class = CaptionerConfig
    order: Tensor

    def __init__(self, config: CaptionerConfig, network: Any, *, frames: int, order: list[int]) -> None:
        super().__init__(config)
        self.network = network
        self.frames = frames
        self.register_buffer("order", torch.tensor(order), persistent=False)

    @classmethod
    def needs_maps(cls, config: Any) -> bool:
        """Return True, for it attends to the tokens of each frame."""
        return True

    def encode(self, features: Tensor, mask: Tensor) -> State:
        """Features (B, T, L, D) and mask (B, T) of real frames -> state with their keys and values."""
        features, mask = at_least_one_frame(features, mask)
        git, (locations, width) = self.network.git, features.shape[2:]
        slices = torch.arange(self.frames, device=features.device)
        chosen = (2 * slices + 1) * mask.sum(1, keepdim=True) // (2 * self.frames)  # (B, F) middles of slices
        index = chosen[..., None, None].expand(-1, -1, locations, width)
        tokens = features.gather(1, index)  # (B, F, L, D)
        added = [getattr(git, name) for name in FRAME_POSITIONS if hasattr(git, name)]
        if added:
            tokens = tokens + torch.cat(list(added[0]))  # (F, 1, D)
        x = git.visual_projection(tokens.flatten(1, 2))  # (B, S, Z)
        # (B, F, T): which input frame each taken frame is
        video = {"frames": F.one_hot(chosen, features.shape[1]).to(features.dtype)}
        layers = list(enumerate(git.encoder.layer))
        for number, layer in layers:
            query, keys, values = self._heads(layer, x)
            video |= {f"keys.{number}": keys, f"values.{number}": values}
            if number < len(layers) - 1:  # nothing reads the frames after the last layer
                x = _feed_forward(layer, F.scaled_dot_product_attention(query, keys, values), x)
        return State(video, {})

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State, Trace]:
        """Read one word per caption; the trace has the last layer's attention to the frames."""
        hidden, memory, weights = self._read(tokens.unsqueeze(1), state)
        # mean over heads, sum over a frame's tokens
        on_frames = weights[:, :, 0].mean(1).unflatten(-1, (self.frames, -1)).sum(-1)  # (B, F)
        frames = state.video["frames"]  # (V, F, T)
        attention = (on_frames.unflatten(0, (len(frames), -1)) @ frames).flatten(0, 1)  # (B, T)
        after = State(state.video, memory, state.words + 1)
        return self.logits(hidden.squeeze(1)), after, {"attention": attention}

    def teacher_forced(self, features: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        """Return (B, L, Z) after each of ``tokens`` (B, L); each video has equally many captions in a row."""
        state = self.encode(features, mask).expand(len(tokens) // len(features))
        return self._read(tokens, state)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits in the order of the vocabulary: (..., Z) -> (..., V)."""
        logits: Tensor = self.network.output(hidden)[..., self.order]
        return logits

    def _read(self, tokens: Tensor, state: State) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Read words ``tokens`` (B, n), each of which attends to the frames and the words before it.

        Returns:
            input of the vocabulary layer (B, n, Z), keys and values of all words so far, and the last layer's
            attention to the image tokens (B, H, n, S).
        """
        git, count = self.network.git, tokens.shape[1]
        positions = torch.arange(state.words, state.words + count, device=tokens.device)
        x = git.embeddings(input_ids=self.order[tokens], position_ids=positions.unsqueeze(0))  # (B, n, Z)
        later = torch.ones(count, state.words + count, dtype=torch.bool, device=x.device)
        later = later.triu(state.words + 1)  # (n, words so far)
        captions = len(tokens) // len(state.video["frames"])
        memory: dict[str, Tensor] = {}
        weights = x
        for number, layer in enumerate(git.encoder.layer):
            query, keys, values = self._heads(layer, x)  # (B, H, n, d)
            if state.memory:
                keys = torch.cat([state.memory[f"keys.{number}"], keys], 2)
                values = torch.cat([state.memory[f"values.{number}"], values], 2)
            memory |= {f"keys.{number}": keys, f"values.{number}": values}
            image_keys, image_values = state.video[f"keys.{number}"], state.video[f"values.{number}"]
            query = query * query.shape[-1] ** -0.5
            on_frames = _ungroup(
                _group(query, captions) @ image_keys.transpose(-1, -2), captions
            )  # (B, H, n, S)
            on_words = (query @ keys.transpose(-1, -2)).masked_fill(later, float("-inf"))
            sizes = [on_frames.shape[-1], on_words.shape[-1]]
            weights, among = torch.cat([on_frames, on_words], -1).softmax(-1).split(sizes, -1)
            context = _ungroup(_group(weights, captions) @ image_values, captions) + among @ values
            x = _feed_forward(layer, context, x)
        return x, memory, weights

    @staticmethod
    def _heads(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (B, H, n, d) of a layer for its input (B, n, Z)."""
        attention = layer.attention.self
        query, keys, values = (
            part(x).unflatten(-1, (attention.num_attention_heads, -1)).transpose(1, 2)
            for part in (attention.query, attention.key, attention.value)
        )
        return query, keys, values


def _feed_forward(layer: Any, context: Tensor, x: Tensor) -> Tensor:
    """Run a layer after its attention: context (B, H, n, d) and input (B, n, Z) -> (B, n, Z)."""
    x = layer.attention.output(context.transpose(1, 2).flatten(2), x)
    output: Tensor = layer.output(layer.intermediate(x), x)
    return output


def _group(tensor: Tensor, captions: int) -> Tensor:
    """Put the captions of a video into one row: (V K, H, n, d) -> (V, H, K n, d)."""
    return tensor.unflatten(0, (-1, captions)).transpose(1, 2).flatten(2, 3)


def _ungroup(tensor: Tensor, captions: int) -> Tensor:
    """Put each caption into its own row again: (V, H, K n, d) -> (V K, H, n, d)."""
    return tensor.unflatten(2, (captions, -1)).transpose(1, 2).flatten(0, 1)


def load_git(folder: Path, *, name: str, device: torch.device) -> tuple[Checkpoint, Backbone]:
    """Load the captioner, and its image encoder as the backbone that makes its features.

    Args:
        folder: folder of the files that transformers saves.
        name: name of the backbone in features and errors.
        device: where both compute.

    Raises:
        CheckpointError: a file is missing or damaged, or needs what capvid does not support.
        WeightsError: damaged or incomplete weights.
    """
    check_files(folder)
    path, (config, tokenizer) = weights_file(folder), _read_config(folder)
    vision = config.vision_config
    preprocess = read_preprocess(folder, side=vision.image_size)
    # the tokenizer's ids of padding, start, end and unknown come first, then those of all other tokens
    end = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    first = [tokenizer.pad_token_id, config.bos_token_id, end, tokenizer.unk_token_id]
    rest = set(range(config.vocab_size))
    if len({*first} & rest) < len(first):
        problem = f"{config.model_type}: padding, start, end and unknown are the tokens {first}"
        raise CheckpointError(problem, remedy="ask who published it")
    order = [*first, *sorted(rest - {*first})]
    network = _load_network(config, path, name).to(device).eval().requires_grad_(False)
    layer = Layer(width=vision.hidden_size, locations=(vision.image_size // vision.patch_size) ** 2 + 1)
    backbone = image_backbone(_ImageEncoder(network.git.image_encoder), layer, preprocess, path, name)
    frames = config.num_image_with_embedding or 1
    header = FeatureHeader(
        streams=(backbone.header,),
        sampling=f"uniform:{frames}",
        reader=None,
        dtype="float32",
        capvid_version=__version__,
    )
    sizes = CaptionerConfig(
        vocabulary_size=len(order), feature_width=layer.width, locations=layer.locations or 0
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


def _read_config(folder: Path) -> tuple[Any, Any]:
    """Read configuration and tokenizer by transformers; no code of the folder is ever run."""
    from transformers import BertTokenizerFast, GitConfig  # type: ignore[attr-defined]

    try:
        with quiet():
            config = GitConfig.from_json_file(str(folder / GIT_CONFIG))
            return config, BertTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # anything that the library raises for a damaged file
        problem = f"{folder}: not the files of a GIT ({first_line(error)})"
        raise CheckpointError(problem, remedy="copy it anew, or ask who published it") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the messages and progress bars of transformers."""
    from transformers.utils import logging as log

    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(log.CRITICAL)
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def first_line(error: Exception) -> str:
    """Return the first line of a message, or the name of an error without one."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def image_backbone(
    module: nn.Module, layer: Layer, preprocess: Preprocess, path: Path, name: str
) -> Backbone:
    """Return the image encoder of a published model, with the weights file ``path``, as a backbone."""
    entry = BackboneEntry(
        name=name,
        kind=name,
        source="none",
        file="",
        licence="",
        origin="",
        description="",
        default_layer=LAYER,
        layers=MappingProxyType({LAYER: layer}),
        preprocess=preprocess,
    )
    header = StreamHeader(
        backbone=name,
        layer=LAYER,
        width=layer.width,
        locations=layer.locations,
        weights_sha256=sha256_file(path),
        preprocess=entry.describe_input(),
        precision="float32",
    )
    device = next(module.parameters()).device
    return Backbone(entry=entry, layer=LAYER, module=module, header=header, device=device)


def build_network(make: Callable[[], Any], path: Path) -> Any:
    """Build a network of transformers, on the CPU without weights.

    Raises:
        ValueError: it is much larger than its weights file ``path``.
    """
    with torch.device("meta"):
        network = make()
    needed, size = sum(tensor.nbytes for tensor in network.state_dict().values()), path.stat().st_size
    if needed > LARGEST_RATIO * size:
        raise ValueError(f"it takes {needed} bytes, and {path.name} has {size}")
    network = network.to_empty(device="cpu")
    for key, buffer in network.named_buffers():
        if key.endswith("position_ids"):
            buffer.copy_(torch.arange(buffer.shape[-1]))
    return network


def _load_network(config: Any, path: Path, name: str) -> Any:
    """Build ``GitForCausalLM`` and load its weights."""
    from transformers import GitForCausalLM

    tensors = read_tensors(path)
    try:
        network = build_network(partial(GitForCausalLM, config), path)
    except (ValueError, TypeError, KeyError, RuntimeError, ZeroDivisionError) as error:
        problem = f"{path.parent / GIT_CONFIG}: no such network ({first_line(error)})"
        raise CheckpointError(problem, remedy="ask who published it") from error
    load_weights(_Published(network, tensors), path, name, tensors)
    return network


class _Published(Named):
    """The network, with its frame positions spelled as in the file's ``tensors``."""

    def __init__(self, network: Any, tensors: dict[str, Tensor]) -> None:
        super().__init__(network)
        self.spelling = next(
            (spelling for spelling in FRAME_POSITIONS if any(spelling in key for key in tensors)),
            FRAME_POSITIONS[0],
        )

    def published_name(self, name: str) -> str:
        """Return the name of a tensor of the network in the file."""
        for spelling in FRAME_POSITIONS:
            name = name.replace(spelling, self.spelling)
        return name


class _ImageEncoder(nn.Module):
    """GIT's image encoder: images (N, 3, h, w) -> tokens (N, L, D)."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, images: Tensor) -> Tensor:
        """Compute the tokens of images."""
        tokens: Tensor = self.encoder(pixel_values=images).last_hidden_state
        return tokens


def model_type(folder: Path) -> str | None:
    """Return transformers' type of the model in a folder; None if it is no such model."""
    try:
        config = read_json(folder / GIT_CONFIG)
    except (OSError, ValueError):
        return None
    kind = config.get("model_type") if isinstance(config, dict) else None
    return kind if isinstance(kind, str) and 0 < len(kind) <= _MAX_TYPE else None


def read_json(path: Path) -> Any:
    """Read a JSON file of a model."""
    return parse_json(read_regular(path, max_bytes=_TEXT_BYTES).decode())


def check_files(folder: Path) -> None:
    """Check that the library, which opens them by name, finds regular files of bounded size and depth."""
    path = folder / GIT_CONFIG
    try:
        for path in sorted(folder.iterdir()):
            if path.suffix == ".json":
                read_json(path)
            elif path.suffix in (".txt", ".jinja", ".model"):
                read_regular(path, max_bytes=_TEXT_BYTES)
        path = folder / GIT_CONFIG
        _check_sizes(read_json(path))
        for path in [folder / name for name in PROCESSOR if (folder / name).is_file()]:
            _check_processed_sizes(read_json(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: {reason}", remedy="copy it anew, or ask who published it") from error


def _check_sizes(config: Any, prefix: str = "") -> None:
    """Raise ValueError if a size of the network has the wrong type or is out of range."""
    if not isinstance(config, dict):
        raise ValueError(f"{prefix or 'the file'} must be an object, got {short(config)}")
    for name, value in config.items():
        _check_size(prefix + name, value, _MOST.get(name, LARGEST if name.endswith(_SIZES) else 0))
    for name in ("vision_config", "text_config"):
        if name in config and not prefix:
            _check_sizes(config[name], f"{name}.")


def _check_processed_sizes(config: Any, prefix: str = "") -> None:
    """Raise ValueError if a size in the file of a processor has the wrong type or is out of range."""
    for name, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, dict):
            _check_processed_sizes(value, f"{prefix}{name}.")
        else:
            limit = MAX_SIDE if prefix.endswith("max_image_size.") else _MOST_PROCESSED.get(name, 0)
            _check_size(prefix + name, value, limit)


def _check_size(name: str, value: Any, limit: int) -> None:
    """Raise ValueError unless ``value``, or each number in a list, is from 1 to ``limit``; 0 for no limit."""
    if not limit or value is None or value is True or value is False:  # some names are of switches
        return
    sizes = [value]
    while any(isinstance(size, list) for size in sizes):  # a list has height and width, or several of them
        sizes = [each for size in sizes for each in (size if isinstance(size, list) else [size])]
    if not all(type(size) is int and 1 <= size <= limit for size in sizes):
        raise ValueError(f"{name} must be an integer between 1 and {limit}, got {short(value)}")


def weights_file(folder: Path) -> Path:
    """Return the weights file of the model in a folder, preferably safetensors.

    Raises:
        CheckpointError: there is none, or it is larger than the limit.
    """
    path = _first(folder, GIT_WEIGHTS)
    if (size := path.stat().st_size) > limits().model_bytes:
        raise CheckpointError(f"{path}: {size} bytes, more than the limit model-bytes")
    return path


def _first(folder: Path, names: tuple[str, ...]) -> Path:
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise CheckpointError(f"{folder}: an incomplete model ({names[0]} is missing)", remedy="copy it anew")
    return path


def read_preprocess(folder: Path, *, side: int | None = None) -> Preprocess:
    """Read the preprocessing of the model in a folder, that of CLIP, SigLIP or VideoMAE in transformers.

    Args:
        folder: the folder.
        side: height and width of the images that the network takes; None does not check them.

    Raises:
        CheckpointError: the file is missing, damaged, or needs what capvid does not support.
    """
    path = _first(folder, _PREPROCESS)
    try:
        values = read_json(path)
        values = values.get("image_processor", values)
        for step in ("do_resize", "do_rescale", "do_normalize"):
            if not values.get(step, True):
                raise ValueError(f"{step} is off")
        size, crop = _sides(values["size"]), _sides(values.get("crop_size", values["size"]))
        crops = values.get("do_center_crop", True)
        mean, std = (tuple(map(float, values[name])) for name in ("image_mean", "image_std"))
        how: dict[str, Any] = {
            "order": "RGB",
            "scale": round(1 / values.get("rescale_factor", 1 / 255), 9),
            "mean": mean,
            "std": std,
            "interpolation": _FILTERS[values["resample"]],
        }
        if len(mean) != 3 or len(std) != 3:
            raise ValueError("three colours are expected")
        if len(size) == 2 and (not crops or crop == size):
            preprocess, made = Preprocess(size=size, **how), size
        elif len(size) == 1 and crops and len(set(crop)) == 1:
            preprocess, made = Preprocess(resize=size[0], crop=crop[0], **how), (crop[0], crop[0])
        else:
            raise ValueError(f"size {values['size']}, crop {values.get('crop_size')}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: no way of cutting and resizing frames that capvid knows ({error})",
            remedy="choose another GIT, such as microsoft/git-base-vatex",
        ) from error
    if side and made != (side, side):
        problem = f"{folder}: frames are made {made[0]} x {made[1]}, and the network sees squares of {side}"
        raise CheckpointError(problem, remedy="ask who published it")
    return preprocess


def _sides(size: int | Mapping[str, int]) -> tuple[int, ...]:
    """Return the shorter edge, or the side of a square in old files; otherwise height and width."""
    if isinstance(size, int):
        return (size,)
    if "shortest_edge" in size:
        return (int(size["shortest_edge"]),)
    return int(size["height"]), int(size["width"])


class WordPieces(Vocabulary):
    """Word pieces of a transformers tokenizer with the token ids of capvid.

    Args:
        tokenizer: tokenizer of transformers.
        order: token id of the tokenizer by ours: padding, start, end, unknown, then all others.
    """

    def __init__(self, tokenizer: Any, order: Sequence[int]) -> None:
        pieces = tokenizer.convert_ids_to_tokens(list(order[len(SPECIAL) :]))
        super().__init__([*SPECIAL, *(piece or "" for piece in pieces)])
        self._tokenizer = tokenizer
        self._order = list(order)

    def sentence(self, numbers: Sequence[int]) -> tuple[str, list[tuple[str, list[int]]]]:
        """Return the text of pieces, and its words, each with the indices of its pieces in ``numbers``."""
        ids = [self._order[number] for number in numbers]
        text = str(self._tokenizer.decode(ids, skip_special_tokens=True)).strip()
        special = set(self._tokenizer.all_special_ids)
        kept = [index for index, number in enumerate(ids) if number not in special]
        pieces = []
        for index in kept:
            piece = self.words[numbers[index]]
            inside = piece.startswith(_INSIDE) and index != kept[0]  # the first piece keeps its prefix
            pieces.append((index, piece.removeprefix(_INSIDE) if inside else piece, inside))
        return text, _align(text.split(), pieces) or _merge(pieces)


def _align(words: Sequence[str], pieces: Sequence[tuple[int, str, bool]]) -> list[tuple[str, list[int]]]:
    """Return the words of a text with the indices of their pieces; empty if the pieces do not spell it."""
    aligned: list[tuple[str, list[int]]] = []
    rest = iter(pieces)
    for word in words:
        spelled, indices = "", []
        while len(spelled) < len(word) and (piece := next(rest, None)) is not None:
            spelled += piece[1]
            indices.append(piece[0])
        if spelled != word:
            return []
        aligned.append((word, indices))
    return [] if next(rest, None) is not None else aligned


def _merge(pieces: Sequence[tuple[int, str, bool]]) -> list[tuple[str, list[int]]]:
    """Return the words that pieces form; continuation pieces join the word before."""
    merged: list[tuple[str, list[int]]] = []
    for index, piece, inside in pieces:
        if inside and merged:
            word, indices = merged[-1]
            merged[-1] = (word + piece, [*indices, index])
        else:
            merged.append((piece, [index]))
    return merged
