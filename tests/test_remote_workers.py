"""Workers in actors as the pool hears them: many by one pipe, with few descriptors. Needs no Ray."""

from __future__ import annotations

import os
import resource
import select
from contextlib import contextmanager

import numpy as np
import pytest
from test_handoff import KINDS, board

from jaxvec._backends import _handoffs
from jaxvec._backends._ray import _nodes, _wire
from jaxvec._backends._ray._remote_worker import RemoteChannel, RemoteWorker, WakePipe
from jaxvec._backends._ray._wire_format import ProcessEnd
from jaxvec._handoff._channel import WAKE

ENDED = ProcessEnd(3, "exited with code 3")


class Link:
    """Notes what workers are told."""

    node, ahead = "node 1", 0

    def __init__(self):
        self.told = []

    def tell(self, remote, message, descriptors):
        if remote.ended():
            raise EOFError
        self.told.append((remote.worker, remote.incarnation, message))


@pytest.fixture
def pipe():
    pipe = WakePipe()
    yield pipe
    pipe.close()


@pytest.fixture
def start(pipe):
    """Yields what makes a worker and the pool's channel to it."""
    link = Link()

    def start(worker, incarnation=1):
        remote = RemoteWorker(link, worker, incarnation, pipe)
        return remote, RemoteChannel(remote)

    return start


def rung(pipe):
    """Says whether a poll of the pipe would return."""
    return bool(select.select([pipe], [], [], 0)[0])


def test_the_pipe_is_readable_while_somebody_is_not_heard(pipe, start):
    (one, to_one), (two, to_two) = start(0), start(1)
    assert to_one.fileno() == to_two.fileno() == pipe.fileno()
    assert not rung(pipe)
    one.say("a")
    two.say("b")
    one.say("c")
    assert (to_one.receive(), to_one.receive()) == ("a", "c")
    assert (to_one.readable(), to_two.readable(), rung(pipe)) == (False, True, True)
    assert to_two.receive() == "b"
    assert not rung(pipe)


def test_an_end_is_heard_once_after_what_was_said(pipe, start):
    remote, channel = start(0)
    remote.say("last words")
    remote.mark_ended(ENDED)
    remote.mark_ended(ProcessEnd(4, "again"))
    remote.say("from beyond")
    assert channel.receive() == "last words"
    with pytest.raises(EOFError):
        channel.receive()
    assert not rung(pipe)
    assert remote.ending() == (3, "on node 1 exited with code 3")
    with pytest.raises(EOFError):
        channel.send("hello")
    channel.shut()


def test_a_wake_is_not_said_twice(pipe, start):
    remote, channel = start(0)
    for _ in range(100_000):  # more than fit into a pipe
        remote.say(WAKE)
    assert channel.receive() is WAKE
    assert not rung(pipe)


def test_who_takes_a_place_is_told_and_heard_in_it(pipe, start):
    (old, channel), (new, other) = start(0), start(0, 2)
    old.say("something that nobody hears")
    old.mark_ended(ENDED)
    channel.replace(other)
    assert not rung(pipe)
    new.say("hello")
    assert channel.receive() == "hello"
    channel.send("welcome")
    channel.shut()
    assert new.link.told == [(0, 2, "welcome"), (0, 2, None)]


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
        remotes, channels = zip(*map(start, range(num_workers)), strict=True)
        remotes[-1].say("hello")
        end = _handoffs.parent_end(kind, marks, slices=slices, channels=channels, spin_ns=0)
        assert not end.wait(np.arange(num_workers), num_workers, 0)  # before it is content with its slots
        channels[-1].receive()


class Ray:
    """Knows an actor's address."""

    def get(self, answer):
        return answer


class Actor:
    """Says where it listens."""

    listen = serve = property(lambda self: self)

    def remote(self, *_):
        return "127.0.0.1", 1


@pytest.mark.parametrize("data", ["tcp", "auto"])
def test_too_few_descriptors_for_a_connection_are_told(data):
    with descriptors_left(0), pytest.raises(_nodes.ActorLostError, match="too many open files"):
        _wire.open_wire(Ray(), Actor(), data)


def test_too_few_descriptors_for_ray_are_told():
    with descriptors_left(1):
        _nodes.check_descriptors()
    with descriptors_left(0), pytest.raises(_nodes.ActorLostError, match="too many open files"):
        _nodes.check_descriptors()


def test_a_head_that_nobody_has_a_descriptor_to_ask_is_not_lost():
    said = []
    monitor = _nodes.HeadMonitor("127.0.0.1:1", said.append)
    monitor.close()
    assert not monitor._answers()
    with descriptors_left(0):
        assert monitor._answers()
