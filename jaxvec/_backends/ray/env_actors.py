"""`jaxvec.Ray`: the envs of a pool in actors of a Ray cluster.

RayWorkers            one call per actor and step: rows of actions, and rows of time steps in return
  -> EnvActor         on some node, in a process that Ray starts, and starts again; it needs no JAX
    -> ProcessWorkers local workers of the actor, which recover from faults of their envs
"""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec import __version__, _errors
from jaxvec._arguments import Options
from jaxvec._backends.ray.cluster import connect, describe_node
from jaxvec._engine.engine import Engine, EngineConfig, PyEngine
from jaxvec._engine.move import Verb
from jaxvec._envs.constructors import Description, merge
from jaxvec._envs.slice import Arguments, EnvSettings, Slice
from jaxvec._leaves import KeyPath
from jaxvec._memory.segment import Arrays, Layout, index_of, make_layout, private_segment, split_evenly
from jaxvec._options import LimitName, PoolConfig, check_count, reject
from jaxvec._spec import PoolSpec
from jaxvec._tracing import Loss, Trace
from jaxvec._util import dumps
from jaxvec._workers.backend import Backend
from jaxvec._workers.base import Check, WaitLimits, WorkerGroup
from jaxvec._workers.budget import Budget
from jaxvec._workers.diagnosis import name_envs, take_losses
from jaxvec._workers.process import Inheritance, LocalProcesses, ProcessWorkers
from jaxvec._workers.protocol import WorkerRecipe, pickle_given

_CHECK_INTERVAL = 0.05  # seconds between checks for Ctrl-C and for a closed pool
_REPLY_GRACE = 10.0  # seconds beyond the time that the workers may take, after which an actor hangs


@dataclass(frozen=True)
class Ray(Backend):
    """Envs in actors of a Ray cluster, for `make(backend=...)`; `"ray"` is short for `Ray()`.

    Each actor holds some of the pool's workers, and answers one call per step, which takes milliseconds. So
    use few actors with many envs, and envs with steps of 5 ms or more. The cluster is the one that this
    process is connected to, or that `ray.init()` finds.

    Attributes:
        num_actors: Number of actors of each pool. They share its workers evenly.
        options: Options of the actors, as for Ray's `.options(...)`: `num_cpus`, `resources`, `max_restarts`,
            `scheduling_strategy`, `runtime_env`, and others. By default, an actor reserves a CPU per worker,
            and Ray starts a lost one again if `on_fault` allows it.

    Example:
        ```python
        cluster = jaxvec.Ray(num_actors=4, options={"num_cpus": 16, "scheduling_strategy": "SPREAD"})
        envs = jaxvec.make("CartPole-v1", 256, num_workers=64, backend=cluster)
        ```
    """

    num_actors: int = 1
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        check_count("num_actors", self.num_actors, 1)

    def check(self, config: PoolConfig) -> None:
        """Raises `ValueError` for an option that needs workers on this machine."""
        rejected: dict[str, Any] = {"states": config.states.max, "spare_envs": config.spare_envs}
        rejected |= {f"Workers({name}=...)": getattr(config.workers, name) for name in ("python", "recycle")}
        reject('does not go with backend="ray"; it needs workers on this machine', rejected)

    def num_workers(self, num_instances: int, timeout: float | None) -> int:
        return min(num_instances, self.num_actors * max(int(self.options.get("num_cpus", 1)), 1))

    def start(self, recipe: WorkerRecipe, *, learn_info: bool) -> WorkerGroup:
        if len(recipe.slices) < self.num_actors:
            raise ValueError(f"num_actors is {self.num_actors}, but there are {len(recipe.slices)} workers")
        return RayWorkers(connect(), recipe, self, learn_info=learn_info)


# --- On a node -------------------------------------------------------------------------------------------


