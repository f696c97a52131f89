"""The connection between a pool and a host, its two ends, and connections without the key. Needs no Ray."""

from __future__ import annotations

import errno
import hmac
import json
import os
import pickle
import resource
import select
import signal
import socket
import ssl
import threading
from collections import deque
from contextlib import contextmanager, suppress

import numpy as np
import pytest
import trustme
from support.disasters import PATIENCE, Background, wait_until
from support.probe import (
    MESSAGE,
    WAKE,
    HostLostError,
    Listener,
    PoolConfig,
    ProcessEnd,
    RemoteWorker,
    WakePipe,
    WorkerHost,
    WorkerMessage,
    base,
    dial,
    wire,
)
from support.probe import host as _host
from support.segments import KINDS, board

KEY = bytes(range(32))
ROWS = 1


@pytest.fixture
def listener():
    listener = Listener("127.0.0.1", 0, KEY)
    yield listener
    listener.close()


HELLO = {"node": "node 1", "cores": 2, "token": "", **wire.versions()}


def connect(address, key=KEY, *, context=None, **hello):
    """Dials in as a host does, and describes itself."""
    return dial(address, key, HELLO | hello, context)


def accept(listener):
    """Returns the pool's end of the next host's connection."""
    host = listener.take("", PATIENCE)
    return host.connection


@pytest.fixture
def ends(listener):
    """Yields both ends of a connection."""
    here = connect(listener.address)
    there = accept(listener)
    here.max_rows = there.max_rows = 1 << 30
    yield here, there
    here.close()
    there.close()


def test_frames_arrive_whole_and_in_order(ends):
    here, there = ends
    rng = np.random.default_rng(1)
    sent = [rng.integers(0, 256, size, np.uint8) for size in (9, 5 << 20, 9, 9, 0, 0, 1 << 20)]
    sending = Background(lambda: [here.send(kind % 2, data.data) for kind, data in enumerate(sent)])
    for number, data in enumerate(sent):
        kind, came = there.receive()
        assert kind == number % 2
        np.testing.assert_array_equal(came, data)
    sending.result(PATIENCE)


def test_many_threads_send_frames_that_do_not_mix(ends):
    here, there = ends
    senders = [
        Background(lambda value=value: [here.send(ROWS, bytes([value]) * 300_000) for _ in range(20)])
        for value in range(3)
    ]
    came = []
    for _ in range(60):
        _, data = there.receive()
        assert len({*data.tolist()}) == 1
        came.append(int(data[0]))
    assert sorted(came) == sorted([*range(3)] * 20)
    for sender in senders:
        sender.result(PATIENCE)


@pytest.mark.parametrize("how", ["closed", "broken off here"])
def test_an_end_ends_whoever_receives(ends, how):
    here, there = ends
    waits = Background(here.receive)
    there.close() if how == "closed" else here.break_off()
    with pytest.raises(EOFError):
        waits.result(PATIENCE)
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        for _ in range(100):  # the other end has to say that it is gone
            here.send(ROWS, bytes(1 << 20))


# --- Who does not know the key --------------------------------------------------------------------


sprung = threading.Event()


def spring():
    sprung.set()


class Trap:
    """Says so if it is unpickled."""

    def __reduce__(self):
        return (spring, ())


def proofless(sock, said):
    """Talks to a listener, and returns all that it says."""
    with sock:
        sock.settimeout(PATIENCE)
        sock.sendall(said)
        heard = b""
        try:
            while part := sock.recv(1 << 16):
                heard += part
        except ConnectionResetError:  # it had not read all
            pass
        return heard


FRAME = wire._HEADER.pack(MESSAGE, len(pickle.dumps(Trap()))) + pickle.dumps(Trap())
NONCE = bytes(32)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "said",
    [
        b"",
        FRAME,
        NONCE + hmac.digest(b"another key", NONCE, "sha256") + FRAME,
        NONCE + bytes(32) + FRAME,
    ],
    ids=["nothing", "a frame at once", "a proof by another key", "no proof"],
)
def test_strangers_get_nothing_and_the_one_with_the_key_gets_in(listener, said):
    stranger = socket.create_connection(listener.address)  # first
    heard = Background(lambda: proofless(stranger, said))
    here = connect(listener.address)
    there = accept(listener)
    assert heard.result(PATIENCE)[32:] in (b"", wire._REFUSAL)  # after random bytes; no proof
    here.send(MESSAGE, b"welcome")
    assert there.receive()[1].tobytes() == b"welcome"
    assert not sprung.is_set()
    here.close()
    there.close()


