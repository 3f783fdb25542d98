"""Runners on an accelerator of torch that is a fake: a backend in Python, of torch's own support for private devices.

Its memory is memory of the CPU behind tensors of the device `fake`, and CPU kernels compute there. It has one device
and a generator of its own, and pins no memory. Copies that need not be waited for are done as late as the order of a
queue allows: before the next operation, or when the device is synchronized. Until then their target is NaN.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from device_runners import Does
from device_runners import start as start_on_device
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

import accelmgr

# Torch 2.9, which the tests of XLA bring, has no support for it; the torch that everything else is tested with has.
if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip(f"torch {torch.__version__} takes no backend in Python", allow_module_level=True)
aten = torch.ops.aten
CONVOLUTION = aten.convolution_overrideable.default
CONVOLUTION_BACKWARD = aten.convolution_backward_overrideable.default
NAME = "fake"
ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


LIBRARIES: list[torch.library.Library] = []
"""What is registered is so as long as these live."""


def is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == NAME


class Fake(backend_registration._DummyBackendModule):
    """The module torch.fake, and the kernels of all operations."""

    current: Fake

    def __init__(self) -> None:
        self._memory: dict[int, tuple[StorageWeakRef, torch.UntypedStorage]] = {}  # By storage of the device.
        self._queue: list[tuple[torch.Tensor, torch.Tensor]] = []  # Target and source.
        self._seed = self._draws = 0
        self.synchronized = 0  # How often torch.accelerator.synchronize() was called.
        self.failures: dict[str, Exception] = {}  # "compute", "copy": raised there.

    # What torch asks of a backend's module

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        assert device == torch.device(NAME, 0)
        return torch.tensor([self._seed, self._draws]).view(torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        assert device == torch.device(NAME, 0)
        self._seed, self._draws = state.view(torch.int64).tolist()

    def manual_seed(self, seed: int) -> None:
        self._seed, self._draws = seed, 0

    def synchronize(self, device: torch.device) -> None:
        assert device == torch.device(NAME, 0)
        self.synchronized += 1
        self._catch_up()

    def _catch_up(self) -> None:
        for target, source in self._queue:
            target.copy_(source)
        self._queue.clear()

    # Tensors

    def _behind(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of the CPU in the same memory."""
        _, memory = self._memory[tensor.untyped_storage()._cdata]
        return torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _storage_over(self, memory: torch.UntypedStorage) -> torch.UntypedStorage:
        for key in [key for key, (of_device, _) in self._memory.items() if of_device.expired()]:
            del self._memory[key]
        storage = torch._C._construct_storage_from_data_pointer(
            memory.data_ptr(), torch.device(NAME, 0), memory.nbytes()
        )
        self._memory[storage._cdata] = StorageWeakRef(storage), memory
        return storage

    @staticmethod
    def _set(tensor: torch.Tensor, storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
        function = aten.set_.source_Storage_storage_offset
        function.redispatch(ON_CPU, tensor, storage, like.storage_offset(), like.shape, like.stride())
        return tensor

    # Kernels

    def compute(self, operation: Any, *args: Any, **kwargs: Any) -> Any:
        if operation is aten._copy_from.default:
            return self._copy(*args, **kwargs)
        self._fail("compute")
        self._catch_up()
        behind: list[tuple[torch.Tensor, torch.Tensor]] = []

        def down(value: Any) -> Any:
            if isinstance(value, torch.device):
                return torch.device("cpu")
            if not is_on_device(value):
                return value
            behind.append((self._behind(value), value))
            return behind[-1][0]

        args, kwargs = tree_map(down, (args, kwargs))
        result = self._on_cpu(operation, args, kwargs)
        for inner, outer in behind:  # An operation may have given its result another size.
            if inner.shape != outer.shape or inner.untyped_storage().nbytes() != outer.untyped_storage().nbytes():
                self._set(outer, self._storage_over(inner.untyped_storage()), inner)

        def up(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            for inner, outer in behind:
                if inner is value:
                    return outer
            own = value.untyped_storage()
            owners = [outer for inner, outer in behind if inner.untyped_storage()._cdata == own._cdata]
            storage = owners[0].untyped_storage() if owners else self._storage_over(own)
            return self._set(torch._C._acc.create_empty_tensor([0], value.dtype), storage, value)

        return tree_map(up, result)

    def _on_cpu(self, operation: Any, args: Any, kwargs: Any) -> Any:
        if operation is CONVOLUTION:
            return aten.convolution(*args, **kwargs)
        if operation is CONVOLUTION_BACKWARD:
            gradient, given, weight, *rest = args
            return aten.convolution_backward(gradient, given, weight, [gradient.shape[1]], *rest, **kwargs)
        if torch.Tag.nondeterministic_seeded not in operation.tags:
            return operation(*args, **kwargs)
        self._draws += 1
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(1000 * self._seed + self._draws)
            return operation(*args, **kwargs)

    def _copy(self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        self._fail("copy" if is_on_device(source) and not is_on_device(target) else "compute")
        inner, outer = (self._behind(each) if is_on_device(each) else each for each in (target, source))
        if not non_blocking:
            self._catch_up()
            inner.copy_(outer)
        else:
            if inner is target and inner.is_floating_point():
                inner.fill_(torch.nan)
            self._queue.append((inner, outer))
        return target

    def _fail(self, where: str) -> None:
        if error := self.failures.pop(where, None):
            raise error


def cast(operation: Any, dtype: torch.dtype) -> Any:
    """The kernel of autocast for an operation that is computed in this dtype."""

    def kernel(*args: Any) -> Any:
        with torch._C._DisableAutocast():
            return operation(*(arg.to(dtype) if is_on_device(arg) and arg.is_floating_point() else arg for arg in args))

    return kernel


def install() -> None:
    """Registers the device in this process."""
    if not hasattr(Fake, "current"):
        Fake.current = Fake()
        backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=Fake.current)
        LIBRARIES.extend(torch.library.Library(namespace, "IMPL") for namespace in ("_", "aten"))
        LIBRARIES[0].fallback(Fake.current.compute, "PrivateUse1")
        LIBRARIES[0].fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        for operation in (CONVOLUTION, CONVOLUTION_BACKWARD):  # torch has kernels of these for no device.
            LIBRARIES[1].impl(operation, functools.partial(Fake.current.compute, operation), "PrivateUse1")
        for name, dtype in {"linear": torch.bfloat16, "matmul": torch.bfloat16, "mse_loss": torch.float32}.items():
            operation = getattr(aten, name).default
            LIBRARIES[1].impl(operation, cast(operation, dtype), "AutocastPrivateUse1")
        torch.accelerator.synchronize = Fake.current.synchronize  # A backend in Python has no other way to hear of it.


def start(model: Any, dataset: Any, **options: Any) -> accelmgr.Manager:
    """As in device_runners.py. The host has no fake: it needs no device."""
    model.fake_accelerator = Does(install)
    return start_on_device(model, dataset, **{"device": "accelerator", "runners__oversubscribe": True, **options})
