"""Checks that a torchrun command line works with `accelmgr spawn` in the place of torchrun."""

import os

import pytest
from conftest import DONE, USAGE

WORLD = "sh -c 'echo $RANK of $WORLD_SIZE'"


def lines(ended):
    return sorted(ended.out.splitlines())


@pytest.mark.parametrize(
    "options",
    [
        "--standalone --nproc-per-node 2",
        "--nproc_per_node=2",
        "--nnodes=1 --nproc-per-node=2",
        "--nnodes=1:1 --nproc-per-node=2",
        "--standalone --nnodes=1 --nproc-per-node=2",
        "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --nproc-per-node=2",
        "--rdzv_backend=static --master-addr 127.0.0.1 --master_port 0 --nproc-per-node 2",
        "--max_restarts 1 --nproc-per-node 2",
        "--nnodes 1 --node_rank 0 --nproc_per_node 2 --start_method spawn",
        "--nproc-per-node 2 --no_python",
    ],
)
def test_the_options_of_torchrun_start_two_processes(person, options):
    ended = person.types(f"accelmgr spawn {options} {WORLD}")
    assert ended.code == DONE, ended.err
    assert lines(ended) == ["[rank 0] 0 of 2", "[rank 1] 1 of 2"]
    assert person.files() == set()


def test_a_range_of_hosts_begins_with_those_that_came(person):
    here = f"--node-rank=0 --rdzv-endpoint=127.0.0.1:{person.reserved_port()}"
    ended = person.types(f"accelmgr spawn --nnodes=1:3 {here} --nproc-per-node=2 --rendezvous-timeout=0.1 {WORLD}")
    assert ended.code == DONE, ended.err
    assert lines(ended) == ["[rank 0] 0 of 2", "[rank 1] 1 of 2"]


@pytest.mark.parametrize("kind", ["cpu", "auto"])
def test_a_process_for_each_core(person, kind):
    ended = person.types(f"accelmgr spawn --nproc-per-node {kind} --no-prefix sh -c 'echo $WORLD_SIZE'")
    assert ended.code == DONE, ended.err
    assert set(ended.out.splitlines()) == {str(os.cpu_count())}


@pytest.mark.parametrize("option", ["-m", "--module"])
def test_a_module_is_run_as_of_python(person, option):
    person.file("pack").mkdir()
    person.file("pack/__init__.py").touch()
    person.file("pack/train.py").write_text("import os, sys\nprint(__name__, os.environ['RANK'], sys.argv[1:])\n")
    ended = person.types(f"accelmgr spawn --nproc-per-node 2 {option} pack.train --lr 3 -- x")
    assert ended.code == DONE, ended.err
    assert lines(ended) == [f"[rank {rank}] __main__ {rank} ['--lr', '3', '--', 'x']" for rank in range(2)]


def test_the_port_and_the_id_reach_the_processes(person):
    port = person.reserved_port()
    ended = person.types(f"accelmgr spawn --nproc-per-node 1 --no-prefix --master-port {port} --rdzv-id job7 "
                         "sh -c 'echo $MASTER_ADDR $MASTER_PORT $TORCHELASTIC_RUN_ID'")
    assert (ended.code, ended.out) == (DONE, f"127.0.0.1 {port} job7\n"), ended.err


REFUSED = {
    "-t 3": "--tee is an option of torchrun that accelmgr spawn does not have: use --log-dir DIR",
    "-r 3": "--redirects is an option of torchrun that accelmgr spawn does not have: use --log-dir DIR",
    "--local_ranks_filter 0": "--local-ranks-filter is an option of torchrun",
    "--monitor-interval 5": "--monitor-interval is an option of torchrun that accelmgr spawn does not have",
    "--rdzv-conf timeout=5": "use --rendezvous-timeout S",
    "--run-path": "python3 runs a PROGRAM that ends in .py",
    "--role trainer": "leave it out: all processes have the role `default`",
    "--signals-to-handle SIGUSR1": "SIGUSR1, SIGUSR2 and others are forwarded",
    "--rdzv-backend etcd": "--rdzv-backend is 'etcd'; nodes meet at node 0",
    "--nnodes 1:4": "--nnodes is 4, but --rendezvous is empty",
    "--nnodes 4:3 --master-port 0": "--nnodes is 4; it must be at most 3",
    "--nnodes 1:x": "'x'",
    "--nproc-per-node many": "--nproc-per-node is 'many'; it must be a whole number from -1 to 4096",
    "--nproc_per_node 0": "--nproc-per-node is 0; it must be at least 1",
    "--standalone --nnodes 2": "--standalone is for one node, but --nnodes is 2",
    "--nnodes 2 --rdzv-endpoint 127.0.0.1": "--node-rank is missing: each of the 2 nodes that meet at --rdzv-endpoint",
    "--master-port x": "--master-port: '127.0.0.1:x'",
    "-m --no-python": "leave out one of them",
}


@pytest.mark.parametrize("options", REFUSED)
def test_what_has_no_counterpart_says_what_to_use_instead(person, options):
    ended = person.types(f"accelmgr spawn {options} sh -c 'echo started'")
    assert ended.code == USAGE, ended.text
    assert REFUSED[options] in ended.err
    assert ended.out == ""
