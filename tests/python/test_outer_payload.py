"""Changes as bytes, the state that a killed courier leaves, and what only holders of the secret can publish."""

from __future__ import annotations

import mmap
import os
import pathlib
import platform
import random
import socket
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accelmgr._memory.memfd import make_memfd
from accelmgr.outer import _state
from accelmgr.outer._channel import Channel
from accelmgr.outer._folder import Folder
from accelmgr.outer._payload import GROUP, KINDS, LEVELS, decode, encode, part_of
from accelmgr.outer._state import State
from accelmgr.outer._transport import Absent, Sealed
from accelmgr.outer.diloco import nesterov

SHAPES = [(3, 5), (7,), (), (0,), (300,)]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2000), st.sampled_from(KINDS), st.integers(0, 1 << 30), st.sampled_from([1e-30, 1.0, 1e30]))
def test_a_payload_is_as_close_as_its_bits(count: int, kind: str, seed: int, size: float) -> None:
    values = size * torch.randn(count, generator=torch.Generator().manual_seed(seed))
    back = decode(encode(values, kind), count, kind)
    for begin in range(0, count, GROUP):
        group, other = values[begin : begin + GROUP], back[begin : begin + GROUP]
        error = 0.0 if kind == "float32" else float(group.abs().max()) / LEVELS[kind] * 0.5001
        assert float((group - other).abs().max()) <= error


