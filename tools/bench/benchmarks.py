"""The benchmarks and what each runs. A group is a list of contestants that take turns."""

import dataclasses
import itertools
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Callable

import contestants
import reports
from contestants import BENCH, RELEASE, TESTED, Contestant, Failure, peer, program
from tables import ratio


@dataclasses.dataclass(frozen=True)
class Benchmark:
    about: str  # what it measures, and how to read it
    rounds: int
    targets: list  # targets to build
    groups: Callable  # Gets `quick`, and the minutes if `minutes` is not None. Returns the groups.
    report: Callable  # lines -> tables.Report
    weighs_memory: bool = False
    preset: str = "release"
    minutes: float | None = None  # how long a group takes, unless somebody says otherwise


def quick_flag(quick):
    return ["--quick"] if quick else []


def read_reduce(output, _):
    """Makes lines of the contract, with one value each, of reduce.cpp's objects, which have two."""
    lines = []
    for found in contestants.parse_lines(output):
        attributes = {key: value for key, value in found.items() if key not in ("us", "gb_per_s")}
        if found["name"] == "stream_add":
            attributes.pop(
                "mode", None
            )  # The faster kind of stores, which may differ between rounds.
        lines.append({**attributes, "metric": "time", "value": found["us"], "unit": "us"})
        if found["gb_per_s"] > 0:
            lines.append({**attributes, "metric": "bandwidth", "value": found["gb_per_s"], "unit": "GB/s"})
    return lines


def reduce_groups(quick):
    command = [RELEASE / "tools/bench/bench_reduce", *quick_flag(quick)]
    ours = Contestant("ours", lambda: command, read=read_reduce)
    return [[ours, peer("gloo", "gloo_all_reduce.py", *quick_flag(quick))]]


def trigger_groups(quick):
    ours = program("ours", "bench_trigger", *quick_flag(quick))
    return [[ours, peer("multiprocessing", "mp_trigger.py", *quick_flag(quick))]]


def trace_groups(quick):
    return [[program("ours", "bench_trace", *quick_flag(quick))]]


def service_load_groups(quick):
    return [[program("ours", "bench_service_load", *quick_flag(quick))]]


def capture_groups(quick):
    return [[program("ours", "bench_capture", *quick_flag(quick))]]


def update_groups(quick):
    return [[program("ours", "bench_update", *quick_flag(quick))]]


def queue_groups(quick):
    ours = program("ours", "bench_queue", *quick_flag(quick))
    return [[ours, peer("multiprocessing", "mp_queue.py", *quick_flag(quick))]]


SHAPES_FILE = BENCH / "shapes.json"
STEP_SIZES = ("1", "17", "67")  # millions of parameters
PYTHON_SIZES = (*STEP_SIZES, "256")
STEP_PEERS = {
    "ddp": ["--mode", "ddp"],
    "manager_faithful": ["--mode", "manager_faithful", "--elements", "queue"],
    "manager_faithful_resident": ["--mode", "manager_faithful", "--elements", "resident"],
    "manager_best": ["--mode", "manager_best"],
    "compute_only_pair": ["--mode", "compute_only_pair"],
}


def step_groups(quick):
    groups = []
    for millions in STEP_SIZES:
        size, case = ["--parameters", millions, *quick_flag(quick)], millions + "M"
        ours = program("ours", "bench_step", "--shapes", SHAPES_FILE, *size, case=case)
        peers = [peer(name, "mlp_step.py", *mode, *size, case=case) for name, mode in STEP_PEERS.items()]
        groups.append([ours, *peers])
    return groups


def read_native(output, _):
    """Gives bench_step's lines the name "native", since "ours" is the Python package here."""
    return [{**line, "name": "native"} for line in contestants.parse_lines(output)]


def python_groups(quick):
    groups = []
    for millions in PYTHON_SIZES:
        size, case = ["--parameters", millions, *quick_flag(quick)], millions + "M"
        script = [contestants.torch_python(), BENCH / "python_manager.py", *size]
        native = [RELEASE / "tools" / "bench" / "bench_step", "--shapes", SHAPES_FILE, *size]
        ours = ["env", f"PYTHONPATH={RELEASE / 'python'}", *script]
        peers = {name: mode for name, mode in STEP_PEERS.items() if name != "ddp"}
        groups.append(
            [
                Contestant("ours", lambda command=ours: command, case),
                Contestant("ours_fork", lambda command=ours: [*command, "--start-method", "fork"], case),
                Contestant("native", lambda command=native: command, case, read_native),
                *(peer(name, "mlp_step.py", *mode, *size, case=case) for name, mode in peers.items()),
            ]
        )
    return groups


