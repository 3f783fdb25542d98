"""Makes the report of each benchmark: tables of its measurements, and the targets of the project."""

import itertools
from statistics import median

from tables import Measured, Report, Table, at_least, at_most, ratio, size_text

KIB, MIB = 2**10, 2**20


def reduce(lines):
    measured = Measured(lines)
    table = Table(
        "Reduction of two runners' gradients. GB/s counts N+1 passes to overwrite, N+2 to accumulate (bf16: half a\n"
        "pass for each slab; all_bf16: for the master, too); x: so many times faster than",
        ["per runner", "mode", "dtype", "undo", "us", "GB/s", "of STREAM add", "x copy in/out", "x gloo"],
    )
    targets = []
    modes = [("overwrite", False), ("accumulate", False), ("accumulate", True)]
    sizes = measured.values_of("bytes_per_runner", name="ours")
    for size, dtype, (mode, undo) in itertools.product(sizes, ("fp32", "bf16", "all_bf16"), modes):
        case = {"bytes_per_runner": size, "dtype": dtype, "mode": mode, "undo": undo}
        us, gb_per_s = measured.get("ours", "time", **case), measured.get("ours", "bandwidth", **case)
        share = ratio(gb_per_s, measured.get("stream_add", "bandwidth", bytes_per_runner=size))
        # Without a mode it finds the first variant, which overwrites. For accumulating that is a lower bound.
        by_copy = ratio(measured.get("copy_in_out", "time", bytes_per_runner=size, dtype=dtype), us)
        by_gloo = ratio(measured.get("gloo", "time", bytes_per_runner=size, dtype=dtype), us)
        row = [size_text(size), mode, dtype, "yes" if undo else "no", us, gb_per_s, share, by_copy, by_gloo]
        table.rows.append(row)
        if dtype == "fp32":
            targets += reduce_targets(measured, case, us, share, by_copy, by_gloo)
        elif dtype == "all_bf16" and size == 64 * MIB and not undo:
            times = ratio(measured.get("ours", "time", **{**case, "dtype": "fp32"}), us)
            targets.append(at_least(1.6, f"64 MiB {mode} of bfloat16, elements a second over float32", times))
    return Report([table], targets)


def reduce_targets(measured, case, us, share, by_copy, by_gloo):
    size, overwrites = case["bytes_per_runner"], case["mode"] == "overwrite"
    label = f"{size_text(size)} {case['mode']}"
    if case["undo"]:
        without = measured.get("ours", "time", **{**case, "undo": False})
        if size >= 16 * MIB:
            return [at_most(1.10, f"{label} with undo image, time over none", ratio(us, without))]
        if size <= 64 * KIB and us is not None and without is not None:
            return [at_most(2, f"{label}, us that the undo images add", us - without)]
        return []
    if size >= 16 * MIB:
        return [
            at_least(0.95 if overwrites else 0.85, f"{label}, share of STREAM add's bandwidth", share),
            at_least(4 if overwrites else 3, f"{label}, times faster than copy in/out", by_copy),
            at_least(12, f"{label}, times faster than gloo", by_gloo),
        ]
    if size <= 64 * KIB:
        add_us = measured.get("stream_add", "time", bytes_per_runner=size)
        return [
            at_most(2, f"{label}, time over STREAM add and a barrier", ratio(us, add_us)),  # Both with one barrier.
            at_least(100, f"{label}, times faster than gloo", by_gloo),
        ]
    return []


def trigger(lines):
    measured = Measured(lines)
    table = Table("Round trip host -> two runners -> host", ["", "case", "us", "of ours"])
    targets = []
    for case in measured.values_of("case"):
        ours = measured.get("ours", "round_trip", case=case)
        for name in measured.values_of("name", case=case):
            us = measured.get(name, "round_trip", case=case)
            table.rows.append([name, case, us, ratio(us, ours)])
        futex = measured.get("futex", "round_trip", case=case)
        targets.append(at_most(1.2, f"{case}, time over a bare futex", ratio(ours, futex)))
    return Report([table], targets)


def before(lines):
    """Compares the lines of two builds. The key `build` of a line says which build it is from."""
    measured = Measured(lines)
    table = Table("Medians of two builds; x: now over before", ["", "metric", "before", "now", "x"])
    seen = {}
    for line in lines:
        key = tuple((k, v) for k, v in line.items() if k not in ("value", "round", "unit", "build"))
        seen.setdefault(key, line["unit"])
    for key, unit in seen.items():
        where = dict(key)
        then, now = (measured.get(**where, build=build) for build in ("before", "now"))
        metric = f"{where.pop('metric')} ({unit})"
        table.rows.append([" ".join(map(str, where.values())), metric, then, now, ratio(now, then)])
    return Report([table], [])


