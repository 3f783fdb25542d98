"""The TPUManager pattern on CPU processes in Python, as its users have it today. Two variants with one interface.

`FaithfulManager` keeps the data path of the pattern. The master model and its gradients are in shared memory; each
replica has its own storage. Processes wait on events. Each device has a queue of single elements. The replicas
all-reduce their gradients (by gloo, in the place of the accelerator's all-reduce), and rank 0 adds them to the master's
under a lock. The host optimizes parameters of its own and copies them into the master. Replicas copy them from there at
the beginning of the next step.

`AliasingManager` is the best variant that is possible with Python's multiprocessing. The replicas compute on the
master's parameters, and each adds its gradients to the master's under locks. It has semaphores instead of events. The
host optimizes the master in place.
"""

import copy
import ctypes
import threading

import common
import mlp
import torch
from common import FORK
from torch.utils.data import DataLoader, IterableDataset


def share_with_gradients(model):
    """Makes a model the master: moves its parameters and gradients into shared memory."""
    model.share_memory()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter).share_memory_()
    return model


class QueueElements(IterableDataset):
    """A dataset of the elements that arrive in the queue of one device."""

    def __init__(self, queue):
        self.queue = queue

    def __iter__(self):
        while True:
            yield self.queue.get()


class FaithfulManager:
    """With `elements` "queue" each device gets single elements through its queue; with "resident" batches are in
    memory."""

    def __init__(self, model, millions, store_path, elements):
        self.master = share_with_gradients(model)
        self.millions, self.store_path, self.elements = millions, store_path, elements
        self.lock = FORK.Lock()
        self.step_triggered, self.step_finished = FORK.Event(), FORK.Event()
        self.parameters_changed = FORK.Value(ctypes.c_bool, False)
        self.loss, self.samples = FORK.Value(ctypes.c_double, 0.0), FORK.Value(ctypes.c_long, 0)
        # Two batches, so that the replicas do not wait for the loader.
        self.queues = [FORK.Queue(2 * mlp.BATCH_SIZE) for _ in range(mlp.RUNNERS)]
        self.process = FORK.Process(target=self._manage)
        self.process.start()
        if elements == "queue":
            threading.Thread(target=self._deal_elements, daemon=True).start()
        # The host's optimizer has its own copy of the parameters.
        self.parameters = [
            parameter.detach().clone().requires_grad_() for parameter in self.master.parameters()
        ]

    def step(self):
        self.loss.value, self.samples.value = 0.0, 0
        self.step_finished.clear()
        self.step_triggered.set()
        while not self.step_finished.wait(timeout=1):
            common.check([self.process])
        return self.loss.value

    def optimize(self, optimizer):
        """Makes an SGD step on the host's parameters with the master's gradients. Copies the parameters to the master
        and zeroes its gradients."""
        for parameter, gradient in zip(self.parameters, self._master_gradients(), strict=True):
            parameter.grad = gradient
        optimizer.step()
        with self.lock, torch.no_grad():
            for master, parameter in zip(self.master.parameters(), self.parameters, strict=True):
                master.copy_(parameter)
            self.parameters_changed.value = True
        with self.lock, torch.no_grad():
            for gradient in self._master_gradients():
                gradient.zero_()

    def stop(self):
        self.process.terminate()
        self.process.join()
        for queue in self.queues:
            queue.cancel_join_thread()

    def _master_gradients(self):
        return [parameter.grad for parameter in self.master.parameters()]

    def _deal_elements(self):
        inputs, targets = mlp.make_elements(self.millions, seed=1)
        index = 0
        while True:
            row = index % len(inputs)
            self.queues[index % mlp.RUNNERS].put((inputs[row].clone(), targets[row].clone()))
            index += 1

    def _manage(self):
        common.die_with_parent()
        runners = [FORK.Process(target=self._run, args=(rank,), daemon=True) for rank in range(mlp.RUNNERS)]
        for runner in runners:
            runner.start()
        try:
            common.wait_for(runners)
        finally:
            common.end(runners)

    def _batches(self, rank):
        if self.elements == "resident":
            return mlp.resident_batches(self.millions, seed=rank)
        return iter(DataLoader(QueueElements(self.queues[rank]), batch_size=mlp.BATCH_SIZE, num_workers=0))

    def _run(self, rank):
        common.die_with_parent()
        common.settle_torch(mlp.THREADS)
        dist = common.join_gloo(rank, mlp.RUNNERS, self.store_path)
        replica = copy.deepcopy(self.master)
        batches = self._batches(rank)
        dist.barrier()
        while True:
            self.step_triggered.wait()
            dist.barrier()
            if rank == 0:
                self.step_triggered.clear()
            if self.parameters_changed.value:
                self._load_parameters(dist, replica)
            loss = mlp.loss_of(replica, next(batches)) / mlp.RUNNERS
            loss.backward()
            self._aggregate_gradients(dist, rank, replica)
            replica.zero_grad()
            loss = loss.detach()
            dist.all_reduce(loss)
            if rank == 0:
                self.samples.value = mlp.BATCH_SIZE * mlp.RUNNERS
                self.loss.value = float(loss)
                self.step_finished.set()

    def _load_parameters(self, dist, replica):
        with torch.no_grad():
            for target, source in zip(replica.parameters(), self.master.parameters(), strict=True):
                target.copy_(source)
        dist.barrier()
        self.parameters_changed.value = False

    def _aggregate_gradients(self, dist, rank, replica):
        gradients = [parameter.grad for parameter in replica.parameters()]
        for pending in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
            pending.wait()
        if rank == 0:
            with self.lock, torch.no_grad():
                for master, gradient in zip(self._master_gradients(), gradients, strict=True):
                    master.add_(gradient)
        dist.barrier()


