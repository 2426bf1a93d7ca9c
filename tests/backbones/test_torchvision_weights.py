"""torch's own downloader against a server on the loopback interface, each call in a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import forked
import pytest
import torch

from capvid.backbones.catalog import backbones
from capvid.backbones.weights import _torch_folder

# only the address behind torchvision's weights is another
FETCH = """
import json, sys
from torchvision.models import get_weight
from capvid.errors import CapvidError
from capvid.backbones.weights import fetch_torchvision
source, url = sys.argv[1:]
get_weight("S3D_Weights.KINETICS400_V1").value.url = url
try:
    print(json.dumps({"path": str(fetch_torchvision(source))}))
except CapvidError as error:
    print(json.dumps({"error": str(error), "kind": error.kind}))
"""
LOAD = """
import sys
import numpy as np
from torchvision.models import get_weight
from capvid.backbones.backbone import load_backbone
get_weight("S3D_Weights.KINETICS400_V1").value.url = sys.argv[1]
backbone = load_backbone("s3d")
print(backbone.header.weights_sha256, backbone(np.zeros((1, 16, 224, 224, 3), np.uint8)).shape)
"""
SOURCE = "torchvision:S3D_Weights.KINETICS400_V1"
CONTENT = bytes(range(256)) * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Server:
    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.cut = False
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.requests.append(self.path)
                content = owner.files.get(self.path.lstrip("/"))
                self.send_response(404 if content is None else 200)
                self.send_header("Content-Length", str(len(content or b"")))
                self.end_headers()
                self.wfile.write((content or b"")[: 100_000 if owner.cut else None])

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def put(self, content: bytes, *, digest: str | None = None) -> str:
        name = f"s3d-{(digest or hashlib.sha256(content).hexdigest())[:8]}.pth"
        self.files[name] = content
        return f"{self.url}/{name}"


@pytest.fixture
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.server.shutdown()
    started.server.server_close()


def environment(home: Path, *, offline: bool) -> dict[str, str]:
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("HF_", "CAPVID_", "TORCH_")) and "proxy" not in k.lower()
    }
    settings = {"HF_HOME": str(home / "hf"), "TORCH_HOME": str(home / "torch"), "NO_PROXY": "*"}
    settings |= {"CAPVID_CACHE": str(home / "capvid"), "HF_HUB_OFFLINE": str(int(offline))}
    return kept | settings | {"OMP_NUM_THREADS": "1"}


def run(code: str, *arguments: str, home: Path, offline: bool = False) -> str:
    done = forked.run(code, arguments, env=environment(home, offline=offline))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def fetch(home: Path, url: str, *, source: str = SOURCE, offline: bool = False) -> dict[str, str]:
    answer = json.loads(run(FETCH, source, url, home=home, offline=offline))
    assert "\n" not in answer.get("error", "")
    return answer


def test_the_first_download_is_recorded_and_kept(server: Server, tmp_path: Path) -> None:
    url = server.put(CONTENT)
    path = Path(fetch(tmp_path, url)["path"])
    assert path == tmp_path / "torch" / "hub" / "checkpoints" / f"s3d-{DIGEST[:8]}.pth"
    assert path.read_bytes() == CONTENT
    assert json.loads((tmp_path / "hf" / "capvid-digests.json").read_text()) == {url: DIGEST}
    assert fetch(tmp_path, url) == fetch(tmp_path, url, offline=True) == {"path": str(path)}
    assert len(server.requests) == 1


def test_offline_and_not_there(server: Server, tmp_path: Path) -> None:
    url = server.put(CONTENT)
    found = fetch(tmp_path, url, offline=True)
    target = tmp_path / "torch" / "hub" / "checkpoints" / f"s3d-{DIGEST[:8]}.pth"
    assert found["kind"] == "weights"
    assert "HF_HUB_OFFLINE forbids downloads" in found["error"]
    assert f"download {url} elsewhere and put it at {target}" in found["error"]
    assert "--weights FILE" in found["error"]
    assert server.requests == []


def test_no_such_file_and_no_server(server: Server, tmp_path: Path) -> None:
    assert (
        "cannot be downloaded (HTTP Error 404" in fetch(tmp_path, f"{server.url}/s3d-00000000.pth")["error"]
    )
    error = fetch(tmp_path, "http://127.0.0.1:9/s3d-00000000.pth")["error"]
    assert "cannot be downloaded" in error and "download http://127.0.0.1:9/s3d-00000000.pth" in error


def test_another_digest_than_in_the_name(server: Server, tmp_path: Path) -> None:
    url = server.put(CONTENT, digest="0" * 64)
    assert 'invalid hash value (expected "00000000"' in fetch(tmp_path, url)["error"]
    assert not list((tmp_path / "torch" / "hub" / "checkpoints").iterdir())
    assert not (tmp_path / "hf" / "capvid-digests.json").exists()


def test_a_download_that_breaks_off_leaves_nothing(server: Server, tmp_path: Path) -> None:
    url = server.put(CONTENT)
    server.cut = True
    assert "cannot be downloaded" in fetch(tmp_path, url)["error"]
    assert not list((tmp_path / "torch" / "hub" / "checkpoints").iterdir())
    server.cut = False
    assert Path(fetch(tmp_path, url)["path"]).read_bytes() == CONTENT


def test_a_file_that_changed(server: Server, tmp_path: Path) -> None:
    url = server.put(CONTENT)
    path = Path(fetch(tmp_path, url)["path"])
    path.write_bytes(b"damaged")
    error = fetch(tmp_path, url)["error"]
    assert f"not the file of {url}" in error and f"expected {DIGEST[:8]}" in error


def test_unknown_weights(tmp_path: Path) -> None:
    error = fetch(tmp_path, "", source="torchvision:S3D_Weights.OTHER")
    assert error["kind"] == "usage" and "the installed torchvision has no such weights" in error["error"]


@pytest.mark.slow
def test_a_backbone_is_loaded_from_the_download(server: Server, tmp_path: Path) -> None:
    from torchvision.models.video import s3d

    torch.manual_seed(0)
    torch.save(s3d().state_dict(), tmp_path / "s3d.pth")
    content = (tmp_path / "s3d.pth").read_bytes()
    url = server.put(content)
    digest = hashlib.sha256(content).hexdigest()
    for offline in (False, True):
        assert run(LOAD, url, home=tmp_path, offline=offline).strip() == f"{digest} (1, 1024)"


def test_the_registry_names_the_files_and_the_preprocessing_that_torchvision_has() -> None:
    from torchvision.models import get_weight

    found = [entry for entry in backbones().values() if entry.source.startswith("torchvision:")]
    assert len(found) >= 5
    for entry in found:
        weights = get_weight(entry.source.removeprefix("torchvision:"))
        assert entry.file == weights.url.rpartition("/")[2]
        how, ours = weights.transforms(), entry.preprocess
        if entry.kind == "raft":
            assert (ours.scale, ours.mean, ours.std) == (255, (0.5,) * 3, (0.5,) * 3)  # to -1 .. 1
            continue
        assert (ours.resize, ours.crop) == (how.resize_size[0], how.crop_size[0])
        assert (ours.mean, ours.std, ours.scale) == (tuple(how.mean), tuple(how.std), 255)
        assert (ours.order, ours.interpolation) == ("RGB", how.interpolation.value)


@pytest.mark.parametrize("variables", [{}, {"XDG_CACHE_HOME": "/x"}, {"TORCH_HOME": "~/y"}])
def test_the_folder_is_that_of_torch(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "TORCH_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    asked = _torch_folder()
    monkeypatch.delitem(sys.modules, "torch")
    assert _torch_folder() == asked