def inner_groups(quick):
    groups = []
    for millions, runners, clip in itertools.product(STEP_SIZES, (1, 2), (False, True)):
        case = f"{millions}M, {runners} runner{'s' * (runners > 1)}" + ", clipped" * clip
        size = ["--parameters", millions, "--runners", str(runners), *["--clip"] * clip, *quick_flag(quick)]
        script = [contestants.torch_python(), BENCH / "inner_manager.py", *size]
        command = ["env", f"PYTHONPATH={RELEASE / 'python'}", *script, "--mode"]
        modes = {"ours": "inner", "host": "host", "plain": "plain"}
        groups.append([Contestant(name, lambda c=command, m=mode: [*c, m], case) for name, mode in modes.items()])
    return groups


XLA_SIZES = ("1", "17")


def frozen_groups(quick):
    command = ["env", f"PYTHONPATH={RELEASE / 'python'}", contestants.torch_python(), BENCH / "frozen_memory.py"]
    return [[Contestant("ours", lambda: [*command, *quick_flag(quick)])]]


def xla_groups(quick):
    python = contestants.ROOT / ".venv-xla" / "bin" / "python"
    if not python.exists():
        raise Failure(f"there is no {python}, which has torch_xla; `tools/test --xla` makes it")
    groups = []
    for millions in XLA_SIZES:
        size, case = ["--parameters", millions, *quick_flag(quick)], millions + "M"
        ours = ["env", f"PYTHONPATH={RELEASE / 'python'}", python, BENCH / "xla_manager.py", *size]
        theirs = [python, BENCH / "peers" / "xla_step.py", *size]
        groups.append(
            [
                Contestant("ours", lambda command=ours: command, case),
                Contestant("torch_xla", lambda command=theirs: command, case),
            ]
        )
    return groups


TEXTS = pathlib.Path("/usr/share/common-licenses")  # the texts that configs/gpt-licenses.yaml names
QUICK_TRAIN_STEPS = 30


class TrainingRun:
    """`accelmgr train`, and the peers on the same documents. accelmgr decides which documents are held out and logs
    them."""

    def __init__(self, quick):
        self.steps = QUICK_TRAIN_STEPS if quick else 300
        self._left_out, self._held_out = set(), set()
        self._folder = tempfile.TemporaryDirectory(prefix="accelmgr-bench-")
        self._log = pathlib.Path(self._folder.name, "train.jsonl")

    def command(self):
        config = contestants.ROOT / "configs" / "gpt-licenses.yaml"
        return [
            *("env", "ACCELMGR_LOG_LEVEL=info", RELEASE / "tools" / "accelmgr", "train", "--config", config),
            *("--steps", self.steps, "--set", f"train.evaluate_every={self.steps}", "--log", self._log),
            "--overwrite",  # Replaces the log of the round before.
        ]

    def read(self, _, errors):
        self._held_out = set(re.findall(r"text: '(.+)' is held out", errors))
        self._left_out = set(re.findall(r"text: '(.+)' has the content of another file", errors))
        records = [json.loads(line) for line in self._log.read_text().splitlines()]
        steps = [record for record in records if "step_ms" in record]
        seconds = sum(record["step_ms"] + record["update_ms"] for record in steps) / 1e3
        throughput = ratio(sum(record["samples"] for record in steps), seconds)
        measured = [("throughput", throughput, "samples/s"), ("loop", seconds, "s")]
        evaluations = [record["held_out_loss"] for record in steps if "held_out_loss" in record]
        measured += [("held_out_loss", loss, "nats/byte") for loss in evaluations[-1:]]
        return [
            {"name": "ours", "case": "train", "metric": metric, "value": value, "unit": unit}
            for metric, value, unit in measured
        ]

    def peer(self, mode):
        return Contestant(mode, lambda: self._peer_command(mode))

    def _peer_command(self, mode):
        if not self._held_out:
            raise Failure("accelmgr train logs no held-out document: the peers cannot be given the same")
        files = {os.path.realpath(file) for file in TEXTS.iterdir()}
        trained_on = sorted(files - self._held_out - self._left_out)
        return [
            *(contestants.torch_python(), BENCH / "peers" / "gpt_train.py", "--mode", mode),
            *("--steps", self.steps, "--train", ",".join(trained_on)),
            *("--held-out", ",".join(sorted(self._held_out))),
        ]


def train_groups(quick):
    run = TrainingRun(quick)
    return [[Contestant("ours", run.command, read=run.read), run.peer("plain"), run.peer("ddp")]]


def start_groups(quick):
    return [[program("ours", "bench_start", *quick_flag(quick))]]


def recovery_groups(quick):
    return [[program("ours", "bench_recovery", *quick_flag(quick))]]


def collectives_groups(quick):
    ours = program("ours", "bench_collectives", *quick_flag(quick))
    return [[ours, peer("gloo", "gloo_collectives.py", *quick_flag(quick))]]


