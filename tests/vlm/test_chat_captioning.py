"""Chat models in the pipeline and on the command line: from folders and from the Hub."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import signal_at
import torch
from hub_server import COMMIT, FakeHub, environment
from tiny_chat_models import CHAT_MODELS
from toy import Run, capvid, write_video

import capvid as package
from capvid.errors import CheckpointError, FeatureMismatchError, RunError, UsageError
from capvid.output.results import CaptionResult
from capvid.video.frame_sampling import UniformSampling
from capvid.video.readers import read_frames
from capvid.vlm import chat
from capvid.vlm.answers import caption_of

__all__ = ["capvid"]

NOWHERE = "http://127.0.0.1:9"
CAPTION = """
import sys
import capvid
from capvid.errors import CapvidError
clip, *names = sys.argv[1:]
for name in names:
    try:
        print(capvid.load(name, device="cpu", workers=1, max_length=6, precision="fp32")(clip))
    except CapvidError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("models")
    for name, make in CHAT_MODELS.items():
        make(home / name)
    return {name: home / name for name in CHAT_MODELS}


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("clips")
    return [write_video(home / f"{n}.mp4", seed=n, frames=n, size=(96, 64)) for n in (3, 20, 28, 12)]


def load(folder: Path, **options: Any) -> package.CaptionPipeline:
    options = {"max_length": 6, "sampling": "uniform:4", "precision": "fp32", **options}
    return package.load(folder, device="cpu", workers=1, **options)


def stream(pipeline: package.CaptionPipeline, clips: list[Path]) -> list[CaptionResult]:
    with pipeline:
        results = list(pipeline.stream(clips))
    for result in results:
        if result.error is not None:
            raise result.error
    return results


