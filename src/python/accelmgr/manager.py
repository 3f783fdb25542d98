"""The handle on a manager process and its runners: how these start, change and end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from accelmgr import _native
from accelmgr._data import loaders
from accelmgr._data.reading import epochs_of
from accelmgr._host import arguments, optimizers, program, sharing, status
from accelmgr._host import start_method as start_methods
from accelmgr._host.binding import Binding
from accelmgr._host.delivery import Delivery
from accelmgr._host.following import Following
from accelmgr._host.inner import Standing
from accelmgr._host.inner_driver import InnerDriver
from accelmgr._host.weights import Files, Weights, made_empty
from accelmgr._model import aliases
from accelmgr._model.objective import Extra, Loss, made_whole, whole
from accelmgr._model.session_tensors import named_leaves
from accelmgr._process.child import embed
from accelmgr.errors import ConfigError, DataError, Error, ForkHangs, ModelError, RunnerError, SessionError, UsageError

logger = logging.getLogger("accelmgr")

REFRESHES = ("auto", "always", "never")

_owners: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Manager]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class _Continuation:
    """Where the processes stood that rebind() has ended. New processes go on from there."""

    state: str
    settings: list[str]


@dataclasses.dataclass(frozen=True)
class _Renewal:
    """All processes are to be replaced. start() finishes that if a signal handler's exception has cut it short."""

    model: torch.nn.Module | None  # The model of the new processes; None: the same.
    goes_on: bool  # Whether the new processes go on where the former stood.
    back_to: Standing | None = None  # Where they go on, if not where the former stood.


