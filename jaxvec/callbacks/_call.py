"""Calls of compiled programs: handles, effects, programs' answers and arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import chex
import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import io_callback
from jax.extend.core import Jaxpr
from jax.interpreters import batching
from numpy.typing import NDArray

from jaxvec._arguments import NO_SEED, castable, check_mask, check_seeds, expand_seeds, flatten
from jaxvec._dispatch.move import Caller, Move, Verb
from jaxvec._errors import ActionError, EnvDataError, EnvIdError, StaleHandleError
from jaxvec._memory.rows import InvalidValue, conform
from jaxvec._memory.segment import Copies, into
from jaxvec._pool import registry
from jaxvec._pool.pool import Pool
from jaxvec._spec import EnvState, Leaf, PoolSpec

# ----------------------------------------------------------------------------------------------------------
# The handle: what a program carries from step to step in place of the pool.
# ----------------------------------------------------------------------------------------------------------

jax.tree_util.register_dataclass(EnvState, data_fields=["ids"], meta_fields=[])


@partial(jax.tree_util.register_dataclass, data_fields=["token"], meta_fields=["spec", "transport"])
@dataclass(frozen=True)
class Handle:
    """Envs of a pool, and the right to move them next, once.

    A pytree with one array, so it goes through `jit`, `scan`, `cond` and donation like any other, and
    its first axis is that of the envs: split it as you split observations, by indexing, reshaping,
    sharding or `vmap`, and each part is a handle to its envs.

    Each reset and step returns a new handle; the old one is stale. The data dependence from handle
    to handle is what orders the steps of a program.

    Attributes:
        token: `[num_envs, 3]` uint32: for each env the pool's id, its own, and how often it was moved.
            The pool is looked up when the program runs, so a compiled program serves every pool of
            an equal `spec`.
        spec: the shapes and dtypes of the pool's data; static, compared by value.
        transport: how a compiled program reaches the pool; static.

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
        """How many envs this is a handle to."""
        return self.token.shape[0]

    def next(self, token: jax.Array) -> Handle:
        """Returns the handle to the same envs that a call returned."""
        return Handle(token, self.spec, self.transport)


# ----------------------------------------------------------------------------------------------------------
# The effect of a call: what JAX may do to the program around it.
#
# It is a kind of `io_callback`'s: JAX neither drops, repeats nor reorders a call, and refuses `checkpoint`.
# Under `vmap`, a `cond` whose predicate is the same for all lanes stays one, so calls may stand in it,
# though JAX refuses an `io_callback` there, too. Where the predicate differs, JAX would run all branches
# and select from the results, and a `while_loop` would step all lanes until the last is done. So the
# batching rules of both are asked here first.
# ----------------------------------------------------------------------------------------------------------

# The class is not public, but what a callback does is written into every jaxpr. JAX's registries of effects
# go by class, and the rules of `cond` and `while_loop` by instance.
(_IO,) = jax.make_jaxpr(lambda: io_callback(lambda: None, None))().effects

EFFECT: Any = type("CallEffect", (type(_IO),), {"__repr__": lambda _: "jaxvec"})()

# Calls that have no effect: JAX may drop or repeat them.
PURE = (Verb.GET_ATTR, Verb.SIMULATE)

_COND = (
    "vmap of jax.lax.cond or switch, with a jaxvec call in a branch, and a predicate that differs between "
    "the vmapped instances: JAX would run all branches for all instances, and step envs that are not to be "
    "stepped. Step all envs, and choose between the results with jnp.where; reset some by mask=; or let one "
    "predicate serve all instances"
)
_WHILE = (
    "vmap of jax.lax.while_loop, with a jaxvec call in it, and a predicate that differs between the vmapped "
    "instances: JAX would step the envs of all instances until the last is done. Let one predicate serve all "
    'instances, such as .all() of theirs; envs that are done idle in a pool with autoreset_mode="EPISODIC"'
)


def _batch_cond(
    rule: Callable[..., Any],
    axis_data: Any,
    args: Sequence[Any],
    dims: Sequence[int | None],
    *,
    branches: Sequence[Any],
    **params: Any,
) -> Any:
    # The index of `platform_dependent` is the same for all lanes, even where it is batched.
    differs = dims[0] is not None and "branches_platforms" not in params
    if differs and any(EFFECT in branch.effects for branch in branches):
        raise NotImplementedError(_COND)
    return rule(axis_data, args, dims, branches=branches, **params)


def _batch_while(
    rule: Callable[..., Any], *args: Any, cond_jaxpr: Any, body_jaxpr: Any, **params: Any
) -> Any:
    if EFFECT not in {*cond_jaxpr.effects, *body_jaxpr.effects}:
        return rule(*args, cond_jaxpr=cond_jaxpr, body_jaxpr=body_jaxpr, **params)
    # Whether the predicate differs, the rule finds out, and then refuses JAX's own effect.
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
    return jaxpr.replace(jaxpr=jaxpr.jaxpr.replace(effects=effects))  # up to jax 0.11 a closed one is another


for _primitive, _batch in ((jax.lax.cond_p, _batch_cond), (jax.lax.while_p, _batch_while)):
    _rules = batching.fancy_primitive_batchers
    _rules[_primitive] = partial(_batch, _rules[_primitive])


# ----------------------------------------------------------------------------------------------------------
# A compiled program's call into a pool: what it takes and gives, and how it is answered on NumPy.
# ----------------------------------------------------------------------------------------------------------

_ID = ((3,), np.dtype(np.uint32))  # of a state

