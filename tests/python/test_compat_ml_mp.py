"""Checks that accelmgr.compat.ml_mp behaves as ml.utils.mp does."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import free_port, run, started

import accelmgr
from accelmgr import _native, distributed
from accelmgr.compat import ml_mp
from accelmgr.compat.ml_mp import MultiprocessConfig, launch_subprocesses

# A process keeps this memory, and a pipe of libuv: opens them before tests count descriptors.
_native.SerialExecutor("any")
dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


def _say(path: str, word: str = "") -> None:
    groups = ml_mp.parallel_groups()
    blocks = ml_mp.all_to_all(torch.arange(distributed.get_world_size()) + 10 * distributed.get_rank(), None)
    rank, local, world = distributed.get_rank(), distributed.get_local_rank(), distributed.get_world_size()
    variables = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")]
    ranks = [groups.model.ranks, groups.pipeline.ranks, groups.data.ranks]
    with open(f"{path}/{rank}", "w") as file:
        setup = os.environ.get("SET_UP", "")
        json.dump([setup, os.getpid(), word, local, world, variables, ranks, blocks.tolist()], file)


def _set_up() -> None:
    os.environ["SET_UP"] = f"before {distributed.model_name()}"


def _said(path: Any) -> list[list[Any]]:
    return [json.loads(file.read_text()) for file in sorted(path.iterdir())]


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_launch_subprocesses_runs_the_function_in_every_rank(tmp_path: Any, method: str) -> None:
    config = MultiprocessConfig(world_size=2, model_parallelism=2, launch_method=method)
    launch_subprocesses(_say, config, _set_up, 0, str(tmp_path), word="yes")
    for rank, (setup, pid, *said) in enumerate(_said(tmp_path)):
        variables, groups = [str(rank), str(rank), "2", "127.0.0.1"], [[0, 1], [rank], [rank]]
        assert said == ["yes", rank, 2, variables, groups, [rank, 10 + rank]]
        assert setup.startswith("before") and pid != os.getpid()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["0", "1"]
    assert config.local_world_size == 2 and config.master_port >= ml_mp.DEFAULT_PORT


def test_a_world_of_one_runs_here_with_a_warning(tmp_path: Any, capfd: Any) -> None:
    readline = {"COLUMNS", "LINES"}  # torch.distributed imports it, and it sets these.
    before = {name: value for name, value in os.environ.items() if name not in readline}
    launch_subprocesses(_say, MultiprocessConfig(world_size=1), _set_up, 0, str(tmp_path))
    warned = [line for line in capfd.readouterr().err.splitlines() if "warning" in line.lower()]
    assert len(warned) == 1 and warned[0].endswith("the world has one rank; it runs in this process")
    assert _said(tmp_path)[0][:2] == ["", os.getpid()]
    assert {name: value for name, value in os.environ.items() if name not in readline} == before
    assert distributed.model_name() == "serial"


def _use_torch(path: str) -> None:
    total, doubled = torch.ones(1), torch.ones(2) * distributed.get_rank()
    dist.all_reduce(total)
    said = [
        dist.get_backend(),
        dist.get_rank(),
        dist.get_world_size(),
        total.item(),
        ml_mp.all_to_all(doubled, dist.group.WORLD).tolist() if dist.get_world_size() == 2 else None,
        distributed.all_reduce(1, group=dist.new_group([0])),
    ]
    distributed.finalize()
    assert not dist.is_initialized()
    dist.init_process_group("gloo", rank=said[1], world_size=said[2])  # The program's own, at the master's port.
    dist.barrier()  # A rank that destroys it at once breaks the connection of one that still connects.
    dist.destroy_process_group()
    with open(f"{path}/{said[1]}", "w") as file:
        json.dump(said, file)


@pytest.mark.parametrize("backend", [None, "shm", "gloo"])
@pytest.mark.parametrize("size", [1, 2])
def test_torch_distributed_is_initialized_in_a_launched_function(tmp_path: Any, backend: str, size: int) -> None:
    config = MultiprocessConfig(world_size=size, backend=backend, launch_method="fork", master_port=free_port())
    launch_subprocesses(_use_torch, config, None, 0, str(tmp_path))
    exchanged = [0.0, 1.0] if size == 2 else None
    assert _said(tmp_path) == [["gloo", rank, size, size, exchanged, 1] for rank in range(size)]
    assert not dist.is_initialized()


def _fail() -> None:
    if distributed.get_rank() == 1:
        raise ValueError("no data")
    distributed.barrier()


def test_a_failure_is_a_runtime_error_with_rank_and_trace() -> None:
    with pytest.raises(RuntimeError, match="rank 1 failed: ValueError: no data") as caught:
        launch_subprocesses(_fail, MultiprocessConfig(world_size=2, launch_method="fork"))
    assert isinstance(caught.value, accelmgr.SpawnError)
    assert 'raise ValueError("no data")' in caught.value.trace


def test_a_configuration_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="rank_offset is 1"):
        launch_subprocesses(_fail, MultiprocessConfig(world_size=2), None, 1)


def _raise_in_setup() -> None:
    raise OSError("no disk")


def test_a_failure_of_the_setup_is_told_as_such() -> None:
    with pytest.raises(accelmgr.SpawnError, match="failed in its setup: OSError: no disk") as caught:
        launch_subprocesses(_fail, MultiprocessConfig(world_size=2, launch_method="spawn"), _raise_in_setup)
    assert caught.value.phase == "setup"


def test_resolve_fills_in_what_is_missing() -> None:
    config = MultiprocessConfig(world_size=3)
    assert config.rank == -1 and config.local_world_size == ml_mp.MISSING and config.launch_method == "forkserver"
    assert ml_mp.is_missing(config, "master_port") and not ml_mp.is_missing(config, "world_size")
    MultiprocessConfig.resolve(config)
    assert config.local_world_size == 3 and config.master_port >= 29500
    assert "world_size = 3\n" in config.text() and "launch_method = forkserver" in config.text()


def test_the_backend_of_the_environment_is_used(monkeypatch: Any) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_BACKEND", "gloo")
    monkeypatch.setenv("ACCELMGR_DISTRIBUTED_BACKEND", "")  # It is set below, and so taken away after the test.
    assert ml_mp.get_distributed_backend() == "gloo"
    ml_mp.set_distributed_backend("shm")
    assert os.environ["ACCELMGR_DISTRIBUTED_BACKEND"] == "shm" == ml_mp.get_distributed_backend()


PROGRAM = """
import sys
import torch.distributed as dist
from accelmgr import CollectiveError, distributed
from accelmgr.compat import ml_mp

