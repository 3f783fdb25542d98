"""Programs as users of torch_xla, paddle, ignite and ml write them: only the import is another."""

from __future__ import annotations

import pathlib

import pytest
from programs import BOUND_S, free_port, run, run_script, started


def runs(program: str, *arguments: str, cwd: pathlib.Path) -> str:
    """The standard output of a program, which must succeed."""
    code, out, err = run_script(program, *arguments, cwd=cwd)
    assert code == 0, err
    return out


XLA = """
import os
import sys

import torch
import accelmgr.compat.xla_multiprocessing as xmp
from accelmgr import distributed

WRAPPED_MODEL = xmp.MpModelWrapper(torch.nn.Linear(3, 1))
SERIAL_EXEC = xmp.MpSerialExecutor()


def load_dataset(path):
    if not os.path.exists(path):
        open(path + ".once", "x").close()  # Fails for a second process.
        torch.save(torch.randn(64, 3), path)
    return torch.load(path)


def _mp_fn(index, path):
    dataset = SERIAL_EXEC.run(lambda: load_dataset(path))
    own = dataset[index :: distributed.get_world_size()]
    model = WRAPPED_MODEL.to("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = ((model(own) - own.sum(1, keepdim=True)) ** 2).mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = distributed.all_reduce(parameter.grad, "AVG")
        optimizer.step()
        losses.append(loss.item())
    weights = distributed.all_gather(model.weight.detach())
    assert torch.equal(weights[0], weights[1]) and losses[-1] < losses[0] / 2, losses
    open(f"trained {index}", "x").close()


if __name__ == "__main__":
    xmp.spawn(_mp_fn, args=("dataset.pt",), nprocs=2, start_method=sys.argv[1])
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_torch_xla_with_a_wrapped_model_and_a_dataset_that_one_process_loads(
    tmp_path: pathlib.Path, method: str
) -> None:
    runs(XLA, method, cwd=tmp_path)
    assert {path.name for path in tmp_path.glob("trained*")} == {"trained 0", "trained 1"}


PADDLE = """
import os

import torch
import accelmgr.compat.paddle_spawn as dist
from accelmgr import distributed


def train(print_result=False):
    torch.manual_seed(int(os.environ["ACCELMGR_TRAINER_ID"]))
    layer = torch.nn.Linear(10, 1)
    loss = layer(torch.randn(10, 10)).square().mean()
    if print_result is True:
        print(f"loss: {loss.item()}\\n", end="", flush=True)  # In one piece: the other rank prints too.
    loss.backward()
    layer.weight.grad = distributed.all_reduce(layer.weight.grad, "AVG")
    return layer.weight.grad


def same(context):
    first, *others = [queue.get() for queue in context.return_queues]
    return len(others) + 1 if all(torch.equal(first, other) for other in others) else 0


if __name__ == "__main__":
    print(same(dist.spawn(train)) == len(os.sched_getaffinity(0)))
    print(same(dist.spawn(train, args=(True,), nprocs=2)))
    context = dist.spawn(train, args=(False,), nprocs=2, join=False)
    while not context.join(timeout=0.1):
        pass
    print(same(context), [process.exitcode for process in context.processes])
    try:
        dist.spawn(train, args=(True,), nprocs=2, gpus="4,5")
    except ValueError as error:
        print(error)
"""


def test_paddle_in_each_of_its_forms(tmp_path: pathlib.Path) -> None:
    out = runs(PADDLE, cwd=tmp_path).splitlines()
    losses = [line for line in out if line.startswith("loss: ")]
    assert len(losses) == 2 and len(set(losses)) == 2
    assert [line for line in out if line not in losses][:3] == ["True", "2", "2 [0, 0]"]
    assert "'4,5'" in out[-1] and "GPU" in out[-1]


IGNITE = """
import argparse

import torch
import torch.distributed as dist
import accelmgr.distributed as idist