# The first bytes of a TLS handshake that announce 512 bytes, and few of these.
HALF_HANDSHAKE = b"\x16\x03\x01\x02\x00\x01\x00"


@pytest.fixture(params=["plain", "TLS"])
def guarded(request):
    """Yields a listener, the context of its hosts, and what a connection without the key sends."""
    ours = theirs = None
    if request.param == "TLS":
        authority = trustme.CA()
        ours, theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
        authority.issue_cert("127.0.0.1").configure_cert(ours)
        authority.configure_trust(theirs)
    listener = Listener("127.0.0.1", 0, KEY, ours)
    yield listener, theirs, b"" if ours is None else HALF_HANDSHAKE
    listener.close()


def is_open(sock):
    """Returns whether the other end of a connection has not closed it."""
    with suppress(BlockingIOError):
        while part := sock.recv(1 << 16, socket.MSG_DONTWAIT):
            assert part
        return False
    return True


@pytest.fixture
def without_limit(monkeypatch):
    """Connections without the key are not closed for their age."""
    monkeypatch.setattr(wire, "_UNAUTHENTICATED_TIMEOUT", 10.0 * PATIENCE)


def test_silent_connections_delay_no_host(guarded, without_limit):
    listener, context, said = guarded
    silent = [socket.create_connection(listener.address) for _ in range(128)]
    for each in silent:
        each.sendall(said)
    here = connect(listener.address, context=context)
    there = accept(listener)
    assert all(map(is_open, silent))
    here.send(MESSAGE, b"welcome")
    assert there.receive()[1].tobytes() == b"welcome"
    for end in (here, there, *silent):
        end.close()


def test_a_flood_of_connections_delays_no_host(listener, without_limit):
    """It admits hosts while more connections than it keeps are open, and others are made."""
    most = 2 * wire._MAX_UNAUTHENTICATED
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * most)), hard))
    ended, count, held = threading.Event(), 0, deque()

    def flood():
        nonlocal count
        while not ended.is_set():
            held.append(socket.create_connection(listener.address))
            count += 1
            if len(held) > most:
                held.popleft().close()

    flooding = Background(flood)
    try:
        wait_until(lambda: count > most)
        for _ in range(5):
            before = count
            here = connect(listener.address)
            accept(listener).close()
            here.close()
            wait_until(lambda before=before: count > before)
    finally:
        ended.set()
        flooding.result()
        for each in held:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_host_that_is_slow_to_prove_its_key_connects_again(listener, monkeypatch):
    """Its machine may be busy, so the end of its time is not the refusal of its key."""
    late, digest = [True], hmac.digest

    def prove(key, message, how):
        if late and message.startswith(b"connector"):
            late.clear()
            wait_until(lambda: not listener._peers)
        return digest(key, message, how)

    monkeypatch.setattr(hmac, "digest", prove)
    here = connect(listener.address)
    assert (late, len(listener.wait(1, PATIENCE))) == ([], 1)
    here.close()


def test_a_refused_key_is_logged_with_its_address(listener, caplog):
    with pytest.raises(PermissionError, match="another key; compare the key files"):
        connect(listener.address, bytes(32))
    wait_until(lambda: "refused a connection from 127.0.0.1:" in caplog.text)
    assert "it does not have the key" in caplog.text


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        *(
            (socket.socket, "accept", OSError(number, ""))
            for number in (errno.EMFILE, errno.ENOBUFS, errno.EPROTO)
        ),
        (threading.Thread, "start", RuntimeError("can't start new thread")),
        (wire, "_read_hello", MemoryError()),
    ],
    ids=["EMFILE", "ENOBUFS", "EPROTO", "no thread", "no memory"],
)
def test_a_listener_admits_hosts_after_an_error(listener, monkeypatch, owner, name, error):
    errors, original = [error], getattr(owner, name)

    def fail_once(*args):
        if errors:
            raise errors.pop()
        return original(*args)

    monkeypatch.setattr(owner, name, fail_once)
    failed = connect(listener.address)
    wait_until(lambda: not errors)
    here = connect(listener.address, node="node 2")
    wait_until(lambda: "node 2" in [host.node for host in listener.wait(1, PATIENCE)])
    failed.close()
    here.close()


