"""Parameters of every dtype, alone, mixed and frozen, against plain autograd."""

from __future__ import annotations

import copy

import pytest
import torch
from differential import Bundle, Case, Shape, bundle_of, compare, spread, started
from saving import save
from torch import nn

import accelmgr

pytest.importorskip("expecttest", reason="torch.testing's own tests need expecttest")
from torch.testing._internal.common_modules import module_db

REAL = [torch.float64, torch.bfloat16, torch.float16]


def modules(dtype: torch.dtype) -> Bundle:
    """Modules of torch's own tests, with one of their inputs."""

    def cases():
        for info in module_db:
            if info.is_lazy:
                continue
            torch.manual_seed(0)
            try:
                inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=True)
            except (RuntimeError, NotImplementedError):
                continue  # torch has no such input of the dtype.
            for number, one in enumerate(spread([one for one in inputs if one.forward_input], 2)):
                torch.manual_seed(1)
                module = info.module_cls(*one.constructor_input.args, **one.constructor_input.kwargs)
                case = Case(module.to(dtype).train(), one.forward_input.args, one.forward_input.kwargs)
                yield f"{info.formatted_name}_{number}", case

    return bundle_of(cases())[0]


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_modules_of_torch(dtype):
    bundle = modules(dtype)
    assert len(bundle.cases) >= 130
    assert {parameter.dtype for parameter in bundle.parameters()} == {dtype}
    compare(bundle, shape=Shape(runners=2, accumulation=2), accumulate=(True, True, False), kills=True)


class Complex(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(6, 5, dtype=dtype), nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 3, 3, dtype=dtype), nn.Flatten()
        )
        self.free = nn.Parameter(torch.randn(9, dtype=dtype))

    def forward(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(2, 6, dtype=self.free.dtype, generator=generator)
        y = self.layers(x) * self.free.conj() + torch.fft.fft(self.free)
        return (y.abs().square().sum() + y.imag.sum()).float()


class Linear(nn.Module):
    """Of 16 bits or more, with a tied weight, and one parameter that takes no part."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one, self.other = nn.Linear(7, 7, dtype=dtype), nn.Linear(7, 7, dtype=dtype)
        self.other.weight = self.one.weight
        self.unused = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, index: int) -> torch.Tensor:
        x = torch.linspace(-1, 1, 7).mul(index + 1).to(self.unused.dtype)
        return self.other(torch.tanh(self.one(x))).square().sum()


class Int8(nn.Module):
    """A linear layer whose weight is int8 with a scale for each row, and frozen; an adapter of float32 is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.weight = nn.Parameter(torch.randint(-128, 127, (6, 5), dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(6, 1, dtype=torch.bfloat16) / 100, requires_grad=False)
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, index: int) -> torch.Tensor:
        x = torch.linspace(-1, 1, 5) * (index + 1)
        return (x @ (self.weight.float() * self.scale).T + self.up(self.down(x))).square().sum()


class Int4(nn.Module):
    """Two numbers of four bits in a byte."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.packed = nn.Parameter(torch.randint(0, 256, (8, 3), dtype=torch.uint8), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(8, dtype=torch.float16))

    def forward(self, index: int) -> torch.Tensor:
        weight = torch.stack([self.packed & 15, self.packed >> 4], 2).flatten(1).half() - 8
        x = (torch.linspace(-1, 1, 6) * (index % 3)).half()
        return torch.nn.functional.linear(x, weight, self.bias).float().square().sum() / 64


class Quantized(torch.Tensor):
    """A matrix of int8 with a scale for each row, as one tensor with others inside. torchao's are made like this."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, _context, _size, _stride) -> Quantized:
        return Quantized(inner["values"], inner["scale"])

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            x, weight, bias = args
            return nn.functional.linear(x, weight.values * weight.scale, bias)
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default):
            return Quantized(function(args[0].values), function(args[0].scale))
        raise NotImplementedError(function)


class OfQuantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.layer, self.head = nn.Linear(6, 5), nn.Linear(5, 1)
        values, scale = torch.randint(-128, 127, (5, 6), dtype=torch.int8), torch.rand(5, 1) / 100
        self.layer.weight = nn.Parameter(Quantized(values, scale), requires_grad=False)

    def forward(self, index: int) -> torch.Tensor:
        return self.head(self.layer(torch.linspace(-1, 1, 6) * (index + 1))).sum()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def step_of_two(manager: accelmgr.Manager, plain: nn.Module, elements: list[torch.Tensor], step: int) -> None:
    """Checks that gradients are those of plain PyTorch, and there for the same parameters."""
    manager.zero_grad()
    manager.step().raise_for_status()
    plain.zero_grad()
    for rank in range(2):
        (plain(int(elements[2 * step + rank])) / 2).backward()
    for own, other in zip(trained(manager.model), trained(plain), strict=True):
        assert own.grad is other.grad is None or torch.equal(own.grad, other.grad)


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_a_quantized_tensor_with_tensors_inside_is_frozen(start_method):
    model, plain = OfQuantized(), OfQuantized()
    elements = [torch.tensor(i) for i in range(8)]
    optimizers = [torch.optim.SGD(trained(each), lr=0.01) for each in (model, plain)]
    with started(model, elements, Shape(runners=2), start_method) as manager:
        for step in range(3):
            step_of_two(manager, plain, elements, step)
            for optimizer in optimizers:
                optimizer.step()
            if step == 1:  # Runners see what is written inside.
                for each in (model, plain):
                    each.layer.weight.values[0, 0] = 99
        assert isinstance(model.layer.weight, Quantized)
        assert isinstance(manager.state_dict()["layer.weight"], Quantized)
        assert {name for name, _ in manager.named_parameters()} >= {"layer.weight.values", "layer.weight.scale"}
    assert isinstance(model.layer.weight, Quantized)
    trains = OfQuantized()
    trains.layer.weight = nn.Parameter(Quantized(torch.ones(5, 6), torch.ones(5, 1)))
    with pytest.raises(accelmgr.ModelError, match=r"'layer.weight' is a Quantized and requires a gradient"):
        accelmgr.Manager(trains, elements)


def mixed() -> Bundle:
    kinds: dict[str, nn.Module] = {f"of_{str(dtype)[6:]}": Linear(dtype) for dtype in (torch.float32, *REAL)}
    kinds |= {f"of_{str(dtype)[6:]}": Complex(dtype) for dtype in (torch.complex64, torch.complex128)}
    kinds |= {"int8": Int8(), "int4": Int4()}
    frozen = {"bool": torch.tensor([True, False]), "float8": torch.ones(3).to(torch.float8_e4m3fn)}
    kinds["int8"].register_parameter("flags", nn.Parameter(frozen["bool"], requires_grad=False))
    kinds["int8"].register_parameter("float8", nn.Parameter(frozen["float8"], requires_grad=False))
    return Bundle(kinds)


@pytest.mark.parametrize("start_method", ["spawn", "forkserver", "fork"])
def test_one_model_of_all_dtypes(start_method):
    compare(mixed(), shape=Shape(runners=3, accumulation=2), start_method=start_method, kills=True)


