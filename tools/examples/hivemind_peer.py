"""A peer of a hivemind swarm: accelmgr computes the gradients, hivemind.Optimizer averages them and steps.

    python tools/examples/hivemind_peer.py --run-id licences                            the first; prints its address
    python tools/examples/hivemind_peer.py --run-id licences --initial-peers ADDRESS    all others

`run_swarm.py` beside this file starts several on one machine. Every line that is printed is a JSON object.

How the two fit together. `model.parameters()` are the session's memory: manager.step() adds a mean gradient to their
`.grad`, and what optimizer.step() writes into them is what runners compute with next.

- hivemind's default (`params=`, and a factory as `optimizer=`: offloaded): each optimizer.step() adds `.grad` to
  accumulators of its own. So `.grad` has one step only: manager.step(accumulate=False), or manager.step() with
  optimizer.zero_grad() or manager.zero_grad() after each optimizer.step(). The same with `delay_optimizer_step=True`
  and `delay_grad_averaging=True`. The optimizer has parameters of its own, which hivemind copies into the model's.
- `reuse_grad_buffers=True` (here, unless `--overlap`): `.grad` is hivemind's accumulator. manager.step() adds to it,
  hivemind divides it by the number of its own steps and zeroes it in place when an epoch is over. Never call
  zero_grad(), and never step(accumulate=False). Saves a copy of the gradients.
- `use_local_updates=True` (`--average parameters`): each optimizer.step() updates the parameters with `.grad`, and
  leaves it as it is: manager.step(accumulate=False), or zero_grad().
- A peer that joins downloads the state of another: hivemind sends the parameters through a pipe of multiprocessing.
  They are sent as copies, one of the parameters for the moment, and stay in the session.
- Never `reuse_tensors=True` in averager_opts: hivemind would move the parameters into memory of its own. manager.step()
  finds that and raises ModelError. What hivemind keeps by default costs, beyond the session, one copy of the
  parameters, one of the gradients, and the optimizer's state.
- The thread that calls optimizer.step() is the one that writes parameters, so that a runner, which computes only within
  manager.step(), never reads half of an update. With `delay_optimizer_step=True` too.
- manager.step() waits for no other peer. optimizer.step() may: for matchmaking_time, and for an averaging_timeout each
  for gradients and for parameters where a peer has died. So averaging_timeout is short. With `--overlap` averaging goes
  on in the background, and its update comes one epoch late; `.grad` is not reused then.
- hivemind forks its averagers from this process and needs multiprocessing's start method `fork`; accelmgr leaves the
  default alone.
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
    """Start and finish of peers on one machine: files in a folder. Without a folder, nobody waits for anybody."""

    def __init__(self, folder: pathlib.Path | None, peer: int) -> None:
        self._folder, self._peer = folder, peer  # The file "finished" has the number of the first peer to finish.

    def wait_for_start(self, seconds: float) -> None:
        """A peer that is alone would train alone; a late one finds the file and starts at once."""
        if self._folder:
            self._wait("start", seconds)

    def last_epoch(self, otherwise: int) -> int:
        """After which all end; run_swarm.py decides."""
        file = self._folder / "last_epoch" if self._folder else None
        return int(file.read_text()) if file and file.exists() else otherwise

    def another_has_finished(self) -> bool:
        return self._folder is not None and (self._folder / "finished").exists()

    def is_first_to_finish(self) -> bool:
        """Whose parameters are the result. The first who asks; also a peer without a folder."""
        try:
            return self._folder is None or bool((self._folder / "finished").open("x").write(str(self._peer)))
        except FileExistsError:
            return False

    def wait_for_others(self, seconds: float) -> None:
        """Serves its parameters until all have finished."""
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
        "seed": 1000 + arguments.peer,  # Each peer reads the texts in an order of its own.
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
    """Whether `.grad` is hivemind's accumulator: not where a gradient is still averaged in the next epoch."""
    return arguments.average == "gradients" and not arguments.overlap


def make_optimizer(arguments: argparse.Namespace, dht: Any, parameters: list[torch.nn.Parameter]) -> Any:
    import hivemind

    # Below matchmaking_time. averager_opts reaches the averager of parameters only, so that of gradients has a factory.
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
        delay_state_averaging=arguments.overlap,  # Otherwise parameters are equal after each epoch.
        load_state_timeout=30,
        matchmaking_time=arguments.matchmaking_time,
        # hivemind's default is matchmaking_time: a peer that begins a round so much later than another is left out of
        # it without a word. Below averaging_timeout: when a peer dies in a round, the others still have a result.
        next_chunk_timeout=0.5 * arguments.averaging_timeout,
        averaging_timeout=arguments.averaging_timeout,
        # Otherwise peers look at each other's progress every few seconds, which is more than an epoch takes here.
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.2, "max_refresh_period": 0.5},
    )


def digest(model: torch.nn.Module) -> str:
    content = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(content).hexdigest()[:12]


def train(arguments: argparse.Namespace, manager: accelmgr.Manager, optimizer: Any, track: Track) -> None:
    """Until the last epoch; one line for each."""
    model = manager.model
    assert model is not None
    accumulate = accumulates(arguments)
    end = time.monotonic() + arguments.seconds
    slowest_step = slowest_update = 0.0
    epoch = -1
    while optimizer.local_epoch < track.last_epoch(arguments.epochs) and time.monotonic() < end:
        if track.another_has_finished():
            break  # It averages with nobody any more.
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
            optimizer.load_state_from_peers()  # hivemind lets a peer be one epoch behind, for ever if need be.
    optimizer.state_averager.step(wait_for_delayed_updates=True)
    if not track.is_first_to_finish():
        optimizer.load_state_from_peers()


def main() -> None:
    arguments = parse()
    if multiprocessing.get_start_method() != "fork":
        multiprocessing.set_start_method("fork", force=True)  # As hivemind needs it; no default since Python 3.14.
    try:
        import hivemind
    except ImportError:
        sys.exit("hivemind is missing: pip install 'accelmgr[hivemind]'")
    torch.set_num_threads(1)  # The cores are the runners'.
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
                manager.sync_buffers()  # For models that have some: the runners have changed them.
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
