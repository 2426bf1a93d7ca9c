"""The real Hub client against a server on the loopback interface, each call in a process of its own."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import forked
import numpy as np
import pytest
from hub_server import FakeHub, environment

from capvid.backbones.catalog import backbone_entry
from capvid.checkpoints.hub_checkpoints import is_name

RESNET = backbone_entry("resnet50")
CLIP = backbone_entry("clip-vit-b32")
REPOSITORY, _, COMMIT = RESNET.source.removeprefix("hub:").partition("@")
COMMAND = f"`hf download timm/resnet50.tv_in1k model.safetensors --revision {COMMIT}`"
FETCH = """
import json, sys
from capvid.errors import HubError
from capvid.hub.client import fetch
source, filename, sha256, *alternatives = sys.argv[1:]
try:
    path = fetch(source, filename, sha256=sha256 or None, alternatives=alternatives)
    print(json.dumps({"path": str(path)}))
except HubError as error:
    print(json.dumps({"error": str(error), "kind": error.kind}))
"""
FEATURES = """
import sys
import numpy as np
from capvid.backbones.backbone import load_backbone
backbone = load_backbone("resnet50")
np.savez(sys.argv[2], features=backbone(np.load(sys.argv[1])), digest=backbone.header.weights_sha256)
"""


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    server = FakeHub()
    yield server
    server.close()


def run(code: str, *arguments: str, home: Path, endpoint: str, offline: bool = False) -> str:
    done = forked.run(code, arguments, env=environment(home, endpoint, offline=offline))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def fetch(
    home: Path,
    endpoint: str,
    *,
    source: str = RESNET.source,
    filename: str = RESNET.file,
    sha256: str = "",
    alternatives: tuple[str, ...] = (),
    offline: bool = False,
) -> dict[str, str]:
    arguments = (source, filename, sha256, *alternatives)
    out = run(FETCH, *arguments, home=home, endpoint=endpoint, offline=offline)
    answer = json.loads(out)
    if "error" in answer:
        assert answer["kind"] == "hub"
        assert "\n" not in answer["error"] and "Traceback" not in answer["error"]
    return answer


@pytest.mark.slow
def test_first_download_is_recorded_and_then_served_from_the_cache(hub: FakeHub, tmp_path: Path) -> None:
    hub.put(b"some weights", RESNET.file)
    path = Path(fetch(tmp_path, hub.url)["path"])
    assert path.read_bytes() == b"some weights"
    assert path.is_relative_to(tmp_path)
    records = json.loads((tmp_path / "capvid-digests.json").read_text())
    assert records == {f"{REPOSITORY}@{COMMIT}/{RESNET.file}": hashlib.sha256(b"some weights").hexdigest()}
    assert f"HEAD /{REPOSITORY}/resolve/{COMMIT}/{RESNET.file}" in hub.requests
    asked = len(hub.requests)
    assert fetch(tmp_path, hub.url) == {"path": str(path)}
    assert fetch(tmp_path, "http://127.0.0.1:9", offline=True) == {"path": str(path)}
    assert len(hub.requests) == asked


def test_no_such_file_repository_or_revision(hub: FakeHub, tmp_path: Path) -> None:
    hub.put(b"some weights", RESNET.file)
    missing = fetch(tmp_path, hub.url, filename="other.safetensors")["error"]
    assert f"{REPOSITORY} at {COMMIT[:8]}: {hub.url} has no such file (other.safetensors)" in missing
    assert "--weights FILE" in missing
    assert "no such file" in fetch(tmp_path, hub.url, source=f"hub:nobody/nothing@{COMMIT}")["error"]


def test_unreachable_endpoint(tmp_path: Path) -> None:
    error = fetch(tmp_path, "http://127.0.0.1:9")["error"]
    assert f"{RESNET.file} cannot be downloaded from http://127.0.0.1:9" in error
    assert "check the connection" in error and COMMAND in error


def test_offline_without_the_file(tmp_path: Path, hub: FakeHub) -> None:
    hub.put(b"some weights", RESNET.file)
    error = fetch(tmp_path, hub.url, offline=True)["error"]
    assert f"{RESNET.file} is not in the cache, and HF_HUB_OFFLINE forbids downloads" in error
    assert COMMAND in error and "--weights FILE" in error
    assert hub.requests == []
    error = fetch(tmp_path, hub.url, source=CLIP.source, filename=CLIP.file, offline=True)["error"]
    assert "openai/clip-vit-base-patch32 at main: model.safetensors is not in the cache" in error
    assert "`hf download openai/clip-vit-base-patch32 model.safetensors`" in error


@pytest.mark.slow
def test_content_that_changed_since_the_first_download(hub: FakeHub, tmp_path: Path) -> None:
    hub.put(b"some weights", RESNET.file)
    path = Path(fetch(tmp_path, hub.url)["path"])
    cached = path.resolve()
    cached.write_bytes(b"damaged")
    damaged = fetch(tmp_path, hub.url)["error"]
    assert f"{RESNET.file} has changed (sha256 {hashlib.sha256(b'damaged').hexdigest()[:12]}" in damaged
    assert f"delete {cached}" in damaged
    cached.unlink()
    assert Path(fetch(tmp_path, hub.url)["path"]).read_bytes() == b"some weights"
    path.resolve().unlink()
    hub.put(b"other weights", RESNET.file)
    assert "has changed" in fetch(tmp_path, hub.url)["error"]


def test_a_known_digest_is_checked_at_the_first_download(hub: FakeHub, tmp_path: Path) -> None:
    hub.put(b"some weights", RESNET.file)
    assert "has changed" in fetch(tmp_path, hub.url, sha256="0" * 64)["error"]
    assert not (tmp_path / "capvid-digests.json").exists()
    right = hashlib.sha256(b"some weights").hexdigest()
    assert "path" in fetch(tmp_path, hub.url, sha256=right)


@pytest.mark.parametrize(
    "source", ["hub:timm/resnet50@main", f"hub:timm@{COMMIT}", f"https://hub/a@{COMMIT}"]
)
def test_a_source_that_is_not_pinned(source: str, tmp_path: Path) -> None:
    assert "not a pinned Hub source" in fetch(tmp_path, "http://127.0.0.1:9", source=source)["error"]


def test_a_damaged_record_is_reported(hub: FakeHub, tmp_path: Path) -> None:
    hub.put(b"some weights", RESNET.file)
    (tmp_path / "capvid-digests.json").write_text("{")
    assert "capvid-digests.json: cannot be read" in fetch(tmp_path, hub.url)["error"]


LARGE = bytes(range(256)) * 100_000  # more than the client reads at once


def test_a_connection_that_breaks_is_resumed(hub: FakeHub, tmp_path: Path) -> None:
    hub.put(LARGE, RESNET.file)
    hub.cuts = [22_000_000]
    found = fetch(tmp_path, hub.url)
    if "error" in found:  # clients before version 1 go on at the next call
        found = fetch(tmp_path, hub.url)
    assert Path(found["path"]).read_bytes() == LARGE
    assert len(hub.ranges) == 1 and hub.ranges != ["bytes=0-"]


@pytest.mark.slow
def test_a_server_that_goes_away_and_comes_back(hub: FakeHub, tmp_path: Path) -> None:
    hub.put(LARGE, RESNET.file)
    hub.cuts, hub.gone_after_cut = [22_000_000], True
    error = fetch(tmp_path, hub.url)["error"]
    assert f"{RESNET.file} cannot be downloaded from {hub.url}" in error and COMMAND in error
    assert not (tmp_path / "capvid-digests.json").exists()
    assert "not in the cache" in fetch(tmp_path, hub.url, offline=True)["error"]
    hub.gone = False
    assert Path(fetch(tmp_path, hub.url)["path"]).read_bytes() == LARGE


@pytest.mark.slow
def test_two_processes_at_once(hub: FakeHub, tmp_path: Path) -> None:
    hub.put(LARGE, RESNET.file)
    hub.put(b"values", CLIP.file, repository="openai/clip-vit-base-patch32")
    sources = [(RESNET.source, RESNET.file), (CLIP.source, CLIP.file)] * 2
    running = [
        subprocess.Popen(
            [sys.executable, "-c", FETCH, *source, ""],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(tmp_path, hub.url),
        )
        for source in sources
    ]
    found = []
    for process in running:
        out, err = process.communicate(timeout=200)
        assert (process.returncode, err) == (0, "")
        found.append(Path(json.loads(out)["path"]))
    assert found[0] == found[2] and found[1] == found[3]
    assert found[0].read_bytes() == LARGE and found[1].read_bytes() == b"values"
    records = json.loads((tmp_path / "capvid-digests.json").read_text())
    assert records == {
        f"{REPOSITORY}@{COMMIT}/{RESNET.file}": hashlib.sha256(LARGE).hexdigest(),
        "openai/clip-vit-base-patch32@main": COMMIT,
        f"openai/clip-vit-base-patch32@{COMMIT}/{CLIP.file}": hashlib.sha256(b"values").hexdigest(),
    }


@pytest.mark.slow
def test_an_unpinned_repository_stays_at_the_commit_of_the_first_download(
    hub: FakeHub, tmp_path: Path
) -> None:
    later = "b" * 40
    hub.put(b"first", RESNET.file, repository="timm/other")
    source = {"source": "hub:timm/other"}
    path = Path(fetch(tmp_path, hub.url, **source)["path"])
    assert path.read_bytes() == b"first"
    records = json.loads((tmp_path / "capvid-digests.json").read_text())
    assert records["timm/other@main"] == COMMIT
    assert records[f"timm/other@{COMMIT}/{RESNET.file}"] == hashlib.sha256(b"first").hexdigest()
    hub.put(b"second", RESNET.file, repository="timm/other", commit=later)
    hub.main = later
    assert fetch(tmp_path, hub.url, **source) == {"path": str(path)}
    assert fetch(tmp_path, "http://127.0.0.1:9", offline=True, **source) == {"path": str(path)}
    path.resolve().unlink()
    path.unlink()
    assert Path(fetch(tmp_path, hub.url, **source)["path"]).read_bytes() == b"first"
    path.resolve().write_bytes(b"damaged")
    assert "has changed" in fetch(tmp_path, hub.url, **source)["error"]


def test_what_the_hubs_own_client_downloaded_before_is_taken_offline(hub: FakeHub, tmp_path: Path) -> None:
    hub.put(b"first", RESNET.file, repository="timm/other")
    code = "import sys, huggingface_hub as h; print(h.hf_hub_download(*sys.argv[1:]))"
    path = run(code, "timm/other", RESNET.file, home=tmp_path, endpoint=hub.url).strip()
    found = fetch(tmp_path, "http://127.0.0.1:9", source="hub:timm/other", offline=True)
    assert found == {"path": path}
    assert json.loads((tmp_path / "capvid-digests.json").read_text())["timm/other@main"] == COMMIT


def test_another_file_of_the_repository_will_do(hub: FakeHub, tmp_path: Path) -> None:
    hub.put(b"tensors", "pytorch_model.bin")
    other = {"alternatives": ("pytorch_model.bin",)}
    path = Path(fetch(tmp_path, hub.url, **other)["path"])
    assert path.name == "pytorch_model.bin" and path.read_bytes() == b"tensors"
    asked = len(hub.requests)
    assert fetch(tmp_path, hub.url, **other) == {"path": str(path)}
    assert len(hub.requests) == asked
    assert "no such file (gone.bin)" in fetch(tmp_path, hub.url, alternatives=("gone.bin",))["error"]


def test_names_on_the_hub() -> None:
    for name in ("anna/toy", "anna/toy@main", f"anna/toy@{'a' * 40}", "a.b/c_d-e@refs/pr/1"):
        assert is_name(name)
    for name in ("toy", "./toy", "../toy", "runs/", "/runs", "a/b/c", "a/b@", "a--b/c", "a b/c", "m3@main"):
        assert not is_name(name)


@pytest.mark.slow
def test_resnet50_from_the_hub_computes_what_timm_computes(hub: FakeHub, tmp_path: Path) -> None:
    import timm
    import torch
    from safetensors.torch import save

    torch.manual_seed(0)
    network = timm.create_model("resnet50", pretrained=False).eval()
    for name, buffer in network.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            torch.nn.init.uniform_(buffer, *((0.5, 1.5) if name.endswith("var") else (-0.5, 0.5)))
    for name, parameter in network.named_parameters():
        if name.endswith("bn3.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    content = save(network.state_dict())
    hub.put(content, RESNET.file)
    frames = (
        np.random.default_rng(0).integers(0, 256, (2, 224, 224, 3), dtype=np.uint8).repeat(2, 1).repeat(2, 2)
    )
    np.save(tmp_path / "frames.npy", frames)
    found = []
    for offline, endpoint in ((False, hub.url), (True, "http://127.0.0.1:9")):
        out = tmp_path / f"offline-{offline}.npz"
        run(
            FEATURES,
            str(tmp_path / "frames.npy"),
            str(out),
            home=tmp_path,
            endpoint=endpoint,
            offline=offline,
        )
        with np.load(out) as arrays:
            found.append(arrays["features"])
            assert str(arrays["digest"]) == hashlib.sha256(content).hexdigest()
    assert sum(request.startswith("GET") for request in hub.requests) == 1
    expected = timm_features(network, frames)
    assert found[0].shape == (2, 2048)
    np.testing.assert_allclose(found[0], expected, rtol=1e-3, atol=1e-4 * expected.max())
    np.testing.assert_array_equal(found[0], found[1])
    assert np.abs(expected[0] - expected[1]).max() > 0.01 * expected.max()


def timm_features(network: object, frames: np.ndarray) -> np.ndarray:
    """The global average pool of timm's own model, with timm's own preprocessing."""
    import torch
    from PIL import Image
    from timm.data import create_transform

    transform = create_transform(
        (3, 224, 224),
        interpolation="bilinear",
        crop_pct=224 / 256,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    )
    images = torch.stack([transform(Image.fromarray(frame)) for frame in frames])
    with torch.inference_mode():
        maps = network.forward_features(images)  # type: ignore[attr-defined]
    return maps.mean((2, 3)).numpy()
