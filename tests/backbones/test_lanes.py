from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from capvid.backbones.backbone import load_backbone, start_threads

CPU = torch.device("cpu")


@pytest.mark.parametrize(("cores", "concurrency", "cores_each"), [(1, 1, 1), (2, 2, 1), (16, 8, 2)])
def test_threads_share_the_cores(cores: int, concurrency: int, cores_each: int) -> None:
    backbone = dataclasses.replace(load_backbone("colour-grid"), threads=cores)
    assert backbone.concurrency == concurrency
    pool = start_threads(CPU, cores, concurrency)
    barrier = threading.Barrier(concurrency)

    def get_cores() -> int:
        barrier.wait(timeout=30)  # passed only if all threads run concurrently
        return torch.get_num_threads()

    futures = [pool.submit(get_cores) for _ in range(concurrency)]
    assert [future.result() for future in futures] == [cores_each] * concurrency


def test_other_threads_keep_their_number_of_cores() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        start_threads.__wrapped__(CPU, 2, 2)
        counts = [torch.get_num_threads()]
        other = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert counts == [3, 3]
    finally:
        torch.set_num_threads(before)


def test_futures_raise_the_errors_of_calls() -> None:
    def fail() -> None:
        raise ValueError("error in a layer")

    pool = start_threads(CPU, 2, 2)
    assert start_threads(CPU, 2, 2) is pool
    with pytest.raises(ValueError, match="error in a layer"):
        pool.submit(fail).result()
    assert pool.submit(lambda: 3).result() == 3
