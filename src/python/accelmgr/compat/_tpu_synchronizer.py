"""TPUSynchronizer: a master model with gradients in shared memory, and the copies to and from its replicas."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from accelmgr._memory.tensors import write
from accelmgr.errors import ModelError
from accelmgr.manager import Manager

if TYPE_CHECKING:
    from accelmgr.compat.tpu_manager import TPUManager


def detached(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach() for tensor in tensors]


class TPUSynchronizer:
    """A master model in shared memory with its gradients, and the copies to and from a replica of it.

    The constructor moves `model` to shared memory and gives it gradients of zeros. `TPUManager._synchronizer` uses the
    session's memory instead (SessionSynchronizer). Not thread-safe; callers of a TPUManager hold TPUManager.lock.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.master_model = model.share_memory()
        for parameter in self.master_model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.share_memory_()  # type: ignore[no-untyped-call]

    def get_device_model_replica(self, device: torch.device | str, tie_weights: bool = True) -> torch.nn.Module:
        """A copy of the master on `device`, with gradients of zeros.

        tie_weights: calls the replica's own tie_weights(), if it has one. Weights that are tied in the master are tied
        in the replica anyway.
        """
        replica = copy.deepcopy(self.master_model).to(device)
        if tie_weights and callable(tie := getattr(replica, "tie_weights", None)):
            tie()
        for parameter in replica.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return replica

    def set_host_parameters(self, new_host_parameters: Iterable[torch.Tensor]) -> None:
        """Copies the parameters into the master's. Raises ModelError (count, shape, device, dtype), and copies none."""
        new = detached(new_host_parameters)
        self._assign(source=new, target=self.master_model.parameters(), add=False, strict=True)

    def get_aggregated_gradients(self) -> list[torch.Tensor]:
        """The master's gradients, one for each parameter; no copies."""
        return [parameter.grad for parameter in self.master_model.parameters() if parameter.grad is not None]

    def send_params_to_device(self, replica: torch.nn.Module) -> None:
        """Copies the master's parameters into the replica's."""
        self._assign(source=self.master_model.parameters(), target=replica.parameters(), add=False)

    def aggregate_grads_on_host(self, replica: torch.nn.Module, *, add: bool) -> None:
        """Adds the gradients of a replica in this process to the master's, or overwrites them; None counts as zero."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in replica.parameters()]
        self._assign(source=gradients, target=self.get_aggregated_gradients(), add=add)

    def _assign(
        self, source: Iterable[torch.Tensor], target: Iterable[torch.Tensor], add: bool, strict: bool = False
    ) -> None:
        """Copies or adds the source tensors to the target tensors.

        Raises ModelError, before it writes anything, if counts or shapes differ; with `strict` also if devices or
        dtypes differ.
        """
        sources, targets = list(source), list(target)
        if len(sources) != len(targets):
            raise ModelError(f"{len(sources)} source tensors for {len(targets)} target tensors; nothing was changed")
        for index, (one, other) in enumerate(zip(sources, targets, strict=True)):
            kinds = [(tuple(one.shape), one.device, one.dtype), (tuple(other.shape), other.device, other.dtype)]
            if kinds[0] != kinds[1] if strict else kinds[0][0] != kinds[1][0]:
                texts = [f"{dtype} {list(shape)} on {device}" for shape, device, dtype in kinds]
                raise ModelError(f"source tensor {index} is {texts[0]}, its target {texts[1]}; nothing was changed")
        for one, other in zip(sources, targets, strict=True):
            if add:
                other.detach().add_(one.detach().to(other.device))
            else:
                write(other, one)


class SessionSynchronizer(TPUSynchronizer):
    """The master is the session's: its parameters are the parameters of the host's model."""

    def __init__(self, model: torch.nn.Module, manager: TPUManager) -> None:
        self.master_model = model
        self._manager: TPUManager = weakref.proxy(manager)  # A reference would keep the manager alive.

    def set_host_parameters(self, new_host_parameters: Iterable[torch.Tensor]) -> None:
        Manager.update_model_parameters(self._manager, new_host_parameters)

    def get_aggregated_gradients(self) -> list[torch.Tensor]:
        return Manager.get_aggregated_gradients(self._manager)
