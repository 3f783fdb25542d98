# Runs in: all processes.
"""How objects of the user's script travel between processes: elements, datasets, errors of both.

Classes and functions that no import finds (of `__main__`, a notebook, another function) travel by value, as cloudpickle
does it. Tensors of an element travel as their values; those of a dataset, and its arrays, lie in memory that processes
share.
"""

from __future__ import annotations

import functools
import inspect
import io
import mmap
import os
import pickle
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from types import FunctionType, MappingProxyType
from typing import Any, BinaryIO, TypeVar

import cloudpickle
import torch

from accelmgr._serialization.origin import SCRIPT

Buffer = bytes | bytearray | memoryview
Pickled = TypeVar("Pickled")

OUT_OF_BAND = 4096
"""An array of at least so many bytes lies beside the pickled dataset."""


def _is_plain(value: Any) -> bool:
    """Whether it is a plain tensor on the CPU: memory, dtype and shape describe it in full."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
    )


def _over(data: Buffer) -> torch.Tensor:
    """The bytes as a tensor, without a copy if it may write to them."""
    if len(data) == 0:
        return torch.empty(0, dtype=torch.uint8)
    writable = isinstance(data, bytearray) or (isinstance(data, memoryview) and not data.readonly)
    return torch.frombuffer(data if writable else bytearray(data), dtype=torch.uint8)


def _rebuild(data: Buffer, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return _over(data).view(dtype).view(shape) if len(data) else torch.empty(shape, dtype=dtype)


class _ElementPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles the values of a tensor alone. torch pickles the whole storage of a view, and takes ten times as long."""

    def reducer_override(self, obj: Any) -> Any:
        if not _is_plain(obj):
            return super().reducer_override(obj)
        values = obj.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = pickle.PickleBuffer(values.view(torch.uint8).numpy()) if values.numel() else b""
        return _rebuild, (data, obj.dtype, tuple(obj.shape))


def dump(element: Any) -> bytes:
    """For pickle.loads()."""
    file = io.BytesIO()
    _ElementPickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(element)
    return file.getvalue()


class KnownPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes only the name of each tensor and module that the reader has itself."""

    def __init__(self, file: BinaryIO, known: Mapping[int, Any]) -> None:
        """known: their names, by id()."""
        super().__init__(file)
        self._known = known

    def persistent_id(self, obj: Any) -> Any:
        return self._known.get(id(obj)) if isinstance(obj, (torch.Tensor, torch.nn.Module)) else None

    def reducer_override(self, obj: Any) -> Any:
        known = _reduced(obj)
        return super().reducer_override(obj) if known is NotImplemented else known


class KnownUnpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO | mmap.mmap, known: Mapping[Any, Any] | Sequence[Any]) -> None:
        """known: what the names stand for here."""
        super().__init__(file)
        self._known = known

    def persistent_load(self, pid: Any) -> Any:
        return self._known[pid]


def _reduced(obj: Any) -> Any:
    """How objects travel that cloudpickle would refuse or copy; NotImplemented for others."""
    if _is_plain(obj) and obj.is_shared():
        return _view_of(obj, _Storage(obj))
    if isinstance(obj, functools._lru_cache_wrapper) and not _is_found_by_import(obj):
        return _cached, (obj.__wrapped__, obj.cache_parameters())  # With an empty cache.
    original = getattr(obj, "_torchdynamo_orig_callable", None)
    if isinstance(obj, FunctionType) and original is not None and not _is_found_by_import(obj):
        variables = inspect.getclosurevars(obj).nonlocals
        if "self" in variables:  # The context that torch.compile() has made of its options.
            return _called, (variables["self"], original)
    return NotImplemented


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _called(context: Callable[..., Any], function: Callable[..., Any]) -> Any:
    return context(function)


class CannotPickle(Exception):
    """Its text has the type and text of the error."""


def attempted(dump: Callable[[], Pickled]) -> Pickled:
    """Returns what `dump` returns. Raises CannotPickle if it fails twice: a signal handler may have raised once."""
    try:
        return dump()
    except Exception:
        try:
            dump()
        except Exception as error:
            raise CannotPickle(f"{type(error).__name__}: {error}") from error
        raise


def is_picklable(value: Any, known: Mapping[int, Any] = MappingProxyType({})) -> bool:
    try:
        KnownPickler(io.BytesIO(), known).dump(value)
    except Exception:
        return False
    return True


# Datasets


class _Storage:
    """Memory of which several tensors may be views."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = tensor.untyped_storage()

    def __reduce__(self) -> Any:
        size = self._storage.nbytes()
        if size == 0:
            return _over, (b"",)
        if self._storage.is_shared():
            if self._storage.filename is not None:
                return _over_file, (os.path.abspath(self._storage.filename), size)
            if torch.multiprocessing.get_sharing_strategy() == "file_system":  # type: ignore[no-untyped-call]
                _, name, size = self._storage._share_filename_cpu_()
                return _over_shared, (f"/dev/shm{name.decode()}", size)
            fd, size = self._storage._share_fd_cpu_()
            return _over_shared, (f"/proc/{os.getpid()}/fd/{fd}", size)
        content = torch.empty(0, dtype=torch.uint8).set_(self._storage)
        # Not of a memoryview of the array: CPython 3.12 crashes when it collects such a PickleBuffer.
        return _over, (pickle.PickleBuffer(content.numpy()),)  # type: ignore[arg-type]


