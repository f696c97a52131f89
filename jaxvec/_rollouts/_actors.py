"""The actors of a learner: started, kept busy with the newest weights, and replaced when they are lost.

One thread does all of this. It takes its turns from a queue, which Ray fills when an answer is there, and
the learner when it has taken a rollout. So who is done first comes first, and nobody polls or takes locks.
"""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jaxvec._backends._ray import _nodes, _runtime_env
from jaxvec._backends._ray._nodes import HeadMonitor
from jaxvec._backends._ray._placement import Placement
from jaxvec._errors import ActorDiedError, RolloutError
from jaxvec._ray import Ray
from jaxvec._restart import Budget, Restart
from jaxvec._rollouts._actor import Actor, Played, Raised

_PATIENCE = 5.0  # seconds for envs to be closed
_LOOK = 1.0  # seconds between looks whether Ray was shut down, after which no answer ever comes


@dataclass(frozen=True)
class Done:
    """A rollout that is done."""

    played: Played
    actor: int
    index: int
    version: int


@dataclass(frozen=True)
class Terms:
    """What actors are held to.

    Attributes:
        ray: the module.
        options: of the user.
        num_actors: how many there are.
        start_timeout: seconds until one is ready; `None` for ever.
        rollout_timeout: seconds that a rollout may take.
        in_flight: how many rollouts an actor may be ahead.
        policy: whether a lost one is replaced.
    """

    ray: Any
    options: Ray
    num_actors: int
    start_timeout: float | None
    rollout_timeout: float | None
    in_flight: int
    policy: Restart | None


@dataclass
class _Place:
    """One of the places for actors, and who is there now."""

    number: int
    incarnation: int = -1
    actor: Any = None
    node: str = "no node yet"
    asked: str = ""  # what it is at, if anything
    deadline: float = float("inf")  # when it has to be done with that
    dead_nodes: set[str] = field(default_factory=set[str])  # when it was started
    unread: int = 0
    index: int = 0  # of the next rollout
    version: int = -1  # that it plays with


