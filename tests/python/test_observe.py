"""Processes of Python observe a service, which `accelmgr serve` runs."""

from __future__ import annotations

import pathlib
import signal

import pytest
from harm import Alarm
from services import Service

import accelmgr


def test_an_observer_sees_the_steps_of_one_host_after_the_other_and_the_end_of_the_service(service: Service) -> None:
    with accelmgr.observe(service.socket) as observer:
        assert observer.last_step() is None
        assert observer.next_step(timeout=0) is None
        for step in (1, 2):
            with accelmgr.attach(service.socket) as manager:
                names = [name for name, _ in manager.named_parameters()]
                with pytest.raises(accelmgr.SessionError, match="between its steps"):
                    observer.parameters(timeout=0.05)
                result = manager.step()
            seen = observer.next_step(timeout=120)
            assert seen is not None and seen.status == "ok" and seen.counted
            assert (seen.step, seen.loss, seen.samples) == (step, result.loss, 8)
        last = observer.last_step()
        assert last is not None and last.step == 2
        copy = observer.parameters(timeout=120)
        assert (copy.step, list(copy.tensors)) == (2, names)
        statistics = observer.statistics()
        assert (statistics.steps, statistics.samples, len(statistics.runners)) == (2, 16, 2)
        assert statistics.manager_pid == service.process.pid
        assert not observer.has_ended
        assert service.stop() == 0
        assert observer.has_ended
        for call in (observer.next_step, observer.parameters):
            with pytest.raises(accelmgr.SessionError, match="the service has ended"):
                call()
    with pytest.raises(accelmgr.UsageError, match="closed"):
        observer.statistics()


def test_no_service_is_said(tmp_path: pathlib.Path) -> None:
    with pytest.raises(accelmgr.SessionError, match="no service can be reached at"):
        accelmgr.observe(tmp_path / "nothing")


def test_a_wait_ends_when_a_signal_handler_raises(service: Service, alarms: None) -> None:
    with accelmgr.observe(service.socket) as observer, pytest.raises(Alarm):
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        observer.next_step()
