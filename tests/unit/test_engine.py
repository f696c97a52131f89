"""A pool over either engine, with threads in place of workers, against a model of who may move what."""

from __future__ import annotations

import re
import select
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support import probe
from support.disasters import PATIENCE, within

import jaxvec
from jaxvec import _native
from jaxvec._arguments import expand_seeds
from jaxvec._engine import channel as _channel
from jaxvec._engine import choice
from jaxvec._engine import move as _move
from jaxvec._engine.channel import WAKE
from jaxvec._engine.dispatch import DEATH_CHECK_INTERVAL, Work
from jaxvec._engine.engine import Status
from jaxvec._engine.move import Caller, Move, Verb
from jaxvec._leaves import as_jax
from jaxvec._memory import segment
from jaxvec._memory.segment import Marks
from jaxvec._pool.pool import Pool, Timeouts
from jaxvec._spec import Autoreset, EnvSpaces, make_spec

WAIT, END, DIE = 6, 7, 8  # actions: the worker waits for the gate; the episode ends; the worker does

KINDS = ["portable"] if _native.reason_unavailable() else ["portable", "native"]


class Threads:
    """Workers that are threads: see `Workers`. An env counts its moves, and tells the last action."""

    restarts, env_settings = (0,), None

    def __init__(self, kind, slices):
        self._kind, self._slices = kind, slices
        self._threads = []
        self._looking = threading.Lock()
        self.gate = threading.Event()
        self.gate.set()

    def attach(self, layout, spec):
        self._spec, self._arrays = spec, segment.private_segment(layout)
        self._channels, theirs = zip(*(_channel.channel_pair() for _ in self._slices), strict=True)
        self._poll = select.poll()
        for channel in self._channels:
            self._poll.register(channel, select.POLLIN)
        marks = Marks.of(self._arrays)
        self._end = choice.parent_end(
            self._kind, marks, slices=self._slices, channels=list(self._channels), spin_ns=0
        )
        self.any_resetting, self.first_completed = self._end.any_resetting, self._end.first_completed
        self.send, self.unfinished = self._end.send, self._end.unfinished
        for worker, (slots, descriptor) in enumerate(zip(self._slices, theirs, strict=True)):
            channel = _channel.adopt_channel(descriptor)
            end = choice.worker_end(self._kind, marks, worker=worker, slots=slots, channel=channel, spin_ns=0)
            self._threads.append(threading.Thread(target=self._serve, args=(end, channel), daemon=True))
            self._threads[-1].start()
        return self._arrays

    def open_engine(self, config):
        return choice.open_engine(self._end, self._spec, self._arrays, config=config)

    def wait(self, slots, count, limits):
        while not self._end.wait(slots, count, DEATH_CHECK_INTERVAL):
            with self._looking:
                seconds = self._end.start_poll(slots, count, DEATH_CHECK_INTERVAL)
                limits.check()
                if limits.give_up is not None and time.monotonic() >= limits.give_up:
                    raise jaxvec.NotReadyError("not ready")
                for fd, _ in self._poll.poll(seconds * 1000):
                    channel = next(each for each in self._channels if each.fileno() == fd)
                    try:
                        assert channel.receive() is WAKE
                    except EOFError:
                        raise jaxvec.WorkerDiedError("died", worker=0, env_ids=(), exitcode=None) from None

    def close(self, timeout, *, tell=True):
        for worker, channel in enumerate(self._channels):
            channel.shut()
            self._end.notify_worker(worker)
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        for channel in self._channels:
            channel.close()

    def kill(self):
        """Nobody is busy when a pool is closed here."""

    def _serve(self, end, channel):
        with suppress(EOFError):
            while True:
                work = end.receive()
                assert isinstance(work, Work)
                for slot in work.slots.tolist():
                    action = -1 if work.verb is Verb.RESET else int(self._arrays["action",][slot])
                    if action == DIE:
                        channel.close()
                        return
                    if action == WAIT:
                        self.gate.wait(PATIENCE)
                    moves = self._arrays["obs",][slot, 0] + 1
                    for leaf, value in zip(self._spec.timestep_leaves, row(slot, moves, action), strict=True):
                        self._arrays[leaf.path][slot] = value
                    end.post(np.array([slot]))
        channel.close()


