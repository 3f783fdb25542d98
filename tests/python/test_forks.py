"""Checks that processes which the script forks have parameters and gradients for themselves, as in plain PyTorch."""

import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import accelmgr

fork = multiprocessing.get_context("fork")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3000))  # Of several pages.

    def forward(self, x):
        return (self.weight * x).sum()


ONES = [torch.ones(3000)] * 100


def in_child(function):
    """What `function` returns in a child that is forked now."""
    receives, sends = fork.Pipe(duplex=False)
    process = fork.Process(target=lambda: sends.send(function()))
    process.start()
    sends.close()
    try:
        return receives.recv()
    finally:
        process.join()
        receives.close()


def trained_in_child(model):
    def train():
        model(torch.full((3000,), 2.0)).backward()
        with torch.no_grad():
            model.weight.sub_(10.0)
        return model.weight.grad.sum().item(), model.weight.sum().item()

    return in_child(train)


waits_before_forks: dict[int, threading.Barrier] = {}  # By process.


def _wait_before_fork():
    if (barrier := waits_before_forks.get(os.getpid())) is not None:
        barrier.wait()


os.register_at_fork(before=_wait_before_fork)

OPTIONS = {"nprocs": 2, "batch_size_per_device": 1, "runners__threads": 1}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_a_child_computes_and_writes_is_its_own(method):
    model = Net()
    with accelmgr.Manager(model, ONES, start_method=method, **OPTIONS) as manager:
        manager.step()
        for _ in range(2):
            assert trained_in_child(model) == (3000 * 3.0, 3000 * -9.0)
            assert model.weight.grad.eq(1).all() and model.weight.eq(1).all()
        manager.step()
        assert model.weight.grad.eq(2).all()
    assert trained_in_child(model) == (3000 * 4.0, 3000 * -9.0)  # The session stays mapped.
    assert model.weight.grad.eq(2).all() and model.weight.eq(1).all()


def test_processes_of_a_manager_that_are_forked_later_work_on_the_session():
    model = Net()
    with accelmgr.Manager(model, ONES, start_method="fork", **OPTIONS) as manager:
        manager.step()
        with torch.no_grad():
            model.weight.mul_(3.0)
        manager.refresh()
        result = manager.step()
        assert result.loss == 9000.0 and model.weight.grad.eq(2).all()
        assert trained_in_child(model) == (3000 * 4.0, 3000 * -7.0)
        with torch.no_grad():
            model.weight.mul_(2.0)
        assert manager.step().loss == 18000.0


def test_what_the_script_shares_with_its_children_stays_shared():
    model, total = Net(), torch.zeros(1).share_memory_()
    model.share_memory()
    with accelmgr.Manager(model, ONES, start_method="fork", **OPTIONS) as manager:

        def count():
            total.add_(1)
            with torch.no_grad():
                model.weight.fill_(5.0)
            return os.getpid()

        in_child(count)
        assert total.item() == 1.0
        assert manager.step().loss == 15000.0


def test_two_threads_fork_at_once(monkeypatch):
    monkeypatch.setitem(waits_before_forks, os.getpid(), threading.Barrier(2, timeout=20))

    def loss(_):
        with accelmgr.Manager(Net(), ONES, start_method="fork", **OPTIONS) as manager:
            return manager.step().loss

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(loss, range(2))) == [3000.0, 3000.0]
