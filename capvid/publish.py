"""Publishing a training run on the Hugging Face Hub, in one commit and with a model card."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capvid.captioners.checkpoint import CONFIG, WEIGHTS, Checkpoint, load_checkpoint
from capvid.errors import CheckpointError, UsageError
from capvid.features.file import FeatureHeader
from capvid.features.registry import BackboneEntry, captioners
from capvid.features.weights import own_file_name
from capvid.files import file_digest, read_regular
from capvid.hub_models import WEIGHTS_FOLDER, check_repository, known_backbone, published_apart, upload
from capvid.limits import limits
from capvid.parsing import parse_json

CARD = "README.md"
RECIPE, METRICS, TEST = "recipe.json", "metrics.jsonl", "test.json"
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.-]*")
_TAG = re.compile(r"[\w.-]+", re.ASCII)
_FREE = re.compile(r"(apache-2\.0|bsd-[23]-clause|mit|cc0-1\.0|bvlc googlenet: unrestricted use)(?![\w.-])")
_LOCAL_PATH = re.compile(
    r"(?:^|[\s\"'=:(,\[])"  # what a path may stand after
    r"((?:/[^/\s\"']+){2,}|~/[^\s\"']+|[A-Za-z]:[\\/][^\s\"'/]+|\\\\\w[^\s\"']+)"
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run: its folder, best checkpoint, recipe, epochs, and test scores where there are some."""

    folder: Path
    checkpoint: Checkpoint
    recipe: Mapping[str, Any]
    epochs: tuple[Mapping[str, Any], ...]
    test: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Published:
    """What was published: the commit, and the weights that were left out, each with the reason."""

    commit: str
    left_out: Mapping[str, str] = field(default_factory=dict)


def publish(
    run: Path,
    repository: str,
    *,
    private: bool = False,
    message: str | None = None,
    branch: str = "main",
    licence: str | None = None,
) -> Published:
    """Upload a training run to the Hub: checkpoint, recipe, scores, free weights, model card.

    Args:
        run: the folder that training wrote.
        repository: ``OWNER/NAME``; made if need be.
        private: make it private; one that is public already is refused.
        message: of the commit; ``None`` says which captioner it is.
        branch: to commit to; made if need be.
        licence: of the captioner, as the Hub names it; ``None`` names none.

    Raises:
        UsageError: a name that cannot be one.
        CheckpointError: there is no whole run in the folder, or it names paths of this machine.
        HubError: no token, no permission, or no connection.
    """
    check_repository(repository)
    found = load_run(run)
    card = model_card(found, repository=repository, licence=licence)
    weights, left_out = _weights(found)
    files = {WEIGHTS: found.folder / "best" / WEIGHTS, CONFIG: found.folder / "best" / CONFIG}
    files |= {name: found.folder / name for name in (RECIPE, METRICS)}
    files |= {TEST: found.folder / TEST} if found.test is not None else {}
    files |= weights
    for path in files.values():
        _check_file(path, found.folder)
    commit = upload(
        {**files, CARD: card.encode()},
        repository,
        private=private,
        message=message or f"{found.checkpoint.name}, trained with capvid",
        branch=branch,
        replaces=lambda name: name == TEST or name.startswith(f"{WEIGHTS_FOLDER}/"),
    )
    return Published(commit=commit, left_out=left_out)


def load_run(folder: Path) -> Run:
    """Read what training wrote.

    Raises:
        CheckpointError: there is no whole run in the folder, or a file of it is damaged.
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
    """Write the model card of a run, in Markdown with the Hub's metadata before it.

    Args:
        run: the run, or its folder.
        repository: where it is published; ``None`` speaks of the run folder.
        licence: of the captioner, as the Hub names it; ``None`` names none.

    Raises:
        UsageError: a licence that cannot be one.
        CheckpointError: there is no whole run in the folder.
    """
    run = run if isinstance(run, Run) else load_run(run)
    if licence is not None and not _LICENCE.fullmatch(licence):
        raise UsageError(
            f"{licence}: not a licence's name", remedy="write it as the Hub does: apache-2.0, say"
        )
    name, header = run.checkpoint.name, run.checkpoint.header
    backbones = [stream.backbone for stream in header.streams if stream.backbone]
    tags = ["video-captioning", *dict.fromkeys(t for t in (name, *backbones) if _TAG.fullmatch(t))]
    front = ["library_name: capvid", "pipeline_tag: video-text-to-text"]
    front += [f"license: {licence}"] if licence else []
    front += ["tags:", *(f'- "{tag}"' for tag in tags)]
    title = _line(run.recipe.get("name") or name)
    model = repository or run.folder.resolve().name
    parts = [
        "\n".join(["---", *front, "---"]),
        f"# {title}: {name}, trained with capvid",
        _what_it_is(run),
        "## Use",
        f"    capvid caption video.mp4 --model {model}",
        "## Features",
        _features(header),
        "## Recipe",
        _table(("setting", "value"), _settings(run.recipe)),
        "## Scores",
        _scores(run),
    ]
    samples = _samples(run)
    parts += ["## Samples", "What it says of validation videos:", samples] if samples else []
    return "\n\n".join(parts) + "\n"


def _what_it_is(run: Run) -> str:
    entry = captioners().get(run.checkpoint.name)
    weights = sum(parameter.numel() for parameter in run.checkpoint.captioner.parameters())
    words = f"{weights:,} weights, a vocabulary of {len(run.checkpoint.vocabulary):,} words"
    if entry is None:
        return f"A video captioner: {words}."
    return f"A video captioner, {_line(entry.description)} ({words}). It follows {_line(entry.paper)}."


def _features(header: FeatureHeader) -> str:
    rows = []
    for stream in header.streams:
        entry = known_backbone(stream)
        size = stream.width if stream.locations is None else f"{stream.locations} x {stream.width}"
        digest = (stream.weights_sha256 or "not known")[:12]
        licence = entry.licence if entry else None
        values = (stream.backbone, stream.layer, size, stream.preprocess, digest, licence)
        rows.append([value or "not known" for value in values])
    sampling = f"Frames: {_line(header.sampling)}.\n\n" if header.sampling else ""
    head = ("backbone", "layer", "width", "input", "sha256 of its weights", "their licence")
    return sampling + _table(head, rows)


def _settings(recipe: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The recipe's values by ``section.option``."""
    rows: list[tuple[str, Any]] = []
    for key, value in recipe.items():
        if isinstance(value, Mapping):
            rows += [(f"{key}.{option}", item) for option, item in value.items()]
        else:
            rows.append((key, value))
    return rows