class EnvActor:
    """The class of the Ray actors. Its calls run one at a time, in order, and raise the errors of workers."""

    _workers: ProcessWorkers | None = None
    _arrays: Arrays  # of a segment for all envs of the pool, of which the actor uses the rows of its own

    def __init__(self, recipe: bytes, program_path: list[str], version: str) -> None:
        self._pickled = recipe
        self._version = version
        sys.path += [folder for folder in program_path if folder not in sys.path]

    def build(self, learn_info: bool) -> bytes:
        """Starts the workers, which build their envs. Returns a pickled `Description`."""
        if self._version != __version__:
            raise ImportError(f"the node has jaxvec {__version__}, but the pool's process {self._version}")
        self._recipe: WorkerRecipe = pickle.loads(self._pickled)
        workers = self._workers = LocalProcesses().start(self._recipe, learn_info=learn_info)
        return dumps(workers.description)

    def attach(self, spec: PoolSpec, inherited: Inheritance | None) -> str:
        """Makes the workers serve. In place of lost ones, they are built, and inherit. Returns the node."""
        if inherited is not None:
            self.close(0)
            self.build(learn_info=False)
        self._spec = spec
        layout = make_layout(spec, len(self._recipe.slices))
        self._arrays = self._serving().attach(layout, spec, inherited)
        return describe_node()

    def move(self, code: int, slots: NDArray[Any], columns: Any, options: Options) -> tuple[Any, ...]:
        """Steps or resets `k` envs; returns the rows `[k, ...]`, and the counters of all workers."""
        workers = self._serving()
        verb = Verb(code)
        limit: LimitName = "step"
        if verb is Verb.RESET:
            limit = "reset"
            workers.set_options(options)
            if workers.env_settings is not None:
                workers.env_settings.reset(slots, options)
        index = index_of(slots)
        for path, column in zip(_input_paths(self._spec, verb), columns, strict=True):
            self._arrays[path][index] = column
        workers.send(verb, slots)
        limits = WaitLimits(verb.word, self._recipe.config.timeouts, limit, lambda: None)
        workers.wait(slots, len(slots), limits)
        rows = [self._arrays[path][index] for path in _result_paths(self._spec)]
        return rows, self._arrays["stats",], [*workers.restarts]

    def request(self, pickled: bytes, limit: LimitName) -> list[Any]:
        """Requests a pickled method of the slices, with the arguments of each, or `None` to skip it."""
        method, arguments = pickle.loads(pickled)
        settings = self._serving().env_settings
        for values in filter(None, arguments.values()):
            if settings is not None and method == Slice.set_attr:
                settings.set_attr(np.array(values[0]), *values[1:])
            elif settings is not None and method in (Slice.call, Slice.map):
                settings.call(np.array(values[0]))
        return self._serving().request(method, lambda *slots: arguments[slots], limit=limit)

    def close(self, timeout: float | None) -> None:
        if self._workers is not None:
            self._workers.close(timeout)

    def _serving(self) -> ProcessWorkers:
        if self._workers is None:
            raise ConnectionResetError("Ray has started the process of the actor again")
        return self._workers


def _input_paths(spec: PoolSpec, verb: Verb) -> list[KeyPath]:
    options = [leaf.path for leaf in spec.option_leaves]
    if verb is Verb.RESET:
        return [("seed",), *options]
    return [*(leaf.path for leaf in spec.action_leaves), *options]


def _result_paths(spec: PoolSpec) -> list[KeyPath]:
    """Returns the paths of the rows that workers write, and from which their successors continue."""
    return [*(leaf.path for leaf in spec.timestep_leaves), ("raw_info",), ("last_seed",), ("rebuilds",)]


# --- In the program --------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Part:
    """The workers and envs of one actor."""

    number: int
    workers: range
    slots: range
    actor: Any
    node: str = "a node that Ray has not chosen yet"

    @property
    def name(self) -> str:
        return f"actor {self.number} ({name_envs(self.slots)}) on {self.node}"

    def died_error(self, why: BaseException) -> _errors.WorkerDiedError:
        lines = " ".join(line.strip() for line in str(why).splitlines() if line.strip())
        text = f"{self.name} was lost: {type(why).__name__}: {lines[:2000]}"
        env_ids = tuple(self.slots)
        return _errors.WorkerDiedError(text, worker=self.workers[0], env_ids=env_ids, exitcode=None)


