"""``capvid caption``: videos into sentences."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from capvid.cli._batch import (
    RESUMABLE,
    Batch,
    check_writable_file,
    check_writable_folder,
    output_file,
    print_plan,
    read_inputs,
    run_sharded,
    wants_shards,
)
from capvid.cli._options import (
    MAX_BATCH,
    MAX_FRAMES,
    InputOptions,
    RuntimeOptions,
    ShardingOptions,
    complete_captioner,
    complete_precision,
    option_group,
    refuse_nan,
)
from capvid.decoding.decoding_options import ChatOptions, DecodingOptions
from capvid.errors import CapvidError, RunError, UsageError, input_error
from capvid.output.writers import FORMATS, Document

if TYPE_CHECKING:
    from capvid.output.manifest import Outputs
    from capvid.output.report import Report
    from capvid.output.results import CaptionResult
    from capvid.pipeline import CaptionPipeline
    from capvid.utils.storage import VideoPath
    from capvid.video.input_set import VideoInput

MAX_CUE_SECONDS = 1e6
MAX_LINE_WIDTH = 10_000
_T = TypeVar("_T")
BETTER = "smolvlm2-500m"  # captioner to recommend where captions are of low confidence
MEMORY = 1.2  # that it needs, relative to its weights
# one word with an extension or a final slash, or any line that ends in .txt
_FILE_NAME = re.compile(r"\S*[^\s.?!,;:]\.[a-z][a-z0-9]{0,7}|\S*[/\\]|.{1,250}\.txt", re.I | re.A)

if TYPE_CHECKING:
    Format = Enum
    Quantization = Enum
else:  # besides documents: shards, and a dataset of the videos
    _FORM_NAMES = (*FORMATS, "videofolder", "parquet", "webdataset")
    Format = Enum("Format", [(name, name) for name in _FORM_NAMES], type=str)
    Quantization = Enum("Quantization", [("8bit", "8bit"), ("4bit", "4bit")], type=str)


@option_group("inputs", InputOptions)
@option_group("sharding", ShardingOptions)
@option_group("runtime", RuntimeOptions)
@option_group(
    "decoding",
    DecodingOptions,
    names={"beam_size": "beam", "length_penalty": ""},
    trained=("beam_size", "max_length", "specificity", "no_repeat_words"),
)
@option_group("chat", ChatOptions, trained=("prompt", "system", "context", "max_pixels"))
def caption(
    *,
    model: str | None = typer.Option(
        None,
        show_default="m3-motion or kv-memory",
        autocompletion=complete_captioner,
        metavar="NAME",
        help="Captioner (see capvid models), run folder, or OWNER/NAME[@REVISION] on the Hub, pinned at "
        "its first download; also GIT and chat models.",
    ),
    output: Path | None = typer.Option(None, "-o", "--output", help="Write captions to one file."),
    output_dir: str | None = typer.Option(
        None, metavar="DIR|URL", help="Write one file per video, or shards."
    ),
    form: Format | None = typer.Option(
        None, "--format", show_default="suffix of -o, else txt", help="Output format."
    ),
    sidecar: bool = typer.Option(
        False,
        "--sidecar",
        help="Write each text beside its video (clip.txt); keep texts that people wrote or edited.",
    ),
    prefix: str = typer.Option(
        "",
        metavar="TEXT",
        show_default=False,
        help="Text before each video's caption, such as a trigger word.",
    ),
    rerank: str | None = typer.Option(
        None,
        metavar="ENCODER",
        help="Order candidates (--num-captions 20) by their CLIPScore with the frames: clip, clip-large, "
        "siglip2, a folder, or OWNER/NAME on the Hub.",
    ),
    suffix: str = typer.Option(
        "", metavar="TEXT", show_default=False, help="Text after each video's caption."
    ),
    max_cue: float | None = typer.Option(
        None,
        min=0,
        max=MAX_CUE_SECONDS,
        metavar="SECONDS",
        show_default="7",
        callback=refuse_nan,
        help="Time that a subtitle is shown at most; 0 shows it for its whole segment.",
    ),
    line_width: int | None = typer.Option(
        None,
        min=0,
        max=MAX_LINE_WIDTH,
        show_default="42",
        help="Characters per line of a subtitle, of which there are two at a time; 0 breaks no lines.",
    ),
    report: Path | None = typer.Option(
        None,
        metavar="FILE.html",
        help="Write a page with frames, captions and attention; captions finished videos again for it.",
    ),
    attention: bool = typer.Option(
        False,
        "--attention",
        help="Record each word's attention in json and jsonl; otherwise chart it on stderr.",
    ),
    segments: str | None = typer.Option(
        None,
        metavar="FILE|N|auto",
        show_default="none; auto for paragraphs",
        help="One sentence per segment: a file of start,end; N equal ones; or auto, cut at changes.",
    ),
    endpoint: str | None = typer.Option(
        None,
        metavar="URL",
        help="OpenAI-compatible API of a chat model, such as http://localhost:8000/v1; --model is its "
        "name there, CAPVID_API_KEY the key.",
    ),
    sampling: str | None = typer.Option(
        None,
        metavar="SAMPLING",
        show_default="as in training; chat models: uniform:16",
        help="Frame sampling of a video or segment: uniform:N, fps:R or windows:SIZE/STRIDE.",
    ),
    max_frames: int | None = typer.Option(
        None, min=1, max=MAX_FRAMES, help="Maximum frames per video or segment."
    ),
    decoding: dict[str, Any],
    chat: dict[str, Any],
    weights: Path | None = typer.Option(None, help="Weights of the backbone: file or folder."),
    batch_size: int = typer.Option(
        8, min=1, max=MAX_BATCH, help="Videos captioned together (feature files: 8 times as many)."
    ),
    precision: str = typer.Option(
        "auto",
        metavar="NAME",
        autocompletion=complete_precision,
        help="Precision of a chat model: auto, fp32, fp16 or bf16.",
    ),
    quantize: Quantization | None = typer.Option(
        None, help="Quantize the weights of a chat model, on CUDA GPUs."
    ),
    runtime: RuntimeOptions,
    inputs: InputOptions,
    sharding: ShardingOptions,
) -> None:
    """Caption videos.

    One input prints its caption; several print lines of path, tab and caption. --output-dir writes one file
    per video; a rerun captions only what is new, changed or failed. See docs/captioning.md, and
    docs/large-runs.md for shards, job arrays and clusters.
    """
    if bool(output) + bool(output_dir) + sidecar > 1:
        raise UsageError("-o, --output-dir and --sidecar exclude each other", remedy="give one of them")
    from capvid.utils.output_check import model_files

    others = [segments, chat["prompt"], weights, *(model_files(Path(model)) if model else ())]
    input_set = read_inputs(inputs, timeout=runtime.timeout or None, others=others, features=True)
    sharded = wants_shards(sharding, output_dir, form and form.value)
    batch = Batch(verb="captioned", many=input_set.many or sharded)
    if inputs.dry_run:
        batch = Batch(verb="to caption", many=batch.many, dry_run=True)
    if chat["prompt"]:
        chat["prompt"] = _read_prompt(chat["prompt"])
    partial = output and output.with_name(f"{output.stem}.partial{output.suffix}")  # after Ctrl-C
    if output:
        check_writable_file(output)
    if report:
        if report.suffix.lower() not in (".html", ".htm"):  # a video, say, would be replaced
            problem = f"{report}: not the name of a page"
            raise UsageError(problem, remedy="give --report a name that ends in .html")
        if output is not None and output.resolve() == report.resolve():
            raise UsageError(f"{report}: the captions go there", remedy="give -o and --report two names")
        check_writable_file(report)

    def load_pipeline(device: str, begun: str | None) -> CaptionPipeline:
        from capvid.checkpoints.lookup import default_model
        from capvid.pipeline import load

        name = model
        if model is None and endpoint is None:  # a run that is continued keeps the captioner it began with
            name = default_model(None if inputs.overwrite else begun, weights=weights)
        if name is not None and endpoint is None:
            batch.advice = lambda: better_captioner(name, chosen=model is not None)
        return load(
            name,
            device=device,
            weights=weights,
            batch_size=batch_size,
            workers=runtime.num_workers,
            timeout=runtime.timeout or None,
            reader=runtime.reader,
            sampling=sampling,
            max_frames=max_frames,
            precision=precision,
            quantize=None if quantize is None else quantize.value,
            endpoint=endpoint,
            segments=segments,
            attention=True if attention else None if report else False,
            thumbnails=report is not None,
            prefix=prefix,
            suffix=suffix,
            rerank=rerank,
            **decoding,
            **chat,
        )

    if sharded:
        from capvid.distributed.jobs import CaptionJob
        from capvid.output.shards import read_head
        from capvid.utils.storage import Storage

        if output or report:
            raise UsageError("shards take neither -o nor --report", remedy="leave it out")
        shards = form.value if form else "jsonl"
        if shards not in ("jsonl", "parquet", "webdataset"):
            problem = f"there are no shards of {shards}"
            raise UsageError(problem, remedy="use --format jsonl, parquet or webdataset")
        assert output_dir is not None
        media = shards == "webdataset"

        def make_job(device: str) -> CaptionJob:
            begun = None if inputs.overwrite else (read_head(Storage(output_dir)) or {}).get("model")
            return CaptionJob(pipeline=load_pipeline(device, begun), attention=attention, media=media)

        run_sharded(
            make_job,
            input_set,
            batch,
            output_dir,
            shards,
            (runtime, sharding),
        )
        return
    videos = list(input_set.videos(batch))
    if not videos and batch.errors:  # an empty part of a job array still writes its -o
        batch.finish()
    from capvid.output.manifest import METADATA, file_names
    from capvid.utils.files import MANIFEST, atomic_write_text
    from capvid.utils.output_check import check_outputs
    from capvid.utils.storage import Storage

    videofolder = form is not None and form.value == "videofolder"
    if videofolder and not output_dir:
        problem = "videofolder is a file in the folder of the videos"
        raise UsageError(problem, remedy="give this folder as --output-dir")
    extension = output.suffix[1:].lower() if output else ""
    if form and not videofolder:
        extension = form.value
    writer = FORMATS[extension if extension in FORMATS else "txt"]
    options = {"max_cue": max_cue, "line_width": line_width}
    subtitles = {name: value for name, value in options.items() if value is not None}
    if subtitles and not writer.single:
        name = next(iter(subtitles)).replace("_", "-")
        raise UsageError(f"--{name} is for subtitles", remedy="use --format srt or vtt, or leave it out")
    if writer.single and batch.many and not output_dir and not sidecar:
        raise UsageError(
            f"{writer.extension} holds the subtitles of one video", remedy="give --output-dir for several"
        )
    folder = None if output_dir is None else Storage(output_dir).local
    if folder and not inputs.dry_run:
        check_writable_folder(folder)
    names = file_names(videos, writer.extension, folder) if folder and not videofolder else {}
    read = [*input_set.named, *(video.path for video in videos)]
    written = [("-o", path) for path in (output, partial) if path] + (
        [("--report", report)] if report else []
    )
    if folder:
        in_folder = [METADATA] if videofolder else [MANIFEST, *names.values()]
        written += [("--output-dir", folder / name) for name in in_folder]
    check_outputs(written, read)
    if sidecar:
        paths = {video.path for video in videos if isinstance(video.path, Path)}
        texts = {path.with_suffix(f".{writer.extension}") for path in paths} - paths
        check_outputs(
            [("--sidecar", path) for path in texts], read, kind="text" if inputs.overwrite else None
        )

    def open_outputs(made_by: Mapping[str, Any], settings: Mapping[str, Any]) -> Outputs:
        from capvid.output.manifest import OutputFolder, Sidecars, VideoFolder

        def render(result: CaptionResult) -> str:
            text = io.StringIO()
            with Document(form=writer, stream=text, many=False, **settings) as out:
                out.append(out.render(result))
            return text.getvalue()

        if folder is None:
            return Sidecars(writer.extension, render, made_by, overwrite=inputs.overwrite)
        if videofolder:
            return VideoFolder(folder, made_by, overwrite=inputs.overwrite)
        return OutputFolder(folder, names, render, records_errors=writer.records_errors, made_by=made_by)

    records = attention and writer.records_attention

    def output_of(path: VideoPath) -> Path | None:
        if folder and names:
            return folder / names[path]
        return path.with_suffix(f".{writer.extension}") if sidecar and isinstance(path, Path) else None

    if inputs.dry_run and not (sidecar or (folder and folder.is_dir())):  # nothing can be done already
        print_plan(batch, videos, output_of)
        return
    begun = None
    if model is None and not inputs.overwrite and (sidecar or (folder and folder.is_dir())):
        from capvid.backbones.catalog import default_captioners

        earlier = open_outputs({"model": "", "settings": {}}, {})
        begun = earlier.captioner([video.path for video in videos], default_captioners())
    with batch.stage("loading the model"):
        pipeline = load_pipeline(runtime.device, begun)
    settings: dict[str, Any] = {"settings": pipeline.settings, "attention": records, **subtitles}
    attended = {**pipeline.settings, **({"attention": True} if records else {}), **subtitles}
    made_by = {"model": pipeline.model, "settings": attended}
    if inputs.dry_run:
        outputs = open_outputs(made_by, settings)
        print_plan(
            batch,
            videos,
            output_of,
            is_done=lambda path: not inputs.overwrite and outputs.is_done(path),
        )
        return
    run = _Run(pipeline, batch, inputs.fail_fast, charts=attention and not records, report=report)
    with ExitStack() as stack:
        if report:
            from capvid.output.report import Report

            page = Report(report, model=pipeline.model, settings=pipeline.settings)
            run.page = stack.enter_context(page)
        if folder or sidecar:
            outputs = stack.enter_context(open_outputs(made_by, settings))
            run.caption_into(outputs, videos, overwrite=inputs.overwrite)
            batch.finish()
            return
        if output:
            batch.interrupted = f"; {output} was not written"
        text = io.StringIO()
        try:
            with Document(
                form=writer, stream=text if output else sys.stdout, many=batch.many, **settings
            ) as out:
                run.caption(videos, out.render, out.append)
        except KeyboardInterrupt:
            if partial and batch.done:
                atomic_write_text(partial, text.getvalue())
                batch.say(f"note: the captions so far are in {partial}")
            raise
        if output and (batch.done or writer.records_errors):
            atomic_write_text(output.resolve(), text.getvalue())  # a link stays one
    batch.finish()


def better_captioner(name: str, *, chosen: bool) -> str:
    """Return which captioner may do better than a bundled one on this machine, and what it takes.

    Args:
        name: the captioner.
        chosen: whether the user named it.

    Returns:
        a sentence; empty if nothing better can run here.
    """
    from huggingface_hub import constants

    from capvid.backbones.catalog import captioners, default_captioners
    from capvid.hub import client
    from capvid.utils.device import free_memory
    from capvid.vlm.chat import WEIGHTS

    *preferred, offline = default_captioners()
    entry, known = captioners()[BETTER], captioners().get(name)
    if known is None or not known.bundled:
        return ""
    if preferred and name == offline and not chosen:  # there was a note why, or an earlier run began with it
        if not constants.HF_HUB_OFFLINE:
            return ""
        return f"{preferred[0]} does better; unset HF_HUB_OFFLINE once, and what it needs is downloaded"
    here = client.cached(str(entry.source), WEIGHTS) is not None
    if (constants.HF_HUB_OFFLINE and not here) or free_memory()[0] < MEMORY * (entry.bytes or 0):
        return ""
    download = "it is on this machine" if here else f"a download of about {(entry.bytes or 0) / 1e9:.0f} GB"
    installed = find_spec("num2words") and int(version("transformers").partition(".")[0]) >= 5
    install = "" if installed else "; first run pip install 'capvid[vlm]'"
    return f"--model {BETTER} may do better ({download}){install}"


def _read_prompt(prompt: str) -> str:
    """Return a prompt, or the text of the file that it names.

    Raises:
        UsageError: the file cannot be read or is empty, or there is no file of what looks like its name.
    """
    from capvid.utils.files import read_regular
    from capvid.utils.registry import did_you_mean
    from capvid.utils.validation import MIB

    path = Path(prompt)
    try:
        if os.path.isfile(prompt):  # noqa: PTH113  # Path.is_file raises for long names
            text = read_regular(path, max_bytes=MIB).decode("utf-8-sig").strip()
            if not text:
                raise ValueError("it is empty")
            return text
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"{path}: not a prompt ({reason})", remedy="write it as UTF-8 text") from error
    if not _FILE_NAME.fullmatch(prompt):
        return prompt
    names: list[str] = []
    with suppress(OSError):
        names = [each.name for each in path.parent.iterdir()]
    remedy = did_you_mean(path.name, names) or "a prompt without a file is a sentence"
    raise UsageError(f"{path}: there is no such file with a prompt", remedy=remedy)


@dataclass
class _Run:
    """Captions videos one after the other; each result is rendered, written and counted.

    Attributes:
        pipeline: the pipeline that captions.
        batch: state of the run.
        fail_fast: whether to stop at the first failure.
        charts: whether to draw the attention as charts on stderr.
        report: path of the HTML page that results are added to as well.
    """

    pipeline: CaptionPipeline
    batch: Batch
    fail_fast: bool
    charts: bool
    report: Path | None
    page: Report | None = None
    warned: bool = False  # that the captioner has no attention

    def caption(
        self,
        videos: Sequence[VideoInput],
        render: Callable[[CaptionResult], str],
        append: Callable[[str], None],
    ) -> None:
        """Caption videos, and render and append each result as soon as it is ready."""
        batch = self.batch

        def write(result: CaptionResult) -> CapvidError | None:
            good = result.error is None
            batch.done += good  # before it is written: what a reader has seen is counted
            try:
                text = render(result)
                lines = self.show(result)
                flagged = result.num_low_confidence
            except Exception as cause:
                error = input_error(result.path, cause)
                batch.done -= good
                result = result.failed(error) if good else result
                text, lines = _attempt(render, result) or "", _attempt(self.show, result) or []
            else:
                if flagged:
                    segments = f"{flagged} of {len(result.segments)} segments"
                    batch.flag(result.path, segments if result.paragraph else "")
            with batch.paused():
                append(text)
            for line in lines:
                batch.say(line)
            return result.error

        results = self.pipeline.stream(videos, on_decoded=batch.decoded)
        batch.run(results, write, total=len(videos), fail_fast=self.fail_fast)

    def show(self, result: CaptionResult) -> list[str]:
        """Add a result to the page, and return its charts as lines for stderr.

        Raises:
            RunError: the page cannot be written, which concerns every input.
        """
        lines: list[str] = []
        if self.charts:
            from capvid.output.report import attention_lines, levels_for

            try:
                width = os.get_terminal_size(sys.stderr.fileno()).columns
            except (OSError, ValueError):  # no terminal, or a stream that is no file
                width = shutil.get_terminal_size().columns
            levels = levels_for(sys.stderr.encoding)
            lines = attention_lines(result, width=width, levels=levels, named=self.batch.many)
            if result.error is None and not lines and not self.warned:
                self.warned = True
                lines = [f"note: {result.model} has no attention over frames to show"]
        if self.page is not None:
            try:
                self.page.add(result)
            except OSError as error:
                if error.errno is None:  # not by the system: an image that Pillow does not know
                    raise
                raise RunError(f"{self.report}: {error.strerror}") from error
        return lines

    def caption_into(self, outputs: Outputs, videos: Sequence[VideoInput], *, overwrite: bool) -> None:
        """Write each result to its own output; skip finished videos, unless the page needs them again."""
        batch = self.batch
        batch.interrupted = RESUMABLE
        done: set[VideoPath] = set()
        todo = []
        for video in videos:
            try:
                if not overwrite and outputs.is_done(video.path):
                    done.add(video.path)
            except CapvidError as error:
                batch.failed(error)
                if self.fail_fast:
                    return
                continue
            except OSError:  # writing it shows what is wrong with it
                pass
            if self.page is not None or video.path not in done:
                todo.append(video)

        def write_file(result: CaptionResult) -> str:
            if result.path not in done:
                with output_file(result.path, outputs.folder):
                    outputs.write(result)
            return ""  # nothing is left to append

        if self.page is not None and done:
            batch.say(f"note: {len(done)} done already: captioned again for the page, their files stay")
        else:
            batch.skipped = len(done)
        self.caption(todo, write_file, lambda text: None)
        if outputs.edited:
            count = len(outputs.edited)
            kept = "1 text that somebody wrote or edited stays"
            if count > 1:
                kept = f"{count} texts that somebody wrote or edited stay"
            batch.say(f"note: {kept}; --overwrite replaces such texts")


def _attempt(record: Callable[[CaptionResult], _T], failed: CaptionResult) -> _T | None:
    """Record a failed input; return None if that fails as well, and stderr alone has the error."""
    try:
        return record(failed)
    except Exception as cause:
        input_error(failed.path, cause)
        return None
