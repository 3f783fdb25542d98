"""Models that nobody here wrote, on XLA devices: gradients are those of the CPU."""

from __future__ import annotations

from device_architectures import check_ten_architectures
from device_runners import start


def test_ten_architectures_of_transformers():
    check_ten_architectures(start)
