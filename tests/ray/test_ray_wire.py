"""The connection between a pool and a host: what comes of it, and who gets none. Needs no Ray."""

from __future__ import annotations

import errno
import hmac
import os
import pickle
import resource
import signal
import socket
import ssl
import threading
from collections import deque
from contextlib import suppress

import numpy as np
import pytest
import trustme
from support.disasters import PATIENCE, Background, wait_until
from support.probe import (
    MESSAGE,
    HostLostError,
    Listener,
    PoolConfig,
    ProcessEnd,
    WorkerHost,
    WorkerMessage,
    dial,
    wire,
)
from support.probe import host as _host

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
            wait_until(lambda: not listener._callers)
        return digest(key, message, how)

    monkeypatch.setattr(hmac, "digest", prove)
    here = connect(listener.address)
    assert (late, len(listener.wait(1, PATIENCE))) == ([], 1)
    here.close()


def prove(address):
    """Returns a connection that has proved the key, without a description of the host."""
    sock = socket.create_connection(address)
    listener = sock.recv(32, socket.MSG_WAITALL)
    sock.sendall(NONCE + hmac.digest(KEY, b"connector" + listener + NONCE, "sha256"))
    assert len(sock.recv(32, socket.MSG_WAITALL)) == 32
    return sock


def test_a_refused_key_is_logged_with_its_address(listener, caplog):
    with pytest.raises(PermissionError, match="another key; compare the key files"):
        connect(listener.address, bytes(32))
    wait_until(lambda: "refused a connection from 127.0.0.1:" in caplog.text)
    assert "it does not have the key" in caplog.text


def test_a_lack_of_threads_leaves_the_listener_alive(listener, monkeypatch):
    def fail(*_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(Listener, "_admit", property(fail))
        with prove(listener.address) as sock, suppress(ConnectionResetError):
            while sock.recv(1 << 10):
                pass
    here = connect(listener.address)
    assert len(listener.wait(1, PATIENCE)) == 1
    here.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOBUFS, errno.EPROTO])
def test_a_listener_accepts_hosts_after_an_error(monkeypatch, number):
    failing, accept = [OSError(number, os.strerror(number))], socket.socket.accept

    def accept_later(self):
        if failing:
            raise failing.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    listener = Listener("127.0.0.1", 0, KEY)
    here = connect(listener.address)
    assert len(listener.wait(1, PATIENCE)) == 1
    here.close()
    listener.close()


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
