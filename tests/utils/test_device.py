from __future__ import annotations

import pytest
import torch

from capvid.errors import UsageError
from capvid.utils.device import resolve_device


def cuda(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def mps(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: there)


@pytest.mark.parametrize(
    ("gpus", "apple", "device"), [(1, False, "cuda"), (1, True, "cuda"), (0, True, "mps"), (0, False, "cpu")]
)
def test_auto(gpus: int, apple: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda(monkeypatch, gpus)
    mps(monkeypatch, apple)
    assert resolve_device("auto") == torch.device(device)


def test_named_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda(monkeypatch, 2)
    mps(monkeypatch, True)
    for name in ("cpu", "cuda", "cuda:1", "mps"):
        assert str(resolve_device(name)) == name


@pytest.mark.parametrize(
    "name", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "mps:0", "CUDA", "cuda:2"]
)
def test_no_such_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda(monkeypatch, 2)
    mps(monkeypatch, True)
    with pytest.raises(UsageError, match=f"^{name}: no such"):
        resolve_device(name)


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "mps"])
def test_devices_that_are_not_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda(monkeypatch, 0)
    mps(monkeypatch, False)
    with pytest.raises(UsageError, match="use --device cpu"):
        resolve_device(name)
