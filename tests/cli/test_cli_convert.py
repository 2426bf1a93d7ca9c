from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cached_shapes import cached_backbone_shapes
from safetensors.torch import load_file
from toy import Run
from x3d_checkpoint import random_checkpoint

from capvid.backbones.catalog import backbone_entry, build_network
from capvid.utils.files import sha256_file

__all__ = ["cached_backbone_shapes"]


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
def test_converted_path_on_stdout_and_summary_on_stderr(capvid: Run, checkpoint: Path) -> None:
    code, out, err = capvid("convert", str(checkpoint))
    converted = checkpoint.parent / "s3d.safetensors"
    assert (code, out) == (0, f"{converted}\n")
    tensors = load_file(converted)
    assert err == (
        f"{converted}: {len(tensors)} tensors of s3d, sha256 {sha256_file(converted)}, "
        "left out: module.classifier.1.bias\n"
    )
    assert sorted(checkpoint.parent.iterdir()) == [checkpoint, converted]


def test_output_path_and_backbone_name(capvid: Run, checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "own.safetensors"
    assert capvid("convert", str(checkpoint), "--as", "s3d", "-o", str(target))[:2] == (0, f"{target}\n")
    content = target.read_bytes()
    code, out, err = capvid("convert", str(checkpoint), "--as", "c3d", "-o", str(target))
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert "not a checkpoint of c3d (20 of 20 tensors are missing: conv1a.weight" in err
    assert target.read_bytes() == content


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("out.pth", "let it end in .safetensors"),
        ("gone/out.safetensors", "there is no folder"),
    ],
)
def test_invalid_output_paths_are_usage_errors(
    capvid: Run, checkpoint: Path, tmp_path: Path, output: str, message: str
) -> None:
    code, out, err = capvid("convert", str(checkpoint), "-o", str(tmp_path / output))
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert message in err


@pytest.mark.slow
def test_input_file_is_never_replaced(capvid: Run, checkpoint: Path) -> None:
    assert capvid("convert", str(checkpoint))[0] == 0
    converted = checkpoint.parent / "s3d.safetensors"
    content = converted.read_bytes()
    code, _, err = capvid("convert", str(converted))
    assert code == 2 and "is the file that is read; give another name with -o" in err
    assert converted.read_bytes() == content


def test_unknown_backbone_and_missing_file(capvid: Run, checkpoint: Path) -> None:
    code, _, err = capvid("convert", str(checkpoint), "--as", "c4d")
    assert code == 2 and "unknown backbone 'c4d'" in err and err.count("\n") == 1
    code, _, err = capvid("convert", str(checkpoint.parent / "none.pth"))
    assert code == 1 and "none.pth: no such file" in err and err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["googlenet", "x3d-xs"])
def test_warns_about_weights_its_backbone_rejects(capvid: Run, tmp_path: Path, name: str) -> None:
    entry = backbone_entry(name)
    torch.save(build_network(entry, entry.default_layer).state_dict(), tmp_path / "some.pt")
    code, _, err = capvid("convert", tmp_path / "some.pt", "-o", tmp_path / "some.safetensors")
    assert code == 0
    expected = f"warning: googlenet takes only the file with sha256 {entry.sha256}"
    if name == "x3d-xs":
        expected = "warning: x3d-xs takes other weights (23"
    assert expected in err


@pytest.mark.slow
def test_pytorchvideos_x3d(capvid: Run, tmp_path: Path) -> None:
    torch.save({"model_state": random_checkpoint(efficient=False)}, tmp_path / "X3D_XS.pyth")
    code, out, err = capvid("convert", tmp_path / "X3D_XS.pyth", "--as", "x3d-xs")
    path = tmp_path / "x3d_xs_kinetics400.safetensors"
    assert (code, out) == (0, f"{path}\n") and len(load_file(path)) == 234
    assert err.startswith(f"{path}: 234 tensors of x3d-xs, sha256 ") and "left out" not in err


def test_help_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from capvid.cli.app import run\n"
        "try:\n    run(['convert', '--help'])\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'timm', 'transformers', 'safetensors') if m in sys.modules])"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout.splitlines()[-1] == "[]"


def test_a_checkpoint_that_holds_itself(capvid: Run, tmp_path: Path) -> None:
    content: dict[str, object] = {"weight": torch.zeros(2)}
    content |= {"model": content, "net": {"state_dict": content}}
    torch.save(content, tmp_path / "cyclic.pt")
    code, out, err = capvid("convert", tmp_path / "cyclic.pt")
    assert (code, out) == (2, "") and "cyclic.pt: fits no backbone" in err and err.count("\n") == 1
