"""What an engine refuses, in the errors' words."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._errors import EnvIdError, InFlightError, JaxvecError, ResetNeededError, StaleHandleError
from jaxvec._handoff._admission import Admission
from jaxvec._handoff._engine import Engine, Status
from jaxvec._handoff._move import name_caller


def refusal(
    status: Status,
    env_ids: NDArray[Any],
    generation: NDArray[np.uint32] | None,
    *,
    engine: Engine,
    admission: Admission,
    pool_id: int,
) -> JaxvecError:
    """Returns the error of a call that the engine refused. The caller is inside, so nothing changes.

    Args:
        status: that the engine answered with.
        env_ids: `[n]` that it was asked about.
        generation: `[n]` of the caller's handle to them, if it was asked about that.
        engine: of the pool.
        admission, pool_id: of the pool, too.
    """
    num_envs = len(engine.generation)
    match status:
        case Status.NO_SUCH_ENV:
            foreign = env_ids[(env_ids < 0) | (env_ids >= num_envs)]
            return EnvIdError(
                f"env_id {foreign[0]} is out of range for pool {pool_id} of {num_envs} envs "
                f"(0 to {num_envs - 1}); nothing was stepped"
            )
        case Status.NAMED_TWICE:
            return EnvIdError(
                f"env_id {np.bincount(env_ids).argmax()} is named twice; nothing was stepped. Under vmap, "
                "give each instance a handle to envs of its own"
            )
        case Status.STALE:
            now = engine.generation[env_ids]
            stale = int(np.flatnonzero(now != generation)[0])
            assert generation is not None
            return StaleHandleError(
                f"stale handle: it is from call {generation[stale]} to env {env_ids[stale]} of pool "
                f"{pool_id}, but the latest is call {now[stale]}, by {name_caller(engine.last_caller)}. A "
                "handle is used once, like a donated buffer: pass on the one that the latest call returned. "
                "After a call on the host, begin with jaxvec.reset(envs); to reset in a program that steps, "
                "use jaxvec.reset(handle)"
            )
        case Status.PART:
            some, together = admission.part(env_ids), admission.together
            first = int(some[0]) // together * together
            named = np.sort(some[some // together == first // together]).tolist()
            return EnvIdError(
                f"envs {first} to {first + together - 1} are one batched env, which moves as a whole, and "
                f"only {named} of them are named; name all or none of them. Nothing was stepped"
            )
        case Status.IN_FLIGHT:
            return InFlightError(
                f"envs {env_ids[admission.in_flight[env_ids]].tolist()} are in flight: they were sent, and "
                "recv has not returned them yet; call recv first. Nothing was stepped"
            )
        case Status.NEEDS_RESET:
            waiting = env_ids[admission.needs_reset[env_ids]].tolist()
            fresh = not engine.generation.any()
            why = "have not been reset" if fresh else "have ended their episode or never been reset"
            return ResetNeededError(
                f"envs {waiting} {why}; reset them first (with autoreset_mode DISABLED: "
                "reset(..., mask=terminated | truncated)). Nothing was stepped"
            )
        case _:
            raise AssertionError(f"{status!r} is nothing that a caller is told here")


def too_few(returned: str, in_flight: int, *, resetting: int | None = None) -> InFlightError:
    """Returns the error of a `recv` for which too few envs are in flight, `Status.TOO_FEW`.

    Args:
        returned: how many it returns.
        in_flight: how many are.
        resetting: how many more a reset by mask would send, which ends by a `recv`.
    """
    if resetting is None:
        return InFlightError(
            f"recv returns {returned} envs, but only {in_flight} are in flight; send more first"
        )
    return InFlightError(
        f"reset returns {returned} envs, as recv does, but with the {resetting} of mask only "
        f"{in_flight + resetting} would be in flight; send more first, or start the reset by "
        "VectorEnv.send_reset. Nothing was reset"
    )
