"""Checks that Ctrl-C ends every wait. As on a terminal, all processes of the process group get the signal."""

import contextlib
import os
import select
import signal
import socket
import time

import pytest
from gate import Gate
from programs import BOUND_S, free_port, read_until, run, started

AT_ONCE_S = 50  # Enough on a loaded machine; every deadline that would end these waits is 60 s or more.

PROGRAM = """\
import pathlib, sys, torch, accelmgr
from gate import Count, Gate, Told

class Waits(Count):
    def __iter__(self):
        Gate(folder / "source").pass_through()
        return super().__iter__()

folder = pathlib.Path(sys.argv[1])
model = Told(folder)
try:
    manager = accelmgr.Manager(model, Waits(), nprocs=2, runners__threads=1)
except KeyboardInterrupt:
    print("interrupted in start, nothing of", model.weight.tolist(), flush=True)
    sys.exit(3)
print("ready", flush=True)
sys.stdin.readline()
try:
    manager.step()
except KeyboardInterrupt as error:
    counted = error.step_result.counted
    gradient = manager.get_aggregated_gradients()[0]
    print("interrupted after", manager.statistics().steps, counted, gradient.tolist(), flush=True)
sys.stdin.readline()
print("then", manager.step(), flush=True)
manager.stop()
"""


IN_A_STEP = "interrupted after 0 False [0.0, 0.0]\n"


def proceed(process):
    process.stdin.write("\n")
    process.stdin.flush()


def interrupt(process, says):
    """The program says so at once."""
    begin = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    assert read_until(process, "\n") == says
    assert time.monotonic() - begin < AT_ONCE_S


def check_interruption(folder, name, program, *arguments, says, then):
    """Interrupts a program that waits at the gate of that name. It says so at once, and goes on after that."""
    gate = Gate(folder / name)
    with started("-c", program, str(folder), *arguments, cwd=folder) as process:
        read_until(process, "ready\n")
        gate.shut()
        proceed(process)
        with gate.held():
            interrupt(process, says)
        proceed(process)
        assert read_until(process, "\n").startswith(then)
        assert process.wait(timeout=BOUND_S) == 0
        assert process.stderr.read() == ""


def test_in_a_step_nothing_is_added_and_the_next_one_works(tmp_path):
    check_interruption(tmp_path, "gate", PROGRAM, says=IN_A_STEP, then="then StepResult(ok, step 1, ")


def test_in_start_nothing_is_left(tmp_path):
    gate = Gate(tmp_path / "source")
    gate.shut()
    with started("-c", PROGRAM, str(tmp_path), cwd=tmp_path) as process:
        with gate.held():
            interrupt(process, "interrupted in start, nothing of [1.0, 2.0]\n")
        assert process.wait(timeout=BOUND_S) == 3
        assert process.stderr.read() == ""


def test_a_second_one_that_nobody_catches_ends_the_program(tmp_path):
    gate = Gate(tmp_path / "gate")
    with started("-c", PROGRAM, str(tmp_path), cwd=tmp_path) as process:
        read_until(process, "ready\n")
        gate.shut()
        proceed(process)
        with gate.held():
            interrupt(process, IN_A_STEP)
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(timeout=BOUND_S) == -signal.SIGINT
        assert process.stderr.read().splitlines()[-1] == "KeyboardInterrupt"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["KILL", "TERM"])
def test_a_host_that_is_killed_takes_all_with_it(tmp_path, number):
    with started("-c", PROGRAM, str(tmp_path), cwd=tmp_path) as process:
        read_until(process, "ready\n")
        process.send_signal(number)
        assert process.wait(timeout=BOUND_S) == -number  # The fixture that looks for leaks waits for the others.