def test_what_is_saved_is_what_was_there(tmp_path):
    """Checkpoints hold every dtype, with gradients and the optimizer's state."""
    options = {"checkpoint__directory": str(tmp_path), "checkpoint__resume": "latest"}
    model = mixed()
    elements = [torch.tensor(i) for i in range(8)]
    with started(model, elements, Shape(), "spawn", **options) as manager:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9)
        manager.step().raise_for_status()
        optimizer.step()
        save(manager, optimizer=optimizer)
        saved = copy.deepcopy([(p.detach(), p.grad) for p in model.parameters()])
        state = copy.deepcopy(optimizer.state_dict()["state"])
    again = mixed()
    with started(again, elements, Shape(), "spawn", **options) as manager:
        for parameter, (value, gradient) in zip(again.parameters(), saved, strict=True):
            assert torch.equal(parameter, value) if parameter.dtype.itemsize > 1 else True
            assert (parameter.grad is None) == (gradient is None or not gradient.any())
            if parameter.grad is not None:
                assert torch.equal(parameter.grad, gradient)
        optimizer = torch.optim.SGD([p for p in again.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
        manager.restore(optimizer=optimizer)
        for number, values in state.items():
            assert torch.equal(
                optimizer.state[optimizer.param_groups[0]["params"][number]]["momentum_buffer"],
                values["momentum_buffer"],
            )


@pytest.mark.parametrize("name", ["complex32", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"])
def test_what_torch_can_only_convert_is_saved_too(tmp_path, name):
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"torch {torch.__version__} has no {name}: older versions that are supported lack some")

    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.scale = nn.Parameter(torch.full((3,), scale).to(dtype), requires_grad=False)
            self.register_buffer("other", torch.full((3,), 2 * scale).to(dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * (self.scale.to(torch.complex64) * self.other.to(torch.complex64)).real * x).sum()

    def bits(model: nn.Module) -> list[torch.Tensor]:
        return [tensor.detach().view(torch.uint8) for tensor in (model.scale, model.other)]

    options = {"checkpoint__directory": str(tmp_path), "checkpoint__resume": "latest"}
    model, again = Scaled(2.0), Scaled(1.0)
    with started(model, [torch.ones(3)] * 8, Shape(), "fork", **options) as manager:
        manager.step().raise_for_status()
        assert model.weight.grad is not None and model.weight.grad.tolist() == [8.0] * 3
        save(manager)
    with started(again, [torch.ones(3)] * 8, Shape(), "fork", **options):
        assert all(map(torch.equal, bits(again), bits(model)))


def test_float32_gradients_of_16_bits():
    """`.grad` is a rounded copy; what is written there counts."""
    model = Linear(torch.bfloat16)
    plain = copy.deepcopy(model)
    elements = [torch.tensor(i) for i in range(12)]
    shape = Shape(runners=2)
    with started(model, elements, shape, "spawn", gradients__dtype="float32") as manager:
        sums: dict[str, torch.Tensor] = {}
        for step in range(2):
            manager.step().raise_for_status()
            for rank in range(2):
                plain.zero_grad()
                (plain(int(elements[2 * step + rank])).float() / 2).backward()
                for name, parameter in plain.named_parameters():
                    if parameter.grad is not None:
                        sums[name] = sums.get(name, 0) + parameter.grad.float()
            for (name, parameter), exact in zip(model.named_parameters(), manager.gradients32(), strict=True):
                if name not in sums:
                    assert parameter.grad is None and not exact.any()
                    continue
                assert exact.dtype is torch.float32 and torch.allclose(exact, sums[name], rtol=1e-6, atol=0)
                assert parameter.grad.dtype is torch.bfloat16 and torch.equal(parameter.grad, exact.bfloat16())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        clipped = model.one.bias.grad.clone()
        manager.get_aggregated_gradients()
        exact = dict(zip(dict(model.named_parameters()), manager.gradients32(), strict=True))
        assert torch.equal(exact["one.bias"], clipped.float())
        model.zero_grad(set_to_none=False)
        manager.get_aggregated_gradients()
        assert not any(gradient.any() for gradient in manager.gradients32())
        model.zero_grad()
        manager.step().raise_for_status()
        assert model.one.bias.grad.any()


@pytest.mark.parametrize("runners", [1, 2])
def test_runners_in_bfloat16_with_master_weights_in_float32(runners):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(6)
            self.layers = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.GELU(), nn.Linear(9, 2))
            self.layers[3].bias.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.dtype is self.layers[0].weight.dtype
            return self.layers(x).float().square().mean()

    model = Model()
    plain = copy.deepcopy(model)
    torch.manual_seed(7)
    rows = torch.randn(runners * 12, 6)
    options = {"batch_size_per_device": 3, "runners__parameters": "bf16"}
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, plain)]
    with started(model, list(rows), Shape(runners=runners), "spawn", **options) as manager:
        for step in range(3):
            manager.zero_grad()
            manager.step().raise_for_status()
            total: dict[str, torch.Tensor] = {}
            batch = rows[step * 3 * runners : (step + 1) * 3 * runners]
            for rank in range(runners):
                replica = copy.deepcopy(plain)
                for module in replica.layers:
                    if not isinstance(
                        module, nn.BatchNorm1d
                    ):  # Statistics stay in float32, and what they are used with.
                        for parameter in module.parameters():
                            parameter.data = parameter.data.bfloat16()
                (replica(batch[rank::runners].bfloat16()) / runners).backward()
                for name, parameter in replica.named_parameters():
                    if parameter.grad is not None:
                        total[name] = total.get(name, 0) + parameter.grad.float()
            for (name, parameter), own in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert parameter.dtype is torch.float32
                own.grad = total.get(name)
                assert (parameter.grad is None) == (own.grad is None)
                if own.grad is not None:
                    assert torch.equal(parameter.grad, own.grad), name
            for optimizer in optimizers:
                optimizer.step()


def test_a_parameter_that_is_unfrozen_gets_gradients_from_the_next_step_on():
    model, plain = Linear(torch.float32), Linear(torch.float32)
    elements = [torch.tensor(i) for i in range(9)]
    for each in (model, plain):
        each.one.weight.requires_grad_(False)
        each.other.bias.requires_grad_(False)
    with started(model, elements, Shape(runners=2), "spawn", runners__max_runners=3) as manager:
        before = manager.statistics().session_bytes
        for step in range(3):
            if step == 1:
                for each in (model, plain):
                    each.one.weight.requires_grad_(True)
            step_of_two(manager, plain, elements, step)
            assert all(own.grad is None for own in model.parameters() if not own.requires_grad)
        grown = manager.statistics().session_bytes - before
        assert grown == 3 * model.one.weight.nbytes  # In the master and in two slabs.
        manager.resize(3)
        manager.step().raise_for_status()


class Halves(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4, dtype=dtype), nn.Linear(4, 1, dtype=dtype)
        self.body.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drops", ["all", "some", "none"])
def test_what_was_dropped_before_a_layer_is_unfrozen_stays_dropped(dtype, drops):
    torch.manual_seed(0)
    model = Halves(dtype)
    plain = copy.deepcopy(model)
    elements = list(torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).to(dtype))
    with started(model, elements, Shape(), "forkserver", gradients__dtype="float32") as manager:
        for step, element in enumerate(elements[:3]):
            plain(element[None]).backward()
            manager.step().raise_for_status()
            for own, other in zip(model.parameters(), plain.parameters(), strict=True):  # Plain sums are rounded.
                torch.testing.assert_close(own.grad, other.grad, rtol=2e-2, atol=1e-2, msg=f"step {step}")
            for each in (model, plain):
                if drops == "all":
                    torch.optim.SGD(each.parameters(), lr=0.0).zero_grad()
                elif drops == "some":
                    each.head.bias.grad = None
                if step == 0:
                    each.body.requires_grad_(True)
                    each.body.weight.grad = torch.ones_like(each.body.weight)