def row(slot, moves, action) -> list[Any]:
    """Returns all fields of an env's row."""
    return [[moves, action], action / 2, action == END, False, slot, moves + 0.5, moves]


def open_pool(kind, num_envs, *, num_workers, batch_size, in_order):
    """Makes a pool of such envs."""
    spec = make_spec(
        EnvSpaces(spaces.Box(-1, 10**6, (2,), np.int64), spaces.Discrete(9), None),
        num_envs=num_envs,
        batch_size=batch_size,
        autoreset=Autoreset.DISABLED,
        final_obs=False,
        declared={},
        policy=as_jax,
    )
    slices = segment.split_evenly(num_envs, min(num_workers, num_envs))
    return Pool(
        Threads(kind, slices),
        spec,
        slices=slices,
        in_order=in_order,
        all_at_once=False,
        timeouts=Timeouts(None, PATIENCE, PATIENCE),
        resets_required=True,
    )


class EngineMachine(RuleBasedStateMachine):
    """Foretells every row, every refusal, and how often each env was moved."""

    pool = None

    @initialize(
        kind=st.sampled_from(KINDS),
        num_envs=st.integers(2, 5),
        num_workers=st.integers(1, 3),
        first_ready=st.booleans(),
        in_order=st.booleans(),
    )
    def make(self, kind, num_envs, num_workers, first_ready, in_order):
        self.num_envs, self.in_order = num_envs, in_order
        self.batch_size = num_envs - 1 if first_ready else num_envs
        self.pool = open_pool(
            kind, num_envs, num_workers=num_workers, batch_size=self.batch_size, in_order=in_order
        )
        self.first_ready = self.pool.spec.first_ready
        self.counts = np.zeros(num_envs, int)
        self.rows = [row(slot, 0, 0) for slot in range(num_envs)]
        self.needs_reset = set(range(num_envs))
        self.sent: list[int] = []
        self.broken = False
        self.rules_played = 0

    # --- the model ---------------------------------------------------------------------------------

    def moved(self, slots, actions):
        """Foretells what comes of a move of these envs, `-1` for a reset."""
        for slot, action in zip(slots, actions, strict=True):
            self.rows[slot] = row(slot, self.rows[slot][0][0] + 1, action)
            self.needs_reset.discard(slot)
            if action == END:
                self.needs_reset.add(slot)

    def refused(self, slots, stepped):
        """Foretells the error of a move of envs that are the caller's."""
        if any(slot in self.sent for slot in slots):
            return jaxvec.PendingEnvError
        return jaxvec.ResetNeededError if stepped and self.needs_reset.intersection(slots) else None

    def check(self, found, slots):
        expected = zip(*(self.rows[slot] for slot in slots), strict=True)
        for leaf, one, other in zip(self.pool.spec.timestep_leaves, found, expected, strict=True):
            np.testing.assert_array_equal(one, np.array(other), err_msg=str(leaf.path))

    def generation(self, counts):
        return counts.astype(np.uint32) + self.pool.engine.first_generation

    def handle(self, verb, slots):
        """Returns a move by a fresh handle."""
        slots = np.array(slots)
        return Move(verb, slots, self.generation(self.counts[slots]), Caller.PROGRAM)

    def stored(self, actions):
        """Returns actions as the pool takes them."""
        return [np.array(actions, self.pool.spec.action_leaves[0].stored)]

    def all(self, verb, by_handle):
        if by_handle:
            return self.handle(verb, range(self.num_envs))
        return self.pool.move_all(verb, Caller.HOST)

    # --- what is done to the pool --------------------------------------------------------------------

    works = precondition(lambda self: not self.broken)
    synchronous = precondition(lambda self: not self.broken and not self.first_ready)
    asynchronous = precondition(lambda self: not self.broken and self.first_ready)

    @works
    @rule(by_handle=st.booleans())
    def reset(self, by_handle):
        slots = list(range(self.num_envs))
        seeds = expand_seeds(None, self.num_envs)
        found = self.pool.reset(self.all(Verb.RESET, by_handle), seeds=seeds, mask=None, options=None)
        self.sent = []
        self.moved(slots, [-1] * self.num_envs)
        self.counts += 1
        if self.first_ready:
            self.receive(found)
        else:
            self.check(found, slots)

    def receive(self, found, at_least=None):
        """Checks what was received, and notes that it is not in flight any more."""
        if not self.sent:  # a reset has sent all
            self.sent = probe.pending_envs(self.pool).spread.tolist()
        ids = found[4].tolist()
        if at_least is None:
            assert len(ids) == self.batch_size
        assert len(set(ids)) == len(ids) >= (at_least or 0)
        assert ids == self.sent[: len(ids)] if self.in_order else set(ids) <= set(self.sent)
        self.check(found, ids)
        self.sent = [slot for slot in self.sent if slot not in ids]

    @synchronous
    @precondition(lambda self: bool(self.counts.all()))
    @rule(data=st.data())
    def reset_some(self, data):
        slots = data.draw(st.lists(st.integers(0, self.num_envs - 1), min_size=1, unique=True))
        mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots))))
        seeds = expand_seeds(None, len(slots))
        found = self.pool.reset(self.handle(Verb.RESET, slots), seeds=seeds, mask=mask, options=None)
        chosen = [slot for slot, resets in zip(slots, mask, strict=True) if resets]
        self.moved(chosen, [-1] * len(chosen))
        self.counts[slots] += 1
        self.check(found, slots)

    @synchronous
    @rule(data=st.data(), fault=st.sampled_from([None] * 6 + ["stale", "twice", "foreign"]))
    def step(self, data, fault):
        slots = data.draw(st.lists(st.integers(0, self.num_envs - 1), min_size=1, unique=True))
        actions = data.draw(st.lists(st.integers(0, END), min_size=len(slots), max_size=len(slots)))
        move = self.handle(Verb.STEP, slots)
        error = self.refused(slots, stepped=True)
        if fault == "stale":
            move.generation[data.draw(st.integers(0, len(slots) - 1))] += 1
            error = jaxvec.StaleHandleError
        if fault == "twice" and len(slots) > 1:
            move.slots[0], error = slots[-1], jaxvec.EnvIdError
        if fault == "foreign":
            move.slots[0] = data.draw(st.sampled_from([-1, self.num_envs, 2**40]))
            error = jaxvec.EnvIdError
        self.step_or_be_refused(move, slots, actions, error)

    @synchronous
    @rule(data=st.data())
    def step_all_on_the_host(self, data):
        slots = list(range(self.num_envs))
        actions = data.draw(st.lists(st.integers(0, END), min_size=self.num_envs, max_size=self.num_envs))
        move = self.pool.move_all(Verb.STEP, Caller.HOST)
        self.step_or_be_refused(move, slots, actions, self.refused(slots, stepped=True))

    def step_or_be_refused(self, move, slots, actions, error):
        if error is not None:
            with pytest.raises(error):
                self.pool.step(move, self.stored(actions))
            return
        found = self.pool.step(move, self.stored(actions))
        self.moved(slots, actions)
        self.counts[slots] += 1
        self.check(found, slots)

    @synchronous
    @precondition(lambda self: not self.needs_reset)
    @rule(cut=st.integers(1, 4), times=st.integers(1, 4))
    def two_threads_step_envs_of_their_own(self, cut, times):
        parts = [
            part for part in np.split(np.arange(self.num_envs), [min(cut, self.num_envs - 1)]) if part.size
        ]
        before = self.counts.copy()

        def drive(part):
            for turn in range(times):
                generation = self.generation(before[part] + turn)
                found = self.pool.step(
                    Move(Verb.STEP, part, generation, Caller.PROGRAM), self.stored(part % END)
                )
            return found

        with ThreadPoolExecutor(len(parts)) as threads:
            last = list(threads.map(drive, parts))
        for part, found in zip(parts, last, strict=True):
            for _ in range(times):
                self.moved(part.tolist(), (part % END).tolist())
            self.counts[part] += times
            self.check(found, part.tolist())

    @asynchronous
    @rule(data=st.data(), by_handle=st.booleans(), twice=st.sampled_from([False] * 5 + [True]))
    def send(self, data, by_handle, twice):
        slots = data.draw(st.lists(st.integers(0, self.num_envs - 1), min_size=1, unique=True))
        actions = data.draw(st.lists(st.integers(0, END), min_size=len(slots), max_size=len(slots)))
        move, error = self.all(Verb.SEND, by_handle), self.refused(slots, stepped=True)
        if twice and len(slots) > 1:
            slots[0], error = slots[-1], jaxvec.EnvIdError
        if error is not None:
            with pytest.raises(error):
                self.pool.send(move, np.array(slots), self.stored(actions))
            return
        self.pool.send(move, np.array(slots), self.stored(actions))
        self.moved(slots, actions)
        self.sent += slots
        self.counts += 1

    @asynchronous
    @rule(by_handle=st.booleans())
    def recv(self, by_handle):
        move = self.all(Verb.RECV, by_handle)
        if len(self.sent) < self.batch_size:
            with pytest.raises(jaxvec.PendingEnvError):
                self.pool.recv(move)
            return
        found = self.pool.recv(move)
        self.counts += 1
        self.receive(found)

    @asynchronous
    @rule(at_least=st.integers(1, 5))
    def recv_all_that_are_ready(self, at_least):
        move = self.pool.move_all(Verb.RECV, Caller.HOST)
        if len(self.sent) < at_least:
            missing = f"at least {at_least} envs, but only {len(self.sent)} are"
            with pytest.raises(jaxvec.PendingEnvError, match=missing):
                self.pool.recv(move, at_least=at_least)
            return
        found = self.pool.recv(move, at_least=at_least)
        self.counts += 1
        self.receive(found, at_least)

    @asynchronous
    @rule(data=st.data(), by_handle=st.booleans(), receives=st.booleans())
    def reset_some_that_are_not_in_flight(self, data, by_handle, receives):
        slots = data.draw(st.lists(st.integers(0, self.num_envs - 1), unique=True))
        mask = np.isin(np.arange(self.num_envs), slots)
        flying = sorted(set(slots) & set(self.sent))
        error, in_all = None, len(self.sent) + len(slots)
        if flying:
            error = rf"envs \[{', '.join(map(str, flying))}\] are pending"
        elif receives and in_all < self.batch_size:
            error = f"as recv does, but with the {len(slots)} of mask only {in_all} would be pending"
        reset = self.pool.reset if receives else self.pool.reset_async
        seeds = expand_seeds(None, self.num_envs)
        reset = partial(reset, self.all(Verb.RESET, by_handle), seeds=seeds, mask=mask, options=None)
        if error is not None:
            with pytest.raises(jaxvec.PendingEnvError, match=error):
                reset()
            return
        found = reset()
        self.moved(slots, [-1] * len(slots))
        self.sent += [slot for slot in probe.pending_envs(self.pool).spread.tolist() if slot in slots]
        self.counts += 1
        if receives:
            self.receive(found)

    @works
    @precondition(lambda self: self.rules_played > 10)  # `counts` would depend on who was ready first
    @rule(slot=st.integers(0, 1), by_handle=st.booleans())
    def a_worker_dies(self, slot, by_handle):
        self.reset(by_handle=False)  # else which envs may be sent depends on who was ready first
        if self.first_ready:
            self.check(
                self.pool.recv(self.all(Verb.RECV, by_handle), wait_for_all=True), range(self.num_envs)
            )
            self.sent = []
            self.counts += 1
        self.broken = True
        with pytest.raises(jaxvec.WorkerDiedError):
            if self.first_ready:
                self.pool.send(self.all(Verb.SEND, by_handle), np.array([slot]), self.stored([DIE]))
                self.pool.recv(self.all(Verb.RECV, False), wait_for_all=True)
            else:
                self.pool.step(self.handle(Verb.STEP, [slot]), self.stored([DIE]))

    @precondition(lambda self: self.broken)
    @rule()
    def use_what_is_broken(self):
        for move in (self.handle(Verb.STEP, [0]), self.pool.move_all(Verb.STEP, Caller.HOST)):
            with pytest.raises(jaxvec.PoolBrokenError, match="failed with WorkerDiedError"):
                self.pool.step(move, self.stored([0] * len(move.slots)))

    @invariant()
    def counts_are_as_foretold(self):
        if self.pool is None:
            return
        self.rules_played += 1
        if not self.broken:
            assert (self.pool.engine.generation == self.generation(self.counts)).all()
            assert probe.pending_envs(self.pool).sent.tolist() == self.sent

    def teardown(self):
        traceback.print_exc()  # of a failure, which Hypothesis hides where it does not come each time
        if self.pool is not None:
            self.pool.close()
            with pytest.raises(jaxvec.PoolClosedError):
                self.pool.step(self.handle(Verb.STEP, [0]), self.stored([0]))


