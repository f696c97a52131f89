"""Calls of JAX programs into a pool: their operands and results, and how they run.

jaxvec.step(handle, action)     _functions.py   makes a `Call`, and its operands (`_operands.py`)
Call -> primitive               _primitive.py   traces, batches and lowers it to a transport
transport -> answer(call, ...)  _ffi.py, _io_callback.py; runs the call on the pool, with NumPy arrays
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import cloudpickle
import jax
import numpy as np
from numpy.typing import NDArray

from jaxvec._arguments import SEED_WORDS, cast_operands, check_seeds
from jaxvec._engine.move import Caller, Move, Verb
from jaxvec._errors import EnvDataError, EnvIdError
from jaxvec._leaves import Leaf, build
from jaxvec._memory.rows import InvalidValue, conform, store
from jaxvec._memory.segment import Copies, Deliver, Rows, into
from jaxvec._pool.pool import Pool
from jaxvec._spec import PoolSpec
from jaxvec.callbacks._operands import row_name

_ID = ((3,), np.dtype(np.uint32))  # shape and dtype of a state's id

Array = NDArray[Any]
Struct = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Call:
    """The static part of a call, fixed at trace time. Equal calls share a compiled program.

    The first operand and the first result are the token, `[n, 3]` uint32. The others depend on the verb:

        verb      other operands                                  other results
        RESET     words of seeds [n, 2 * SEED_WORDS] uint32,      time step [n, ...]
                  mask [n] bool, arguments [n, ...]
        STEP      action, arguments [n, ...]                      time step [n, ...]
        SEND      action, arguments [k, ...], env ids [k] int32   none
        RECV      none                                            time step [batch_size, ...]
        CALL      arguments [n, ...]                              answers [n, ...]
        GET_ATTR  none                                            answers [n, ...], but no token
        SAVE      none                                            state ids [n, 3] uint32
        RESTORE   state ids [n, 3] uint32, mask [n] bool          time step [n, ...]
        SIMULATE  state ids [n, 3] uint32, action [n, ...]        time step; new state ids replace the token

    Attributes:
        verb: Operation that the pool performs.
        spec: Specification of the pool.
        transport: Transport, as returned by `choose_transport`.
        fresh: True for a reset of the whole pool, without a handle.
        extra: Pickled. RESET: undeclared options, and whether there is a mask. CALL and GET_ATTR: name,
            arguments and result structure.
        arguments: Shape, without the env axis, and dtype of each leaf of the action and, if given, the
            declared reset options, or of each array argument of CALL. Integers have the program's dtype, as
            XLA's casts wrap around: they are checked and cast in the call, by C++ or `cast_rows`.
        answers: The same for each result of CALL or GET_ATTR.
        elastic: True for a fresh reset of a pool family, which starts the pool with as many envs as the token
            has rows; see `registry.publish_family`.
        unread: Indices of the results that the program does not read. They are not copied.
    """

    verb: Verb
    spec: PoolSpec
    transport: str
    fresh: bool = False
    extra: bytes = b""
    arguments: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...] = ()
    answers: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...] = ()
    elastic: bool = False
    unread: frozenset[int] = frozenset()

    @property
    def pickled(self) -> bytes:  # passed through C++ to Python, where `_ffi.py` unpickles it
        return pickle.dumps((self.extra, self.arguments, self.answers))

    @property
    def whole(self) -> bool:
        """True if the call is for all envs of the pool and cannot be split."""
        return self.verb in (Verb.SEND, Verb.RECV) or (self.verb is Verb.RESET and self.spec.first_ready)

    @lru_cache(256)  # noqa: B019 - calls are few and small
    def operands(self, rows: int, sent: int) -> list[Struct]:
        """Returns the type of each operand, for a token of `rows` envs; SEND has `sent` actions and ids."""
        token = _struct((3,), np.uint32, rows)
        match self.verb:
            case Verb.RESET:
                types = [((2 * SEED_WORDS,), np.uint32), ((), np.bool_), *self.arguments]
            case Verb.SEND:
                types = [*self.arguments, ((), np.int32)]
            case Verb.RESTORE:
                types = [_ID, ((), np.bool_)]
            case Verb.SIMULATE:
                types = [_ID, *self.arguments]
            case _:
                types = self.arguments
        return [
            token,
            *(
                _struct(*shape_and_dtype, sent if self.verb is Verb.SEND else rows)
                for shape_and_dtype in types
            ),
        ]

    @lru_cache(256)  # noqa: B019
    def results(self, rows: int) -> list[Struct]:
        """Returns the type of each result, for a token of `rows` envs. Unread results have no rows."""
        token = _struct((3,), np.uint32, rows)
        match self.verb:
            case Verb.SEND:
                return [token]
            case Verb.SAVE:
                return [token, _struct(*_ID, rows)]
            case Verb.GET_ATTR:
                return [_struct(*shape_and_dtype, rows) for shape_and_dtype in self.answers]
            case Verb.CALL:
                return [token, *(_struct(*shape_and_dtype, rows) for shape_and_dtype in self.answers)]
            case _:
                rows = self.spec.batch_size if self.whole else rows
                leaves = enumerate(self.spec.timestep_leaves, 1)  # the token is result 0
                types = (_struct(x.shape, x.stored, 0 if i in self.unread else rows) for i, x in leaves)
                return [token, *types]

    def read(self, results: Sequence[Any]) -> list[Any]:
        return [result for i, result in enumerate(results) if i not in self.unread]

    def check_rows(self, rows: int, num_envs: int) -> None:
        """Raises `EnvIdError` if a token of `rows` envs does not fit a pool of `num_envs` envs."""
        if self.fresh and rows != num_envs:
            raise EnvIdError(
                f"reset of {rows} envs, but the pool has {num_envs}. Under vmap, pass num_envs=, the pool's "
                "envs divided by the number of vmapped instances, and one seed per instance: an unbatched "
                "reset runs only once. To reset some envs, or under shard_map, pass a handle to them"
            )
        if self.whole and rows != num_envs:
            raise EnvIdError(
                f"{self.verb.word} takes the handle to all {num_envs} envs, not to {rows} of them: a pool "
                "with batch_size can't be split over vmapped instances or devices"
            )


def answer(call: Call, pool: Pool, operands: Rows, out: Rows | None = None) -> list[Array]:
    """Runs a call on its pool, given arrays of the types `call.operands`.

    Returns arrays of the types `call.results`, newly allocated or, if given, those of `out`.
    """
    token, *rest = operands
    call.check_rows(len(token), pool.spec.num_envs)
    # The token is result 0, and the leaves of the time step follow.
    deliver = Copies(frozenset(place - 1 for place in call.unread)) if out is None else into(out[1:])
    results = _run(call, pool, token, rest, deliver)
    if out is None:
        return results
    for target, result in zip(out, results, strict=True):
        if target is not result:  # the leaves of a time step were delivered into `out`
            target[...] = result
    return [*out]


def _run(call: Call, pool: Pool, token: Array, rest: Rows, deliver: Deliver) -> list[Array]:
    if call.verb is Verb.SIMULATE:
        actions = cast_operands(pool.spec, rest[1:], "state {}".format)
        return pool.perform(Move(call.verb, pool.all), [rest[0], *actions], deliver)
    move = move_of(call, pool, token)
    match call.verb:
        case Verb.GET_ATTR:
            return call_envs(call, pool, move, [])
        case Verb.RESET:
            words, mask, *rows = rest
            seeds = np.ascontiguousarray(words).view(np.int64)
            check_seeds(seeds)
            options, masked = cloudpickle.loads(call.extra)
            if pool.spec.reset_options is not None and rows:
                values = dict(zip(pool.spec.option_leaves, rows, strict=True))
                options = build(pool.spec.reset_options, values.__getitem__)
            mask = mask if masked else None
            delivered = pool.reset(move, seeds=seeds, mask=mask, options=options, deliver=deliver)
        case Verb.STEP:
            actions = cast_operands(pool.spec, rest, row_name(move.slots))
            delivered = pool.step(move, actions, deliver=deliver)
        case Verb.SEND:
            *actions, env_ids = rest
            actions = cast_operands(pool.spec, actions, row_name(env_ids))
            pool.send(move, env_ids.astype(np.intp), actions)
            delivered = []
        case Verb.RECV:
            delivered = pool.recv(move, deliver=deliver)
        case Verb.CALL:
            delivered = call_envs(call, pool, move, rest)
        case _:
            delivered = pool.perform(move, rest, deliver)
    return [token_of(pool, move), *delivered]


def move_of(call: Call, pool: Pool, token: Array) -> Move:
    if call.fresh:
        return pool.move_all(call.verb, Caller.PROGRAM)
    caller = None if call.verb.traits.is_pure else Caller.PROGRAM
    return Move(call.verb, token[:, 1].astype(np.intp), token[:, 2], caller)


@dataclass(frozen=True)
class Operand:
    """Placeholder in the arguments of a call, replaced at run time by an env's entry of an operand."""

    index: int