def train_fn(local_rank, world_size, a, d=12):
    assert dist.is_available() and dist.is_initialized()
    assert dist.get_world_size() == idist.get_world_size() == world_size
    assert (local_rank, a, d) == (idist.get_local_rank(), 1, 23)
    assert idist.device() == torch.device("cpu") and idist.backend() == "gloo"
    is_first = idist.get_rank() == 0
    own = torch.rand(4, 5, 6, device=idist.device()) if is_first else torch.empty(4, 5, 6, device=idist.device())
    given = own.clone()
    tensor = idist.broadcast(own, src=0)
    assert not is_first or torch.equal(tensor, given)
    assert idist.all_gather(tensor).shape == (4 * world_size, 5, 6)
    assert idist.broadcast("abc" if is_first else "", src=0) == "abc"
    assert idist.broadcast(12.3456 if is_first else 0.0, src=0) == 12.3456
    assert isinstance(idist.broadcast(torch.rand(1, 2) if is_first else None, src=0, safe_mode=True), torch.Tensor)
    assert idist.all_reduce(idist.get_rank()) == sum(range(world_size))
    own_sum = torch.ones(1)
    dist.all_reduce(own_sum)
    assert own_sum.item() == world_size

    @idist.one_rank_only(rank=1, with_barrier=True)
    def say():
        print(f"{world_size} on {idist.get_nnodes()}", flush=True)

    with idist.one_rank_first():
        say()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--initialize", action="store_true")
    parser.add_argument("--node_rank", type=int, default=0)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--master_port", type=int, default=0)
    args = parser.parse_args()
    if args.initialize:
        idist.initialize("gloo")
        train_fn(idist.get_local_rank(), 2, 1, d=23)
        idist.finalize()
    elif args.nnodes == 1:
        idist.spawn("gloo", train_fn, args=(2, 1), kwargs_dict={"d": 23}, nproc_per_node=2)
    else:
        idist.spawn(
            "gloo", train_fn, args=(args.nnodes, 1), kwargs_dict={"d": 23}, nproc_per_node=1, nnodes=args.nnodes,
            node_rank=args.node_rank, master_addr="127.0.0.1", master_port=args.master_port,
        )
"""


def test_ignite_spawns_on_one_node(tmp_path: pathlib.Path) -> None:
    assert runs(IGNITE, cwd=tmp_path) == "2 on 1\n"


def test_ignite_spawns_on_two_nodes(tmp_path: pathlib.Path) -> None:
    (tmp_path / "main.py").write_text(IGNITE)
    options = ("main.py", "--nnodes=2", f"--master_port={free_port()}")
    with (
        started(*options, "--node_rank=0", cwd=tmp_path) as first,
        started(*options, "--node_rank=1", cwd=tmp_path) as second,
    ):
        said = [node.communicate(timeout=BOUND_S) for node in (first, second)]
        assert (first.returncode, second.returncode) == (0, 0), said
    assert [out for out, _ in said] == ["", "2 on 2\n"]


def test_ignite_initializes_under_torchrun(tmp_path: pathlib.Path) -> None:
    (tmp_path / "main.py").write_text(IGNITE)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    code, out, err = run(*torchrun, "main.py", "--initialize", cwd=tmp_path)
    assert (code, out) == (0, "2 on 1\n"), err


ML = """
import os

import torch
import torch.distributed as dist
from accelmgr.compat.ml_mp import MultiprocessConfig, all_to_all, launch_subprocesses


def setup():
    os.environ["WAS_SET_UP"] = "yes"


def train(steps, *, lr):
    assert os.environ["WAS_SET_UP"] == "yes"
    rank, size = dist.get_rank(), dist.get_world_size()
    weight = torch.ones(size, requires_grad=True)
    for _ in range(steps):
        (all_to_all(weight * (rank + 1), None) ** 2).sum().backward()
        dist.all_reduce(weight.grad)
        with torch.no_grad():
            weight -= lr * weight.grad
        weight.grad = None
    assert torch.allclose(weight, torch.full((size,), (1 - 2 * lr * sum((r + 1) ** 2 for r in range(size))) ** steps))
    open(f"trained {rank}", "x").close()


if __name__ == "__main__":
    launch_subprocesses(train, MultiprocessConfig(world_size=2), setup, 0, 3, lr=0.01)
"""


def test_ml_launches_its_function(tmp_path: pathlib.Path) -> None:
    runs(ML, cwd=tmp_path)
    assert {path.name for path in tmp_path.glob("trained*")} == {"trained 0", "trained 1"}
