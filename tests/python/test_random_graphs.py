"""Checks random autograd graphs. Their parameters have few sizes, so that gradients of one size meet in one node."""

from __future__ import annotations

import pytest
import torch
from differential import Plain, Shape, assert_gradients, gradients_of, started
from launching import START_METHOD
from random_graphs import OPERATIONS, ROWS, Interpreter, Programs, program_of

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

GRAPHS = 80  # Number of steps; in each step every runner has a graph.
RUNNERS = 2

rows = st.tuples(st.integers(0, OPERATIONS - 1), st.integers(0, ROWS + 3), st.integers(0, ROWS + 3))
programs = st.lists(rows, min_size=1, max_size=ROWS).map(program_of)


class Side:
    """Steps a manager and plain autograd and compares them."""

    def __init__(self, manager, dataset, plain):
        self.manager, self.dataset, self.plain = manager, dataset, plain

    def step(self, elements: list[torch.Tensor], accumulate: bool) -> None:
        for element in elements:
            self.dataset.put(element)
        result = self.manager.step(accumulate=accumulate)
        result.raise_for_status()
        loss = self.plain.step(elements, accumulate)
        graphs = [[row for row in element.tolist() if row[0] >= 0] for element in elements]
        assert_gradients(gradients_of(self.manager), self.plain.gradients, exact=True, where=f"graphs {graphs}")
        assert result.loss == pytest.approx(loss, rel=1e-6)


@pytest.fixture(scope="module")
def side():
    model, shape, dataset = Interpreter(), Shape(runners=RUNNERS), Programs()
    plain = Plain([Interpreter() for _ in range(RUNNERS)], shape)
    first = [program_of([(operation, 0, 1)]) for operation in range(RUNNERS)]
    dataset.put(first[0])  # The manager reads an element at its start, to learn shapes and dtypes.
    # hypothesis changes what forks could find, and other processes would be left of a test.
    with started(model, iter(dataset), shape, START_METHOD, prefetch=1, refresh="never") as manager:
        side = Side(manager, dataset, plain)
        dataset.put(first[1])
        manager.step(accumulate=False).raise_for_status()
        plain.step(first, accumulate=False)
        yield side
        dataset.end()


def test_each_operation_of_two_parameters(side):
    for operation in range(OPERATIONS):
        side.step([program_of([(operation, 0, 3)]), program_of([(operation, 2, 2)])], accumulate=False)


@settings(
    max_examples=GRAPHS,
    deadline=None,
    derandomize=True,
    database=None,
    # All examples use the same manager, those with which hypothesis shrinks a failing one too.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    phases=[Phase.generate, Phase.shrink],
)
@given(graphs=st.lists(programs, min_size=RUNNERS, max_size=RUNNERS), accumulate=st.booleans())
def test_random_graphs(side, graphs, accumulate):
    side.step(graphs, accumulate)


def test_each_operation_has_finite_gradients_of_two_parameters():
    """Without that the tests above would prove little."""
    for operation in range(OPERATIONS):
        model = Interpreter()
        model(program_of([(operation, 0, 2)])[None]).backward()  # The last square always has a gradient.
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert sum(bool(gradient.any()) for gradient in gradients) >= 3, operation
        assert all(bool(gradient.isfinite().all()) for gradient in gradients), operation
