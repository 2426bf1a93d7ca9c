"""Option values out of range are usage errors before any work is done."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from toy import Run, Toy
from typer.models import OptionInfo

from capvid.cli import caption, data, extract, info, score, train
from capvid.decoding.decoding_options import DecodingOptions
from capvid.errors import UsageError

HUGE = "1" + "0" * 30
DIGITS = "9" * 5000  # more digits than int() converts
UNBOUNDED = {("data check", "--min-count")}  # only compared with counts


COMMANDS: list[tuple[str, Callable[..., None]]] = [
    ("caption", caption.caption),
    ("extract", extract.extract),
    ("train", train.train),
    ("score", score.score),
    ("info", info.info),
    ("data check", data.check),
]


def numeric_options() -> Iterator[tuple[str, str]]:
    """Yield the command and name of every option that takes a number."""
    for command, function in COMMANDS:
        for name, hint in get_type_hints(function, include_extras=True).items():
            plain, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            options = [extra for extra in extras if isinstance(extra, OptionInfo)]
            if options and {plain, *get_args(plain)} & {int, float}:
                yield command, "--" + name.replace("_", "-")


@pytest.mark.slow
@pytest.mark.parametrize(("command", "option"), list(numeric_options()))
def test_numeric_options_reject_out_of_range_values(
    capvid: Run, command: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    required = ["no.mp4", *(["--backbone", "colour-grid", "-o", "out"] if command == "extract" else [])]
    for value in ("-1", "nan", "inf", HUGE):
        if (command, option) in UNBOUNDED and value == HUGE:
            continue
        code, out, err = capvid(*command.split(), *required, f"{option}={value}")
        assert (code, out) == (2, ""), (value, err)
        assert "internal error" not in err and "Traceback" not in err
        assert option in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--sampling", "windows:1/99999999999999999999"],
        ["--sampling", "windows:99999999999999999999/1"],
        ["--sampling", f"windows:1/{DIGITS}"],
        ["--sampling", "uniform:1000000000000000000"],
        ["--sampling", f"uniform:{DIGITS}"],
        ["--sampling", "uniform:0"],
        ["--sampling", "fps:0"],
        ["--sampling", "fps:-1"],
        ["--sampling", "fps:1e300"],
        ["--sampling", "fps:nan"],
        ["--sampling", f"fps:{DIGITS}"],
        ["--sampling", ""],
        ["--shard", f"1/{HUGE}"],
        ["--shard", f"1/{DIGITS}"],
        ["--shard", "1/2000000"],
        ["--shard", "0/4"],
    ],
)
def test_invalid_samplings_and_shards(capvid: Run, arguments: list[str], tmp_path: Path) -> None:
    command = ["extract", "no.mp4", "--backbone", "colour-grid", "-o", tmp_path / "out", *arguments]
    code, out, err = capvid(*command)
    if arguments == ["--sampling", ""]:  # an empty value means the default
        assert "no.mp4" in err
        return
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1, err


@pytest.mark.parametrize("count", ["0", "-1", "1000000000000", HUGE])
def test_invalid_numbers_of_segments(capvid: Run, count: str) -> None:
    code, out, err = capvid("caption", Path(__file__), f"--segments={count}")
    assert (code, out) == (2, "") and f"{count} segments cannot be made" in err


@pytest.mark.parametrize("other_inputs", [[], ["a.mp4"]])
@pytest.mark.parametrize("command", [["caption"], ["extract", "--backbone", "colour-grid", "-o", "out"]])
def test_empty_input_argument(
    capvid: Run, command: list[str], other_inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert capvid(*command, "", *other_inputs) == (
        2,
        "",
        "error: an INPUT is empty; give a video, a folder or an address, . for this folder\n",
    )


@pytest.mark.parametrize("command", [("caption", "--output-dir"), ("extract", "--backbone", "toy", "-o")])
def test_empty_output_folder_name(
    capvid: Run, toy: Toy, video_files: list[Path], command: tuple[str, ...]
) -> None:
    name, *options = command
    code, out, err = capvid(name, video_files[0], *options, "")
    assert (code, out) == (2, "")
    assert err == "error: the output folder has an empty name; give a folder, . for this one\n"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beam_size": 100_000}, "beam_size must be an integer between 1 and 1000, got 100000"),
        ({"max_length": 10**30}, "max_length must be an integer between 1 and 1000, got "),
        (
            {"num_captions": 10**9, "temperature": 1.0},
            "must be an integer between 1 and 10000, got 1000000000",
        ),
        ({"length_penalty": 1e308}, "length_penalty must be a number between 0 and 100, got 1e+308"),
        ({"specificity": 1e308}, "must be a number between 0 and 1000, got 1e+308"),
        ({"temperature": 1e-308}, "temperature = 1e-308: must be 0 or at least 0.001; 0 takes"),
        ({"temperature": 1e308}, "must be a number between 0 and 1000, got 1e+308"),
        ({"top_p": float("nan"), "temperature": 1.0}, "top_p must be a number between 0 and 1, got nan"),
        ({"seed": 10**30}, "seed must be an integer between 0 and 9223372036854775807, got 1000"),
    ],
)
def test_decoding_options_check_their_ranges(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        DecodingOptions(**values)
    assert message in str(raised.value)


def test_list_on_stdin_above_the_size_limit(capvid: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPVID_LIMIT_LIST_BYTES", "100")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a.mp4\n" * 1000)))
    code, _, err = capvid("caption", "--from-file", "-")
    assert (
        code == 2
        and err == "error: the list on stdin is larger than the limit of 100 bytes; give it as a file\n"
    )


@pytest.mark.skipif(os.name != "posix", reason="needs os.mkfifo")
def test_list_from_a_fifo_is_refused(capvid: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "list.txt")
    code, _, err = capvid("caption", "--from-file", tmp_path / "list.txt")
    assert code == 2 and "list.txt: the list cannot be read (not a regular file" in err