what, rank, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if what == "dist":
    ml_mp.init_dist(rank, rank, 2, 2, "127.0.0.1", port, "env://", "gloo")
    groups = ml_mp.init_parallelism(1, 2)
    print(groups.pipeline.ranks, distributed.all_reduce(rank + 1), distributed.backend(), dist.get_world_size())
elif what == "environment":
    ml_mp.init_process_group_from_backend()
    print(distributed.all_gather(rank).tolist(), distributed.get_local_rank(), dist.get_world_size())
elif what == "run":
    def report(word):
        print(word, distributed.get_rank(), ml_mp.parallel_groups().data.ranks, dist.get_world_size())
    config = ml_mp.MultiprocessConfig(rank=rank, local_rank=rank, world_size=2, master_port=port)
    ml_mp.init_and_run(report, config, "ran")
    assert dist.is_initialized()
elif what == "alone":
    try:
        ml_mp.init_process_group_from_backend()
    except CollectiveError as error:
        print(error.cause, error.ranks)
"""


def _programs(what: str, count: int, **variables: str) -> list[str]:
    port = str(free_port())
    with contextlib.ExitStack() as stack:
        programs = []
        for rank in map(str, range(count)):
            if what in ("environment", "alone"):
                variables |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
                variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            program = started("-c", PROGRAM, what, rank, port, cwd=pathlib.Path.cwd(), **variables)
            programs.append(stack.enter_context(program))
        return [program.communicate(timeout=120)[0] for program in programs]


def test_init_dist_joins_processes_that_others_have_started() -> None:
    assert _programs("dist", 2) == ["[0, 1] 3 gloo 2\n"] * 2


def test_init_process_group_from_backend_reads_the_environment() -> None:
    assert _programs("environment", 2) == ["[0, 1] 0 2\n", "[0, 1] 1 2\n"]


def test_init_and_run_calls_the_function_in_this_process() -> None:
    assert _programs("run", 2) == ["ran 0 [0, 1] 2\n", "ran 1 [0, 1] 2\n"]


@pytest.mark.timing
def test_a_rank_that_is_missing_is_named() -> None:
    assert _programs("alone", 1, ACCELMGR_LAUNCH_TIMEOUT="2") == ["timeout [1]\n"]


def test_groups_before_init_parallelism_are_an_error() -> None:
    with pytest.raises(accelmgr.UsageError, match="call init_parallelism"):
        ml_mp.parallel_groups()


def test_records_say_their_rank(tmp_path: Any) -> None:
    program = (
        "import logging; from accelmgr.compat import ml_mp; ml_mp.configure_logging(1, 2); "
        "logging.info('quiet'); logging.log(ml_mp.INFOALL, 'all'); logging.warning('loud')"
    )
    assert run("-c", program, cwd=tmp_path)[2] == "[1/2] INFOALL root: all\n[1/2] WARNING root: loud\n"
