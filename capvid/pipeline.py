"""Video in, captions out: what ``capvid.load`` returns and what the command line calls.

Notation for tensor shapes: B videos, T frames, D width of the features.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from capvid.bundled import FOLDER
from capvid.captioners.checkpoint import CONFIG, WEIGHTS, Checkpoint, load_checkpoint
from capvid.decoding import DecodingOptions, Hypothesis, decode, pad_frames
from capvid.device import resolve_device
from capvid.errors import CapvidError, CheckpointError, FeatureMismatchError, UsageError
from capvid.features.extract import TIMEOUT, ExtractionResult, extract_features
from capvid.features.file import Features, load_features
from capvid.features.registry import captioners, default_captioner
from capvid.files import sha256_file
from capvid.hub_models import HubModel, fetch_model, is_name
from capvid.names import did_you_mean
from capvid.results import Caption, CaptionResult, WordScore
from capvid.video.sampling import Sampling, UniformSampling, parse_sampling
from capvid.video.workers import WorkerPool

if TYPE_CHECKING:
    from capvid.features.backbones import Backbone

DEFAULT_FRAMES = 28
FRAMES_PER_VIDEO_IN_BATCH = 4

_T = TypeVar("_T")


class CaptionPipeline:
    """Captions videos, and files of features, with one captioner.

    Args:
        checkpoint: the captioner, its vocabulary and the header of the features it was trained on.
        backbones: those that make such features, or a function that loads them, called when the first
            video comes (files of features need none).
        device: where the captioner computes.
        sampling: which frames to take.
        options: of the decoding.
        batch_size: videos captioned together; captions do not depend on it.
        workers: processes that decode videos.
        timeout: seconds after which a file is given up; None waits for ever.
        model: name and revision of the captioner for results; None takes the checkpoint's name.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        backbones: Sequence[Backbone] | Callable[[], Sequence[Backbone]],
        *,
        device: torch.device | str,
        sampling: Sampling,
        options: DecodingOptions,
        batch_size: int = 8,
        workers: int = 2,
        timeout: float | None = TIMEOUT,
        model: str | None = None,
    ) -> None:
        if batch_size < 1 or workers < 1:
            raise UsageError("batch size and workers must be at least 1")
        self.checkpoint = checkpoint
        self.device = torch.device(device)
        self.sampling = sampling
        self.options = options
        self.batch_size = batch_size
        self.workers = workers
        self.timeout = timeout
        self.model = model or checkpoint.name
        self._given_backbones = backbones
        checkpoint.captioner.to(self.device).eval()

    @property
    def settings(self) -> Mapping[str, Any]:
        """Everything besides the model that a caption depends on."""
        return {"sampling": self.sampling.spec(), **self.options.to_dict()}

    def __call__(self, path: str | Path) -> str:
        """Give the best caption of one video or file of features.

        Raises:
            CapvidError: it cannot be read, or is not what the captioner was trained on.
        """
        result = next(self.stream([path]))
        if result.error is not None:
            raise result.error
        return result.captions[0].text

    def stream(self, paths: Iterable[str | Path]) -> Generator[CaptionResult, None, None]:
        """Caption videos and files of features (``.safetensors``), in their order, as they come.

        Videos are decoded in the background while the captioner works. Paths are taken one by one as they are
        needed, so that there may be any number of them. An input that fails is a result with its error.

        Raises:
            CapvidError: what concerns all inputs, such as the backbone's weights.
        """
        with closing(self._features(map(Path, paths))) as features:
            for batch in _batches(features, self.batch_size):
                yield from self._describe(batch)

    def caption_features(self, videos: Sequence[Features | np.ndarray]) -> list[tuple[Caption, ...]]:
        """Caption videos by their features, together; of each the captions, best first.

        Args:
            videos: features as :func:`~capvid.features.file.load_features` gives them, or bare arrays (T, D),
                or (T, L, D) of feature maps.

        Raises:
            FeatureMismatchError: they are not what the captioner was trained on.
        """
        arrays = []
        for video in videos:
            if isinstance(video, Features):
                self.checkpoint.header.checked(video.header)
                video = video.concatenated()
            arrays.append(self._fitting(video))
        return [tuple(map(self._caption, found)) for found in self._decode(arrays)] if arrays else []

    def _fitting(self, array: np.ndarray) -> np.ndarray:
        """The array in single precision, if its shape is that of what the captioner was trained on."""
        header = self.checkpoint.header
        inner = (header.locations, header.width) if header.locations else (header.width,)
        if array.shape[1:] != inner or not len(array):
            wanted = ", ".join(("T", *map(str, inner)))
            raise FeatureMismatchError(
                f"features of the shape {array.shape}, and the captioner was trained on ({wanted})",
                remedy="extract them with the captioner's backbone and layer",
            )
        return np.ascontiguousarray(array, dtype=np.float32)

    @cached_property
    def _backbones(self) -> Sequence[Backbone]:
        given = self._given_backbones
        return given() if callable(given) else given

    @cached_property
    def _pool(self) -> WorkerPool:
        """Processes that decode, kept for the next call."""
        pool = WorkerPool(self.workers, timeout=self.timeout)
        weakref.finalize(self, pool.close)
        return pool

    def _features(self, paths: Iterator[Path]) -> Generator[ExtractionResult, None, None]:
        """Features of every input in order: made for videos, read from files of features."""
        for path in paths:
            if not _holds_features(path):  # from the first video on, videos are decoded ahead
                with closing(self._mixed(chain([path], paths))) as results:
                    yield from map(self._checked, results)
                return
            yield self._checked(self._loaded(path))

    def _mixed(self, paths: Iterator[Path]) -> Generator[ExtractionResult, None, None]:
        """Features of inputs of which at least one is a video."""
        waiting: deque[Path] = deque()  # inputs that were taken, and are not given yet

        def videos() -> Iterator[Path]:
            for path in paths:
                waiting.append(path)
                if not _holds_features(path):
                    yield path

        size = FRAMES_PER_VIDEO_IN_BATCH * self.batch_size
        extraction = extract_features(
            videos(), self._backbones, self.sampling, batch_size=size, pool=self._pool
        )
        with closing(extraction) as extracted:
            for result in extracted:
                while _holds_features(waiting[0]):
                    yield self._loaded(waiting.popleft())
                waiting.popleft()
                yield result
        yield from map(self._loaded, waiting)

    @staticmethod
    def _loaded(path: Path) -> ExtractionResult:
        try:
            return ExtractionResult(path=path, features=load_features(path), error=None)
        except CapvidError as error:
            return ExtractionResult(path=path, features=None, error=error)

    def _checked(self, result: ExtractionResult) -> ExtractionResult:
        """Give the same result, or the error if its features are not like those trained on."""
        if result.features is None:
            return result
        try:
            self.checkpoint.header.checked(result.features.header)
            return result
        except FeatureMismatchError as error:
            named = FeatureMismatchError(f"{result.path}: {error.message}", remedy=error.remedy)
            return ExtractionResult(path=result.path, features=None, error=named)

    def _describe(self, batch: Sequence[ExtractionResult]) -> Iterator[CaptionResult]:
        """Caption one batch; inputs that failed pass through in their places."""
        arrays = [result.features.concatenated() for result in batch if result.features is not None]
        sentences = iter(self._decode(arrays) if arrays else [])
        for result in batch:
            failed = result.features is None
            yield CaptionResult(
                path=Path(result.path),
                status="error" if failed else "ok",
                captions=() if failed else tuple(map(self._caption, next(sentences))),
                error=result.error,
                model=self.model,
                lost=result.lost,
                duration=None if result.features is None else result.features.seconds,
            )

    def _decode(self, arrays: Sequence[np.ndarray]) -> Sequence[Sequence[Hypothesis]]:
        """Hypotheses for the features (T, D) of each video."""
        clips = [self.checkpoint.frames(torch.from_numpy(array)) for array in arrays]
        features, mask = pad_frames(clips)  # (B, T, D), (B, T)
        captioner = self.checkpoint.captioner
        return decode(captioner, features.to(self.device), mask.to(self.device), self.options)

    def _caption(self, hypothesis: Hypothesis) -> Caption:
        words = self.checkpoint.vocabulary.decode(hypothesis.tokens)
        scores = (
            WordScore(word=word, logprob=float(p))
            for word, p in zip(words, hypothesis.logprobs, strict=False)
        )
        return Caption(text=" ".join(words), logprob=float(hypothesis.logprob), words=tuple(scores))


