"""Values of options from the environment and from a TOML file; the command line comes before both.

``CAPVID_CAPTION_BEAM=3`` stands for ``capvid caption --beam 3``, and so for every option of every command; in
the file named by ``--config`` or ``CAPVID_CONFIG`` there is a table for each command::

    [caption]
    beam = 3
    output-dir = "captions"

    [data.check]
    skip-bad = true

The table ``[limits]`` sets the limits of :mod:`capvid.utils.limits`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from capvid.errors import UsageError
from capvid.utils.files import read_regular
from capvid.utils.limits import limits, set_limits
from capvid.utils.registry import did_you_mean
from capvid.utils.validation import parse_toml


def config_first(arguments: list[str]) -> list[str]:
    """The arguments with ``--config FILE`` before the command, wherever it stands before ``--``."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    for place, argument in enumerate(arguments[:end]):
        length = 2 if argument == "--config" else int(argument.startswith("--config="))
        if length and place + length <= end:
            taken = arguments[place : place + length]
            return taken + arguments[:place] + arguments[place + length :]
    return arguments


def name_variables(command: Any, name: str, prefix: str = "CAPVID") -> None:
    """Give every option of a command, and of its subcommands, its environment variable."""
    prefix = f"{prefix}_{_plain(name).upper()}"
    for option, parameter in _options(command):
        parameter.envvar = f"{prefix}_{option.upper()}"
        parameter.show_envvar = False  # that would double the length of --help
    for subcommand, below in getattr(command, "commands", {}).items():
        name_variables(below, subcommand, prefix)


def read_config(path: Path, command: Any) -> dict[str, Any]:
    """Read defaults of options, as click takes them, and put the table ``limits`` in force.

    Args:
        path: a TOML file.
        command: the one with all commands below it, click's or typer's own.

    Raises:
        UsageError: the file cannot be read, or has a command or option that is not known.
    """
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
    """The values of one command and of those below it, by the names of their parameters."""
    below = getattr(command, "commands", {})
    options = dict(_options(command)) if within else {}
    defaults: dict[str, Any] = {}
    for key, value in values.items():
        full = f"{within}.{key}" if within else key
        if key in below and isinstance(value, Mapping):
            defaults[key] = _defaults(path, full, value, below[key])
        elif _plain(key) in options and not isinstance(value, Mapping):
            option = options[_plain(key)]
            defaults[str(option.name)] = _checked(path, full, value, option)
        else:
            known = [*below, *([] if within else ["limits"]), *(name.replace("_", "-") for name in options)]
            remedy = did_you_mean(key, known) or f"known are {', '.join(known)}"
            raise UsageError(f"{path}: {full}: no such option", remedy=remedy)
    return defaults


def _checked(path: Path, name: str, value: Any, option: Any) -> Any:
    """A value as click takes it: a list where an option may be repeated, else a single one."""
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, list | dict) for item in items):
        raise UsageError(f"{path}: {name} = {value!r}: expected a value or a list of values")
    if option.multiple:
        return [str(item) for item in items]
    if isinstance(value, list):
        raise UsageError(f"{path}: {name} = {value!r}: expected one value")
    if option.is_flag is not isinstance(value, bool):
        raise UsageError(
            f"{path}: {name} = {value!r}: expected {'true or false' if option.is_flag else 'a value'}"
        )
    return value if option.is_flag else str(value)  # inf is text to click, not a number that overflows


def _options(command: Any) -> Iterator[tuple[str, Any]]:
    """The options of a command by their names without dashes."""
    for parameter in command.params:
        if parameter.param_type_name == "option":
            long = next((flag for flag in parameter.opts if flag.startswith("--")), None)
            if long is not None:
                yield _plain(long), parameter


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")
