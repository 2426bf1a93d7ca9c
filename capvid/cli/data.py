"""``capvid data``: what is in a data set."""

from __future__ import annotations

import typer

from capvid.cli._batch import SOME_FAILED
from capvid.cli._terminal import print_line
from capvid.datasets.dataset import dataset_help
from capvid.errors import DataError

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at data sets before training.")


def check(
    specs: list[str] = typer.Argument(..., metavar="SPEC", show_default=False),
    features: list[str] | None = typer.Option(
        None,
        help="Folder of feature files, or a packed features file, to look for the videos in. May be "
        "repeated.",
    ),
    min_count: int = typer.Option(1, min=1, help="How often a word must come in train to be known."),
    skip_bad: bool = typer.Option(
        False, "--skip-bad", help="Take unusable rows as left out: they do not change the exit code."
    ),
) -> None:
    """Count what is in data sets and list what cannot be used.

    SPEC is the path of a JSONL file, or FORMAT:PATH: {formats}.

    Leaves with 0 if everything can be used, 3 if some rows or files cannot or features are missing, 1 if
    nothing can be used.
    """
    from capvid.datasets.dataset_check import check_data, report_lines

    report = check_data(specs, features=features or [], min_count=min_count)
    if len(report.data.failed) == 1 and not report.data.videos and not report.data.skipped:
        raise report.data.failed[0]
    for line in report_lines(report):
        print_line(line)
    if not report.usable:
        what = (
            "no video of the data has features" if report.data.videos else "nothing in the data can be used"
        )
        raise DataError(what, remedy="see the report")
    if report.data.failed or report.lacks_features or (report.data.skipped and not skip_bad):
        raise typer.Exit(SOME_FAILED)


check.__doc__ = (check.__doc__ or "").format(formats=dataset_help())
app.command("check")(check)