EngineMachine.TestCase.settings = settings(stateful_step_count=40, suppress_health_check=list(HealthCheck))
TestEngine = EngineMachine.TestCase


@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_does_not_wait_for_what_it_keeps_itself(kind):
    """It was interrupted, and has not released its share; or its signal handler asks the pool."""
    pool = open_pool(kind, 1, num_workers=1, batch_size=1, in_order=False)
    waited = []

    def enter(thread):
        with probe.engine(pool).exclusive(if_busy=lambda: waited.append(thread), patience=0):
            pass

    try:
        with probe.engine(pool).shared():
            probe.engine(pool).hold(pool.all)
        enter("mine")
        within(partial(enter, "another"))
        probe.engine(pool).release()
        within(partial(enter, "a later one"))
    finally:
        pool.close()
    assert waited == ["another"]


QUEUE = 3  # of three envs
ENTRIES = {  # who waits for whom holds env 1, env 1 alone, or the queue
    "shared, none": (False, [], ""),
    "shared, the same": (False, [2, 1], "alone"),
    "shared, another": (False, [0, 2], ""),
    "exclusive, the same": (True, [0, 1], "shared alone"),
    "exclusive, others": (True, [2, 0], ""),
    "exclusive, the queue": (True, [QUEUE], "queue"),
    "exclusive, all": (True, None, "shared alone queue"),
    "no such envs": (True, [-1, 7, 2**40], ""),
}


