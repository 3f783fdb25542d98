"""Tests of accelmgr.distributed: in one process, in ranks of every start method, and over torch.distributed."""

from __future__ import annotations

import atexit
import datetime
import json
import logging
import mmap
import os
import pathlib
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
from typing import Any

import pytest
import torch
from conftest import descendants
from launching import is_gone
from programs import started

import accelmgr
from accelmgr import SpawnError, _native, distributed

_native.SerialExecutor("any")  # A process keeps this memory: opens it before tests count descriptors.
START_METHODS = ["spawn", "fork", "forkserver"]


def spawned(
    function: Any, *args: Any, count: int = 2, method: str = "fork", **options: Any
) -> distributed.SpawnContext:
    """`count` ranks that call `function(local_rank, *args)`."""
    options = {"backend": "shm", "timeout": 60, **options}
    context = distributed.spawn(
        fn=function, args=args, nproc_per_node=count, start_method=method, join=False, **options
    )
    assert context is not None
    return context


def ranks(function: Any, *args: Any, **options: Any) -> list[Any]:
    """What `function(local_rank, *args)` returns in each rank."""
    context = spawned(function, *args, **options)
    assert context.join(100)
    return context.results


def error_of(call: Any) -> tuple[str, str]:
    """Type and message of the exception that `call` raises."""
    with pytest.raises(Exception) as caught:
        call()
    return type(caught.value).__name__, str(caught.value)


# Alone


def test_without_configuration_this_is_rank_0_of_1() -> None:
    assert distributed.is_available()
    assert (distributed.get_rank(), distributed.get_world_size()) == (0, 1)
    assert (distributed.get_local_rank(), distributed.get_nproc_per_node()) == (0, 1)
    assert (distributed.get_node_rank(), distributed.get_nnodes()) == (0, 1)
    assert distributed.backend() is None
    assert distributed.model_name() == "serial"
    assert distributed.device() == torch.device("cpu")
    assert distributed.hostname() == socket.gethostname()
    assert {"shm", "gloo"} <= set(distributed.available_backends())
    names = [model.name for model in distributed.registered_computation_models]
    assert names == ["serial", "native-dist", "accelmgr-dist"]
    assert distributed.has_native_dist_support and not distributed.has_xla_support and not distributed.has_hvd_support