@given(st.integers(0, 5000), st.integers(1, 9), st.sampled_from(KINDS))
@settings(deadline=None, max_examples=60)
def test_parts_cover_all_numbers_and_encode_alike(count: int, parts: int, kind: str) -> None:
    values = torch.randn(count)
    places = [part_of(count, index, parts) for index in range(parts)]
    assert [place.start for place in places] == [0, *(place.stop for place in places[:-1])]
    assert places[-1].stop == count
    joined = [decode(encode(values[place], kind), place.stop - place.start, kind) for place in places]
    assert torch.equal(torch.cat(joined), decode(encode(values, kind), count, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_are_no_numbers_are_refused(kind: str) -> None:
    data = encode(torch.ones(300), kind)
    for bad in (b"", data[:-1], data + b"0"):
        with pytest.raises(ValueError, match="bytes for 300 numbers"):
            decode(bad, 300, kind)
    with pytest.raises(ValueError, match="not finite"):
        decode(b"\xff\xff\xff\x7f" + data[4:], 300, kind)


def test_what_the_other_end_has_said_last_is_heard() -> None:
    """Why a courier could not start was lost: it had not read all, which is an error before its last message."""
    host, courier = map(Channel, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    host.send(merged=None)
    courier.send(failed="no such address")
    courier.close()
    assert host.receive(may_wait=False) == {"failed": "no such address"}
    with pytest.raises(EOFError):
        host.receive(may_wait=True)
    host.close()


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = make_memfd("accelmgr-test-outer", 0)
    yield fd
    os.close(fd)


def state_over(fd: int) -> State:
    return State(fd, SHAPES, lambda: [torch.ones(shape) for shape in SHAPES], nesterov)


@pytest.mark.skipif(
    platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="without AVX2 torch rounds a product before it adds it",
)
@pytest.mark.parametrize(
    ("kind", "digest"),
    [
        ("float32", "d5030cf402641a7e2c837d75693dab01e0e6e3b16611e0e5829e10658d01baab"),
        ("int8", "e64db2b737d12b9093bc5ba2c1cebab9574f85d0d174a839511fbdb7586ced6e"),
        ("int4", "7e7592833b8a73b17e5e8cc66c0886b0b3721780932c51fc312b0f086fc02f1d"),
    ],
)
def test_rounds_have_the_same_bits_on_other_processors(kind: str, digest: str, memfd: int) -> None:
    """These digests came out on x86-64 with AVX2 and with AVX-512, and on aarch64, with torch 2.9 to 2.15."""
    generator = random.Random(0)
    state, blocks = state_over(memfd), (0, len(SHAPES))
    for _ in range(5):
        change = torch.tensor([generator.uniform(-1, 1) for _ in range(state.count(blocks))])
        state.step(blocks, decode(encode(change, kind), len(change), kind), lambda _: {})
    assert state.digest == digest


def copy_of(fd: int) -> int:
    copy = make_memfd("accelmgr-test-outer-copy", 0)
    os.pwrite(copy, os.pread(fd, os.fstat(fd).st_size, 0), 0)
    return copy


def test_a_step_that_is_cut_short_at_any_write_is_made_or_not(memfd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_over(memfd)
    state.keep({"round": 0})
    blocks = (0, len(SHAPES))
    means = [torch.full((state.count(blocks),), float(number + 1)) for number in range(3)]
    state.step(blocks, means[0], lambda _: {"round": 1})  # Momentum is there from now on.
    before = list(state.hashes)
    whole = copy_of(memfd)
    state_over(whole).step(blocks, means[1], lambda _: {"round": 2})
    after = state_over(whole).hashes
    assert before != after
    os.close(whole)
    seen = set()
    for writes in range(100):
        left = [writes]

        def cut_short(fd: int, data: bytes, place: int, left: list[int] = left) -> None:
            if left[0] == 0:
                os.pwrite(fd, data[: len(data) // 2], place)
                raise InterruptedError
            left[0] -= 1
            os.pwrite(fd, data, place)

        copy = copy_of(memfd)
        cut = state_over(copy)
        with monkeypatch.context() as patch:
            patch.setattr(_state, "_write_all", cut_short)
            try:
                cut.step(blocks, means[1], lambda _: {"round": 2})
                is_over = True
            except InterruptedError:
                is_over = False
        found = state_over(copy)
        os.close(copy)
        assert (found.record, found.hashes) in [({"round": 1}, before), ({"round": 2}, after)]
        seen.add(found.hashes == after)
        if is_over:
            break
    assert is_over and seen == {False, True}


def test_an_optimizer_that_keeps_too_much_is_refused_by_name(memfd: int) -> None:
    state = state_over(memfd)
    with pytest.raises(ValueError, match="parameter 4 has .* three tensors"):
        state.take(
            {4: _state.save({"parameter": torch.ones(300), **{f"state.{n}": torch.ones(3000) for n in "abc"}})},
            lambda _: {},
        )


def test_a_value_of_another_key_or_peer_is_refused(tmp_path: pathlib.Path) -> None:
    one, other = (Sealed(Folder(tmp_path, "a/run", name), name, "run", "secret") for name in ("one", "other"))
    one.publish("record", b"value")
    assert one.address() == str(tmp_path)
    assert other.fetch("record", "one", time.monotonic()) == b"value"
    with pytest.raises(Absent):
        other.fetch("record", "one", time.monotonic(), known=b"value")
    for place in ("one/mean", "other/record"):
        (tmp_path / "a/run" / place).write_bytes((tmp_path / "a/run/one/record").read_bytes())
    for reader, key, peer in ((other, "mean", "one"), (one, "record", "other")):
        with pytest.raises(Absent, match="seal"):
            reader.fetch(key, peer, time.monotonic())


def test_what_one_call_reads_in_part_is_read_to_its_end(memfd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call reads 2 GiB."""
    state = state_over(memfd)
    mean = os.urandom(5000)
    state.keep_mean(mean)
    blocks = [state.block(index) for index in range(len(SHAPES))]
    read = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, length, place: read(fd, min(length, 1000), place))
    other = state_over(memfd)
    assert [other.block(index) for index in range(len(SHAPES))] == blocks
    assert other.hashes == state.hashes
    assert other.mean() == mean


def test_a_value_of_more_than_two_gib_has_a_seal(tmp_path: pathlib.Path) -> None:
    sealed = Sealed(Folder(tmp_path, "run", "one"), "one", "run", "secret")
    with mmap.mmap(-1, (1 << 31) + 1, prot=mmap.PROT_READ) as zeros:  # It takes no memory.
        assert len(sealed._seal("one", "key", zeros)) == 32  # type: ignore[arg-type]
