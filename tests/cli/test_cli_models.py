from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hub_server import FakeHub
from toy import Run, Toy

from capvid.backbones.catalog import CaptionerEntry, backbones, captioners
from capvid.captioners.base import CAPTIONERS


def test_list_names_models_with_papers_and_sources(capvid: Run) -> None:
    code, out, err = capvid("models")
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "1502.08029" in rows["soft-attention"]
    assert "1611.05592" in rows["m3"]
    assert "28 MB" in rows["googlenet"]
    assert "BVLC GoogLeNet: unrestricted use" in rows["googlenet"]
    assert "hub:timm/resnet50.tv_in1k@aa6c2d36d56bc0209040c02b5a7b7d7bf11d57b8" in rows["resnet50"]


def test_list_shows_which_weights_are_available(
    capvid: Run, toy: Toy, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    def availability() -> str:
        rows = {line.split()[0]: line for line in capvid("models")[1].splitlines() if line.strip()}
        return rows["toy"].split()[-1]

    assert availability() == "yes"
    monkeypatch.delenv("CAPVID_WEIGHTS")
    monkeypatch.setenv("CAPVID_CACHE", str(tmp_path))
    assert availability() == "no"


@pytest.mark.parametrize("name", ["googlenet", "bvlc_googlenet"])
def test_details_of_one_backbone(capvid: Run, name: str) -> None:
    code, out, _ = capvid("models", name)
    details = dict(line.split(":", 1) for line in out.splitlines())
    assert code == 0
    assert details["backbone"].strip() == "googlenet"
    assert details["sha256"].strip() == "c058c6d5c42e1a6dcfea9739d6f30d4fc5cd05980a75348770bde0e0fcc08be6"
    assert "inception_5b/output (49 x 1024)" in details["layers"]
    assert "BGR minus (104, 117, 123)" in details["input"]


def test_details_of_one_captioner(capvid: Run) -> None:
    code, out, _ = capvid("models", "m3")
    assert code == 0
    assert out.splitlines()[0].split() == ["captioner:", "m3"]
    assert "capvid/captioners/m3.py" in out


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("vgg99", ["did you mean vgg19 or vgg16?"]),
        ("abacus", ["there are ", "m3", "soft-attention", "googlenet", "resnet50"]),
    ],
)
def test_unknown_model_name(capvid: Run, name: str, messages: list[str]) -> None:
    code, out, err = capvid("models", name)
    assert (code, out, err.count("\n")) == (2, "", 1)
    for text in (f"unknown model '{name}'", *messages):
        assert text in err


def test_captioner_lists_its_recipes(capvid: Run) -> None:
    _, out, _ = capvid("models", "transformer-xl")
    assert "weights:     none come with capvid: train it" in out
    parts = ("activitynet", "small", "youcook2")
    names = ", ".join(f"transformer-xl-{part}" for part in parts)
    assert f"recipes:     {names} (capvid train RECIPE)" in out
    _, out, _ = capvid("models", "transformer-xl-authors")
    assert "recipes:     transformer-xl-activitynet-authors (capvid train RECIPE)" in out


def test_every_captioner_is_in_the_list_of_models() -> None:
    assert set(CAPTIONERS) <= set(captioners())


def test_json_lists_every_model(capvid: Run, toy: Toy) -> None:
    code, out, err = capvid("models", "--json")
    records = {record["name"]: record for record in json.loads(out)}
    assert (code, err) == (0, "")
    assert set(records) == {*captioners(), *backbones()}
    m3, toy_backbone = records["m3"], records["toy"]
    assert (m3["kind"], m3["default"], m3["here"], m3["licence"]) == ("captioner", False, True, "Apache-2.0")
    assert "m3-small" in m3["recipes"]
    assert [name for name, record in records.items() if record.get("default")] == ["m3-motion", "kv-memory"]
    assert (toy_backbone["kind"], toy_backbone["here"]) == ("backbone", True)
    assert toy_backbone["layers"]["embedding"] == {"locations": None, "width": 1280}
    assert json.loads(capvid("models", "toy", "--json")[1]) == toy_backbone


@pytest.mark.parametrize("columns", ["20", "40", "80", "200"])
def test_list_on_a_terminal_truncates_nothing(
    capvid: Run, toy: Toy, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    code, out, _ = capvid("models")
    assert code == 0
    words = out.split()
    for entry in (*captioners().values(), *backbones().values()):
        assert entry.name in words
        captioner = isinstance(entry, CaptionerEntry)
        text = f"{entry.description} {entry.paper}" if captioner else entry.licence
        assert set(text.split()) <= set(words)
    if columns == "80":
        assert max(map(len, out.splitlines())) <= 80
        assert "kv-memory (comes with capvid, 5 MB, Apache-2.0; the default offline)" in out.splitlines()


def test_list_does_not_import_torch() -> None:
    code = "import sys; from capvid.cli.app import main; main(['models']); print('torch' in sys.modules)"
    environment = os.environ | {"TORCH_HOME": "/nowhere", "HF_HOME": "/nowhere"}
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert completed.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("name", ["git-base-vatex", "microsoft/git-base-vatex"])
def test_details_of_a_hub_captioner(capvid: Run, name: str) -> None:
    code, out, _ = capvid("models", name)
    details = dict(line.split(":", 1) for line in out.splitlines())
    assert code == 0
    assert details["captioner"].strip() == "git-base-vatex"
    assert details["weights"].strip() == "hub:microsoft/git-base-vatex"
    assert details["sha256"].strip() == "recorded at the first download"
    assert details["licence"].strip() == "MIT"


def test_a_model_on_the_hub_before_its_download(capvid: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeHub()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name, kind, size in (("small", "qwen3_vl", 3_000_000), ("other", "bert", 2_000_000)):
        server.create(f"anna/{name}")
        config = json.dumps({"model_type": kind}).encode()
        files = {f"model-0000{n}-of-00002.safetensors": bytes(size // 2) for n in (1, 2)}
        server.commit(f"anna/{name}", "main", {"config.json": config, **files}, [])
    code, out, _ = capvid("models", "anna/small")
    details = dict(line.split(":", 1) for line in out.splitlines())
    assert code == 0 and details["type"].strip() == "qwen3_vl" and details["licence"].strip() == "mit"
    assert details["weights"].strip() == "0.0015 billion, 0.003 GB"
    assert details["memory"].strip().startswith("fits: needs about 0.00")
    assert "bert, which capvid cannot use" in capvid("models", "anna/other")[1]
    monkeypatch.setattr("capvid.utils.device.free_memory", lambda: (1000, "of RAM"))
    record = json.loads(capvid("models", "anna/small", "--json")[1])
    assert record["supported"] and not record["fits"] and record["bytes"] == 3_000_000
    code, _, err = capvid("models", "anna/missing")
    assert code == 1 and err.startswith("error: anna/missing: ") and err.count("\n") == 1
    server.close()


def test_missing_models_file_prints_one_error_line(
    capvid: Run, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAPVID_MODELS", f"{tmp_path}/none.toml")
    code, _, err = capvid("models")
    assert code == 2
    assert err.startswith(f"error: CAPVID_MODELS={tmp_path}/none.toml: not a file of models")
    assert err.count("\n") == 1