def test_a_host_of_another_version_is_told_so_and_not_queued(listener):
    here = connect(listener.address, jaxvec="0.0.1")
    name, (why,) = pickle.loads(here.receive()[1])
    assert name == "reject"
    assert why.startswith("has jaxvec 0.0.1, but the pool's process has ")
    assert listener.wait(1, 0) == []
    here.close()


def test_a_waiting_host_that_has_gone_is_not_taken(listener):
    gone, here = connect(listener.address), connect(listener.address, node="node 2")
    assert len(listener.wait(2, PATIENCE)) == 2
    gone.close()
    wait_until(lambda: len(listener.wait(0, 0)) == 1)
    host = listener.take("", PATIENCE)
    assert host.node == "node 2"
    here.close()
    host.connection.close()


def test_waiting_hosts_are_told_that_the_listener_closes(listener):
    here = connect(listener.address)
    listener.wait(1, PATIENCE)
    listener.close()
    assert pickle.loads(here.receive()[1]) == ("close", ())
    with pytest.raises(ConnectionRefusedError):
        connect(listener.address)
    here.close()


@pytest.mark.parametrize(("kind", "longest"), [(MESSAGE, wire._MAX_MESSAGE), (ROWS, 1000)])
def test_a_frame_longer_than_any_can_be_is_refused_unread(ends, kind, longest):
    here, there = ends
    there.max_rows = 1000
    here._socket.sendall(wire._HEADER.pack(kind, longest + 1))
    with pytest.raises(ConnectionError, match=f"announced a frame of {longest + 1} bytes"):
        there.receive()


def test_a_proof_that_was_overheard_is_no_use(listener):
    """A stranger between a host and the listener passes on what the host told."""
    with socket.create_server(("127.0.0.1", 0)) as between:
        connecting = Background(lambda: connect(between.getsockname()[:2]))
        victim, _ = between.accept()
        with victim:
            victim.sendall(NONCE)  # not the listener's
            overheard = victim.recv(64, socket.MSG_WAITALL)
            assert len(overheard) == 64
            heard = proofless(socket.create_connection(listener.address), overheard)
            assert heard[32:] == wire._REFUSAL
            victim.sendall(overheard[32:])  # its own proof
            with pytest.raises(ConnectionError, match="does not know the key"):
                connecting.result(PATIENCE)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9, bytes(64)])
def test_a_listener_that_does_not_know_the_key_is_refused(said):
    with socket.create_server(("127.0.0.1", 0)) as server:
        connecting = Background(lambda: connect(server.getsockname()[:2]))
        sock, _ = server.accept()
        with sock:
            with suppress(OSError):  # who hears enough to refuse us closes at once
                sock.sendall(said)
                sock.shutdown(socket.SHUT_WR)
            with pytest.raises(ConnectionError, match="does not know the key|closed the connection"):
                connecting.result(PATIENCE)


