"""Short runs of update_torture.py; test_update_torture_long.py has long ones."""

from __future__ import annotations

import pytest
import update_torture

pytestmark = pytest.mark.usefixtures("one_thread", "alarms")


@pytest.mark.parametrize("seed, is_service", [(101, False), (26, False), (126, True)])
def test_no_update_is_lost_doubled_or_torn(seed, is_service):
    assert update_torture.check(seed, is_service=is_service).lost > 0
