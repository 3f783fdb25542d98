# Runs in: the host.
"""Memory that is a file's: np.memmap, torch.load(mmap=True). Reading it may wait for a disk."""

from __future__ import annotations

import bisect
from collections.abc import Iterable


def are_of_files(addresses: Iterable[int]) -> list[bool]:
    """Whether this process has mapped a file there."""
    with open("/proc/self/maps") as lines:
        fields = [line.split(maxsplit=5) for line in lines]
    ends = [[int(end, 16) for end in each[0].split("-")] for each in fields]
    begins = [begin for begin, _ in ends]

    def is_of_file(address: int) -> bool:
        number = bisect.bisect_right(begins, address) - 1
        return address < ends[number][1] and fields[number][4] != "0"

    return list(map(is_of_file, addresses))
