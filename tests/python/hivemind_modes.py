"""Trains hivemind peers in one process and compares each with a peer of plain PyTorch.

No result depends on the clock. By default a hivemind peer ends an epoch also when it expects the other peers to have
enough samples; here it learns their progress only in see_all(). A group averages only when all peers are in it, and no
late peer is left out. Each plain peer adds up its contribution to an epoch, so that both have the same batches in it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import functools
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import hivemind
import torch
from oracle import Oracle

import accelmgr

EPOCHS = 3
RUNNERS = (2, 1)  # Runners of each peer: the first contributes twice as many samples in a step as the second.
BATCH = 4
TARGET = 16  # Samples in an epoch, summed over all peers: 2 steps if the first peer trains alone.
BOUND_S = 60  # Limit of every wait for another process or thread.
REQUEST_S = 10.0  # A peer repeats a request that is unanswered for so long, even if it is in a group by then.
NEVER_S = 1e6
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
CLOSE_IN_16_BITS = {"rtol": 2e-2, "atol": 2e-3}  # Of the mean over peers: hivemind rounds it at other places.

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": functools.partial(torch.optim.Adam, lr=0.01),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}
SCHEDULER = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.7)


# torch imports its compiler with the first optimizer. Making one here saves each fork that import.
OPTIMIZERS["SGD"]([torch.nn.Parameter(torch.zeros(1))])


class Mode:
    """Options of hivemind.Optimizer, and how the training loop steps and zeroes gradients with them."""

    def __init__(self, *, accumulate: bool = False, zero_grad_of: str = "", **options: Any) -> None:
        self.options = options
        self.accumulate = accumulate  # manager.step(accumulate=)
        self.zero_grad_of = zero_grad_of  # The attribute whose zero_grad() is called after optimizer.step(), or "".
        self.is_local = bool(options.get("use_local_updates"))
        self.is_offloaded = bool(options.get("offload_optimizer", not self.is_local))  # hivemind's default.
        # True if the model has an update only after the optimizer.step() that follows the one that made it.
        self.is_delayed = bool(options.get("delay_state_averaging" if self.is_local else "delay_optimizer_step", False))


MODES = {
    "default": Mode(),
    "reuse_grad_buffers": Mode(accumulate=True, reuse_grad_buffers=True),
    "use_local_updates": Mode(use_local_updates=True, delay_state_averaging=True),
    "delay_optimizer_step": Mode(delay_optimizer_step=True, delay_grad_averaging=True),
    # Variants of these modes.
    "default, optimizer.zero_grad()": Mode(accumulate=True, zero_grad_of="optimizer"),
    "default, manager.zero_grad()": Mode(accumulate=True, zero_grad_of="manager"),
    "not offloaded": Mode(offload_optimizer=False),
    "not offloaded, reuse_grad_buffers": Mode(accumulate=True, reuse_grad_buffers=True, offload_optimizer=False),
    "use_local_updates, optimizer.zero_grad()": Mode(
        accumulate=True, zero_grad_of="optimizer", use_local_updates=True, delay_state_averaging=False
    ),
}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(6, 8)
        self.head = torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        result = self.head(torch.tanh(self.body(x.to(self.body.weight.dtype))))
        return {"loss": torch.nn.functional.mse_loss(result.float(), y)}


class Elements:
    """The elements of one peer; the same in each iteration."""

    def __init__(self, peer: int) -> None:
        self._peer = peer

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for index in itertools.count():
            x = torch.randn(6, generator=torch.Generator().manual_seed(1000 * index + self._peer))
            yield {"x": x, "y": torch.sin(3 * x[:2])}


class Plain:
    """A peer of plain PyTorch, without accelmgr and hivemind. It reads the other peers as objects."""

    def __init__(self, model: Net, mode: Mode, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.mode = mode
        self.model = copy.deepcopy(model)
        # An offloaded optimizer has its own parameters, which are copied into the model at the end of an epoch.
        self.optimized = copy.deepcopy(model) if mode.is_offloaded else self.model
        self.optimizer = make(self.optimized.parameters())
        # hivemind makes one step with zero gradients to create the optimizer's state. It decays weights and counts.
        self.step_with([torch.zeros_like(parameter) for parameter in self.optimized.parameters()])
        self.scheduler = SCHEDULER(self.optimizer)
        self.next_model: Net | None = None  # A delayed update: the next optimizer.step() copies it into the model.
        self.rate_is_due = False
        self.start_epoch()

    def start_epoch(self) -> None:
        self.total = [torch.zeros_like(parameter) for parameter in self.model.parameters()]
        self.samples = 0

    def step_with(self, gradients: list[torch.Tensor]) -> None:
        for parameter, gradient in zip(self.optimized.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        self.optimizer.step()

    def set_rate(self) -> None:
        if self.rate_is_due:
            self.scheduler.step()
        self.rate_is_due = False

    def add(self, gradients: list[torch.Tensor], samples: int) -> None:
        """Does what optimizer.step() does within an epoch. `gradients` are those of the model before the call."""
        if self.next_model is not None:
            copy_(self.model, self.next_model)
        self.next_model = None
        if self.mode.is_local:
            self.step_with(gradients)
            self.set_rate()
        for total, gradient in zip(self.total, gradients, strict=True):
            total += gradient * samples
        self.samples += samples

    def end_epoch(self, peers: list[Plain]) -> Callable[[], None]:
        """Reads the state of all peers. Returns a function that writes; call it when all peers have read."""
        if self.mode.is_local:
            mean = copy.deepcopy(self.model)
            with torch.no_grad():
                for parameter, *each in zip(
                    mean.parameters(), *(peer.model.parameters() for peer in peers), strict=True
                ):
                    parameter.copy_(torch.stack(each).mean(dim=0))
            return functools.partial(self._update, mean, is_alone=len(peers) == 1)
        samples = sum(peer.samples for peer in peers)
        gradients = [sum(totals) / samples for totals in zip(*(peer.total for peer in peers), strict=True)]
        return functools.partial(self._step_and_update, gradients)

    def _step_and_update(self, gradients: list[torch.Tensor]) -> None:
        self.step_with(gradients)
        self._update(self.optimized, is_alone=False)

    def _update(self, model: Net, is_alone: bool) -> None:
        self.start_epoch()
        self.rate_is_due = True
        # hivemind sets the rate after an optimizer's step or an averaging. A lone peer with local updates has neither.
        if not is_alone:
            self.set_rate()
        if self.mode.is_delayed:
            self.next_model = model
        else:
            copy_(self.model, model)


def copy_(target: torch.nn.Module, source: torch.nn.Module) -> None:
    with torch.no_grad():
        for own, value in zip(target.parameters(), source.parameters(), strict=True):
            own.copy_(value)


class Peer:
    """A model, its manager, hivemind's optimizer, and the plain peer to compare the model with."""

    def __init__(self, number: int, mode: Mode, optimizer: str, dtype: torch.dtype) -> None:
        self.number, self.mode, self.make = number, mode, OPTIMIZERS[optimizer]
        self.samples_per_step = RUNNERS[number] * BATCH
        torch.manual_seed(3)
        self.model = Net().to(dtype)
        self.close = CLOSE if dtype == torch.float32 else CLOSE_IN_16_BITS
        self.plain = Plain(self.model, mode, self.make)
        self.oracle = Oracle(self.model, Elements(number), nprocs=RUNNERS[number], batch_size_per_device=BATCH)
        self.oracle.model = self.plain.model
        self.manager = accelmgr.Manager(
            self.model,
            Elements(number),
            nprocs=RUNNERS[number],
            batch_size_per_device=BATCH,
            start_method="fork",
            step_timeout=BOUND_S,
        )
        self.dht: Any = None
        self.optimizer: Any = None

    def join(self, addresses: list[Any], peers: int) -> None:
        self.dht = hivemind.DHT(
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            initial_peers=addresses,
            start=True,
            use_relay=False,
            use_auto_relay=False,
            auto_nat=False,
            nat_port_map=False,
            startup_timeout=BOUND_S,
            wait_timeout=BOUND_S / 2,
        )
        averager = {"target_group_size": peers, "request_timeout": REQUEST_S}
        options = dict(self.mode.options)
        if not self.mode.is_local:
            options["grad_averager_factory"] = functools.partial(
                hivemind.optim.grad_averager.GradientAverager, **averager
            )
        self.optimizer = hivemind.Optimizer(
            dht=self.dht,
            run_id="modes",
            params=list(self.model.parameters()),
            optimizer=self.make,
            scheduler=SCHEDULER,
            target_batch_size=TARGET,
            batch_size_per_step=self.samples_per_step,
            matchmaking_time=1.5 * REQUEST_S,
            averaging_timeout=BOUND_S,
            # The default is matchmaking_time; a peer that is later is silently left out.
            next_chunk_timeout=BOUND_S,
            averager_opts=averager,
            tracker_opts={
                # By default all peers of this process have one key, and so count as one peer.
                "private_key": hivemind.utils.crypto.RSAPrivateKey(),
                **{f"{which}_refresh_period": NEVER_S for which in ("min", "max", "default")},
            },
            **options,
        )
        self.manager.check_optimizer(self.optimizer)

    def step(self) -> None:
        """Makes one step of the loop, and the same step of the plain peer except for the end of the epoch."""
        self.manager.step(accumulate=self.mode.accumulate).raise_for_status()
        self.oracle.zero_grad()
        self.oracle.step()
        self.plain.add([gradient.clone() for gradient in self.oracle.gradients()], self.samples_per_step)
        self.optimizer.step()
        if self.mode.zero_grad_of:
            getattr(self, self.mode.zero_grad_of).zero_grad()
        # The next optimizer.step() applies a background update only if it is complete by then: waits for it.
        pending = list(self.optimizer.state_averager.pending_updates)
        concurrent.futures.wait(pending, BOUND_S)
        assert all(update.done() and update.exception() is None for update in pending), "a round was not averaged"

    def see_all(self, peers: int) -> None:
        """Fetches the progress of all peers until it includes `peers` of them, this one among them."""
        tracker = self.optimizer.tracker
        end = time.monotonic() + BOUND_S
        while time.monotonic() < end:
            tracker.fetched_global_progress_this_epoch.clear()
            tracker.global_progress.next_fetch_time = 0
            tracker.global_state_updated.set()
            assert tracker.fetched_global_progress_this_epoch.wait(BOUND_S)
            if tracker.global_progress.num_peers == peers:
                return
        raise AssertionError(f"there are {tracker.global_progress.num_peers} peers, not {peers}")

    def compare(self, when: str) -> None:
        for (name, own), expected in zip(self.model.named_parameters(), self.plain.model.parameters(), strict=True):
            torch.testing.assert_close(
                own,
                expected,
                **self.close,
                msg=lambda text: f"peer {self.number}, {name}, {when}: {text}",  # noqa: B023
            )
        rate = self.optimizer.opt.param_groups[0]["lr"]
        assert rate == self.plain.optimizer.param_groups[0]["lr"], f"peer {self.number}, {when}: rate {rate}"


