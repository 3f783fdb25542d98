"""The handle on a manager process and its runners."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import GeneratorType, TracebackType
from typing import Any

import torch

from accelmgr import _arguments, _native, _sharing, _state
from accelmgr._arguments import Settings, settings_of
from accelmgr._child import embed
from accelmgr._feed import Feed, is_indexed
from accelmgr._payload import ForkedPayload, Payload, pickled, private_copies
from accelmgr._structure import Changes, Structure
from accelmgr.errors import CheckpointError, ConfigError, DataError, ModelError, UsageError

logger = logging.getLogger("accelmgr")

_STATES = "accelmgr"  # In the JSON of a checkpoint, beside what the user put there.
START_METHODS = ("spawn", "forkserver", "fork")

_bound: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Manager]] = weakref.WeakKeyDictionary()


def _warn_of_threads() -> None:
    """With a copy of this process other threads are gone, and what they held locked stays locked."""
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                names.append(file.read().strip())
        except OSError:  # It has ended.
            continue
    if len(names) > 1:
        logger.warning(
            "the start method 'fork' copies a process that has other threads (%s); what they hold locked stays locked "
            "in the manager. 'spawn' copies nothing",
            ", ".join(names),
        )


def _has_ended(pid: int) -> bool:
    """Of a child of this process, whether anybody has waited for it or not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _consumed_of(reference: weakref.ref[Manager]) -> Callable[[], int]:
    """Elements that committed steps have consumed; asked from the threads of a feed, which keep no manager alive."""

    def consumed() -> int:
        manager = reference()
        return manager._handle.statistics().elements if manager is not None else 0

    return consumed