@pytest.mark.parametrize("kind", KINDS)
def test_who_needs_slots_waits_for_those_who_hold_them(kind):
    pool = open_pool(kind, 3, num_workers=1, batch_size=3, in_order=False)
    engine, busy = probe.engine(pool), []

    def enter(name, exclusive, slots):
        slots = None if slots is None else np.array(slots, int)
        with engine._entering() as enter_now:
            if not enter_now(slots, exclusive, 0):
                busy.append(name)

    try:
        for held, slots in {"shared": [1], "alone": [1], "queue": [QUEUE]}.items():
            with engine.shared():
                engine.hold(np.array(slots), alone=held == "alone")
            assert engine.holds()
            for name, (exclusive, needed, _) in ENTRIES.items():
                within(partial(enter, name, exclusive, needed))
            assert busy == [name for name, (_, _, waits) in ENTRIES.items() if held in waits.split()]
            busy.clear()
            engine.release()
            assert not engine.holds()
    finally:
        pool.close()


HEADERS = [Path(_native.__file__).with_name(name) for name in ("dispatch.h", "engine.h")]


def enumerators(name):
    """Returns the enumerators of an enum of C++ by their names in Python."""
    source = "".join(path.read_text() for path in HEADERS)
    (body,) = re.findall(rf"enum (?:class )?{name} : uint32_t {{(.*?)}};", source, re.DOTALL)
    values = {}
    for entry in re.sub("//.*", "", body).split(","):
        constant, _, number = entry.partition("=")
        words = re.findall("[A-Z][a-z]*", constant)
        if words:
            values["_".join(words).upper()] = int(number) if number else max(values.values()) + 1
    return values


@pytest.mark.skipif(not all(path.is_file() for path in HEADERS), reason="needs the source tree")
def test_enums_of_python_and_cpp_have_the_same_numbers():
    assert enumerators("Status") == {status.name: status.value for status in Status}
    known = {verb.name: verb.value for verb in Verb} | {"END": _move._END}
    verbs = enumerators("Operation") | enumerators("Verb")
    assert len(verbs) == 8
    assert verbs == {name: known[name] for name in verbs}
