"""Options of the commands, made from the fields of options dataclasses."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from capvid.cli import _completion as completion
from capvid.utils.options import RuntimeOptions, option
from capvid.video import READER_NAMES

__all__ = ["InputOptions", "RuntimeOptions", "ShardingOptions", "option_group", "refuse_nan"]

MAX_BATCH = 4096
MAX_FRAMES = 100_000  # as in capvid.video.frame_sampling, which is slow to import
MAX_SEED = 2**32 - 1
MAX_TRIALS = 100_000
MAX_VIEWS = 1000
if TYPE_CHECKING:
    Reader: Any = Enum
else:
    Reader = Enum("Reader", [(name, name) for name in READER_NAMES], type=str)
COMPLETIONS = {"device": completion.devices}  # by name of the field
NO_INPUT = typer.Argument(metavar="INPUT", show_default=False)


def refuse_nan(value: float | None) -> float | None:
    """Return the value of an option unless it is NaN, which passes every range check.

    Raises:
        typer.BadParameter: it is NaN.
    """
    if value is not None and math.isnan(value):
        raise typer.BadParameter("not a number")
    return value


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """Which inputs a command works on, and what to do with those that are done or fail."""

    inputs: Annotated[list[str] | None, NO_INPUT] = None
    from_file: str | None = option(
        None,
        "Take inputs from a list as well, - for stdin: one path or address a line, or with NUL after each "
        "(find -print0); or from a column of a CSV, TSV or Parquet file. Relative paths start at the current "
        "folder.",
        metavar="FILE",
    )
    column: str | None = option(
        None, "The column of --from-file.", metavar="NAME", shown="video, path, url or file"
    )
    recursive: bool = option(True, "Whether to look into subfolders.", flags=("--recursive/--no-recursive",))
    overwrite: bool = option(False, "Recompute what is already done.")
    fail_fast: bool = option(False, "Stop at the first input that fails.")
    shard: str | None = option(
        None,
        "Work on the Ith of N parts of the inputs, for jobs that share the work; a video's path alone "
        "decides in which part it is.",
        metavar="I/N",
    )


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """Large runs: where they are computed, and the files with many results each."""

    engine: str = option(
        "local",
        "Where to compute: on this machine, or on a Ray cluster (see docs/large-runs.md).",
        choices=("local", "ray"),
    )
    ray_address: str | None = option(
        None,
        "Address of the Ray cluster: auto or HOST:PORT.",
        metavar="ADDRESS",
        shown="RAY_ADDRESS, else this machine",
    )
    videos_per_file: int | None = option(
        None,
        "Videos in each file of JSON lines, Parquet or WebDataset.",
        least=1,
        most=1_000_000,
        shown="a file for each; 1000 captions or 100 features in shards",
    )
    retry_failed: bool = option(False, "Try again what failed, of what is in shards already.")


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
    names = names or {}
    hints = get_type_hints(group, include_extras=True)
    parameters, field_of = [], {}
    for each in fields(group):
        name = names.get(each.name, each.name)
        if not name:
            continue
        field_of[name] = each.name
        default = None if each.name in trained else each.default
        assert default is not MISSING
        hint: Any = hints[each.name]
        if "choices" in each.metadata:  # typer takes choices from an Enum
            make_enum: Any = Enum
            hint = make_enum(name, [(value, value) for value in each.metadata["choices"]], type=str)
        if each.metadata:
            hint = Annotated[
                hint | None if each.name in trained else hint, _typer_option(name, each, trained)
            ]
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
        )

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


def _typer_option(name: str, field: Any, trained: tuple[str, ...]) -> Any:
    """Return the typer option of a dataclass field by its metadata."""
    metadata = field.metadata
    flag = f"--{name.replace('_', '-')}"
    is_number = {"int", "float"} & set(str(field.type).split(" | "))
    shown = "as in training" if field.name in trained else metadata.get("shown", field.default is not None)
    make_option: Any = typer.Option
    return make_option(
        *metadata.get("flags", (flag,)),
        help=metadata["help"],
        metavar=metadata.get("metavar"),
        show_default=shown,
        autocompletion=COMPLETIONS.get(field.name),
        min=metadata["least"] if is_number else None,
        max=metadata["most"] if is_number else None,
        callback=refuse_nan if "float" in is_number else None,
    )
