"""Handles, and the calls of JAX programs into a pool.

    jaxvec.step(handle, action)     _functions.py   checks the arguments, makes a `Call` and its operands
    Call -> primitive               _primitive.py   traces, batches and lowers it to a transport
    transport -> answer(call, ...)  _ffi.py, _io_callback.py; runs the call on the pool, with NumPy arrays

This file has `Handle`, the effect that orders calls, `Call` and `answer`, and the checks of arguments.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import io_callback
from jax.extend.core import Jaxpr
from jax.interpreters import batching
from numpy.typing import NDArray

from jaxvec._arguments import (
    NO_SEED,
    RowName,
    cast_operands,
    cast_rows,
    castable,
    check_mask,
    check_options,
    check_seeds,
    expand_seeds,
    flatten,
)
from jaxvec._dispatch.move import Caller, Move, Verb
from jaxvec._errors import ActionError, EnvDataError, EnvIdError, StaleHandleError
from jaxvec._memory.rows import InvalidValue, conform, store
from jaxvec._memory.segment import Copies, Deliver, Rows, into
from jaxvec._pool import registry
from jaxvec._pool.pool import Pool
from jaxvec._spec import EnvState, Leaf, Node, PoolSpec, build

# --- Handles ---------------------------------------------------------------------------------------------

jax.tree_util.register_dataclass(EnvState, data_fields=["ids"], meta_fields=[])


@partial(jax.tree_util.register_dataclass, data_fields=["token"], meta_fields=["spec", "transport"])
@dataclass(frozen=True)
class Handle:
    """Permission to reset or step some envs of a pool, once.

    A pytree with one array, so it works with `jit`, `scan`, `cond` and donation. Its first axis is the env
    axis: split it like observations, by indexing, reshaping, sharding or `vmap`. Each part is a handle:
    `handle[:4]` is that of the first four envs.

    Each reset and step returns a new handle and makes the old one stale. This orders the steps of a program.

    Attributes:
        token: Array `[num_envs, 3]` of uint32. For each env it stores the pool id, the env id, and a counter
            that increases with every reset or step. The pool is looked up at run time, so a compiled program
            works with every pool that has an equal `spec`.
        spec: Shapes and dtypes of the pool's data. Static, compared by value.
        transport: Transport of compiled programs to the pool. Static.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 4) as envs:
            handle, timestep = jaxvec.reset(envs, seed=0)
            halves = jax.tree.map(lambda leaf: leaf.reshape(2, 2, 3), handle)
            halves, timestep = jax.vmap(jaxvec.step)(halves, jnp.zeros((2, 2), int))
            print(halves.token.shape, timestep.obs.shape)  # (2, 2, 3) (2, 2, 4)
        ```
    """

    token: jax.Array
    spec: PoolSpec
    transport: str

    @property
    def num_envs(self) -> int:
        return self.token.shape[0]

    def __getitem__(self, index: Any) -> Handle:
        """Returns the handle of some of the envs, by a slice or an array of indices."""
        return self.next(self.token[index])

    __iter__ = None  # a handle is not a sequence: `handle, timestep = ...` must not unpack it

    def next(self, token: jax.Array) -> Handle:
        """Returns a handle to the same envs with a new token."""
        return Handle(token, self.spec, self.transport)


# --- The effect of a call --------------------------------------------------------------------------------
# A subclass of `io_callback`'s effect: JAX neither drops, repeats nor reorders a call, and `checkpoint`
# rejects it. Under `vmap`, a `cond` with an unbatched predicate may contain calls, unlike `io_callback`. With
# a batched predicate, JAX would run all branches and select from the results, and a `while_loop` would step
# every instance until the last is done. The wrapped batching rules below reject both.

# The effect class is private in JAX, but every jaxpr with a callback contains an instance. JAX registers
# effects by class, while the batching rules of `cond` and `while_loop` compare instances.
(_IO,) = jax.make_jaxpr(lambda: io_callback(lambda: None, None))().effects

# JAX's errors show the effect: "Effects not supported in partial-eval of `checkpoint`/`remat`: [...]".
_EFFECT = (
    "jaxvec.step or another call of jaxvec, which would run again for the backward pass. Call it outside of "
    "jax.checkpoint, which may contain the network (docs/transformations.md)"
)
EFFECT: Any = type("CallEffect", (type(_IO),), {"__repr__": lambda _: _EFFECT})()

# Calls that JAX may drop or repeat.
PURE = (Verb.GET_ATTR, Verb.SIMULATE)

# Their effect, which every transformation allows. Without an effect, JAX would dispatch a program with only
# such calls from C++, from its second run on, and then raises a plain ValueError for their errors.
(PURE_EFFECT,) = jax.make_jaxpr(lambda: jax.debug.callback(lambda: None))().effects

_COND = (
    "vmap of jax.lax.cond or switch, with a jaxvec call in a branch, and a predicate that differs between "
    "the vmapped instances: JAX would run all branches for all instances, and so step the wrong envs. Step "
    "all envs and choose between the results with jnp.where, reset some envs with mask=, or use one "
    "predicate for all instances"
)
_WHILE = (
    "vmap of jax.lax.while_loop, with a jaxvec call in it, and a predicate that differs between the vmapped "
    "instances: JAX would step the envs of all instances until the last is done. Use one predicate for all "
    'instances, such as .all() of theirs; with autoreset_mode="EPISODIC", envs that are done stay idle'
)


def _batch_cond(rule: Any, axis_data: Any, args: Any, dims: Any, *, branches: Any, **params: Any) -> Any:
    # The index of `platform_dependent` may be batched, but is equal for all vmapped instances.
    differs = dims[0] is not None and "branches_platforms" not in params
    if differs and any(EFFECT in branch.effects for branch in branches):
        raise NotImplementedError(_COND)
    return rule(axis_data, args, dims, branches=branches, **params)


def _batch_while(rule: Any, *args: Any, cond_jaxpr: Any, body_jaxpr: Any, **params: Any) -> Any:
    if EFFECT not in {*cond_jaxpr.effects, *body_jaxpr.effects}:
        return rule(*args, cond_jaxpr=cond_jaxpr, body_jaxpr=body_jaxpr, **params)
    # Only the rule knows whether the predicate is batched: if so, it rejects JAX's own effect.
    try:
        return rule(*args, cond_jaxpr=_with_jax_effect(cond_jaxpr), body_jaxpr=body_jaxpr, **params)
    except Exception as error:
        if "batched predicate" not in str(error):
            raise
        raise NotImplementedError(_WHILE) from None


def _with_jax_effect(jaxpr: Any) -> Any:
    effects = {*jaxpr.effects, _IO}
    if isinstance(jaxpr, Jaxpr):
        return jaxpr.replace(effects=effects)
    return jaxpr.replace(jaxpr=jaxpr.jaxpr.replace(effects=effects))  # a ClosedJaxpr, up to jax 0.11


for _primitive, _batch in ((jax.lax.cond_p, _batch_cond), (jax.lax.while_p, _batch_while)):
    _rules = batching.fancy_primitive_batchers
    _rules[_primitive] = partial(_batch, _rules[_primitive])


# --- Calls: operands, results, and their execution with NumPy arrays -------------------------------------

_ID = ((3,), np.dtype(np.uint32))  # shape and dtype of a state's id

Array = NDArray[Any]
Struct = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Call:
    """The static part of a call, fixed at trace time. Equal calls share a compiled program.

    The first operand and the first result are the token, `[n, 3]` uint32. The others depend on the verb:

        verb      other operands                                  other results
        RESET     seeds [n, 2] uint32 (low word, high word),      time step [n, ...]
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
                types = [((2,), np.uint32), ((), np.bool_), *self.arguments]
            case Verb.SEND:
                types = [*self.arguments, ((), np.int32)]
            case Verb.RESTORE:
                types = [_ID, ((), np.bool_)]
            case Verb.SIMULATE:
                types = [_ID, *self.arguments]
            case _:
                types = self.arguments
        return [token, *(_struct(*each, sent if self.verb is Verb.SEND else rows) for each in types)]

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
                return [_struct(*each, rows) for each in self.answers]
            case Verb.CALL:
                return [token, *(_struct(*each, rows) for each in self.answers)]
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
        ids, rows = pool.simulate(rest[0], actions, deliver=deliver)
        return [ids, *rows]
    move = move_of(call, pool, token)
    match call.verb:
        case Verb.GET_ATTR:
            return call_envs(call, pool, move, [])
        case Verb.RESET:
            words, mask, *rows = rest
            seeds = np.ascontiguousarray(words).view(np.int64).reshape(len(words))
            check_seeds(seeds)
            options, masked = cloudpickle.loads(call.extra)
            if pool.spec.reset_options is not None and rows:
                values = dict(zip(pool.spec.option_leaves, rows, strict=True))
                options = build(pool.spec.reset_options, values.__getitem__)
            mask = mask if masked else None
            given = pool.reset(move, seeds=seeds, mask=mask, options=options, deliver=deliver)
        case Verb.STEP:
            actions = cast_operands(pool.spec, rest, row_name(move.slots))
            given = pool.step(move, actions, deliver=deliver)
        case Verb.SEND:
            *actions, env_ids = rest
            actions = cast_operands(pool.spec, actions, row_name(env_ids))
            pool.send(move, env_ids.astype(np.intp), actions)
            given = []
        case Verb.RECV:
            given = pool.recv(move, deliver=deliver)
        case Verb.SAVE:
            given = [pool.save(move)]
        case Verb.RESTORE:
            given = registry.restore(pool, move, *rest, deliver=deliver)
        case _:
            given = call_envs(call, pool, move, rest)
    return [token_of(pool, move), *given]


def move_of(call: Call, pool: Pool, token: Array) -> Move:
    if call.fresh:
        return pool.move_all(call.verb, Caller.PROGRAM)
    caller = None if call.verb is Verb.GET_ATTR else Caller.PROGRAM
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

    each = [jax.tree.map(partial(argument, row=row), args) for row in range(len(move.slots))]
    values = pool.env_calls.call(move, name, each, {})
    if not call.answers:
        return []
    columns: list[list[Array]] = [[] for _ in call.answers]
    for slot, value in zip(move.slots.tolist(), values, strict=True):
        leaves, got = jax.tree.flatten(value)
        if got != structure:
            raise _wrong_answer(slot, name, f"expected the structure {structure}, got {got}")
        for column, leaf, (shape, dtype) in zip(columns, leaves, call.answers, strict=True):
            try:
                kind, row = Leaf((name,), shape, dtype, dtype), np.empty(shape, dtype)
                store(kind, row, conform(kind, leaf))
                column.append(row)
            except InvalidValue as error:
                raise _wrong_answer(slot, name, str(error)) from error
    return [np.stack(column) for column in columns]


def _wrong_answer(slot: int, name: str, why: str) -> EnvDataError:
    return EnvDataError(
        f"env {slot} returned wrong data from {name}: {why}", env_id=slot, worker=None, operation=name
    )


def pool_id_of(token: Array) -> int:
    pools = token[:, 0]
    if not len(pools) or (pools != pools[0]).any():
        raise StaleHandleError(
            f"the handle refers to several pools ({np.unique(pools).tolist()}); use one handle per pool"
        )
    return int(pools[0])


def token_of(pool: Pool, move: Move) -> Array:
    """Returns the token of the next handle to the envs of `move`."""
    token = np.empty((len(move.slots), 3), np.uint32)
    token[:, 0], token[:, 1] = pool.id, move.slots
    token[:, 2] = pool.generation(move.slots) if move.generation is None else move.generation + np.uint32(1)
    return token


def _struct(shape: tuple[int, ...], dtype: Any, rows: int) -> Struct:
    return Struct((rows, *shape), dtype)


# --- Checks of the functions' arguments, traced or not ---------------------------------------------------


def check_handle(handle: Any, verb: str) -> PoolSpec:
    """Returns the handle's spec; raises `TypeError` for other objects and for pools that JAX can't use."""
    if not isinstance(handle, Handle):
        raise TypeError(
            f"{verb} takes the handle that jaxvec.reset or jaxvec.step returned, got {type(handle).__name__}"
        )
    token = jax.typeof(handle.token)
    if token.shape[1:] != (3,) or token.dtype != np.uint32:
        raise TypeError(
            f"{verb} got a handle with a token of {token.str_short()} instead of uint32[num_envs,3]. Under "
            "vmap, pass the split handle as a mapped argument; the handle of one env is handle[i : i + 1]"
        )
    for leaf in (*handle.spec.action_leaves, *handle.spec.timestep_leaves):
        if leaf.is_object:
            raise TypeError(
                f"{leaf}: its space has no fixed shape, so the pool stores Python objects, which compiled "
                "programs can't use; wrap the env so that this leaf is an array, or step the pool in Python"
            )
        if jax.dtypes.canonicalize_dtype(leaf.stored) != leaf.stored:
            raise TypeError(
                f"{leaf}: the pool stores {leaf.stored}, but jax_enable_x64 is off; turn it on, or make the "
                "pool with jaxvec.make while it is off"
            )
    return handle.spec


def check_action(spec: PoolSpec, action: Any, num_envs: int, name_row: RowName) -> list[jax.Array]:
    """Returns the action's leaves, `[num_envs, ...]`, in the order of the spec."""
    return _check_batch(spec.action, action, num_envs, name_row)


def declared_options(spec: PoolSpec, options: Any, num_envs: int, name_row: RowName) -> list[jax.Array]:
    """Returns the operands for reset options, none for `None`.

    The options are a pytree of the declared space with leaves `[num_envs, ...]`, or `[...]` for all envs.
    """
    check = partial(_check_batch, num_envs=num_envs, name_row=name_row, one_for_all=True)
    return check_options(spec, options, num_envs, check, jnp.ones)


def row_name(ids: Any) -> RowName:
    """Returns a function that names the env of a row, by env ids `[k]` or a token `[k, 3]`."""

    def name(row: int) -> str:
        if isinstance(ids, Tracer):  # the ids are known when the call runs
            return f"row {row}"
        return f"env {int(ids[row, 1] if ids.ndim == 2 else ids[row])}"

    return name


def types_of(operands: Sequence[Any]) -> tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]:
    """Returns `Call.arguments`."""
    return tuple((operand.shape[1:], np.dtype(operand.dtype)) for operand in operands)


def _check_batch(
    node: Node, batch: Any, num_envs: int, name_row: RowName, *, one_for_all: bool = False
) -> list[jax.Array]:
    """Returns the leaves in their stored dtype; integers that may not fit are left to the call."""

    def check(leaf: Leaf, value: Any) -> jax.Array:
        try:
            array = as_array(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ActionError(f"{leaf}: expected an array, got {type(value).__name__}: {error}") from error
        shape = (num_envs, *leaf.shape)
        xp = np if isinstance(array, np.ndarray) else jnp
        if one_for_all and array.shape == leaf.shape:
            array = xp.broadcast_to(array, shape)
        if array.shape != shape:
            raise ActionError(
                f"{leaf}: got shape {array.shape}, expected {shape}, env axis first; under vmap and "
                "shard_map, split the handle like the action"
            )
        if not castable(array.dtype, leaf):
            hint = f"cast it with .astype(jnp.{leaf.stored})"
            raise ActionError(f"{leaf}: expected {leaf.stored}, got {array.dtype}; {hint}")
        if isinstance(array, np.ndarray):
            return jnp.asarray(cast_rows(leaf, array, name_row))
        may_wrap = leaf.stored.kind in "iu" and not np.can_cast(array.dtype, leaf.stored)
        return array if may_wrap else array.astype(leaf.stored)

    return flatten(node, batch, check)


def as_array(value: Any) -> jax.Array | NDArray[Any]:
    """Returns a value as an array: numbers of the host as NumPy's, because JAX would wrap large integers."""
    if isinstance(value, jax.Array):
        return value
    with suppress(jax.errors.TracerArrayConversionError):  # a list with traced values
        array = np.asarray(value)
        if array.dtype.kind in "biuf":
            return array
    return jnp.asarray(value)


def seed_words(seed: Any, num_envs: int) -> jax.Array:
    """Returns the low and high word of each env's seed, `[num_envs, 2]` uint32.

    `seed` is as in `expand_seeds`, but may be traced, or a JAX key from which each env's seed is drawn.
    """
    if _is_key(seed, num_envs):
        # 31 bits: some simulators take their seed as a C int.
        seed = jax.random.bits(seed, (num_envs,), np.uint32) >> 1
    if not isinstance(seed, Tracer):
        seeds = expand_seeds(_to_host(seed), num_envs)
        seeds = np.full(num_envs, NO_SEED) if seeds is None else seeds
        return jnp.asarray(seeds.astype("<i8").view("<u4").reshape(num_envs, 2))
    if not jnp.issubdtype(seed.dtype, np.integer) or seed.shape not in ((), (num_envs,)):
        raise TypeError(
            f"seed must be an integer or {num_envs} of them, or a key; got {seed.dtype} of shape {seed.shape}"
        )
    low = seed.astype(np.uint32)
    if seed.dtype.itemsize == 8:
        high = (seed >> 32).astype(np.uint32)
    else:  # sign-extended, so that the error for a negative seed shows its value
        high = jnp.where(seed < 0, ~np.uint32(0), np.uint32(0))
    if seed.ndim == 0:
        first, low = low, low + jnp.arange(num_envs, dtype=np.uint32)
        high = high + (low < first)  # the carry of the addition
    return jnp.stack([low, high], axis=-1)


def mask_array(mask: Any, num_envs: int) -> jax.Array:
    if mask is None:
        return jnp.ones(num_envs, np.bool_)
    if not isinstance(mask, Tracer):
        return jnp.asarray(check_mask(_to_host(mask), num_envs))
    if mask.dtype != np.bool_ or mask.shape != (num_envs,):
        raise ValueError(f"mask must be bool of shape ({num_envs},), got {mask.dtype} of shape {mask.shape}")
    return mask


def _is_key(seed: Any, num_envs: int) -> bool:
    if not isinstance(seed, jax.Array):
        return False
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        return True
    raw = seed.dtype == np.uint32 and seed.shape == (2,)
    if raw and num_envs == 2:
        raise TypeError(
            "seed: a uint32 array of shape (2,) can be an old-style key or two seeds; pass "
            "jax.random.key(...) or int32 seeds"
        )
    return raw


def _to_host(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, jax.Array) else value