def trace(lines):
    measured = Measured(lines)
    table = Table("All spans of a step, us; of a step of 1 ms, %", ["caches", "runner", "host", "runner %", "host %"])
    targets = []
    for case in measured.values_of("case"):
        runner, host = (measured.get("ours", who, case=case) for who in ("runner", "host"))
        table.rows.append([case, runner, host, runner / 10, host / 10])
        for who, us in (("runner", runner), ("host", host)):
            targets.append(at_most(10, f"{case}, us of a {who} in a step", us))
    return Report([table], targets)


def service_load(lines):
    measured = Measured(lines)
    table = Table("Steps of a host of a service", ["step, ms", "alone", "loaded", "x"])
    targets = []
    for metric in ("median", "p99"):
        alone, loaded = (measured.get(name, metric) for name in ("alone", "loaded"))
        table.rows.append([metric, alone, loaded, ratio(loaded, alone)])
        targets.append(at_most(1.02, f"{metric} of a step under load over alone", ratio(loaded, alone)))
    alone, loaded = (measured.get(name, "processor") for name in ("alone", "loaded"))
    table.rows.append(["the service's process, % of a core", alone, loaded, None])
    requests, errors, growth = (measured.get("loaded", metric) for metric in ("requests", "errors", "growth"))
    targets += [
        at_least(900, "requests a second", requests),
        at_most(0, "requests that failed", errors),
        at_most(1, "growth of the service's memory, MiB", growth),
    ]
    return Report([table], targets)


def capture(lines):
    measured = Measured(lines)
    names = ["ours", "plain", "at_end"]
    table = Table(
        "Backward of 128 MiB of weights, ms; x: ours over plain backward",
        ["of a weight", *names, "x"],
    )
    targets = []
    for size in measured.values_of("bytes"):
        times = [measured.get(name, "time", bytes=size) for name in names]
        factor = ratio(times[0], times[1])
        table.rows.append([size_text(size), *times, factor])
        targets.append(at_most(1.2, f"{size_text(size)}, time over plain backward", factor))
    return Report([table], targets)


def update(lines):
    measured = Measured(lines)
    table = Table(
        "Reducing half of the gradients and updating half of the parameters with AdamW, ms; x: ours over fused AdamW",
        ["parameters", "ours", "torch", "x"],
    )
    targets = []
    for case in measured.values_of("case"):
        ours, torch = (measured.get(name, "time", case=case) for name in ("ours", "torch"))
        table.rows.append([case, ours, torch, ratio(ours, torch)])
        limit = 1.35 if case.endswith("clipped") else 1.25
        targets.append(at_most(limit, f"{case}, time over that of torch", ratio(ours, torch)))
    return Report([table], targets)


def queue(lines):
    measured = Measured(lines)
    peers = [name for name in measured.values_of("name") if name != "ours"]
    table = Table(
        "Hand-off of a block to another process, us; x: ours against the fastest peer",
        ["size", "spinning", "parked", *peers, "x spinning", "x parked", "system calls spinning"],
    )
    targets = []
    for size in measured.values_of("bytes"):
        spinning, parked = (
            measured.get("ours", "latency", case=c, bytes=size) for c in ("spinning", "parked")
        )
        by_peer = [measured.get(name, "latency", bytes=size) for name in peers]
        best = min((us for us in by_peer if us is not None), default=None)
        calls = measured.get("ours", "system_calls", case="spinning", bytes=size)
        factors = [ratio(best, spinning), ratio(best, parked)]
        table.rows.append([size_text(size), spinning, parked, *by_peer, *factors, calls])
        targets += [
            at_least(100, f"{size_text(size)} spinning, times faster than the fastest peer", factors[0]),
            at_least(5, f"{size_text(size)} parked, times faster than the fastest peer", factors[1]),
            at_most(0, f"{size_text(size)} spinning, system calls in a hand-off", calls),
        ]
    return Report([table], targets)