RENDEZVOUS = "10.77.0.1:29500"  # on the first of the two nodes that tests/launcher/contract/two_nodes makes


def on_two_nodes(name, program):
    """A contestant with two ranks on each of two nodes. `accelmgr spawn` starts them there."""
    command = [contestants.ROOT / "tests/launcher/contract/two_nodes", "--timeout", contestants.TIMEOUT_S]
    for node, name_of_node in enumerate(("A", "B")):
        command += [
            *("--node", name_of_node, "env", f"GLOO_SOCKET_IFNAME=cable{node}"),
            *(RELEASE / "tools" / "accelmgr", "spawn", "--nprocs=2", "--nnodes=2", f"--node-rank={node}"),
            *(f"--rendezvous={RENDEZVOUS}", "--no-prefix", "--", *program),
        ]
    return Contestant(name, lambda: command)


def nodes_groups(quick):
    script = [contestants.torch_python(), BENCH / "peers" / "gloo_nodes.py"]
    return [
        [
            on_two_nodes("ours", [RELEASE / "tools" / "bench" / "bench_nodes", *quick_flag(quick)]),
            on_two_nodes("gloo", [*script, *quick_flag(quick)]),
        ]
    ]


SWARM_RATES = (5, 20, 100)  # megabits a second


def swarm_groups(quick, minutes):
    folder = contestants.ROOT / "build" / "bench" / "swarm"
    script = [contestants.torch_python(), BENCH / "swarm.py", "--forwarder", RELEASE / "tools/bench/bench_forwarder"]
    command = ["env", f"PYTHONPATH={RELEASE / 'python'}", *script, "--minutes", 1 if quick else minutes]
    patience_s = contestants.TIMEOUT_S + 60 * minutes
    return [
        [
            Contestant(
                "ours",
                lambda rate=rate: [*command, "--mbit", rate, "--folder", folder / f"{rate}"],
                f"{rate} Mbit/s",
                timeout_s=patience_s,
            )
        ]
        for rate in (SWARM_RATES[1:2] if quick else SWARM_RATES)
    ]


def launch_groups(quick):
    ours = program("ours", "bench_launch", *quick_flag(quick))
    programs = ["--accelmgr", RELEASE / "tools/accelmgr", "--rank-program", RELEASE / "tools/bench/bench_launch"]
    return [[ours, peer("launchers", "launchers.py", *programs, *quick_flag(quick))]]


def faults_groups(_):
    command = [TESTED / "tests/engine/system/faults/system_faults_test", "--measure"]
    return [[Contestant("ours", lambda: command)]]


