"""Captioners published on the Hub and fetched from there, by the command line and the Hub's real client."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hub_server import OWNER, FakeHub, capvid, environment
from toy import SENTENCE, Toy, save_toy_captioner, toy, toy_files, write_video

from capvid.backbones.catalog import StreamHeader
from capvid.captioners.base import build
from capvid.captioners.checkpoint import save_checkpoint
from capvid.checkpoints.publishing import model_card, publish
from capvid.errors import CapvidError
from capvid.features.feature_file import FeatureHeader, Features, save_features
from capvid.text.vocabulary import EOS, Vocabulary

__all__ = ["toy", "toy_files"]
NAME = f"{OWNER}/toy"
NOWHERE = "http://127.0.0.1:9"
GRID = FeatureHeader(
    streams=(StreamHeader(backbone="colour-grid", layer="grid", width=192),),
    sampling="uniform:4",
    reader=None,
    dtype="float16",
    capvid_version="0",
)
EPOCHS = [
    {"epoch": 1, "loss": 4.0, "val_cider": 0.1, "best": True, "samples": {"v7": "a man is running"}},
    {"epoch": 2, "loss": 3.0, "val_cider": 0.25, "best": True, "samples": {"v7": "a dog | is running"}},
    {"epoch": 3, "loss": 2.0, "val_cider": 0.2, "best": False, "samples": {"v7": "a ball"}},
]
RECIPE = {"name": "small", "captioner": "soft-attention", "model": {"hidden": 24}, "training": {"seed": 1}}


def write_captioner(folder: Path, *, seed: int, header: FeatureHeader = GRID) -> None:
    """A captioner with random weights on colours, which need no weights."""
    torch.manual_seed(seed)
    vocabulary = Vocabulary(SENTENCE.split())
    sizes = {"embedding": 16, "hidden": 24, "attention": 16, "output": 16, "feature_width": header.width}
    captioner = build("soft-attention", {"vocabulary_size": len(vocabulary), "dropout": 0.0, **sizes})
    with torch.no_grad():
        for parameter in captioner.parameters():
            parameter.mul_(5)
        captioner.output.vocabulary.bias[EOS] -= 3
    save_checkpoint(folder, captioner, vocabulary, header, {"max_frames": 4, "recipe": "small"})


def write_run(folder: Path, *, seed: int = 1) -> Path:
    """What training leaves, and files that are not to be published."""
    write_captioner(folder / "best", seed=seed)
    return write_notes(folder)


def write_notes(folder: Path) -> Path:
    (folder / "recipe.json").write_text(json.dumps(RECIPE))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(epoch) + "\n" for epoch in EPOCHS))
    (folder / "test.json").write_text(json.dumps({"scores": {"CIDEr-D": 0.3125}, "captions": {"v9": "a"}}))
    (folder / "notes.txt").write_text("for me alone")
    (folder / "best" / "state.pt").write_bytes(b"of the optimiser")
    (folder / "last").mkdir(exist_ok=True)
    (folder / "last" / "captioner.json").write_text("{}")
    return folder


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    server = FakeHub()
    yield server
    server.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    return write_video(tmp_path / "clip.mp4", seed=3)


def pushed(hub: FakeHub, run: Path, *options: object, home: Path, anew: bool = False) -> str:
    """Push and give the commit."""
    code, out, err = capvid("push", run, NAME, *options, home=home, endpoint=hub.url, anew=anew)
    assert (code, err) == (0, ""), err
    repository, _, commit = out.strip().partition("@")
    assert repository == NAME and len(commit) == 40
    return commit


def said(model: object, clip: Path, *, home: Path, endpoint: str = NOWHERE, **settings: bool) -> dict:
    arguments = ("caption", clip, "--model", model, "--format", "jsonl", "--device", "cpu")
    code, out, err = capvid(*arguments, home=home, endpoint=endpoint, token=None, **settings)
    assert code == 0, err
    record = json.loads(out)
    return record | {"model": "{name}@{revision}".format(**record["model"])}


def refusal(model: object, clip: Path, *, home: Path, endpoint: str = NOWHERE, offline: bool = False) -> str:
    code, out, err = capvid(
        "caption", clip, "--model", model, home=home, endpoint=endpoint, offline=offline, token=None
    )
    assert (code, out, err.count("\n")) == (1, "", 1)
    return err


@pytest.mark.slow
def test_what_is_pushed_captions_as_before(hub: FakeHub, run: Path, clip: Path, tmp_path: Path) -> None:
    commit = pushed(hub, run, "--message", "the first", home=tmp_path, anew=True)
    content = hub.content(NAME, commit)
    assert set(content) == {
        ".gitattributes",
        "README.md",
        "captioner.json",
        "captioner.safetensors",
        "metrics.jsonl",
        "recipe.json",
        "test.json",
    }
    for name in ("captioner.json", "captioner.safetensors"):
        assert content[name] == (run / "best" / name).read_bytes()
    assert content["metrics.jsonl"] == (run / "metrics.jsonl").read_bytes()
    assert f"--model {NAME}\n" in content["README.md"].decode()
    assert not any(str(tmp_path).encode() in data for data in content.values())
    assert hub.messages == ["the first"]
    assert sum("/commit/" in request for request in hub.uploads) == 1

    local = said(run, clip, home=tmp_path)
    fetched = said(f"{NAME}@{commit}", clip, home=tmp_path, endpoint=hub.url, anew=True)
    assert fetched["captions"] == local["captions"] and local["captions"]
    assert fetched["model"] == f"{NAME}@{commit[:12]}"
    names = {request.rpartition("/")[2] for request in hub.requests}
    assert names == {"captioner.json", "captioner.safetensors"}
    asked = len(hub.requests)
    assert said(f"{NAME}@{commit}", clip, home=tmp_path, offline=True) == fetched
    assert said(f"{NAME}@{commit}", clip, home=tmp_path, endpoint=hub.url) == fetched
    assert len(hub.requests) == asked

    (tmp_path / NAME).parent.mkdir()
    write_captioner(tmp_path / NAME, seed=5)
    assert said(NAME, clip, home=tmp_path)["model"].startswith(
        "soft-attention@"
    )  # a folder of that name wins


@pytest.mark.slow
def test_a_dry_run_lists_the_files(run: Path, tmp_path: Path) -> None:
    """It needs neither a connection nor a token, and checks what a push checks."""
    code, out, err = capvid("push", run, NAME, "--dry-run", home=tmp_path, endpoint=NOWHERE, token=None)
    sizes = dict(line.split("\t") for line in out.splitlines())
    files = {"captioner.json": run / "best", "captioner.safetensors": run / "best"}
    files |= {"recipe.json": run, "metrics.jsonl": run, "test.json": run}
    assert (code, err, sizes.keys()) == (0, "", {*files, "README.md"})
    assert all(int(sizes[name]) == (folder / name).stat().st_size for name, folder in files.items())
    (run / "recipe.json").write_text('{"data": "/home/me/videos"}')
    code, out, err = capvid("push", run, NAME, "--dry-run", home=tmp_path, endpoint=NOWHERE, token=None)
    assert (code, out) == (1, "") and "names a path of this machine" in err


@pytest.mark.slow
def test_features_from_a_file_and_the_library(hub: FakeHub, run: Path, tmp_path: Path) -> None:
    commit = pushed(hub, run, home=tmp_path)
    array = np.random.default_rng(0).random((4, 192), dtype=np.float32)
    path = tmp_path / "clip.safetensors"
    save_features(path, Features(header=GRID, streams=(array,), times=None, video="clip"))
    local = said(run, path, home=tmp_path)
    code = "import capvid, sys; p = capvid.load(sys.argv[1]); print(p(sys.argv[2]), p.model, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code, f"{NAME}@{commit}", str(path)],
        capture_output=True,
        text=True,
        env=environment(tmp_path / "hf", hub.url),
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [local["captions"][0]["text"], f"{NAME}@{commit[:12]}"]


@pytest.mark.slow
def test_a_second_push_leaves_the_first_as_it_was(
    hub: FakeHub, run: Path, clip: Path, tmp_path: Path
) -> None:
    first = pushed(hub, run, home=tmp_path)
    old = said(NAME, clip, home=tmp_path, endpoint=hub.url)
    assert old["model"] == f"{NAME}@{first[:12]}"
    write_captioner(run / "best", seed=2)
    (run / "test.json").unlink()
    second = pushed(hub, run, home=tmp_path)
    assert first != second
    assert "test.json" in hub.content(NAME, first) and "test.json" not in hub.content(NAME, second)
    new = said(f"{NAME}@{second}", clip, home=tmp_path, endpoint=hub.url)
    assert new["captions"] == said(run, clip, home=tmp_path)["captions"] != old["captions"]
    assert said(NAME, clip, home=tmp_path, endpoint=hub.url) == old  # the branch's commit is recorded
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert said(f"{NAME}@{first}", clip, home=elsewhere, endpoint=hub.url) == old
    records = json.loads((tmp_path / "hf" / "capvid-digests.json").read_text())
    assert records[f"{NAME}@main"] == first
    assert pushed(hub, run, home=tmp_path) != first


@pytest.mark.slow
def test_another_branch(hub: FakeHub, run: Path, clip: Path, tmp_path: Path) -> None:
    commit = pushed(hub, run, "--revision", "trial/one", home=tmp_path)
    assert set(hub.content(NAME)) == {".gitattributes"}
    fetched = said(f"{NAME}@trial/one", clip, home=tmp_path, endpoint=hub.url)
    assert fetched["model"] == f"{NAME}@{commit[:12]}"
    assert said(f"{NAME}@trial/one", clip, home=tmp_path, offline=True) == fetched
    err = refusal(f"{NAME}@none", clip, home=tmp_path, endpoint=hub.url)
    assert f"{NAME} at none: {hub.url} has no such file (captioner.json)" in err


@pytest.mark.slow
def test_a_file_that_changed_in_the_cache(hub: FakeHub, run: Path, clip: Path, tmp_path: Path) -> None:
    commit = pushed(hub, run, home=tmp_path)
    said(f"{NAME}@{commit}", clip, home=tmp_path, endpoint=hub.url)
    (cached,) = (tmp_path / "hf").rglob(f"snapshots/{commit}/captioner.safetensors")
    content = bytearray(cached.read_bytes())
    content[-1] ^= 1
    cached.resolve().write_bytes(content)
    err = refusal(f"{NAME}@{commit}", clip, home=tmp_path, endpoint=hub.url)
    assert "captioner.safetensors has changed" in err and f"delete {cached.resolve()}" in err


@pytest.mark.slow
def test_without_a_connection_or_offline(clip: Path, tmp_path: Path) -> None:
    commit = "c" * 40
    command = f"`hf download {NAME} --revision"
    err = refusal(f"{NAME}@{commit}", clip, home=tmp_path, offline=True)
    assert f"{NAME} at cccccccc: captioner.json or config.json is not in the cache, and" in err
    assert f"{command} {commit}`" in err and "--weights" not in err
    assert f"{command} trial`" in refusal(f"{NAME}@trial", clip, home=tmp_path, offline=True)
    err = refusal(NAME, clip, home=tmp_path)
    assert f"captioner.json cannot be downloaded from {NOWHERE}" in err
    assert f"`hf download {NAME}`" in err


def test_a_private_captioner(hub: FakeHub, run: Path, clip: Path, tmp_path: Path) -> None:
    commit = pushed(hub, run, "--private", home=tmp_path)
    assert hub.private == {NAME}
    assert "hf auth login" in refusal(f"{NAME}@{commit}", clip, home=tmp_path, endpoint=hub.url)
    code, out, _ = capvid("caption", clip, "--model", f"{NAME}@{commit}", home=tmp_path, endpoint=hub.url)
    assert code == 0 and out.strip()
    open_name = f"{OWNER}/open"
    hub.create(open_name)
    code, out, err = capvid("push", run, open_name, "--private", home=tmp_path, endpoint=hub.url)
    assert (code, out) == (1, "") and f"{open_name}: public already" in err
    assert set(hub.content(open_name)) == {".gitattributes"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (NAME, {"token": None}, "no token for the Hub; run `hf auth login`, or set HF_TOKEN"),
        (NAME, {"token": "hf_another"}, "does not accept the token; run `hf auth login` again"),
        ("bert/toy", {}, "the token may not write there; take a token with the right to write"),
        (NAME, {"offline": True}, "HF_HUB_OFFLINE forbids uploads; unset it"),
        (NAME, {"endpoint": NOWHERE}, f"cannot be uploaded to {NOWHERE}"),
    ],
)
def test_pushes_that_cannot_be(
    name: str, settings: dict, message: str, hub: FakeHub, run: Path, tmp_path: Path
) -> None:
    code, out, err = capvid("push", run, name, home=tmp_path, **{"endpoint": hub.url, **settings})
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"error: {name}: ") and message in err
    assert hub.files == {}


@pytest.fixture
def published(toy: Toy, hub: FakeHub, tmp_path: Path) -> Path:
    """A run on the toy backbone, with the backbone's weights in it."""
    folder = tmp_path / "run"
    save_toy_captioner(folder / "best", weights=toy.weights)
    (folder / "weights").mkdir()
    shutil.copy(toy.weights, folder / "weights")
    (folder / "weights" / "mine.safetensors").write_bytes(b"others")
    return write_notes(folder)


