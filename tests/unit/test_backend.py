"""The door for backends: one written as `docs/developers/design.md` describes, with its own workers."""

import jax
import numpy as np
import pytest
from support.disasters import DEATHS, failing

import jaxvec
from jaxvec._options import reject
from jaxvec.backends import Backend, Launcher, LocalLauncher, ProcessWorkers
from jaxvec.testing import CountingEnv


class Advised(Backend):
    """Processes on this machine, with advice for those that die. It notes their starts."""

    def __init__(self, advice):
        self.advice, self.launched = advice, []

    def check(self, config):
        reject("does not go with advice", {"spare_envs": config.spare_envs})

    def num_workers(self, num_instances, timeout):
        return min(num_instances, 2)

    def start(self, recipe, *, learn_info):
        return ProcessWorkers(recipe, AdvisedLauncher(self, recipe), learn_info=learn_info)


class AdvisedLauncher(Launcher):
    def __init__(self, backend, recipe):
        self.backend = backend
        self.local = LocalLauncher(recipe)

    def launch(self, worker):
        process, channel = self.local.launch(worker)
        process.output_advice = lambda: self.backend.advice
        self.backend.launched.append(worker)
        return process, channel

    def close(self):
        self.local.close()


def test_a_backend_of_a_user_starts_and_replaces_workers(make):
    backend = Advised("Call the operator.")
    policy = jaxvec.Restart(max_restarts=1)
    envs, expected = (
        make(failing("step", DEATHS["os._exit"][0]), 4, on_fault=policy, **options)
        for options in ({"backend": backend}, {"num_workers": 2})
    )
    actions = np.ones((20, 4), int)
    actions[7, 2] = 7
    rows = []
    for pool in (envs, expected):
        handle, first = jaxvec.reset(pool, seed=3)
        _, rest = jax.jit(lambda handle: jax.lax.scan(jaxvec.step, handle, actions))(handle)
        rows.append((first, rest))
    jax.tree.map(np.testing.assert_array_equal, *rows)
    assert rows[0][1].info["fault"].sum() == 2  # of both envs of the worker
    assert backend.launched == [0, 1, 1]
    with pytest.raises(jaxvec.WorkerDiedError, match=r"Call the operator\."):
        envs.step([0, 0, 7, 0])


def test_a_backend_refuses_options(make):
    with pytest.raises(ValueError, match="spare_envs does not go with advice"):
        make(CountingEnv, 2, backend=Advised(""), spare_envs=1)
    with pytest.raises(ValueError, match='backend must be "process", "serial", or a jaxvec.Backend'):
        make(CountingEnv, 2, backend="threads")