class AliasingManager:
    """Adds each gradient during backward, when it is still in the cache. The replicas also wait less for each other's
    locks than after backward."""

    def __init__(self, model, millions):
        self.master = share_with_gradients(model)
        self.millions = millions
        self.parameters = list(self.master.parameters())
        # Each tensor has a lock. With a single lock the replicas would add one after the other.
        self.locks = [FORK.Lock() for _ in self.parameters]
        self.triggered = [FORK.Semaphore(0) for _ in range(mlp.RUNNERS)]
        self.finished = FORK.Semaphore(0)
        self.losses = FORK.RawArray(ctypes.c_double, mlp.RUNNERS)
        self.runners = [
            FORK.Process(target=self._run, args=(rank,), daemon=True) for rank in range(mlp.RUNNERS)
        ]
        for runner in self.runners:
            runner.start()

    def step(self):
        for triggered in self.triggered:
            triggered.release()
        for _ in self.runners:
            while not self.finished.acquire(timeout=1):
                common.check(self.runners)
        return sum(self.losses)

    def optimize(self, optimizer):
        """Makes an SGD step on the master in place, so there is nothing to publish. Zeroes its gradients."""
        optimizer.step()
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.grad.zero_()

    def stop(self):
        common.end(self.runners)

    def _run(self, rank):
        common.die_with_parent()
        common.settle_torch(mlp.THREADS)
        for parameter, lock in zip(self.parameters, self.locks, strict=True):
            self._add_to_master_in_backward(parameter, parameter.grad, lock)
        batches = mlp.resident_batches(self.millions, seed=rank)
        while True:
            self.triggered[rank].acquire()
            loss = mlp.loss_of(self.master, next(batches)) / mlp.RUNNERS
            loss.backward()
            self.losses[rank] = loss.item()
            self.finished.release()

    @staticmethod
    def _add_to_master_in_backward(parameter, master_gradient, lock):
        """After the fork each replica has its own parameter object. Its memory and the master's gradient are shared."""

        def add(_):
            with lock, torch.no_grad():
                master_gradient.add_(parameter.grad)
            parameter.grad = None

        parameter.grad = None
        parameter.register_post_accumulate_grad_hook(add)
