# Runs in: runners.
"""The CUDA device of a runner: all that its replica asks of torch.cuda.

The process sees one GPU. The manager only asks whether torch was built for CUDA; the host asks nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from accelmgr import _native
from accelmgr._runner.device import KEY, check_autograd
from accelmgr._serialization.describe import describe
from accelmgr.errors import ConfigError


def check_build() -> None:
    """Raises ConfigError if torch has no CUDA. Asks no driver, so that this process may be forked."""
    if torch.version.cuda is None:
        raise ConfigError(
            f"{KEY} is cuda, but torch {torch.__version__} of {sys.executable} was built without CUDA; install one "
            "that was built for it, or use runners.device cpu",
            KEY,
        )


def check() -> None:
    """Raises ConfigError if this process cannot have a CUDA device. Makes no context."""
    about = f"{KEY} is cuda, but"
    check_build()
    if torch.cuda._is_in_bad_fork():
        raise ConfigError(
            f"{about} CUDA was used already in the process that this one was forked from; use start_method 'spawn' or "
            "'forkserver'",
            KEY,
        )
    if torch.cuda.is_available():
        return
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # It says what is missing.
        reason = "torch.cuda.is_available() is False"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    raise ConfigError(f"{about} this machine has no GPU that torch {torch.__version__} can use{seen}: {reason}", KEY)


def failure_of(error: BaseException | None, backend: str = "CUDA error") -> BaseException | None:
    """The error of a device that `error` is, or was raised from; None if the model is to blame. backend: with what
    texts of such errors begin, in upper or lower case."""
    while error is not None:
        if isinstance(error, RuntimeError):
            text = str(error)
            blame = _native.blame_of(text.encode(errors="replace"))
            # Torch has a class of its own for some errors of a device; the others are plain.
            named = type(error).__name__ in ("OutOfMemoryError", "AcceleratorError", "DeviceError")
            if named or blame != "none" or text.lower().startswith(backend.lower()):
                return None if blame == "model" else error
        error = error.__cause__
    return None


class Graph:
    """A CUDA graph."""

    def __init__(self, shared: Graph | None) -> None:
        """shared: a graph whose memory this one uses, too; only results are kept there. None: memory of its own."""
        self._graph = torch.cuda.CUDAGraph()
        self._pool: Any = torch.cuda.graph_pool_handle() if shared is None else shared._pool

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """What the block queues on the current stream becomes the graph, and is not executed."""
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self._end()
            raise
        self._end()

    def _end(self) -> None:
        try:
            self._graph.capture_end()
        except RuntimeError:  # Before 2.12 torch would allocate in the graph's memory from now on.
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            raise

    def replay(self) -> None:
        """Queues it on the current stream."""
        self._graph.replay()


class Cuda:
    """The GPU of this process, opened."""

    library = ""
    """The path of CUDA's runtime; empty for the one that torch uses."""
    nccl = ""
    """The path of NCCL; empty for the one that torch uses."""

    def __init__(self, rank: int) -> None:
        """Raises ConfigError if there is none."""
        check()
        self.device = torch.device("cuda", 0)
        try:
            torch.cuda.set_device(self.device)
            torch.zeros(1, device=self.device).cpu()
        except Exception as error:
            raise ConfigError(
                f"{KEY} is cuda, but runner {rank} cannot open its GPU "
                f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')}): {describe(error)}",
                KEY,
            ) from error
        check_autograd(rank, self.device, "cuda")
        self._compute = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # The default one cannot be recorded.
        self._batches = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @property
    def compute_stream(self) -> _native.DeviceStream:
        """The stream on which the replica computes."""
        return _native.DeviceStream(self._compute.cuda_stream)

    @property
    def batch_stream(self) -> _native.DeviceStream:
        """The stream on which batches come."""
        return _native.DeviceStream(self._batches.cuda_stream)

    def current_stream(self) -> _native.DeviceStream:
        return _native.DeviceStream(torch.cuda.current_stream().cuda_stream)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """In the block, torch computes on the compute stream."""
        with torch.cuda.stream(self._compute):
            yield

    def empty(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> torch.Tensor:
        """Memory for a parameter or a buffer, which any stream may write at once. strides: None for a row-major one."""
        if strides is None:
            tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        else:
            tensor = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device=self.device)
        torch.cuda.current_stream().synchronize()  # torch.utils.deterministic.fill_uninitialized_memory fills it there.
        return tensor

    def empty_for_batch(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory that the batch stream may write at once, whatever the compute stream does meanwhile."""
        with torch.cuda.stream(self._batches):
            tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        tensor.record_stream(self._compute)  # So that it is not used again before the compute stream has read it.
        return tensor

    def new_graph(self, shared: Graph | None) -> Graph:
        return Graph(shared)

    def seed(self, seed: int) -> None:
        torch.cuda.manual_seed(seed)

    def replace_generator(self, state: torch.Tensor) -> None:
        """For a generator that a failed recording has left as if it went on: torch refuses to draw from it ("Offset
        increment outside graph capture"), whatever its state is set to."""
        fresh = torch.Generator(self.device)
        fresh.set_state(state)
        torch.cuda.default_generators[self.device.index].graphsafe_set_state(fresh)

    def generator_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self.device)

    def set_generator_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, self.device)