class Manager:
    """Starts a manager process and its runners for `model` and `dataset`; steps them; holds the master's parameters.

    model: any torch.nn.Module on the CPU (forward and backward run in Python in the runners), or the name of a built-in
        one (`"gpt"`, `"torchscript"`, ...), which `config` or `model__gpt={}` describes and which needs no Python. Its
        parameters and their `.grad` become the session's memory: an optimizer steps on them in place. All parameters
        have one dtype, float32 or float64. The model's output is a mapping with "loss", a tuple that begins with the
        loss, or the loss; further 0-d numbers of a mapping arrive in `StepResult.scalars`, averaged like the loss.
        Instead of a module, a function without arguments that makes it, for modules that cannot be pickled
        (parametrizations). It is called once here, and once in each other process unless the start method is `fork`;
        `manager.model` is the one made here.
        Between steps the host may change what it likes in place: parameters, buffers, `train()` and `eval()` of any
        module, `requires_grad`. Runners compute the next step with it. Modules and parameters themselves stay.
        Hooks go along.
    dataset: any iterable, or a sequence (torch.utils.data.Dataset), of elements: mappings, tuples, or single tensors
        and numbers; or the name of a built-in source (`"text"`). Element i goes to runner i % nprocs, which makes
        batches of `batch_size_per_device` of them. A mapping becomes the keyword arguments of the model, a tuple the
        positional ones. It is read once, or `data.epochs` times. A DataLoader gives elements (batch_size=None); one of
        batches is refused, unless a collate_fn takes lists of these. What can be pickled is read in the manager
        process; another dataset, a generator for instance, in a thread of this one, from which elements are sent over.
    collate_fn: makes a batch of a list of elements, in the runner. Without one, elements of tensors are stacked as they
        are written to shared memory, at no further cost.
    nprocs, prefetch, batch_size_per_device, grad_accumulation_steps, seed_base: as in the configuration.
    start: False leaves that to start().
    config: a YAML file, or a mapping of configuration keys. Strongest first: `options`, a mapping, environment
        (ACCELMGR_...), a file, defaults. A key that nothing reads here (`optimizer.*`, `train.*`, `model.*` beside a
        module) is an error in a call, and a warning in a file or in the environment, which may serve `accelmgr train`
        as well.
    start_method: `spawn`: models and datasets are pickled with cloudpickle, what is defined in `__main__` included.
        `forkserver`: the same, but the interpreter with torch is started once, and forked for this manager and all
        later ones, which start in a fraction of the time.
        `fork`: the manager is a copy of this process, and nothing is pickled; what other threads hold locked stays
        locked in it (a warning names them), runners compute with one thread unless `runners.threads` says otherwise,
        and a launcher that is lost is not replaced.
    max_element_bytes: room for one element where elements are pickled (with a collate_fn, or not made of tensors);
        None: four times the first one, at least 64 KiB.
    options: further keys: `step_timeout=30`, `runners={"on_loss": "fail"}` or `runners__on_loss="fail"`.

    One thread at a time: a second one gets UsageError. In a forked child the handle is closed.

    Source: the class TPUManager of hivemind's examples; accelmgr.compat.tpu_manager has it under its own name.
    """

    def __init__(
        self,
        model: torch.nn.Module | Callable[[], torch.nn.Module] | str,
        dataset: Iterable[Any] | str,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        nprocs: int | None = None,
        prefetch: int | None = None,
        batch_size_per_device: int | None = None,
        grad_accumulation_steps: int | None = None,
        seed_base: int | None = None,
        start: bool = True,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        start_method: str = "spawn",
        max_element_bytes: int | None = None,
        **options: Any,
    ) -> None:
        if start_method not in START_METHODS:
            text = f"start_method is '{start_method}'; it is one of {', '.join(START_METHODS)}"
            raise ConfigError(text, "start_method")
        self._start_method = start_method
        self._factory = model if callable(model) and not isinstance(model, torch.nn.Module) else None
        if self._factory is not None:
            model = self._factory()
            if not isinstance(model, torch.nn.Module):
                name = getattr(self._factory, "__qualname__", repr(self._factory))
                raise ModelError(f"{name}, which is to make the model, returned a {type(model).__name__}")
        _arguments.check(model, dataset, collate_fn)
        if isinstance(model, torch.nn.Module):
            self._check_unbound(model)
        if max_element_bytes is not None and isinstance(dataset, str):
            raise ConfigError("max_element_bytes has no effect with a built-in dataset", "max_element_bytes")
        self._owner = os.getpid()
        self.collate_fn = collate_fn
        self._model = model if isinstance(model, torch.nn.Module) else None
        self._dataset = dataset
        self._payload: Payload | ForkedPayload | None = None
        self._feed: Feed | None = None
        self._structure: Structure | None = None
        self._changes: Changes | None = None
        self._leaves: list[torch.nn.Parameter] = []
        self._former_gradients: list[torch.Tensor | None] = []
        self._options = {"as_bytes": collate_fn is not None, "max_element_bytes": max_element_bytes or 0}
        self._stopped = False
        settings: Settings = []
        file = ""
        call = type(self).__name__
        if isinstance(config, Mapping):
            settings += settings_of(call, config, ("config",))
        elif config is not None:
            file = os.fspath(config)
        settings += settings_of(
            call,
            {
                "nprocs": nprocs,
                "prefetch": prefetch,
                "batch_size_per_device": batch_size_per_device,
                "grad_accumulation_steps": grad_accumulation_steps,
                "seed_base": seed_base,
            },
        )
        settings += settings_of(call, options)
        _arguments.check_kind(settings, "model", model)
        _arguments.check_kind(settings, "data", dataset)
        if isinstance(model, str):
            settings.append((f"model.kind={model}", f"{call}(model={model!r})"))
        if isinstance(dataset, str):
            settings.append((f"data.kind={dataset}", f"{call}(dataset={dataset!r})"))
        self._file, self._settings = file, settings
        embed()
        kinds = ["model.kind=python"] if self._model is not None else []
        kinds += ["data.kind=python"] if not isinstance(dataset, str) else []
        self._handle = self._load(kinds)  # What is wrong with the configuration is said before anything is moved.
        unread = self._handle.unread(self._model is not None, not isinstance(dataset, str))
        _arguments.check_read(unread, settings)
        self._options["epochs"] = _arguments.epochs_of(dataset, self._handle.epochs)
        if start:
            self.start()

    @staticmethod
    def _check_unbound(model: torch.nn.Module) -> None:
        if (bound := _bound.get(model)) is not None and (other := bound()) is not None and not other._stopped:
            raise UsageError("this model belongs to another manager already; stop() that one first, or pass a copy")

    def _load(self, own: list[str]) -> _native.Handle:
        """`own`: settings that nobody typed."""
        environment = {name: value for name, value in os.environ.items() if name.startswith("ACCELMGR_")}
        return _native.Handle(self._file, self._settings + [(assignment, "") for assignment in own], environment)

    def start(self) -> None:
        """Starts all processes; returns when all runners are ready. Blocks for at most `start_timeout`; Ctrl-C ends it.

        Raises ConfigError, ModelError, DataError, SessionError (memory), RunnerError, CheckpointError.
        """
        if self._handle.started:
            raise UsageError("start() of a manager that was started already")
        dataset = None if isinstance(self._dataset, str) else self._dataset
        unstarted = self._handle
        try:
            if self._start_method == "fork":
                _warn_of_threads()
                self._payload = ForkedPayload(self._model, dataset, self.collate_fn, self._options)
            else:
                self._payload = Payload(
                    self._model, self._factory, self._sent(dataset), self.collate_fn, self._options
                )
            where = self._payload.path
            settings: list[str] = []
            if self._model is not None:
                settings += ["model.kind=python", f"model.options.payload={where}"]
            if dataset is not None:
                settings += ["data.kind=python", f"data.options.payload={where}"]
            self._handle = self._load(settings)
            self._handle.start(self._start_method, self._bind)
        except BaseException:
            self._unbind()
            self._handle = unstarted
            self._close_payload()
            raise
        self._former_gradients = []
        if self._feed is not None:
            self._feed.follow(_consumed_of(weakref.ref(self)))
        if self._model is not None and self._structure is not None:
            _bound[self._model] = weakref.ref(self)
            self._changes = Changes(self._model, self._structure)
            if self.resumed is not None:
                self.sync_buffers()
            if not self._model.training:
                logger.warning(
                    "the model is in evaluation mode (model.training is False), and so runners compute; model.train() "
                    "switches dropout and batch statistics on"
                )
        _sharing.stay(self, [tensor for _, tensor in self._handle.parameters() + self._handle.gradients()])

    def _bind(self) -> None:
        """The session has the initial parameters, and no memory for gradients of runners yet: now they exist once."""
        if self._model is not None:
            self._structure = Structure(self._model)
            by_name = dict(self._model.named_parameters(remove_duplicate=False))
            self._leaves = [by_name[name] for name, _ in self._handle.parameters()]
        else:
            self._leaves = [torch.nn.Parameter(tensor) for _, tensor in self._handle.parameters()]
        self._former_gradients = [leaf.grad for leaf in self._leaves]
        self._handle.bind(self._leaves)
        assert self._payload is not None
        self._payload.release_values()

    def _unbind(self) -> None:
        """A model whose manager did not start is what it was."""
        copies = private_copies([leaf.data for leaf in self._leaves])
        for leaf, copy, gradient in zip(self._leaves, copies, self._former_gradients, strict=True):
            leaf.data = copy
            leaf.grad = gradient
        self._leaves, self._former_gradients = [], []

    def _sent(self, dataset: Any) -> bytes:
        """The dataset for the manager process: itself, or, where it cannot be pickled, the address of its feed."""
        if self._feed is not None:  # Of a start that failed: it has elements that the dataset will not give again.
            return pickled("dataset", self._feed.address)
        reason = "a generator"
        if not isinstance(dataset, GeneratorType):
            try:
                return pickled("dataset", dataset)
            except DataError as error:
                reason = str(error)
        logger.info("the dataset is read in this process and served from it: %s", reason)
        self._feed = Feed(dataset, _arguments.epochs_of(dataset, self._handle.epochs))
        weakref.finalize(self, self._feed.end)  # Before the manager process: its connection has not ended yet.
        return pickled("dataset", self._feed.address)

    # Steps

    def step(
        self, timeout: float | None = None, accumulate: bool = True, parameters_changed: bool = True
    ) -> _native.StepResult:
        """One step of all runners: adds one mean gradient to the master's, or, with accumulate=False, overwrites it.

        Blocks until it is done, or for `timeout` seconds (default: step_timeout). Ctrl-C ends it: KeyboardInterrupt, or
        what a signal handler raises, has the result as `step_result`, and nothing was added unless that has `counted`.
        `loss, samples = manager.step()` raises the typed error of a result that is not `ok`; the result itself
        never raises. parameters_changed=False: no parameter was written since the last step.

        Raises UsageError (stopped, another thread), ModelError (a parameter was replaced, or its memory is no longer
        the session's).
        """
        self._check_model()
        if self._changes is not None:
            self._tell(self._changes.take())
        return self._handle.step(timeout, accumulate, parameters_changed)

    def _tell(self, changes: list[tuple[str, torch.Tensor]]) -> None:
        if changes and self._changes is not None:
            self._handle.update_buffers(changes)
            self._changes.told()

    def _check_model(self) -> None:
        """Raises ModelError unless the parameters are the session's; puts gradients back that were set to None."""
        if self._structure is not None:
            self._structure.check()
        self._handle.look_after_bound()

    def steps(self, count: int | None = None, **options: Any) -> Iterator[_native.StepResult]:
        """`count` steps, or as many as the data has, one after the other, as step(**options) does them.

        Raises the typed error of a step that is not `ok`; the end of the data ends the iteration.
        """
        done = 0
        while count is None or done < count:
            result = self.step(**options)
            if result.status == "data_end" and not result.error_type:
                return
            result.raise_for_status()
            yield result
            done += 1

    def zero_grad(self) -> None:
        """Zeroes the master's gradients, in place."""
        self._check_model()
        self._handle.zero_grad()

    # Parameters

    @property
    def model(self) -> torch.nn.Module | None:
        """The model that was passed; its parameters are the master's. None of a built-in one."""
        return self._model

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """The master's parameters, each once, in its own order. Views: same memory as those of the model."""
        self._check_owner("named_parameters")
        return self._handle.parameters()

    def parameters(self) -> list[torch.nn.Parameter]:
        """What an optimizer takes: leaves whose memory and `.grad` are the master's, ordered as `model.parameters()`.

        Those of `model`; of a built-in one, whose parameters no module of this process has, in the master's order.
        """
        if self._model is None or self._structure is None:
            return self._leaves if self._model is None else list(self._model.parameters())
        self._structure.check()
        return list(self._structure.parameters)

    def named_gradients(self) -> list[tuple[str, torch.Tensor]]:
        """The master's gradients, in the order of named_parameters(). Views."""
        self._check_owner("named_gradients")
        return self._handle.gradients()

    def _check_owner(self, call: str) -> None:
        if os.getpid() != self._owner:
            raise UsageError(f"{call}() in a forked child; the manager belongs to process {self._owner}")

    def get_aggregated_gradients(self) -> list[torch.Tensor]:
        """The master's gradients in the order of `model.parameters()`; views of shared memory, no copies."""
        self._check_owner("get_aggregated_gradients")
        gradients = [gradient for _, gradient in self._handle.gradients()]
        if self._structure is None:
            return gradients
        self._check_model()
        by_leaf = dict(zip(map(id, self._leaves), gradients, strict=True))
        return [by_leaf[id(parameter)] for parameter in self._structure.parameters]

    def update_model_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Replaces all parameters, in the order of `model.parameters()`; runners compute with all of them or with none.

        Count, shapes and dtypes are checked before anything is written; ModelError, and nothing has changed then. May
        be called from a background thread between steps: see writing().
        """
        values = [value.detach() for value in parameters]
        ordered = self.parameters()
        if len(values) != len(ordered):
            raise ModelError(
                f"update_model_parameters: {len(values)} tensors for {len(ordered)} parameters; nothing was changed"
            )
        by_parameter = dict(zip(map(id, ordered), values, strict=True))
        self._handle.update_model_parameters([by_parameter[id(leaf)] for leaf in self._leaves])

    def update_buffers(self) -> None:
        """Tells the runners all buffers of the model as the host has them; they compute the next step with them.

        step() does so for those that were written in place or assigned. This is for writes that leave no trace in a
        tensor (`.data`, numpy()). Raises ModelError for one whose shape or dtype has changed.
        """
        if self._changes is not None:
            self._tell(self._changes.take(everything=True))

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """`with manager.writing():` around writes in place from elsewhere: no runner computes with half of them.
        Buffers that are written inside reach the runners with the next step, as always.

        Raises UsageError inside another one, and during a step; step() inside raises it.
        """
        bracket = self._handle.writing()
        try:
            yield
        finally:
            del bracket  # Its last reference: here the writes end.

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers of the last committed step, by name; what is tied, under each name. Copies.

        `model.load_state_dict(manager.state_dict())` takes it.
        """
        saved = dict(self._handle.state_dict())
        if self._model is None:
            return saved
        own = self._model.state_dict()  # Its order, and what else it has (get_extra_state()).
        return {name: saved[name] if name in saved else copy.deepcopy(value) for name, value in own.items()}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Buffers of the last committed step, by `buffers.policy`. Copies."""
        return dict(self._handle.buffers())

    def sync_buffers(self) -> None:
        """Copies the buffers of the last committed step into those of the model of this process."""
        if self._model is None:
            return
        buffers = self.buffers()
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
        if self._changes is not None:
            self._changes.note()

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises UsageError for an optimizer that would not, or not rightly, train this model, and says why.

        Call it once, after the optimizer was made. It takes every optimizer of torch.optim, and hivemind.Optimizer: not
        the one inside it (`.opt`), which may have parameters of its own that hivemind copies into the model's. Without
        this call nothing is checked: an optimizer over other tensors changes them, and the model stays as it is.
        """
        groups = getattr(optimizer, "param_groups", None)
        if groups is None:
            raise UsageError(
                f"check_optimizer: a {type(optimizer).__name__} has no param_groups; pass an optimizer of torch.optim, "
                "or a hivemind.Optimizer"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "LBFGS evaluates the loss several times in one step; a manager's step has one batch and no closure. "
                "Use an optimizer that steps once for a gradient"
            )
        self._check_model()
        own = {tensor.data_ptr() for _, tensor in self._handle.parameters()}
        for index, group in enumerate(groups):
            for parameter in group["params"]:
                if parameter.numel() and parameter.data_ptr() not in own:
                    raise UsageError(
                        f"the optimizer has a tensor of shape {list(parameter.shape)} in group {index} which is no "
                        "parameter of this manager; make it from manager.parameters()"
                    )

    # The team, checkpoints, the end

    def resize(self, runners: int) -> None:
        """Makes ranks 0 to runners - 1 the team from the next step on; at most `runners.max_runners`."""
        self._handle.resize(runners)

    def recover(self) -> None:
        """After a step returned `manager_lost`: a new manager over the same session."""
        self._handle.recover()

    def save_checkpoint(
        self,
        metric: float | None = None,
        tensors: Mapping[str, torch.Tensor] | None = None,
        extra: Mapping[str, Any] | None = None,
        *,
        optimizer: Any = None,
        scheduler: Any = None,
    ) -> float:
        """Copies all that training goes on from; the manager writes it to `checkpoint.directory`. Returns ms it took.

        metric: lower is better; the checkpoint with the lowest is kept. optimizer, scheduler: their state_dict() is
        saved, and restore() loads it. extra: JSON values. tensors: further ones, by names of the caller's.
        """
        every = dict(tensors or {})
        values = dict(extra or {})
        states = {"optimizer": optimizer, "scheduler": scheduler}
        saved = {
            what: _state.encode(owner.state_dict(), what, every) for what, owner in states.items() if owner is not None
        }
        if saved:
            values[_STATES] = saved
        return self._handle.save_checkpoint(metric, list(every.items()), json.dumps(values))

    def restore(self, optimizer: Any = None, scheduler: Any = None) -> dict[str, Any] | None:
        """Loads what save_checkpoint() had of optimizer and scheduler, if start() went on from a checkpoint.

        Returns `extra` of that checkpoint; None for a new run, and then nothing was changed. Raises CheckpointError
        when the checkpoint has no state of what is asked for.
        """
        if (resumed := self.resumed) is None:
            return None
        values: dict[str, Any] = json.loads(resumed.json)
        saved = values.pop(_STATES, {})
        tensors = dict(resumed.tensors)
        owners = {"optimizer": optimizer, "scheduler": scheduler}
        wanted = {what: owner for what, owner in owners.items() if owner is not None}
        for what in wanted:
            if what not in saved:
                raise CheckpointError(
                    f"{resumed.path} has no state of the {what}; save_checkpoint({what}=...) puts it there"
                )
        for what, owner in wanted.items():
            owner.load_state_dict(_state.decode(saved[what], tensors))
        return values

    def checkpoints_written(self, wait: float = 0.0) -> list[_native.CheckpointWritten]:
        """Those that were written, or could not be, since the last call; waits at most so many seconds for others."""
        return self._handle.checkpoints_written(wait)

    @property
    def resumed(self) -> _native.Resumed | None:
        """What start() went on from (`checkpoint.resume`); None for a new run."""
        return self._handle.resumed

    @property
    def run_id(self) -> str:
        """Of this run and of all that go on from its checkpoints, which hold it."""
        return self._handle.run_id

    def statistics(self) -> _native.Statistics:
        """Counts, memory, and the runners."""
        return self._handle.statistics()

    @property
    def config(self) -> str:
        """The whole configuration, as YAML."""
        return self._handle.config()

    def stop(self) -> None:
        """Ends runners, launcher and manager; bounded. Parameters and gradients stay readable. Idempotent."""
        self._handle.stop()
        self._stopped = True
        if self._feed is not None:
            self._feed.close()
        self._close_payload()

    def _close_payload(self) -> None:
        if self._payload is not None:
            self._payload.close()

    def __repr__(self) -> str:
        """<accelmgr.Manager running: 2 runners, step 17>. At any time, from any thread."""
        try:
            state = self._state()
        except Exception:  # Of a manager that was not made in full, or not by this process.
            state = "of another process" if getattr(self, "_owner", os.getpid()) != os.getpid() else "not started"
        return f"<{type(self).__module__.partition('.')[0]}.{type(self).__qualname__} {state}>"

    def _state(self) -> str:
        if not self._handle.started:
            return "not started"
        statistics = self._handle.statistics()
        if self._stopped:
            return f"stopped: step {statistics.steps}"
        if _has_ended(statistics.manager_pid):
            return f"lost: its manager process is gone, step {statistics.steps}"
        count = len(statistics.runners)
        return f"running: {count} runner{'s' if count != 1 else ''}, step {statistics.steps}"

    def __enter__(self) -> Manager:
        if not self._handle.started:
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