def licensed(toy: Toy, folder: Path, licence: str) -> Path:
    path = folder / "models.toml"
    path.write_text(toy.models.read_text().replace('licence = "none"', f'licence = "{licence}"'))
    return path


@pytest.mark.slow
def test_weights_that_may_be_passed_on(
    toy: Toy, hub: FakeHub, published: Path, clip: Path, tmp_path: Path
) -> None:
    settings = {"home": tmp_path, "models": licensed(toy, tmp_path, "Apache-2.0")}
    code, out, err = capvid("push", published, NAME, endpoint=hub.url, **settings)
    assert code == 0, err
    other = "left out: weights/mine.safetensors (not the weights of a backbone of this captioner)\n"
    assert err == other
    model = out.strip()
    content = hub.content(NAME)
    assert content["weights/toy.safetensors"] == toy.weights.read_bytes()
    assert "weights/mine.safetensors" not in content
    code, local, err = capvid("caption", clip, "--model", published, endpoint=NOWHERE, **settings)
    assert code == 0, err
    small = len(content["captioner.json"]), len(content["captioner.safetensors"])
    hub.cuts, hub.gone_after_cut = [*small, 1_000_000], True
    code, out, err = capvid("caption", clip, "--model", model, endpoint=hub.url, **settings)
    assert (code, out) == (1, "") and "weights/toy.safetensors cannot be downloaded" in err
    assert "absent" not in (tmp_path / "hf" / "capvid-digests.json").read_text()
    hub.gone = False
    code, out, err = capvid("caption", clip, "--model", model, endpoint=hub.url, **settings)
    assert (code, out) == (0, local), err
    assert capvid("caption", clip, "--model", model, endpoint=NOWHERE, offline=True, **settings)[1] == local


