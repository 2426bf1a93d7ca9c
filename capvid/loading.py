"""Finding a trained captioner by name, folder or Hub id, with the backbones that it needs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from capvid.bundled import FOLDER
from capvid.captioners.checkpoint import CONFIG, WEIGHTS, Checkpoint, holds_checkpoint, load_checkpoint
from capvid.decoding import DecodingOptions
from capvid.device import resolve_device
from capvid.errors import CheckpointError, FeatureMismatchError, UsageError
from capvid.features.boundaries import parse_segments
from capvid.features.extract import TIMEOUT
from capvid.features.registry import captioners, default_captioner
from capvid.files import sha256_file
from capvid.git_files import GIT, GIT_CONFIG, model_type, weights_file
from capvid.hub_models import HubModel, fetch_model, is_name
from capvid.names import did_you_mean
from capvid.pipeline import CaptionPipeline
from capvid.video.sampling import UniformSampling, parse_sampling

if TYPE_CHECKING:
    from capvid.features.backbones import Backbone

DEFAULT_FRAMES = 28
_TRAINED = (
    "length_penalty",
    "specificity",
    "no_repeat_words",
)  # decoding options that stay


def load(
    model: str | Path | None = None,
    *,
    device: str = "auto",
    weights: str | Path | None = None,
    batch_size: int = 8,
    workers: int = 2,
    timeout: float | None = TIMEOUT,
    segments: str | int | Path | None = None,
    attention: bool = False,
    pictures: bool = False,
    specificity: float | None = None,
    no_repeat_words: bool | None = None,
    **decoding: Any,
) -> CaptionPipeline:
    """Make the pipeline of a trained captioner.

    Args:
        model: the folder of a captioner that was trained with capvid, the name of one that comes with it,
            or ``OWNER/NAME`` on the Hugging Face Hub, ``@`` and a commit, branch or tag after it; a GIT in
            the form of transformers will do as well. None takes the default.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.
        weights: file of the backbone's weights, or a folder that holds it; otherwise they are sought in
            ``model/weights``, the places in ``CAPVID_WEIGHTS`` and the cache.
        batch_size: videos captioned together (of files of vectors eight times as many); captions do not
            depend on it.
        workers: processes that decode videos.
        timeout: seconds after which a file, or a part of a long one, is given up; None waits for ever.
        segments: a sentence for each segment of a video: ``auto``, how many, or a file that gives them; None
            captions videos whole, but lets captioners that write paragraphs have ``auto``.
        attention: whether captions have traces of what the captioner looked at.
        pictures: whether results have small pictures of the sampled frames.
        specificity: how much captions are preferred that fit their own video more than any; None takes what
            the captioner was trained with.
        no_repeat_words: whether no content word is said twice in a sentence; None as in training.
        decoding: other fields of :class:`~capvid.decoding.DecodingOptions`: ``beam_size=1`` for greedy
            search, ``num_captions``, ``temperature`` and so on.

    Raises:
        CheckpointError: there is no such captioner.
        HubError: one on the Hub cannot be had.
        UsageError: an argument that cannot be used.
        DataError: a file of segments that is not understood.
    """
    if specificity is not None:
        decoding["specificity"] = specificity
    if no_repeat_words is not None:
        decoding["no_repeat_words"] = no_repeat_words
    options = DecodingOptions.from_dict({**decoding, "trace": attention})
    cut = None if segments is None else parse_segments(str(segments))
    folder, published = _find(model)
    resolved = resolve_device(device)
    checkpoint, backbones, label = _load(folder, published, weights=weights, device=resolved)
    most = int(checkpoint.info.get("max_words", options.max_length))
    if options.max_length > most:
        raise UsageError(f"{label}: its captions have {most} words at most", remedy="ask for no more")
    options = replace(options, **_trained_decoding(checkpoint, label, without=decoding))
    try:
        sampling = (
            parse_sampling(checkpoint.header.sampling)
            if checkpoint.header.sampling
            else UniformSampling(int(checkpoint.info.get("max_frames", DEFAULT_FRAMES)))
        )
    except UsageError as error:
        raise CheckpointError(
            f"{label}: captioner.json: features.sampling: {error.message}",
            remedy="train it again or copy it anew",
        ) from error
    if cut is None and checkpoint.captioner.paragraphs:
        cut = parse_segments("auto")
    return CaptionPipeline(
        checkpoint,
        backbones,
        device=resolved,
        sampling=sampling,
        options=options,
        batch_size=batch_size,
        workers=workers,
        timeout=timeout,
        segments=cut,
        pictures=pictures,
        model=label,
    )


def _trained_decoding(checkpoint: Checkpoint, label: str, *, without: Collection[str]) -> dict[str, Any]:
    """How a captioner's sentences were ranked and kept from repetition in training, but for ``without``.

    Raises:
        CheckpointError: what is said of it is damaged.
    """
    trained = checkpoint.info.get("decoding", {})
    try:
        found = {name: trained[name] for name in _TRAINED if name in trained.keys() - set(without)}
        DecodingOptions(**found)
    except (AttributeError, UsageError) as error:
        raise CheckpointError(
            f"{label}: its decoding options are damaged", remedy="train it again or copy it anew"
        ) from error
    return found


def model_folder(model: str | Path | None) -> Path:
    """Find the folder of a captioner by its path or, where there is no such folder, by its name.

    Raises:
        CheckpointError: there is neither, or the files that come with capvid are not as they should be.
        HubError: the name is one on the Hub, and the captioner cannot be had.
    """
    return _find(model)[0]


def _load(
    folder: Path, published: HubModel | None, *, weights: str | Path | None, device: torch.device
) -> tuple[Checkpoint, Callable[[], Sequence[Backbone]], str]:
    """Load the captioner in a folder; gives what loads its backbones, and its name for results, as well."""
    if model_type(folder) == GIT and not holds_checkpoint(folder):
        from capvid.git_model import load_git

        if weights is not None:
            raise UsageError("GIT sees frames with weights of its own", remedy="leave out --weights")
        name = published.repository if published else GIT
        checkpoint, backbone = load_git(folder, name=name, device=device)
        digest = _digest(folder / GIT_CONFIG, weights_file(folder)) if published is None else ""
        return checkpoint, lambda: [backbone], published.label if published else f"{GIT}@{digest}"
    checkpoint = load_checkpoint(folder)
    home = checkpoint.folder or folder  # of a training run, its folder "best"
    return (
        checkpoint,
        lambda: _load_backbones(checkpoint, [home, folder], published, weights=weights, device=device),
        published.label if published else f"{checkpoint.name}@{revision(home)}",
    )


def _find(model: str | Path | None) -> tuple[Path, HubModel | None]:
    """Find the folder of a captioner, and what it is on the Hub where it comes from there."""
    if model is not None and Path(model).is_dir():
        return Path(model), None
    trained = {name: entry for name, entry in captioners().items() if entry.source}
    name = default_captioner() if model is None else str(model)
    if name not in trained:
        if isinstance(model, str) and name not in captioners() and is_name(name):
            found = fetch_model(name)
            return found.folder, found
        what = (
            "comes untrained"
            if name in captioners()
            else "no such folder, nor a captioner that comes trained"
        )
        raise CheckpointError(
            f"{name}: {what}",
            remedy=f"{did_you_mean(name, trained)} "
            f"give the folder of a captioner that you trained, one of {', '.join(trained)}, or a name "
            "on the Hugging Face Hub (OWNER/NAME)",
        )
    entry = trained[name]
    if not entry.bundled:
        found = fetch_model(str(entry.source).removeprefix("hub:"))
        return found.folder, found
    folder = FOLDER / str(entry.source).partition(":")[2]
    try:
        digest = sha256_file(folder / WEIGHTS)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: the captioner {name} cannot be read ({error.strerror})", remedy="install capvid again"
        ) from error
    if digest != entry.sha256:
        raise CheckpointError(f"{folder}: damaged, not the captioner {name}", remedy="install capvid again")
    return folder, None


def revision(folder: str | Path) -> str:
    """Twelve hexadecimal digits that tell this checkpoint's files from those of any other."""
    return _digest(*(Path(folder) / name for name in (CONFIG, WEIGHTS)))


