from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from networks_once import networks_once
from safetensors.torch import load_file
from toy import Run

from capvid.backbones.catalog import backbone_entry, build_network
from capvid.utils.files import sha256_file

__all__ = ["networks_once"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    entry = backbone_entry("s3d")
    tensors = {
        f"module.{name}": torch.rand(tensor.shape) if tensor.is_floating_point() else torch.zeros_like(tensor)
        for name, tensor in build_network(entry, "avgpool").state_dict().items()
    }
    path = tmp_path / "S3D best.pth"
    torch.save({"state_dict": tensors | {"module.classifier.1.bias": torch.zeros(400)}}, path)
    return path


@pytest.mark.slow
def test_path_on_stdout_and_one_line_on_stderr(capvid: Run, checkpoint: Path) -> None:
    code, out, err = capvid("convert", str(checkpoint))
    written = checkpoint.parent / "s3d.safetensors"
    assert (code, out) == (0, f"{written}\n")
    tensors = load_file(written)
    assert err == (
        f"{written}: {len(tensors)} tensors of s3d, sha256 {sha256_file(written)}, "
        "left out: module.classifier.1.bias\n"
    )
    assert sorted(checkpoint.parent.iterdir()) == [checkpoint, written]


def test_output_and_name(capvid: Run, checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "own.safetensors"
    assert capvid("convert", str(checkpoint), "--as", "s3d", "-o", str(target))[:2] == (0, f"{target}\n")
    before = target.read_bytes()
    code, out, err = capvid("convert", str(checkpoint), "--as", "c3d", "-o", str(target))
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert "not a checkpoint of c3d (20 of 20 tensors are missing: conv1a.weight" in err
    assert target.read_bytes() == before


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("out.pth", "let it end in .safetensors"),
        ("gone/out.safetensors", "there is no folder"),
    ],
)
def test_outputs_that_cannot_be(capvid: Run, checkpoint: Path, tmp_path: Path, output: str, why: str) -> None:
    code, out, err = capvid("convert", str(checkpoint), "-o", str(tmp_path / output))
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert why in err


@pytest.mark.slow
def test_the_file_itself_is_never_replaced(capvid: Run, checkpoint: Path) -> None:
    assert capvid("convert", str(checkpoint))[0] == 0
    written = checkpoint.parent / "s3d.safetensors"
    before = written.read_bytes()
    code, _, err = capvid("convert", str(written))
    assert code == 2 and "is the file that is read; give another name with -o" in err
    assert written.read_bytes() == before


def test_unknown_backbone_and_missing_file(capvid: Run, checkpoint: Path) -> None:
    code, _, err = capvid("convert", str(checkpoint), "--as", "c4d")
    assert code == 2 and "unknown backbone 'c4d'" in err and err.count("\n") == 1
    code, _, err = capvid("convert", str(checkpoint.parent / "none.pth"))
    assert code == 1 and "none.pth: no such file" in err and err.count("\n") == 1


@pytest.mark.slow
def test_a_file_that_its_backbone_will_not_take(capvid: Run, tmp_path: Path) -> None:
    entry = backbone_entry("x3d-xs")
    torch.save(build_network(entry, "fc").state_dict(), tmp_path / "x3d.pt")
    code, _, err = capvid("convert", str(tmp_path / "x3d.pt"), "-o", str(tmp_path / "x3d.safetensors"))
    assert code == 0
    assert f"warning: x3d-xs takes only the file with sha256 {entry.sha256}" in err


def test_help_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from capvid.cli.app import run\n"
        "try:\n    run(['convert', '--help'])\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'timm', 'transformers', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