def load(
    model: str | Path | None = None,
    *,
    device: str = "auto",
    weights: str | Path | None = None,
    batch_size: int = 8,
    workers: int = 2,
    timeout: float | None = TIMEOUT,
    **decoding: Any,
) -> CaptionPipeline:
    """Make the pipeline of a trained captioner.

    Args:
        model: the folder of a captioner that was trained with capvid, the name of one that comes with it,
            or ``OWNER/NAME`` on the Hugging Face Hub, ``@`` and a commit, branch or tag after it; None takes
            the default.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.
        weights: file of the backbone's weights, or a folder that holds it; otherwise they are sought in
            ``model/weights``, the places in ``CAPVID_WEIGHTS`` and the cache.
        batch_size: videos captioned together; captions do not depend on it.
        workers: processes that decode videos.
        timeout: seconds after which a file is given up; None waits for ever.
        decoding: fields of :class:`~capvid.decoding.DecodingOptions`: ``beam_size=1`` for greedy search,
            ``num_captions``, ``temperature`` and so on.

    Raises:
        CheckpointError: there is no such captioner.
        HubError: one on the Hub cannot be had.
        UsageError: an argument that cannot be used.
    """
    options = DecodingOptions.from_dict(decoding)
    folder, published = _find(model)
    resolved = resolve_device(device)
    checkpoint = load_checkpoint(folder)
    home = checkpoint.folder or folder  # of a training run, its folder "best"
    sampling = (
        parse_sampling(checkpoint.header.sampling)
        if checkpoint.header.sampling
        else UniformSampling(int(checkpoint.info.get("max_frames", DEFAULT_FRAMES)))
    )
    return CaptionPipeline(
        checkpoint,
        lambda: _load_backbones(checkpoint, [home, folder], published, weights=weights, device=resolved),
        device=resolved,
        sampling=sampling,
        options=options,
        batch_size=batch_size,
        workers=workers,
        timeout=timeout,
        model=published.label if published else f"{checkpoint.name}@{revision(home)}",
    )


def model_folder(model: str | Path | None) -> Path:
    """Find the folder of a captioner by its path or, where there is no such folder, by its name.

    Raises:
        CheckpointError: there is neither, or the files that come with capvid are not as they should be.
        HubError: the name is one on the Hub, and the captioner cannot be had.
    """
    return _find(model)[0]


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
    digests = [sha256_file(Path(folder) / name) for name in (CONFIG, WEIGHTS)]
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


def _holds_features(path: Path) -> bool:
    return path.suffix.lower() == ".safetensors"


def _batches(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    """Give the items in lists of ``size``, the last one perhaps shorter."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