@pytest.mark.slow
def test_weights_that_may_not(toy: Toy, hub: FakeHub, published: Path, clip: Path, tmp_path: Path) -> None:
    settings = {"home": tmp_path, "models": licensed(toy, tmp_path, "CC-BY-NC-4.0")}
    code, out, err = capvid("push", published, NAME, endpoint=hub.url, **settings)
    assert code == 0 and "left out: weights/toy.safetensors (licence: CC-BY-NC-4.0)\n" in err
    model = out.strip()
    assert not any(name.startswith("weights/") for name in hub.content(NAME))
    for asked in (1, 0):  # that the commit has no such file is known the second time
        hub.requests.clear()
        code, out, err = capvid("caption", clip, "--model", model, endpoint=hub.url, **settings)
        assert (code, out) == (1, "") and "no weights of toy" in err
        assert sum("weights/" in request for request in hub.requests) == asked
    command = ("caption", clip, "--model", model, "--weights", toy.weights)
    code, out, err = capvid(*command, endpoint=NOWHERE, offline=True, **settings)
    assert code == 0 and out.strip(), err


def test_links_out_of_the_run(hub: FakeHub, run: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    (run / "test.json").unlink()
    (run / "test.json").symlink_to(secret)
    code, out, err = capvid("push", run, NAME, home=tmp_path, endpoint=hub.url)
    assert (code, out) == (1, "") and "test.json: leads out of the run" in err
    assert hub.uploads == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("recipe.json", '{"name": "small", "description": "data of /home/anna/data"}'),
        ("recipe.json", '{"name": "small", "data": "jsonl:/home/anna/a.jsonl"}'),
        ("metrics.jsonl", '{"epoch": 1, "best": true, "samples": {"C:\\\\videos\\\\a.mp4": "a man"}}'),
        ("test.json", '{"scores": {}, "captions": {"~/videos/a.mp4": "a man"}}'),
        ("best/captioner.json", None),
    ],
)
def test_paths_of_this_machine_are_not_published(file: str, text: str | None, run: Path) -> None:
    if text is None:
        record = json.loads((run / file).read_text())
        record["info"]["features"] = ["/data/features"]
        text = json.dumps(record)
    (run / file).write_text(text)
    with pytest.raises(CapvidError, match=r"names a path of this machine \(.+\); take it out of the file"):
        publish(run, NAME)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("toy", "not the name"),
        ("a/b/c", "not the name"),
        ("a--b/c", "not the name"),
        ("a/-b", "not the name"),
    ],
)
def test_names_that_cannot_be(name: str, message: str, run: Path) -> None:
    with pytest.raises(CapvidError, match=f"{name}: {message} of a repository; write it as OWNER/NAME"):
        publish(run, name)