ALL = {
    "reduce": Benchmark(
        """Summing the gradients of two runners through shared memory, 4 KiB to 256 MiB for each. Against the same
        between private memories (copied in and out), gloo's all_reduce, and STREAM add (c = a + b), which is what
        the memory can do: no reduction can be much faster than 1.00 of it.""",
        3, ["bench_reduce"], reduce_groups, reports.reduce),
    "trigger": Benchmark(
        """Waking two runners and hearing back from both: while they spin, and when they are parked. Against a bare
        futex and multiprocessing's Event and Semaphore. 1.2 of the futex is a fifth on top of what the kernel
        takes.""",
        5, ["bench_trigger"], trigger_groups, reports.trigger),
    "capture": Benchmark(
        """Backward of 128 MiB of weights, by their size: with the capture of a runner (a copy into the slab from a
        hook, looking for Inf and NaN), plain (gradients are dropped), and with one copy of all at the end.""",
        3, ["bench_capture"], capture_groups, reports.capture),
    "update": Benchmark(
        """What one of two runners does after the commit of an inner step whose update the session makes: reduces half
        of the gradients, and updates half of the parameters with AdamW. Against the same reduction with torch's
        fused AdamW. One thread.""",
        3, ["bench_update"], update_groups, reports.update),
    "queue": Benchmark(
        """Handing 1 KiB to 1 MiB to another process, from the sender's call to the receiver's return. Against
        multiprocessing.Queue (bytes) and torch's (new tensors, and tensors that are in shared memory already).
        Ours should not depend on the size.""",
        3, ["bench_queue"], queue_groups, reports.queue),
    "trace": Benchmark(
        """What the spans that are always recorded cost a runner and a host in a step: its looks at the clock, and the
        writing. Warm: one step after the other. Cold: the caches hold other memory before each step.""",
        5, ["bench_trace"], trace_groups, reports.trace),
    "service_load": Benchmark(
        """What clients cost the host that drives a service: its steps alone, and while 1,000 requests a second come
        over 8 connections and 100 clients follow the events. Both take turns of 2 seconds. Host and runner have
        the first core, the service and its clients the last one.""",
        3, ["bench_service_load"], service_load_groups, reports.service_load),
    "step": Benchmark(
        """The whole training cycle of MLPs with 1, 17 and 67 million parameters. What counts is the overhead: the
        cycle without the same forward and backward alone, in two processes side by side. Against
        DistributedDataParallel over gloo and the TPUManager pattern in Python: faithful with its queues of
        elements, the same with its data in memory as all others have it, and its best variant. Peak memory is
        that of all processes together, shared pages counted once, in a turn of its own.""",
        3, ["bench_step"], step_groups, reports.step, weighs_memory=True),
    "python": Benchmark(
        """accelmgr.Manager of Python with an nn.Module of 1 to 256 million parameters: overhead of the cycle as in
        `step`, time to the first step (torch is imported already), and peak memory of all processes. Against the
        TPUManager pattern in Python, in its faithful variants and its best one, and the same cycle in C++ with no
        Python at all. The peers' runners are forked; ours start from nothing.""",
        3, ["bench_step", "_native"], python_groups, reports.python, weighs_memory=True),
    "inner": Benchmark(
        """A step with fused AdamW that the runners make with the model, 1 to 67 million parameters, one and two
        runners. Against step() with the optimizer in the host, and one process of plain PyTorch with all cores and the
        batches of all runners. One runner should take 1.02 of plain PyTorch. A sync brings parameters and state to the
        host.""",
        3, ["_native"], inner_groups, reports.inner, weighs_memory=True),
    "frozen": Benchmark(
        """How much memory parameters take, as so many copies of themselves: in shared memory frozen ones should take 1,
        trained ones 2 (values and gradients of the master) and 1 for each runner.""",
        1, ["_native"], frozen_groups, reports.frozen),
    "xla": Benchmark(
        """A step of one XLA runner on this machine's CPU, with parameters that come from the host and gradients that go
        there. Against the same in one process that has no manager: what torch_xla itself takes to send, compute and
        read.""",
        3, ["_native"], xla_groups, reports.xla),
    "train": Benchmark(
        """The shipped configuration for 300 steps: samples per second, and the loss on documents never trained on.
        Against a plain PyTorch loop with two threads and DistributedDataParallel with two processes. Faster counts
        only at the same loss.""",
        3, ["accelmgr"], train_groups, reports.train),
    "start": Benchmark(
        """How long it takes until the first step is done, and until a forked runner has done its first backward,
        by part.""",
        5, ["bench_start"], start_groups, reports.start),
    "recovery": Benchmark(
        """A runner is killed between two steps, under runners.on_loss restart: how long it takes until the next step
        has counted, by part. Building the model is the user's; all else is ours.""",
        3, ["bench_recovery"], recovery_groups, reports.recovery),
    "collectives": Benchmark(
        """Collectives of two ranks between private tensors, a core for each: barrier, all_reduce of 4 B to 256 MiB,
        all_gather of objects. Against torch.distributed over gloo.""",
        3, ["bench_collectives"], collectives_groups, reports.collectives),
    "nodes": Benchmark(
        """all_reduce of four ranks, two on each of two nodes (network namespaces of this machine, joined by a virtual
        cable). Against torch.distributed over gloo with all four in it.""",
        3, ["bench_nodes", "accelmgr"], nodes_groups, reports.nodes),
    "swarm": Benchmark(
        """Four peers of accelmgr.outer in network namespaces, each behind a link of 5, 20 or 100 Mbit/s with 100 ms
        there and back and one of 1,000 packets lost, by a forwarder of our own. Their devices have a pace of their
        own, so that two cores do. Each minute one is killed and a new one joins. The share of time that peers compute
        (steps made, times the time of a step without a swarm) against min(1, H*t/T): H steps from one average to the
        next, t the time of one, T the time in which a link carries a peer's bytes of one average. Logs stay in
        build/bench/swarm.""",
        1, ["_native", "bench_forwarder"], swarm_groups, reports.swarm, minutes=4),
    "launch": Benchmark(
        """From the call to all ranks past one barrier, for 2 and 8 ranks: spawn() by its three start methods, and
        programs under `accelmgr spawn`. Against multiprocessing's fork in a process that has torch,
        torch.multiprocessing.spawn and torchrun, all with a barrier over gloo.""",
        1, ["bench_launch", "accelmgr"], launch_groups, reports.launch),
    "faults": Benchmark(
        """What every fault at every phase of a step comes to, and after how long the caller is told. No comparison: the
        outcomes are those of tests/engine/system/faults/outcomes.md, which a test holds it to; a cell with two is a
        mistake.""",
        3, ["system_faults_test"], faults_groups, reports.faults, preset="test"),
}  # fmt: skip
