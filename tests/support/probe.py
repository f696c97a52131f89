"""The private names of jaxvec that tests use: only this module and the tests in tests/unit import them.

The functions give access to private state of pools, engines, workers and slices. Each takes a `VectorEnv` or
its `Pool`, unless its name says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import psutil

import jaxvec
from jaxvec import _errors, _native, _settings, _stats, _tracing, _util
from jaxvec._arguments import check_action
from jaxvec._backends.other_python import foreign_env
from jaxvec._engine import choice, dispatch, native_engine
from jaxvec._engine.channel import WAKE
from jaxvec._engine.engine import Engine, PendingEnvs
from jaxvec._engine.move import Verb
from jaxvec._engine.native_engine import CEngine
from jaxvec._envs import failures
from jaxvec._envs.episodes import ENDED, IDLE, LOST, MARKED, PLAYING, UNRESET, EpisodeTracker
from jaxvec._extensions.states.env_states import StatefulEnv
from jaxvec._extensions.states.proof import prove
from jaxvec._extensions.states.slot_states import SlotState, pack, unpack
from jaxvec._extensions.states.snapshots.snapshot import NODES, difference
from jaxvec._extensions.timeline import build as build_timeline
from jaxvec._leaves import as_jax
from jaxvec._memory import pinned
from jaxvec._memory import segment as segment_module
from jaxvec._memory.segment import Marks, split_evenly
from jaxvec._options import PoolConfig
from jaxvec._pool import pool as pool_module
from jaxvec._pool import registry
from jaxvec._pool.pool import Pool
from jaxvec._results import LastObsTimeStep
from jaxvec._spec import Autoreset, EnvSpaces, make_spec
from jaxvec._stats import WorkerStats
from jaxvec._tracing import Span, Trace
from jaxvec._util import usable_cores
from jaxvec._vector_env import pool_of
from jaxvec._workers import budget, connections, fork, forkserver, lifeline, output, process, spawn, stacks
from jaxvec._workers import supervisor as supervisor_module
from jaxvec._workers.fair_locks import FairLocks
from jaxvec._workers.interpreter import Interpreter
from jaxvec._workers.supervisor import Supervisor
from jaxvec.callbacks import _call, _ffi, _io_callback, _operands, _primitive
from jaxvec.callbacks._functions import bind_reset, fresh_handle
from jaxvec.callbacks._packing import Packing
from jaxvec.cli import _main
from jaxvec.cli._main import main
from jaxvec.compat import _spaces


def _pool(envs: jaxvec.VectorEnv | Pool) -> Pool:
    return envs if isinstance(envs, Pool) else pool_of(envs)


# --- The pool -------------------------------------------------------------------------------------------


def engine(envs: jaxvec.VectorEnv | Pool) -> Engine:
    return _pool(envs).engine


def num_moves(envs: jaxvec.VectorEnv | Pool, generation: Any = None) -> list[int]:
    """Returns the number of moves of each env so far or, given its generation, until a handle was made."""
    if generation is None:
        generation = engine(envs).generation
    return (generation - engine(envs).first_generation).tolist()


def pending_envs(envs: jaxvec.VectorEnv | Pool) -> PendingEnvs:
    return _pool(envs).pending_envs


def num_served(envs: jaxvec.VectorEnv | Pool) -> int:
    """Returns how many calls of compiled programs succeeded."""
    return engine(envs).num_served


def segment(envs: jaxvec.VectorEnv | Pool) -> Any:
    """Returns the bytes of the shared memory."""
    return _pool(envs)._segment


def results(envs: jaxvec.VectorEnv | Pool) -> Any:
    """Returns the arrays of the time step in the segment."""
    return _pool(envs).views._results


def set_timeouts(envs: jaxvec.VectorEnv | Pool, *seconds: float) -> None:
    """Replaces the timeouts of start, reset and step of a pool that runs."""
    _pool(envs)._timeouts = jaxvec.Timeouts(*seconds)


# --- Its workers ----------------------------------------------------------------------------------------


def workers(envs: jaxvec.VectorEnv | Pool) -> Any:
    return _pool(envs).workers


def supervisor(envs: jaxvec.VectorEnv | Pool) -> Supervisor:
    return workers(envs).supervisor


def processes(envs: jaxvec.VectorEnv | Pool) -> list[psutil.Process]:
    """Returns the processes of the workers, as they are now."""
    return [psutil.Process(process.pid) for process in supervisor(envs).connections.processes]


def pids(envs: jaxvec.VectorEnv | Pool) -> list[int]:
    """Returns the process ids of the workers, also of those that have ended."""
    return [process.pid for process in supervisor(envs).connections.processes]


def wrap_launch(envs: jaxvec.VectorEnv | Pool, wrapper: Callable[..., Any]) -> None:
    """Replaces the launch of workers by `wrapper(launch, worker)`."""
    launcher = supervisor(envs).connections._launcher
    launcher.launch = partial(wrapper, launcher.launch)


def array(envs: jaxvec.VectorEnv | Pool, name: str) -> Any:
    """Returns a column of marks in the segment, such as `running` or `completed`."""
    return workers(envs)._arrays[name,]


def unfinished(envs: jaxvec.VectorEnv | Pool) -> list[int]:
    """Returns the slots whose envs have not completed their latest request."""
    return workers(envs)._dispatch.unfinished().tolist()


def set_start_timeout(envs: jaxvec.VectorEnv | Pool, seconds: float) -> None:
    """Replaces the time that workers which take another's place have to start."""
    supervisor(envs).deadlines.start_timeout = seconds


def local_slice(envs: jaxvec.VectorEnv | Pool) -> Any:
    """Returns the slice of a serial pool."""
    return workers(envs)._slice


def steps_in_process(envs: jaxvec.VectorEnv | Pool) -> list[int]:
    """Returns the steps in the episodes of a serial pool's `CountingEnv`s, even if the pool is broken."""
    return [env.unwrapped.steps for env in workers(envs)._envs]


# --- Slices and compatibility APIs ----------------------------------------------------------------------


def slice_infos(env_slice: Any) -> Any:
    """Returns the raw infos that an `EnvSlice` keeps."""
    return env_slice.rows.infos


def committed_rows(env_slice: Any) -> Any:
    """Returns the copies of delivered results that an `EnvSlice` keeps, by leaf."""
    return env_slice._delivered._rows


def slots(env_slice: Any) -> Any:
    """Returns the `SlotEnvs` of an `EnvSlice`."""
    return env_slice.slots


def fork_servers() -> set[int]:
    """Returns the process ids of this program's fork servers."""
    return {server.pid for server in fork._servers.values()}