def test_alone_collectives_return_their_input() -> None:
    tensor = torch.arange(3.0)
    assert distributed.all_reduce(tensor) is tensor
    assert distributed.all_reduce(7) == 7
    assert distributed.all_gather(tensor) is tensor
    assert distributed.all_gather("text") == ["text"]
    assert distributed.all_gather({"a": 1}) == [{"a": 1}]
    assert distributed.broadcast(tensor) is tensor
    assert distributed.broadcast(2.5) == 2.5 and distributed.broadcast("text") == "text"
    assert distributed.broadcast(2**70) == distributed.all_reduce(2**70) == 2**70
    assert torch.equal(distributed.all_gather(7), torch.tensor([7]))
    assert distributed.all_gather(torch.tensor(3.0)).tolist() == [3]
    assert distributed.broadcast("text", safe_mode=True) == "text"
    assert distributed.broadcast({"a": 1}) == distributed.broadcast({"a": 1}, safe_mode=True) == {"a": 1}
    assert [each.tolist() for each in distributed.all_gather_tensors_with_shapes(tensor, [[3]])] == [[0, 1, 2]]
    assert distributed.all_reduce(tensor, group=distributed.new_group([])) is tensor
    assert distributed.all_gather(tensor, group=[]) is tensor
    assert distributed.reduce_scatter(tensor) is tensor
    assert distributed.all_to_all(tensor) is tensor
    distributed.barrier()
    distributed.sync()
    assert distributed.one_rank_only()(lambda: 5)() == 5
    assert distributed.one_rank_only(rank=1)(lambda: 5)() is None
    with distributed.one_rank_first():
        pass


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: distributed.initialize("shm", comm=None), "TypeError", "unexpected argument 'comm'"),
        (lambda: distributed.initialize("shm", timeout="1"), "ConfigError", "timedelta or a number of seconds"),
        (lambda: distributed.all_reduce(torch.ones(1), op="XOR"), "ConfigError", "there are: SUM, AVG, PRODUCT"),
        (lambda: distributed.all_reduce("text"), "TypeError", "a str cannot be reduced"),
        (lambda: distributed.broadcast(None), "TypeError", "only safe_mode=True can receive"),
        (lambda: distributed.broadcast(None, safe_mode=True), "UsageError", "rank 0, passed a NoneType"),
        (lambda: distributed.new_group(["a", "b"]), "ConfigError", "must be integers, not ['a', 'b']"),
        (lambda: distributed.all_reduce(torch.ones(1), group="all"), "UsageError", "this is a str"),
        (lambda: distributed.spawn("horovod", print, ()), "ConfigError", "available are: shm, gloo"),
        (lambda: distributed.spawn("shm", 3, ()), "UsageError", "cannot be called"),
        (lambda: distributed.spawn("shm", print, (), nnodes="2"), "ConfigError", "nnodes is '2'; it must be"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(call: Any, kind: str, message: str) -> None:
    found_kind, found = error_of(call)
    assert found_kind == kind
    assert message in found
    assert distributed.model_name() == "serial"


# Ranks


def _who(local_rank: int, a: int, b: int = 0) -> tuple[Any, ...]:
    d = distributed
    ranks = local_rank, d.get_rank(), d.get_local_rank(), d.get_node_rank(), os.environ["RANK"]
    sizes = d.get_world_size(), d.get_nproc_per_node(), d.get_nnodes()
    return ranks, sizes, d.model_name(), d.backend(), os.getpid(), d.all_reduce(a + b + local_rank)


@pytest.mark.parametrize(
    ("method", "backend"), [("spawn", "shm"), ("fork", "shm"), ("forkserver", "shm"), ("fork", "gloo")]
)
def test_ranks_know_who_they_are_and_return_values(method: str, backend: str) -> None:
    timeout = datetime.timedelta(seconds=60)
    context = spawned(_who, 10, method=method, backend=backend, kwargs_dict={"b": 5}, timeout=timeout)
    assert context.join(100)
    for rank, (said, pid) in enumerate(zip(context.results, context.pids(), strict=True)):
        assert said == ((rank, rank, rank, 0, str(rank)), (2, 2, 1), "accelmgr-dist", backend, pid, 31)


def _write_who(rank: int, path: str) -> None:
    with open(path, "w") as file:
        json.dump([rank, os.getpid(), distributed.get_world_size(), distributed.model_name()], file)


def _write_generator(rank: int, path: str) -> None:
    with open(path, "w") as file:
        json.dump([torch.initial_seed(), torch.rand(()).item()], file)


def test_a_forked_rank_has_the_generator_of_the_host_untouched(tmp_path: Any) -> None:
    torch.manual_seed(3)
    distributed.spawn("shm", _write_generator, (str(tmp_path / "drawn"),), start_method="fork")
    assert json.loads((tmp_path / "drawn").read_text()) == [3, torch.rand(()).item()]


@pytest.mark.parametrize("method", START_METHODS)
def test_one_process_that_is_joined_is_a_process_of_its_own(tmp_path: Any, method: str) -> None:
    assert distributed.spawn("shm", _write_who, (str(tmp_path / "who"),), start_method=method) is None
    rank, pid, *rest = json.loads((tmp_path / "who").read_text())
    assert rank == 0 and pid != os.getpid() and rest == [1, "accelmgr-dist"]
    assert "RANK" not in os.environ
    assert distributed.model_name() == "serial"
    with pytest.raises(SpawnError, match="rank 0 failed: ZeroDivisionError"):
        distributed.spawn("shm", lambda rank: 1 / rank, (), start_method=method)


def test_a_lambda_and_a_local_class_get_into_executed_processes() -> None:
    class Box:
        value = 4

    box = Box()
    assert ranks(lambda rank: box.value + rank, method="forkserver") == [4, 5]


def _collectives(rank: int) -> dict[str, Any]:
    d = distributed
    size = d.get_world_size()
    tensor = torch.tensor([rank + 1.0, 2.0])
    found: dict[str, Any] = {op: d.all_reduce(tensor, op) for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX")}
    found["untouched"] = tensor
    found["AND"] = d.all_reduce(torch.tensor([rank == 0, True]), "AND")
    found["OR"] = d.all_reduce(torch.tensor([rank == 0, False]), "OR")
    found["int"] = d.all_reduce(rank + 1)
    found["float"] = d.all_reduce(0.5)
    found["bfloat16"] = d.all_reduce(torch.ones(3, dtype=torch.bfloat16))
    found["0-d"] = d.all_reduce(torch.tensor(rank, dtype=torch.int32))
    found["group"] = d.all_reduce(rank + 1, group=[0, 1])
    group = d.new_group([0, size - 1])
    found["group members"] = (group.ranks, group.rank, group.size, group.contains(1))
    found["group object"] = d.all_reduce(torch.tensor([float(rank)]), group=group)
    found["gather"] = d.all_gather(torch.full((1, 2), float(rank)))
    found["gather 0-d"] = d.all_gather(torch.tensor(rank))
    found["gather numbers"] = d.all_gather(rank)
    found["gather strings"] = d.all_gather(f"rank {rank}")
    found["gather objects"] = d.all_gather({"rank": rank}, group=group)
    found["broadcast"] = d.broadcast(torch.full((2,), float(rank)), src=1)
    found["broadcast number"] = d.broadcast(rank * 10, src=1)
    found["broadcast string"] = d.broadcast("yes" if rank == 1 else "", src=1)
    found["broadcast safe"] = [
        d.broadcast(value if rank == 0 else None, safe_mode=True)
        for value in (torch.tensor([[1, 2]]), 2.5, 3, True, "text")
    ]
    found["scatter"] = d.reduce_scatter(torch.arange(float(size)) + rank)
    found["all to all"] = d.all_to_all(torch.arange(size) + 10 * rank)
    order: list[int] = []
    with d.one_rank_first(rank=1):
        order.append(int(time.monotonic_ns()))
    found["order"] = order[0]
    found["only"] = d.one_rank_only(rank=1, with_barrier=True)(lambda: "mine")()
    d.barrier()
    return found


def _check_collectives(all_found: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(all_found):
        expected: dict[str, Any] = {
            "SUM": torch.tensor([6.0, 6.0]),
            "AVG": torch.tensor([2.0, 2.0]),
            "PRODUCT": torch.tensor([6.0, 8.0]),
            "MIN": torch.tensor([1.0, 2.0]),
            "MAX": torch.tensor([3.0, 2.0]),
            "untouched": torch.tensor([rank + 1.0, 2.0]),
            "AND": torch.tensor([False, True]),
            "OR": torch.tensor([True, False]),
            "bfloat16": torch.full((3,), 3, dtype=torch.bfloat16),
            "0-d": torch.tensor(3, dtype=torch.int32),
            "group object": torch.tensor([2.0 if rank != 1 else 1.0]),
            "gather": torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]),
            "gather 0-d": torch.tensor([0, 1, 2]),
            "gather numbers": torch.tensor([0, 1, 2]),
            "broadcast": torch.tensor([1.0, 1.0]),
            "scatter": torch.tensor([3.0 + 3 * rank]),
            "all to all": torch.tensor([rank, 10 + rank, 20 + rank]),
        }
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name
        assert found["int"] == 6 and isinstance(found["int"], int)
        assert found["float"] == 1.5
        assert found["group"] == 3
        assert found["gather strings"] == ["rank 0", "rank 1", "rank 2"]
        assert found["gather objects"] == ([{"rank": 0}, {"rank": 2}] if rank != 1 else {"rank": 1})
        assert found["broadcast number"] == 10 and found["broadcast string"] == "yes"
        safe = found["broadcast safe"]
        torch.testing.assert_close(safe[0], torch.tensor([[1, 2]]))
        assert safe[1:] == [2.5, 3, True, "text"]
        assert [type(value) for value in safe[1:]] == [float, int, bool, str]
        assert found["only"] == ("mine" if rank == 1 else None)
    assert all_found[1]["order"] < min(all_found[0]["order"], all_found[2]["order"])


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_collectives_of_three_ranks(backend: str) -> None:
    all_found = ranks(_collectives, count=3, backend=backend)
    _check_collectives(all_found)
    for rank, found in enumerate(all_found):
        assert found["group members"] == ([0, 2], [0, -1, 1][rank], 2, False)


def _gradients(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.arange(4.0, requires_grad=True)
    loss = (rank + 1) * (distributed.all_to_all(source) ** 2).sum()
    (first,) = torch.autograd.grad(loss, source, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), source)
    return first.detach(), second


def test_gradients_of_all_to_all_take_the_way_back_and_have_gradients() -> None:
    check_gradients(ranks(_gradients))


WHOLE = "uint8 int8 uint16 int16 uint32 int32 uint64 int64"
DTYPES = [getattr(torch, name) for name in f"{WHOLE} half bfloat16 float double complex64 complex128 bool".split()]


def _every_form(rank: int) -> None:
    d = distributed
    for dtype in DTYPES:
        tensor = torch.tensor([rank, 1]).to(dtype)
        both = torch.tensor([0, 1, 1, 1]).to(dtype)
        assert torch.equal(d.all_reduce(tensor), torch.tensor([1, 2]).to(dtype)), dtype
        assert torch.equal(d.all_gather(tensor), both), dtype
        assert torch.equal(d.broadcast(tensor, src=1), torch.tensor([1, 1]).to(dtype)), dtype
        assert torch.equal(d.all_to_all(tensor), torch.tensor([0, 1] if rank == 0 else [1, 1]).to(dtype)), dtype
        assert torch.equal(d.reduce_scatter(tensor, "SUM"), torch.tensor([1 + rank]).to(dtype)), dtype
    whole = torch.arange(24.0).reshape(4, 6)
    for view in (whole.t(), whole[::2], whole[:, 1:3], whole[:1].expand(3, 6), whole[:0], torch.tensor(2.0)):
        before = view.clone()
        for call in (d.all_reduce, lambda t: d.broadcast(t, src=1) * 2):
            reduced = call(view)
            assert torch.equal(reduced, before * 2) and not reduced.requires_grad
        assert torch.equal(view, before)
    values = torch.tensor([1 + 2j, 3 - 1j])
    assert torch.equal(d.all_reduce(values.conj()), 2 * values.conj().resolve_conj())
    assert torch.equal(d.all_reduce(values.conj().imag), -2 * values.imag)
    leaf = torch.ones(2, requires_grad=True)
    for result in (d.all_reduce(leaf), d.all_gather(leaf), d.broadcast(leaf), d.reduce_scatter(leaf)):
        assert not result.requires_grad
    assert d.all_gather(torch.tensor(5.0), group=[rank]).tolist() == [5], "alone in a group, a 0-d one is one element"


def test_tensors_of_every_dtype_and_form() -> None:
    ranks(_every_form)


ERRORS: dict[str, tuple[Any, str, list[str]]] = {
    "kinds": (
        lambda d, rank: d.all_gather("text" if rank == 0 else [1]),
        "CollectiveError",
        ["was expected", "a string", "an object"],
    ),
    "list": (lambda d, rank: d.reduce_scatter([1, 2]), "TypeError", ["reduce_scatter: a list"]),
    "source": (lambda d, rank: d.broadcast(1, src=2), "UsageError", ["no rank 2 in a world of 2"]),
    "number kinds": (lambda d, rank: d.broadcast(1 if rank == 0 else 0.5), "CollectiveError", ["broadcast"]),
    "number and text": (lambda d, rank: d.broadcast(1 if rank == 0 else "1"), "CollectiveError", ["broadcast"]),
    "number and object": (
        lambda d, rank: d.all_gather(1 if rank == 0 else [1]),
        "CollectiveError",
        ["member 0 called all_gather of whole numbers; member 1 called all_gather of objects"],
    ),
    "number and number": (
        lambda d, rank: d.all_reduce(1, "MIN" if rank == 0 else "MAX"),
        "CollectiveError",
        ["member 0 called all_reduce MIN of whole numbers; member 1 called all_reduce MAX"],
    ),
}


def _errors(rank: int) -> dict[str, tuple[str, str]]:
    return {what: error_of(lambda call=call: call(distributed, rank)) for what, (call, _, _) in ERRORS.items()}


def test_every_rank_is_told_what_is_wrong() -> None:
    for found in ranks(_errors):
        for what, (kind, text) in found.items():
            _, expected, messages = ERRORS[what]
            assert kind == expected, (what, text)
            for message in messages:
                assert message in text, (what, text)


BEYOND = 2**70  # Needs more than 64 bits.


def _whole_numbers(rank: int) -> dict[str, Any]:
    d = distributed
    return {
        "sum": d.all_reduce(2**62),
        "product": d.all_reduce(2**40, "PRODUCT"),
        "extremes": (d.all_reduce(BEYOND * (rank + 1), "MIN"), d.all_reduce(-BEYOND * (rank + 1), "MIN")),
        "bits": (d.all_reduce(0b110 if rank == 0 else 0b011, "AND"), d.all_reduce(0b100 if rank == 0 else 0b001, "OR")),
        "beyond on one": d.all_reduce(BEYOND if rank == 0 else 1),
        "broadcast": d.broadcast(BEYOND if rank == 1 else 0, src=1),
        "broadcast safely": d.broadcast(BEYOND if rank == 0 else None, safe_mode=True),
        "gather": error_of(lambda: d.all_gather(BEYOND if rank == 1 else 1)),
        "mean": error_of(lambda: d.all_reduce(1, "AVG")),
        "after": d.all_gather(rank),
    }


def _check_whole_numbers(all_found: list[dict[str, Any]]) -> None:
    for found in all_found:
        assert found["sum"] == 2**63 and found["product"] == 2**80
        assert found["extremes"] == (BEYOND, -2 * BEYOND)
        assert found["bits"] == (0b010, 0b101)
        assert found["beyond on one"] == BEYOND + 1
        assert found["broadcast"] == found["broadcast safely"] == BEYOND
        kind, message = found["gather"]
        assert kind == "UsageError" and f"the number of member 1, {BEYOND}" in message
        assert found["mean"][0] == "UsageError"
        assert torch.equal(found["after"], torch.tensor([0, 1])), "the ranks are in the same call still"


def test_whole_numbers_are_exact_or_fail_on_every_rank() -> None:
    _check_whole_numbers(ranks(_whole_numbers))


def _show(rank: int, path: str) -> None:
    logging.basicConfig(filename=f"{path}/{rank}", level=logging.INFO, format="%(message)s", force=True)
    distributed.show_config()
    logging.shutdown()


def test_show_config_writes_all_to_the_log(tmp_path: Any) -> None:
    ranks(_show, str(tmp_path))
    lines = (tmp_path / "1").read_text().splitlines()
    assert lines[:2] == ["distributed configuration: accelmgr-dist", "backend: shm"]
    assert "rank: 1" in lines and "local rank: 1" in lines and "num nodes: 1" in lines and len(lines) == 10


# The end


def _fail(rank: int, how: str) -> None:
    if rank == 1:
        if how == "raise":
            raise ValueError("no data")
        if how == "exit":
            sys.exit(5)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "unpicklable":
            return (i for i in ())  # type: ignore[return-value]
    distributed.barrier() if how != "unpicklable" else None


@pytest.mark.parametrize("method", START_METHODS)
def test_an_exception_arrives_with_rank_and_traceback(method: str) -> None:
    with pytest.raises(SpawnError, match="rank 1 failed: ValueError: no data") as caught:
        ranks(_fail, "raise", method=method)
    error = caught.value
    assert (error.rank, error.exit_code, error.signal, error.type, error.phase) == (1, 17, 0, "ValueError", "function")
    assert "in _fail" in error.trace and 'raise ValueError("no data")' in error.trace
    assert "_rank.py" not in error.trace
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.rank, copy.trace) == (str(error), 1, error.trace)


