"""Settings of torch that belong to a process reach runners and the process that reads the data."""

from __future__ import annotations

import random
import warnings
import zlib

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.utils import deterministic

import accelmgr
from accelmgr._process import torch_settings as _settings

LEFT_OUT = {
    "get_autocast_cpu_dtype": "an older name of what autocast has",
    "get_autocast_dtype": "part of autocast",
    "get_autocast_gpu_dtype": "an older name of what autocast has",
    "get_autocast_ipu_dtype": "there is no such device",
    "get_autocast_xla_dtype": "runners.autocast says it",
    "get_default_device": "sent",
    "get_default_dtype": "sent",
    "get_deterministic_debug_mode": "sent",
    "get_device": "of a tensor",
    "get_device_module": "no setting",
    "get_file_path": "no setting",
    "get_float32_matmul_precision": "sent",
    "get_num_interop_threads": "can be set only before the first operation of a process",
    "get_num_threads": "sent where the user has set it",
    "get_rng_state": "seed_base and the data position say it",
}
BACKENDS = {
    "cpu": "a fact",
    "cuda": "sdp, matmul; libraries are chosen by torch: preferred_linalg_library needs a GPU",
    "cudnn": "sent",
    "cusparselt": "a fact",
    "kleidiai": "a fact",
    "m": "torch.backends itself",
    "mha": "sent",
    "miopen": "of ROCm, on which there are no runners",
    "mkl": "a fact",
    "mkldnn": "sent",
    "mps": "a fact",
    "nnpack": "only for a phone's CPU",
    "openmp": "a fact",
    "opt_einsum": "sent",
    "quantized": "sent",
}


def test_every_setting_of_torch_is_sent_or_left_out_with_a_reason():
    getters = {name for name in dir(torch) if name.startswith("get_")}
    assert getters <= set(LEFT_OUT), getters - set(LEFT_OUT)
    parts = {name for name in dir(torch.backends) if type(getattr(torch.backends, name)).__module__ == "torch.backends"}
    parts |= {name for name in dir(torch.backends) if hasattr(getattr(torch.backends, name), "is_available")}
    assert parts <= set(BACKENDS), parts - set(BACKENDS)
    former = {"float32 matmul precision", "flush denormal", "print options", "cudnn.benchmark"}
    assert former <= _settings.current().keys() & RANDOM.keys(), "they are sent, and changed at random"


class Probe(torch.nn.Module):
    """Its scalars are settings of the runner."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> dict[str, object]:
        return {
            "loss": (self.weight * x).sum(),
            "bits": float(torch.finfo(torch.get_default_dtype()).bits),
            "deterministic": float(torch.get_deterministic_debug_mode()),
            "fills": float(deterministic.fill_uninitialized_memory),
            "anomaly": float(torch.is_anomaly_enabled()),
            "flash": float(torch.backends.cuda.flash_sdp_enabled()),
            "filters": float(any(entry[2] is FutureWarning and entry[0] == "error" for entry in warnings.filters)),
            "half": float((torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16),
            "data": seen.double().mean(),
        }


class Rows:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(2, dtype=torch.float32), "seen": torch.tensor(torch.get_default_dtype().itemsize)}


@pytest.fixture
def former():
    values = _settings.current()
    torch.set_deterministic_debug_mode(0)  # Another test of this process may have set it.
    yield
    torch.set_deterministic_debug_mode(0)
    deterministic.fill_uninitialized_memory = True
    for name, value in values.items():
        if name not in ("deterministic algorithms", "threads") and value is not None:
            _settings.SETTINGS[name].write(value)


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_they_hold_in_runners_at_the_start_and_when_they_change(former, method):
    torch.set_default_dtype(torch.float64)
    with accelmgr.Manager(Probe(), Rows(), nprocs=1, batch_size_per_device=1, start_method=method) as manager:
        first = dict(manager.step().scalars)
        assert (first["bits"], first["data"], first["flash"]) == (64, 8, 1)
        assert (first["deterministic"], first["fills"]) == (1, 0), "as `deterministic` of the configuration is"
        torch.set_default_dtype(torch.float32)
        torch.backends.cuda.enable_flash_sdp(False)
        torch.use_deterministic_algorithms(True)
        with torch.autograd.detect_anomaly(check_nan=False), warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                second = dict(manager.step().scalars)
        third = dict(manager.step().scalars)
    names = ("bits", "flash", "deterministic", "fills", "anomaly", "filters", "half")
    assert tuple(second[name] for name in names) == (32, 0, 2, 1, 1, 1, 1)
    assert (third["anomaly"], third["filters"], third["half"]) == (0, 0, 0)


RANDOM: dict[str, list[object]] = {
    name: [True, False] for name, value in _settings.current().items() if isinstance(value, bool)
}
RANDOM |= {
    "default dtype": [torch.float32, torch.float64],
    "float32 matmul precision": ["highest", "high", "medium"],
    "deterministic algorithms": [(1, False), (1, True), (2, False), (2, True)],
    "anomaly detection": [(True, True), (True, False), (False, True)],
    "cudnn.benchmark_limit": [0, 7],
    "opt_einsum.strategy": ["auto", "greedy"],
    "print options": [dict(vars(torch._tensor_str.PRINT_OPTS)) | {"precision": precision} for precision in (3, 9)],
}


def digest() -> float:
    """Of all settings that RANDOM changes."""
    found = _settings.current()
    return float(zlib.crc32(repr([(name, found.get(name)) for name in sorted(RANDOM)]).encode()))


class Digest(Probe):
    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> dict[str, object]:
        return {"loss": (self.weight * x).sum(), "digest": digest()}


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(seed=st.integers(0, 10_000), method=st.sampled_from(["forkserver", "fork"]))
def test_any_settings_reach_a_runner_with_the_next_step(former, seed, method):
    rng = random.Random(seed)

    def change() -> None:
        for name in rng.sample(sorted(RANDOM), 6):
            if name in _settings.SETTINGS:
                _settings.SETTINGS[name].write(rng.choice(RANDOM[name]))

    torch.set_deterministic_debug_mode(1)  # As `deterministic` of the configuration is: a runner has at least that.
    change()
    with accelmgr.Manager(Digest(), Rows(), nprocs=1, batch_size_per_device=1, start_method=method) as manager:
        for _ in range(12):
            assert manager.step().scalars["digest"] == digest()
            change()


def test_a_runner_has_no_more_threads_than_the_host_has_set(monkeypatch):
    class Threads(Probe):
        def forward(self, x: torch.Tensor, seen: torch.Tensor) -> dict[str, object]:
            return {"loss": (self.weight * x).sum(), "threads": float(torch.get_num_threads())}

    monkeypatch.setattr(_settings, "_usual", {2, 4})
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with accelmgr.Manager(Threads(), Rows(), nprocs=1, batch_size_per_device=1) as manager:
            assert manager.step().scalars["threads"] == 1
    finally:
        torch.set_num_threads(before)