class Manager(InnerDriver):
    """Starts a manager process and its runners for `model` and `dataset`; steps them; holds the master's parameters.

    model: a torch.nn.Module on the CPU; the runners call its forward and backward in Python. Or the name of a built-in
        model (`"gpt"`, `"torchscript"`, ...), which `config` or `model__gpt={}` describes and which needs no Python.
        The module's parameters and their `.grad` become the session's memory: an optimizer steps on them in place. Each
        parameter has its dtype: float64, float32, bfloat16, float16, complex64 or complex128, or, if it is frozen, any
        other. `.grad` is None until a step gives a gradient. The model returns a mapping, a dataclass or a named tuple
        with "loss", another tuple that begins with the loss, or the loss. Other numbers that have names, of Python,
        NumPy or torch, arrive in `StepResult.scalars`, averaged like the loss.
        For modules that cannot be pickled (locks, open files), pass a function without arguments that makes the module.
        It is called once here, and once in each other process unless the start method is `fork`. `manager.model` is the
        module that it made here.
        None: the configuration names the model. `model.kind` is a built-in one, or `python`: then each process but this
        one calls `model.factory: package.module:function` with `model.options`.
        Between steps the host may change whatever it likes, see `refresh`; but it must not add, remove or replace
        parameters (rebind()).
    dataset: an iterable or a sequence (torch.utils.data.Dataset) of elements. An element is a mapping, a tuple, or a
        single tensor or number. Or the name of a built-in source (`"text"`). Element i goes to runner i % nprocs, which
        makes batches of `batch_size_per_device` elements. A mapping becomes the keyword arguments of the model, a tuple
        the positional ones. The dataset is read once, or `data.epochs` times; no step has elements of two epochs. Each
        batch of a DataLoader is a step, divided among the runners; if a collate_fn is passed too, each of its batches
        is one element. The manager process reads the dataset. What only this process can read, a thread here reads and
        sends: a generator, an iterator of Python itself, a dataset with a queue or a thread, and, with another start
        method than `fork`, one that cannot be pickled.
        None: the configuration names the dataset (`data.kind`, `data.factory`).
    loss: computes the loss from the model's outputs, where the model does not: a criterion (a module, or a function of
        torch.nn.functional), which gets outputs and targets, or another function, which gets outputs and the whole
        batch. It returns what a model returns. The model is called without the targets: of a tuple the last element,
        unless forward() needs as many arguments as the tuple has elements; of a mapping the entries that forward() does
        not name. A batch that is neither goes to both. Or the place of the loss in what the model returns: 1, "nll".
    extra: modules and tensors outside the model that are trained with it: `[criterion]`, or `{"log_alpha": tensor}`.
        Their parameters are the session's, named `extra.0.weight`, or by the mapping's names; those of a `loss` that is
        a module are named `loss.weight`. In parameters() they follow the model's.
    collate_fn: makes a batch of a list of elements, in the runner. None: elements of tensors are stacked as they are
        written to shared memory, at no further cost.
    nprocs, prefetch, batch_size_per_device, grad_accumulation_steps, seed_base: as in the configuration.
    device: what each runner computes on, `runners.device`: "cpu" (the default); "cuda", a GPU each, or "cuda:1", that
        GPU; "xla", a device of torch_xla each; "accelerator", one each of those that torch.accelerator names; "auto",
        every GPU, else every chip of a TPU, else the CPU. Unless nprocs is given, there is a runner for each GPU or
        chip, and two on the CPU, also on torch_xla's, and on accelerators. The model stays on the CPU here, bound to
        the master; each runner has a replica on its device.
    start: False: the caller calls start() later.
    config: a YAML file, or a mapping of configuration keys. Precedence, strongest first: `options`, a mapping, the
        environment (ACCELMGR_...), a file, the defaults. A key that a Manager does not read (`optimizer.*`, `train.*`,
        `model.*` beside a module) is an error in a call. In a file or in the environment it is a warning, because
        `accelmgr train` may use the same file or environment.
    start_method: `fork`: manager and runners are forks of this process. Nothing is pickled: models, datasets and
        functions are what they are here. A fork has none of this process's other threads, and the locks that they hold
        stay locked in it; if the manager does not come to life within seconds, `auto` takes `forkserver` instead
        (a warning names the threads), and `fork` raises SessionError.
        `spawn`: models and datasets are pickled with cloudpickle, definitions of `__main__` included.
        `forkserver`: as `spawn`, but the interpreter with torch is started once, and forked for this manager and all
        later ones, which start in a fraction of the time.
        `auto`: `fork`; or `spawn`, with a warning that says why, if runners compute on `xla` or `accelerator`, or if
        this process has used CUDA or torch_xla, or called backward() where torch sees a device.
    refresh: what happens after changes that cannot be sent to runners as values. `auto`: before each step this process
        looks for them, and calls refresh(); with another start method than `fork` it raises ModelError. `always`: it
        calls refresh() before each step. `never`: it does not look; call refresh() after a change.
    max_element_bytes: the most that a pickled element may have. Elements are pickled with a collate_fn, and when they
        are not made of tensors. None: any size.
    weights: paths or patterns of safetensors files that have the initial values, as in
        `Manager(make_model, weights="llama/*.safetensors")`. The function makes the model on the meta device (`with
        torch.device("meta"):`), with its buffers on the CPU; the values go from the files into shared memory, where
        they exist once.
    options: further keys: `step_timeout=30`, `runners={"on_loss": "fail"}` or `runners__on_loss="fail"`.

    One thread at a time: a call while another thread is in one raises UsageError. In a forked child the handle is
    closed.

    Source: the class TPUManager of hivemind's examples; accelmgr.compat.tpu_manager has it under its own name.
    """

    _is_shared = False  # The script has shared the parameters with processes that it forks: share_memory().
    _first_step = 0  # How many steps were made before the present processes began.
    # What a host of a service keeps: it has neither model nor dataset of its own.
    collate_fn: Callable[[list[Any]], Any] | None = None
    _dataset: Iterable[Any] | str | None = None
    _factory: Callable[[], torch.nn.Module] | None = None
    _start_method = "spawn"
    _method = ""  # The start method of the present processes.
    _refreshes = "never"
    _is_refreshing = False
    _following: Following | None = None
    _inner = None
    _weights: Weights | None = None
    _continues: _Continuation | None = None  # From rebind() until there are processes again.
    _renewal: _Renewal | None = None
    _left: Binding | None = None  # What the model was leaving when an exception interrupted that.

    def __init__(
        self,
        model: torch.nn.Module | Callable[[], torch.nn.Module] | str | None = None,
        dataset: Iterable[Any] | str | None = None,
        *,
        loss: Loss | None = None,
        extra: Extra | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        nprocs: int | None = None,
        prefetch: int | None = None,
        batch_size_per_device: int | None = None,
        grad_accumulation_steps: int | None = None,
        seed_base: int | None = None,
        device: str | torch.device | None = None,
        start: bool = True,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        start_method: str = "auto",
        max_element_bytes: int | None = None,
        weights: Files | None = None,
        refresh: str = "auto",
        **options: Any,
    ) -> None:
        start_methods.check(start_method)
        self._start_method = start_method
        if refresh not in REFRESHES:
            raise ConfigError(f"refresh is '{refresh}'; it must be one of {', '.join(REFRESHES)}", "refresh")
        self._refreshes = refresh
        self._factory = model if callable(model) and not isinstance(model, torch.nn.Module) else None
        if weights is not None and self._factory is None:
            raise ConfigError("weights needs a function that makes the model, which is passed as `model`", "weights")
        if self._factory is not None:
            if weights is not None:
                self._factory = functools.partial(made_empty, self._factory)
            model = self._factory()
            if not isinstance(model, torch.nn.Module):
                name = getattr(self._factory, "__qualname__", repr(self._factory))
                raise ModelError(f"{name}, which must return a torch.nn.Module, returned a {type(model).__name__}")
        arguments.check(model, dataset, collate_fn)
        self._loss, self._extra = loss, extra
        if isinstance(model, torch.nn.Module):
            self._check_unbound(model)
            model = self._whole(model)
            if self._factory is not None:
                self._factory = functools.partial(made_whole, self._factory, loss, extra)
            if weights is not None:
                self._weights = Weights(weights)
                self._weights.check(model)
        elif loss is not None or extra:
            raise ConfigError("loss and extra have no effect with a model that this process does not have", "loss")
        if max_element_bytes is not None and arguments.is_named(dataset):
            raise ConfigError("max_element_bytes has no effect with a built-in dataset", "max_element_bytes")
        super().__init__(model if isinstance(model, torch.nn.Module) else None)
        self._note_sharing()
        self.collate_fn = collate_fn
        self._dataset = dataset
        named = {
            "nprocs": nprocs,
            "prefetch": prefetch,
            "batch_size_per_device": batch_size_per_device,
            "grad_accumulation_steps": grad_accumulation_steps,
            "seed_base": seed_base,
        }
        call = type(self).__name__
        self._file = os.fspath(config) if config is not None and not isinstance(config, Mapping) else ""
        self._settings = arguments.settings_of_call(call, model, dataset, device, config, named, options)
        embed()
        self._own_kinds = ["model.kind=python"] if self._model is not None else []
        self._own_kinds += ["data.kind=python"] if not arguments.is_named(dataset) else []
        self._handle = self._load(self._own_kinds)  # Raises for a wrong configuration, before any tensor is moved.
        arguments.check_given(call, model, dataset, self._handle.set_keys)
        unread = self._handle.unread(self._model is not None, not arguments.is_named(dataset))
        arguments.check_read(unread, self._settings)
        own_dataset = None if arguments.is_named(dataset) else dataset
        self._of_loader: list[str] = []  # Settings that follow from a DataLoader.
        if loaders.makes_batches(dataset) and collate_fn is None:
            assert isinstance(dataset, torch.utils.data.DataLoader)
            own_dataset, collate_fn, self._of_loader = loaders.taken(
                dataset, self._handle.step_shape, self._handle.set_keys, str(device or "")
            )
            self._own_kinds += self._of_loader
            self._handle = self._load(self._own_kinds)
        elements = {
            "as_bytes": collate_fn is not None,
            "max_element_bytes": max_element_bytes or 0,
            "epochs": epochs_of(dataset, self._handle.epochs),
        }
        self._delivery = Delivery(self._model, self._factory, own_dataset, collate_fn, elements)
        if start:
            self.start()

    @classmethod
    def _of_service(cls, path: str, name: str, timeout: float, keep_gradients: bool) -> Manager:
        """See accelmgr.attach(). The processes are there: what the constructor chooses for them has no meaning."""
        embed()
        manager = cls.__new__(cls)
        super(Manager, manager).__init__(None)
        manager._delivery = Delivery(None, None, None, None, {})
        manager._handle = _native.Handle("", [], {})
        manager._handle.attach(path, name, timeout, keep_gradients)
        manager._bind(needs_values=False)
        manager._has_begun("spawn")
        if manager._handle.found_steps:
            manager._pending = manager._steps_of_service()
            manager._pending.begin()
        return manager

    @staticmethod
    def _check_unbound(model: torch.nn.Module) -> None:
        if (owner := _owners.get(model)) is not None and (other := owner()) is not None and not other._stopped:
            raise UsageError("this model belongs to another manager already; stop() that one first, or pass a copy")

    def _note_sharing(self) -> None:
        leaves = named_leaves(self._model) if self._model is not None else []
        made = [leaf for _, leaf in leaves if not torch.nn.parameter.is_lazy(leaf)]  # Others are refused later.
        on_cpu = [leaf for leaf in made if leaf.device.type == "cpu"]
        self._is_shared |= any(leaf.is_shared() for leaf in on_cpu)  # type: ignore[no-untyped-call]

    def _whole(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model with its loss and `extra`."""
        found = whole(model, self._loss, self._extra)
        if found is not model:
            arguments.check(found, None, None)
        return found

    def _load(self, own: list[str]) -> _native.Handle:
        """`own`: settings that this class adds; the user has not given them."""
        environment = {name: value for name, value in os.environ.items() if name.startswith("ACCELMGR_")}
        return _native.Handle(self._file, self._settings + [(assignment, "") for assignment in own], environment)

    def start(self) -> None:
        """Starts all processes; returns when all runners are ready. Blocks for at most `start_timeout`; Ctrl-C ends it.

        Raises ConfigError, ModelError, DataError, SessionError (memory), RunnerError, CheckpointError.
        """
        self._check_idle("start")
        if self._renewal is not None:
            self._end_former(self._renewal)
        if self._handle.started:
            raise UsageError("start() was called on a manager that was already started")
        command = program.command_for(*self._handle.kinds)
        method, why = start_methods.chosen("spawn" if command else self._start_method, self._handle.device)
        if why:
            logger.warning("start_method is 'spawn', not 'fork', because %s", why)
        if method == "fork":
            start_methods.check_fork(self._handle.device)
        if method == "fork" and self._handle.device == "cpu":
            start_methods.stay_forkable()
        threads = start_methods.other_threads()
        try:
            self._start_with(method, command)
        except ForkHangs as error:
            if self._start_method == "fork":
                raise
            logger.warning(
                "%s; the start method is 'forkserver' instead. Threads of this process: %s",
                str(error),
                ", ".join(threads),
            )
            self._start_with("forkserver", command)
        except DataError as error:
            if method != "fork" or not self._delivery.serves_instead(error, self):
                raise
            self._start_with(method, command)

    def _start_with(self, method: str, command: list[str]) -> None:
        unstarted = self._handle
        if self._model is not None:
            aliases.find(self._model, [leaf for _, leaf in named_leaves(self._model)])
        try:
            constants = unstarted.device == "cpu" and unstarted.protects_parameters
            settings = self._delivery.begin(method, self, constants) + self._of_loader
            if arguments.is_named(self._dataset) and "data.factory" in unstarted.set_keys and unstarted.epochs is None:
                settings.append("data.epochs=1")
            settings += self._continues.settings if self._continues is not None else []
            self._handle = self._load(settings)
            if self._delivery.feed is not None:
                self._handle.while_waiting(self._delivery.feed.work)
            continues = self._continues.state if self._continues is not None else ""
            with self._waiting():
                self._handle.start(method, self._bind, command, continues)
        except BaseException:
            if self._binding is not None:
                self._binding.leave()
                self._binding = None
            self._handle = unstarted
            self._delivery.close()
            aliases.follow(self._model)
            aliases.forget(self._model)
            raise
        try:
            if self._has_begun(method):
                return
        except BaseException:
            if self._renewal is not None:
                self._end_former(self._renewal)
            raise
        self._renewal = _Renewal(None, goes_on=False)
        self.start()

    def _has_begun(self, method: str) -> bool:
        """Completes a start. False: other processes are to begin, because the checkpoint has more than was expected."""
        aliases.forget(self._model)
        self._bound.started()
        if self._is_shared:
            self._handle.share_with_children()
        self._update = optimizers.Update(self._handle) if self._handle.is_attached else None
        optimizers.watch(self, self._bound.leaves, self._handle.keeps_last_step, self._update)
        self._delivery.follow(self)
        self._following = self._delivery.following() if self._refreshes == "auto" else None
        if self._model is not None:
            assert self.model is not None
            _owners[self.model] = weakref.ref(self)
            if self._handle.resumed is not None:
                self._resumed = self._handle.resumed
                if self._delivery.makes_room_of(self._resumed.path, {name for name, _ in self._handle.buffer_shapes()}):
                    return False
                self.sync_buffers()
            if not self.model.training:
                logger.warning(
                    "the model is in evaluation mode (model.training is False), and runners compute in that mode; "
                    "model.train() turns on dropout and batch statistics"
                )
        self._first_step = self.counts().steps
        self._method = method
        master = self._bound.master
        sharing.stay(self, [tensor for _, tensor in master.parameters + master.gradients])
        self._continues = self._renewal = None
        self._is_refreshing = False
        return True

    def _bind(self, needs_values: bool) -> None:
        """Moves the model's parameters into the session. start() calls it when the session exists.

        needs_values: the session has none yet. The slabs have no memory yet, so a large model does not exist twice.
        """
        self._binding = Binding(
            self._handle, self._model, self._keeps_zeros, self._delivery.record, self._delivery.grown
        )
        self._binding.bind(needs_values, self._weights)
        self._weights = None
        aliases.follow(self._model)
        self._delivery.release_values()

    def _makes_room(self) -> bool:
        """Starts again if runners need room for buffers that are larger, or change."""
        steps = self.counts().steps
        if not self._delivery.makes_room(trained=steps != self._first_step):
            return False
        self._start_again(steps)
        return True

    def _start_again(self, steps: int) -> None:
        self._renewal = _Renewal(None, goes_on=steps > 0)
        self.start()

    def _end_former(self, renewal: _Renewal) -> None:
        """Ends the processes, so that start() can start others. May be called again after an exception."""
        if self._handle.started:
            self._put_away()
            self._handle.stop()
            if self._left is not None:
                self._left.leave()
            statistics = self.counts()
            team = len(statistics.runners)
            back_to, unstarted = renewal.back_to, self._load(self._own_kinds)
            self._delivery.leave(statistics.elements if back_to is None else back_to.elements)
            if renewal.goes_on:
                settings = ["checkpoint.resume="] + ([f"nprocs={team}"] if team != unstarted.nprocs else [])
                state = self._handle.continuation() if back_to is None else back_to.state
                self._continues = _Continuation(state, settings)
            self._handle, self._left = unstarted, None
        if renewal.model is not None:
            if self.model is not None:
                _owners.pop(self.model, None)
            self._model = renewal.model
            self._note_sharing()
            self._delivery.change_model(renewal.model)

    def _put_away(self) -> None:
        """Drops the binding: from now on no call takes parameters that have half left it for the model's."""
        if self._binding is not None:
            self._left, self._binding = self._binding, None

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        feed = self._delivery.feed
        return feed.while_host_waits() if feed is not None else contextlib.nullcontext()

    def _waits_no_more(self) -> None:
        if self._delivery.feed is not None:
            self._delivery.feed.host_goes_on()

    def rebind(self, model: torch.nn.Module | None = None) -> None:
        """Goes on with a model that has other parameters: adapters were attached or merged, a layer was added.

        model: the changed model; None: the one that was passed before, which was changed in place. Parameters that stay
        are the same objects, with their values and gradients, so an optimizer keeps its state for them; give it the
        new ones (`add_param_group()`). Steps, position in the data, generators of the runners and checkpoints
        (`run_id`) go on. All runners begin with the buffers that the model has here.

        Ends the processes and starts others, which takes as long as start(). Raises ModelError for a model that a
        manager cannot train; the manager is as before then. When it raises in the start, the model has memory of its
        own; start() or the next step() tries again, also after Ctrl-C.
        """
        self._check_idle("rebind")
        if self._model is None:
            raise UsageError("rebind(): the model of this manager is no module of this process")
        self._check_owner("rebind")
        if self._stopped:
            raise UsageError("rebind() was called after stop()")
        if not self._handle.started and self._renewal is None:
            raise UsageError("rebind() was called before start()")
        changed = self.model if model is None else model
        arguments.check(changed, None, None)
        if not isinstance(changed, torch.nn.Module):
            raise ModelError(f"rebind(): the model is a {type(changed).__name__}; it must be a torch.nn.Module")
        if changed is not self.model:
            self._check_unbound(changed)
        self._begin_kind(None)
        changed = self._whole(changed)
        self._delivery.check_model(changed, self._method)
        self._renewal = _Renewal(changed, goes_on=True)
        self.start()

    def resize(self, runners: int) -> None:
        """Makes ranks 0 to runners - 1 the team from the next step on; at most `runners.max_runners`."""
        self._check_idle("resize")
        self._begin_kind(None)  # Runners that join do not have what inner steps have made.
        self._beside_fork_server(lambda: self._handle.resize(runners))

    def recover(self) -> None:
        """Starts a new manager process over the same session.

        Requires: a step returned `manager_lost`.
        """
        self._check_idle("recover")
        if self._inner is not None:
            renewed = self._finish_renewal("recover")
            if self._inner.ahead > 0:
                return self._inner.go_back()
            if renewed:
                return
        if self._method != "fork":
            return self._handle.recover()
        self._fork_anew(self._handle.recover)

    def refresh(self) -> None:
        """Ends the processes and starts others, which know everything that this process has changed meanwhile.

        With the start method `fork` they are forks of this process as it is now, over the same session; otherwise
        model and dataset are pickled again, and this is rebind(). Position in the data, generators of the runners,
        parameters, gradients and buffers go on, and tensors that forward() keeps in attributes of modules. What
        forward() or the dataset has left in other objects is lost. Elements that were read ahead (`prefetch`) are read
        again. Where this process cannot be forked any more (it has used CUDA, for instance), `auto` goes on with
        processes of `spawn`, with a warning; with the start method `fork` that is a SessionError.
        """
        self._check_idle("refresh")
        if self._method != "fork":
            return self.rebind()
        self.sync()
        self._is_refreshing = True
        try:
            self._fork_anew(self._handle.refresh)
        except Error:  # Not what a signal handler has raised: then the next step refreshes.
            self._is_refreshing = False
            raise

    def call(self, function: Callable[[torch.nn.Module], Any], rank: int = 0) -> Any:
        """Returns what `function(model)` returns in the runner of `rank`, with its model, and its globals in a fork.

        For what forward() has left there: a metric, a counter, a list. It runs between two steps, never in an attempt;
        what it changes stays in that runner, and buffers come back with the next step. What it returns is pickled.
        Blocks, for at most `step_timeout`. Raises UsageError for a function that cannot be pickled and for models of
        services, ModelError with the traceback of what the function has raised, RunnerError when the runner is lost.
        """
        self._check_idle("call")
        self._check_owner("call")
        if (calls := self._delivery.calls) is None:
            raise UsageError("call(): the model of this manager is no module that was passed to it")
        calls.put(function, self._method == "fork")
        with self._waiting():
            self._handle.call(rank)
        return calls.result()

    def _beside_fork_server(self, call: Callable[[], None]) -> None:
        """Makes the call. If the fork server was lost, this process, which alone forks one, does so and calls again."""
        try:
            call()
        except RunnerError:
            if self._method != "fork" or not self._handle.fork_server_ended:
                raise
            self._replace_fork_server("makes the call again")
            call()

    def _replace_fork_server(self, then: str) -> None:
        logger.warning("the fork server was lost; this process forks another, and %s", then)
        self.refresh()

    def _fork_anew(self, call: Callable[[], None]) -> None:
        """Makes `call`, so that the processes that it makes know all that this process has changed."""
        self._check_owner(call.__name__)
        if why := start_methods.why_not_forked(self._handle.device):
            if self._start_method == "fork":
                raise SessionError(f"{call.__name__}(): other processes cannot be forked, because {why}")
            return self.rebind()  # It warns, too.
        self._bound.check()
        self._bound.check_buffers()
        self._delivery.refresh(self._following.told() if self._following is not None else [])
        self._bound.find_aliases()
        before = self.counts().manager_pid
        try:
            with self._waiting():
                call()
        finally:
            self._waits_no_more()
            if self.counts().manager_pid != before:  # Also if a signal handler has raised since.
                self._is_refreshing = False
                aliases.forget(self._model)
                self._bound.begin_again()
                if self._following is not None:
                    self._following.begin()

    def go_back_to(self, standing: Standing) -> None:
        self._renewal = _Renewal(None, goes_on=True, back_to=standing)
        self.start()

    def _begins_again(self, result: _native.StepResult) -> bool:
        if self._inner is not None and result.status == "runner_lost" and self._handle.replaces_runners:
            if not self._inner.are_others() and not self._handle.fork_server_ended:
                return False
            self._inner.renew(has_given_up=self._handle.gave_up)
            return True
        if self._method == "fork" and result.status == "timeout":
            start_methods.say_what_forks_lack()
        if self._method != "fork" or result.counted or not self._handle.fork_server_ended:
            return False
        if result.status != "runner_lost" or not self._handle.replaces_runners:
            return False
        self._replace_fork_server("repeats the step")
        return True

    def _finish_renewal(self, call: str) -> bool:
        if self._renewal is None:
            return False
        self._check_owner(call)
        self.start()
        return True

    def _check(self) -> None:
        if not self._finish_renewal("step") and (changing := self._bound.changing()):
            self._delivery.make_room(changing)
            self._start_again(self.counts().steps)
        super()._check()

    def _follow(self) -> None:
        if self._refreshes == "always" or self._is_refreshing:
            self.refresh()
        elif self._following is not None and (what := self._following.look()):
            if self._method != "fork":
                raise ModelError(
                    f"after the start this was changed: {what}. Processes of the start method '{self._method}' cannot "
                    "be told: call manager.refresh(), which starts others, or pass start_method='fork'; or "
                    "refresh='never' if they need not know"
                )
            logger.info("runners begin anew, because this has changed: %s", what)
            self.refresh()

    def stop(self) -> None:
        """Ends runners, fork server and manager in bounded time; idempotent. Parameters and gradients stay readable."""
        self._cancel_pending()
        if self._inner is not None and not self._stopped and self._handle.started and self._inner.ahead:
            logger.warning("stop(): %d inner steps since the last sync are lost: call sync() before", self._inner.ahead)
        self._handle.stop()
        self._stopped, self._renewal, self._pending = True, None, None
        self._delivery.end()

    def __repr__(self) -> str:
        """<accelmgr.Manager running: 2 runners, step 17>. Any thread may call it at any time."""
        try:
            state = status.text_of(self._handle, self._stopped)
        except Exception:  # __init__() has failed, or another process has made this manager.
            state = "of another process" if getattr(self, "_owner", os.getpid()) != os.getpid() else "not started"
        return f"<{type(self).__module__.partition('.')[0]}.{type(self).__qualname__} {state}>"

    def __enter__(self) -> Manager:
        if not self._handle.started:
            self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        try:
            if kind is None and not self._stopped:
                self._cancel_pending()
                self.sync()
        finally:
            self.stop()


def attach(
    service: str | os.PathLike[str] = "", *, name: str = "", timeout: float = 10.0, keep_gradients: bool = False
) -> Manager:
    """Becomes the host that drives the session of a service (`accelmgr serve`).

    service: the name of the session, or the path of its socket, which has a slash (os.PathLike is always a path);
    empty: the service without a name.

    The Manager works as one that this process has started, for a built-in model: `parameters()` are those of the
    service. There is one such host at a time. stop() and the end of this process let the next one attach, and the
    service goes on; parameters and gradients are private copies then. recover() does not apply.

    name: how the service names this host to others; empty: the name of this program. timeout: seconds to wait while the
    service starts, or while another host is ending.

    keep_gradients: the first step adds to the gradients that an earlier host has left (`Manager.left_gradients`);
    otherwise it overwrites them.

    Optimizers of torch.optim mark their updates of the parameters: if this process is killed in one, the next host is
    told (`Manager.unfinished`), and the service makes no step and no checkpoint of what is half written. Hosts are told
    until one has written parameters in writing() or update_model_parameters(): all of them, or none to go on with them
    as they are.

    Raises ConfigError: `service` is neither a name nor a path; SessionError: there is no service, another host drives
    the session, or the service is of another build.
    """
    return Manager._of_service(arguments.socket_of(service), name, timeout, keep_gradients)
