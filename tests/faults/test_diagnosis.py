"""Messages about failures: which worker, which env, and which action."""

import os
import signal

import pytest
from support.probe import failures

import jaxvec
from jaxvec.testing import CountingEnv


class KilledEnv(CountingEnv):
    """Kills its worker at action 7."""

    def step(self, action):
        if action == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


@pytest.mark.parametrize(
    ("num_workers", "name", "env_ids"),
    [
        (3, "worker 2", (2,)),  # the activity names its only env
        (2, r"worker 1 \(envs 1, 2\)", (1, 2)),
        (1, r"worker 0 \(envs 0 to 2\)", (0, 1, 2)),
    ],
)
def test_a_death_in_a_step_names_worker_env_and_action(make, num_workers, name, env_ids):
    envs = make(KilledEnv, 3, num_workers=num_workers)
    envs.reset()
    text = (
        rf"^{name} was killed by SIGKILL .*while stepping env 2 with action 7\. Look at the worker's output"
    )
    with pytest.raises(jaxvec.WorkerDiedError, match=text) as caught:
        envs.step([1, 1, 7])
    assert caught.value.env_ids == env_ids
    assert (caught.value.worker, caught.value.exitcode) == (num_workers - 1, -signal.SIGKILL)


def test_a_long_action_is_shortened_only_where_something_is_left_out():
    texts = [failures.describe_action("x" * length) for length in range(2000)]
    shortened = [length for length, text in enumerate(texts) if "characters left out" in text]
    assert shortened == [*range(shortened[0], 2000)]
    assert texts[shortened[0] - 1] == repr("x" * (shortened[0] - 1))
    assert " 1 characters left out " in texts[shortened[0]]
