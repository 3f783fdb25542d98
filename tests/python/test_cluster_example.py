"""Runs tools/examples/cluster_host.py on two machines: namespaces that tests/launcher/contract/two_nodes makes."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from plain_gpt import BATCH, EXAMPLES, SMALL, loss_of, losses_of, small_gpt
from programs import environment, free_port
from services import PROGRAM

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 8
COMMAND = [str(EXAMPLES / "cluster_host.py"), *SMALL, f"--steps={STEPS}"]
SECONDS = 240  # Time limit of a run; it needs a tenth of that.
ADDRESSES, PORT = ("10.77.0.1", "10.77.0.2"), "29400"  # In a network of its own.
STEP = re.compile(r"rank (\d): step (\d+), hosts (\d), loss ([\d.]+)")
HELD_OUT = re.compile(r"rank (\d): held-out loss ([\d.]+)")

# The example in a process that dies in the midst of averaging step DEATH: the tensors before this one were sent.
DEATH = 4
DYING = f"""
import os, signal, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import torch.distributed as dist
import cluster_host

step, average, all_reduce = 0, cluster_host.Hosts.average, dist.all_reduce

def counting_average(self, tensors, weight):
    global step
    step += 1
    average(self, tensors, weight)

def dying_all_reduce(tensor, **options):
    if step == {DEATH} and tensor.dim() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return all_reduce(tensor, **options)

cluster_host.Hosts.average, dist.all_reduce = counting_average, dying_all_reduce
cluster_host.main()
"""


def on_two_nodes(first: list[str], second: list[str]) -> str:
    """Runs a command on each of two machines. Returns what both have printed."""
    commands = []
    for index, command in enumerate((first, second)):
        commands += ["--node", "AB"[index], "env", f"GLOO_SOCKET_IFNAME=cable{index}", *command]
    done = subprocess.run(
        [str(ROOT / "tests/launcher/contract/two_nodes"), "--timeout", str(SECONDS), *commands],
        capture_output=True,
        text=True,
        timeout=SECONDS + 20,
        # Runners have one thread, however many there are: with more, a sum may have another order.
        env=environment(ACCELMGR_RUNNERS__THREADS="1", ACCELMGR_START_TIMEOUT="240", OMP_NUM_THREADS="1"),
    )
    if done.returncode == 77:
        pytest.skip(done.stderr)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def as_srun_starts(rank: int, size: int, *command: str) -> list[str]:
    """A command that srun would start. It says how that one has ended, and ends with 0 itself."""
    variables = [f"SLURM_PROCID={rank}", f"SLURM_NTASKS={size}", f"MASTER_ADDR={ADDRESSES[0]}", f"MASTER_PORT={PORT}"]
    return ["env", *variables, "sh", "-c", f'"$@"; echo "rank {rank}: exit code $?"', "sh", sys.executable, *command]


def at_once(*commands: list[str]) -> list[str]:
    program = (
        "import json, subprocess, sys\n"
        "for process in [subprocess.Popen(command) for command in json.loads(sys.argv[1])]: process.wait()"
    )
    return [sys.executable, "-c", program, json.dumps(commands)]


def printed(output: str, rank: int) -> tuple[list[int], list[float]]:
    """What a rank has printed: of each step the number of machines; of each step, and at the end, the loss."""
    steps = [match for match in STEP.findall(output) if match[0] == str(rank)]
    ends = [float(loss) for number, loss in HELD_OUT.findall(output) if number == str(rank)]
    assert [int(step) for _, step, _, _ in steps] == list(range(1, STEPS + 1)) and len(ends) == 1, output
    return [int(hosts) for _, _, hosts, _ in steps], [float(loss) for _, _, _, loss in steps] + ends


@functools.cache
def of_one_machine() -> list[float]:
    hosts, losses = printed(on_two_nodes(as_srun_starts(0, 1, *COMMAND, "--runners=2"), ["true"]), 0)
    assert hosts == [1] * STEPS and losses[0] - losses[-1] > 1
    return losses


@pytest.mark.parametrize("launcher", ["torchrun", "accelmgr spawn", "srun"])
def test_two_machines_with_a_runner_each_have_the_losses_of_one_with_two(launcher: str) -> None:
    commands = []
    for node in range(2):
        example = [*COMMAND, "--runners=1"]
        if launcher == "torchrun":
            place = [f"--node-rank={node}", f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}"]
            launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *place]
            commands.append([*launch, *example])
        elif launcher == "accelmgr spawn":
            place = [f"--node-rank={node}", f"--rendezvous={ADDRESSES[0]}:{PORT}"]
            launch = [str(PROGRAM), "spawn", "--no-python", "--nnodes=2", "--nprocs=1", *place]
            commands.append([*launch, "--", sys.executable, *example])
        else:
            commands.append(as_srun_starts(node, 2, *example))
    output = on_two_nodes(*commands)
    # The mean of two gradients has no rounding but that of their sum, which has no order: the bits are the same.
    assert printed(output, 0) == printed(output, 1) == ([2] * STEPS, of_one_machine())


# Stands in for srun: starts the command once for each task of the job.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for rank in 0 1; do SLURM_PROCID=$rank SLURM_NTASKS=2 "$@" & started+=($!); done
for process in "${started[@]}"; do wait "$process" || exit; done
"""


