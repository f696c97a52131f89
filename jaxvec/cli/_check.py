"""`check ENV`: whether an env keeps jaxvec's contract, and Gymnasium's."""

from __future__ import annotations

import re
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from gymnasium.utils.env_checker import check_env as gymnasium_check_env

from jaxvec import testing
from jaxvec._errors import EnvError, JaxvecError, UnsupportedSpaceError
from jaxvec.cli import _target
from jaxvec.cli._command import FAILED, FINE, Command, Outcome, lacks_package
from jaxvec.cli._target import Target

OK, FAIL, WARN, NOT_RUN = "ok", "FAIL", "warn", "not run"

_BUILDS, _SPACES, _DATA, _REPRODUCIBLE = _STAGES = (
    "the constructor returns a gymnasium.Env",
    "its spaces have fixed shapes, and dtypes that JAX has",
    "reset and step return what the spaces say",
    "the same seed and actions give the same data",
)
_WORKER = "it steps in a worker process"
_GYMNASIUM = "Gymnasium's check_env"

_REUSE = "share an object"  # says Gymnasium of envs that return the same arrays again

_NUM_STEPS = 100


@dataclass(frozen=True)
class Check:
    """What came of one check.

    Attributes:
        name: what should be so.
        status: `"ok"`, `"FAIL"`, `"warn"` or `"not run"`.
        reason: why it is not ok.
        warnings: how many it gave.
    """

    name: str
    status: str
    reason: str = ""
    warnings: int = 0


def run(options: Namespace) -> Outcome:
    """Checks an env."""
    target = _target.find(options)
    checks = list(_checks(target))
    failed = sum(check.status == FAIL for check in checks)
    lines = [f"{check.status:8} {check.name}{_indent(check.reason)}" for check in checks]
    warned = sum(check.warnings for check in checks)
    verdict = f"{failed} of {len(checks)} checks failed" if failed else "ok"
    if warned:
        verdict += f", with {warned} warning{'s' if warned > 1 else ''}"
    lines.append(f"\n{target.name}: {verdict}")
    record = {
        "schema": "jaxvec.check/1",
        "env": target.name,
        "kwargs": target.kwargs,
        "ok": not failed,
        "checks": [asdict(check) for check in checks],
    }
    return Outcome(record, "\n".join(lines), FAILED if failed else FINE)


def _checks(target: Target) -> Iterator[Check]:
    ours = list(_our_contract(target))
    yield from ours
    sound = all(check.status == OK for check in ours[:3])  # an env that isn't would fail in the others, too
    yield _check(_WORKER, lambda: _step_in_worker(target)) if sound else Check(_WORKER, NOT_RUN)
    built = ours[0].status == OK
    yield _of_gymnasium(target) if built else Check(_GYMNASIUM, NOT_RUN)


def _our_contract(target: Target) -> Iterator[Check]:
    """Yields what `jaxvec.testing.check_env` came to: it stops at the first breach."""
    (env_fn,) = target.env_fns(1)
    try:
        testing.check_env(env_fn, num_steps=_NUM_STEPS)
        stage, reason = None, ""
    except UnsupportedSpaceError as error:
        stage, reason = _SPACES, str(error)
    except EnvError as error:
        if lacks_package(error):
            raise  # not the env's fault
        if error.operation == "constructor":
            stage, reason = _BUILDS, str(error)
        else:
            stage, reason = _DATA, str(error)
    except AssertionError as error:
        stage, reason = _REPRODUCIBLE, str(error)
    reached = len(_STAGES) if stage is None else _STAGES.index(stage)
    for place, name in enumerate(_STAGES):
        yield (
            Check(name, OK)
            if place < reached
            else Check(name, NOT_RUN)
            if place > reached
            else Check(name, FAIL, reason)
        )


def _step_in_worker(target: Target) -> None:
    with target.make(num_envs=2, num_workers=1) as envs:
        envs.reset(seed=0)
        envs.action_space.seed(0)
        for _ in range(10):
            envs.step(envs.action_space.sample())


def _of_gymnasium(target: Target) -> Check:
    """Returns what Gymnasium finds wrong, on the env itself, without its wrappers; its warnings, too."""

    def check() -> None:
        (env_fn,) = target.env_fns(1)
        with closing(env_fn()) as env:
            gymnasium_check_env(env.unwrapped, skip_render_check=True)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = _check(_GYMNASIUM, check)
    said = [_plain(str(warning.message)) for warning in caught]
    reuses = _REUSE in found.reason
    if reuses:  # a pool copies each row before the env's next call
        said.append(f"{found.reason} A pool doesn't mind.")
    said = list(dict.fromkeys(said))
    if found.status == FAIL and not reuses:
        return Check(_GYMNASIUM, FAIL, "\n".join([found.reason, *said]), len(said))
    return Check(_GYMNASIUM, WARN if said else OK, "\n".join(said), len(said))


def _plain(text: str) -> str:
    """Returns what Gymnasium warns of, without its colours and marks."""
    return re.sub(r"\x1b\[[\d;]*m|^WARN: ", "", re.sub(r"^\x1b\[\d+m", "", text))


def _check(name: str, function: Callable[[], Any]) -> Check:
    try:
        function()
    except JaxvecError as error:
        return Check(name, FAIL, str(error))
    except Exception as error:
        return Check(name, FAIL, f"{type(error).__name__}: {error}")
    return Check(name, OK)


def _indent(reason: str) -> str:
    return "".join(f"\n         {line}" for line in reason.splitlines())


def _add_arguments(parser: ArgumentParser) -> None:
    _target.add_arguments(parser)


COMMAND = Command(
    name="check",
    summary="check that an env keeps jaxvec's contract, and Gymnasium's",
    details="""\
It steps the env with random actions, in this process and in a worker, and has Gymnasium's own check_env
look at it. Observations have to be members of their space. A breach is a FAIL, and the exit status 1; what
Gymnasium warns of is a warning, and fails nothing.

--json prints {"schema": "jaxvec.check/1", "env": TEXT, "kwargs": {…}, "ok": BOOL, "checks": [{"name": TEXT,
"status": "ok", "FAIL", "warn" or "not run", "reason": TEXT, "warnings": COUNT}]}.

examples:
  python -m jaxvec check CartPole-v1
  python -m jaxvec check my_package.envs:make_env --kwargs '{"size": 5}'
  python -m jaxvec check Pendulum-v1 --json""",
    add_arguments=_add_arguments,
    run=run,
)