TEAM = """\
import pathlib, sys, torch, accelmgr
from gate import Count, Gate, Told
from launching import kill

class Waits:
    def __init__(self):
        self.state = "without one there is no __setstate__"
    def __call__(self, elements):
        return torch.stack(elements)
    def __setstate__(self, state):
        Gate(folder / "started").pass_through()

folder, what = pathlib.Path(sys.argv[1]), sys.argv[2]
runners = {"threads": 1, "max_runners": 2}
method = {"start_method": "forkserver"}  # Which unpickles the collate_fn.
manager = accelmgr.Manager(Told(folder), Count(), collate_fn=Waits(), nprocs=1, runners=runners, **method)
assert manager.step().ok
if what == "recover":
    kill(manager.statistics().manager_pid)
    assert manager.step().status == "manager_lost"
print("ready", flush=True)
sys.stdin.readline()
call = manager.recover if what == "recover" else lambda: manager.resize(2)
try:
    call()
except KeyboardInterrupt:
    print("interrupted", flush=True)
sys.stdin.readline()
call()
print("then", manager.step().participants, flush=True)
manager.stop()
"""


@pytest.mark.parametrize("what", ["resize", "recover"])
def test_while_the_team_changes_it_can_be_asked_for_again(tmp_path, what):
    then = "then 2\n" if what == "resize" else "then 1\n"
    check_interruption(tmp_path, "started", TEAM, what, says="interrupted\n", then=then)


WRITES = """\
import os, pathlib, signal, sys, torch, accelmgr
from gate import Count, Told

folder, what = pathlib.Path(sys.argv[1]), sys.argv[2]
options = {"directory": str(folder / "checkpoints")}
manager = accelmgr.Manager(Told(folder), Count(), nprocs=1, runners__threads=1, checkpoint=options)
assert manager.step().ok
pid = manager.statistics().manager_pid
os.kill(pid, signal.SIGSTOP)
manager.save_checkpoint()
try:
    print("ready", flush=True)
    manager.checkpoints_written(60) if what == "written" else manager.save_checkpoint()
except KeyboardInterrupt:
    print("interrupted", flush=True)
sys.stdin.readline()
os.kill(pid, signal.SIGCONT)
print("then", *(one.error or one.step for one in manager.checkpoints_written(60)), flush=True)
manager.stop()
"""


@pytest.mark.parametrize("what", ["written", "save"])
def test_while_a_checkpoint_is_written_it_is_not_lost(tmp_path, what):
    with started("-c", WRITES, str(tmp_path), what, cwd=tmp_path) as process:
        read_until(process, "ready\n")
        interrupt(process, "interrupted\n")
        proceed(process)
        assert read_until(process, "\n") == "then 1\n"
        assert process.wait(timeout=BOUND_S) == 0


def expect_interrupted(process):
    interrupt(process, "interrupted\n")
    assert process.wait(timeout=BOUND_S) == 0


WAITS = """\
import os, select, sys, accelmgr.distributed as dist
from accelmgr.compat import ml_mp

call, *arguments = sys.argv[1:]
world = {"rank": 0, "local_rank": 0, "world_size": 2, "local_world_size": 2, "master_addr": "127.0.0.1",
         "init_method": "env://", "backend": "gloo"}
if "MASTER_PORT" in os.environ:
    world["master_port"] = int(os.environ["MASTER_PORT"])

def stand():
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0.02)[0]: pass  # read() would miss a signal that comes just before it.

def join(rank, method):
    dist.initialize("gloo", init_method=method, rank=int(rank), world_size=2)
    print("ready", flush=True)
    if rank == "1":
        sys.stdin.readline()

def nobody():
    print("ready", flush=True)
    dist.initialize("gloo", init_method="tcp://127.0.0.1:9", rank=1, world_size=2)  # Port 9: nobody listens.

calls = {
    "initialize": lambda: dist.initialize("gloo"),
    "init_process_group_from_backend": lambda: ml_mp.init_process_group_from_backend("gloo"),
    "init_dist": lambda: ml_mp.init_dist(**world),
    "init_and_run": lambda: ml_mp.init_and_run(print, ml_mp.MultiprocessConfig(**world)),
    "nobody": nobody,
    "stand": lambda: ml_mp.init_and_run(stand, ml_mp.MultiprocessConfig(rank=0, local_rank=0, world_size=1)),
    "new_group": lambda *arguments: join(*arguments) or dist.new_group([0, 1]),
    "init_parallelism": lambda *arguments: join(*arguments) or ml_mp.init_parallelism(2),
}
try:
    calls[call](*arguments)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def wait_until_served(port, process):
    deadline = time.monotonic() + BOUND_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        assert not select.select([process.stdout], [], [], 0.02)[0], "it has ended"  # Waits 20 ms for it.
    raise TimeoutError(f"nobody listens at port {port}")


@pytest.mark.parametrize("call", ["initialize", "init_process_group_from_backend", "init_dist", "init_and_run"])
def test_where_nobody_else_comes_to_the_rendezvous(tmp_path, monkeypatch, call):
    port = free_port()
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    with started("-c", WAITS, call, cwd=tmp_path) as process:
        wait_until_served(port, process)
        expect_interrupted(process)


@pytest.mark.parametrize("call", ["nobody", "stand"], ids=["nobody_serves_the_rendezvous", "after_the_rendezvous"])
def test_where_it_waits_alone(tmp_path, call):
    with started("-c", WAITS, call, cwd=tmp_path) as process:
        read_until(process, "ready\n")
        expect_interrupted(process)


@pytest.mark.parametrize("call", ["new_group", "init_parallelism"])
def test_where_another_rank_does_not_come_to_a_new_group(tmp_path, call):
    method = f"file://{tmp_path}/meet"
    with (
        started("-c", WAITS, call, "1", method, cwd=tmp_path) as other,
        started("-c", WAITS, call, "0", method, cwd=tmp_path) as process,
    ):
        read_until(other, "ready\n")
        read_until(process, "ready\n")
        expect_interrupted(process)


SERIAL = """\
import os, signal, sys
from accelmgr import _native
executor = _native.SerialExecutor("x", 60.0)
inside, done = os.pipe(), os.pipe()
if os.fork() == 0:
    def hold():
        os.write(inside[1], b"1")
        os.read(done[0], 1)
    executor.run(hold)
    os._exit(0)
