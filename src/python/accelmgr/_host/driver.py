# Runs in: the host.
"""What a host does with a session: it steps, reads and writes parameters, saves checkpoints."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from accelmgr import _native
from accelmgr._host import checkpoint_state as _state
from accelmgr._host import optimizers
from accelmgr._host.binding import Binding
from accelmgr._host.pending import PendingSteps
from accelmgr._host.session_updates import Numbers
from accelmgr._memory.tensors import addressed
from accelmgr._model.objective import model_of
from accelmgr._updates.inner import Order
from accelmgr.errors import ManagerLost, SessionError, UsageError

MOST_LOSSES = 3
"""How often a step begins again with other processes before the host hears of it."""


LOOK_S = 0.02
"""How often a service is asked for news of the steps that it makes."""


def carry(error: BaseException, made: list[_native.StepResult]) -> None:
    """Adds the result of the last step, if one was made, to what a signal handler has raised."""
    if made and not hasattr(error, "step_result"):
        error.step_result = made[-1]  # type: ignore[attr-defined]


class Driver:
    """Drives a session that is there. A class derived from it makes the handle and binds the session."""

    _handle: _native.Handle
    _update: optimizers.Update | None = None  # Set for a service.
    _pending: PendingSteps | None = None  # What begin_steps() has returned last.
    _keeps_zeros = False  # Whether `.grad` is zero, and not None, where no step has given a gradient.

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._model = model
        self._owner = os.getpid()
        self._binding: Binding | None = None
        self._stopped = False
        self._resumed: _native.Resumed | None = None
        self._made: list[_native.StepResult] = []  # By the last call of step().
        self._untold: list[_native.CheckpointWritten] = []  # Not returned yet, because a signal handler raised.
        self._unshown: tuple[list[_native.StepResult], bool] = ([], False)

    @property
    def _bound(self) -> Binding:
        if self._binding is None:
            raise UsageError(
                "this manager has no processes: it was not started, or rebind() was interrupted; call start()"
            )
        return self._binding

    def _check_owner(self, call: str) -> None:
        if os.getpid() != self._owner:
            raise UsageError(f"{call}() in a forked child; the manager belongs to process {self._owner}")

    def _check_idle(self, call: str) -> None:
        """Raises UsageError while the thread of begin_steps() makes steps, except in that thread."""
        if self._pending is not None and self._pending.is_elsewhere():
            self._check_owner(call)
            raise UsageError(
                f"{call}() was called while steps of begin_steps() are under way: call result() or cancel() of "
                "`pending_steps` before"
            )

    def _check(self) -> None:
        """Before a step: takes over what this process has done to parameters and gradients."""
        self._bound.check()

    def _follow(self) -> None:
        """Before a step: makes the runners know what this process has changed since the last one."""

    def _check_thread(self) -> None:
        """Raises UsageError if no other thread than the calling one can step."""

    def _begin_kind(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Steps of another kind follow: inner ones of `optimizer`, or those whose gradients this process applies."""

    def _order(self, optimizer: torch.optim.Optimizer | None, clip_grad_norm: float | None) -> Order | None:
        """Before an inner step: tells the runners what is to be done."""
        return None

    def _session_update(self, clip_grad_norm: float | None) -> Numbers | None:
        """What the session itself is to do in an inner step, where runners cannot have the optimizer."""
        return None

    def sync(self) -> None:
        """Brings parameters and the optimizer's state up to date, if runners have made inner steps since the last sync.

        state_dict(), save_checkpoint(), steps() at its end and the end of a `with` block call it, stop() does not.
        Blocks while runners copy. Raises SessionError when ranks have different parameters, or are lost again and
        again, ModelError with what the optimizer has raised in a runner.
        """

    @property
    def synced_step(self) -> int:
        """The step after which the parameters were as this process has them."""
        return self._handle.statistics(memory=False).steps

    def _begins_again(self, result: _native.StepResult) -> bool:
        """Whether processes that were lost in this step have been replaced. Then the step is to be repeated."""
        return False

    def _note_counted(self, result: _native.StepResult) -> None:
        """Called when a step was committed."""

    def _makes_room(self) -> bool:
        """Whether the session was made again, with room for what a micro-batch has made larger, new, or changed."""
        return False

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        """The block in which this process waits for the manager process."""
        return contextlib.nullcontext()

    def _waits_no_more(self) -> None:
        """Repeats the end of _waiting(), which a signal handler may have cut short."""

    # Steps

    def step(
        self,
        timeout: float | None = None,
        accumulate: bool = True,
        parameters_changed: bool = True,
        repeat: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
        clip_grad_norm: float | None = None,
    ) -> _native.StepResult:
        """Makes one step with all runners: adds their mean gradient to the master's gradients.

        optimizer: an inner step. Runners update the parameters themselves, by this optimizer, and keep them: call
        neither optimizer.step() nor zero_grad(). Its param_groups may change between steps, as schedulers change them.
        The parameters of this process are those of the last sync(). clip_grad_norm: the mean gradient is clipped to
        this norm before. An optimizer that runners cannot have raises UsageError. Where they can have none (a built-in
        model, attach(), a device of torch_xla or torch.accelerator) the session itself makes the updates of SGD, Adam
        and AdamW, on the CPU, as a part of the step: whatever is killed, it counts with its update in full or not at
        all. Parameters and the optimizer's state are up to date after each step then; the numbers are those of torch
        but for rounding.

        accumulate=False: overwrites the master's gradients. parameters_changed=False: the caller has written no
        parameter since the last step. repeat=True: computes on the elements of the last step again, which LBFGS, SAM
        and line searches need; it is a step in all else. It needs `data={"keep_last_step": True}`, which costs the
        memory of these elements.

        Blocks until the step is done, or for `timeout` seconds (default: step_timeout). An inner step that is committed
        in this time is waited for, until all runners have made the update, at most step_timeout. Ctrl-C ends the wait.
        The KeyboardInterrupt, or what another signal handler raises, then has the result as `step_result`; gradients
        were added only if its `counted` is true.
        step() returns a result also for a step that failed. Unpacking a result that is not `ok`, as in
        `loss, samples = manager.step()`, raises its typed error.

        Raises UsageError (stopped, another thread, no elements to repeat), ModelError (a parameter was replaced, or its
        memory is no longer the session's).
        """
        if clip_grad_norm is not None and optimizer is None:
            raise UsageError("step(): clip_grad_norm is for inner steps, with an optimizer")
        if optimizer is not None and (repeat or not parameters_changed):
            raise UsageError("step(): repeat and parameters_changed are not for inner steps")
        self._check_idle("step")
        optimizers.check_evaluation(repeat)
        if self._update is not None:
            optimizers.mark_hivemind()
        made: list[_native.StepResult] = []
        try:
            # Between two uses of the handle another thread would have this one refused.
            with self._handle.alone("step"):
                self._begin_kind(optimizer)
                return self._step_alone(
                    made, (timeout, accumulate, parameters_changed, repeat, optimizer, clip_grad_norm)
                )
        except BaseException as error:
            carry(error, made)
            raise

    def _step_alone(
        self,
        made: list[_native.StepResult],
        how: tuple[float | None, bool, bool, bool, torch.optim.Optimizer | None, float | None],
    ) -> _native.StepResult:
        """how: the arguments of step()."""
        self._made = made
        try:
            self._step_once(made, *how)
            for _ in range(MOST_LOSSES):
                if not self._begins_again(made[-1]):
                    break
                self._step_once(made, *how)
            if not made[-1].counted and self._makes_room():
                return self._step_alone(made, how)
            if made[-1].counted:
                self._note_counted(made[-1])
            return made[-1]
        except BaseException as error:
            carry(error, made)
            self._waits_no_more()
            self._show()
            raise

    def _step_once(
        self,
        made: list[_native.StepResult],
        timeout: float | None,
        accumulate: bool,
        parameters_changed: bool,
        repeat: bool,
        optimizer: torch.optim.Optimizer | None,
        clip_grad_norm: float | None,
    ) -> None:
        """Appends the result to `made`: a signal handler may raise before this has returned."""
        with self._update.interrupted() if self._update is not None else contextlib.nullcontext():
            self._show()
            self._check()
            self._follow()
            if inner := self._order(optimizer, clip_grad_norm):
                accumulate, parameters_changed = False, inner.loads
            if update := self._session_update(clip_grad_norm):
                accumulate = False
            self._bound.send_changes()
            if self._update is None and self._bound.master.is_empty:
                accumulate = False  # Zero plus -0.0 would be 0.0.
            self._unshown = made, not accumulate or self._handle.overwrites_next
            counts = (inner.repeated, inner.made) if inner else None
            with self._waiting():
                self._handle.step(made, timeout, accumulate, parameters_changed, repeat, counts, update)
            self._show()

    def _show(self) -> None:
        """Gives the model the gradients and buffers of the last step. Repeats what a signal handler has cut short."""
        made, overwritten = self._unshown
        if made:
            self._bound.show(made[-1].counted, overwritten)
            self._unshown = [], False

    def steps(
        self, count: int | None = None, *, sync_every: int | None = None, **options: Any
    ) -> Iterator[_native.StepResult]:
        """Calls step(**options) `count` times, or until the data ends, and yields each result.

        sync_every: with inner steps (optimizer=), sync() is called after so many of them, and at the end.
        Raises the typed error of a step that is not `ok`. The end of the data ends the iteration without an error.
        """
        try:
            yield from self._each_step(count, sync_every, options)
        except GeneratorExit:  # The loop has ended with `break`, for instance.
            with contextlib.suppress(UsageError):  # It has called stop().
                self.sync()
            raise

    def _each_step(
        self, count: int | None, sync_every: int | None, options: dict[str, Any]
    ) -> Iterator[_native.StepResult]:
        """As steps(), but whoever leaves it before its end syncs when needed."""
        if sync_every is not None and sync_every < 1:
            raise UsageError(f"steps(): sync_every is {sync_every}; it must be at least 1")
        done = 0
        while count is None or done < count:
            before = self._made
            try:
                result = self.step(**options)
                if result.status == "data_end" and not result.error_type:
                    break
                result.raise_for_status()
            except BaseException as error:
                if self._made is not before:
                    carry(error, self._made)
                raise
            done += 1
            if sync_every is not None and done % sync_every == 0:
                self.sync()
            yield result
        self.sync()

    def begin_steps(
        self,
        n: int,
        *,
        optimizer: torch.optim.Optimizer,
        clip_grad_norm: float | None = None,
        sync_every: int | None = None,
        timeout: float | None = None,
    ) -> PendingSteps:
        """Begins `n` inner steps, which a thread makes as steps() would, with the last sync(), and returns.

        Returns at once, unless runners do not have the optimizer as it is now (before the first inner step, for
        instance): then it blocks until they are forked. timeout: of each step, in seconds (default: step_timeout).

        Until the steps are over, calls that step, write or change the session raise UsageError, in all threads. stop()
        and the end of a `with` block cancel them. Parameters and the optimizer's state change at each sync, so read
        and write them when the steps are over. A step takes what param_groups say when it begins: which step sees a
        change that is made meanwhile is not specified. Settings of torch, and context variables, are those of this
        call. A dataset that this process reads (a generator) shares the random generators with all else that draws here
        meanwhile.

        After attach() the service makes the steps, all of them with the present param_groups. They go on when this
        process ends, detaches, or is killed; `pending_steps` of the next host has the results. cancel() ends them,
        stop() does not.

        Raises UsageError for an optimizer that runners cannot have, and for a dataset that only one thread may read.
        """
        self._check_idle("begin_steps")
        if self._stopped:
            raise UsageError("begin_steps() was called after stop()")
        self._check_thread()
        with self._handle.alone("begin_steps"):
            self._begin_kind(optimizer)
        how: dict[str, Any] = {"optimizer": optimizer, "clip_grad_norm": clip_grad_norm, "timeout": timeout}
        attached = self._handle.is_attached
        pending = self._steps_of_service() if attached else PendingSteps(self._each_step(n, sync_every, how))
        try:
            if attached:
                self._begin_at_service(n, clip_grad_norm, timeout)
            self._pending = pending
            pending.begin()
            return pending
        except BaseException:  # A signal handler may have raised, and the caller cannot cancel what it does not have.
            pending.leave()
            if attached:
                with contextlib.suppress(SessionError):
                    self._handle.cancel_service_steps()
            raise

    @property
    def pending_steps(self) -> PendingSteps | None:
        """What begin_steps() has returned last.

        After attach(): the steps that an earlier host of the service has begun with it, if no other step was made
        since. They may be under way: calls that step, write or change the session raise UsageError until they are over.
        """
        return self._pending

    def _begin_at_service(self, count: int, clip_grad_norm: float | None, timeout: float | None) -> None:
        with self._update.interrupted() if self._update is not None else contextlib.nullcontext():
            self._check()
            update = self._session_update(clip_grad_norm)
            assert update is not None
            self._bound.send_changes()
            self._handle.begin_service_steps(count, timeout, update)

    def _steps_of_service(self) -> PendingSteps:
        return PendingSteps(self._told_by_service(), self._handle.cancel_service_steps)

    def _told_by_service(self) -> Iterator[_native.StepResult | None]:
        told: list[_native.StepResult] = []
        more, error = True, ""
        while more:
            try:
                more, error, news = self._handle.service_steps(len(told))
            except SessionError as gone:
                raise ManagerLost(str(gone), self._handle.statistics(memory=False).steps + 1, -1) from None
            told += news
            yield from (result for result in news if result.counted)
            if more and not news:
                time.sleep(LOOK_S)
                yield None
        if counted := [result for result in told if result.counted]:
            self._bound.show(counted=True, overwritten=True)
            self._note_counted(counted[-1])
        if error:
            raise SessionError(error)
        if told and not (told[-1].status == "data_end" and not told[-1].error_type):
            told[-1].raise_for_status()

    def _cancel_pending(self) -> None:
        if self._pending is not None and self._pending.is_elsewhere():
            self._pending.leave()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes the master's gradients. As in torch, `.grad` is None then until a step gives a gradient.

        set_to_none=False: `.grad` stays, as zeros. After an inner step it does nothing: the next one overwrites them.
        """
        self._check_idle("zero_grad")
        self._bound.check()
        self._bound.master.zero(set_to_none)

    # Parameters and buffers

    @property
    def model(self) -> torch.nn.Module | None:
        """The model that was passed; its parameters are the master's. None for a built-in model."""
        return model_of(self._model)

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """The master's parameters, each once, in the master's order. Views of the memory of the model's parameters."""
        self._check_owner("named_parameters")
        return list(self._bound.master.parameters)

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters for an optimizer: leaves whose memory and `.grad` are the master's.

        They are those of `model.parameters()`, in that order, then those of `extra` and `loss`. For a built-in model,
        of which this process has no module, they are in the master's order.
        """
        if self._binding is None:
            return list(self._model.parameters()) if self._model is not None else []
        return self._binding.parameters()

    def named_gradients(self) -> list[tuple[str, torch.Tensor]]:
        """The master's gradients, in the order of named_parameters(). Views."""
        self._check_owner("named_gradients")
        return list(self._bound.master.gradients)

    def get_aggregated_gradients(self) -> list[torch.Tensor]:
        """The master's gradients in the order of `parameters()`; views of shared memory, no copies."""
        self._check_idle("get_aggregated_gradients")
        self._check_owner("get_aggregated_gradients")
        return self._bound.gradients()

    def gradients32(self) -> list[torch.Tensor]:
        """The master's gradients in the order of `parameters()`, in float32 where the parameter has 16 bits.

        Needs `gradients.dtype: float32`; `.grad` is then a rounded copy of what this returns. Views of shared memory.
        What is written into `.grad` goes to the master with the next call of this object, rounded.
        """
        self._check_idle("gradients32")
        self._check_owner("gradients32")
        return self._bound.gradients(exact=True)

    def update_model_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Replaces all parameters, in the order of `parameters()`; runners compute with all of them or with none.

        Raises ModelError for a wrong count, shape or dtype; then nothing was changed. A background thread may call it
        between steps: see writing().
        """
        self._check_idle("update_model_parameters")
        self._bound.update([value.detach() for value in parameters])

    def update_buffers(self) -> None:
        """Sends all buffers of the host's model to the runners, which compute the next step with them.

        step() itself sends the buffers that were written in place or assigned. Call this after a write to a part of a
        buffer of more than 64 KiB that torch does not record in the tensor (`.data`, numpy()): of such a buffer a
        sample is compared. Raises ModelError for a buffer whose shape or dtype has changed.
        """
        self._check_idle("update_buffers")
        if self._binding is not None:
            self._binding.send_changes(everything=True)

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """`with manager.writing():` makes several writes in place one update: no runner computes with half of them.

        Needed for writes from a background thread. Buffers that are written inside reach the runners with the next
        step, as always. Raises UsageError inside another writing() and during a step. step() inside raises UsageError.
        Writes that an exception ends do not count as whole: see `unfinished`.
        """
        self._check_idle("writing")
        return self._handle.writing()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of the parameters and persistent buffers of the last committed step, by name.

        Tied tensors appear under each of their names. `model.load_state_dict(manager.state_dict())` takes it. Modules
        of `extra` and `loss` have a state_dict() of their own.
        """
        self._check_idle("state_dict")
        self.sync()
        return self._bound.state_dict()

    def buffers(self) -> dict[str, torch.Tensor]:
        """Copies of the buffers of the last committed step, by name; `buffers.policy` says of which ranks."""
        self._check_idle("buffers")
        return self._bound.buffers()

    def sync_buffers(self) -> None:
        """Copies the buffers of the last committed step into those of the host's model, over what was written there.

        step() itself does that for all buffers that the host has not changed meanwhile.
        """
        self._check_idle("sync_buffers")
        if self._model is not None:
            self._bound.sync_buffers()

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises UsageError, with the reason, for an optimizer that would train this model wrongly or not at all.

        Call it once, after the optimizer was made. It takes every optimizer of torch.optim but SparseAdam, LBFGS only
        with `data.keep_last_step`, and hivemind.Optimizer. Do not pass hivemind's inner optimizer (`.opt`): it may have
        parameters of its own, which hivemind copies into the model's. No other call checks the optimizer: one over
        other tensors changes these tensors, and the model stays as it is.
        """
        self._check_idle("check_optimizer")
        self._bound.check_optimizer(optimizer)

    # Checkpoints

    def save_checkpoint(
        self,
        metric: float | None = None,
        tensors: Mapping[str, torch.Tensor] | None = None,
        extra: Mapping[str, Any] | None = None,
        *,
        optimizer: Any = None,
        scheduler: Any = None,
    ) -> float:
        """Copies the whole training state; the manager writes it to `checkpoint.directory`. Returns the ms of the copy.

        metric: lower is better; the checkpoint with the lowest metric is kept. optimizer, scheduler: their state_dict()
        is saved; restore() loads it. extra: JSON values. tensors: further tensors, by names that the caller chooses.
        """
        self._check_idle("save_checkpoint")
        self.sync()
        self._bound.check()  # Gradients that were dropped since the last step must not come back.
        values, saved = _state.collected(extra or {}, tensors or {}, {"optimizer": optimizer, "scheduler": scheduler})
        return self._handle.save_checkpoint(metric, addressed(saved.items()), values)

    @property
    def checkpoint_requested(self) -> bool:
        """Whether a client of the service has asked for a checkpoint since the last save_checkpoint().

        A host looks between its steps, so that the checkpoint has its optimizer. Costs next to nothing. Always False
        for a manager that is no service.
        """
        return self._handle.checkpoint_requested

    def restore(self, optimizer: Any = None, scheduler: Any = None) -> dict[str, Any] | None:
        """Loads the saved states of optimizer and scheduler, if start() resumed from a checkpoint.

        After attach(): those that the last host saved with save_checkpoint(), also if it did so in an earlier life of
        the service; `resumed.extras_step` says after which step that was. Returns `extra` of that checkpoint. Returns
        None for a new run, and changes nothing then. Raises CheckpointError when the checkpoint has no state of the
        optimizer or scheduler that is passed.
        """
        self._check_idle("restore")
        if self.resumed is None:
            return None
        return _state.restored(self.resumed, {"optimizer": optimizer, "scheduler": scheduler})

    def checkpoints_written(self, wait: float = 0.0) -> list[_native.CheckpointWritten]:
        """Checkpoints that were written, or failed, since the last call; waits at most `wait` seconds for others."""
        self._check_idle("checkpoints_written")
        self._handle.checkpoints_written(self._untold, wait)
        told, self._untold = self._untold, []
        return told

    @property
    def resumed(self) -> _native.Resumed | None:
        """The checkpoint from which start() resumed (`checkpoint.resume`); None for a new run.

        After attach(): the last checkpoint of the service, with what a host has saved; None if none has saved yet.
        """
        return self._resumed if self._model is not None else self._handle.resumed

    @property
    def run_id(self) -> str:
        """The id of this run. Checkpoints hold it, and all runs that resume from them have the same one."""
        return self._handle.run_id

    # The session

    @property
    def unfinished(self) -> str:
        """What an earlier host of a service left half written when it ended, as a sentence; empty if nothing was.

        The parameters then have new values in part: write all of them, go back with revert_parameters(), or go on with
        them as they are.
        """
        return self._handle.unfinished

    def revert_parameters(self) -> None:
        """Sets the parameters to what they were before the write that `unfinished` names.

        Then `left_gradients` holds for them. Raises UsageError: nothing is half written, there is no snapshot, or a
        step or a write is under way.

        Requires: the service was started with `parameters.snapshot: true`.
        """
        self._check_idle("revert_parameters")
        self._handle.revert_parameters()

    @property
    def left_gradients(self) -> str | None:
        """What attach() has found: gradients of the last committed step that an earlier host has left.

        "unapplied": no parameter was written since; apply them. "applied": some were, or some gradients were zeroed;
        the host ended before it had zeroed all of them. The first step() overwrites them, unless
        `attach(keep_gradients=True)`.
        """
        return self._handle.left_gradients

    def statistics(self) -> _native.Statistics:
        """Counts, memory, and the state of each runner."""
        return self._handle.statistics()

    @property
    def config(self) -> str:
        """The whole configuration, as YAML."""
        return self._handle.config()
