"""Trains the shipped configuration (configs/gpt-licenses.yaml) in plain PyTorch, as a user would without accelmgr.

Modes
  plain  one process, two threads
  ddp    two processes with one thread each, DistributedDataParallel over gloo, half of the batch each

Prints samples per second (of the whole loop, without evaluation), the time of the loop, and the held-out loss before
and after it.
"""

import argparse
import time

import common
from common import emit, run_ranks, settle_torch


def train(model, replica, arguments, rank, world_size):
    """Trains and returns the seconds of the loop. `replica` is the model or its DistributedDataParallel."""
    import gpt
    import torch

    optimizer = gpt.make_optimizer(model)
    batches = gpt.training_batches(gpt.read_documents(arguments.train), arguments.seed, rank, world_size)
    torch.manual_seed(arguments.seed + rank)  # for dropout
    begin = time.perf_counter()
    for update in range(arguments.steps):
        for group in optimizer.param_groups:
            group["lr"] = gpt.learning_rate(update, arguments.steps)
        loss = replica(*next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), gpt.CLIP_NORM, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    return time.perf_counter() - begin


def measure(rank, world_size, store_path, results, arguments):
    settle_torch(1 if world_size > 1 else 2)
    import gpt
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(arguments.seed)
    model = gpt.Gpt()
    replica = model
    if world_size > 1:
        dist = common.join_gloo(rank, world_size, store_path)
        replica = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    held_out = gpt.windows(gpt.read_documents(arguments.held_out))
    before = gpt.held_out_loss(model, held_out) if rank == 0 else None
    seconds = train(model, replica, arguments, rank, world_size)
    if rank == 0:
        results.put((seconds, before, gpt.held_out_loss(model, held_out)))
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


def file_list(text):
    return text.split(",")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", required=True, choices=["plain", "ddp"])
    parser.add_argument(
        "--train", required=True, type=file_list, metavar="FILE,FILE", help="documents to train on"
    )
    parser.add_argument(
        "--held-out", required=True, type=file_list, metavar="FILE,FILE", help="documents never trained on"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=42)
    arguments = parser.parse_args()

    import gpt
    import torch  # noqa: F401  (once, before the fork)

    ranks = 2 if arguments.mode == "ddp" else 1
    [(seconds, before, after)] = run_ranks(measure, ranks, arguments)
    samples = arguments.steps * gpt.BATCH_SIZE
    emit(arguments.mode, "train", "throughput", samples / seconds, "samples/s", steps=arguments.steps)
    emit(arguments.mode, "train", "loop", seconds, "s", steps=arguments.steps)
    emit(arguments.mode, "train", "held_out_loss_before", before, "nats/byte", steps=arguments.steps)
    emit(arguments.mode, "train", "held_out_loss", after, "nats/byte", steps=arguments.steps)


if __name__ == "__main__":
    main()