class QuantizedByTorch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
        self.scale = nn.Parameter(torch.ones(4))
        self.table = nn.Parameter(torch.quantize_per_tensor(table, 0.1, 0, torch.qint8), requires_grad=False)
        steps = torch.full((4,), 0.1)
        self.register_buffer("other", torch.quantize_per_channel(table, steps, torch.zeros(4), 0, torch.quint8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale @ self.table.dequantize() + self.other.dequantize().sum(0)).square().mean()


@pytest.mark.parametrize("start_method", ["spawn", "forkserver", "fork"])
def test_tensors_that_torch_has_quantized_stay_as_they_are(start_method):
    model = QuantizedByTorch()
    plain = copy.deepcopy(model)
    elements = list(torch.randn(4, 4, generator=torch.Generator().manual_seed(1)))
    with started(model, elements, Shape(), start_method) as manager:
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
        manager.check_optimizer(optimizers[0])
        for element in elements[:3]:
            manager.step(accumulate=False).raise_for_status()
            plain.zero_grad()
            plain(element[None]).backward()
            for optimizer in optimizers:
                optimizer.step()
        torch.testing.assert_close(model.scale, plain.scale)
        model.load_state_dict(manager.state_dict())
        model.other = torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8)
        with pytest.raises(accelmgr.ModelError, match=r"'table' of the model was changed.* Call manager.rebind"):
            manager.step()


def test_an_update_that_does_not_fit_a_quantized_parameter_names_it():
    model = QuantizedByTorch()
    with started(model, [torch.ones(4)] * 4, Shape(), "fork") as manager:
        scale, table = (parameter.detach() for parameter in model.parameters())
        other = torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8)
        with pytest.raises(accelmgr.ModelError, match=r"quantized parameter 'table' cannot change; nothing was"):
            manager.update_model_parameters([scale, other])
        with pytest.raises(accelmgr.ModelError, match=r"for 'scale', a Parameter; nothing was changed"):
            manager.update_model_parameters([other, table])


def test_integers_cannot_be_trained():
    model = Int8()
    with started(model, [torch.tensor(1)] * 4, Shape(), "spawn") as manager:
        manager.step().raise_for_status()
        assert model.weight.grad is None
        assert not dict(manager.named_gradients())["weight"].any()
    with pytest.raises(accelmgr.ModelError, match=r"'w' is torch.float8_e4m3fn and requires a gradient; .* freeze it"):
        wrong = nn.Module()
        wrong.w = nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn))
        accelmgr.Manager(wrong, [torch.tensor(1)])


class Steep(nn.Module):
    """Its gradient is its input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x.to(self.weight.dtype)).sum()


@pytest.mark.parametrize("dtype, half", [(torch.float16, 4e4), (torch.bfloat16, 2e38), (torch.float32, 2e38)], ids=str)
def test_a_sum_that_overflows_does_not_count(dtype, half):
    """Each gradient is finite, and so are the losses: what the master would hold is not."""
    small, large = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, half, 3.0])
    model = Steep(dtype)
    with started(model, [large, small, large, small, small], Shape(), "fork", on_nonfinite="skip_batch") as manager:
        assert manager.step().status == "ok"
        assert manager.step().status == "ok"
        before = model.weight.grad.clone()
        result = manager.step()  # The second large one is left out, and nothing of it is in the sum.
        assert (result.status, result.skipped) == ("ok", 1)
        assert torch.equal(model.weight.grad, before + small.to(dtype))
    model = Steep(dtype)
    with started(model, [large, large, small], Shape(), "fork") as manager:
        manager.step().raise_for_status()
        before = model.weight.grad.clone()
        with pytest.raises(accelmgr.StepError, match="is finite in each rank, but not its sum with the steps"):
            manager.step().raise_for_status()
        assert torch.equal(model.weight.grad, before)
        manager.zero_grad()
        assert manager.step().status == "ok"  # Alone it is finite.
