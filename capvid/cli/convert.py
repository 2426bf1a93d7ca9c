"""``capvid convert``: a downloaded checkpoint into a backbone's weights file, or into a captioner."""

from __future__ import annotations

from pathlib import Path

import typer

from capvid.cli._batch import check_writable_file
from capvid.cli._options import complete_backbone
from capvid.cli._terminal import print_line
from capvid.errors import UsageError
from capvid.utils.output_check import check_outputs

_NAMED = 10  # tensors that a message names


def convert(
    file: Path = typer.Argument(..., metavar="FILE", show_default=False),
    backbone: str | None = typer.Option(
        None,
        "--as",
        show_default="the one whose tensors these are",
        help="Name of the backbone.",
        autocompletion=complete_backbone,
    ),
    output: Path | None = typer.Option(
        None,
        "-o",
        "--output",
        show_default="beside FILE, as --weights FOLDER finds it",
        help="The file to write (.safetensors); with --words, the folder.",
    ),
    words: Path | None = typer.Option(
        None,
        "--words",
        show_default=False,
        help="FILE is a captioner of the MART authors' code, and this its word2idx.json.",
    ),
) -> None:
    """Turn a downloaded checkpoint into a weights file of a backbone, or into a captioner.

    Takes .pth, .pt, .bin, .tar, .pickle and .safetensors, with tensors wrapped or named as other tools do.
    Nothing but tensors is ever unpickled. Prints the path of the file.
    """
    if words is not None:
        _convert_captioner(file, words, output or file.with_suffix(""))
        return
    if output is not None:
        _check(output, file)
    from capvid.backbones.conversion import convert
    from capvid.backbones.weights import own_file_name

    conversion = convert(file, backbone=backbone)
    if output is None:
        output = file.parent / own_file_name(conversion.entry)
        _check(output, file)
    digest = conversion.save(output)
    names = conversion.left_out
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    left_out = f", left out: {', '.join(names[:_NAMED])}{more}" if names else ""
    print_line(
        f"{output}: {len(conversion.tensors)} tensors of {conversion.entry.name}, sha256 {digest}{left_out}",
        err=True,
    )
    entry = conversion.entry
    known = None if entry.source.startswith("bundled:") else entry.sha256
    if entry.fingerprint is not None:
        from capvid.backbones.x3d_checkpoints import differing_tensors

        if differing := differing_tensors(entry, conversion.tensors):
            wrong = f"{len(differing)} of {len(conversion.tensors)} tensors"
            problem = f"{entry.name} takes other weights ({wrong} differ): those of {next(iter(entry.urls))}"
            print_line(f"warning: {problem}", err=True)
    elif known is not None and known != digest:
        print_line(f"warning: {entry.name} takes only the file with sha256 {known}", err=True)
    print_line(output)


def _convert_captioner(file: Path, words: Path, folder: Path) -> None:
    """Write the captioner of the MART authors' code in ``file`` to a folder, and print its path.

    Raises:
        UsageError: the folder exists already.
    """
    from capvid.captioners.authors_weights import read_authors_checkpoint
    from capvid.captioners.checkpoint import save_checkpoint

    if folder.exists():
        raise UsageError(f"{folder}: exists already", remedy="give another folder with -o")
    converted = read_authors_checkpoint(file, words)
    try:
        save_checkpoint(folder, converted.captioner, converted.vocabulary, converted.header, converted.info)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written ({error.strerror or error})") from error
    print_line(folder)


def _check(output: Path, file: Path) -> None:
    """Check that the weights file can be written, and replaces nothing else.

    Raises:
        UsageError: it cannot, or is.
    """
    if output.suffix != ".safetensors":
        raise UsageError(f"{output}: not a name for a weights file", remedy="let it end in .safetensors")
    check_writable_file(output)
    check_outputs([("-o", output)], [file], kind="weights")
