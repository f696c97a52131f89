"""The code in an actor of `jaxvec.Rollouts`: a local pool, and the user's rollout function, compiled for it.

A pytree travels as a list of NumPy arrays, which Ray does not copy again, and its structure. cloudpickle
pickles the structure, so that it may contain classes of a script or a notebook.
"""

from __future__ import annotations

import importlib
import pickle
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxvec import __version__
from jaxvec._arguments import derive_seeds
from jaxvec._util import dumps
from jaxvec._vector_env import VectorEnv, pool_of
from jaxvec.callbacks._functions import reset, restore, save
from jaxvec.callbacks._make import make

Leaves: TypeAlias = list[NDArray[Any]]


class RolloutProgram(NamedTuple):
    """The definition of the rollouts, equal for all actors; see `Rollouts`."""

    rollout: Callable[..., Any]
    env: Any
    num_envs: int
    seed: int
    options: Mapping[str, Any]  # of `make`
    save_states: bool
    cache: str  # folder of compiled programs, which `close` removes
    jaxvec: str  # the learner's version


@dataclass(frozen=True)
class PackedRollout:
    """A finished rollout on its way to `Rollouts.get`; see `Rollout`."""

    structure: bytes
    leaves: Leaves
    env_steps: int
    pool_restarts: int  # during this rollout
    actor: int
    index: int
    version: int
    snapshot: bytes | None


class RemoteError(NamedTuple):
    """An exception in an actor, as text, and pickled if possible."""

    name: str
    message: str
    traceback: str
    pickled: bytes | None
    pool_restarts: int = 0  # during the rollout that failed


