"""Workers at hosts as the pool hears them: many by one pipe, with few descriptors. Needs no Ray."""

from __future__ import annotations

import os
import resource
import select
from contextlib import contextmanager

import numpy as np
import pytest
from support.probe import WAKE, ProcessEnd, RemoteWorker, WakePipe, base
from support.segments import KINDS, board

ENDED = ProcessEnd(3, "exited with code 3")


class Link:
    """Records the messages to workers."""

    node, ahead = "node 1", 0

    def __init__(self):
        self.sent = []

    def send(self, remote, message, descriptors):
        if remote.ended():
            raise EOFError
        self.sent.append((remote.worker, remote.incarnation, message))


@pytest.fixture
def pipe():
    pipe = WakePipe()
    yield pipe
    pipe.close()


@pytest.fixture
def link():
    return Link()


@pytest.fixture
def start(pipe, link):
    """Yields what makes a worker."""
    return lambda worker, incarnation=1: RemoteWorker(link, worker, incarnation, pipe)


def rung(pipe):
    """Says whether a poll of the pipe would return."""
    return bool(select.select([pipe], [], [], 0)[0])


def test_the_pipe_is_readable_while_somebody_is_not_heard(pipe, start):
    one, two = start(0), start(1)
    assert one.fileno() == two.fileno() == pipe.fileno()
    assert not rung(pipe)
    one.deliver("a")
    two.deliver("b")
    one.deliver("c")
    assert (one.receive(), one.receive()) == ("a", "c")
    assert (one.readable(), two.readable(), rung(pipe)) == (False, True, True)
    assert two.receive() == "b"
    assert not rung(pipe)


def test_an_end_is_heard_once_after_what_was_said(pipe, start):
    worker = start(0)
    worker.deliver("last words")
    worker.mark_ended(ENDED)
    worker.mark_ended(ProcessEnd(4, "again"))
    worker.deliver("from beyond")
    assert worker.receive() == "last words"
    with pytest.raises(EOFError):
        worker.receive()
    assert not rung(pipe)
    assert worker.ending() == (3, "on node 1 exited with code 3")
    with pytest.raises(EOFError):
        worker.send("hello")
    worker.shut()


def test_a_wake_is_not_said_twice(pipe, start):
    worker = start(0)
    for _ in range(100_000):  # more than fit into a pipe
        worker.deliver(WAKE)
    assert worker.receive() is WAKE
    assert not rung(pipe)


def test_who_takes_a_place_is_told_and_heard_in_it(pipe, link, start):
    old, new = start(0), start(0, 2)
    old.deliver("something that nobody hears")
    old.mark_ended(ENDED)
    channel = old.replace(new)
    assert not rung(pipe)
    new.deliver("hello")
    assert channel.receive() == "hello"
    channel.send("welcome")
    channel.shut()
    assert link.sent == [(0, 2, "welcome"), (0, 2, None)]


def test_a_message_whose_byte_was_lost_to_ctrl_c_blocks_nobody(pipe, start):
    one, two = start(0), start(1)
    one.deliver("a")
    pipe.take()  # and then the signal came
    two.deliver("b")
    assert (one.receive(), two.receive()) == ("a", "b")
    assert not rung(pipe)


@contextmanager
def descriptors_left(count):
    """Leaves room for so many more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(held.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in held:
            os.close(descriptor)


@pytest.mark.parametrize("kind", KINDS)
def test_more_workers_are_heard_than_there_may_be_descriptors(kind, start):
    """`poll` refuses to look at more than the limit."""
    with descriptors_left(0):
        num_workers = resource.getrlimit(resource.RLIMIT_NOFILE)[0] + 1
        marks, slices = board(num_workers, num_workers)
        workers = [*map(start, range(num_workers))]
        workers[-1].deliver("hello")
        end = base.parent_end(kind, marks, slices=slices, channels=workers, spin_ns=0)
        assert not end.wait(np.arange(num_workers), num_workers, 0)  # before it is content with its slots
        workers[-1].receive()
