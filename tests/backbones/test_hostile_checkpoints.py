"""Checkpoints that ``capvid convert`` should refuse at once."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from capvid.backbones.catalog import backbone_entry
from capvid.backbones.conversion import _names, convert
from capvid.errors import CapvidError, WeightsError
from capvid.utils.tensor_files import read_tensors


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("exit 1",)


@pytest.mark.parametrize("kind", ["pickle", "tar", "legacy"])
def test_no_advice_to_unpickle_everything(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "evil.tar"
    data = pickle.dumps(_Evil())
    if kind == "pickle":
        path.write_bytes(data)
    else:
        with tarfile.open(path, "w") as tar:
            for name in ("pickle",) if kind == "tar" else ("sys_info", "pickle", "storages", "tensors"):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    with pytest.raises(WeightsError) as raised:
        convert(path)
    message = str(raised.value)
    assert "weights_only" not in message and "torch.load" not in message and "nothing else is ever" in message


def test_many_tensors(tmp_path: Path) -> None:
    path = tmp_path / "many.safetensors"
    save_file({f"part{n}.conv1.weight": np.zeros(0, np.float32) for n in range(60_000)}, path)
    begun = time.monotonic()
    with pytest.raises(WeightsError, match="60000 tensors, more than any network has"):
        convert(path)
    assert time.monotonic() - begun < 30


def test_as_many_prefixes_as_tensors() -> None:
    wanted = [f"layer{n}.conv1.weight" for n in range(300)]
    names = [f"part{n}.{wanted[n % 3]}" for n in range(20_000)] + [f"module.{name}" for name in wanted]
    begun = time.monotonic()
    found = _names(backbone_entry("resnet50"), names, wanted)
    assert found == {name: f"module.{name}" for name in wanted}
    assert time.monotonic() - begun < 30


def test_what_is_no_regular_file_or_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.pth")
    for path in (tmp_path / "pipe.pth", Path("/dev/zero")):
        with pytest.raises(WeightsError, match="not a regular file"):
            convert(path)
    with pytest.raises(WeightsError):
        read_tensors(tmp_path)
    with (tmp_path / "sparse.safetensors").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(WeightsError, match="more than weights may"):
        convert(tmp_path / "sparse.safetensors")


def test_a_zip_file_that_unpacks_to_much(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"x")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"\x01\x00\x00\x00\x10\x00", b"\xf0\xff\xff\xff\x10\x00"))
    with pytest.raises(CapvidError, match="more than weights may"):
        convert(path)