def _fail_beside_a_thread(rank: int) -> None:
    threading.Thread(target=threading.Event().wait).start()  # A normal exit of Python would wait for this thread.
    if rank == 1:
        raise ValueError("no data")
    signal.pause()


@pytest.mark.parametrize("method", START_METHODS)
def test_an_exception_arrives_while_threads_of_its_rank_run(method: str) -> None:
    context = spawned(_fail_beside_a_thread, method=method)
    try:
        with pytest.raises(SpawnError, match="rank 1 failed: ValueError: no data"):
            context.join(60)
    finally:
        context.terminate()


@pytest.mark.parametrize(
    ("how", "code", "number", "message"),
    [
        ("exit", 5, 0, "rank 1 ended with exit code 5"),
        ("kill", 0, 9, "rank 1 was killed by signal 9 (KILL)"),
        ("unpicklable", 17, 0, "cannot pickle 'generator' object"),
    ],
)
def test_other_ends_are_told_too(how: str, code: int, number: int, message: str) -> None:
    with pytest.raises(SpawnError) as caught:
        ranks(_fail, how)
    assert message in str(caught.value)
    assert (caught.value.rank, caught.value.exit_code, caught.value.signal) == (1, code, number)


def test_what_cannot_be_pickled_is_named() -> None:
    class Holder:
        def __init__(self) -> None:
            self.numbers = (i for i in range(3))

    with pytest.raises(accelmgr.UsageError, match=r"args\[0\]\.numbers .*cannot be pickled"):
        distributed.spawn("shm", print, (Holder(),), nproc_per_node=2)


