"""A peer of a hivemind swarm: accelmgr computes the gradients, hivemind.Optimizer averages them and steps.

    python tools/examples/hivemind_peer.py --run-id licences                            the first; prints its address
    python tools/examples/hivemind_peer.py --run-id licences --initial-peers ADDRESS    every further peer

`run_swarm.py` in this folder starts several peers on one machine. Every line that a peer prints is a JSON object.

How accelmgr and hivemind fit together. `model.parameters()` are memory of the session. manager.step() adds a mean
gradient to their `.grad`, and runners compute the next step with the values that optimizer.step() writes.

- hivemind's default (`params=`, and a factory as `optimizer=`: offloaded): each optimizer.step() adds `.grad` to its
  own accumulators. So `.grad` must have the gradient of one step: call manager.step(accumulate=False), or
  manager.step() and after each optimizer.step() optimizer.zero_grad() or manager.zero_grad(). The same holds with
  `delay_optimizer_step=True` and `delay_grad_averaging=True`. The optimizer has its own parameters, which hivemind
  copies into the model's.
- `reuse_grad_buffers=True` (here, unless `--overlap`): `.grad` is hivemind's accumulator. manager.step() adds to it;
  at the end of an epoch hivemind divides it by the number of its steps and zeroes it in place. Never call
  zero_grad() or step(accumulate=False). This mode saves a copy of the gradients.
- `use_local_updates=True` (`--average parameters`): each optimizer.step() updates the parameters with `.grad` and does
  not change it. Call manager.step(accumulate=False), or zero_grad().
- Inner steps (manager.step(optimizer=...)) fit only `use_local_updates=True`: optimizer.step() after manager.sync()
  averages the parameters that runners have updated, and steps itself only if there is a `.grad`. By default hivemind
  steps on its own copy, and writes it over the model's parameters at the end of each epoch.
- A peer that joins downloads the state of another peer. hivemind sends the parameters through a pipe of
  multiprocessing. accelmgr sends them as copies, which exist only meanwhile; the parameters stay in the session.
- Never set `reuse_tensors=True` in averager_opts: hivemind would move the parameters into its own memory.
  manager.step() finds that and raises ModelError. By default hivemind needs, beyond the session, one copy of the
  parameters, one of the gradients, and the optimizer's state.
- Only the thread that calls optimizer.step() writes parameters, also with `delay_optimizer_step=True`. Runners compute
  only within manager.step(), so they never read half of an update.
- manager.step() waits for no other peer. optimizer.step() may wait: for matchmaking_time, and if a peer has died for
  one averaging_timeout each for gradients and parameters. So averaging_timeout is short. With `--overlap` averaging
  runs in the background, its update comes one epoch late, and `.grad` is not reused.
- hivemind forks its averagers from this process and needs multiprocessing's start method `fork`. accelmgr does not
  change that method.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import pathlib
import sys
import time
from typing import Any

import torch
from licence_gpt import Gpt, documents, held_out_loss

import accelmgr

ADDRESS = "/ip4/127.0.0.1/tcp/0"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-id", required=True, help="the same for all peers of a swarm")
    parser.add_argument("--initial-peers", nargs="*", default=[], metavar="ADDRESS")
    parser.add_argument("--peer", type=int, default=0, help="number of this peer: the seed of its data, and its name")
    parser.add_argument("--average", choices=["gradients", "parameters"], default="gradients")
    parser.add_argument("--target-batch-size", type=int, default=256, help="sequences of all peers in an epoch of "
                        "hivemind; with too few, a peer is through before it has seen that there are others")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of each runner in a step")
    parser.add_argument("--runners", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=40, help="of hivemind; of gradients: one update each")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--matchmaking-time", type=float, default=0.5, help="seconds in which peers find each other")
    parser.add_argument("--averaging-timeout", type=float, default=3.0, help="seconds after which a round has failed")
    parser.add_argument("--overlap", action="store_true", help="average and update in the background, one epoch late")
    parser.add_argument("--seconds", type=float, default=600, help="after which this peer ends in any case")
    for name, value in (("layers", 4), ("width", 128), ("context", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--track", type=pathlib.Path, help="folder of a swarm on one machine, see run_swarm.py")
    return parser.parse_args()


class Track:
    """Files in a folder by which peers of one machine start and finish together. Without a folder no peer waits."""

    def __init__(self, folder: pathlib.Path | None, peer: int) -> None:
        self._folder, self._peer = folder, peer  # The file "finished" has the number of the first peer to finish.

    def wait_for_start(self, seconds: float) -> None:
        """Waits until run_swarm.py starts all peers: a first peer would train alone. A late peer starts at once."""
        if self._folder:
            self._wait("start", seconds)

    def last_epoch(self, otherwise: int) -> int:
        """The epoch after which all peers end: run_swarm.py may set it while they train. Until then `otherwise`."""
        file = self._folder / "last_epoch" if self._folder else None
        return int(file.read_text()) if file and file.exists() else otherwise

    def another_has_finished(self) -> bool:
        return self._folder is not None and (self._folder / "finished").exists()

    def is_first_to_finish(self) -> bool:
        """True for the first peer that asks, and for a peer without a folder. Its parameters are the result."""
        try:
            return self._folder is None or bool((self._folder / "finished").open("x").write(str(self._peer)))
        except FileExistsError:
            return False

    def wait_for_others(self, seconds: float) -> None:
        """Waits until all peers have finished. Until then this peer serves its parameters to them."""
        if self._folder:
            self._wait("all_finished", seconds)

    def _wait(self, name: str, seconds: float) -> None:
        assert self._folder
        end = time.monotonic() + seconds
        while not (self._folder / name).exists() and time.monotonic() < end:
            time.sleep(0.02)


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def make_manager(arguments: argparse.Namespace, model: Gpt) -> accelmgr.Manager:
    data = {
        "files": [str(file) for file in documents()[0]],
        "sequence_length": arguments.context,
        "seed": 1000 + arguments.peer,  # Each peer reads the texts in a different order.
    }
    return accelmgr.Manager(
        model,
        "text",
        nprocs=arguments.runners,
        batch_size_per_device=arguments.batch_size,
        step_timeout=60,
        runners={"threads": 1},
        data=data,
    )


def accumulates(arguments: argparse.Namespace) -> bool:
    """True if `.grad` is hivemind's accumulator. Not with --overlap: a gradient is still averaged in the next epoch."""
    return arguments.average == "gradients" and not arguments.overlap


