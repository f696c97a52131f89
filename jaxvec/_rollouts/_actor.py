"""What runs in an actor: a local pool, and the user's rollout, compiled for it.

Pytrees travel as a list of NumPy arrays, which Ray does not copy once more, and their structure. That is
pickled by the pickler that the program came by, so that classes of a script or a notebook are found again.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import cloudpickle
import jax
import jax.numpy as jnp
from numpy.typing import NDArray

from jaxvec import _pickling, _seeds
from jaxvec._backends._ray import _nodes
from jaxvec._vector_env import VectorEnv
from jaxvec.callbacks._functional import reset
from jaxvec.callbacks._make import make

Leaves: TypeAlias = list[NDArray[Any]]

# Of JAX's options, those that decide which numbers a program computes.
_OPTIONS = (
    "jax_enable_x64",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
)


@dataclass(frozen=True)
class Program:
    """What all actors are given.

    Attributes:
        rollout, env, num_envs, seed: of the user.
        options: of `make`.
        jaxvec: its version.
        jax: options of JAX.
    """

    rollout: Callable[..., Any]
    env: Any
    num_envs: int
    seed: int
    options: Mapping[str, Any]
    jaxvec: str
    jax: Mapping[str, Any]


@dataclass(frozen=True)
class Played:
    """A rollout that is done: its trajectory, and how many env steps were taken for it."""

    structure: bytes
    leaves: Leaves
    env_steps: int


@dataclass(frozen=True)
class Raised:
    """An exception of the user's code, as text, and pickled if it can be."""

    kind: str
    message: str
    traceback: str
    pickled: bytes | None


class Actor:
    """Makes rollouts, one after the other."""

    _envs: VectorEnv | None = None

    def identify(self) -> str:
        """Says where this is."""
        ray: Any = importlib.import_module("ray")
        return f"node {ray.util.get_node_ip_address()} ({ray.get_runtime_context().get_node_id()[:12]})"

    def start(self, pickled: bytes, number: int, incarnation: int) -> Raised | None:
        """Makes the pool and resets it.

        Args:
            pickled: the `Program`.
            number: of this actor.
            incarnation: how many were there before in its place.
        """
        try:
            self._start(cloudpickle.loads(pickled), number, incarnation)
        except Exception as error:
            return _describe(error)
        return None

    def rollout(self, version: int, weights: tuple[bytes, Leaves], index: int) -> Played | Raised:
        """Makes a rollout, with weights that are converted only if their version is new."""
        try:
            return self._play(version, weights, index)
        except Exception as error:
            return _describe(self._typed(error))

    def close(self) -> None:
        """Closes the envs."""
        if self._envs is not None:
            self._envs.close()

    def _typed(self, error: Exception) -> Exception:
        """Returns the pool's own error, of which a compiled program tells the text."""
        assert self._envs is not None
        try:
            self._envs.raise_if_failed()
        except Exception as typed:
            return typed
        return error

    def _start(self, program: Program, number: int, incarnation: int) -> None:
        ours = _nodes.identity()["jaxvec"]
        if program.jaxvec != ours:
            raise ImportError(f"jaxvec is {ours} here, and {program.jaxvec} where the learner is")
        for name, value in program.jax.items():
            jax.config.update(name, value)
        self._rollout = jax.jit(program.rollout)
        self._envs = make(program.env, program.num_envs, **program.options)
        seed = program.seed + number * program.num_envs
        if incarnation:  # the same episodes again would tell nothing new
            seed = _seeds.derive(seed, incarnation)
        self._handle, self._timestep = reset(self._envs, seed=seed)
        self._key = jax.random.fold_in(jax.random.key(program.seed), number)
        self._params: Any = None
        self._version = -1

    def _play(self, version: int, weights: tuple[bytes, Leaves], index: int) -> Played:
        assert self._envs is not None
        if version != self._version:
            self._params, self._version = jax.device_put(unpack(*weights)), version
        before = self._envs.stats().total.steps
        key = jax.random.fold_in(self._key, index)
        self._handle, self._timestep, trajectory = self._rollout(
            self._params, self._handle, self._timestep, key
        )
        structure, leaves = pack(trajectory)
        return Played(structure, leaves, self._envs.stats().total.steps - before)


def jax_options() -> dict[str, Any]:
    """Returns what actors have to set so that they compute what this process would."""
    return {name: getattr(jax.config, name) for name in _OPTIONS}


def pack(tree: Any) -> tuple[bytes, Leaves]:
    """Returns what a pytree of arrays travels as, once it is computed."""
    leaves, structure = jax.tree.flatten(tree)
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(
                "JAX keys can't travel; take jax.random.key_data, and wrap_key_data where it arrives"
            )
    return _dump(structure), jax.device_get(leaves)


def unpack(structure: bytes, leaves: Leaves) -> Any:
    """Returns the pytree."""
    return jax.tree.unflatten(_load(structure), leaves)


@lru_cache(maxsize=16)
def _dump(structure: Any) -> bytes:
    return _pickling.dumps(jax.tree.unflatten(structure, range(structure.num_leaves)))


@lru_cache(maxsize=16)
def _load(structure: bytes) -> Any:
    return jax.tree.structure(cloudpickle.loads(structure))


def _describe(error: Exception) -> Raised:
    pickled = None
    with suppress(Exception):
        pickled = _pickling.dumps(error)
    return Raised(type(error).__name__, str(error), "".join(traceback.format_exception(error)), pickled)
