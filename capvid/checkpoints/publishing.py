"""Publishing a training run on the Hugging Face Hub, in one commit and with a model card."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capvid.backbones.catalog import captioners
from capvid.backbones.weights import own_file_name
from capvid.captioners.checkpoint import CONFIG, WEIGHTS, Checkpoint, load_checkpoint
from capvid.checkpoints.hub_checkpoints import (
    WEIGHTS_FOLDER,
    check_repository,
    known_backbone,
    published_apart,
    upload,
)
from capvid.errors import CheckpointError, UsageError
from capvid.utils.files import read_regular, sha256_file
from capvid.utils.validation import limits, parse_json

CARD = "README.md"
RECIPE, METRICS, TEST = "recipe.json", "metrics.jsonl", "test.json"
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.-]*")
_TAG = re.compile(r"[\w.-]+", re.ASCII)
_LOCAL_PATH = re.compile(
    r"(?:^|[\s\"'=:(,\[])"  # what a path may stand after
    r"((?:/[^/\s\"']+){2,}|~/[^\s\"']+|[A-Za-z]:[\\/][^\s\"'/]+|\\\\\w[^\s\"']+)"
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run: its folder, best checkpoint, recipe, epochs, and test scores, if any."""

    folder: Path
    checkpoint: Checkpoint
    recipe: Mapping[str, Any]
    epochs: tuple[Mapping[str, Any], ...]
    test: Mapping[str, Any] | None


def publish(
    run: Path,
    repository: str,
    *,
    private: bool = False,
    message: str | None = None,
    branch: str = "main",
    licence: str | None = None,
) -> tuple[str, Mapping[str, str]]:
    """Upload a training run to the Hub: checkpoint, recipe, scores, free weights, model card.

    Return the commit, and the weights that were left out, each with the reason.

    Args:
        run: run folder.
        repository: ``OWNER/NAME``; created if need be.
        private: create it private; one that is public already is refused.
        message: commit message; None names the captioner.
        branch: to commit to; created if need be.
        licence: licence of the captioner, as the Hub names it.

    Raises:
        UsageError: a name that cannot be one.
        CheckpointError: there is no complete run in the folder, or it names paths of this machine.
        HubError: no token, no permission, or no connection.
    """
    files, left_out, name = files_to_publish(run, repository, licence=licence)
    commit = upload(
        files,
        repository,
        private=private,
        message=message or f"{name}, trained with capvid",
        branch=branch,
        replaces=lambda name: name == TEST or name.startswith(f"{WEIGHTS_FOLDER}/"),
    )
    return commit, left_out


def files_to_publish(
    run: Path, repository: str, *, licence: str | None = None
) -> tuple[dict[str, Path | bytes], Mapping[str, str], str]:
    """Return the files of a run, or their bytes, by their names in the repository.

    Return also the weights that are left out, each with the reason, and the name of the captioner. Arguments
    and errors are those of :func:`publish`.
    """
    check_repository(repository)
    trained = load_run(run)
    card = model_card(trained, repository=repository, licence=licence)
    weights, left_out = _weights(trained)
    files = {WEIGHTS: trained.folder / "best" / WEIGHTS, CONFIG: trained.folder / "best" / CONFIG}
    files |= {name: trained.folder / name for name in (RECIPE, METRICS)}
    files |= {TEST: trained.folder / TEST} if trained.test is not None else {}
    files |= weights
    for path in files.values():
        _check_file(path, trained.folder)
    return {**files, CARD: card.encode()}, left_out, trained.checkpoint.name


