# Runs in: the host.
"""How the model and the dataset of a manager get to the manager process."""

from __future__ import annotations

import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from types import GeneratorType, ModuleType
from typing import Any, Protocol

import torch

from accelmgr import _native
from accelmgr._changes import grown_buffers
from accelmgr._changes.buffers import FORMS, KEPT
from accelmgr._changes.calls import Calls
from accelmgr._changes.grown_buffers import Forms, GrownBuffers
from accelmgr._changes.kept_attributes import kept_attributes
from accelmgr._changes.model_changes import module_places
from accelmgr._changes.record import Record
from accelmgr._data.feed import Feed, is_of_thread
from accelmgr._data.loaders import LoaderElements
from accelmgr._data.long_elements import LongElements
from accelmgr._host.following import Following
from accelmgr._host.model_sending import (
    ForkedModel,
    PickledDataset,
    SentModel,
    check_sendable,
    pickled,
    pickled_dataset,
)
from accelmgr._model.constants import CHANGES, Constants, expect_constants
from accelmgr._model.session_tensors import tensors_of
from accelmgr._process import torch_settings as _settings
from accelmgr.errors import DataError

logger = logging.getLogger("accelmgr")


class Counting(Protocol):
    def counts(self) -> _native.Statistics: ...


def _consumed_of(reference: weakref.ref[Counting]) -> Callable[[], int]:
    """A function that returns how many elements committed steps have consumed.

    Threads of the feed call it. It holds a weak reference, so that they do not keep the manager alive.
    """

    def consumed() -> int:
        owner = reference()
        return owner.counts().elements if owner is not None else 0

    return consumed


OF_THREADS = (queue.Queue, queue.SimpleQueue, threading.Condition, threading.Event, threading.Thread)
"""A dataset with one of these may get its elements from other threads of this process, which a fork does not have."""
MOST_DEPTH = 3
"""How deep OF_THREADS are looked for in the attributes of a dataset."""


def _needs_threads(value: Any, depth: int = MOST_DEPTH) -> str:
    """The class of the first object of OF_THREADS that is found; empty: there is none."""
    if isinstance(value, OF_THREADS):
        return type(value).__name__
    if depth == 0 or not hasattr(value, "__dict__") or isinstance(value, (type, ModuleType, logging.Logger)):
        return ""
    found = (_needs_threads(attribute, depth - 1) for attribute in list(vars(value).values()))
    return next(filter(None, found), "")


def why_read_here(dataset: Any) -> str:
    """Why a fork cannot read the dataset: it may get its elements from what this process does. Empty: it can."""
    if isinstance(dataset, GeneratorType):
        return "a generator, which may depend on what this process does"
    if isinstance(dataset, Iterator) and not hasattr(dataset, "__dict__"):  # Of Python itself: iter(), map(), zip().
        return f"a {type(dataset).__name__}, which may depend on what this process does"
    if kind := _needs_threads(dataset):
        return f"it has a {kind}, by which other threads of this process may give it elements"
    return ""