def make_optimizer(arguments: argparse.Namespace, dht: Any, parameters: list[torch.nn.Parameter]) -> Any:
    import hivemind

    # Below matchmaking_time. averager_opts only reaches the averager of parameters; that of gradients needs a factory.
    request_timeout = 0.6 * arguments.matchmaking_time
    by_gradients = arguments.average == "gradients"
    gradients = functools.partial(hivemind.optim.grad_averager.GradientAverager, request_timeout=request_timeout)
    return hivemind.Optimizer(
        dht=dht,
        run_id=arguments.run_id,
        params=parameters,
        optimizer=functools.partial(torch.optim.AdamW, lr=arguments.learning_rate, betas=(0.9, 0.95)),
        target_batch_size=arguments.target_batch_size,
        batch_size_per_step=arguments.runners * arguments.batch_size,
        use_local_updates=not by_gradients,
        reuse_grad_buffers=accumulates(arguments),
        grad_averager_factory=gradients if by_gradients else None,
        averager_opts={"request_timeout": request_timeout},
        delay_grad_averaging=arguments.overlap and by_gradients,
        delay_optimizer_step=arguments.overlap,
        delay_state_averaging=arguments.overlap,  # Without it parameters are equal after each epoch.
        load_state_timeout=30,
        matchmaking_time=arguments.matchmaking_time,
        # hivemind's default is matchmaking_time: a peer that begins a round so much later is silently left out of it.
        # Below averaging_timeout, so that the other peers still have a result when a peer dies in a round.
        next_chunk_timeout=0.5 * arguments.averaging_timeout,
        averaging_timeout=arguments.averaging_timeout,
        # By default peers fetch each other's progress every few seconds. An epoch here is shorter.
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.2, "max_refresh_period": 0.5},
    )


def digest(model: torch.nn.Module) -> str:
    content = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(content).hexdigest()[:12]


def train(arguments: argparse.Namespace, manager: accelmgr.Manager, optimizer: Any, track: Track) -> None:
    """Trains until the last epoch and prints a line for each epoch."""
    model = manager.model
    assert model is not None
    accumulate = accumulates(arguments)
    end = time.monotonic() + arguments.seconds
    slowest_step = slowest_update = 0.0
    epoch = -1
    while optimizer.local_epoch < track.last_epoch(arguments.epochs) and time.monotonic() < end:
        if track.another_has_finished():
            break  # That peer does not average any more.
        begin = time.monotonic()
        result = manager.step(accumulate=accumulate)
        result.raise_for_status()
        stepped = time.monotonic()
        optimizer.step()
        slowest_update = max(slowest_update, time.monotonic() - stepped)
        slowest_step = max(slowest_step, stepped - begin)
        if optimizer.local_epoch == epoch:
            continue
        epoch = optimizer.local_epoch
        say(
            event="epoch",
            peer=arguments.peer,
            epoch=epoch,
            loss=round(result.loss, 4),
            parameters=digest(model),
            peers=optimizer.tracker.global_progress.num_peers,
            slowest_step_s=round(slowest_step, 2),
            slowest_update_s=round(slowest_update, 2),
        )
        slowest_step = slowest_update = 0.0
        if epoch < optimizer.tracker.global_epoch:
            optimizer.load_state_from_peers()  # Otherwise hivemind lets a peer stay one epoch behind.
    optimizer.state_averager.step(wait_for_delayed_updates=True)
    if not track.is_first_to_finish():
        optimizer.load_state_from_peers()


def main() -> None:
    arguments = parse()
    if multiprocessing.get_start_method() != "fork":
        multiprocessing.set_start_method("fork", force=True)  # hivemind needs it; not the default since Python 3.14.
    try:
        import hivemind
    except ImportError:
        sys.exit("hivemind is missing: pip install 'accelmgr[hivemind]'")
    torch.set_num_threads(1)  # Leaves the cores to the runners.
    torch.manual_seed(0)  # All peers begin with the same parameters.
    model = Gpt(arguments.layers, arguments.width, heads=4, context=arguments.context)
    track = Track(arguments.track, arguments.peer)
    dht = hivemind.DHT(
        host_maddrs=[ADDRESS], initial_peers=arguments.initial_peers, start=True, use_relay=False, use_auto_relay=False
    )
    try:
        say(event="address", peer=arguments.peer, addresses=[str(address) for address in dht.get_visible_maddrs()])
        with make_manager(arguments, model) as manager:
            optimizer = make_optimizer(arguments, dht, list(model.parameters()))
            try:
                say(event="ready", peer=arguments.peer)
                track.wait_for_start(arguments.seconds)
                train(arguments, manager, optimizer, track)
                say(
                    event="end",
                    peer=arguments.peer,
                    epoch=optimizer.local_epoch,
                    held_out_loss=round(held_out_loss(model, arguments.context), 4),
                    parameters=digest(model),
                )
                track.wait_for_others(60)
            finally:
                optimizer.shutdown()
    finally:
        dht.shutdown()


if __name__ == "__main__":
    main()
