from __future__ import annotations

import threading

import pytest
import torch

from capvid.backbones.backbone import Lanes, lanes

CPU = torch.device("cpu")


@pytest.mark.parametrize(("threads", "count", "each"), [(1, 1, 1), (2, 2, 1), (16, 8, 2)])
def test_cores_are_shared_out(threads: int, count: int, each: int) -> None:
    made = Lanes(CPU, threads)
    assert made.count == count
    together = threading.Barrier(count)

    def numbers() -> int:
        together.wait(timeout=30)  # only side by side do all of them come here
        return torch.get_num_threads()

    assert [future.result() for future in [made.submit(numbers) for _ in range(count)]] == [each] * count


def test_other_threads_keep_their_number_of_cores() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        Lanes(CPU, 2)
        found = [torch.get_num_threads()]
        other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert found == [3, 3]
    finally:
        torch.set_num_threads(before)


def test_errors_come_out_where_results_are_asked_for() -> None:
    def fail() -> None:
        raise ValueError("of a layer")

    assert lanes(CPU, 2) is lanes(CPU, 2)
    future = lanes(CPU, 2).submit(fail)
    with pytest.raises(ValueError, match="of a layer"):
        future.result()
    assert lanes(CPU, 2).submit(lambda: 3).result() == 3
