"""Options of the commands: from dataclasses, the environment and a TOML file, and their completion.

``CAPVID_CAPTION_BEAM=3`` stands for ``capvid caption --beam 3``, and so for every option of every command.
The file named by ``--config`` or ``CAPVID_CONFIG`` has a table for each command::

    [caption]
    beam = 3
    output-dir = "captions"

    [data.check]
    skip-bad = true

The table ``[limits]`` sets the limits of :mod:`capvid.utils.validation`. The command line has precedence over
the environment, which has precedence over the file.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from capvid.errors import UsageError
from capvid.utils.escaping import terminal
from capvid.utils.validation import limits, option, set_limits
from capvid.video import READER_NAMES

MAX_BATCH = 4096
MAX_FRAMES = 100_000  # as in capvid.video.frame_sampling, which is slow to import
MAX_SEED = 2**32 - 1
MAX_TRIALS = 100_000
MAX_VIEWS = 1000
if TYPE_CHECKING:
    Reader: Any = Enum
else:
    Reader = Enum("Reader", [(name, name) for name in READER_NAMES], type=str)
INPUTS = typer.Argument(
    metavar="INPUT",
    show_default=False,
    help="Videos, folders, patterns, archives, feature files or addresses.",
)
PLACEHOLDERS = {"<int>": "N", "<int range>": "N", "<float>": "N", "<float range>": "N", "<path>": "PATH"}
PANELS = {  # panels of --help: parameters of caption, extract, train and score
    "Input": (
        *(
            "from_file",
            "column",
            "recursive",
            "shard",
            "dry_run",
            "data",
            "skip_bad",
            "features",
            "videos",
            "values",
        ),
        *("model", "weights", "backbone", "layer", "frames", "sampling", "max_frames", "clean", "views"),
        *("segments", "references_format", "missing", "encoder", "self_critical", "settings"),
        "list_recipes",
    ),
    "Output": (
        *(
            "output",
            "output_dir",
            "sidecar",
            "form",
            "prefix",
            "suffix",
            "max_cue",
            "line_width",
            "report",
            "attention",
            "overwrite",
            "resume",
            "plot",
            "metrics",
        ),
        *("paragraph", "dense", "evaluator", "tokenizer", "meteor_engine", "per_video", "others", "page"),
        *("training", "as_json"),
    ),
    "Decoding": (
        *("beam", "max_length", "min_length", "specificity", "num_captions", "rerank", "no_repeat_ngram"),
        *("no_repeat_words", "temperature", "top_p", "seed"),
    ),
    "Chat models": ("endpoint", "prompt", "system", "context", "max_pixels"),
    "Runtime": ("batch_size", "precision", "quantize", "device", "workers", "timeout", "reader", "fail_fast"),
    "Large runs": ("engine", "ray_address", "videos_per_file", "retry_failed", "search"),
}
EXAMPLES = {
    "caption": (
        "holiday.mp4",
        "clips/ --output-dir captions --format json",
        "clips/ --model OWNER/NAME -o captions.jsonl --report page.html",
    ),
    "extract": (
        "clips/ --backbone resnet152 -o features",
        "clips/ --backbone resnet152 --backbone x3d-xs -o features",
        "--from-file list.csv --backbone resnet152 -o s3://bucket/f",
    ),
    "train": (
        "--list",
        "mart-small --data captions.jsonl --features features -o run",
        "m3-small --data captions.jsonl --videos clips -o run",
    ),
    "score": (
        "captions.jsonl references.json",
        "captions.jsonl references.json --per-video scores.csv",
        "new.jsonl references.json --compare old.jsonl",
    ),
}

# Completion: nothing here may take long, or import torch.

Candidates = list[tuple[str, str]]  # values and their descriptions


def _candidates(incomplete: str, described: Iterable[tuple[str, str]]) -> Candidates:
    """Return the values that begin with ``incomplete``, escaped, with their descriptions."""
    return [(terminal(value), terminal(text)) for value, text in described if value.startswith(incomplete)]


def complete_captioner(incomplete: str) -> Candidates:
    """Return trained captioners; the shell completes a path if none matches."""
    from capvid.backbones.catalog import captioners

    return _candidates(incomplete, ((n, e.description) for n, e in captioners().items() if e.source))


def complete_backbone(incomplete: str) -> Candidates:
    """Return backbones."""
    from capvid.backbones.catalog import backbones

    return _candidates(incomplete, ((name, entry.description) for name, entry in backbones().items()))


def complete_model(incomplete: str) -> Candidates:
    """Return captioners, trained or not, and backbones."""
    from capvid.backbones.catalog import captioners

    described = ((name, entry.description) for name, entry in captioners().items())
    return _candidates(incomplete, described) + complete_backbone(incomplete)


def complete_recipe(incomplete: str) -> Candidates:
    """Return the recipes that come with capvid."""
    from capvid.training.recipe import all_recipes

    return _candidates(incomplete, ((name, recipe["description"]) for name, recipe in all_recipes().items()))


def complete_device(incomplete: str) -> Candidates:
    """Return devices, whether this machine has them or not."""
    return _candidates(incomplete, ((name, "") for name in ("auto", "cpu", "cuda", "mps")))


def complete_precision(incomplete: str) -> Candidates:
    """Return the number formats that backbones compute in."""
    return _candidates(incomplete, ((name, "") for name in ("auto", "fp32", "fp16", "bf16")))


class PanelCommand(TyperCommand):
    """Command whose help groups options in panels and ends with examples."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, without the ranges of numbers."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], **{name: [] for name in PANELS}}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                is_argument = parameter.param_type_name == "argument"
                default = "Runtime" if self.name in EXAMPLES else "Options"  # of --help itself
                panel = getattr(parameter, "rich_help_panel", None) or default
                text = re.sub(r"(; |(?<=\[))[^\s\[]+<=x<=[^\s\]]+(?=\])", "", record[1])
                text = re.sub(r"  \[default: \((.*)\)(?=[;\]])", r" [default: \1", text).replace("  [", " [")
                flags = parameter.metavar or record[0] if is_argument else record[0]
                row = (flags, text.removesuffix("[]").rstrip())
                panels.setdefault("Arguments" if is_argument else panel, []).append(row)
        for panel, rows in panels.items():
            if rows:
                with formatter.section(panel):
                    formatter.write_dl(rows, col_max=24)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples."""
        if self.name in EXAMPLES:
            with formatter.section("Examples"):
                for example in EXAMPLES[self.name]:
                    formatter.write(f"  capvid {self.name} {example}\n")


# Options from dataclasses


def refuse_nan(value: float | None) -> float | None:
    """Return the value of an option unless it is NaN, which passes every range check.

    Raises:
        typer.BadParameter: it is NaN.
    """
    if value is not None and math.isnan(value):
        raise typer.BadParameter("not a number")
    return value


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """How videos are decoded and on which device networks compute.

    Attributes:
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.
        workers: processes that decode videos; None takes one per CPU core, at most four.
        timeout: seconds before a file is abandoned; 0 disables the limit.
        reader: video reader: ``auto``, ``pyav`` or ``decord``.
    """

    device: str = option("auto", "auto, cpu, cuda, cuda:N or mps.")
    workers: int | None = option(
        None, "Processes that decode videos.", minimum=1, maximum=256, shown="CPU cores, at most 4"
    )
    timeout: float = option(
        600.0,
        "Seconds before a file is abandoned; 0 disables the limit.",
        minimum=0,
        maximum=1e6,
        metavar="SECONDS",
    )
    reader: str = option(
        "auto",
        "Video reader; auto takes PyAV, and decord where that fails.",
        choices=("auto", "pyav", "decord"),
    )

    @property
    def num_workers(self) -> int:
        """Number of decoding processes."""
        if self.workers is not None:
            return self.workers
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, min(4, cores))


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """Which inputs a command works on, and what to do with those that are done or fail."""

    inputs: Annotated[list[str] | None, INPUTS] = None
    from_file: str | None = option(
        None,
        "List of further inputs, - for stdin: lines, NUL-separated (find -print0), or a column of a CSV, TSV "
        "or Parquet file.",
        metavar="FILE",
    )
    column: str | None = option(
        None, "Column of --from-file.", metavar="NAME", shown="video, path, url or file"
    )
    recursive: bool = option(True, "Search subfolders.", flags=("--recursive/--no-recursive",))
    overwrite: bool = option(False, "Recompute what is already done.")
    fail_fast: bool = option(False, "Stop at the first input that fails.")
    dry_run: bool = option(False, "List what is to do and what is done, and write nothing.")
    shard: str | None = option(
        None,
        "Take part I of N of the inputs, by a digest of each path.",
        metavar="I/N",
    )


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """Large runs: where they are computed, and the files with many results each."""

    engine: str = option(
        "local",
        "Compute here, or on a Ray cluster.",
        choices=("local", "ray"),
    )
    ray_address: str | None = option(
        None,
        "Ray cluster: auto or HOST:PORT.",
        metavar="ADDRESS",
        shown="RAY_ADDRESS, else local",
    )
    videos_per_file: int | None = option(
        None,
        "Videos per shard.",
        minimum=1,
        maximum=1_000_000,
        shown="1000 captions or 100 features",
    )
    retry_failed: bool = option(False, "Retry failed videos in existing shards.")


def option_group(
    parameter: str, group: type, *, names: dict[str, str] | None = None, trained: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces a command's parameter by one option per field of a dataclass.

    Args:
        parameter: name of the command's parameter, which takes the dataclass.
        group: the dataclass; fields without help text become no option.
        names: other names for options, by field; an empty name leaves the field out.
        trained: fields whose default is what the captioner was trained with. If there are any, the
            command gets a dictionary of the options that have a value.
    """
    hints = get_type_hints(group, include_extras=True)
    parameters, field_of = [], {}
    for each in fields(group):
        name = (names or {}).get(each.name, each.name)
        if not name:
            continue
        field_of[name] = each.name
        default = None if each.name in trained else each.default
        assert default is not MISSING
        hint: Any = hints[each.name]
        metadata = each.metadata
        if "choices" in metadata:  # typer takes choices from an Enum
            make_enum: Any = Enum
            hint = make_enum(name, [(value, value) for value in metadata["choices"]], type=str)
        if metadata:
            is_number = {"int", "float"} & set(str(each.type).split(" | "))
            shown = metadata.get("shown", each.default is not None)
            make_option: Any = typer.Option
            typer_option = make_option(
                *metadata.get("flags", (f"--{name.replace('_', '-')}",)),
                help=metadata["help"],
                metavar=metadata.get("metavar"),
                show_default=metadata.get("shown", "as in training") if each.name in trained else shown,
                autocompletion=complete_device if each.name == "device" else None,
                min=metadata["minimum"] if is_number else None,
                max=metadata["maximum"] if is_number else None,
                callback=refuse_nan if "float" in is_number else None,
            )
            hint = Annotated[hint | None if each.name in trained else hint, typer_option]
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=hint))

    def decorator(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def wrapper(**values: Any) -> None:
            chosen = {field: values.pop(name) for name, field in field_of.items()}
            chosen = {field: getattr(value, "value", value) for field, value in chosen.items()}
            command(**values, **{parameter: chosen if trained else group(**chosen)})

        signature = inspect.signature(command, eval_str=True)
        before = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in signature.parameters.values()]
        at = [each.name for each in before].index(parameter)
        signature = signature.replace(parameters=[*before[:at], *parameters, *before[at + 1 :]])
        vars(wrapper)["__signature__"] = signature
        wrapper.__annotations__ = {each.name: each.annotation for each in signature.parameters.values()}
        del vars(wrapper)["__wrapped__"]
        return wrapper

    return decorator