class RolloutActor:
    """The class of the Ray actors. Its calls run one at a time, in order."""

    def __init__(self, jax_options: Mapping[str, Any], learner_path: Sequence[str]) -> None:
        """Prepares the process, before anything that is unpickled may import a module or use JAX."""
        # Where both have the same folders, modules are found in the learner's order. What only this process
        # has comes first, such as the working directory of a runtime environment.
        own_path = [entry for entry in sys.path if entry not in learner_path]
        sys.path[:] = [*own_path, *learner_path]
        for name, value in jax_options.items():
            jax.config.update(name, value)
        self._program: RolloutProgram | None = None
        self._envs: VectorEnv | None = None

    def identify(self) -> str:
        ray: Any = importlib.import_module("ray")
        return f"node {ray.util.get_node_ip_address()} ({ray.get_runtime_context().get_node_id()[:12]})"

    def start(
        self, pickled: bytes, number: int, incarnation: int, index: int, snapshot: bytes | None
    ) -> RemoteError | None:
        """Makes the pool of a pickled `RolloutProgram` anew, and resets it or restores it from a snapshot.

        `incarnation` counts replacements, from 0; `index` is that of the next rollout.
        """
        try:
            program = self._load(pickled)
            if self._envs is not None:
                self._envs.close()
            self._envs = make(program.env, program.num_envs, **program.options)
            seed = program.seed + number * program.num_envs
            if incarnation or index:  # the predecessor's seeds would repeat its episodes
                seed = derive_seeds(seed, incarnation, index)
            self._handle, self._timestep = reset(self._envs, seed=seed)
            if snapshot is not None:
                states, carry = pickle.loads(snapshot)
                self._handle, _ = restore(self._handle, self._envs.unpack_states(states))
                self._timestep = jax.device_put(unpack(*carry))
            self._number = number
            self._saves_states = program.save_states
            self._snapshot(self._envs)  # fails now, rather than after a rollout, if envs have no states
            self._key = self._fold_in(jax.random.key(program.seed), np.uint32(number))
            self._version = -1
            self._total = pool_of(self._envs).stats(processes=False).total
        except Exception as error:
            return _pack_error(error)
        return None

    def _load(self, pickled: bytes) -> RolloutProgram:
        if self._program is None:  # otherwise, JAX would compile it again
            program: RolloutProgram = cloudpickle.loads(pickled)
            if program.jaxvec != __version__:
                raise ImportError(
                    f"jaxvec has version {__version__} on this node, but {program.jaxvec} in the learner's "
                    "process; install the same version"
                )
            self._compiled = jax.jit(program.rollout)
            self._fold_in = jax.jit(jax.random.fold_in)  # takes a tenth of the time of separate operations
            self._program = program
        return self._program

    def run(
        self, version: int, weights: tuple[bytes, Leaves], index: int, count: int
    ) -> list[PackedRollout | RemoteError]:
        """Runs `count` rollouts, or fewer if one fails. `weights` are only unpacked if they are new."""
        if self._envs is None:
            raise RuntimeError("Ray has started the process again")
        results: list[PackedRollout | RemoteError] = []
        try:
            if version != self._version:
                self._params = jax.device_put(unpack(*weights))
                self._version = version
            while len(results) < count:
                results.append(self._run_one(self._envs, index + len(results)))
        except Exception as error:
            # The pool's error, if there is one; JAX raises an error of its own with the same text.
            state = pool_of(self._envs).state
            failure = _pack_error(state.take_error() or state.broken_by or error)
            results.append(failure._replace(pool_restarts=self._count_new(self._envs)[1]))
        return results

    def _run_one(self, envs: VectorEnv, index: int) -> PackedRollout:
        key = self._fold_in(self._key, np.uint32(index))
        self._handle, self._timestep, trajectory = self._compiled(
            self._params, self._handle, self._timestep, key
        )
        structure, leaves = pack(trajectory)
        snapshot = self._snapshot(envs)
        counts = self._count_new(envs)
        return PackedRollout(structure, leaves, *counts, self._number, index, self._version, snapshot)

    def _count_new(self, envs: VectorEnv) -> tuple[int, int]:
        """Returns the numbers of env steps and of restarts since the last call."""
        before = self._total
        self._total = pool_of(envs).stats(processes=False).total
        return self._total.steps - before.steps, self._total.restarts - before.restarts

    def _snapshot(self, envs: VectorEnv) -> bytes | None:
        """Returns the states of the envs and the argument of the next rollout, if they are to be saved."""
        if not self._saves_states:
            return None
        self._handle, state = save(self._handle)
        # Ray copies bytes; an array would keep the whole rollout in its object store.
        return dumps((envs.pack_states(state).tobytes(), pack(self._timestep)))

    def close(self) -> None:
        """Closes the envs, and removes the compiled programs."""
        if self._program is not None and self._envs is not None:
            self._envs.close()
            shutil.rmtree(self._program.cache, ignore_errors=True)


def pack(tree: Any) -> tuple[bytes, Leaves]:
    """Waits for a pytree of arrays; returns its pickled structure and its leaves."""
    check_keys(tree)
    leaves, structure = jax.tree.flatten(tree)
    return _dump(structure), jax.device_get(leaves)


def check_keys(tree: Any) -> None:
    """Raises `TypeError` if a pytree contains JAX keys, which NumPy can't hold."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(
                "params and trajectories can't contain JAX keys, nor, with save_states, the second result of "
                "the rollout; send jax.random.key_data(key), and call "
                "jax.random.wrap_key_data at the other end"
            )


def unpack(structure: bytes, leaves: Leaves) -> Any:
    return jax.tree.unflatten(_load(structure), leaves)


@lru_cache(maxsize=16)
def _dump(structure: Any) -> bytes:
    return dumps(jax.tree.unflatten(structure, range(structure.num_leaves)))


@lru_cache(maxsize=16)
def _load(structure: bytes) -> Any:
    return jax.tree.structure(cloudpickle.loads(structure))


def _pack_error(error: BaseException) -> RemoteError:
    pickled = None
    with suppress(Exception):
        pickled = dumps(error)
    return RemoteError(type(error).__name__, str(error), "".join(traceback.format_exception(error)), pickled)