Array = NDArray[Any]
Struct = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Call:
    """All of a call that is fixed when its program is traced; equal calls compile to the same.

    The first operand and the first result are the token, `[n, 3]` uint32. More operands, by verb:
    reset `[n, 2]` uint32 seeds (low and high word, as `expand_seeds`) and an `[n]` bool mask; step the
    leaves of the action, `[n, ...]`; send those, `[k, ...]`, and `[k]` int32 env ids; call the leaves of
    its arguments, `[n, ...]`; restore `[n, 3]` uint32 ids of states; simulate those and the leaves of the
    action. More results: of reset, step, recv, restore and simulate the leaves of the time step, of save
    `[n, 3]` ids, of call `answers`. A read, which moves nothing, has those and no token. Nor does simulate
    move anything: of its token only the pool counts, and the ids of the states after it take its place.

    Attributes:
        verb: what is asked for.
        spec: of the pool.
        transport: as `choose_transport` returned it.
        fresh: of a reset, whether it starts from the pool, with all envs, and not from a handle.
        extra: of a reset its options, and whether it has a mask; of a call what to call; pickled.
        arguments, answers: of each argument and result of a call the shape, without the env axis, and
            the dtype.
        elastic: of a fresh reset, whether it starts from the pool's family, with as many envs as the
            token has rows; see `registry.publish_family`.
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

    @property
    def copies(self) -> Copies:
        """Delivers the leaves of the time step that the program reads."""
        return Copies(frozenset(place - 1 for place in self.unread))  # the token comes before them

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
        ids, rows = pool.simulate(ids, actions, deliver=call.copies if out is None else into(out[1:]))
        if out is None:
            return [ids, *rows]
        out[0][:] = ids
        return list(out)
    move = move_of(call, pool, token)
    if call.verb is Verb.GET_ATTR:
        given = ask_envs(call, pool, move, [])
        return given if out is None else [*into(out)(given, slice(None))]
    deliver = call.copies if out is None else into(out[1:])
    match call.verb:
        case Verb.RESET:
            words, mask = rest
            seeds = np.ascontiguousarray(words).view(np.int64).reshape(len(words))
            check_seeds(seeds)
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
            given = registry.restore(pool, move, rest[0], deliver=deliver)
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
    values = pool.env_calls.call(move, name, each, {})
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


def _wrong_answer(slot: int, name: str, why: str) -> EnvDataError:
    return EnvDataError(
        f"env {slot} returned wrong data from {name}: {why}", env_id=slot, worker=None, operation=name
    )


def annotate(verb: str, by: str) -> jax.profiler.TraceAnnotation:
    """Makes the block an event of `jax.profiler`'s trace, if it makes one."""
    return jax.profiler.TraceAnnotation(f"{verb} ({by})")


def pool_id_of(token: Array) -> int:
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


# ----------------------------------------------------------------------------------------------------------
# Checks what users pass to the verbs, traced or not, and makes operands of it.
# ----------------------------------------------------------------------------------------------------------


def check_is_handle(handle: Any, verb: str) -> PoolSpec:
    """Returns the handle's spec; raises `TypeError` if it is no handle, or can't be used now."""
    if not isinstance(handle, Handle):
        raise TypeError(
            f"{verb} takes the handle that jaxvec.reset or jaxvec.step returned, got {type(handle).__name__}"
        )
    _check_same_precision(handle.spec)
    return handle.spec


def _check_same_precision(spec: PoolSpec) -> None:
    for leaf in (*spec.action_leaves, *spec.timestep_leaves):
        if leaf.is_object:
            raise TypeError(
                f"{leaf}: its space has no fixed shape, so the pool keeps it as Python objects, which a "
                "compiled program can't take; wrap the env so that this leaf is an array, or step the pool "
                "from Python"
            )
        if jax.dtypes.canonicalize_dtype(leaf.stored) != leaf.stored:
            raise TypeError(
                f"{leaf}: the pool stores {leaf.stored}, but jax_enable_x64 is off; turn it on, or make the "
                "pool with jaxvec.make while it is off"
            )


def check_action(spec: PoolSpec, action: Any, num_envs: int) -> list[jax.Array]:
    """Returns the action's leaves, `[num_envs, ...]`, in the order and dtypes of the spec."""

    def check(leaf: Leaf, value: Any) -> jax.Array:
        try:
            array = jnp.asarray(value)
        except (TypeError, ValueError) as error:
            raise ActionError(f"{leaf}: expected an array, got {type(value).__name__}: {error}") from error
        shape = (num_envs, *leaf.shape)
        try:
            chex.assert_shape(array, shape)
        except AssertionError:
            raise ActionError(
                f"{leaf}: got shape {array.shape}, expected {shape}, env axis first; under vmap and "
                "shard_map, split the handle like the action"
            ) from None
        if not castable(array.dtype, leaf):
            raise ActionError(f"{leaf}: expected {leaf.stored}, got {array.dtype}")
        return array.astype(leaf.stored)

    return flatten(spec.action, action, check)


def seed_words(seed: Any, num_envs: int) -> jax.Array:
    """Returns `[num_envs, 2]` uint32: low and high word of each seed, as `expand_seeds`.

    Args:
        seed: what `expand_seeds` takes, also traced; or a JAX key, for a seed of each env's own.
        num_envs: how many.
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
    else:  # sign-extended, so that a negative seed is refused by its own name
        high = jnp.where(seed < 0, ~np.uint32(0), np.uint32(0))
    if seed.ndim == 0:
        first, low = low, low + jnp.arange(num_envs, dtype=np.uint32)
        high = high + (low < first)  # the carry
    return jnp.stack([low, high], axis=-1)


def mask_array(mask: Any, num_envs: int) -> jax.Array:
    """Returns `mask` as `[num_envs]` bool; raises `ValueError` if it is anything else."""
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
            "seed: a uint32 array of shape (2,) is either an old-style key or two seeds; pass "
            "jax.random.key(...) or int32 seeds"
        )
    return raw


def _to_host(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, jax.Array) else value
