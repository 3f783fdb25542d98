"""Long runs of update_torture.py, in which processes are killed in each phase of a step."""

from __future__ import annotations

import pytest
import update_torture

pytestmark = pytest.mark.usefixtures("one_thread", "alarms")


@pytest.mark.parametrize("seed, runners, is_service", [(1, 1, False), (4, 3, False), (5, 3, True)])
def test_two_thousand_steps_have_the_bits_of_an_undisturbed_run(seed, runners, is_service):
    assert update_torture.check(seed, 2000, runners, is_service).lost >= 100
