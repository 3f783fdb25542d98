"""Models that nobody here wrote, on the fake CUDA device of cuda_runners.py: gradients are those of the CPU."""

from __future__ import annotations

from cuda_runners import start
from device_architectures import check_ten_architectures


def test_ten_architectures_of_transformers():
    check_ten_architectures(start, steps=3, grad_accumulation_steps=2)
