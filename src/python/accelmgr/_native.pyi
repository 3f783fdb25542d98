"""The extension module. accelmgr.Manager is what users see of Handle; the records are exported by accelmgr.

A call of a Handle that waits lets other threads run, and ends when a signal handler raises.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

def embed(command: Sequence[str]) -> None:
    """Names the command that runs this interpreter again, for the processes of managers. Once in a process."""

def take_role(arguments: Sequence[str]) -> None:
    """In such a process: becomes what the arguments say, and does not return."""

class RunnerStatistics:
    """A runner of the team."""

    @property
    def rank(self) -> int: ...
    @property
    def pid(self) -> int:
        """0 while it is being replaced."""

    @property
    def generation(self) -> int:
        """Processes of this rank so far."""

    @property
    def phase(self) -> str:
        """init, waiting, forward, backward, vote, reduce, ..."""

    @property
    def attempt(self) -> int:
        """The last it took part in."""

    @property
    def samples(self) -> int:
        """In all committed steps."""

    @property
    def peak_memory_bytes(self) -> int:
        """VmHWM."""

    @property
    def start_ms(self) -> float:
        """From the fork of its process until it was ready."""

    @property
    def model_ms(self) -> float:
        """Of that, building the model."""

class Statistics:
    """Counts of a session, over all its managers."""

    @property
    def steps(self) -> int:
        """Committed."""

    @property
    def attempts(self) -> int: ...
    @property
    def samples(self) -> int:
        """In all committed steps."""

    @property
    def elements(self) -> int:
        """Of the dataset, that were consumed: `samples`, and what was skipped."""

    @property
    def skips(self) -> int:
        """Attempts whose batches were left out (`on_nonfinite: skip_batch`)."""

    @property
    def replacements(self) -> int:
        """Runners that were started in the place of lost ones."""

    @property
    def losses(self) -> int:
        """Runners and launchers that were lost."""

    @property
    def parameter_version(self) -> int: ...
    @property
    def session_bytes(self) -> int:
        """Shared memory of the session."""

    @property
    def manager_pid(self) -> int: ...
    @property
    def manager_peak_memory_bytes(self) -> int:
        """VmHWM."""

    @property
    def runners(self) -> list[RunnerStatistics]:
        """The team, by rank."""

class FailureCause:
    """How a process was lost, as the supervisor found it."""

    @property
    def time_s(self) -> float:
        """Since 1970, UTC."""

    @property
    def rank(self) -> int:
        """-1: no runner, but the launcher or the manager."""

    @property
    def pid(self) -> int: ...
    @property
    def phase(self) -> str: ...
    @property
    def step(self) -> int:
        """The one under way, counted from 1."""

    @property
    def attempt(self) -> int:
        """The last it took part in."""

    @property
    def exit(self) -> str:
        """"killed by signal 9 (KILL)", "exit code 17"."""

    @property
    def what(self) -> str:
        """Its exception, or why it was ended; may be empty."""

    @property
    def log(self) -> list[str]:
        """Its last log lines."""

    def to_dict(self) -> dict[str, object]:
        """All of it as numbers, texts and lists, for json.dumps()."""

    def __getstate__(self) -> dict[str, object]: ...
    def __setstate__(self, state: dict[str, object], /) -> None: ...

class StepResult:
    """What one step did. True when it is `ok`; `loss, samples = result` raises the typed error of one that is not."""

    @property
    def status(self) -> Literal["ok", "data_end", "runner_lost", "nonfinite", "timeout", "manager_lost"]: ...
    @property
    def ok(self) -> bool: ...
    @property
    def counted(self) -> bool:
        """Whether the master's gradients contain this step. Either in full or not at all."""

    @property
    def step(self) -> int:
        """Committed steps of this session, this one included if it counted."""

    @property
    def attempt(self) -> int:
        """Never reused."""

    @property
    def loss(self) -> float:
        """Mean over micro-batches (or samples, by `loss_scaling`); 0 when not counted."""

    @property
    def samples(self) -> int:
        """Elements that took part; 0 when not counted."""

    @property
    def scalars(self) -> dict[str, float]:
        """Other numbers of the model, averaged like the loss; at most 16: a warning names those beyond, once."""

    @property
    def parameter_version(self) -> int:
        """The version all runners computed with."""

    @property
    def nonfinite(self) -> bool:
        """Something was not finite, and the policy is `keep`."""

    @property
    def step_ms(self) -> float:
        """From the call to its return."""

    @property
    def compute_ms(self) -> float:
        """Forward, backward and take-over of gradients; the slowest runner's."""

    @property
    def reduce_ms(self) -> float:
        """Reduction; the slowest runner's."""

    @property
    def wait_ms(self) -> float:
        """step_ms without the two: triggers, waiting for data and for each other."""

    @property
    def error(self) -> str:
        """Empty when ok. First cause first: rank, phase, signal or exit code, exception."""

    @property
    def error_type(self) -> str:
        """Type of the exception behind it (`ModelError`, `DataError`, ...); empty if none."""

    @property
    def rank(self) -> int:
        """The runner at fault, -1 if none."""

    @property
    def participants(self) -> int:
        """Runners that took part; 0 when not counted."""

    @property
    def tries(self) -> int:
        """Attempts that were opened for this step: 1 if nothing went wrong."""

    @property
    def skipped(self) -> int:
        """Of them, those whose batches were left out (`on_nonfinite: skip_batch`)."""

    @property
    def causes(self) -> list[FailureCause]:
        """Losses behind a runner_lost or manager_lost, first cause first, at most 3."""

    def to_dict(self) -> dict[str, object]:
        """All of it as numbers, texts, lists and dictionaries, for json.dumps()."""

    def __getstate__(self) -> dict[str, object]: ...
    def __setstate__(self, state: dict[str, object], /) -> None: ...
    def __bool__(self) -> bool: ...
    def raise_for_status(self) -> None:
        """Raises the StepError of a result that is not `ok`."""

    def __iter__(self) -> Iterator[float]:
        """loss, samples (an int); raises the StepError of a result that is not `ok`."""
    def __getitem__(self, _: int, /) -> float: ...
    def __len__(self) -> int: ...