def train(peer: Peer, peers: list[Peer], barrier: threading.Barrier) -> None:
    try:
        start = copy.deepcopy(peer.model)
        for epoch in range(EPOCHS):
            steps = 0
            while peer.optimizer.local_epoch == epoch:
                peer.step()
                steps += 1
                if steps == 1 and epoch == 0:  # A peer is visible only after its first step. Later steps need not look.
                    barrier.wait(BOUND_S)
                    peer.see_all(len(peers))
                    barrier.wait(BOUND_S)  # A peer that sees another an epoch ahead would drop its gradients.
            assert peer.optimizer.local_epoch == epoch + 1
            barrier.wait(BOUND_S)
            write = peer.plain.end_epoch([other.plain for other in peers])
            barrier.wait(BOUND_S)
            write()
            peer.compare(f"epoch {epoch} of {steps} steps")
            barrier.wait(BOUND_S)
        peer.step()  # Applies a delayed update.
        peer.compare("after the last epoch")
        for parameter, old in zip(peer.model.parameters(), start.parameters(), strict=True):
            assert (parameter - old).abs().max() > 1e-3, "it has not trained"
    except BaseException:
        barrier.abort()
        raise


def run(mode: str, optimizer: str, count: int, dtype: torch.dtype) -> None:
    """Trains `count` peers. Raises if one of them differs from plain PyTorch."""
    torch.set_num_threads(1)
    peers = [Peer(number, MODES[mode], optimizer, dtype) for number in range(count)]
    for peer in peers:
        peer.join(peers[0].dht.get_visible_maddrs() if peer is not peers[0] else [], count)
    barrier = threading.Barrier(count)
    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        trained = [threads.submit(train, peer, peers, barrier) for peer in peers]
    errors = [error for error in (future.exception() for future in trained) if error is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    for peer in peers:
        peer.manager.stop()


def run_as_group(mode: str, optimizer: str, count: int, dtype: torch.dtype) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        run(mode, optimizer, count, dtype)
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def assert_equals_plain_torch(mode: str, optimizer: str, count: int, dtype: torch.dtype = torch.float32) -> None:
    """Calls run() in a forked child, and kills the child's process group afterwards.

    hivemind keeps descriptors open until its process ends and takes seconds to shut down; killing the group, which
    includes the processes that hivemind forks, avoids both.
    """
    child = multiprocessing.get_context("fork").Process(target=run_as_group, args=(mode, optimizer, count, dtype))
    child.start()
    assert child.pid is not None
    with contextlib.suppress(ProcessLookupError):  # The child calls setpgid() too; it may have ended.
        os.setpgid(child.pid, child.pid)
    try:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    finally:
        os.killpg(child.pid, signal.SIGKILL)  # The child is not reaped yet, so that no other group has this number.
        child.join()
        code = child.exitcode
        child.close()
    assert code == 0
