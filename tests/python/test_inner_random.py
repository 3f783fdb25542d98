"""Inner steps of random models and optimizers: the same bits as with the optimizer in the host."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_inner import assert_same
from torch import nn

import accelmgr

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 9

OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, 0.05),
    "nesterov": lambda groups: torch.optim.SGD(groups, 0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda groups: torch.optim.Adam(groups, 0.01, amsgrad=True, weight_decay=0.1),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, 0.01, fused=True),
    "adamw foreach": lambda groups: torch.optim.AdamW(groups, 0.01, foreach=True, maximize=True),
    "nadam": lambda groups: torch.optim.NAdam(groups, 0.01),
    "radam": lambda groups: torch.optim.RAdam(groups, 0.01),
    "adamax": lambda groups: torch.optim.Adamax(groups, 0.01),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, 0.01),
    "adadelta": lambda groups: torch.optim.Adadelta(groups, 0.5),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, 0.001, centered=True, momentum=0.5),
    "asgd": lambda groups: torch.optim.ASGD(groups, 0.05, t0=4),
}

SCHEDULERS = {
    "none": lambda optimizer: None,
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "steps": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "per group": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda step, k=k: 1 / (1 + k * step) for k in range(len(optimizer.param_groups))]
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    layers: list[str]
    dtype: torch.dtype
    optimizer: str
    scheduler: str
    groups: int
    """2: the body and the head. 3: another one is added in the middle."""
    runners: int
    micro_batches: int
    loss_scaling: str
    elements: int
    """Fewer than a whole number of batches: the last step of each epoch is short."""
    autocast: str
    clip: float | None
    sync_every: int
    start_method: str
    """Of the runners that step themselves."""


CASES = st.builds(
    Case,
    layers=st.lists(st.sampled_from(["linear", "norm", "batch norm", "dropout", "gelu"]), max_size=4),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    scheduler=st.sampled_from(sorted(SCHEDULERS)),
    groups=st.integers(1, 3),
    runners=st.integers(1, 3),
    micro_batches=st.integers(1, 3),
    loss_scaling=st.sampled_from(["runners", "samples", "sum_over(count)"]),
    elements=st.integers(40, 90),
    autocast=st.sampled_from(["off", "off", "bf16", "fp16"]),
    clip=st.sampled_from([None, 0.1]),
    sync_every=st.integers(1, STEPS),
    start_method=st.sampled_from(["fork", "fork", "forkserver"]),
).filter(lambda case: (case.optimizer, case.groups) != ("adagrad", 3))  # Its state is made in its __init__() alone.


class Net(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(len(case.layers))
        makes = {
            "linear": lambda: nn.Linear(6, 6),
            "norm": lambda: nn.LayerNorm(6),
            "batch norm": lambda: nn.BatchNorm1d(6),
            "dropout": lambda: nn.Dropout(0.3),
            "gelu": nn.GELU,
        }
        self.body = nn.Sequential(nn.Linear(6, 6), *(makes[name]() for name in case.layers))
        self.head, self.late = nn.Linear(6, 3), nn.Linear(6, 3)
        self.to(case.dtype)

    def forward(self, inputs, targets) -> dict[str, torch.Tensor]:
        body = self.body(inputs.to(self.head.weight.dtype))
        loss = nn.functional.cross_entropy(self.head(body) + self.late(body), targets, reduction="none")
        return {"loss": loss, "count": torch.tensor(float(len(loss)))}


class Mean(Net):
    def forward(self, inputs, targets) -> torch.Tensor:
        return super().forward(inputs, targets)["loss"].mean()


class Sum(Net):
    def forward(self, inputs, targets) -> dict[str, torch.Tensor]:
        outputs = super().forward(inputs, targets)
        return outputs | {"loss": outputs["loss"].sum()}


def trained(case: Case, inner: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    elements = [
        (torch.randn(6, generator=torch.Generator().manual_seed(i)), torch.tensor(i % 3)) for i in range(case.elements)
    ]
    model = (Sum if "sum" in case.loss_scaling else Mean)(case)
    parts = [[*model.body.parameters()], [*model.head.parameters()]]
    if case.groups < 3:
        parts[-1] += model.late.parameters()
    groups = [{"params": part} for part in (parts if case.groups > 1 else [parts[0] + parts[1]])]
    optimizer = OPTIMIZERS[case.optimizer](groups)
    scheduler = SCHEDULERS[case.scheduler](optimizer)
    manager = accelmgr.Manager(
        model,
        elements,
        nprocs=case.runners,
        batch_size_per_device=4,
        grad_accumulation_steps=case.micro_batches,
        loss_scaling=case.loss_scaling,
        start_method=case.start_method if inner else "fork",
        runners__threads=1,
        runners__autocast=case.autocast if case.dtype is torch.float32 else "off",
        data__epochs=20,
    )
    with manager:
        for step in range(1, STEPS + 1):
            if inner:
                manager.step(optimizer=optimizer, clip_grad_norm=case.clip).raise_for_status()
                if step % case.sync_every == 0:
                    manager.sync()
            else:
                manager.step().raise_for_status()
                if case.clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), case.clip)
                optimizer.step()
                optimizer.zero_grad()
                manager.zero_grad()
            if scheduler is not None:
                scheduler.step()
            if step == STEPS // 2 and case.groups == 3 and case.scheduler != "per group":
                optimizer.add_param_group({"params": [*model.late.parameters()]})
                if scheduler is not None:
                    scheduler.base_lrs.append(optimizer.param_groups[-1]["lr"])
                if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
                    scheduler.lr_lambdas.append(None)
    return model, optimizer


@settings(
    max_examples=20,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    print_blob=True,
)
@given(CASES)
def test_the_same_bits_as_with_the_optimizer_in_the_host(case):
    assert_same(trained(case, inner=True), trained(case, inner=False))