def step(lines):
    measured = Measured(lines)
    table = Table(
        "Cycle of step, gradients, SGD and published parameters. Overhead: the cycle without the same forward and\n"
        "backward alone in two processes side by side",
        ["parameters", "", "cycle ms", "alone ms", "overhead ms", "ours / its overhead", "peak memory MiB"],
    )
    targets = []
    for case in measured.values_of("case"):
        pair = measured.get("compute_only_pair", "cycle", case=case)
        overheads = {}
        for name in measured.values_of("name", case=case, metric="cycle"):
            if name == "compute_only_pair":
                continue
            cycle = measured.get(name, "cycle", case=case)
            alone = measured.get(name, "compute_alone", case=case) or pair
            overheads[name] = None if alone is None else cycle - alone
            memory = measured.get(name, "peak_memory", case=case)
            table.rows.append([case, name, cycle, alone, overheads[name], share_of(overheads, name), memory])
        bound = measured.get("ours", "pass_bound", case=case)
        # Targets use the faithful pattern with its data in memory, since all other contestants have theirs there.
        for name, share in (("ddp", 1 / 4), ("manager_faithful_resident", 1 / 10), ("manager_best", 1 / 3)):
            targets.append(overhead_target(case, name, share, overheads, bound))
    return Report([table], targets)


def python(lines):
    measured = Measured(lines)
    table = Table(
        "Cycle of step, gradients, SGD and published parameters, driven from Python (native: from C++). Overhead: the\n"
        "cycle without the same forward and backward alone in two processes side by side",
        ["", "", "cycle ms", "overhead ms", "ours / its overhead", "first step ms", "peak memory MiB", "ours / its"],
    )
    targets = []
    sizes = [case for case in measured.values_of("case") if case != "binding"]
    for case in sizes:
        pair = measured.get("compute_only_pair", "cycle", case=case)
        memory = {name: measured.get(name, "peak_memory", case=case) for name in measured.values_of("name", case=case)}
        overheads = {}
        for name in measured.values_of("name", case=case, metric="cycle"):
            if name == "compute_only_pair":
                continue
            cycle, first = (measured.get(name, metric, case=case) for metric in ("cycle", "first_step"))
            alone = measured.get(name, "compute_alone", case=case) or pair
            overheads[name] = None if None in (alone, cycle) else cycle - alone
            memory_share = ratio(memory.get("ours"), memory[name])
            row = [case, name, cycle, overheads[name], share_of(overheads, name), first, memory[name], memory_share]
            table.rows.append(row)
        bound = measured.get("native", "pass_bound", case=case)
        targets.append(overhead_target(case, "manager_faithful_resident", 1 / 10, overheads, bound))
        share = ratio(memory.get("ours"), memory.get("manager_faithful_resident"))
        targets.append(at_most(0.5, f"{case}, peak memory as a share of that of manager_faithful_resident", share))
    binding = measured.get("ours", "binding", case="binding")
    targets.append(at_most(5, "us of manager.step() in Python beyond the C++ one", binding))
    return Report([table], targets)


def inner(lines):
    measured = Measured(lines)
    table = Table(
        "A step with fused AdamW: in the runners (ours), in the host, in plain PyTorch",
        ["", "ours ms", "host ms", "plain ms", "ours / host", "ours / plain", "sync ms", "ours MiB", "host MiB"],
    )
    targets = []
    for case in measured.values_of("case"):
        ours, host, plain = (measured.get(name, "cycle", case=case) for name in ("ours", "host", "plain"))
        memory = [measured.get(name, "peak_memory", case=case) for name in ("ours", "host")]
        sync = measured.get("ours", "sync", case=case)
        table.rows.append([case, ours, host, plain, ratio(ours, host), ratio(ours, plain), sync, *memory])
        if "1 runner" in case:
            targets.append(at_most(1.02, f"{case}: of plain PyTorch", ratio(ours, plain)))
    return Report([table], targets)


def frozen(lines):
    measured = Measured(lines)
    table = Table(
        "Memory of parameters, as copies of themselves: in shared memory, and in manager, fork server and runners",
        ["parameters", "shared", "expected", "private"],
    )
    targets = []
    for case in measured.values_of("case"):
        shared, private = (measured.get("ours", what, case=case) for what in ("shared", "private"))
        kind, count = case.removesuffix("s").removesuffix(" runner").split(", ")
        expected = 1 if kind == "frozen" else 2 + int(count)
        table.rows.append([case, shared, expected, private])
        targets.append(at_most(1.05, f"{case}: shared memory over what is expected", ratio(shared, expected)))
        if private is not None:
            targets.append(at_most(0.05, f"{case}: private copies", private))
    return Report([table], targets)