def test_a_job_of_slurm_has_the_losses_of_one_machine_with_two_runners(tmp_path: pathlib.Path) -> None:
    for name, text in (
        ("srun", SRUN),
        ("scontrol", '#!/bin/bash\n[[ $* == "show hostnames n[1-2]" ]] && echo 127.0.0.1'),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    port = next(port for port in iter(free_port, 0) if 20000 <= port < 30000)
    done = subprocess.run(
        ["bash", str(EXAMPLES / "cluster_host.slurm"), *SMALL, f"--steps={STEPS}"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment(
            PATH=f"{tmp_path}:{os.environ['PATH']}",
            PYTHON=sys.executable,
            RUNNERS="1",
            SLURM_JOB_ID=str(70000 + port),
            SLURM_JOB_NODELIST="n[1-2]",
            SLURM_SUBMIT_DIR=str(EXAMPLES),
            SLURM_CPUS_PER_TASK="1",
            ACCELMGR_START_TIMEOUT="240",
        ),
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert printed(done.stdout, 0) == printed(done.stdout, 1) == ([2] * STEPS, of_one_machine())


def test_a_machine_with_more_runners_weighs_more() -> None:
    """Two runners and one: the mean of both machines is that of all runners."""
    commands = [as_srun_starts(rank, 2, *COMMAND, f"--runners={2 - rank}") for rank in range(2)]
    _, losses = printed(on_two_nodes(*commands), 1)
    indices = [2 * index for index in range(2 * BATCH)] + [2 * index + 1 for index in range(BATCH)]
    assert losses[0] == pytest.approx(loss_of(small_gpt(), indices).item(), abs=2e-6)


def test_the_death_of_a_machine_ends_the_others() -> None:
    output = on_two_nodes(
        as_srun_starts(0, 2, *COMMAND, "--runners=1"), as_srun_starts(1, 2, "-c", DYING, *COMMAND[1:], "--runners=1")
    )
    assert "rank 1: exit code 137" in output and "rank 0: exit code 1\n" in output, output
    assert "rank 0: a host is lost: " in output and f"rank 0: step {DEATH}" not in output, output


def test_the_other_machine_goes_on_after_a_death() -> None:
    options = ["--runners=1", "--on-host-loss=shrink"]
    output = on_two_nodes(
        as_srun_starts(0, 2, *COMMAND, *options), as_srun_starts(1, 2, "-c", DYING, *COMMAND[1:], *options)
    )
    assert "rank 1: exit code 137" in output and "rank 0: exit code 0" in output, output
    hosts, losses = printed(output, 0)
    assert hosts == [2] * (DEATH - 1) + [1] * (STEPS - DEATH + 1), output
    # The batch of the step that the machine was lost in is left out.
    steps = [(step, [0, 1]) for step in range(DEATH - 1)] + [(step, [0]) for step in range(DEATH, STEPS + 1)]
    assert losses == pytest.approx(losses_of(steps, 2), abs=1e-4)


def test_the_death_of_the_first_machine_ends_the_others_in_any_case() -> None:
    options = ["--runners=1", "--on-host-loss=shrink"]
    output = on_two_nodes(
        as_srun_starts(0, 2, "-c", DYING, *COMMAND[1:], *options), as_srun_starts(1, 2, *COMMAND, *options)
    )
    assert "rank 0: exit code 137" in output and "rank 1: exit code 1\n" in output, output


def test_two_of_three_go_on_with_the_same_parameters() -> None:
    options = ["--runners=1", "--on-host-loss=shrink", "--timeout=20"]
    output = on_two_nodes(
        at_once(as_srun_starts(0, 3, *COMMAND, *options), as_srun_starts(1, 3, "-c", DYING, *COMMAND[1:], *options)),
        as_srun_starts(2, 3, *COMMAND, *options),
    )
    assert "rank 0: exit code 0" in output and "rank 2: exit code 0" in output, output
    hosts, losses = printed(output, 0)
    assert hosts[-1] == 2 and losses[0] - losses[-1] > 1
    ends = dict(HELD_OUT.findall(output))
    assert ends.keys() == {"0", "2"} and ends["0"] == ends["2"], output