def call_envs(call: Call, pool: Pool, move: Move, operands: Rows) -> list[Array]:
    """Calls a method or reads an attribute of each env; returns an array `[n, ...]` per result leaf."""
    name, args, skeleton = cloudpickle.loads(call.extra)
    structure = jax.tree.structure(skeleton)
    operands = [operand.copy() for operand in operands]  # an env of this process may keep its argument

    def argument(leaf: Any, row: int) -> Any:
        return operands[leaf.index][row] if isinstance(leaf, Operand) else leaf

    arguments = [jax.tree.map(partial(argument, row=row), args) for row in range(len(move.slots))]
    values = pool.env_calls.call(move, name, arguments, {})
    if not call.answers:
        return []
    columns: list[list[Array]] = [[] for _ in call.answers]
    for slot, value in zip(move.slots.tolist(), values, strict=True):
        leaves, got = jax.tree.flatten(value)
        try:
            if got != structure:
                raise InvalidValue(f"expected the structure {structure}, got {got}")
            for column, leaf, (shape, dtype) in zip(columns, leaves, call.answers, strict=True):
                kind = Leaf((name,), shape, dtype, dtype)
                row = np.empty(shape, dtype)
                store(kind, row, conform(kind, leaf))
                column.append(row)
        except InvalidValue as error:
            text = f"env {slot} returned wrong data from {name}: {error}"
            raise EnvDataError(text, env_id=slot, worker=None, operation=name) from error
    return [np.stack(column) for column in columns]


def token_of(pool: Pool, move: Move) -> Array:
    """Returns the token of the next handle to the envs of `move`."""
    token = np.empty((len(move.slots), 3), np.uint32)
    token[:, 0] = pool.id
    token[:, 1] = move.slots
    token[:, 2] = (
        pool.engine.generation[move.slots] if move.generation is None else move.generation + np.uint32(1)
    )
    return token


def _struct(shape: tuple[int, ...], dtype: Any, rows: int) -> Struct:
    return Struct((rows, *shape), dtype)
