"""A compiled program's call into a pool: what it takes and gives, and how it is answered on NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle
import jax
import numpy as np
from numpy.typing import NDArray

from jaxvec import _pools, _seeds
from jaxvec._errors import EnvDataError, EnvIdError, StaleHandleError
from jaxvec._handoff._move import Caller, Move, Verb
from jaxvec._memory._rows import InvalidValue, conform
from jaxvec._memory._views import Deliver, Index, Rows, copies, into
from jaxvec._pool import Pool
from jaxvec._spaces import Leaf
from jaxvec._spec import PoolSpec

_ID = ((3,), np.dtype(np.uint32))  # of a state

Array = NDArray[Any]
Struct = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Call:
    """All of a call that is fixed when its program is traced; equal calls compile to the same.

    The first operand and the first result are the token, `[n, 3]` uint32. More operands, by verb:
    reset `[n, 2]` uint32 seeds (low and high word, as `_seeds.expand`) and an `[n]` bool mask; step the
    leaves of the action, `[n, ...]`; send those, `[k, ...]`, and `[k]` int32 env ids; call the leaves of
    its arguments, `[n, ...]`; restore `[n, 3]` uint32 ids of states; simulate those and the leaves of the
    action. More results: of reset, step, recv, restore and simulate the leaves of the time step, of save
    `[n, 3]` ids, of call `answers`. A read, which moves nothing, has those and no token. Nor does simulate
    move anything: of its token only the pool counts, and the ids of the states after it take its place.

    Attributes:
        verb: what is asked for.
        spec: of the pool.
        transport: as `_transports.choose` returned it.
        fresh: of a reset, whether it starts from the pool, with all envs, and not from a handle.
        extra: of a reset its options, and whether it has a mask; of a call what to call; pickled.
        arguments, answers: of each argument and result of a call the shape, without the env axis, and
            the dtype.
        elastic: of a fresh reset, whether it starts from the pool's family, with as many envs as the
            token has rows; see `_pools.Family`.
        unread: the numbers of the results that the program does not read, and which are not copied for it.
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
    def whole(self) -> bool:
        """Whether the call is for all envs of the pool, and can't be split."""
        return self.verb in (Verb.SEND, Verb.RECV) or (self.verb is Verb.RESET and self.spec.first_ready)

    def operands(self, rows: int, sent: int) -> list[Struct]:
        """Returns the type of each operand; `rows` are the token's, `sent` those of what is sent."""
        token = _struct((3,), np.uint32, rows)
        match self.verb:
            case Verb.RESET:
                types = [((2,), np.uint32), ((), np.bool_)]
            case Verb.STEP | Verb.SEND:
                types = [(leaf.shape, leaf.stored) for leaf in self.spec.action_leaves]
                types += [((), np.int32)] if self.verb is Verb.SEND else []
            case Verb.RESTORE:
                types = [_ID]
            case Verb.SIMULATE:
                types = [_ID, *((leaf.shape, leaf.stored) for leaf in self.spec.action_leaves)]
            case _:
                types = self.arguments
        return [token, *(_struct(*each, sent if self.verb is Verb.SEND else rows) for each in types)]

    def results(self, rows: int) -> list[Struct]:
        """Returns the type of each result, without rows if it is unread; `rows` are the token's."""
        token = _struct((3,), np.uint32, rows)
        match self.verb:
            case Verb.SEND:
                return [token]
            case Verb.SAVE:
                return [token, _struct(*_ID, rows)]
            case Verb.GET_ATTR:
                return [_struct(*each, rows) for each in self.answers]
            case Verb.CALL:
                return [token, *(_struct(*each, rows) for each in self.answers)]
            case _:
                batch = self.spec.batch_size if self.whole else rows
                leaves = enumerate(self.spec.timestep_leaves, 1)
                return [
                    token,
                    *(
                        _struct(leaf.shape, leaf.stored, 0 if i in self.unread else batch)
                        for i, leaf in leaves
                    ),
                ]

    def read(self, results: Sequence[Any]) -> list[Any]:
        """Returns those of the results that the program reads."""
        return [result for i, result in enumerate(results) if i not in self.unread]

    def check_rows(self, rows: int, num_envs: int) -> None:
        """Raises `EnvIdError` if a call whose token has so many rows can't be for a pool of `num_envs`."""
        if self.fresh and rows != num_envs:
            raise EnvIdError(
                f"reset of {rows} envs, but the pool has {num_envs}. Under vmap pass num_envs=, the pool's "
                "envs divided by the number of vmapped instances, and one seed for each instance: a reset "
                "that is the same for all instances runs once. To reset some envs, or under shard_map, pass "
                "a handle to them"
            )
        if self.whole and rows != num_envs:
            raise EnvIdError(
                f"{self.verb.word} takes the handle to all {num_envs} envs, not to {rows} of them: a pool "
                "with batch_size can't be split over vmapped instances or devices"
            )


