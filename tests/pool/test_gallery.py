"""The families of the gallery: each gives what Gymnasium's loop gives, and its states and pictures work.

`benchmarks/families.py` lists them, and writes the page from what it measured. Here they are compared.
"""

import json
from copy import deepcopy

import jax
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from support.oracle import SEED, assert_same, oracle_steps, rollout, sample_actions

import jaxvec

families = pytest.importorskip("benchmarks.families", reason="the benchmarks are not beside the tests")

pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries

NUM_ENVS = 2


@pytest.fixture(params=families.FAMILIES, ids=families.slug)
def family(request, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # some write files where they are
    for name, value in (("MUJOCO_GL", "egl"), ("SDL_VIDEODRIVER", "dummy"), ("SDL_AUDIODRIVER", "dummy")):
        monkeypatch.setenv(name, value)
    if not families.is_installed(request.param):
        pytest.skip(f"not installed: pip install {request.param.install}")
    return request.param


def plain_steps(make_env, actions, num_steps):
    """Returns what jaxvec should return after the reset and each step, from plain envs with vector rewards.

    The envs run one after the other, since some share a generator with all envs of their process.
    """
    runs = [plain_run(make_env, actions, number, num_steps) for number in range(NUM_ENVS)]
    space = make_env().observation_space
    zero = next(iterate(batch_space(space, 1), create_empty_array(space, 1, np.zeros)))

    def batch(trees):
        return concatenate(space, trees, create_empty_array(space, NUM_ENVS, np.zeros))

    for results in zip(*runs, strict=True):
        obs, reward, terminated, truncated, final, returned, length = zip(*results, strict=True)
        over = np.array(terminated) | np.array(truncated)
        info = {
            "env_id": np.arange(NUM_ENVS, dtype=np.int32),
            "episode_return": np.stack(returned),
            "episode_length": np.array(length, np.int32),
            "final_obs": batch([zero if each is None else each for each in final]),
            "_final_obs": over,
        }
        flags = np.array(terminated), np.array(truncated)
        yield jaxvec.TimeStep(batch(obs), np.stack(reward), *flags, info), np.ones(NUM_ENVS, bool)


def plain_run(make_env, actions, number, num_steps):
    """Returns an env's results: (obs, reward, terminated, truncated, last obs or None, return, length)."""
    env = make_env()
    batched = batch_space(env.action_space, NUM_ENVS)
    start, _ = deepcopy(env.reset(seed=SEED + number))
    results, over, total, length = [], True, 0, 0
    for t in range(num_steps):
        total, length = (0, 0) if over else (total, length)
        action = [*iterate(batched, jax.tree.map(lambda leaf, t=t: leaf[t], actions))][number]
        obs, reward, terminated, truncated, _ = env.step(action)
        reward, over, final = np.array(reward, float), terminated or truncated, None
        total, length = total + reward, length + 1
        if over:
            final = deepcopy(obs)
            obs, _ = env.reset()
        results.append(deepcopy((obs, reward, terminated, truncated, final, total, length)))
    env.close()
    none = np.zeros_like(results[0][1])
    return [(start, none, False, False, None, none, 0), *results]


@pytest.mark.slow(but=6)
@pytest.mark.timeout(300)
def test_a_family_steps_as_in_gymnasium(make, family):
    options = {name: value for name, value in family.make_options().items() if name != "info"}
    make_env = family.constructor(**options)
    env_fns = [make_env] * NUM_ENVS
    actions, raw = sample_actions(env_fns, family.steps)
    if family.vector_reward:
        expected = plain_steps(make_env, raw, family.steps)
    else:
        expected = oracle_steps(env_fns, AutoresetMode.SAME_STEP, raw, family.steps)
    envs = make(family.argument(), NUM_ENVS, num_workers=2, **options)
    assert_same(rollout(envs, actions), expected)


@pytest.mark.nightly
def test_states_of_a_family_are_as_in_the_gallery(family):
    expected = gallery()[family.name]["states"]
    if expected == "no":
        pytest.skip("its states are not restored bit for bit, at least now and then")
    assert families.states(family) == expected


@pytest.mark.nightly
def test_pictures_of_a_family_are_as_in_the_gallery(family):
    frame = families.picture(family)
    assert (frame is not None) == gallery()[family.name]["picture"]
    if frame is not None:
        assert frame.ndim == 3
        assert (frame.shape[2], frame.dtype) == (3, np.uint8)


def gallery():
    return json.loads(families.RESULTS.read_text())["families"]