def xla(lines):
    measured = Measured(lines)
    table = Table(
        "A step of one XLA runner, and what torch_xla itself takes to send parameters, compute, and read gradients",
        ["parameters", "ours ms", "torch_xla ms", "overhead"],
    )
    targets = []
    for case in measured.values_of("case"):
        ours, theirs = (measured.get(name, "cycle", case=case) for name in ("ours", "torch_xla"))
        overhead = None if None in (ours, theirs) else ours / theirs - 1
        table.rows.append([case, ours, theirs, overhead])
        if case == "17M":
            targets.append(at_most(0.05, f"{case}, overhead beyond torch_xla's own share", overhead))
    return Report([table], targets)


def share_of(overheads, name):
    """Our overhead as a share of a peer's. None if noise made the peer's overhead zero or negative."""
    theirs = overheads.get(name)
    return ratio(overheads.get("ours"), theirs) if theirs is not None and theirs > 0 else None


def overhead_target(case, name, share, overheads, bound):
    """The larger of two bounds: a share of the peer's overhead, or 1.3 times the bandwidth bound of the passes over
    memory that remain."""
    theirs = overheads.get(name)
    if theirs is not None and bound is not None and 1.3 * bound > share * theirs:
        text = f"{case}, overhead over the bandwidth bound (more than {share:.2g} of {name})"
        return at_most(1.3, text, ratio(overheads.get("ours"), bound))
    return at_most(share, f"{case}, overhead as a share of that of {name}", share_of(overheads, name))


def train(lines):
    measured = Measured(lines)
    names = ("ours", "plain", "ddp")
    table = Table(
        "configs/gpt-licenses.yaml. plain: PyTorch with two threads, ddp: two processes with one thread each",
        ["", "samples/s", "loop s", "held-out loss, nats/byte", "ours / it"],
    )
    throughput = {name: measured.get(name, "throughput") for name in names}
    loss = {name: measured.get(name, "held_out_loss") for name in names}
    for name in names:
        loss_text = None if loss[name] is None else f"{loss[name]:.3f}"
        factor = ratio(throughput["ours"], throughput[name])
        table.rows.append([name, throughput[name], measured.get(name, "loop"), loss_text, factor])
    best = max(throughput[name] or 0 for name in names[1:])
    difference = None if None in (loss["ours"], loss["plain"]) else abs(loss["ours"] - loss["plain"])
    return Report(
        [table],
        [
            at_least(1.0, "samples per second over the better peer's", ratio(throughput["ours"], best)),
            at_most(0.05, "held-out loss, difference from plain", difference),
        ],
    )


def start(lines):
    measured = Measured(lines)
    titles = {
        "train": "Start: from the call of `train` to the first step done",
        "runner": "Runner: from its fork to its first backward done",
    }
    tables = []
    for case in measured.values_of("case"):
        parts = measured.values_of("metric", case=case)
        rows = [[part, measured.get("ours", part, case=case)] for part in parts]
        tables.append(Table(titles.get(case, case), ["part", "ms"], rows))
    return Report(tables, [])


def recovery(lines):
    measured = Measured(lines)
    cases = measured.values_of("case")
    parts = measured.values_of("metric")
    rows = [[part, *(measured.get("ours", part, case=case) for case in cases)] for part in parts]
    table = Table("From a dead runner's readable pidfd to the next committed step, ms", ["part", *cases], rows)
    targets = []
    for case in cases:
        total, *the_models = (measured.get("ours", part, case=case) for part in ("total", "model", "compute"))
        targets.append(at_most(100, f"{case}, ms without building and computing the model", total - sum(the_models)))
    return Report([table], targets)


def collectives(lines):
    measured = Measured(lines)
    table = Table(
        "One call of two ranks, us; x: so many times faster than gloo", ["call", "size", "ours", "gloo", "x gloo"]
    )
    targets = []
    for call in ("barrier", "all_reduce", "all_gather_object"):
        for size in measured.values_of("bytes", name="ours", case=call):
            ours, gloo = (measured.get(name, "time", case=call, bytes=size) for name in ("ours", "gloo"))
            factor = ratio(gloo, ours)
            table.rows.append([call, size_text(size) if size else "", ours, gloo, factor])
            bound = 50 if size <= 64 * KIB else 5 if size >= 16 * MIB else None
            if bound is not None and call != "all_gather_object":
                text = f"{call} {size_text(size) if size else ''}".strip()
                targets.append(at_least(bound, f"{text}, times faster than gloo", factor))
    return Report([table], targets)


def nodes(lines):
    measured = Measured(lines)
    table = Table("all_reduce, two ranks on each of two nodes, us", ["size", "ours", "gloo", "x gloo"])
    targets = []
    for size in measured.values_of("bytes", name="ours"):
        ours, gloo = (measured.get(name, "time", bytes=size) for name in ("ours", "gloo"))
        factor = ratio(gloo, ours)
        table.rows.append([size_text(size), ours, gloo, factor])
        targets.append(at_least(1, f"{size_text(size)}, times faster than gloo", factor))
    return Report([table], targets)


