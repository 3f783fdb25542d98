"""What runs of Python in a manager process and its runners. Called from the extension module."""

from __future__ import annotations

import collections.abc
import os
import pickle
import random
import struct
import sys
import traceback
from typing import Any, Iterator

import torch

from accelmgr import _native
from accelmgr._feed import Client, FeedAddress, elements_of, is_indexed
from accelmgr._payload import Received
from accelmgr._structure import MODES, Buffers, Structure
from accelmgr.errors import DataError, Error, ModelError

MOST_TEXT = 3500  # Of an exception; the session has 4 KiB for it.


def main(arguments: list[str]) -> None:
    """The executed process becomes what the arguments say."""
    if arguments[0] not in LAUNCHED:
        torch.set_num_threads(1)
    embed()
    _native.take_role(arguments)


LAUNCHED = ("--accelmgr-child", "--accelmgr-forkserver")
"""Processes of spawn(): what they compute is the user's, by the user's settings."""
_embedded = False


def embed() -> None:
    """Once in each process, before anything is started."""
    global _embedded
    if not _embedded:
        _native.embed(command_line())
        _embedded = True


def command_line() -> list[str]:
    """What runs this interpreter again, so that it calls main()."""
    import subprocess

    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    # Threads that a library starts when it is imported would keep the manager from forking its launcher.
    program = (
        "import os, sys; sys.path[:] = {path!r}; "
        "sys.argv[1] in {launched!r} or os.environ.update(OPENBLAS_NUM_THREADS='1'); "
        "from accelmgr._child import main; main(sys.argv[1:])"
    )
    path = [os.path.abspath(entry) for entry in sys.path]
    return [sys.executable, *flags, "-c", program.format(path=path, launched=LAUNCHED)]


def encodable(text: str) -> str:
    """With escapes for what the name of a file has that is no UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def describe(error: BaseException) -> str:
    """Its last line first, then where it was raised; the innermost frames when it is long."""
    if isinstance(error, Error):
        return encodable(str(error))
    lines = [encodable(line) for line in traceback.format_exception(error)]
    text = f"{lines[-1].strip()}\n{''.join(lines[:-1]).rstrip()}"
    if len(text) <= MOST_TEXT:
        return text
    head = f"{lines[-1].strip()[: MOST_TEXT // 2]}\n... "
    return head + text[len(head) - MOST_TEXT :]


# Elements of a dataset


def structure_of(element: Any) -> tuple[list[str], list[Any]]:
    """Names and values of an element."""
    if isinstance(element, (tuple, list)):
        return [ITEM.format(index) for index in range(len(element))], list(element)
    if isinstance(element, collections.abc.Mapping):
        return [str(name) for name in element], list(element.values())
    return [ALONE], [element]


def restore_structure(fields: list[tuple[str, torch.Tensor]]) -> Any:
    """What structure_of() took apart."""
    if fields[0][0] == ALONE:
        return fields[0][1]
    if fields[0][0] == ITEM.format(0):
        return tuple(tensor for _, tensor in fields)
    return dict(fields)


def as_tensor(value: Any) -> torch.Tensor | None:
    """None when it is nothing that torch makes a tensor of."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            return None
        return value if value.is_cpu and not value.requires_grad else value.detach().cpu()
    if isinstance(value, float):  # As default_collate does.
        return torch.tensor(value, dtype=torch.float64)
    if isinstance(value, (bool, int)) or type(value).__module__ == "numpy":
        return torch.as_tensor(value)
    return None


# Names of fields which say what an element was: those of a mapping are its own.
PICKLED = "<pickled>"
ALONE = "<element>"
ITEM = "<{}>"