def load_run(folder: Path) -> Run:
    """Read what training wrote.

    Raises:
        CheckpointError: there is no complete run in the folder, or a file of it is damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such run", remedy="give the folder that capvid train wrote")
    if not (folder / "best" / CONFIG).is_file():
        raise CheckpointError(
            f"{folder}: no trained captioner in this run (best/{CONFIG} is missing)",
            remedy="give the folder that capvid train wrote, after its first epoch",
        )
    checkpoint = load_checkpoint(folder / "best")
    lines = _text(folder / METRICS).splitlines()
    epochs = tuple(_record(line, folder / METRICS) for line in lines if line.strip())
    test = folder / TEST
    return Run(
        folder=folder,
        checkpoint=checkpoint,
        recipe=_record(_text(folder / RECIPE), folder / RECIPE),
        epochs=epochs,
        test=_record(_text(test), test) if test.is_file() else None,
    )


def model_card(run: Run | Path, *, repository: str | None = None, licence: str | None = None) -> str:
    """Return the model card of a run, in Markdown with the Hub's metadata before it.

    Args:
        run: the run, or its folder.
        repository: where it is published; None refers to the run folder.
        licence: licence of the captioner, as the Hub names it.

    Raises:
        UsageError: a licence that cannot be one.
        CheckpointError: there is no complete run in the folder.
    """
    run = run if isinstance(run, Run) else load_run(run)
    if licence is not None and not _LICENCE.fullmatch(licence):
        remedy = "write it as the Hub does: apache-2.0, say"
        raise UsageError(f"{licence}: not a licence's name", remedy=remedy)
    name, header = run.checkpoint.name, run.checkpoint.header
    backbones = [stream.backbone for stream in header.streams if stream.backbone]
    tags = ["video-captioning", *dict.fromkeys(t for t in (name, *backbones) if _TAG.fullmatch(t))]
    front = ["library_name: capvid", "pipeline_tag: video-text-to-text"]
    front += [f"license: {licence}"] if licence else []
    front += ["tags:", *(f'- "{tag}"' for tag in tags)]

    weights = sum(parameter.numel() for parameter in run.checkpoint.captioner.parameters())
    counts = f"{weights:,} weights, a vocabulary of {len(run.checkpoint.vocabulary):,} words"
    summary = f"A video captioner: {counts}."
    if entry := captioners().get(name):
        what, paper = _line(entry.description), _line(entry.paper)
        summary = f"A video captioner, {what} ({counts}). It follows {paper}."
    streams = []
    for stream in header.streams:
        size = stream.width if stream.locations is None else f"{stream.locations} x {stream.width}"
        digest = (stream.weights_sha256 or "not known")[:12]
        terms = getattr(known_backbone(stream), "licence", None)
        cells = (stream.backbone, stream.layer, size, stream.preprocess, digest, terms)
        streams.append([cell or "not known" for cell in cells])
    settings: list[tuple[str, Any]] = []
    for key, value in run.recipe.items():
        if isinstance(value, Mapping):
            settings += [(f"{key}.{option}", item) for option, item in value.items()]
        else:
            settings.append((key, value))
    best = [epoch for epoch in run.epochs if epoch.get("best")]
    parts = [
        "\n".join(["---", *front, "---"]),
        f"# {_line(run.recipe.get('name') or name)}: {name}, trained with capvid",
        summary,
        "## Use",
        f"    capvid caption video.mp4 --model {repository or run.folder.resolve().name}",
        "## Features",
        *([f"Frames: {_line(header.sampling)}."] if header.sampling else []),
        _table(("backbone", "layer", "width", "input", "sha256 of its weights", "their licence"), streams),
        "## Recipe",
        _table(("setting", "value"), settings),
        "## Scores",
        "Scores are times 100. Validation, each epoch that was the best so far; the last is this one:",
        _table(("epoch", "CIDEr-D"), [(e.get("epoch"), _number(e.get("val_cider"))) for e in best]),
    ]
    scores = {} if run.test is None else run.test.get("scores", {})
    if isinstance(scores, Mapping) and scores:
        rows = [(metric, _number(score)) for metric, score in scores.items()]
        parts += ["Test split:", _table(("metric", "score"), rows)]
    samples = best[-1].get("samples") if best else None
    if isinstance(samples, Mapping) and samples:
        rows = [
            (video, ". ".join(map(str, text)) if isinstance(text, list) else str(text))
            for video, text in list(samples.items())[:3]
        ]
        parts += ["## Samples", "What it says of validation videos:", _table(("video", "caption"), rows)]
    return "\n\n".join(parts) + "\n"


def _number(value: Any) -> str:
    return f"{100 * value:.1f}" if isinstance(value, float) else str(value)


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_line, line))} |" for line in lines)


def _line(value: Any) -> str:
    """Return a value as text that stays within one line and one cell of a table."""
    return re.sub(r"([\\|<>*`\[\]])", r"\\\1", " ".join(str(value).split()))


def _text(path: Path) -> str:
    try:
        return read_regular(path, max_bytes=limits().header_bytes).decode("utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise CheckpointError(f"{path}: cannot be read ({reason})", remedy="train it again") from error


def _record(text: str, path: Path) -> Mapping[str, Any]:
    try:
        record = parse_json(text)
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged ({error})", remedy="train it again") from error
    if not isinstance(record, dict):
        raise CheckpointError(f"{path}: damaged (not a record)", remedy="train it again")
    return record


def _weights(run: Run) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the weights to upload by their names in the repository, and those left out with the reason."""
    entries = {
        own_file_name(entry): (stream, entry)
        for stream in run.checkpoint.header.streams
        if (entry := known_backbone(stream)) is not None
    }
    files, left_out = {}, {}
    folder = run.folder / WEIGHTS_FOLDER
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        name = f"{WEIGHTS_FOLDER}/{path.name}"
        if path.name not in entries or path.suffix != ".safetensors" or not path.is_file():
            left_out[name] = "not the weights of a backbone of this captioner"
            continue
        stream, entry = entries[path.name]
        sha256 = stream.weights_sha256 or entry.sha256
        if not published_apart(entry):
            left_out[name] = "comes with capvid"
        elif not entry.is_free:
            left_out[name] = f"licence: {entry.licence}"
        elif sha256 is not None and sha256_file(path) != sha256:
            left_out[name] = "not those that the captioner was trained with"
        else:
            files[name] = path
    return files, left_out


def _check_file(path: Path, run: Path) -> None:
    """Raise CheckpointError if a file is a link out of the run, or names a path of this machine."""
    from safetensors import SafetensorError, safe_open

    if not path.resolve().is_relative_to(run.resolve()):
        raise CheckpointError(f"{path}: leads out of the run", remedy="put the file itself there")
    texts: Iterable[str]
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="np") as file:
                texts = list((file.metadata() or {}).values())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: damaged ({error})", remedy="copy it anew") from error
    else:
        lines = _text(path).splitlines() if path.name == METRICS else [_text(path)]
        texts = (text for line in lines if line.strip() for text in _strings(_record(line, path)))
    for text in texts:
        if match := _LOCAL_PATH.search(text):
            problem = f"{path}: names a path of this machine ({match[1]})"
            raise CheckpointError(problem, remedy="take it out of the file, so that it is not published")


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
