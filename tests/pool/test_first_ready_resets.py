"""Resets of some envs of an asynchronous pool, compared with a model."""

import threading

import numpy as np
import pytest
from support.disasters import PATIENCE, GatedEnv, within
from test_first_ready import check_rows, how  # noqa: F401

import jaxvec
from jaxvec.testing import CountingEnv

# --- Resets by mask ---------------------------------------------------------------------------


class WaitingReset(CountingEnv):
    """Its reset waits for a file if the options say so."""

    def reset(self, *, seed=None, options=None):
        while options and "gate" in options and not options["gate"].exists():
            threading.Event().wait(0.001)
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("dispatch", ["native", "portable"])
def test_a_reset_that_has_yet_to_begin_keeps_its_seed_and_options(make, dispatch, tmp_path):
    """Env 1 waits behind the reset of env 0, its worker's other; meanwhile env 3 is reset, and received."""
    gate = tmp_path / "open"
    envs = make(WaitingReset, 4, num_workers=2, batch_size=2, dispatch=dispatch)
    envs.reset()
    envs.recv()
    left, last = np.arange(4) < 2, np.arange(4) == 3
    envs.reset_async(mask=left, seed=10, options=[{"gate": gate}, {"level": 1}, None, None])
    for reset in (envs.reset, envs.reset_async):
        for mask, flying in ((left, r"\[0, 1\]"), (~left | [False, True, False, False], r"\[1\]")):
            with pytest.raises(jaxvec.PendingEnvError, match=f"envs {flying} are pending"):
                reset(mask=mask, seed=30, options={"level": 30})
    # Worker 0 is busy, but is not asked, since the options of its envs stay.
    within(lambda: envs.reset_async(mask=last, seed=20, options={"level": 3}))
    check_rows(envs.recv(at_least=1, timeout=PATIENCE), [3], [-1], resets=2)
    gate.touch()
    check_rows(envs.recv(timeout=PATIENCE), [0, 1], [-1, -1], resets=2)
    assert [(info["seed"], info["options"]) for info in envs.infos()] == [
        (10, {"gate": gate}),
        (11, {"level": 1}),
        (-1, None),
        (23, {"level": 3}),
    ]
    envs.reset_async(mask=~left)  # without options: none are left over from before
    ids = envs.recv().info["env_id"]
    assert sorted(ids.tolist()) == [2, 3]
    assert [info["options"] for info in envs.infos([2, 3])] == [None, None]
    with pytest.raises(jaxvec.PendingEnvError, match="with the 0 of mask only 0 would be pending"):
        envs.reset(mask=np.zeros(4, bool))


# --- Resets in two halves, and a caller's own time limit -----------------------------------------


def test_a_reset_that_was_sent_is_received(make, how):
    envs = make(CountingEnv, 3, **how)
    envs.reset_async(seed=5, options=[{"level": 1}, None, {"level": 3}])
    with pytest.raises(jaxvec.PendingEnvError):
        envs.step([0, 0, 0])
    assert envs.recv().obs[:, :2].tolist() == [[1, 0]] * 3
    assert [info["seed"] for info in envs.infos()] == [5, 6, 7]
    assert [info["options"] for info in envs.infos()] == [{"level": 1}, None, {"level": 3}]
    envs.step([0, 0, 0])


def test_some_envs_reset_while_others_step(make, how):
    envs = make(CountingEnv, 4, **how)
    envs.reset()
    envs.reset_async(mask=np.array([True, False, True, False]))
    with pytest.raises(jaxvec.PendingEnvError):  # two are in flight, recv returns four
        envs.recv()
    envs.send([1, 3], env_id=[1, 3])
    assert envs.recv().obs.tolist() == [[2, 0, 0, -1], [1, 1, 1, 1], [2, 0, 0, -1], [1, 1, 1, 3]]


@pytest.mark.parametrize("dispatch", ["native", "portable"])
def test_after_a_callers_own_timeout_the_envs_can_be_waited_for_again(make, dispatch, tmp_path):
    gate = tmp_path / "gate"
    envs = make(GatedEnv, 2, gate=gate, dispatch=dispatch)
    envs.reset()
    envs.send([7, 0])
    for _ in range(2):
        with pytest.raises(jaxvec.NotReadyError, match="call it again to continue waiting"):
            envs.recv(timeout=0.01)
    with pytest.raises(jaxvec.PendingEnvError):
        envs.step([0, 0])
    gate.touch()
    assert envs.recv(timeout=PATIENCE).obs.tolist() == [[1, 1, 1, 7], [1, 1, 1, 0]]
    assert envs.step([1, 2]).obs[:, 3].tolist() == [1, 2]  # no stale row


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ([{}], "got 1 dicts for 2 envs"),
        ("fast", "must be a dict, or one for each env, not str"),
        ([{}, 3], "options of env 1 must be a dict or None, not int"),
    ],
)
def test_wrong_options_are_refused(make, how, options, error):
    envs = make(CountingEnv, 2, **how)
    for reset in (envs.reset, envs.reset_async, lambda options: jaxvec.reset(envs, options=options)):
        with pytest.raises((TypeError, ValueError), match=error):
            reset(options=options)
    assert envs.reset().obs[:, 0].tolist() == [1, 1]