def _scores(run: Run) -> str:
    """The epochs that were the best so far, the last of which is published, and the test split."""
    best = [epoch for epoch in run.epochs if epoch.get("best")]
    rows = [(epoch.get("epoch"), _number(epoch.get("val_cider"))) for epoch in best]
    text = "Validation, each epoch that was the best so far; the last of them is this one:\n\n"
    text += _table(("epoch", "CIDEr-D"), rows)
    scores = {} if run.test is None else run.test.get("scores", {})
    if not isinstance(scores, Mapping) or not scores:
        return text
    return f"{text}\n\nTest split:\n\n" + _table(
        ("metric", "score"), [(name, _number(score)) for name, score in scores.items()]
    )


def _samples(run: Run) -> str:
    """Three captions of the epoch that is published."""
    best = [epoch for epoch in run.epochs if epoch.get("best")]
    samples = best[-1].get("samples") if best else None
    if not isinstance(samples, Mapping):
        return ""
    rows = [(video, _sentence(said)) for video, said in list(samples.items())[:3]]
    return _table(("video", "caption"), rows) if rows else ""


def _sentence(said: Any) -> str:
    return ". ".join(map(str, said)) if isinstance(said, list) else str(said)


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_line, line))} |" for line in lines)


def _line(value: Any) -> str:
    """Give a value as text that stays within one line and one cell of a table."""
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
    """Give the weights to upload by their names in the repository, and those left out with the reason."""
    streams = run.checkpoint.header.streams
    wanted = [(stream, entry) for stream in streams if (entry := known_backbone(stream)) is not None]
    entries = {own_file_name(entry): (stream, entry) for stream, entry in wanted}
    files, left_out = {}, {}
    folder = run.folder / WEIGHTS_FOLDER
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        name = f"{WEIGHTS_FOLDER}/{path.name}"
        if path.name not in entries or path.suffix != ".safetensors" or not path.is_file():
            left_out[name] = "not the weights of a backbone of this captioner"
            continue
        stream, entry = entries[path.name]
        if reason := _kept_back(entry, path, stream.weights_sha256 or entry.sha256):
            left_out[name] = reason
        else:
            files[name] = path
    return files, left_out


def _kept_back(entry: BackboneEntry, path: Path, sha256: str | None) -> str:
    """Say why weights are not uploaded; empty where they are."""
    if not published_apart(entry):
        return "comes with capvid"
    if not _FREE.match(entry.licence.lower()):
        return f"licence: {entry.licence}"
    if sha256 is not None and file_digest(path) != sha256:
        return "not those that the captioner was trained with"
    return ""


def _check_file(path: Path, run: Path) -> None:
    """See that a file lies in the run and names no path of this machine.

    Raises:
        CheckpointError: it is a link out of the run, or names one.
    """
    if not path.resolve().is_relative_to(run.resolve()):
        raise CheckpointError(f"{path}: leads out of the run", remedy="put the file itself there")
    if path.suffix == ".safetensors":
        texts: Iterator[str] = iter(_notes(path))
    else:
        lines = _text(path).splitlines() if path.name == METRICS else [_text(path)]
        texts = (text for line in lines if line.strip() for text in _strings(_record(line, path)))
    for text in texts:
        if match := _LOCAL_PATH.search(text):
            raise CheckpointError(
                f"{path}: names a path of this machine ({match[1]})",
                remedy="take it out of the file, so that it is not published",
            )


def _notes(path: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return list((file.metadata() or {}).values())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: damaged ({error})", remedy="copy it anew") from error


def _strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