class Elements:
    """A dataset, element by element, as rows of tensors; with a collate_fn, or of other things, as bytes."""

    LENGTH = struct.Struct("<Q")

    def __init__(self, dataset: Any, options: dict[str, Any]) -> None:
        self._dataset = dataset.connect() if isinstance(dataset, FeedAddress) else dataset
        self._fed = isinstance(self._dataset, Client)
        self._restorable = self._fed or is_indexed(dataset)
        self.length = -1  # Of an indexed dataset; 0: it has none.
        if not self._fed and is_indexed(dataset):
            self.length = len(dataset) if hasattr(dataset, "__len__") else 0
        self._position = 0
        self._names: list[str] = []
        self._items = 0  # Of a tuple or list.
        self._as_bytes = bool(options["as_bytes"])
        self._limit = int(options["max_element_bytes"])
        self._epochs = int(options.get("epochs", 1))
        self._iterator = self._iterate(0)
        self._first: list[Any] | None = None
        data = self._dataset.example() if self._fed else None
        first = next(self._iterator, None) if not self._fed else None if data is None else [pickle.loads(data)]
        if first is None:
            raise DataError("the dataset has no elements")
        tensors: list[torch.Tensor] = []
        if not self._as_bytes:
            self._names, values = structure_of(first[0])
            tensors = [tensor for value in values if (tensor := as_tensor(value)) is not None]
            self._as_bytes = not tensors or len(tensors) < len(values)
            self._items = len(values) if isinstance(first[0], (tuple, list)) else 0
        if self._as_bytes:
            size = len(self._dump(data if self._fed else first[0]))
            self._limit = self._limit or max(64 * 1024, 4 * size)
            self.examples = [(PICKLED, torch.empty(self._limit, dtype=torch.uint8))]
        else:
            self.examples = list(zip(self._names, tensors, strict=True))
        self._fields = [(name, example.dtype, example.shape) for name, example in self.examples]
        self._first = None if self._fed else first

    def _iterate(self, position: int) -> Iterator[list[Any]]:
        """Elements from `position` on, each in a list; of a fed dataset, where they are bytes, as it sends them."""
        if not self._fed:
            yield from elements_of(self._dataset, position, self._epochs)
            return
        while (data := self._dataset.get(position)) is not None:
            yield [data if self._as_bytes else pickle.loads(data)]
            position += 1

    def _dump(self, element: Any) -> bytes:
        data = element if self._fed else pickle.dumps(element, protocol=pickle.HIGHEST_PROTOCOL)
        return self.LENGTH.pack(len(data)) + data

    def next(self) -> list[Any] | None:
        """The next element: a tensor for each field, or bytes; None at the end."""
        boxed, self._first = self._first or next(self._iterator, None), None
        if boxed is None:
            return None
        self._position += 1
        element = boxed[0]
        if self._as_bytes:
            data = self._dump(element)
            if len(data) > self._limit:
                raise DataError(
                    f"element {self._position - 1} of the dataset takes {len(data)} bytes, more than "
                    f"max_element_bytes = {self._limit}"
                )
            return [data]
        if self._items and type(element) in (tuple, list) and len(element) == self._items:
            values = element
        else:
            names, values = structure_of(element)
            if names != self._names:
                raise DataError(
                    f"element {self._position - 1} of the dataset has {', '.join(names)}, the first one "
                    f"{', '.join(self._names)}; all must be alike, or a collate_fn be passed"
                )
        tensors = [as_tensor(value) for value in values]
        for (name, dtype, shape), tensor in zip(self._fields, tensors, strict=True):
            if tensor is None or tensor.dtype != dtype or tensor.shape != shape:
                found = "no tensor" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                raise DataError(
                    f"field '{name}' of element {self._position - 1} of the dataset is {found}, that of the first one "
                    f"{dtype} {list(shape)}; pass a collate_fn where elements differ"
                )
        return tensors

    def state(self) -> str | None:
        """Where it stands, of a dataset that is indexed or fed."""
        return str(self._position) if self._restorable else None

    def restore(self, state: str) -> None:
        if not self._restorable or not state.isdigit():
            raise DataError(f"the dataset cannot go on at '{state}'")
        self._position = int(state)
        self._iterator = self._iterate(self._position)
        self._first = None


def make_elements(path: str) -> Elements:
    received = Received(path)
    return Elements(received.load("dataset"), received.options)


# The replica of a model


class Replica:
    """A model as the runner calls it."""

    def __init__(self, model: torch.nn.Module, collate_fn: Any) -> None:
        self._model = model
        self._collate_fn = collate_fn or torch.utils.data.default_collate
        structure, buffers = Structure(model), Buffers(model)
        self._structure = structure
        self._followed = structure.modes
        self._modes = torch.frombuffer(bytearray(self._followed), dtype=torch.uint8)
        # What is tied under each of its names.
        self.parameters = list(model.named_parameters(remove_duplicate=False))
        self.buffers = [*buffers.named, (MODES, self._modes)]
        self.non_persistent = [*buffers.non_persistent, MODES]
        self.check_parameters = structure.check
        self.settle_buffers = buffers.settle
        self._seeded = False

    def _seed(self) -> None:
        """The other generators as torch's, which has seed_base + rank by now; all runners are forks of one process."""
        self._seeded = True
        seed = torch.initial_seed()
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)

    def forward(self, fields: list[tuple[str, torch.Tensor]]) -> tuple[torch.Tensor, list[tuple[str, float]]]:
        if not self._seeded:
            self._seed()
        if (modes := self._modes.numpy().tobytes()) != self._followed:
            self._structure.follow(modes, self._followed)
            self._followed = modes
        return self._read(self._call(self._inputs(fields)))

    def _inputs(self, fields: list[tuple[str, torch.Tensor]]) -> Any:
        if fields[0][0] == PICKLED:
            return self._collate_fn([self._element(row) for row in fields[0][1]])
        return restore_structure(fields)

    @staticmethod
    def _element(row: torch.Tensor) -> Any:
        memory = row.numpy().data
        (length,) = Elements.LENGTH.unpack_from(memory)
        return pickle.loads(memory[Elements.LENGTH.size : Elements.LENGTH.size + length])

    def _call(self, inputs: Any) -> Any:
        if isinstance(inputs, collections.abc.Mapping):
            return self._model(**inputs)
        if isinstance(inputs, (tuple, list)):
            return self._model(*inputs)
        return self._model(inputs)

    @staticmethod
    def _read(outputs: Any) -> tuple[torch.Tensor, list[tuple[str, float]]]:
        scalars: list[tuple[str, float]] = []
        if isinstance(outputs, collections.abc.Mapping):
            if "loss" not in outputs:
                raise ModelError(f"the model's output has no 'loss'; it has: {', '.join(map(str, outputs))}")
            loss = outputs["loss"]
            for name, value in outputs.items():
                if name == "loss":
                    continue
                if isinstance(value, (bool, int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0):
                    scalars.append((str(name), value.item() if isinstance(value, torch.Tensor) else float(value)))
        elif isinstance(outputs, (tuple, list)):
            if not outputs:
                raise ModelError("the model returned an empty tuple; its first element must be the loss")
            loss = outputs[0]
        else:
            loss = outputs
        if not isinstance(loss, torch.Tensor):
            raise ModelError(
                f"the model's loss is of type {type(loss).__name__}; it must be a tensor: the output, its 'loss', or "
                "its first element"
            )
        return loss, scalars


def make_replica(path: str) -> Replica:
    received = Received(path)
    return Replica(received.model(), received.load("collate_fn"))