def _over_file(path: str, size: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def _over_shared(path: str, size: int) -> torch.Tensor:
    """Memory that lives as long as its tensors in the host."""
    fd = os.open(path, os.O_RDWR)
    try:
        storage = torch.UntypedStorage._new_shared_fd_cpu(fd, size)  # type: ignore[attr-defined]
        return torch.empty(0, dtype=torch.uint8).set_(storage)
    finally:
        os.close(fd)


def _view_of(tensor: torch.Tensor, storage: _Storage) -> Any:
    return _view, (storage, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def _view(
    memory: torch.Tensor, dtype: torch.dtype, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), offset, shape, strides)


def _file(path: str, dtype: Any, mode: str, offset: int, shape: tuple[int, ...]) -> Any:
    return sys.modules["numpy"].memmap(path, dtype, mode, offset, shape)


def _file_of(array: Any) -> tuple[Any, ...] | None:
    """The arguments with which _file() maps the same part of the file; None if it cannot."""
    if array._mmap is None or array.mode not in ("r", "r+", "w+") or not array.flags.c_contiguous:
        return None
    numpy = sys.modules["numpy"]
    begin = numpy.frombuffer(array._mmap, dtype=numpy.uint8).ctypes.data
    offset = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY + array.ctypes.data - begin
    return str(array.filename), array.dtype, "r" if array.mode == "r" else "r+", offset, array.shape


class _DatasetPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves the memory of tensors and arrays out, and adds it to `buffers`. Tensors that share memory share it in the
    copy, too."""

    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer], trained: Container[int]) -> None:
        # No method of its own as the callback: the pickler would keep itself, and all that it has seen, until garbage
        # is collected.
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=_beside(buffers))
        self._storages: dict[int, _Storage] = {}
        self._trained = trained

    def reducer_override(self, obj: Any) -> Any:
        if id(obj) in self._trained:
            raise TypeError("it has parameters of the model that is trained, and would keep their present values")
        if _is_plain(obj) and not (obj.requires_grad or obj.is_conj() or obj.is_neg() or obj.__dict__):
            return _view_of(obj, self._storages.setdefault(obj.untyped_storage()._cdata, _Storage(obj)))
        numpy = sys.modules.get("numpy")
        if numpy is not None and type(obj) is numpy.memmap and (found := _file_of(obj)) is not None:
            return _file, found
        known = _reduced(obj)
        return super().reducer_override(obj) if known is NotImplemented else known


def _beside(buffers: list[pickle.PickleBuffer]) -> Callable[[pickle.PickleBuffer], bool]:
    """A buffer_callback: adds large buffers to the list, and leaves others in the stream."""

    def taken(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < OUT_OF_BAND:
            return True
        buffers.append(buffer)
        return False

    return taken


def dump_dataset(dataset: Any, trained: Container[int] = ()) -> tuple[bytes, list[memoryview]]:
    """The pickled dataset, and the memory of its large tensors and arrays, which is not copied.

    trained: id() of tensors that change while the dataset is read. Raises TypeError if the dataset has one.
    """
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    _DatasetPickler(file, buffers, trained).dump(dataset)
    return file.getvalue(), [buffer.raw() for buffer in buffers]


def load_dataset(data: Buffer, buffers: Sequence[memoryview]) -> Any:
    return pickle.loads(data, buffers=buffers)


# Processes that the dataset itself starts, as the workers of a DataLoader


def _is_found_by_import(obj: Any) -> bool:
    found: Any = sys.modules.get(obj.__module__)
    if obj.__module__ in SCRIPT:
        return False
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


def _received(data: bytes) -> Any:
    """Called in a worker, which sends elements of such classes back."""
    send_definitions_to_workers()
    return pickle.loads(data)


def _reduce_by_value(pickler: ForkingPickler, obj: Any) -> Any:
    if isinstance(obj, (type, FunctionType)) and not _is_found_by_import(obj):
        return _received, (cloudpickle.dumps(obj),)
    return NotImplemented


def send_definitions_to_workers() -> None:
    """From now on multiprocessing, with the start method spawn, sends what no import finds by value.

    In a process that has not run the user's script, its workers cannot find the script's classes by running it.
    """
    reduce: Callable[..., Any] = _reduce_by_value
    ForkingPickler.reducer_override = reduce  # type: ignore[method-assign]
