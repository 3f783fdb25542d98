"""Parameters keep their order in memory: transposed and channels_last ones are as in plain PyTorch, everywhere."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file
from saving import save
from services import Service
from torch import nn

import accelmgr

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """A channels_last convolution, and a transposed weight. `taken` takes what forward() sees of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.weight = nn.Parameter(torch.randn(5, 144).t())
        self.register_buffer("seen", torch.zeros(3, 4, dtype=torch.int64))
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row, tensor in zip(self.seen, self.parameters(), strict=True):
            row[: tensor.dim()] = torch.tensor(tensor.stride())
        hidden = self.conv(x.contiguous(memory_format=torch.channels_last)).relu()
        return (hidden.flatten(1) @ self.weight).square().mean()


DATA = list(torch.randn(400, 3, 8, 8, generator=torch.Generator().manual_seed(3)))
ONE = {"nprocs": 1, "batch_size_per_device": 4, "runners__threads": 1}


def made() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = Net()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def plain(steps: int) -> Net:
    model, optimizer = made()
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.stack(DATA[4 * step : 4 * step + 4])).backward()
        optimizer.step()
    return model


def train(manager: accelmgr.Manager, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        assert manager.step().ok
        with manager.writing():
            optimizer.step()


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    for tensors_of in (nn.Module.state_dict, lambda model: [parameter.grad for parameter in model.parameters()]):
        torch.testing.assert_close(tensors_of(model), tensors_of(expected), rtol=0, atol=0, check_stride=True)


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_parameters_and_gradients_keep_their_strides(start_method):
    model, optimizer = made()
    with accelmgr.Manager(model, DATA, **ONE, start_method=start_method) as manager:
        train(manager, optimizer, 3)
        assert_same(model, plain(3))
    assert_same(model, plain(3))


def test_a_checkpoint_has_values_by_shape_and_training_goes_on_as_before(tmp_path):
    options = {**ONE, "checkpoint__directory": str(tmp_path)}
    model, optimizer = made()
    with accelmgr.Manager(model, DATA, **options) as manager:
        train(manager, optimizer, 2)
        written = save(manager, optimizer=optimizer, tensors={"mean": model.conv.weight * 2})
    saved = load_file(f"{written.path}/model.safetensors")
    gradients = load_file(f"{written.path}/training.safetensors")
    for name, parameter in plain(2).named_parameters():
        assert torch.equal(saved[name], parameter) and torch.equal(gradients[f"gradients/{name}"], parameter.grad)

    model, optimizer = made()
    with accelmgr.Manager(model, DATA, **options, checkpoint__resume="latest") as manager:
        assert torch.equal(dict(manager.resumed.tensors)["mean"], plain(2).conv.weight * 2)
        manager.restore(optimizer=optimizer)
        train(manager, optimizer, 1)
        assert_same(model, plain(3))
        assert optimizer.state[model.weight]["exp_avg"].stride() == model.weight.stride()

    row_major = copy.deepcopy(model)
    for parameter in row_major.parameters():
        parameter.data = torch.zeros(parameter.shape)
    with accelmgr.Manager(row_major, DATA, **options, checkpoint__resume="latest") as manager:
        for one, other in zip(manager.parameters(), plain(2).parameters(), strict=True):
            assert one.is_contiguous() and torch.equal(one, other)


def test_rounded_copies():
    """Runners with parameters of other bits. Several runners are in test_autograd_features.py (channels_last)."""
    model, _ = made()
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    with accelmgr.Manager(model, DATA, **ONE, runners__parameters="bf16") as manager:
        assert manager.step().ok
        rounded(torch.stack(DATA[:4]).to(torch.bfloat16)).backward()
        for one, other in zip(model.parameters(), rounded.parameters(), strict=True):
            assert one.grad.stride() == one.stride()
            torch.testing.assert_close(one.grad, other.grad.float(), rtol=0.1, atol=0.01)


def test_parameters_over_one_transposed_memory(tmp_path):
    """Neither is row-major. They share it after the start, in runners, and after going on from a checkpoint."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).t()
            self.whole, self.part = nn.Parameter(whole), nn.Parameter(whole[:, 2:4])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x[:, 0, 0, :4] @ self.whole).square().mean() + self.part.square().sum()

    model, other = Tied(), Tied()
    other(torch.stack(DATA[:4])).backward()
    options = {**ONE, "checkpoint__directory": str(tmp_path)}
    with accelmgr.Manager(model, DATA, **options) as manager:
        assert manager.step().ok
        for one, expected in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one.grad, expected.grad) and one.grad.stride() == expected.grad.stride()
        with manager.writing(), torch.no_grad():
            model.part.fill_(5)
        assert (model.whole[:, 2:4] == 5).all()
        manager.save_checkpoint()
    with accelmgr.Manager(Tied(), DATA, **options, checkpoint__resume="latest") as manager:
        whole, part = manager.parameters()
        assert torch.equal(whole, model.whole) and torch.equal(part, model.part)


class Expanded(nn.Module):
    """A frozen parameter of 8 MiB, and a buffer of as much, which have 4 bytes and 4 KiB of memory."""

    def __init__(self, expanded: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        if expanded:
            self.scale = nn.Parameter(torch.full((1,), 2.0).expand(2048, 1024), requires_grad=False)
            self.register_buffer("table", torch.arange(1024.0).expand(2048, 1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = (self.scale + self.table)[-1, :3] if hasattr(self, "scale") else 1
        return (self.weight * x * scale).square().mean()


ROWS = [torch.ones(3)] * 100


def session_bytes(model: nn.Module) -> int:
    with accelmgr.Manager(model, ROWS, nprocs=2) as manager:
        assert manager.step().ok
        return manager.statistics().session_bytes


def test_expanded_tensors_take_the_memory_of_their_storage_once():
    assert session_bytes(Expanded()) - session_bytes(Expanded(expanded=False)) < 1 << 17


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_expanded_tensors_stay_so(tmp_path, start_method):
    model, other = Expanded(), Expanded()
    scale, table = other.scale, other.table
    loss = other(ROWS[0])
    loss.backward()
    options = {"nprocs": 1, "checkpoint__directory": str(tmp_path), "start_method": start_method}
    with accelmgr.Manager(model, ROWS, **options) as manager:
        assert manager.step(accumulate=False).loss == loss.item()
        assert torch.equal(model.weight.grad, other.weight.grad)
        for one, expected in ((model.scale, scale), (model.table, table)):
            assert one.stride() == expected.stride() and torch.equal(one, expected)
        written = save(manager)
        with pytest.raises(accelmgr.ModelError, match="'scale' is expanded"):
            manager.update_model_parameters([model.weight, torch.arange(2048.0 * 1024).view(2048, 1024)])
        manager.update_model_parameters([model.weight, torch.full((2048, 1024), 3.0)])
        assert manager.step(accumulate=False).loss == ((3 + torch.arange(3.0)).square().mean()).item()
        model.scale.requires_grad_(True)
        with pytest.raises(accelmgr.UsageError, match="'scale' is expanded"):
            manager.step()
        model.scale.requires_grad_(False)
    assert model.scale.stride() == (0, 0) and (model.scale == 3).all()
    saved = load_file(f"{written.path}/model.safetensors")
    assert torch.equal(saved["scale"], scale) and torch.equal(saved["table"], table)
    with accelmgr.Manager(Expanded(), ROWS, **options, checkpoint__resume="latest") as manager:
        assert manager.step(accumulate=False).loss == loss.item()


def data() -> list[torch.Tensor]:
    return DATA


SERVICE = """\
nprocs: 2
batch_size_per_device: 2
runners: {threads: 1}
model: {kind: python, factory: 'test_strides:Net'}
data: {kind: python, factory: 'test_strides:data'}
"""


def test_hosts_and_observers_of_a_service_have_values_by_shape(tmp_path):
    with Service(tmp_path, SERVICE) as service:
        with accelmgr.attach(service.socket) as manager:
            assert manager.step().ok
            written = [torch.arange(one.numel(), dtype=one.dtype).view(one.shape) for one in manager.parameters()]
            manager.update_model_parameters(written)
        with accelmgr.observe(service.socket) as observer:
            seen = observer.parameters(timeout=120).tensors
        for one, expected, strides in zip(seen.values(), written, Net().parameters(), strict=True):
            assert torch.equal(one, expected) and one.stride() == strides.stride()
