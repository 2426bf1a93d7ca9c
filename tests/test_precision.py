"""Precisions without a fast path on the device are refused, and never chosen automatically."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from capvid.backbones import backbone as backbones
from capvid.backbones.backbone import load_backbone
from capvid.backbones.catalog import backbone_entry
from capvid.errors import UsageError
from capvid.training.optimization import bf16_in_hardware, wants_bf16
from capvid.utils import device as devices
from capvid.utils.device import check_precision, has_fast_path, layer_family

CPU = torch.device("cpu")


@pytest.fixture
def avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a CPU without AVX-512."""
    monkeypatch.setattr(devices.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")


def test_half_precision_is_refused_with_reason_and_remedy(avx2: None) -> None:
    for precision in ("bf16", "fp16"):
        with pytest.raises(UsageError, match="capvid-small: this processor has no instructions for") as error:
            load_backbone("capvid-small", precision=precision)
        assert "2D convolutions would take 20 times as long" in str(error.value)
        assert error.value.remedy == "use --precision fp32"
    assert load_backbone("capvid-small", precision="auto").dtype == torch.float32


def test_half_precisions_that_are_safe_are_taken_where_they_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    network, small = backbone_entry("x3d-xs"), backbone_entry("capvid-small")
    for fast, expected in (
        ((), (torch.float32, torch.float32)),
        ((torch.bfloat16,), (torch.bfloat16, torch.float32)),
        ((torch.bfloat16, torch.float16), (torch.float16, torch.float16)),
    ):
        monkeypatch.setattr(backbones, "has_fast_path", lambda dtype, device, fast=fast: dtype in fast)
        chosen = [backbones._choose_dtype("auto", entry, CPU, nn.Identity()) for entry in (network, small)]
        assert tuple(chosen) == expected


@pytest.mark.parametrize(
    ("module", "family"),
    [
        (nn.Conv3d(1, 1, 1), "3D convolutions"),
        (nn.Sequential(nn.Linear(1, 1), nn.Conv2d(1, 1, 1)), "2D convolutions"),
        (nn.Sequential(nn.LSTM(1, 1)), "LSTMs"),
        (nn.Linear(1, 1), "matrix products"),
    ],
)
def test_error_names_the_slow_layer_type(avx2: None, module: nn.Module, family: str) -> None:
    assert layer_family(module) == family
    check_precision(torch.float32, CPU, module, remedy="none")
    with pytest.raises(UsageError, match=f"for bfloat16, and {family} would take"):
        check_precision(torch.bfloat16, CPU, module, remedy="none")


def test_training_refuses_bf16_and_never_chooses_it(avx2: None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.LSTM(2, 2)
    with pytest.raises(UsageError, match=r"use --set training\.precision=fp32"):
        wants_bf16("bf16", CPU, module)
    assert not wants_bf16("auto", CPU, module)
    assert not bf16_in_hardware(CPU)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert not wants_bf16("auto", CPU, module)


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"])
def test_environment_limits_on_instructions_are_respected(variable: str) -> None:
    code = "import torch; from capvid.utils.device import has_fast_path as fast; cpu = torch.device('cpu')\n"
    code += "print(fast(torch.float32, cpu), fast(torch.float16, cpu), fast(torch.bfloat16, cpu))"
    environment = {**os.environ, variable: "avx2", "PYTHONPATH": str(Path(__file__).parents[1])}
    completed = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    if devices.platform.machine() == "x86_64":
        assert completed.stdout == "True False False\n"


def test_full_precision_is_always_fast() -> None:
    assert has_fast_path(torch.float32, CPU) and has_fast_path(torch.float64, CPU)
