"""Tensors on GPUs over NCCL, from Python, with ranks that are processes: fakes take the place of CUDA and NCCL.

Tensors of the CPU stand for those of a GPU.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch
from cuda_runners import LIBRARY
from test_distributed import error_of, ranks
from test_distributed_devices import Gpus

from accelmgr import _native, distributed
from accelmgr.distributed import _devices


class FakeGpus(Gpus):
    """A GPU whose memory is that of this process, and a stream there."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        os.environ["FAKE_CUDA_BUS"] = str(rank)
        self.runtime = ctypes.CDLL(str(LIBRARY))
        self.runtime.fake_cuda_start(0, ctypes.c_uint64(rank))
        stream = ctypes.c_void_p()
        assert self.runtime.cudaStreamCreateWithFlags(ctypes.byref(stream), 1) == 0
        self._stream = int(stream.value or 0)
        _native.dist_use_device_libraries(str(LIBRARY), str(LIBRARY))
        _devices.devices = self

    def place_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        return 0, self._stream


def _over_nccl(rank: int) -> list[Any]:
    gpus = FakeGpus(rank)
    own = gpus.mark(torch.tensor([1.0, 2, 3, 4]) * (rank + 1))
    found = [distributed.all_gather(own), distributed.reduce_scatter(own)]
    found.append(distributed.all_gather(gpus.mark(torch.tensor([rank == 0, True]))))
    group = distributed.new_group([0, 1])
    found.append(distributed.reduce_scatter(own, group=group))
    found += [distributed.all_reduce(own), distributed.all_to_all(own), distributed.broadcast(own, src=1)]
    assert all(gpus.has(tensor) for tensor in found)
    assert gpus.copies == 0 and gpus.runtime.fake_nccl_sums() == 2  # Nothing went through CPU memory.
    assert error_of(lambda: distributed.all_gather(gpus.mark(torch.ones(1 + rank))))[0] == "CollectiveError"
    distributed.finalize()
    return [tensor.tolist() for tensor in found]


def test_tensors_on_gpus_go_over_nccl() -> None:
    for rank, (gathered, block, flags, of_group, total, parts, sent) in enumerate(ranks(_over_nccl, backend="auto")):
        assert gathered == [1, 2, 3, 4, 2, 4, 6, 8]
        assert block == of_group == [[3, 6], [9, 12]][rank]
        assert flags == [True, True, False, True]
        assert total == [3, 6, 9, 12]
        assert parts == [[1, 2, 2, 4], [3, 4, 6, 8]][rank]
        assert sent == [2, 4, 6, 8]