os.read(inside[0], 1)
try:
    print("ready", flush=True)
    executor.run(lambda: print("never"))
except KeyboardInterrupt:
    print("interrupted", flush=True)
os.write(done[1], b"1")
os.wait()
executor.run(lambda: print("free", flush=True))
"""


def test_outside_of_a_serial_executor(tmp_path):
    with started("-c", SERIAL, cwd=tmp_path) as process:
        read_until(process, "ready\n")
        begin = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        assert read_until(process, "free\n") == "interrupted\nfree\n"
        assert time.monotonic() - begin < AT_ONCE_S
        assert process.wait(timeout=BOUND_S) == 0


LATE = """\
import os, signal
import accelmgr.distributed as dist

come, passed = os.pipe(), os.pipe()

class Late(Exception): ...

def let_the_other_come(*ignored):
    os.write(come[1], b"1")
    os.read(passed[0], 1)
    raise Late

def barriers(rank):
    if rank == 1:
        dist.barrier()
        os.read(come[0], 1)
        dist.barrier()
        os.write(passed[1], b"1")
    else:
        signal.signal(signal.SIGALRM, let_the_other_come)
        dist.barrier()
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)  # By then this rank waits in the barrier.
            dist.barrier()
        except Late as error:
            print("late", repr(error), flush=True)
    dist.barrier()

dist.spawn("shm", barriers, (), nproc_per_node=2, start_method="fork")
"""


@pytest.mark.timing
def test_a_call_that_succeeds_while_a_handler_raises_raises_what_the_handler_does(tmp_path):
    with started("-c", LATE, cwd=tmp_path) as process:
        assert process.communicate(timeout=BOUND_S)[0] == "late Late()\n"
        assert process.returncode == 0


PICKLED = """
import os, signal, torch, accelmgr

class Late(Exception): ...

def handle(number, frame):
    raise Late

class Elements(list):
    def __reduce__(self):
        if not asked:
            asked.append(self)
            os.kill(os.getpid(), signal.SIGUSR1)
        return Elements, (list(self),)

class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).sum()

asked = []
signal.signal(signal.SIGUSR1, handle)
elements = Elements((torch.ones(2),) for _ in range(4))
try:
    accelmgr.Manager(Net(2, 1), elements, nprocs=1, batch_size_per_device=1, start_method="forkserver")
except Late:
    print("raised", len(asked), flush=True)
"""


def test_while_a_dataset_is_pickled_what_a_handler_raises_is_no_error_of_the_dataset(tmp_path):
    assert run("-c", PICKLED, cwd=tmp_path) == (0, "raised 1\n", "")