def test_runs_that_cannot_be_published(run: Path, tmp_path: Path) -> None:
    def check(message: str, folder: Path = run) -> None:
        with pytest.raises(CapvidError, match=message):
            publish(folder, NAME)

    check("none: no such run; give the folder that capvid train wrote", tmp_path / "none")
    check(r"no trained captioner in this run \(best/captioner.json is missing\)", tmp_path)
    with pytest.raises(CapvidError, match="not a licence's name"):
        publish(run, NAME, licence="my own")
    with (run / "metrics.jsonl").open("a") as file:
        file.write("{")
    check("metrics.jsonl: damaged")
    (run / "recipe.json").unlink()
    (run / "metrics.jsonl").write_text("")
    check("recipe.json: cannot be read")
    (run / "best" / "captioner.safetensors").write_bytes(b"")
    check("damaged checkpoint")


def test_the_card(run: Path) -> None:
    card = model_card(run, repository=NAME, licence="apache-2.0")
    assert card.startswith(
        "---\nlibrary_name: capvid\npipeline_tag: video-text-to-text\nlicense: apache-2.0\ntags:\n"
        '- "video-captioning"\n- "soft-attention"\n- "colour-grid"\n---\n\n# small: soft-attention,'
    )
    for text in (
        "Yao et al., Describing Videos by Exploiting Temporal Structure",
        f"    capvid caption video.mp4 --model {NAME}\n",
        "Frames: uniform:4.",
        "| colour-grid | grid | 192 | not known | not known | none needed |",
        "| model.hidden | 24 |",
        "| 1 | 10.0 |\n| 2 | 25.0 |\n\nTest split",
        "| CIDEr-D | 31.2 |",
        "| v7 | a dog \\| is running |",
    ):
        assert text in card
    (run / "test.json").unlink()
    local = model_card(run)
    assert "license" not in local and "Test split" not in local and str(run) not in local
    assert "    capvid caption video.mp4 --model run\n" in local
