"""The checks of the command `check`: the requirements of jaxvec, and those of Gymnasium."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from gymnasium.utils.env_checker import check_env as gymnasium_check_env

from jaxvec import testing
from jaxvec._errors import EnvError, JaxvecError, UnsupportedSpaceError
from jaxvec._options import Workers
from jaxvec.cli import _in_workers
from jaxvec.cli._target import Target, lacks_package
from jaxvec.spaces import pad
from jaxvec.testing import Timesteps, find_difference, step_randomly

OK = "ok"
FAIL = "FAIL"
WARN = "warn"
NOT_RUN = "not run"

_BUILDS = "the constructor returns a gymnasium.Env"
_SPACES = "its spaces have fixed shapes, and dtypes that JAX supports"
_DATA = "reset and step return data that match the spaces"
_REPRODUCIBLE = "equal seeds and actions give equal data"
_STAGES = (_BUILDS, _SPACES, _DATA, _REPRODUCIBLE)  # in their order
_WORKER = "it runs in a worker process"
_ISOLATED = "two envs of one process give the same data as each alone"
_NO_JAX = "workers with it do not import JAX"
_SAVED = "its states can be saved, also late in an episode"
_GYMNASIUM = "Gymnasium's check_env"

_NO_OPTIONS = (
    "\nGymnasium resets with options=None, or with options={}. An option needs a default, as in "
    "(options or {}).get(name, default); or pass --reset-options JSON"
)
_NOT_RESUMED = (
    "{0}: in another process, which got the state, the env returned {4} at {2}, but {3} in the first one.\n"
    "Perhaps it uses the order of a set of strings, which is another in each run: sort it, or pass "
    "Workers(env={{'PYTHONHASHSEED': '0'}}). Or it uses a global variable, a file or a clock. In one "
    "process, its states are exact."
)
_WORKER_STEPS = 50


@dataclass(frozen=True)
class Check:
    """Result of one check: the requirement, its status, the reason if it is not met, number of warnings."""

    name: str
    status: str
    reason: str = ""
    warnings: int = 0


def checks(target: Target) -> Iterator[Check]:
    stages = _check_stages(target)
    yield from stages
    # An env that fails one of the first three stages would also fail in a worker, for the known reason.
    sound = all(check.status == OK for check in stages[:3])
    yield from _check_workers(target) if sound else [Check(name, NOT_RUN) for name in (_WORKER, _ISOLATED)]
    yield from _check_options(target) if sound else [Check(name, NOT_RUN) for name in (_NO_JAX, _SAVED)]
    built = stages[0].status == OK
    yield _check_with_gymnasium(target) if built else Check(_GYMNASIUM, NOT_RUN)


def _check_stages(target: Target) -> list[Check]:
    """Runs `jaxvec.testing.check_env`, which stops at the first violation. Returns a `Check` per stage."""
    try:
        testing.check_env(target.env_fn())
        return [Check(name, OK) for name in _STAGES]
    except UnsupportedSpaceError as error:
        stage = _SPACES
        reason = str(error)
    except EnvError as error:
        if lacks_package(error):
            raise  # a usage error, not a violation
        stage = _BUILDS if error.operation == "constructor" else _DATA
        reason = f"{error}{_NO_OPTIONS if error.operation == 'reset' else ''}"
    except AssertionError as error:
        stage = _REPRODUCIBLE
        reason = str(error)
    failed = _STAGES.index(stage)
    checks = [Check(name, OK) for name in _STAGES[:failed]] + [Check(stage, FAIL, reason)]
    return checks + [Check(name, NOT_RUN) for name in _STAGES[failed + 1 :]]


def _step_in_workers(target: Target, num_workers: int) -> Timesteps:
    """Steps two envs, in one process or in one each."""
    with target.make(num_envs=2, num_workers=num_workers) as envs:
        return step_randomly(envs, envs.reset(seed=0), _WORKER_STEPS)


def _check_workers(target: Target) -> tuple[Check, Check]:
    """Checks that workers can have the env, one and two of them."""
    try:
        together = _step_in_workers(target, 1)
    except Exception as error:
        failed = Check(_WORKER, FAIL, str(error) if isinstance(error, JaxvecError) else repr(error))
        if isinstance(error, EnvError) and error.operation == "constructor":  # may be that of the second env
            alone = _check(_WORKER, lambda: _step_in_workers(target, 2))
            if alone.status == OK:
                return alone, replace(failed, name=_ISOLATED)
        return failed, Check(_ISOLATED, NOT_RUN)
    return Check(_WORKER, OK), _check_isolation(target, together)


def _check_options(target: Target) -> list[Check]:
    """Checks what some pools need: little memory per worker, and states that can be saved."""
    checks = [Check(_NO_JAX, OK), Check(_SAVED, OK)]
    try:
        with target.make(num_envs=1, num_workers=1, states=1) as envs:
            step_randomly(envs, envs.reset(seed=0), _WORKER_STEPS)
            if any(envs.map(_in_workers.imports_jax)):
                checks[0] = Check(
                    _NO_JAX,
                    WARN,
                    "Each worker imports JAX, which takes memory and threads. Use NumPy in the env and in "
                    "the variables of its modules; np.asarray converts arrays.",
                    1,
                )
            envs.reset()
            state = envs.save()
            space = envs.single_action_space
            for _ in range(_WORKER_STEPS):
                envs.step(pad(space, [space.sample()]))
                state = envs.save()  # after each step, as the env may create objects late
            packed = envs.pack_states(state)
            steps = step_randomly(envs, envs.restore(state), _WORKER_STEPS)
        # A new interpreter also has another seed of the hashes of strings.
        workers = Workers(start_method="spawn")
        with target.make(num_envs=1, num_workers=1, states=1, workers=workers) as envs:
            resumed = step_randomly(envs, envs.restore(envs.unpack_states(packed)), _WORKER_STEPS)
        if (difference := find_difference(steps, resumed)) is not None:
            checks[1] = Check(_SAVED, WARN, _NOT_RESUMED.format(*difference), 1)
    except JaxvecError as error:
        checks[1] = Check(_SAVED, WARN, f"{error}\nThe env works without states.", 1)
    return checks


def _check_isolation(target: Target, together: Timesteps) -> Check:
    """Compares two envs that one process stepped in turns with the same envs in a process each."""
    try:
        alone = _step_in_workers(target, 2)
        difference = find_difference(alone, together)
        if difference and find_difference(alone, _step_in_workers(target, 2)):
            return Check(_ISOLATED, NOT_RUN)  # not reproducible in any case, as another check has found
    except JaxvecError as error:
        return Check(_ISOLATED, FAIL, str(error))
    if difference is None:
        return Check(_ISOLATED, OK)
    name, env_id, call, value, other = difference
    return Check(
        _ISOLATED,
        FAIL,
        f"{name}: env {env_id} returned {other} at {call} in one process with env {1 - env_id}, but {value} "
        "alone.\nThey share state, such as a global variable, a class attribute or a simulator that exists "
        "once per process. Move it into the env, or give each env its own process: "
        "jaxvec.make(..., num_workers=num_envs)",
    )


def _check_with_gymnasium(target: Target) -> Check:
    """Runs Gymnasium's `check_env` on the env without its wrappers, and includes the warnings."""

    def check() -> None:
        with closing(target.env_fn()()) as env:
            inner = env.unwrapped
            if target.is_wrapped:
                inner = _in_workers.LegalUse(lambda: env.unwrapped, target.mask_key, target.reset_options)
            gymnasium_check_env(inner, skip_render_check=True)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = _check(_GYMNASIUM, check)
    # Without the terminal colours and the mark that Gymnasium adds.
    texts = [re.sub(r"\x1b\[[\d;]*m", "", str(warning.message)).removeprefix("WARN: ") for warning in caught]
    reuses = "share an object" in outcome.reason  # Gymnasium's error for envs that return one array twice
    if reuses:  # harmless: a worker copies each observation before the env's next call
        texts.append(f"{outcome.reason} jaxvec copies observations, so its pools work with this env.")
    texts = [
        text
        for text in dict.fromkeys(texts)
        if not (target.is_wrapped and "different from the unwrapped version" in text)
    ]
    if outcome.status == FAIL and not reuses:
        return Check(_GYMNASIUM, FAIL, "\n".join([outcome.reason, *texts]), len(texts))
    return Check(_GYMNASIUM, WARN if texts else OK, "\n".join(texts), len(texts))


def _check(name: str, function: Callable[[], Any]) -> Check:
    try:
        function()
    except JaxvecError as error:
        return Check(name, FAIL, str(error))
    except Exception as error:
        return Check(name, FAIL, f"{type(error).__name__}: {error}")
    return Check(name, OK)