def plain_script(folder: Path, clip: Path, **settings: Any) -> tuple[str, float]:
    """Caption a clip with transformers alone; return the text and its log-probability."""
    import transformers

    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    sampled = read_frames(clip, UniformSampling(4))
    prompt = {"type": "text", "text": "Describe this video in one short, plain sentence."}
    count, is_video = len(sampled.frames), hasattr(processor, "video_processor")
    media = [{"type": "video"}] if is_video else [{"type": "image"}] * count
    text = processor.apply_chat_template(
        [{"role": "user", "content": [*media, prompt]}], add_generation_prompt=True, tokenize=False
    )
    frames = torch.from_numpy(sampled.frames).permute(0, 3, 1, 2)
    if is_video:
        duration = sampled.info.duration
        metadata = {
            "total_num_frames": round(duration * 1000),
            "fps": 1000.0,
            "duration": duration,
            "width": 96,
            "height": 64,
            "frames_indices": [round(t * 1000) for t in sampled.times.tolist()],
        }
        media_inputs = {"videos": [frames], "video_metadata": [metadata], "do_sample_frames": False}
    else:
        media_inputs = {"images": [list(frames)]}
    inputs = processor(text=[text], return_tensors="pt", **media_inputs)
    torch.manual_seed(settings.pop("seed", 0))
    result = model.generate(
        **inputs, max_new_tokens=6, return_dict_in_generate=True, output_logits=True, **settings
    )
    tokens = result.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    rows = result.beam_indices[0].tolist() if settings.get("num_beams", 1) > 1 else [0] * len(tokens)
    logprob = 0.0
    for step, row, token in zip(result.logits, rows, tokens, strict=False):
        logprob += float(step[row].log_softmax(-1)[token])
        if token == processor.tokenizer.eos_token_id:
            break
    return " ".join(processor.tokenizer.decode(tokens, skip_special_tokens=True).split()), logprob


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAT_MODELS)
def test_captions_are_those_of_a_plain_script(name: str, folders: dict[str, Path], clips: list[Path]) -> None:
    for options, settings in (
        ({}, {"do_sample": False}),
        ({"beam_size": 3}, {"do_sample": False, "num_beams": 3, "length_penalty": 1.0}),
        ({"temperature": 1.0, "seed": 5}, {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": 5}),
    ):
        (result,) = stream(load(folders[name], **options), clips[1:2])
        text, logprob = plain_script(folders[name], clips[1], **settings)
        assert result.captions[0].text == text
        assert result.captions[0].logprob == pytest.approx(logprob, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAT_MODELS)
def test_captions_depend_neither_on_batches_nor_on_order(
    name: str, folders: dict[str, Path], clips: list[Path]
) -> None:
    one = stream(load(folders[name], batch_size=1), clips)
    together = stream(load(folders[name], batch_size=4), clips[::-1])[::-1]
    assert [r.captions[0].text for r in one] == [r.captions[0].text for r in together]
    for result, other in zip(one, together, strict=True):
        assert result.captions[0].logprob == pytest.approx(other.captions[0].logprob, abs=1e-4)
        assert sum(w.logprob for w in result.captions[0].words) >= result.captions[0].logprob - 1e-4


class Recorder:
    """A language model that repeats its number of calls and records prompts and clips."""

    device = torch.device("cpu")

    def __init__(self, largest: int = 100) -> None:
        self.settings: dict[str, Any] = {}
        self.prompts: list[str] = []
        self.clips: list[Any] = []
        self.largest = largest

    def check(self, options: Any) -> None:
        pass

    def generate(self, clips: Any, prompts: Any, options: Any, *, system: str = "") -> Any:
        if len(clips) > self.largest:
            raise torch.OutOfMemoryError("too many")
        self.prompts += prompts
        self.clips += clips
        words = [f"caption {len(self.prompts) - len(prompts) + n}" for n in range(len(clips))]
        return [(package.Caption(text=text, logprob=-1.0, words=()),) for text in words]


def described(recorder: Recorder, num_segments: list[int], **options: Any) -> list[list[str]]:
    frames = np.zeros((2, 8, 8, 3), np.uint8)
    videos = [
        [chat.Clip(frames=frames, times=np.zeros(2), start=2.0 * n, end=2.0 * n + 2) for n in range(count)]
        for count in num_segments
    ]
    batch_size = options.pop("batch_size", 2)
    generator = chat.ChatCaptionGenerator(recorder, chat=chat.ChatOptions(**options), batch_size=batch_size)
    return [[captions[0].text for captions, _ in video] for video in generator.describe(videos)]


def test_context_gives_the_previous_captions_to_the_prompt() -> None:
    recorder = Recorder()
    captions = described(recorder, [4, 1, 2], context=2, prompt="What from {start} to {end}?")
    assert captions[0] == ["caption 0", "caption 3", "caption 5", "caption 6"]
    third, fourth = recorder.prompts[5:]
    assert third.startswith("What from 4.0 to 6.0?") and "caption 0 caption 3" in third
    assert "caption 3 caption 5" in fourth and "caption 0" not in fourth
    assert [prompt for prompt in recorder.prompts if "caption" not in prompt] == ["What from 0.0 to 2.0?"] * 3


def test_placeholders_and_other_braces_in_a_prompt() -> None:
    recorder = Recorder()
    described(recorder, [2], context=1, prompt="{duration} s, {x} {{}}, before: [{previous}]")
    assert recorder.prompts == ["2.0 s, {x} {{}}, before: []", "2.0 s, {x} {{}}, before: [caption 0]"]


def test_running_out_of_memory_halves_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "capvid"):
        recorder = Recorder(largest=3)
        captions = described(recorder, [1] * 12, batch_size=8)
    assert [group[0] for group in captions] == [f"caption {n}" for n in range(12)]
    assert [record.getMessage() for record in caplog.records] == [
        "note: not enough memory on cpu for 8 clips at once, continuing with 4",
        "note: not enough memory on cpu for 4 clips at once, continuing with 2",
    ]
    with pytest.raises(RunError, match="not enough memory for one clip; use fewer frames"):
        described(Recorder(largest=0), [1])


def test_context_reaches_the_model(
    folders: dict[str, Path], clips: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third segment's input ids contain the first two captions."""
    prompts: list[str] = []
    generate = chat.ChatModel._generate

    def recording(self: chat.ChatModel, inputs: Any, options: Any) -> Any:
        prompts.extend(self.processor.tokenizer.decode(row) for row in inputs["input_ids"])
        return generate(self, inputs, options)

    monkeypatch.setattr(chat.ChatModel, "_generate", recording)
    options = {"segments": 3, "context": 2, "prompt": "describe {previous}"}
    (result,) = stream(load(folders["internvl"], **options), clips[2:3])
    first, second, _ = [segment.captions[0].text for segment in result.segments]
    assert first and f"describe {first} {second}" in " ".join(prompts[2].split())


def test_lengths_are_those_of_chat_models(folders: dict[str, Path]) -> None:
    pipeline = package.load(folders["gemma3"], device="cpu", min_length=30, num_captions=2, beam_size=2)
    settings = pipeline.settings
    assert (settings["min_length"], settings["max_length"], settings["beam_size"]) == (30, 64, 2)


def test_frames_and_their_times(folders: dict[str, Path], clips: list[Path]) -> None:
    pipeline = load(folders["internvl"], sampling="fps:5", max_frames=3, max_pixels=1024, segments=2)
    recorder = Recorder()
    pipeline.generator.model = recorder  # type: ignore[attr-defined]
    stream(pipeline, clips[2:3])
    assert len(recorder.clips) == 2
    for clip in recorder.clips:
        assert clip.frames.dtype == np.uint8 and clip.frames.shape == (3, 26, 39, 3)
        assert ((clip.start <= clip.times) & (clip.times <= clip.end)).all()
    whole = load(folders["internvl"], sampling="uniform:9")
    whole.generator.model = recorder = Recorder()  # type: ignore[attr-defined]
    stream(whole, clips[:1])
    assert recorder.clips[0].frames.shape == (3, 64, 96, 3)  # a short video has fewer frames
    assert whole(np.zeros((5, 40, 60, 3), np.uint8)) == "caption 1"


def test_few_frames_of_a_long_video(
    folders: dict[str, Path], clips: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more are decoded than the model is shown, where these are known in advance."""
    pipeline = load(folders["internvl"], sampling="fps:25", max_frames=5, segments=2)
    assert [
        len(v.decoded.times) for v in pipeline.decoding.videos(pipeline._pool, clips[2:3]) if v.decoded
    ] == [10]
    expected = [segment.captions[0].text for segment in stream(pipeline, clips[2:3])[0].segments]
    automatic = load(folders["internvl"], sampling="uniform:4", segments="auto")
    automatic.generator.model = recorder = Recorder()  # type: ignore[attr-defined]
    stream(automatic, clips[2:3])
    assert max(len(clip.frames) for clip in recorder.clips) == 4
    monkeypatch.setattr("capvid.pipeline.MAX_HELD", 1)  # captions each video by itself
    again = load(folders["internvl"], sampling="fps:25", max_frames=5, segments=2)
    results = stream(again, clips[2:3] * 2)
    assert [[segment.captions[0].text for segment in result.segments] for result in results] == [expected] * 2


def test_frames_that_take_too_much_memory(
    folders: dict[str, Path], clips: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capvid.features.prefetch.CHUNK_FRAMES", 4)
    monkeypatch.setenv("CAPVID_LIMIT_FEATURE_BYTES", str(13 * 96 * 64 * 3))
    with load(folders["internvl"], sampling="fps:25", segments=2) as pipeline:
        short, long, last = pipeline.stream([clips[0], clips[2], clips[3]])
    assert short.error is None and last.error is None
    assert "28.mp4: its frames take more memory than the limit feature-bytes; use fewer" in str(long.error)


def test_frames_that_the_model_refuses(folders: dict[str, Path], clips: list[Path], tmp_path: Path) -> None:
    wide = write_video(tmp_path / "wide.mp4", seed=0, frames=3, size=(2000, 8))
    with load(folders["qwen2_5_vl"]) as pipeline:
        before, refused, after = pipeline.stream([clips[0], wide, clips[0]])
    assert "wide.mp4: the model's processor refuses these frames (absolute aspect ratio" in str(refused.error)
    assert before.error is None and before.captions == after.captions


def test_too_little_memory_for_the_model(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def fail(*arguments: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(transformers.AutoModelForImageTextToText, "from_pretrained", fail)
    with pytest.raises(RunError, match=r"cpu has not enough memory for .*; use a smaller model"):
        load(folders["gemma3"])


def test_options_that_do_not_fit(folders: dict[str, Path], clips: list[Path], tmp_path: Path) -> None:
    for options, message in (
        ({"specificity": 0.5}, "chat models do not support specificity"),
        ({"attention": True}, "attention: chat models have no such option"),
        ({"weights": tmp_path}, "weights: chat models have no such option"),
        ({"precision": "int8"}, "int8: no such precision"),
        ({"quantize": "2bit"}, "2bit: no such quantization; use 8bit or 4bit"),
        ({"quantize": "4bit"}, "quantization needs bitsandbytes and a CUDA GPU; leave out"),
        ({"max_frames": 0}, "max_frames must be at least 1"),
    ):
        with pytest.raises(UsageError, match=message):
            load(folders["gemma3"], **options)
    for options in ({"prompt": "x"}, {"context": 1}, {"precision": "bf16"}, {"max_pixels": 5000}):
        with pytest.raises(UsageError, match="only chat models have this option"):
            package.load(**options)
    features = tmp_path / "x.safetensors"
    result = next(package.extract(clips[0], "colour-grid"))
    assert result.features is not None
    from capvid.features.feature_file import save_features

    save_features(features, result.features)
    with pytest.raises(FeatureMismatchError, match="a chat model takes videos, not features; give the video"):
        stream(load(folders["gemma3"]), [features])


def damaged(folder: Path, target: Path, change: str) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    if change == "tensors":
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        save_file(dict(list(tensors.items())[3:]), target / "model.safetensors", {"format": "pt"})
    elif change == "weights":
        (target / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-5])
    elif change == "template":
        (target / "chat_template.jinja").unlink()
    elif change == "size":
        config = json.loads((target / "config.json").read_text())
        config["text_config"]["hidden_size"] = 10**9
        (target / "config.json").write_text(json.dumps(config))
    elif change in ("depth", "layers", "large"):
        config = json.loads((target / "config.json").read_text())
        section, name, value = {
            "depth": ("vision_config", "depth", 10**6),
            "layers": ("text_config", "num_hidden_layers", 250),
            "large": ("text_config", "hidden_size", 10**5),
        }[change]
        config[section][name] = value
        (target / "config.json").write_text(json.dumps(config))
    elif change == "index":
        index = {"weight_map": {"a": "../model.safetensors"}}
        (target / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        (target / "config.json").write_text(json.dumps({"model_type": change}))
    return target


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("tensors", r"damaged or incomplete \(4 tensors are missing, such as lm_head"),
        ("weights", "damaged or incomplete"),
        ("template", "no chat template; choose an instruction-tuned model"),
        ("size", "text_config.hidden_size must be an integer between 1 and 1000000"),
        ("depth", "vision_config.depth must be an integer between 1 and 256"),
        ("layers", "damaged or incomplete"),
        ("large", "damaged or incomplete .the network is much larger than its weights"),
        ("index", r"index\.json: damaged .a shard has no valid name"),
        ("bert", "a model of the type bert, which capvid cannot use"),
    ],
)
def test_damaged_folders(folders: dict[str, Path], tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(damaged(folders["gemma3"], tmp_path / "model", change))


def generating(folder: Path, target: Path, words: str) -> Path:
    """Copy a model, and let the copy generate these words, again and again until it is cut."""
    from transformers import AutoTokenizer

    shutil.copytree(folder, target)
    path = target / "generation_config.json"
    settings = json.loads(path.read_text())
    tokenizer = AutoTokenizer.from_pretrained(target)
    generated = tokenizer.convert_tokens_to_ids(words.split())
    settings["suppress_tokens"] = [n for n in range(len(tokenizer)) if n not in generated]
    del settings["forced_eos_token_id"], settings["begin_suppress_tokens"]
    path.write_text(json.dumps(settings))
    return target


def test_answers_that_are_no_captions(
    folders: dict[str, Path], clips: list[Path], capvid: Run, tmp_path: Path
) -> None:
    """They are failures: nothing is written, and a rerun captions the video again."""
    cut = generating(folders["gemma3"], tmp_path / "cut", "a man")
    empty = generating(folders["gemma3"], tmp_path / "empty", "<eos>")
    run = ["caption", *clips[:2], "--prefix", "trigger, ", "--max-length", 6, "--workers", 1]
    for folder, message, summary in (
        (cut, "the answer was cut at --max-length 6; use a greater --max-length", "cut at --max-length"),
        (empty, "the model's answer is empty; change --prompt", "empty"),
    ):
        output = ["--model", folder, "--output-dir", tmp_path / "out"]
        for _ in range(2):
            code, _, stderr = capvid(*run, *output)
            assert code == 1 and f"{clips[0]}: {message}" in stderr
            assert f"0 captioned, 2 failed (2 {summary})" in stderr
        assert not list(tmp_path.glob("out/*.txt"))


def test_thinking_of_a_local_model(folders: dict[str, Path]) -> None:
    """It is removed, also if its tags are special tokens, which are not shown otherwise."""
    with load(folders["gemma3"]) as pipeline:
        model = pipeline.generator.model  # type: ignore[attr-defined]
        tokenizer = model.processor.tokenizer
        tokenizer.add_tokens(["<think>", "</think>"], special_tokens=True)
        model, text = model.on("cpu"), "<think> a dog </think> a <|start|> man <eos> <pad>"
        tokens = tokenizer.convert_tokens_to_ids(text.split())
        caption = caption_of(model._reply(tokens, [-1.0] * len(tokens)), max_length=9)
    assert caption.text == "a man" and caption.logprob == -4
    assert [word.logprob for word in caption.words] == [-2, -1]


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAT_MODELS)
def test_on_the_command_line(
    name: str, folders: dict[str, Path], clips: list[Path], capvid: Run, tmp_path: Path
) -> None:
    options = ["caption", "--model", folders[name], "--max-length", 6, "--workers", 1]
    code, text, stderr = capvid(*options, clips[1])
    assert (code, stderr) == (0, "") and text.endswith("\n")
    code, srt, _ = capvid(*options, clips[2], "--segments", 2, "--context", 1, "--format", "srt")
    assert code == 0 and srt.count(" --> ") == 2
    (tmp_path / "prompt.txt").write_text("one man\n")
    out, page = tmp_path / "out", tmp_path / "page.html"
    run = [*options, *clips, "--output-dir", out, "--format", "json", "--prompt", tmp_path / "prompt.txt"]
    code, _, stderr = capvid(*run, "--report", page)
    assert code == 0 and stderr.endswith("4 captioned\n")
    record = json.loads((out / "20.json").read_text())
    assert record["settings"]["prompt"] == "one man" and record["model"]["name"] == name
    assert "data:image/jpeg" in page.read_text()
    assert capvid(*run)[2] == "0 captioned, 4 skipped (already done)\n"
    parts = [*options, *clips, "--output-dir", tmp_path / "parts", "--shard"]
    assert [capvid(*parts, f"{n}/2")[0] for n in (1, 2)] == [0, 0]
    assert (
        capvid(*options, *clips, "--output-dir", tmp_path / "parts")[2]
        == "0 captioned, 4 skipped (already done)\n"
    )
    assert capvid(*options, clips[0], "--attention")[:2] == (2, "")


@pytest.mark.slow
def test_a_killed_run_is_resumed(folders: dict[str, Path], clips: list[Path], tmp_path: Path) -> None:
    def arguments(folder: str) -> list[str]:
        options = ["--max-length", 6, "--workers", 1, "--batch-size", 1, "--output-dir", tmp_path / folder]
        return list(map(str, ["caption", *clips, "--model", folders["gemma3"], *options]))

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert run(sys.executable, "-m", "capvid", *arguments("expected")).returncode == 0
    killed = run(*signal_at.command(signal.SIGKILL, "os.rename", ".txt", 2, *arguments("actual")))
    assert killed.returncode == -signal.SIGKILL and len(list(tmp_path.glob("actual/*.txt"))) == 1
    done = run(sys.executable, "-m", "capvid", *arguments("actual"))
    assert done.returncode == 0 and "1 skipped (already done)" in done.stderr
    expected, actual = (
        {path.name: path.read_bytes() for path in (tmp_path / name).glob("*.txt")}
        for name in ("expected", "actual")
    )
    assert actual == expected and len(actual) == 4


@pytest.mark.slow
def test_from_the_hub(folders: dict[str, Path], clips: list[Path], tmp_path: Path) -> None:
    """Sharded weights are downloaded, pinned and verified; a second run needs no network."""
    import transformers

    sharded = damaged(folders["qwen2_5_vl"], tmp_path / "sharded", "qwen2_5_vl")
    (sharded / "model.safetensors").unlink()
    model = transformers.AutoModelForImageTextToText.from_pretrained(folders["qwen2_5_vl"])
    model.save_pretrained(sharded, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    server, home = FakeHub(), tmp_path / "home"
    repositories = {"anna/shards": sharded, **{f"anna/{name}": folder for name, folder in folders.items()}}
    for name, folder in repositories.items():
        for path in folder.iterdir():
            server.put(path.read_bytes(), path.name, repository=name)
        server.put(b"exit()", "modeling.py", repository=name)
    server.put(b'{"model_type": "llama"}', "config.json", repository="anna/llama")
    names = [*repositories, "anna/llama"]

    def run(endpoint: str, *, offline: bool) -> list[str]:
        done = forked.run(CAPTION, [clips[1], *names], env=environment(home, endpoint, offline=offline))
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()

    first = run(server.url, offline=False)
    server.close()
    expected = [load(folder, sampling="uniform:16")(clips[1]) for folder in folders.values()]
    assert first[1:-1] == expected and first[0] == expected[list(folders).index("qwen2_5_vl")]
    assert "a model of the type llama, which capvid cannot use" in first[-1]
    assert not any(request.endswith("modeling.py") for request in server.requests)
    assert run(NOWHERE, offline=True) == first
    weights = home / "hub" / "models--anna--smolvlm" / "snapshots" / COMMIT / "model.safetensors"
    blob = weights.resolve()
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes()[:-1] + b"x")
    changed = run(NOWHERE, offline=True)[names.index("anna/smolvlm")]
    assert "model.safetensors has changed" in changed


def test_a_pipeline_can_be_sent_to_another_process(folders: dict[str, Path], clips: list[Path]) -> None:
    pipeline = load(folders["gemma3"])
    other = pickle.loads(pickle.dumps(pipeline)).on("cpu")
    caption, expected = (stream(each, clips[:1])[0].captions[0] for each in (other, pipeline))
    assert caption.text == expected.text
    # matrix products round by where the weights lie in memory
    assert caption.logprob == pytest.approx(expected.logprob, abs=1e-4)
    assert other.settings == pipeline.settings and pipeline.settings["precision"] == "fp32"


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_on_ray(folders: dict[str, Path], clips: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("ray")
    command = [sys.executable, "-m", "capvid", "caption", *map(str, clips), "--max-length", "6"]
    command += ["--model", str(folders["smolvlm"]), "--segments", "2", "--context", "1"]
    records = {}
    for engine in ("local", "ray"):
        folder = tmp_path / engine
        options = ["--videos-per-file", "2", "--output-dir", str(folder), "--engine", engine]
        done = subprocess.run([*command, *options], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
        records[engine] = {
            record["video"]: [segment["caption"] for segment in record["segments"]]
            for record in map(json.loads, lines)
        }
    assert records["ray"] == records["local"] and len(records["ray"]) == 4