def _digest(*paths: Path) -> str:
    digests = map(sha256_file, paths)
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:12]


def _load_backbones(
    checkpoint: Checkpoint,
    folders: Sequence[Path],
    published: HubModel | None,
    *,
    weights: str | Path | None,
    device: torch.device,
) -> list[Backbone]:
    """Load the backbones that make the features the captioner was trained on.

    Raises:
        FeatureMismatchError: capvid has no such backbone, or makes other features with it.
        HubError: the captioner was published with their weights, which cannot be had.
    """
    from capvid.features.backbones import load_backbone

    if published is not None and weights is None:
        published.fetch_weights(checkpoint.header)
    streams = checkpoint.header.streams
    search = [folder / "weights" for folder in folders]
    given = None if weights is None else Path(weights)
    if given is not None and len(streams) > 1 and not given.is_dir():
        search.insert(0, given)  # the file's name tells to which of the backbones it belongs
        given = None
    found = []
    for stream in streams:
        name = _known_backbone(stream.backbone, width=stream.width)
        backbone = load_backbone(name, layer=stream.layer, weights=given, device=device, search=search)
        differing = stream.mismatches(backbone.header)
        if differing:
            raise FeatureMismatchError(
                f"{name} here is not the one the captioner was trained on: {', '.join(differing)}",
                remedy="give the weights it was trained on with --weights",
            )
        found.append(backbone)
    return found


def _known_backbone(name: str | None, *, width: int) -> str:
    """Give ``name`` as the registry knows it.

    Raises:
        FeatureMismatchError: it is not known, so no video can be turned into such features.
    """
    from capvid.features.registry import backbone_entry, backbones

    remedy = f"give files of its features, or a captioner trained on one of {', '.join(backbones())}"
    if name is None:
        raise FeatureMismatchError(
            f"the captioner does not say which backbone made its {width}-wide features", remedy=remedy
        )
    try:
        return backbone_entry(name).name
    except UsageError as error:
        raise FeatureMismatchError(
            f"the captioner was trained on features of {name}, which capvid cannot make", remedy=remedy
        ) from error
