"""Which captioner `capvid caption` takes where none is named, with a server of our own for its backbone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import forked
import pytest
import torch
from hub_server import environment
from toy import save_toy_captioner
from weights_server import WeightsServer
from x3d_checkpoint import models_file, random_checkpoint

from capvid.backbones import catalog
from capvid.cli import caption
from capvid.utils.files import sha256_file

NOTE = "note: captioning with still instead of moving: "


@dataclass
class Site:
    """A machine with two captioners, of which `moving` needs X3D-XS, and a server that has it."""

    home: Path
    models: Path
    server: WeightsServer
    published: bytes

    def serve(self) -> None:
        self.server.fault = ""
        (name, _) = catalog.backbone_entry("x3d-xs").urls
        self.server.files = {name: self.published}

    def settings(self, *, offline: bool = False, weights: Path | None = None) -> dict[str, str]:
        settings = environment(self.home / "hf", self.server.url, offline=offline)
        settings |= {"CAPVID_MODELS": str(self.models)}
        return settings | ({"CAPVID_WEIGHTS": str(weights)} if weights else {})

    def caption(
        self, *arguments: object, offline: bool = False, weights: Path | None = None
    ) -> tuple[int, str, str]:
        settings = self.settings(offline=offline, weights=weights)
        done = forked.run(None, ["caption", *arguments], env=settings, cwd=self.home)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """Write the two captioners and X3D-XS with random weights once."""
    folder = tmp_path_factory.mktemp("published")
    checkpoint = random_checkpoint(efficient=True)
    torch.save(checkpoint, folder / "file")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAPVID_MODELS", str(models_file(folder, "http://127.0.0.1:9", checkpoint)))
        save_toy_captioner(folder / "moving", backbone="x3d-xs", weights=folder)
        save_toy_captioner(folder / "still", backbone="colour-grid")
    catalog._read_models.cache_clear()
    return folder, (folder / "file").read_bytes()


@pytest.fixture
def site(published: tuple[Path, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    folder, data = published
    server = WeightsServer()
    table = (folder / "models.toml").read_text().replace("http://127.0.0.1:9", server.url)
    models = tmp_path / "models.toml"
    captioners = "".join(
        f'[captioners.{name}]\npaper = ""\ndescription = ""\nfile = ""\nsource = "bundled:{folder / name}"\n'
        f'sha256 = "{sha256_file(folder / name / "captioner.safetensors")}"\nlicence = "none"\nbytes = 1\n'
        for name in ("moving", "still")
    )
    models.write_text(f'default = ["moving", "still"]\n{table}\n{captioners}')
    yield Site(tmp_path, models, server, data)
    server.close()


def models_in(text: str) -> set[str]:
    """Return the names of the models of JSON records, one per line."""
    return {json.loads(line)["model"]["name"] for line in text.splitlines()}


def test_the_first_run_downloads_and_later_ones_do_not(site: Site, video_files: list[Path]) -> None:
    site.serve()
    code, out, err = site.caption(video_files[3], "--format", "jsonl")
    assert (code, models_in(out)) == (0, {"moving"})
    assert err.splitlines() == [
        "note: downloaded the weights of x3d-xs (15 MB) from "
        f"{site.server.url}/{site.server.requests[0]}, once"
    ]
    assert len(site.server.requests) == 1
    assert site.caption(video_files[3], "--format", "jsonl", offline=True) == (0, out, "")
    assert models_in(site.caption(video_files[3], "--format", "jsonl", "--model", "still")[1]) == {"still"}
    assert len(site.server.requests) == 1


def test_offline_asks_nobody_and_says_so_once(site: Site, video_files: list[Path]) -> None:
    site.serve()
    code, out, err = site.caption(*video_files[:3], "--format", "jsonl", offline=True)
    assert (code, models_in(out), site.server.requests) == (0, {"still"}, [])
    assert err.count("\n") == 2 and err.startswith(
        f"{NOTE}the weights of x3d-xs are not there, and HF_HUB_OFF"
    )
    code, out, err = site.caption(video_files[0], "--model", "moving", offline=True)
    assert (code, out) == (1, "") and "HF_HUB_OFFLINE forbids downloads" in err and err.count("\n") == 1


def test_a_failure_is_remembered_by_later_runs_but_not_by_name(site: Site, video_files: list[Path]) -> None:
    code, out, err = site.caption(*video_files[:3], "--format", "jsonl")
    assert (code, models_in(out)) == (0, {"still"})
    assert err.startswith(f"{NOTE}the weights of x3d-xs cannot be downloaded (HTTP Error 404") and NOTE in err
    asked = len(site.server.requests)
    site.serve()
    code, out, err = site.caption(video_files[0], "--format", "jsonl")
    assert models_in(out) == {"still"} and len(site.server.requests) == asked
    assert err.count("\n") == 1 and "could not be downloaded lately (HTTP Error 404" in err
    assert models_in(site.caption(video_files[0], "--format", "jsonl", "--model", "moving")[1]) == {"moving"}
    assert site.caption(video_files[0])[2] == ""


def test_bad_weights_of_the_user_do_not_stop_the_default(
    site: Site, video_files: list[Path], tmp_path: Path
) -> None:
    (name, _) = catalog.backbone_entry("x3d-xs").urls
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / name).write_bytes(b"<html>")
    code, _, err = site.caption(video_files[0], weights=tmp_path / "own")
    assert code == 0 and err.startswith(NOTE) and "is ever unpickled" in err and err.count("\n") == 1
    (tmp_path / "own" / name).write_bytes(site.published)
    assert site.caption(video_files[0], "--weights", tmp_path / "own")[2] == ""
    assert site.server.requests == []


@pytest.mark.parametrize("kind", ["folder", "sidecar", "videofolder", "shards"])
def test_a_run_that_is_continued_keeps_its_captioner(
    site: Site, video_files: list[Path], tmp_path: Path, kind: str
) -> None:
    clips = tmp_path / "clips"
    clips.mkdir()
    for path in video_files[:2]:
        (clips / path.name).write_bytes(path.read_bytes())
    options: dict[str, list[object]] = {
        "folder": ["--output-dir", tmp_path / "out", "--format", "json"],
        "sidecar": ["--sidecar", "--format", "json"],
        "videofolder": ["--output-dir", clips, "--format", "videofolder"],
        "shards": ["--output-dir", tmp_path / "out", "--format", "jsonl", "--videos-per-file", "1"],
    }
    code, _, err = site.caption(clips, *options[kind], offline=True)
    assert code == 0 and NOTE in err
    site.serve()  # from now on the other captioner could be had
    (clips / "more.mp4").write_bytes(video_files[4].read_bytes())
    code, _, err = site.caption(clips, *options[kind])
    assert (code, site.server.requests) == (0, [])
    assert NOTE not in err and err.startswith("1 captioned") and "2 skipped" in err
    if kind != "videofolder":
        pattern = {"folder": "out/*.json", "sidecar": "clips/*.json", "shards": "out/captions-*.jsonl"}[kind]
        texts = [path.read_text() for path in tmp_path.glob(pattern)]
        assert {json.loads(text)["model"]["name"] for text in texts} == {"still"} and len(texts) == 3
    code, _, err = site.caption(clips, *options[kind], "--overwrite")
    assert len(site.server.requests) == 1 and err.startswith("note: downloaded") and "3 captioned" in err
    code, _, err = site.caption(clips, *options[kind], offline=True)
    assert (code, err) == (0, "0 captioned, 3 skipped (already done)\n")


@pytest.mark.parametrize(
    ("name", "chosen", "offline", "memory", "advice"),
    [
        ("kv-memory", False, True, 1.2, "m3-motion does better; unset HF_HUB_OFFLINE once, "),
        ("kv-memory", False, False, 0.0, ""),  # its download has failed, and there was a note
        ("kv-memory", True, True, 0.0, ""),
        ("kv-memory", True, False, 0.0, "--model smolvlm2-500m may do better (a download of about 2 GB)"),
        ("m3-motion", False, False, 0.0, "--model smolvlm2-500m may do better (a download of about 2 GB)"),
        ("m3-motion", False, False, 1e9, ""),  # times its weights, more memory than there is
        ("qwen3-vl-2b", True, False, 0.0, ""),
        ("run/", True, False, 0.0, ""),
    ],
)
def test_the_advice_is_true_on_this_machine(
    name: str,
    chosen: bool,
    offline: bool,
    memory: float,
    advice: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(caption, "MEMORY", memory)
    found = caption.better_captioner(name, chosen=chosen)
    assert found.startswith(advice) and bool(found) == bool(advice)


def test_flagged_captions_come_with_advice_once(site: Site, video_files: list[Path]) -> None:
    folder = site.home / "doubtful"
    curve = {"average": [0.0] * 192, "intercept": -9.0, "per_logprob": 0.0, "per_information": 0.0}
    shares = dict.fromkeys(("videos", "right", "flagged", "right_flagged", "right_others"), 1)
    save_toy_captioner(folder, backbone="colour-grid", confidence={**curve, **shares})
    (still,) = [line for line in site.models.read_text().splitlines() if line.endswith('/still"')]
    text = site.models.read_text().replace(still, f'source = "bundled:{folder}"')
    site.models.write_text(text)
    code, _, err = site.caption(*video_files[:3], offline=True)
    assert code == 0 and err.splitlines()[0].startswith(NOTE)
    assert err.splitlines()[1].startswith("3 captioned") and "3 of low confidence" in err
    assert err.splitlines()[2].startswith("note: low confidence: ")
    expected = "note: moving does better; unset HF_HUB_OFFLINE once, and what it needs is downloaded"
    assert err.splitlines()[3:] == [expected]


@pytest.mark.slow
def test_processes_at_once_agree(site: Site, video_files: list[Path], tmp_path: Path) -> None:
    """Four parts of one run, started together; one downloads, and all others wait for it."""
    site.serve()
    command = [sys.executable, "-m", "capvid", "caption", *video_files, "--output-dir", tmp_path / "out"]
    command += ["--format", "json"]
    running = [
        subprocess.Popen(
            [*map(str, command), "--shard", f"{part}/4"],
            env=site.settings(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for part in range(1, 5)
    ]
    errors = [process.communicate(timeout=200)[1] for process in running]
    assert [process.returncode for process in running] == [0] * 4, errors
    assert len(site.server.requests) == 1 and "".join(errors).count("note: ") == 1
    records = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")]
    assert len(records) == 5 and {record["model"]["name"] for record in records} == {"moving"}


@pytest.mark.slow
def test_a_server_that_never_answers_costs_one_wait(site: Site, video_files: list[Path]) -> None:
    site.server.fault = "hang"
    begun = time.monotonic()
    code, _, err = site.caption(*video_files[:3])
    assert code == 0 and "not complete within 30 seconds" in err and err.count(NOTE) == 1
    assert 25 < time.monotonic() - begun < 90
    begun = time.monotonic()
    code, _, err = site.caption(*video_files[:3])
    assert code == 0 and "could not be downloaded lately (not complete within 30 seconds)" in err
    assert time.monotonic() - begun < 25
    record = json.loads((site.home / "hf" / "capvid" / "weights" / "x3d-xs.failed.json").read_text())
    assert 3600 < record["until"] - time.time() <= 24 * 3600