class Delivery:
    """What a manager process gets of model and dataset, and the feed of a dataset that is read here.

    It outlives a start that failed: the feed has read elements that the dataset will not give again.
    """

    def __init__(
        self,
        model: torch.nn.Module | None,
        factory: Callable[[], torch.nn.Module] | None,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any] | None,
        options: dict[str, Any],
    ) -> None:
        """model, dataset: None if the configuration names it. options: those of the dataset's elements."""
        self._model = model
        self._factory = factory
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._options = options
        self._payload: SentModel | ForkedModel | None = None
        self._long: LongElements | None = None
        self.record: Record | None = None
        self.grown: Forms = {}
        """The forms of buffers that the first micro-batch makes larger, and of attributes that are kept with them."""
        self._needed: GrownBuffers | None = None
        self.calls: Calls | None = None
        self.feed: Feed | None = None

    def begin(self, start_method: str, owner: object, constants: bool) -> list[str]:
        """Makes everything ready for a manager process; returns the settings by which the process finds it.

        A feed ends with `owner`. constants: runners see when the model writes to constants.
        """
        settings = _settings.current()
        if self._dataset is not None:
            self._long = LongElements()
        if self._model is not None:
            self.record = Record()
            self._needed = GrownBuffers()
            self.calls = Calls()
            expect_constants(self._model, self.grown, constants)
        options = {
            **self._options,
            "torch_seed": torch.initial_seed(),
            "long": self._long.address if self._long is not None else "",
            "grown": self.grown,
            "constants": constants,
            "needed": self._needed.address if self._needed is not None else "",
            "calls": self.calls.address if self.calls is not None else "",
            "settings": _settings.sendable(settings),
            "host": os.getpid(),
            "told": [],
            "places": module_places(self._model) if self._model is not None else 0,
        }
        if start_method == "fork":
            if self.feed is None and (why := why_read_here(self._dataset)):
                self._serve(owner, why)
            dataset = self._dataset if self.feed is None else self.feed.address
            self._payload = ForkedModel(self._model, dataset, self._collate_fn, options)
        else:
            dataset = self._sent(owner)
            self._payload = SentModel(self._model, self._factory, dataset, self._collate_fn, options)
        keys = []
        for section, passed in (("model", self._model), ("data", self._dataset)):
            if passed is not None:
                keys += [f"{section}.kind=python", f"{section}.options.payload={self._payload.path}"]
        return keys

    def refresh(self, told: list[torch.Tensor]) -> None:
        """Gives later forks the present settings of torch, and the tensors of which they may be told."""
        if isinstance(self._payload, ForkedModel):
            self._payload.options["settings"] = _settings.sendable(_settings.current())
            self._payload.options["told"] = told

    def makes_room(self, trained: bool) -> bool:
        """Whether runners have told of buffers that have no room yet; the next begin() makes it.

        trained: steps were made; then it is too late for other shapes.
        """
        needed = self._needed.read() if self._needed is not None else {}
        if trained:
            needed = {name: form for name, form in needed.items() if form == CHANGES}
        return self.make_room(needed)

    def make_room(self, needed: Forms) -> bool:
        """Whether some of these buffers have no room yet; the next begin() makes it."""
        if needed.items() <= self.grown.items():
            return False
        logger.info(
            "the manager starts again with room for what the model has changed or given a shape: %s", ", ".join(needed)
        )
        self.grown = self.grown | needed
        return True

    def makes_room_of(self, checkpoint: str, present: set[str]) -> bool:
        """Whether the next begin() makes room for values of the checkpoint that was resumed.

        The values are of attributes, or of buffers that were no constants when the checkpoint was written. present: the
        buffers that the session has.
        """
        if self._model is None or self.record is None or FORMS not in present or KEPT in present:
            return False
        saved = grown_buffers.saved(checkpoint)
        changed = [name for name, _ in Constants(self._model).named if name in saved]
        self.grown = self.grown | dict.fromkeys(changed, CHANGES)
        _, (count,) = saved.pop(KEPT, ("", (0,)))
        missing = {name: form for name, form in saved.items() if name not in present}
        found = {name: missing[name] for name, *_ in kept_attributes(self._model, missing)}
        if not found or len(found) != count:
            return bool(changed)  # The attributes are of another model.
        self.grown = self.grown | found
        return True

    def release_values(self) -> None:
        """Drops the copies of the model's values: the session has them."""
        if self._payload is not None:
            self._payload.release_values()

    def follow(self, owner: Counting) -> None:
        """From now on the feed drops what committed steps have consumed."""
        if self.feed is not None:
            self.feed.follow(_consumed_of(weakref.ref(owner)))

    def following(self) -> Following | None:
        """What tells runners of changes of model and dataset; None if they have neither from this process."""
        others = {"dataset": self._dataset, "collate_fn": self._collate_fn}
        if self.feed is not None:  # This process reads the dataset itself.
            del others["dataset"]
        fixed = self._dataset.parts if isinstance(self._dataset, LoaderElements) and self.feed is None else {}
        if self.record is None and self._dataset is None:
            return None
        return Following(self._model, others, fixed, self.record, self.grown, isinstance(self._payload, ForkedModel))

    def leave(self, consumed: int) -> None:
        """The processes have ended; others will go on from element `consumed`."""
        if self.feed is not None:
            self.feed.follow(lambda: consumed)
        self.close()

    def check_model(self, model: torch.nn.Module, start_method: str) -> None:
        """Raises ModelError if `model` cannot be sent."""
        numbers = {id(tensor): number for number, (_, tensor) in enumerate(tensors_of(model))}
        if start_method != "fork":
            check_sendable(model)
            pickled("model", model, numbers)

    def change_model(self, model: torch.nn.Module) -> None:
        """Sends `model` from the next begin() on."""
        self._model = model
        self._factory = None
        kept = {name for name, *_ in kept_attributes(model, self.grown)}
        self.grown = {name: form for name, form in self.grown.items() if name in kept or form == CHANGES}

    def close(self) -> None:
        """Ends the payload. The feed stays: another start may need it."""
        for kept in (self._payload, self._long, self.record, self._needed, self.calls):
            if kept is not None:
                kept.close()

    def end(self) -> None:
        if self.feed is not None:
            self.feed.close()
        self.close()

    def _sent(self, owner: object) -> PickledDataset:
        """The dataset pickled, or the address of its feed if it cannot be pickled."""
        if self.feed is not None:
            return pickled_dataset(self.feed.address)
        reason = "a generator"
        if not isinstance(self._dataset, GeneratorType):
            try:
                return pickled_dataset(self._dataset, self._model)
            except DataError as error:
                reason = str(error)
        self._serve(owner, reason)
        assert self.feed is not None
        return pickled_dataset(self.feed.address)

    def _serve(self, owner: object, reason: str) -> None:
        logger.info("the dataset is read in this process and served from it: %s", reason)
        self.feed = Feed(self._dataset, self._options["epochs"])
        weakref.finalize(owner, self.feed.end)  # The manager process still runs then: end() does not wait for it.

    def serves_instead(self, error: DataError, owner: object) -> bool:
        """Whether the next start reads the dataset in this process, because a fork may not: it is bound to a thread."""
        if self.feed is not None or self._dataset is None or not is_of_thread(error):
            return False
        self._serve(owner, str(error))
        return True