# Values from the environment and a file


def config_first(arguments: list[str]) -> list[str]:
    """Return the arguments with ``--config FILE``, wherever it is before ``--``, moved to the front."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    for index, argument in enumerate(arguments[:end]):
        length = 2 if argument == "--config" else int(argument.startswith("--config="))
        if length and index + length <= end:
            config = arguments[index : index + length]
            return config + arguments[:index] + arguments[index + length :]
    return arguments


def _options(command: Any) -> dict[str, Any]:
    """Return the parameters of a command by the names of their options, without dashes."""
    options = {}
    for parameter in command.params:
        flags = [flag for flag in parameter.opts if flag.startswith("--")]
        if parameter.param_type_name == "option" and flags:
            options[flags[0].lstrip("-").replace("-", "_")] = parameter
    return options


def name_variables(command: Any, name: str, prefix: str = "CAPVID") -> None:
    """Set the environment variable and the placeholder of each option of a command and its subcommands."""
    prefix = f"{prefix}_{name.replace('-', '_').upper()}"
    for option_name, parameter in _options(command).items():
        parameter.envvar = f"{prefix}_{option_name.upper()}"
        if name in EXAMPLES and not parameter.rich_help_panel:
            for panel, names in PANELS.items():
                if parameter.name in names:
                    parameter.rich_help_panel = panel
        parameter.show_envvar = False  # that would double the length of --help
        if parameter.metavar is None and not parameter.is_flag:
            kind = parameter.display_type(None)
            parameter.metavar = kind if "|" in kind else PLACEHOLDERS.get(kind, option_name.upper())
    for subcommand, below in getattr(command, "commands", {}).items():
        name_variables(below, subcommand, prefix)


def read_config(path: Path, command: Any) -> dict[str, Any]:
    """Read defaults of options, as click takes them, and put the table ``limits`` in force.

    Args:
        path: a TOML file.
        command: click's or typer's group of all commands.

    Raises:
        UsageError: the file cannot be read, or has an unknown command or option.
    """
    from capvid.utils.files import read_regular
    from capvid.utils.validation import parse_toml

    try:
        values = parse_toml(read_regular(path, max_bytes=limits().text_bytes).decode("utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: the configuration cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UsageError(f"{path}: not valid TOML ({error})") from error
    table = values.pop("limits", {})
    if not isinstance(table, Mapping):
        raise UsageError(f"{path}: limits = {table!r}: expected a table")
    try:
        set_limits(table)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", remedy=error.remedy) from error
    return _defaults(path, "", values, command)


def _defaults(path: Path, within: str, values: Mapping[str, Any], command: Any) -> dict[str, Any]:
    """Return the values for one command and its subcommands, by the names of their parameters."""
    from capvid.utils.registry import did_you_mean

    below = getattr(command, "commands", {})
    options = _options(command) if within else {}
    defaults: dict[str, Any] = {}
    for key, value in values.items():
        full = f"{within}.{key}" if within else key
        parameter = options.get(key.lstrip("-").replace("-", "_"))
        if key in below and isinstance(value, Mapping):
            defaults[key] = _defaults(path, full, value, below[key])
            continue
        if parameter is None or isinstance(value, Mapping):
            known = [*below, *([] if within else ["limits"]), *(name.replace("_", "-") for name in options)]
            remedy = did_you_mean(key, known) or f"known are {', '.join(known)}"
            raise UsageError(f"{path}: {full}: no such option", remedy=remedy)
        items, expected = value if isinstance(value, list) else [value], ""
        if any(isinstance(item, list | dict) for item in items):
            expected = "a value or a list of values"
        elif isinstance(value, list) and not parameter.multiple:
            expected = "one value"
        elif not parameter.multiple and parameter.is_flag is not isinstance(value, bool):
            expected = "true or false" if parameter.is_flag else "a value"
        if expected:
            raise UsageError(f"{path}: {full} = {value!r}: expected {expected}")
        # As text: inf is text to click, not a number that overflows.
        single = value if parameter.is_flag else str(value)
        defaults[str(parameter.name)] = [str(item) for item in items] if parameter.multiple else single
    return defaults