def test_who_says_nothing_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(wire, "_HANDSHAKE_TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        connect(silent.getsockname()[:2])


def prove(address):
    """Returns a connection that has proved the key, without a description of the host."""
    sock = socket.create_connection(address)
    listener = sock.recv(32, socket.MSG_WAITALL)
    sock.sendall(NONCE + hmac.digest(KEY, b"connector" + listener + NONCE, "sha256"))
    assert len(sock.recv(32, socket.MSG_WAITALL)) == 32
    return sock


def frame(data):
    return wire._HEADER.pack(MESSAGE, len(data)) + data


@pytest.mark.parametrize(
    "hello",
    [
        {"cores": float("nan")},
        {"cores": "2"},
        {"cores": True},
        {"cores": 0},
        {"node": None},
        {"node": "node 1\nroot: all is well"},
        {"token": 3},
        [],
        None,
        b"\xff",
        b"[" * 4000,
        b"1" * (1 << 20),
    ],
    ids=lambda hello: repr(hello)[:30],
)
def test_a_host_without_a_valid_description_is_rejected(listener, caplog, hello):
    if isinstance(hello, dict):
        hello = HELLO | hello
    data = hello if isinstance(hello, bytes) else json.dumps(hello).encode()
    sock = prove(listener.address)
    rejected = wire.Connection(sock, sock)
    with suppress(OSError):  # it does not read all of a long one
        sock.sendall(frame(data))
        name, (why,) = pickle.loads(rejected.receive()[1])
        assert (name, why[:27]) == ("reject", "sent no valid description: ")
    wait_until(lambda: "rejected a worker host at 127.0.0.1:" in caplog.text)
    here = connect(listener.address, node="node 2")
    assert [host.node for host in listener.wait(1, PATIENCE)] == ["node 2"]
    here.close()
    rejected.close()


def test_a_host_that_does_not_describe_itself_is_dropped(listener, monkeypatch):
    monkeypatch.setattr(wire, "_HANDSHAKE_TIMEOUT", 0.1)
    sock = prove(listener.address)
    silent = wire.Connection(sock, sock)
    assert "TimeoutError" in pickle.loads(silent.receive()[1])[1][0]
    with pytest.raises(EOFError):
        silent.receive()
    silent.close()


# --- Machines that are slow, or gone --------------------------------------------------------------


def test_who_has_no_time_to_read_is_not_lost(ends, monkeypatch):
    """The kernel's timeout of data that are not taken would end the connection."""
    here, there = ends
    looked = threading.Semaphore(0)
    is_silent = wire.Connection._is_silent

    def look(self):
        looked.release()
        return is_silent(self)

    monkeypatch.setattr(wire, "_ACK_TIMEOUT", 2.0)  # a kernel may put off its answer by 0.2
    monkeypatch.setattr(wire.Connection, "_is_silent", look)
    here._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wire._TIMEVAL.pack(0, 100_000))
    sending = Background(lambda: here.send(ROWS, bytes(50 << 20)))
    receiving = Background(here.receive)
    for _ in range(30):  # looks in 3 s, while the other end's buffer is full
        assert looked.acquire(timeout=PATIENCE)
    assert there.receive()[1].nbytes == 50 << 20
    sending.result(PATIENCE)
    there.send(ROWS, b"an answer")
    assert receiving.result(PATIENCE)[1].tobytes() == b"an answer"


# --- The host's end ------------------------------------------------------------------------------


@pytest.fixture
def host():
    host = WorkerHost(range(1), ((0, 1),), PoolConfig())
    yield host
    host._launcher.close()
    worker_slot = host._worker_slots[0]
    with worker_slot.channel.sending:  # the worker's thread may not yet have noticed that its message is lost
        worker_slot.incarnation = -1  # and sends nothing more
        for end in (host._wake_writer, host._wake_reader, worker_slot.channel, worker_slot.dead_socket):
            if end is not None:
                end.close()


def messages(connection):
    while True:
        yield pickle.loads(connection.receive()[1].data)


@pytest.mark.parametrize("how", ["the pool closes", "the connection is lost"])
def test_a_host_is_served_until_the_connection_ends(host, ends, how):
    there, connection = ends
    serving = Background(lambda: _host.serve(host, there))
    connection.send(MESSAGE, pickle.dumps(("launch", (0, 1))))
    connection.send(MESSAGE, pickle.dumps(("send", (0, 1, None))))  # the end of file
    said = next(messages(connection))
    assert isinstance(said, WorkerMessage)
    assert (said.worker, said.incarnation) == (0, 1)
    assert isinstance(said.message, ProcessEnd)
    connection.send(MESSAGE, pickle.dumps(("fly", ())))
    failure = next(messages(connection))
    assert isinstance(failure, HostLostError)
    assert "AttributeError" in str(failure)
    if how == "the pool closes":
        connection.say_goodbye()
        serving.result(PATIENCE)
    else:
        connection.break_off()
        with pytest.raises(EOFError):
            serving.result(PATIENCE)


def test_a_process_is_ended_while_a_message_to_it_waits(host):
    """A worker that hangs reads nothing: the message fills the socket."""
    host.launch(0, 1)
    process = host._worker_slots[0].process
    os.kill(process.pid, signal.SIGSTOP)
    host.send(0, 1, pickle.dumps(bytes(1 << 24)))
    host.end(0, 1)
    wait_until(process.ended)
    said = next(host.run())
    assert isinstance(said.message, ProcessEnd)


def test_a_worker_whose_end_comes_before_its_start_is_ended(host):
    """An end is sent by a thread of its own."""
    host.end(0, 1)
    host.launch(0, 1)
    said = next(host.run())
    assert isinstance(said, WorkerMessage)
    assert isinstance(said.message, ProcessEnd)
    host.launch(0, 2)
    process = host._worker_slots[0].process
    assert not process.ended()
    host.end(0, 2)
    wait_until(process.ended)


# --- Workers at hosts, as the pool sees them: many share one pipe, with few descriptors ----------


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