def answer(
    call: Call, pool: Pool, operands: Sequence[Array], out: Sequence[Array] | None = None
) -> list[Array]:
    """Answers a call.

    Args:
        call: as it was traced.
        pool: that the token names.
        operands: arrays of `call.operands`.
        out: where to put the results.

    Returns:
        The results, arrays of `call.results`; `out` if that was given.
    """
    token, *rest = operands
    call.check_rows(len(token), pool.spec.num_envs)
    if call.verb is Verb.SIMULATE:
        ids, *actions = rest
        ids, rows = pool.simulate(ids, actions, deliver=_copies_for(call) if out is None else into(out[1:]))
        if out is None:
            return [ids, *rows]
        out[0][:] = ids
        return list(out)
    move = move_of(call, pool, token)
    if call.verb is Verb.GET_ATTR:
        given = ask_envs(call, pool, move, [])
        return given if out is None else [*into(out)(given, slice(None))]
    deliver = _copies_for(call) if out is None else into(out[1:])
    match call.verb:
        case Verb.RESET:
            words, mask = rest
            seeds = np.ascontiguousarray(words).view(np.int64).reshape(len(words))
            _seeds.check(seeds)
            options, masked = cloudpickle.loads(call.extra)
            given = pool.reset(
                move, seeds=seeds, mask=mask if masked else None, options=options, deliver=deliver
            )
        case Verb.STEP:
            given = pool.step(move, rest, deliver=deliver)
        case Verb.SEND:
            *actions, env_ids = rest
            pool.send(move, env_ids.astype(np.intp), actions)
            given = []
        case Verb.RECV:
            given = pool.recv(move, deliver=deliver)
        case Verb.SAVE:
            given = [pool.save(move)]
            if out is not None:
                out[1][:] = given[0]
        case Verb.RESTORE:
            given = _pools.restore(pool, move, rest[0], deliver=deliver)
        case _:
            given = ask_envs(call, pool, move, rest)
            if out is not None:
                deliver(given, slice(None))
    next_token = token_of(pool, move)
    if out is None:
        return [next_token, *given]
    out[0][:] = next_token
    return list(out)


def move_of(call: Call, pool: Pool, token: Array) -> Move:
    """Returns what the call asks of the pool."""
    if call.fresh:
        return pool.move_all(call.verb, Caller.PROGRAM)
    caller = None if call.verb is Verb.GET_ATTR else Caller.PROGRAM
    return Move(call.verb, token[:, 1].astype(np.intp), token[:, 2], caller)


@dataclass(frozen=True)
class Operand:
    """Stands for an operand in the arguments of a call that `Call.extra` holds."""

    index: int


def ask_envs(call: Call, pool: Pool, move: Move, operands: Sequence[Array]) -> list[Array]:
    """Calls a method of each env of the move, or reads an attribute.

    Args:
        call: whose `extra` holds the name, the arguments, and the structure of the result.
        pool: that the handle names.
        move: that the call is.
        operands: `[n, ...]` arrays to put into the arguments.

    Returns:
        An `[n, ...]` array for each leaf of the result.
    """
    name, args, skeleton = cloudpickle.loads(call.extra)
    structure = jax.tree.structure(skeleton)

    def argument(leaf: Any, row: int) -> Any:
        return operands[leaf.index][row] if isinstance(leaf, Operand) else leaf

    each = [jax.tree.map(partial(argument, row=row), args) for row in range(len(move.slots))]
    values = pool.questions.call(move, name, each, {})
    columns: list[list[Array]] = [[] for _ in call.answers]
    for slot, value in zip(move.slots.tolist(), values, strict=True):
        if not columns:
            continue
        leaves, got = jax.tree.flatten(value)
        if got != structure:
            raise _wrong_answer(slot, name, f"{structure} was expected, but it is {got}")
        for column, leaf, (shape, dtype) in zip(columns, leaves, call.answers, strict=True):
            try:
                column.append(conform(Leaf((name,), shape, dtype, dtype), leaf).astype(dtype))
            except InvalidValue as error:
                raise _wrong_answer(slot, name, str(error)) from error
    return [np.stack(column) for column in columns]


def _copies_for(call: Call) -> Deliver:
    """Returns what delivers new arrays, and none of rows that are not read."""
    if not call.unread:
        return copies

    def deliver(leaves: Rows, index: Index) -> Rows:
        return [
            leaf[:0] if i in call.unread else copies([leaf], index)[0] for i, leaf in enumerate(leaves, 1)
        ]

    return deliver


def _wrong_answer(slot: int, name: str, why: str) -> EnvDataError:
    return EnvDataError(
        f"env {slot} returned wrong data from {name}: {why}", env_id=slot, worker=None, operation=name
    )


def pool_id(token: Array) -> int:
    """Returns the id of the pool to whose envs this is a handle."""
    pools = token[:, 0]
    if not len(pools) or (pools != pools[0]).any():
        raise StaleHandleError(
            f"a handle to envs of several pools ({np.unique(pools).tolist()}); use one handle for each pool"
        )
    return int(pools[0])


def token_of(pool: Pool, move: Move) -> Array:
    """Returns the token of a fresh handle to the envs that were moved."""
    token = np.empty((len(move.slots), 3), np.uint32)
    token[:, 0], token[:, 1] = pool.id, move.slots
    token[:, 2] = pool.generation(move.slots) if move.generation is None else move.generation + np.uint32(1)
    return token


def _struct(shape: tuple[int, ...], dtype: Any, rows: int) -> Struct:
    return Struct((rows, *shape), dtype)
