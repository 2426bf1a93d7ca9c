"""``capvid push``: publish a trained captioner on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

import typer

from capvid.cli._terminal import print_line


def push(
    run: Path = typer.Argument(..., metavar="RUN", show_default=False),
    repository: str = typer.Argument(..., metavar="OWNER/NAME", show_default=False),
    private: bool = typer.Option(False, "--private", help="Make the repository private if it is new."),
    message: str | None = typer.Option(
        None, show_default="says which captioner it is", help="Of the commit."
    ),
    revision: str = typer.Option("main", metavar="BRANCH", help="Branch to commit to; made if need be."),
    licence: str | None = typer.Option(
        None,
        "--licence",
        "--license",
        show_default="none is named",
        help="Of the captioner: apache-2.0, say.",
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="List the files and their bytes; upload nothing."),
) -> None:
    """Publish a captioner that capvid train wrote, with a model card, on the Hugging Face Hub.

    Uploads the best checkpoint, the recipe, the scores, and weights in RUN/weights if their licence allows
    it, in one commit; nothing else of the folder. Prints OWNER/NAME@COMMIT, which capvid caption --model
    takes.
    """
    from capvid.checkpoints.publishing import files_to_publish, publish

    if dry_run:
        files, left_out, _ = files_to_publish(run, repository, licence=licence)
    else:
        commit, left_out = publish(
            run, repository, private=private, message=message, branch=revision, licence=licence
        )
    for name, reason in left_out.items():
        print_line(f"left out: {name} ({reason})", err=True)
    if not dry_run:
        print_line(f"{repository}@{commit}")
        return
    for name, content in sorted(files.items()):
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        typer.echo(f"{name}\t{size}")
