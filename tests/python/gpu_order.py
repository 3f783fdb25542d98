"""A plugin of pytest for a machine with a GPU, where most tests take 20 s: each starts processes that open a context of
CUDA. `pytest -p gpu_order` begins with the tests that show the most in that time.

    --few              runs no others
    --limit SECONDS    begins no test after that; pytest then exits with 2
"""

from __future__ import annotations

import math
import time

import pytest

# Each of these differs from the others in what it asks of a device. The rest varies one of them, or asks for an error.
FIRST = (
    # Parameters to the device, micro-batches, gradients of several ranks from it.
    "test_cuda_numbers.py::test_runners_train_as_one_process_on_the_cpu_does[three_of_three_micro_batches]",
    # Gradients that are sparse, transposed, or of several backward passes.
    "test_cuda_numbers.py::test_gradients_of_any_form_and_batches_of_any_structure[3]",
    # The three graphs of a step: first, last and further micro-batches.
    "test_cuda_graphs.py::test_micro_batches_are_recorded_once_and_computed_as_before[and_between]",
    "test_cuda_graphs.py::test_buffers_and_what_the_host_does_to_them",
    "test_cuda_graphs.py::test_modes_and_frozen_parameters_are_recorded_anew",
    "test_cuda_graphs.py::test_in_lower_precision_with_a_loss_scale_that_grows[fp16]",
    # A recording that the driver ends.
    "test_cuda_graphs.py::test_a_recording_that_is_invalidated_leaves_a_generator_to_draw_from",
    # A runner that dies, with random numbers, between graphs.
    "test_cuda_graphs.py::test_a_step_that_is_disturbed_is_replayed_bit_for_bit[{5: 'die'}]",
    # Models that nobody here wrote.
    "test_cuda_models.py::test_ten_architectures_of_transformers",
)
BEGIN = time.monotonic()
NOT_RUN = "not run: the limit is over"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--few", action="store_true", help="run the tests of gpu_order.FIRST, and no others")
    parser.addoption("--limit", type=float, default=math.inf, metavar="SECONDS", help="begin no test after that")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(FIRST)}
    names = {item: f"{item.path.name}::{item.name}" for item in items}
    if gone := place.keys() - names.values():
        raise pytest.UsageError(f"gpu_order.FIRST names tests that are not there: {', '.join(sorted(gone))}")
    items.sort(key=lambda item: place.get(names[item], len(FIRST)))
    if config.getoption("few"):
        config.hook.pytest_deselected(items=items[len(FIRST) :])
        del items[len(FIRST) :]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() - BEGIN > item.config.getoption("limit"):
        # It counts as NOT RUN below, and fails the run. With session.shouldstop instead, fixtures of modules would end
        # that have not begun.
        pytest.skip(NOT_RUN)


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    return (NOT_RUN, "-", "NOT RUN") if report.skipped and NOT_RUN in str(report.longrepr) else None


def pytest_sessionfinish(session: pytest.Session) -> None:
    if NOT_RUN in session.config.pluginmanager.get_plugin("terminalreporter").stats:
        session.exitstatus = pytest.ExitCode.INTERRUPTED
