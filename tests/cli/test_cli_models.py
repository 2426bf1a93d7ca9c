from __future__ import annotations

import pytest
from toy import Run, Toy


def test_the_list_names_every_model(capvid: Run) -> None:
    code, out, err = capvid("models")
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "1502.08029" in rows["soft-attention"]
    assert "1611.05592" in rows["m3"]
    assert "28 MB" in rows["googlenet"]
    assert "BVLC GoogLeNet: unrestricted use" in rows["googlenet"]
    assert "hub:timm/resnet50.tv_in1k@aa6c2d36d56bc0209040c02b5a7b7d7bf11d57b8" in rows["resnet50"]


def test_the_list_says_what_is_here(
    capvid: Run, toy: Toy, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    def here() -> str:
        rows = {line.split()[0]: line for line in capvid("models")[1].splitlines() if line.strip()}
        return rows["toy"].split()[-1]

    assert here() == "yes"
    monkeypatch.delenv("CAPVID_WEIGHTS")
    monkeypatch.setenv("CAPVID_CACHE", str(tmp_path))
    assert here() == "no"


@pytest.mark.parametrize("name", ["googlenet", "bvlc_googlenet"])
def test_one_backbone(capvid: Run, name: str) -> None:
    code, out, _ = capvid("models", name)
    shown = dict(line.split(":", 1) for line in out.splitlines())
    assert code == 0
    assert shown["backbone"].strip() == "googlenet"
    assert shown["sha256"].strip() == "c058c6d5c42e1a6dcfea9739d6f30d4fc5cd05980a75348770bde0e0fcc08be6"
    assert "inception_5b/output (49 x 1024)" in shown["layers"]
    assert "BGR minus (104, 117, 123)" in shown["input"]


def test_one_captioner(capvid: Run) -> None:
    code, out, _ = capvid("models", "m3")
    assert code == 0
    assert out.splitlines()[0].split() == ["captioner:", "m3"]
    assert "capvid/captioners/m3.py" in out


@pytest.mark.parametrize("name", ["git-base-vatex", "microsoft/git-base-vatex"])
def test_one_captioner_of_the_hub(capvid: Run, name: str) -> None:
    code, out, _ = capvid("models", name)
    shown = dict(line.split(":", 1) for line in out.splitlines())
    assert code == 0
    assert shown["captioner"].strip() == "git-base-vatex"
    assert shown["weights"].strip() == "hub:microsoft/git-base-vatex"
    assert shown["sha256"].strip() == "recorded at the first download"
    assert shown["licence"].strip() == "MIT"


def test_an_unknown_name_lists_what_there_is(capvid: Run) -> None:
    code, out, err = capvid("models", "vgg99")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    for name in ("vgg99", "m3", "soft-attention", "googlenet", "resnet50"):
        assert name in err


def test_a_broken_models_file_is_one_line(
    capvid: Run, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAPVID_MODELS", f"{tmp_path}/none.toml")
    code, _, err = capvid("models")
    assert code == 2
    assert err.startswith(f"error: CAPVID_MODELS={tmp_path}/none.toml: not a file of models")
    assert err.count("\n") == 1
