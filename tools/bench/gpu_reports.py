"""The report of tools/bench/gpu."""

from tables import Measured, Report, Table, at_least, at_most, ratio, size_text

MIB = 2**20
FULL_BYTES = 475 * MIB  # the gradients of 124 million parameters
BUCKET_BYTES = 25 * MIB  # of the transport
BEYOND_A_BUCKET_MS = 0.2


def bandwidth_table(measured, case, title, transports):
    """A row for each size: copies of each size of a bucket, with the host's memory registered, and not; then what the
    transport reaches."""
    buckets = measured.values_of("bucket_bytes", case=case)
    columns = ["size", *(f"{kind} {size_text(int(b))}" for kind in ("reg.", "not") for b in buckets), *transports]
    table = Table(title, columns)
    for size in measured.values_of("bytes", case=case):
        raw = [
            measured_bucket(measured, name, case, size, bucket)
            for name in ("registered", "unregistered")
            for bucket in buckets
        ]
        ours = [measured.get(name, "bandwidth", case=case, bytes=size) for name in transports]
        table.rows.append([size_text(int(size)), *raw, *ours])
    return table


def measured_bucket(measured, name, case, size, bucket):
    return measured.get(name, "bandwidth", case=case, bytes=size, bucket_bytes=bucket) if bucket <= size else None


def transport(measured):
    gradients = bandwidth_table(
        measured,
        "gradients",
        "Gradients from the device to the slab, GB/s: plain copies by the size of one, registered memory and not; the "
        "transport",
        ["transport"],
    )
    parameters = bandwidth_table(
        measured,
        "parameters",
        "Parameters from the session to the device, GB/s: plain copies; the transport; it from a read-only mapping",
        ["transport", "read_only"],
    )
    exposed = Table(
        "What is left of the copies after the last write, ms: an attempt without the same computing alone",
        ["size", "computing", "transport", "one bucket and 0.2 ms"],
    )
    targets = []
    for size in measured.values_of("bytes", case="exposed"):
        left = measured.get("transport", "time", case="exposed", bytes=size)
        computing = measured.get("transport", "compute", case="exposed", bytes=size)
        speed = measured_bucket(measured, "registered", "gradients", size, BUCKET_BYTES)
        bound = None if not speed else BUCKET_BYTES / speed / 1e6 + BEYOND_A_BUCKET_MS
        exposed.rows.append([size_text(int(size)), computing, left, bound])
        if size == FULL_BYTES:
            share = None if left is None else ratio(max(left, 0), bound)
            targets.append(at_most(1, "475 MiB, what is left over one bucket and 0.2 ms", share))
    full = {"case": "gradients", "bytes": FULL_BYTES, "bucket_bytes": BUCKET_BYTES}
    targets += [
        at_least(52, "475 MiB of gradients in buckets of 25 MiB, registered, GB/s", best(measured, "registered", full)),
        at_least(16, "475 MiB of gradients, not registered, GB/s", best(measured, "unregistered", full)),
        at_least(
            50,
            "475 MiB of parameters, GB/s",
            measured.get("transport", "bandwidth", case="parameters", bytes=FULL_BYTES),
        ),
    ]
    return [gradients, parameters, exposed], targets


def best(measured, name, attributes):
    return measured.get(name, "bandwidth", **attributes)


PEERS = ("ours_graphs", "ours_bf16_slab", "compute", "plain_copies", "ddp")
OPTIMIZED = (
    "ours_optimizer",
    "ours_inner",
    "ours_graphs_inner",
    "ours_inner_sync_50",
    "ours_inner_sync_1",
    "fused",
    "ddp_fused",
)


def step(measured):
    """The step of a GPT. An empty list without its lines."""
    tables, targets = [], []
    for case in measured.values_of("case", metric="step"):
        ours = measured.get("ours", "step", case=case)
        table = Table(
            f"A step of a GPT-2 ({case}) in bf16, parameters from the host and gradients to it, ms. ours_graphs: with "
            "CUDA graphs; ours_bf16_slab: the device rounds gradients; compute: no copies. Of ours, the time of the "
            "runner until its vote, and of the reduction",
            ["", "step", "runner", "reduction", "ours / it", "first loss"],
        )
        for name in ("ours", *PEERS):
            time, *parts = (measured.get(name, metric, case=case) for metric in ("step", "compute", "reduce"))
            loss = measured.get(name, "first_loss", case=case)
            table.rows.append([name, time, *parts, None if name == "ours" else ratio(ours, time), loss])
        tables.append(table)
        on_device = measured.get("fused", "step", case=case)
        table = Table(
            f"The same ({case}) with AdamW: on the host after a step of ours (ours_optimizer); in the runner (inner), "
            "which brings parameters and state to the host after so many steps (sync); in one kernel on the device in "
            "plain PyTorch (fused) and after DistributedDataParallel (ddp_fused), ms",
            ["", "step", "it / fused"],
        )
        for name in OPTIMIZED:
            time = measured.get(name, "step", case=case)
            table.rows.append([name, time, ratio(time, on_device)])
        tables.append(table)
        if case == "small":
            for name, text in (("plain_copies", "copies after backward"), ("ddp", "DistributedDataParallel")):
                value = ratio(ours, measured.get(name, "step", case=case))
                targets.append(at_most(1, f"step over that of {text}", value))
            for name, most in (("ours_inner", 1.02), ("ours_graphs_inner", 1)):
                value = ratio(measured.get(name, "step", case=case), on_device)
                targets.append(at_most(most, f"{name} over plain PyTorch with fused AdamW", value))
    return tables, targets


def gpu(lines):
    measured = Measured([line for line in lines if line["case"] != "machine"])
    tables, targets = transport(measured)
    more_tables, more_targets = step(measured)
    return Report(tables + more_tables, targets + more_targets)