def swarm(lines):
    measured = Measured(lines)
    links = Table(
        "Peers behind slow links. Bound: min(1, H*t/T); T: a link carries a peer's bytes of one average; H, made:\n"
        "steps from one average of a parameter to its next one, as wanted and as they were; beside: as a share of the\n"
        "steps that a peer without a swarm makes at the same time; p99 of steps, also without a swarm, while the\n"
        "state of another peer comes, and while none does; courier: of a core",
        [
            *("link", "computing %", "beside %", "bound %", "t ms", "samples", "H", "made", "MiB", "T s"),
            *("p99", "without", "joining", "calm", "courier %"),
        ],
    )
    rounds = Table(
        "Their rounds. Missed: without a peer that had joined. Joins: from its start to its first round",
        ["link", "rounds", "s", "longest", "peers", "missed %", "killed", "joins s", "most s", "did not", "warnings"],
    )
    targets = []
    for case in measured.values_of("case"):
        of = {line["metric"]: measured.get("ours", line["metric"], case=case) for line in lines if line["case"] == case}
        keys = ("share", "share_beside", "bound", "step", "samples", "every", "steps_between", "carried", "carry")
        keys += ("p99", "p99_alone", "p99_joining", "p99_calm", "courier")
        links.rows.append([case, *map(of.get, keys)])
        keys = ("rounds", "round", "longest", "participants", "missed", "killed", "join", "join_longest", "not_joined")
        rounds.rows.append([case, *map(of.get, keys), of.get("complaints")])
        targets += [
            at_most(2, f"{case}, points below the bound", of.get("below")),
            at_most(0, f"{case}, rounds with two digests", of.get("differing")),
            at_most(0, f"{case}, divisions of the swarm", of.get("divisions")),
            at_most(1.05, f"{case}, p99 of steps while a peer joins", ratio(of.get("p99_joining"), of.get("p99_calm"))),
            at_most(60, f"{case}, seconds from one round to the next", of.get("longest")),
        ]
    return Report([links, rounds], targets)


def launch(lines):
    measured = Measured(lines)
    counts = measured.values_of("case")
    table = Table(
        "From the call to all ranks past one barrier, ms", ["", *(f"{count} ranks" for count in counts)]
    )
    for name in measured.values_of("name"):
        table.rows.append([name, *(measured.get(name, "start_up", case=count) for count in counts)])
    targets = []
    for count in counts:
        for name, share in (("warm_fork", 1 / 3), ("mp_spawn", 1 / 50), ("torchrun", 1 / 50)):
            theirs = measured.get(name, "start_up", case=count)
            value = ratio(measured.get("ours_fork", "start_up", case=count), theirs)
            targets.append(at_most(share, f"{count} ranks, ours_fork as a share of {name}", value))
    return Report([table], targets)


def faults(lines):
    bounds = (
        "`runners.hang_timeout` 0.5 s, `reduction_timeout` 1 s, `start_timeout` 3 s; "
        "step's deadline in `data_manager` 1 s"
    )
    titles = {
        "fail": f"With `runners.on_loss: fail` (for `stop` and `hang`: {bounds})",
        "restart": "With `runners.on_loss: restart`",
    }
    places, kinds = (list(dict.fromkeys(line[key] for line in lines)) for key in ("place", "fault"))
    tables = []
    for policy, title in titles.items():
        rows = []
        for place in places:
            cases = [
                [line for line in lines if (line["case"], line["place"], line["fault"]) == (policy, place, kind)]
                for kind in kinds
            ]
            rows.append([f"`{place}`", *map(fault_cell, cases)])
        tables.append(Table(title, ["", *(f"`{kind}`" for kind in kinds)], rows, is_markdown=True))
    return Report(tables, [])


def fault_cell(lines):
    """The outcomes of a case, each with its median time. A case should have one outcome; empty if there is no case."""
    outcomes = {}
    for line in lines:
        counted = "counted" if line["counted"] else "not counted"
        tries = f" in {line['tries']} tries" if line["tries"] > 1 else ""
        outcomes.setdefault(f"{line['status']} · {counted}{tries}", []).append(line["value"])
    return " / ".join(f"{outcome} · {time_text(median(ms))}" for outcome, ms in outcomes.items())


def time_text(ms):
    return f"{ms / 1e3:.1f} s" if ms >= 1e3 else f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"