class Actors:
    """Actors that make rollouts.

    Attributes:
        weights: the newest version, and what Ray knows them by.
        done: rollouts, the first done first; `None`, which is to be put back, when there will be no more.
        error: why there will be no more; `None` if they were closed.
        budget: how often each was replaced.
    """

    def __init__(self, terms: Terms, placement: Placement, program: bytes, weights: tuple[int, Any]) -> None:
        """Begins to start them.

        Args:
            terms: of the user.
            placement: where they are put.
            program: for all of them, pickled.
            weights: the first.
        """
        self.weights = weights
        self.done: queue.SimpleQueue[Done | None] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self.budget = Budget(terms.policy, terms.num_actors, who="actor")
        self._terms = terms
        self._ray = terms.ray
        self._placement = placement
        self._program = self._ray.put(program)
        self._turns: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._places = [_Place(number) for number in range(terms.num_actors)]
        self._num_started = 0
        self._up = threading.Event()  # or over
        self._head = HeadMonitor(self._ray.get_runtime_context().gcs_address, self._lose_head)
        self._thread = threading.Thread(target=self._run, name="jaxvec-rollouts", daemon=True)
        self._thread.start()

    # --- what the learner does, in any thread -------------------------------------------------------

    def wait_until_up(self) -> None:
        """Waits until all have started; raises what kept one from it."""
        self._up.wait()
        if self.error is not None:
            raise self.error

    def take(self, actor: int) -> None:
        """Notes that a rollout of an actor was taken, so that it may make another."""
        self._turns.put(partial(self._release, self._places[actor]))

    def versions(self) -> tuple[int, ...]:
        """Returns the weights' version with which each plays."""
        return tuple(place.version for place in self._places)

    def stop(self) -> None:
        """Has them end soon."""
        self._turns.put(None)

    def join(self, timeout: float) -> None:
        """Waits for the end, but no longer than so many seconds."""
        self._thread.join(timeout)

    # --- the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            dead_nodes = _nodes.dead_nodes(self._ray)
            for place in self._places:
                self._start(place, dead_nodes)
            while (turn := self._next_turn()) is not None:
                turn()
        except BaseException as error:  # whatever it is, the learner is to hear of it
            self.error = error
        finally:
            self._head.close()
            with suppress(Exception):
                self._end()
            self.done.put(None)
            self._up.set()

    def _next_turn(self) -> Callable[[], None] | None:
        while True:
            first = min(self._places, key=lambda place: place.deadline)
            try:
                return self._turns.get(timeout=max(min(first.deadline - time.monotonic(), _LOOK), 0))
            except queue.Empty:
                self._check_connected()
                if time.monotonic() >= first.deadline:
                    return partial(self._give_up, first)

    def _start(self, place: _Place, dead_nodes: set[str]) -> None:
        place.incarnation += 1
        place.version = -1
        place.dead_nodes = dead_nodes
        place.node = "no node yet"
        wanted = self._terms.options
        runtime_env = _runtime_env.split(wanted.runtime_env or {})[1]
        if not wanted.of_actor().get("GPU"):
            runtime_env["env_vars"] = {"JAX_PLATFORMS": "cpu", **runtime_env.get("env_vars", {})}
        options = self._placement.actor_options(place.number, wanted.workers_per_actor, runtime_env)
        place.actor = self._ray.remote(**options)(Actor).remote()
        place.deadline = _deadline(self._terms.start_timeout)
        # Retried: until Ray knows that a node is dead, it says "unavailable", and misses no node.
        self._ask(place, "identify", self._meet, options={"max_task_retries": -1})

    def _meet(self, place: _Place, node: str) -> None:
        place.node = node
        self._ask(place, "start", self._welcome, self._program, place.number, place.incarnation)

    def _welcome(self, place: _Place, failure: Raised | None) -> None:
        if failure is not None:
            raise _to_error(failure, place, "when it started")
        place.deadline = float("inf")
        self._num_started += 1
        if self._num_started >= len(self._places):
            self._up.set()
        self._feed(place)

    def _feed(self, place: _Place) -> None:
        """Has an actor make the next rollout, with the newest weights, unless it is busy or far ahead."""
        if place.asked or place.unread >= self._terms.in_flight:
            return
        place.version, weights = self.weights
        place.deadline = _deadline(self._terms.rollout_timeout)
        self._ask(place, "rollout", self._receive, place.version, weights, place.index)

    def _receive(self, place: _Place, came: Played | Raised) -> None:
        if isinstance(came, Raised):
            raise _to_error(came, place, f"in rollout {place.index}")
        place.deadline = float("inf")
        self.done.put(Done(came, place.number, place.index, place.version))
        place.index += 1
        place.unread += 1
        self._feed(place)

    def _release(self, place: _Place) -> None:
        place.unread -= 1
        self._feed(place)

    def _give_up(self, place: _Place) -> None:
        if place.asked == "rollout":
            why = f"was not done with rollout {place.index} within rollout_timeout"
            self._lose(place, f"{why}, {self._terms.rollout_timeout} s")
            return
        why = f"was not ready within start_timeout, {self._terms.start_timeout} s"
        if place.asked == "identify":
            needs, free = self._terms.options.of_actor(), self._ray.available_resources()
            why += f": Ray has not started it; it needs {needs}, and free are {free}"
        self._lose(place, why)

    def _lose(self, place: _Place, why: str) -> None:
        """Replaces an actor that can't be used any more; raises if that must not be."""
        self._check_connected()
        self._kill(place)
        dead_nodes = _nodes.dead_nodes(self._ray)
        # Ray gives out a dead node until it misses it. That is no further fault.
        if place.asked != "identify" or dead_nodes <= place.dead_nodes:
            where = f"actor {place.number} on {place.node}"
            error = ActorDiedError(f"{where} {why}", actor=place.number, node=place.node)
            if not self._up.is_set():
                raise error
            if gone := self._placement.lost():
                error.args = (f"{error}\n{gone}",)
                raise error
            self.budget.spend(place.number, error, ", and starts anew")
        self._start(place, dead_nodes)

    def _check_connected(self) -> None:
        """Raises if Ray was shut down, as most calls would start another one then."""
        if not self._ray.is_initialized():
            self._fail("was lost: Ray was shut down")

    def _lose_head(self, why: str) -> None:
        self._turns.put(partial(self._fail, why))

    def _fail(self, why: str) -> None:
        """Raises what has happened to all actors."""
        node = self._places[0].node  # as good as any
        raise ActorDiedError(f"actor 0 on {node} {why}", actor=0, node=node)

    def _ask(
        self,
        place: _Place,
        method: str,
        reply: Callable[[_Place, Any], None],
        *args: Any,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Calls an actor; `reply` gets its answer in a turn of this thread."""
        incarnation = place.incarnation

        def answer(future: Future[Any]) -> None:
            if place.incarnation != incarnation:  # the late word of one that was lost
                return
            if (error := future.exception()) is not None:
                self._lose(place, _nodes.describe_loss(error))
                return
            place.asked = ""
            reply(place, future.result())

        place.asked = method
        call = getattr(place.actor, method).options(**(options or {}))
        future: Future[Any] = call.remote(*args).future()
        future.add_done_callback(lambda future: self._turns.put(partial(answer, future)))

    def _end(self) -> None:
        if self._head.lost or not self._ray.is_initialized():
            return
        if self.error is None:
            asked = [place.actor.close.remote() for place in self._places if place.actor is not None]
            self._ray.wait(asked, num_returns=len(asked), timeout=_PATIENCE)
        for place in self._places:
            self._kill(place)
        self._placement.close()

    def _kill(self, place: _Place) -> None:
        if place.actor is not None:
            with suppress(Exception):
                self._ray.kill(place.actor, no_restart=True)


def _deadline(seconds: float | None) -> float:
    return float("inf") if seconds is None else time.monotonic() + seconds


def _to_error(said: Raised, place: _Place, when: str) -> RolloutError:
    error = RolloutError(
        f"actor {place.number} on {place.node} raised {said.kind} {when}: {said.message}\n\n"
        f"The actor's own traceback:\n{said.traceback}",
        actor=place.number,
        node=place.node,
        remote_traceback=said.traceback,
    )
    if said.pickled is not None:
        with suppress(Exception):
            error.__cause__ = pickle.loads(said.pickled)
    return error