def _wait_for_ever(rank: int, path: str) -> None:
    open(f"{path}/{rank}", "w").close()
    signal.pause()


def _wait_for(condition: Any, what: str, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        os.sched_yield()


@pytest.mark.parametrize("method", START_METHODS)
def test_a_fork_of_the_host_is_there_with_the_start_method_fork_alone(tmp_path: Any, method: str) -> None:
    memory = os.memfd_create("memory_of_the_host")
    os.truncate(memory, mmap.PAGESIZE)
    with mmap.mmap(memory, mmap.PAGESIZE):
        os.close(memory)
        others = descendants()
        context = spawned(_wait_for_ever, str(tmp_path), method=method)
        try:
            _wait_for(lambda: len(list(tmp_path.iterdir())) == 2, "the ranks have begun")
            pids = set(descendants()) - set(others)
            assert pids > set(context.pids()), "the fork server is among them"
            forks = {pid for pid in pids if "memory_of_the_host" in pathlib.Path(f"/proc/{pid}/maps").read_text()}
            assert forks == (pids if method == "fork" else set())
        finally:
            context.terminate()


SCRIPT = """
import os, signal, sys
from accelmgr import distributed
from accelmgr.compat.ml_mp import MultiprocessConfig, launch_subprocesses

def wait(rank, path):
    with open(os.path.join(path, f"{rank}.part"), "w") as file:
        file.write(str(os.getpid()))
    os.rename(os.path.join(path, f"{rank}.part"), os.path.join(path, str(rank)))
    signal.pause()

if __name__ == "__main__":
    path, method = sys.argv[1:]
    try:
        if method == "of ml":
            launch_subprocesses(lambda: wait(distributed.get_rank(), path), MultiprocessConfig(world_size=2))
        else:
            distributed.spawn("shm", wait, (path,), nproc_per_node=2, start_method=method)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.parametrize("method", [*START_METHODS, "of ml"])
def test_ctrl_c_in_join_ends_the_ranks_of_a_script(tmp_path: Any, method: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    begun = tmp_path / "begun"
    begun.mkdir()
    with started(str(script), str(begun), method, cwd=tmp_path) as program:
        _wait_for(lambda: {p.name for p in begun.iterdir()} == {"0", "1"} or program.poll() is not None, "the ranks")
        pids = [int(path.read_text()) for path in begun.iterdir()]
        program.send_signal(signal.SIGINT)
        output, _ = program.communicate(timeout=60)
    assert output == "interrupted\n"
    assert len(pids) == 2 and all(map(is_gone, pids))


def _interrupted(rank: int) -> str:
    if rank == 1:
        signal.pause()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    begun = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)  # By then this rank waits in barrier().
        distributed.barrier()
    except KeyboardInterrupt:
        return "at once" if time.monotonic() - begun < 120 else "late"
    return "not at all"


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_ctrl_c_ends_a_collective(backend: str) -> None:
    context = spawned(_interrupted, backend=backend, timeout=300)
    _wait_for(lambda: context.join(0.02) or context.results[0] is not None, "the rank has ended")
    assert context.results == ["at once", None]
    context.terminate()


# Over torch.distributed


def join_by_torch(rank: int, path: str, name: str = "store") -> None:
    os.environ.pop("ACCELMGR_WORLD_MEMORY", None)  # As if another launcher had started it.
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{path}/{name}",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=60),
    )


def _over_torch(rank: int, path: str, function: Any) -> Any:
    join_by_torch(rank, path)
    try:
        assert (distributed.model_name(), distributed.backend()) == ("native-dist", "gloo")
        assert distributed.get_rank() == torch.distributed.get_rank() == rank
        assert distributed.get_world_size() == torch.distributed.get_world_size()
        return function(rank)
    finally:
        distributed.finalize()
        assert not torch.distributed.is_initialized()


def _errors_of_torch(rank: int) -> list[tuple[str, str]]:
    return [
        error_of(lambda: distributed.initialize("shm", rank=rank, world_size=2)),
        error_of(lambda: distributed.all_gather(torch.ones(1 + rank))),
        error_of(lambda: distributed.new_group([0, 9])),
        error_of(lambda: distributed.all_reduce(1, group=object())),
        error_of(lambda: distributed.reduce_scatter(torch.ones(3))),
    ]


def _collectives_of_torch(rank: int) -> dict[str, Any]:
    class Members:  # Adds to torch's group the members of accelmgr's groups that the checks use.
        def __init__(self, group: Any) -> None:
            self.group = group
            self.ranks, self.rank, self.size = [0, 2], 0, 2

        def contains(self, rank: int) -> bool:
            return False

    new_group = distributed.new_group
    groups: list[Any] = []

    def wrapped(ranks: list[int]) -> Any:
        groups.append(new_group(ranks))
        return Members(groups[-1])

    all_reduce, all_gather = distributed.all_reduce, distributed.all_gather
    unwrap = lambda group: group.group if isinstance(group, Members) else group  # noqa: E731
    distributed.new_group = wrapped  # type: ignore[assignment]
    distributed.all_reduce = lambda t, op="SUM", group=None: all_reduce(t, op, unwrap(group))
    distributed.all_gather = lambda t, group=None: all_gather(t, unwrap(group))
    return _collectives(rank)


def launched(function: Any, *args: Any, count: int) -> list[Any]:
    """Calls `function` in ranks that are described by their environment alone; returns the results."""
    from accelmgr.compat import xla_multiprocessing as xmp

    context = xmp.spawn(function, args, nprocs=count, join=False, start_method="fork")
    assert context is not None and context.join(100)
    return context.results


def check_gradients(found: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for first, second in found:
        torch.testing.assert_close(second, torch.tensor([2.0, 2.0, 4.0, 4.0]))
        torch.testing.assert_close(first, second * torch.arange(4.0))


@pytest.mark.parametrize(
    ("function", "count", "check"),
    [
        (_collectives_of_torch, 3, _check_collectives),
        (_gradients, 2, check_gradients),
        (_whole_numbers, 2, _check_whole_numbers),
    ],
)
def test_over_torch_distributed_the_same_calls_give_the_same(
    tmp_path: Any, function: Any, count: int, check: Any
) -> None:
    check(launched(_over_torch, str(tmp_path), function, count=count))


def test_over_torch_distributed_errors_are_clear(tmp_path: Any) -> None:
    for errors in launched(_over_torch, str(tmp_path), _errors_of_torch, count=2):
        kinds = ["UsageError", "CollectiveError", "ConfigError", "UsageError", "UsageError"]
        assert [kind for kind, _ in errors] == kinds
        texts = [text for _, text in errors]
        assert "torch.distributed is initialized already (gloo" in texts[0]
        assert "member 0 called all_gather float32 [1]; member 1 called all_gather float32 [2]" in texts[1]
        assert "a group cannot have rank 9: in a world of 2" in texts[2]
        assert "this is a object" in texts[3]
        assert "not a multiple of the 2 ranks" in texts[4]


def _by_environment(rank: int) -> tuple[Any, ...]:
    before = distributed.model_name()
    distributed.set_local_rank(rank + 3)
    hinted = distributed.get_local_rank()
    total = distributed.all_reduce(1)
    distributed.finalize()
    return before, hinted, total, distributed.model_name()


def test_the_environment_of_a_launcher_is_found_by_itself() -> None:
    assert launched(_by_environment, count=2) == [("accelmgr-dist", 3, 2, "serial"), ("accelmgr-dist", 4, 2, "serial")]


def _at_the_store_of_another_launcher(rank: int, port: int) -> Any:
    del os.environ["ACCELMGR_WORLD_MEMORY"]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    gathered = distributed.all_gather(rank).tolist()
    distributed.barrier()
    distributed.finalize()
    # The same store serves torch.distributed's own rendezvous.
    torch.distributed.init_process_group("gloo")
    gathered += distributed.all_gather(rank).tolist()
    torch.distributed.destroy_process_group()
    return gathered


def test_the_store_of_another_launcher_serves_both() -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)
    assert launched(_at_the_store_of_another_launcher, store.port, count=2) == [[0, 1, 0, 1]] * 2


# The end of a rank

kept: list[Any] = []


def _append(path: pathlib.Path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def _leave(local_rank: int, folder: pathlib.Path, how: str) -> None:
    atexit.register(_append, folder / "called", how[0])
    kept.extend((tempfile.TemporaryDirectory(dir=folder), open(folder / f"open{local_rank}", "w")))
    kept[-1].write("text")
    if how == "raise":
        raise RuntimeError("on purpose")
    if how == "exit":
        sys.exit(3)


@pytest.mark.parametrize("method", START_METHODS)
@pytest.mark.parametrize("how", ["return", "raise", "exit"])
def test_a_rank_ends_as_a_process_of_python(tmp_path: pathlib.Path, method: str, how: str) -> None:
    atexit.register(_append, tmp_path / "called", "host")
    count = 2 if how == "return" else 1
    own = tempfile.TemporaryDirectory(dir=tmp_path)
    try:
        ranks(_leave, tmp_path, how, method=method, count=count)
    except SpawnError as error:
        assert (error.rank, error.exit_code) == (0, 3 if how == "exit" else 17)
        assert ("on purpose" in str(error)) == (how == "raise")
    finally:
        atexit.unregister(_append)
    assert (tmp_path / "called").read_text() == how[0] * count
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [pathlib.Path(own.name).name]
    if method != "fork":  # A fork of multiprocessing leaves them, too.
        assert [(tmp_path / f"open{rank}").read_text() for rank in range(count)] == ["text"] * count


def _hang(local_rank: int) -> int:
    from accelmgr._launch import rank

    rank.END_S = 0.5
    if local_rank == 1:
        atexit.register(signal.pause)
    return local_rank


@pytest.mark.parametrize("method", START_METHODS)
def test_a_rank_that_hangs_at_its_end_is_ended_and_named(capfd: pytest.CaptureFixture[str], method: str) -> None:
    with pytest.raises(SpawnError, match="rank 1 ended with exit code 1"):
        ranks(_hang, method=method)
    assert "rank 1 is ended: what it has registered to be called at its end (atexit)" in capfd.readouterr().err
