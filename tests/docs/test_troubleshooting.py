"""The messages in docs/troubleshooting.md are those that users see."""

import os
import re
import signal
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxvec
from jaxvec.testing import CountingEnv

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


class Env(CountingEnv):
    """Fails as its action says."""

    def step(self, action):
        if action == 1:
            raise ValueError("the simulator is lost")
        if action == 2:
            threading.Event().wait()
        if action == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def step(action, **options):
    with jaxvec.make(Env, 2, num_workers=2, **options) as envs:
        envs.reset(seed=0)
        envs.step(action)


def use_a_handle_twice():
    with jaxvec.make(Env, 2) as envs:
        handle, _ = jaxvec.reset(envs, seed=0)
        jaxvec.step(handle, np.zeros(2, int))
        jaxvec.step(handle, np.zeros(2, int))


def step_a_broken_pool():
    with jaxvec.make(Env, 2) as envs:
        envs.reset(seed=0)
        with pytest.raises(jaxvec.EnvError):
            envs.step([1, 0])
        envs.step([0, 0])


def fail_inside_a_program():
    with jaxvec.make(Env, 2) as envs:
        handle, _ = jaxvec.reset(envs, seed=0)
        jax.block_until_ready(jax.jit(jaxvec.step)(handle, np.array([0, 1])))


DISASTERS = {
    "stale handle": use_a_handle_twice,
    "was killed by SIGKILL": lambda: step([0, 3]),
    "step timed out": lambda: step([0, 2], timeouts=jaxvec.Timeouts(step=1)),
    "is broken since": step_a_broken_pool,
    "JaxRuntimeError": fail_inside_a_program,
}


def text_of(name):
    """Returns the block of text in the section whose heading contains a name."""
    sections = re.split(r"^### ", PAGE.read_text(), flags=re.M)
    (section,) = [each for each in sections if name in each.partition("\n")[0]]
    return re.search(r"```text\n(.*?)\n```", section, re.S)[1]


@pytest.mark.parametrize("name", DISASTERS)
def test_the_page_has_the_exact_text(name):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of any type
        DISASTERS[name]()
    first, *_ = str(caught.value).splitlines()
    assert text_of(name) == re.sub(r"pool \d+", "pool 1", f"{caught.type.__name__}: {first}")
