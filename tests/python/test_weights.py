"""Models that are made on the meta device, with values from safetensors files; and what memory a start takes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import descendants
from torch import nn

import accelmgr

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

WIDTH, LAYERS = 4096, 16
GIB = WIDTH * WIDTH * 4 * LAYERS


class Chain(nn.Module):
    """Of 1 GiB, of which the last layer is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.layers[:-1].requires_grad_(False)
        self.register_buffer("scale", torch.ones((), device="cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers[-1](x) * self.scale).square().mean()  # The others would take seconds.


def on_meta() -> Chain:
    with torch.device("meta"):
        return Chain()


def value(layer: int) -> float:
    return 1e-3 * (layer + 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    for part in range(4):
        layers = range(part * LAYERS // 4, (part + 1) * LAYERS // 4)
        tensors = {f"layers.{i}.weight": torch.full((WIDTH, WIDTH), value(i)) for i in layers}
        safetensors.save_file(tensors, folder / f"model-{part}.safetensors")
    return folder


def taken() -> int:
    """Memory of these processes that cannot be read again from a file, in bytes.

    Shared memory is looked at first: what moves there meanwhile is left out, and nothing counts twice.
    """
    shared, kib = {}, 0
    for pid in (os.getpid(), *descendants()):
        try:
            found = [entry.stat() for entry in Path(f"/proc/{pid}/fd").iterdir() if "memfd:" in os.readlink(entry)]
        except OSError:
            continue  # It has ended, or has closed one meanwhile.
        shared |= {(file.st_dev, file.st_ino): file.st_blocks * 512 for file in found}
    for pid in (os.getpid(), *descendants()):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        kib += sum(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:"))
    return kib * 1024 + sum(shared.values())


def peak_of(body: Callable[[], None]) -> int:
    """What `body` takes more than was taken before, at the most."""
    before = most = taken()
    ended = threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.is_set():
            try:
                most = max(most, taken())
            except OSError:  # A process ended meanwhile.
                pass

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        body()
    finally:
        ended.set()
        thread.join()
    return most - before


ONE = {"nprocs": 1, "batch_size_per_device": 1, "runners__threads": 1}


def run(model: object, **options: object) -> None:
    with accelmgr.Manager(model, [torch.ones(WIDTH)] * 2, **ONE, **options) as manager:
        manager.step().raise_for_status()
        for i, layer in enumerate(manager.model.layers):
            assert layer.weight[0, 0] == value(i) and layer.weight[-1, -1] == value(i)


def own_memory() -> int:
    """What processes take that have no model to speak of."""

    def small() -> None:
        with accelmgr.Manager(nn.Linear(WIDTH, 1), [torch.ones(WIDTH)] * 2, **ONE) as manager:
            manager.step().raise_for_status()

    small()  # So that this process has imported all that it needs.
    return peak_of(small)


def test_weights_from_files_are_once_in_memory(folder):
    """The gradient of the last layer and its slab take 1/8 beside the parameters; 1/8 is left for all else."""
    own = own_memory()
    peak = peak_of(lambda: run(on_meta, weights=folder / "*.safetensors")) - own
    assert GIB <= peak <= GIB * 1.3, peak / GIB


def test_a_model_with_values_is_not_held_twice_while_a_manager_starts(folder):
    model = Chain()
    with torch.no_grad():
        for i, layer in enumerate(model.layers):
            layer.weight.fill_(value(i))
    own = own_memory()
    peak = peak_of(lambda: run(model)) - own
    assert peak <= GIB * 0.4, peak / GIB


class Tied(nn.Module):
    """Its table occurs under two names; files have one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.head.weight = self.table.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(index)).square().sum()


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_names_shapes_and_dtypes(tmp_path, start_method):
    def make() -> Tied:
        with torch.device("meta"):
            return Tied()

    torch.manual_seed(1)
    tensors = {"head.weight": torch.randn(5, 3).bfloat16(), "head.bias": torch.randn(5)}
    safetensors.save_file(tensors, tmp_path / "a.safetensors")
    options = {**ONE, "start_method": start_method, "weights": [tmp_path / "a.safetensors"]}
    with accelmgr.Manager(make, [torch.tensor(i) for i in range(4)], **options) as manager:
        assert manager.model.table.weight is manager.model.head.weight
        assert torch.equal(manager.model.table.weight, tensors["head.weight"].float())
        manager.step().raise_for_status()
        plain = Tied()
        plain.load_state_dict({**tensors, "table.weight": tensors["head.weight"]})
        plain(torch.tensor([0])).backward()
        assert torch.equal(manager.model.head.bias.grad, plain.head.bias.grad)
    wrong = {
        "'head.weight' of '.*b.safetensors' has the shape \\[3, 5\\]; the model has \\[5, 3\\]": {
            "head.weight": torch.ones(3, 5),
            "head.bias": torch.ones(5),
        },
        "no file has the parameter 'head.bias', \\[5\\]": {"head.weight": torch.ones(5, 3)},
        "1 tensors that the model does not have: more": {**tensors, "more": torch.ones(1)},
    }
    for text, content in wrong.items():
        safetensors.save_file(content, tmp_path / "b.safetensors")
        with pytest.raises(accelmgr.ModelError, match=text):
            accelmgr.Manager(make, [torch.tensor(0)], **{**options, "weights": str(tmp_path / "b*")})
    (tmp_path / "c").write_bytes(b"no weights")
    with pytest.raises(accelmgr.ModelError, match="'.*c' cannot be read"):
        accelmgr.Manager(make, [torch.tensor(0)], **{**options, "weights": str(tmp_path / "c")})
    with pytest.raises(accelmgr.ConfigError, match="no file '.*d'"):
        accelmgr.Manager(make, [torch.tensor(0)], **{**options, "weights": str(tmp_path / "d")})
    with pytest.raises(accelmgr.ConfigError, match="weights needs a function"):
        accelmgr.Manager(Tied(), [torch.tensor(0)], **options)


def test_buffers_on_the_meta_device_are_refused(tmp_path):
    def make() -> nn.Module:
        with torch.device("meta"):
            return nn.BatchNorm1d(2)

    safetensors.save_file({"weight": torch.ones(2), "bias": torch.ones(2)}, tmp_path / "a")
    with pytest.raises(accelmgr.ModelError, match="buffer 'running_mean' is on the meta device"):
        accelmgr.Manager(make, [torch.ones(2)], weights=tmp_path / "a")