class RayWorkers(WorkerGroup):
    """The envs of one pool in actors of a Ray cluster."""

    _arrays: Arrays  # these two from `attach` on
    _spec: PoolSpec | None = None
    _options: Options = None  # of the next resets

    def __init__(self, ray: Any, recipe: WorkerRecipe, backend: Ray, *, learn_info: bool) -> None:
        self._ray = ray
        self._recipe = recipe
        num_workers = len(recipe.slices)
        policy = recipe.config.restart
        self._budget = Budget(policy, backend.num_actors, who="actor")
        self.restarts = [0] * num_workers
        self.incarnations = [0] * num_workers
        self.last_errors = [None] * num_workers
        self.env_settings = None if policy is None else EnvSettings(dumps)
        # Arguments of `EnvActor.move`, with its actor, by Ray's reference to the answer. `_lock` is held to
        # change it, and to write rows.
        self._moves: dict[Any, tuple[_Part, tuple[Any, ...]]] = {}
        self._lock = threading.RLock()
        self._parts: list[_Part] = []
        self._ending = False  # set once by `close` or `kill`, in any thread
        groups = [range(*group) for group in split_evenly(num_workers, backend.num_actors)]
        defaults = {"num_cpus": max(map(len, groups)), "max_restarts": 0 if policy is None else -1}
        self._actor_options = defaults | dict(backend.options)
        path = [os.path.abspath(folder) for folder in sys.path]  # "" is the working directory
        try:
            actor_class = ray.remote(**self._actor_options)(EnvActor)
            for number, workers in enumerate(groups):
                actor = actor_class.remote(_pickle_recipe(recipe, workers), path, __version__)
                slots = range(recipe.slices[workers[0]][0], recipe.slices[workers[-1]][1])
                self._parts.append(_Part(number, workers, slots, actor))
            built = [part.actor.build.remote(learn_info) for part in self._parts]
            self.description = self._merge(self._answers(built))
        except BaseException:
            self.close(timeout=0)
            raise

    def _merge(self, pickled: list[bytes]) -> Description:
        descriptions = [*map(pickle.loads, pickled)]
        spaces = descriptions[0].spaces
        for part, description in zip(self._parts, descriptions, strict=True):
            spaces = merge(spaces, description.spaces, part.slots[0], equal=self._recipe.equal_spaces)
            if isinstance(spaces, str):
                raise _errors.SpaceMismatchError(spaces)
        return replace(descriptions[0], spaces=spaces)

    def attach(self, layout: Layout, spec: PoolSpec) -> Arrays:
        self._arrays = private_segment(layout)
        self._paths = _result_paths(spec)
        self._is_pending = np.zeros(spec.num_envs, np.bool_)  # slots that their actors have to complete
        self._completed_at = np.zeros(spec.num_envs, np.int64)
        self._order = itertools.count(1)
        nodes = self._answers([part.actor.attach.remote(spec, None) for part in self._parts])
        for part, node in zip(self._parts, nodes, strict=True):
            part.node = node
        self._spec = spec
        return self._arrays

    def open_engine(self, config: EngineConfig) -> Engine:
        return PyEngine(config)

    def send(self, verb: Verb, slots: NDArray[Any]) -> None:
        assert self._spec is not None
        paths = _input_paths(self._spec, verb)
        options = self._options if verb is Verb.RESET else None
        for part in self._parts:
            own = slots[(part.slots.start <= slots) & (slots < part.slots.stop)].astype(np.int64)
            if own.size:
                columns = [self._arrays[path][own] for path in paths]
                with self._lock:
                    self._is_pending[own] = True
                    self._move(part, (int(verb), own, columns, options))

    def _move(self, part: _Part, arguments: tuple[Any, ...]) -> None:
        self._moves[part.actor.move.remote(*arguments)] = part, arguments

    def any_resetting(self, slots: NDArray[Any]) -> bool:
        moves = [arguments for _, arguments in [*self._moves.values()]]
        return any(code == Verb.RESET and np.isin(own, slots).any() for code, own, *_ in moves)

    def wait(self, slots: NDArray[Any], count: int, limits: WaitLimits) -> None:
        while np.count_nonzero(~self._is_pending[slots]) < count:
            limits.check_given_up()
            with self._lock:
                # Other threads may wait for other moves, so it waits for all moves only if these are its own.
                is_alone = count == len(slots) == np.count_nonzero(self._is_pending)
                refs = [*self._moves]  # empty if another thread has just completed them
                for ref in self._ready(refs, limits, needs_all=is_alone) if refs else ():
                    if ref in self._moves:  # otherwise, its actor has lost it
                        self._complete(ref, limits)

    def _complete(self, ref: Any, limits: WaitLimits) -> None:
        part, (_, slots, *_) = self._moves[ref]
        answer = self._get(part, ref)
        if isinstance(answer, _errors.WorkerDiedError):
            self._restart(part, answer, limits.check)
            return
        del self._moves[ref]
        rows, stats, restarts = answer
        for path, column in zip(self._paths, rows, strict=True):
            self._arrays[path][index_of(slots)] = column
        workers = slice(part.workers.start, part.workers.stop)
        self._arrays["stats",][workers] = stats
        self.restarts[workers] = restarts
        self._is_pending[slots] = False
        self._completed_at[slots] = next(self._order)

    def first_completed(self, slots: NDArray[Any], count: int) -> NDArray[Any]:
        completed = slots[~self._is_pending[slots]]
        return completed[self._completed_at[completed].argsort(kind="stable")[:count]]

    def set_options(self, options: Options) -> None:
        """Keeps the options for the next resets, which take them along."""
        _pickle("reset", options)  # raises if that is not possible
        self._options = options

    def request(
        self,
        method: Callable[..., Any],
        arguments: Arguments,
        *,
        limit: LimitName = "step",
        check: Check = lambda: None,
    ) -> list[Any]:
        name = method.__name__
        messages: list[bytes | None] = []
        for part in self._parts:
            slices = self._recipe.slices[part.workers.start : part.workers.stop]
            by_slice = {slots: arguments(*slots) for slots in slices}
            skips = all(values is None for values in by_slice.values())
            messages.append(None if skips else _pickle(name, (method, by_slice)))
        refs = [
            None if message is None else part.actor.request.remote(message, limit)
            for part, message in zip(self._parts, messages, strict=True)
        ]
        answers = self._answers(refs, WaitLimits(name, self._recipe.config.timeouts, limit, check))
        skipped = [[None] * len(part.workers) for part in self._parts]
        chosen = [answer or none for answer, none in zip(answers, skipped, strict=True)]
        return [*itertools.chain.from_iterable(chosen)]

    # --- Answers, and lost actors --------------------------------------------------------------------------

    def _answers(self, refs: list[Any], limits: WaitLimits | None = None) -> list[Any]:
        """Waits for an answer of each actor. The answer of a lost one is its error, for each worker."""
        limits = limits or WaitLimits("start", self._recipe.config.timeouts, "start", lambda: None)
        answers: list[Any] = []
        for part, ref in zip(self._parts, refs, strict=True):
            before = self.incarnations[part.workers.start]
            while ref is not None and not self._ready([ref], limits):
                pass
            answer = None if ref is None else self._get(part, ref)
            if isinstance(answer, _errors.WorkerDiedError):
                with self._lock:
                    if self.incarnations[part.workers.start] == before:
                        self._restart(part, answer, limits.check)
                answer = [answer] * len(part.workers)
            answers.append(answer)
        return answers

    def _ready(self, refs: list[Any], limits: WaitLimits, *, needs_all: bool = False) -> list[Any]:
        """Returns the answers that are there, after a moment at most."""
        limits.check()
        if self._ending:
            raise _errors.PoolClosedError("the pool was closed during a call of its actors")
        if not self._ray.is_initialized():  # otherwise, Ray would start another cluster
            raise self._parts[0].died_error(ConnectionResetError("Ray was shut down"))
        # The workers have their limits for each env, and may be replaced. Beyond, an actor does not run.
        start = self._recipe.config.timeouts.start
        if limits.timeout is not None and start is not None:
            patience = limits.timeout * len(self._parts[-1].slots) + start + _REPLY_GRACE
            if time.monotonic() > limits.start + patience:
                raise _errors.EnvTimeoutError(
                    f"{limits.name}: actors of {self._actor_options} have not answered for {patience:g} s; "
                    "`ray status` shows whether their nodes run, and which resources are free",
                    env_ids=tuple(self._parts[0].slots),
                )
        count = len(refs) if needs_all else 1
        return self._ray.wait(refs, num_returns=count, timeout=_CHECK_INTERVAL)[0]

    def _get(self, part: _Part, ref: Any) -> Any:
        """Returns an answer, or an error if the actor was lost; raises the errors of its workers."""
        try:
            return self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, _errors.JaxvecError):
                cause.args = (f"{part.name}: {cause}",)
                raise cause from None
            if not isinstance(cause, ConnectionResetError):
                raise part.died_error(cause) from cause
            return part.died_error(cause)
        except self._ray.exceptions.RayError as error:
            return part.died_error(error)

    def _restart(self, part: _Part, error: _errors.WorkerDiedError, check: Check) -> None:
        """Builds lost envs anew, once Ray has started their actor again, or raises `error`.

        Their next rows end the running episodes, as after the restart of a local worker.
        """
        if self._spec is None:
            raise error
        self._budget.spend(part.number, error, take_losses(self.env_settings, part.slots))
        for worker in part.workers:
            self.restarts[worker] += 1
            self.incarnations[worker] += 1
            self.last_errors[worker] = error
        workers = slice(part.workers.start, part.workers.stop)
        inherited = Inheritance(
            {path: self._arrays[path][part.slots.start : part.slots.stop] for path in self._paths},
            self._arrays["stats",][workers],
            self.restarts[workers],
            self.env_settings,
        )
        # Ray repeats the call until its process is there.
        attach = part.actor.attach.options(max_task_retries=-1).remote(self._spec, inherited)
        limits = WaitLimits("restart", self._recipe.config.timeouts, "start", check)
        while not self._ready([attach], limits):
            pass
        answer = self._get(part, attach)
        if isinstance(answer, _errors.WorkerDiedError):  # Ray does not start it again
            raise error from answer
        part.node = answer
        for ref, (owner, arguments) in [*self._moves.items()]:
            if owner is part:
                del self._moves[ref]
                self._move(part, arguments)

    def start_trace(self, capacity: int) -> None:
        """Does nothing: a trace has the spans of this process, and a remark about the workers."""

    def stop_trace(self, *, hurry: bool) -> list[Trace]:
        remark = Loss("workers on a Ray cluster record no spans", time.monotonic_ns())
        return [Trace([], losses=(remark,))] * len(self.restarts)

    def close(self, timeout: float | None, *, tell: bool = True) -> None:
        self._ending = True
        if self._ray.is_initialized() and timeout != 0:
            refs = [part.actor.close.remote(timeout) for part in self._parts]
            self._ray.wait(refs, num_returns=len(refs), timeout=timeout)
        self.kill()

    def kill(self) -> None:
        self._ending = True
        for part in self._parts if self._ray.is_initialized() else ():
            self._ray.kill(part.actor, no_restart=True)


def _pickle_recipe(recipe: WorkerRecipe, workers: range) -> bytes:
    """Pickles the recipe of some workers, without the options that only this process needs."""
    slices = recipe.slices[workers.start : workers.stop]
    size = recipe.config.envs_per_instance or 1
    start, stop = slices[0][0] // size, slices[-1][1] // size
    own = recipe.env_fns[start:stop]
    unused = {"info": None, "max_sizes": None, "reset_options": None, "env_configs": None}
    config = replace(recipe.config, backend="process", **unused)
    part = replace(recipe, env_fns=[own[0]] * start + [*own], slices=slices, config=config)
    return _pickle(f"the constructor of env {slices[0][0]}", part)


def _pickle(what: str, value: Any) -> bytes:
    def refuse(error: Exception) -> _errors.NotPicklableError:
        return _errors.NotPicklableError(
            f"{what}: an argument can't be pickled, and so not be sent to actors: {error}"
        )

    return pickle_given(value, refuse, dumps)