class CheckpointWritten:
    """What became of a checkpoint."""

    @property
    def step(self) -> int: ...
    @property
    def path(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def copy_ms(self) -> float:
        """How long the host was held up."""

    @property
    def write_ms(self) -> float:
        """How long the manager took meanwhile."""

    @property
    def error(self) -> str:
        """Empty when it has reached the disk."""

    @property
    def warnings(self) -> list[str]: ...

class Resumed:
    """The checkpoint that a manager went on from."""

    @property
    def path(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """As save_checkpoint() was given them; copies."""

    @property
    def json(self) -> str: ...
    @property
    def refused(self) -> list[str]:
        """Later ones, and why they were not taken."""

    @property
    def run_id(self) -> str:
        """Of the run that wrote it; empty: an earlier version did."""

    @property
    def configuration(self) -> str:
        """As YAML, of the run that wrote it; empty: not known."""

class Writing:
    """Brackets writes in place: no runner computes with half of them. They are over when it is gone."""

class Handle:
    """The handle of C++, with the parameters of a module bound to the session. One thread at a time; not in a fork.

    Sources of the configuration, weakest first: `file` ("": none), `environment` (ACCELMGR_...), `settings`: key=value,
    and how errors name it.
    """

    def __init__(self, file: str, settings: Sequence[tuple[str, str]], environment: Mapping[str, str]) -> None: ...
    def start(self, start_method: str, prepared: Callable[[], object]) -> None:
        """`prepared` is called when there are parameters() and gradients(), and no runner yet."""

    @property
    def started(self) -> bool: ...
    def bind(self, tensors: Sequence[torch.Tensor], /) -> None:
        """From now on these are the master's parameters, in the order of parameters()."""

    def look_after_bound(self) -> None:
        """Puts gradients back that are None, as zeros, and takes that of a frozen parameter away. Raises ModelError."""

    def step(
        self, timeout: float | None = None, accumulate: bool = True, parameters_changed: bool = True
    ) -> StepResult:
        """What a signal handler raises has the result as `step_result`."""

    def zero_grad(self) -> None: ...
    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Views, each parameter once."""

    def gradients(self) -> list[tuple[str, torch.Tensor]]:
        """Views, in the order of parameters()."""

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Copies."""

    def state_dict(self) -> list[tuple[str, torch.Tensor]]:
        """Copies; tied weights under each of their names."""

    def update_model_parameters(self, values: Sequence[torch.Tensor], /) -> None:
        """In the order of parameters(); raises ModelError before anything is written."""

    def update_buffers(self, values: Sequence[tuple[str, torch.Tensor]], /) -> None: ...
    def writing(self) -> Writing: ...
    def resize(self, runners: int, /) -> None: ...
    def recover(self) -> None: ...
    def save_checkpoint(
        self, metric: float | None, tensors: Sequence[tuple[str, torch.Tensor]], json: str, /
    ) -> float:
        """Returns ms that it held up the caller."""

    def checkpoints_written(self, wait_s: float, /) -> list[CheckpointWritten]: ...
    @property
    def resumed(self) -> Resumed | None: ...
    @property
    def run_id(self) -> str: ...
    def statistics(self) -> Statistics:
        """From any thread."""

    def stop(self) -> None: ...
    def kill(self) -> None:
        """Kills runners, launcher and manager at once."""

    @property
    def step_timeout(self) -> float: ...
    @property
    def epochs(self) -> int | None:
        """`data.epochs`; None where nothing set it."""

    def unread(self, own_model: bool, own_data: bool) -> list[tuple[str, str, str]]:
        """Keys that were set and that nothing reads here: each with its source ("flag": `settings`), and why."""

    def config(self) -> str:
        """As YAML."""

    def show_config(self) -> str:
        """Each value, and where it comes from."""

def warnings(handle: Handle, cores: int, /) -> list[str]:
    """What is unlikely to be meant in its configuration, on a machine of so many cores."""

# accelmgr.distributed and the launchers

class Running:
    """Processes that spawn() started."""

    def join(self, timeout: float | None = None) -> bool:
        """True when all have ended, False after `timeout` seconds; SpawnError when one has failed."""

    def terminate(self) -> None:
        """Ends all that still run; bounded."""

    def keep(self) -> None:
        """They are waited for, or by `daemon` ended, when this object is gone."""

    def pids(self) -> list[int]: ...
    def results(self) -> list[bytes | None]:
        """What they returned, pickled; None of those that returned none."""

def environment() -> list[tuple[bytes, bytes]]: ...
def end_forkserver() -> None:
    """Ends the process that the start method forkserver forks from; the next launch starts another."""

def spawn(target: object, payload: bytes, options: Mapping[str, str], has_setup: bool = False) -> Running: ...
def spawn_distributed(
    target: object,
    payload: bytes,
    backend: str,
    nproc_per_node: int,
    nnodes: int,
    node_rank: int,
    master_addr: str,
    master_port: int,
    init_method: str,
    timeout: float,
    start_method: str,
    join: bool,
    daemon: bool,
) -> Running: ...

class SerialExecutor:
    """One process at a time, of those that name the same; the death of the one inside frees the next."""

    def __init__(self, name: str, timeout: float = 300.0) -> None: ...
    def run(self, function: Callable[[], Any]) -> Any: ...

class MultiprocessConfig:
    """The configuration of start_multiprocess(): what is not set, resolve() takes from the environment."""

    def __init__(self) -> None: ...
    @property
    def rank(self) -> int: ...
    @rank.setter
    def rank(self, arg: int, /) -> None: ...
    @property
    def local_rank(self) -> int: ...
    @local_rank.setter
    def local_rank(self, arg: int, /) -> None: ...
    @property
    def world_size(self) -> int | None: ...
    @world_size.setter
    def world_size(self, arg: int | None, /) -> None: ...
    @property
    def local_world_size(self) -> int | None: ...
    @local_world_size.setter
    def local_world_size(self, arg: int | None, /) -> None: ...
    @property
    def master_addr(self) -> str: ...
    @master_addr.setter
    def master_addr(self, arg: str, /) -> None: ...
    @property
    def master_port(self) -> int | None: ...
    @master_port.setter
    def master_port(self, arg: int | None, /) -> None: ...
    @property
    def init_method(self) -> str: ...
    @init_method.setter
    def init_method(self, arg: str, /) -> None: ...
    @property
    def model_parallelism(self) -> int: ...
    @model_parallelism.setter
    def model_parallelism(self, arg: int, /) -> None: ...
    @property
    def pipeline_parallelism(self) -> int: ...
    @pipeline_parallelism.setter
    def pipeline_parallelism(self, arg: int, /) -> None: ...
    def set_backends(self, all: str, model: str, pipeline: str, data: str) -> None:
        """Empty: that of the one before."""

    def set_launch_method(self, arg: str, /) -> None: ...
    def resolve(self) -> None: ...
    def text(self) -> str: ...

def start_multiprocess(
    target: object, payload: bytes, config: MultiprocessConfig, has_setup: bool, rank_offset: int
) -> Running: ...
def run_multiprocess(target: object, config: MultiprocessConfig) -> None: ...
def default_backend() -> str: ...
def get_distributed_backend() -> str: ...
def set_distributed_backend(backend: str) -> None: ...
def init_process_group_from_backend(backend: str | None = None, timeout: float | None = None) -> None: ...
def init_dist(
    rank: int,
    local_rank: int,
    world_size: int,
    local_world_size: int,
    master_addr: str,
    master_port: int,
    init_method: str,
    backend: str | None = None,
) -> None: ...
def dist_backend() -> str | None: ...
def dist_available_backends() -> list[str]: ...
def dist_model_name() -> str: ...
def dist_device() -> str: ...
def dist_rank() -> int: ...
def dist_local_rank() -> int: ...
def dist_world_size() -> int: ...
def dist_nproc_per_node() -> int: ...
def dist_nnodes() -> int: ...
def dist_node_rank() -> int: ...
def dist_hostname() -> str: ...
def dist_set_local_rank(index: int) -> None: ...
def dist_sync(temporary: bool) -> None: ...
def dist_initialize(
    backend: str, timeout: float | None, init_method: str, rank: int | None, world_size: int | None
) -> None: ...
def dist_finalize() -> None: ...

class Group:
    """Ranks of a process group."""

    @property
    def ranks(self) -> list[int]:
        """Ranks in the world, ascending."""

    @property
    def rank(self) -> int:
        """Of this process within; -1 outside."""

    @property
    def size(self) -> int: ...
    def contains(self, rank: int) -> bool: ...

def dist_new_group(ranks: Sequence[int], backend: str | None) -> Group: ...
def init_parallelism(
    model_parallelism: int,
    pipeline_parallelism: int,
    model_backend: str | None,
    pipeline_backend: str | None,
    data_backend: str | None,
) -> list[Group]: ...
def parallel_groups() -> list[Group]: ...
def dist_barrier() -> None: ...
def dist_all_reduce(tensor: torch.Tensor, op: str, group: Group | Sequence[int] | None) -> torch.Tensor: ...
def dist_all_gather(tensor: torch.Tensor, group: Group | Sequence[int] | None) -> torch.Tensor: ...
def dist_reduce_scatter(tensor: torch.Tensor, op: str, group: Group | Sequence[int] | None) -> torch.Tensor: ...
def dist_all_to_all(tensor: torch.Tensor, group: Group | Sequence[int] | None) -> torch.Tensor: ...
def dist_broadcast(tensor: torch.Tensor, src: int) -> torch.Tensor: ...
def dist_broadcast_bytes(data: bytes, src: int) -> bytes: ...
def dist_all_gather_text(text: str, group: Group | Sequence[int] | None) -> list[str]: ...
def dist_all_gather_bytes(data: bytes, group: Group | Sequence[int] | None) -> list[bytes]: ...
def dist_send_bytes(data: bytes, to: int) -> None: ...
def dist_receive_bytes(source: int) -> bytes: ...

