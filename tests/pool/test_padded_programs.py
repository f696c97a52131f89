"""Text, sequences, graphs and choices in programs: the data of Gymnasium's `SyncVectorEnv`, padded."""

import os
import signal
from copy import deepcopy

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from hypothesis import HealthCheck, given, settings
from support.oracle import stack
from support.padded import EchoEnv, Graph, Sequence, any_space, assert_equal, model, sizes, zeros

import jaxvec
from jaxvec.compat.gymnasium import SyncVectorEnv as JaxvecSyncVectorEnv
from jaxvec.spaces import Cut, encode, pad, unpad

SPACE = spaces.Dict(
    {
        "text": spaces.Text(6, charset="aé"),
        "plain": spaces.Box(-1, 1, (2,), np.float64),
        "bag": Sequence(spaces.Dict({"name": spaces.Text(3, charset="ab€"), "count": spaces.Discrete(9)})),
        "stack": Sequence(spaces.Tuple((spaces.Discrete(4), Sequence(spaces.Box(0, 1, (2,))))), stack=True),
        "scene": spaces.Tuple((Graph(spaces.Box(-1, 1, (3,)), spaces.Discrete(3)),)),
        "choice": spaces.OneOf([spaces.Text(4), spaces.Discrete(7), Graph(spaces.Discrete(4), None)]),
    }
)
SPACE.seed(7)
N, STEPS = 3, 8
SAME, NEXT = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP


def stored(value):
    """Returns a value as it is after storage in JAX's dtypes: float64 loses digits."""
    return {**value, "plain": value["plain"].astype(np.float32).astype(np.float64)}


ACTIONS = [[stored(SPACE.sample()) for _ in range(N)] for _ in range(STEPS)]
PADDED = [stack([model(SPACE, action) for action in actions]) for actions in ACTIONS]


def env_fns(space=SPACE, num_envs=N):
    return [lambda: EchoEnv(space)] * num_envs


def make_envs(make, num_envs=N, **options):
    return make(env_fns(SPACE, num_envs), max_sizes=sizes(SPACE), **options)


def padded_rows(space, batched_space, batch):
    """Returns Gymnasium's batch in padded form."""
    return stack([model(space, one) for one in iterate(batched_space, batch)])


class Silent(gymnasium.Wrapper):
    """Drops infos: Gymnasium's vector env can't batch arrays of different lengths in them."""

    def reset(self, **options):
        return self.env.reset(**options)[0], {}

    def step(self, action):
        return (*self.env.step(action)[:4], {})


def oracle_steps(mode, space=SPACE, actions=None):
    """Yields the padded observation, and the padded last one and its mask, of each step of Gymnasium."""
    oracle = SyncVectorEnv([lambda: Silent(EchoEnv(space))] * len(actions[0]), autoreset_mode=mode)
    obs, _ = oracle.reset(seed=0)
    yield padded_rows(space, oracle.observation_space, obs), None
    for each in actions:
        batch = concatenate(space, each, create_empty_array(space, len(each)))
        obs, _, _, _, infos = oracle.step(batch)
        last = None
        if mode is SAME:
            found = infos.get("final_obs", [None] * len(each))
            last = stack([zeros(space) if one is None else model(space, one) for one in found])
        yield padded_rows(space, oracle.observation_space, obs), last
    yield oracle.call("seen"), None
    oracle.close()


def assert_as_gymnasiums(envs, timesteps, oracle):
    """Compares time steps, and the actions that the envs have seen, with those of `oracle_steps`."""
    *expected, (seen, _) = oracle
    for timestep, (obs, last) in zip(timesteps, expected, strict=True):
        assert_equal(timestep.obs, obs)
        if last is not None:
            assert_equal(timestep.info["final_obs"], last)
    assert_equal(list(envs.call("seen")), list(seen))


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("mode", [SAME, NEXT], ids=["same", "next"])
@pytest.mark.parametrize("how", ["ffi", "io_callback", "host"])
def test_steps_are_as_gymnasiums(make, backend, mode, how):
    transport = {} if how == "host" else {"transport": how}
    envs = make_envs(make, backend=backend, autoreset_mode=mode, **transport)
    handle, first = jaxvec.reset(envs, seed=0)
    if how != "host":
        steps = jax.jit(lambda handle, actions: jax.lax.scan(jaxvec.step, handle, actions))
        _, rest = steps(handle, stack(PADDED))
        rest = jax.block_until_ready(rest)
        timesteps = [first, *(jax.tree.map(lambda leaf, i=i: leaf[i], rest) for i in range(STEPS))]
    else:
        timesteps = [first, *(envs.step(action) for action in PADDED)]
    assert_as_gymnasiums(envs, timesteps, oracle_steps(mode, actions=ACTIONS))


@settings(database=None, deadline=None, max_examples=30, suppress_health_check=list(HealthCheck))
@given(any_space)
def test_random_spaces_are_as_gymnasiums(space):
    space.seed(3)
    actions = [[space.sample() for _ in range(2)] for _ in range(4)]
    with jaxvec.make(env_fns(space, 2), max_sizes=_rooted(space), backend="serial") as envs:
        handle, first = jaxvec.reset(envs, seed=0)
        padded = [stack([model(space, one) for one in each]) for each in actions]
        step = jax.jit(jaxvec.step)
        timesteps = [first]
        for action in padded:
            handle, timestep = step(handle, action)
            timesteps.append(timestep)
        assert_as_gymnasiums(envs, timesteps, oracle_steps(SAME, space, actions))


def _rooted(space):
    return {
        f"{root}/{key}" if key else root: size
        for key, size in sizes(space).items()
        for root in ("obs", "action")
    }


def test_declared_infos_are_padded(make, backend):
    envs = make(
        env_fns(),
        backend=backend,
        info={"note": SPACE},
        max_sizes={**sizes(SPACE), **{f"note/{key}": size for key, size in sizes(SPACE).items()}},
    )
    envs.reset(seed=0)
    for number, action in enumerate(PADDED[:3]):
        info = envs.step(action).info
        raw = envs.infos()
        assert info["_note"].tolist() == ["note" in one for one in raw] == [number > 0] * N
        notes = [model(SPACE, one["note"]) if "note" in one else zeros(SPACE) for one in raw]
        assert_equal(info["note"], stack(notes))


def test_the_first_ready_envs_are_padded(make):
    envs = make_envs(make, num_envs=4, batch_size=2, recv_order="sent", num_workers=2)
    handle, timestep = jaxvec.reset(envs, seed=0)

    @jax.jit
    def play(handle, ids, action):
        handle = jaxvec.send(handle, action, ids)
        return jaxvec.recv(handle)

    two = jax.tree.map(lambda leaf: leaf[:2], PADDED[0])
    sent = [timestep.info["env_id"]]
    for _ in range(3):
        handle, timestep = play(handle, sent[-1], two)
        sent.append(timestep.info["env_id"])
    assert_equal(timestep.obs, two)


class SpokenEnv(gymnasium.Env):
    """Shows the words of its reset options, and the last action."""

    observation_space = spaces.Dict({"words": spaces.Text(8), "bag": Sequence(spaces.Discrete(9))})
    action_space = spaces.Text(8, min_length=0)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._obs = {"words": "nothing", "bag": ()} if options is None else options
        assert self.observation_space.contains(self._obs)
        return self._obs, {}

    def step(self, action):
        assert isinstance(action, str)
        if action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        self._obs = {"words": action, "bag": (*self._obs["bag"], len(action) % 9)}
        return self._obs, 0.0, action == "end", False, {}


def say(*words):
    return encode(list(words), 8)


def shown(timestep):
    return unpad(SpokenEnv.observation_space, timestep.obs)


def test_reset_options_are_unpadded(make, backend):
    space = SpokenEnv.observation_space
    maxima = {"bag": 5}
    envs = make(SpokenEnv, 2, backend=backend, reset_options=space, max_sizes=maxima)
    levels = [{"words": "one", "bag": (1, 2)}, {"words": "two", "bag": ()}]
    handle, timestep = jaxvec.reset(envs, seed=0, options=pad(space, levels, maxima))
    assert shown(timestep) == levels
    later = pad(space, levels[::-1], maxima)
    step = jax.jit(lambda handle, action: jaxvec.step(handle, action, reset_options=later))
    handle, timestep = step(handle, say("end", "go"))
    assert shown(timestep) == [levels[1], {"words": "go", "bag": (2,)}]
    assert unpad(space, timestep.info["reset_options"]) == levels[1:] * 2
    assert shown(envs.reset(options=pad(space, levels, maxima))) == levels


def test_a_long_value_is_an_error_that_names_env_and_leaf(make, backend):
    envs = make(SpokenEnv, 2, backend=backend, max_sizes={"bag": 2})
    handle, _ = jaxvec.reset(envs, seed=0)
    for _ in range(2):
        handle, _ = jaxvec.step(handle, say("a", "end"))
    match = r"env 0 .*returned wrong data from step .*obs\['bag'\]: its size is 3, and its maximum 2"
    with pytest.raises(jaxvec.EnvDataError, match=match):
        envs.step(say("a", "end"))


def test_a_long_value_is_cut_and_marked(make, backend):
    envs = make(SpokenEnv, 2, backend=backend, max_sizes={"bag": Cut(2)})
    envs.reset(seed=0)
    for number in range(1, 5):
        obs = envs.step(say("a", "end")).obs
        assert obs["bag"]["cut"].tolist() == [number > 2, False]
        assert obs["bag"]["length"].tolist() == [min(number, 2), 0]


def test_an_invalid_action_stops_before_its_env_is_stepped(make, backend):
    envs = make(SpokenEnv, 3, backend=backend, max_sizes={"bag": 4}, num_workers=1)
    envs.reset(seed=0)
    wrong = say("a", "b", "c")
    wrong["length"][1] = 9
    match = r"env 1 .*was not stepped: action\['length'\]: 9 is not from 0 to 8"
    with pytest.raises(jaxvec.EnvError, match=match) as caught:
        envs.step(wrong)
    assert isinstance(caught.value.__cause__, jaxvec.ActionError)
    assert caught.value.env_id == 1


@pytest.mark.parametrize("cause", ["action", "death"])
def test_a_fault_repeats_the_padded_observation(make, cause):
    policy = jaxvec.Restart(max_restarts=9, rate=None)
    envs = make(SpokenEnv, 2, num_workers=2, on_fault=policy, max_sizes={"bag": Cut(2)})
    envs.reset(seed=0)
    for _ in range(3):
        before = envs.step(say("a", "b"))
    assert before.obs["bag"]["cut"].all()
    action = say("x", "die" if cause == "death" else "x")
    if cause == "action":
        action["length"][1] = -1
    timestep = envs.step(action)
    assert timestep.info["fault"].tolist() == [False, True]
    last = jax.tree.map(lambda leaf: leaf[1], timestep.info["final_obs"])
    assert_equal(last, jax.tree.map(lambda leaf: leaf[1], before.obs))
    assert shown(timestep)[1] == {"words": "nothing", "bag": ()}
    assert shown(envs.step(say("a", "b")))[1] == {"words": "b", "bag": (1,)}


def test_states_restore_padded_rows(make, backend):
    envs = make(SpokenEnv, 2, backend=backend, states=4, max_sizes={"bag": Cut(2)})
    envs.reset(seed=0)
    for _ in range(3):
        before = envs.step(say("a", "bcd"))
    state = envs.save()
    after, simulated = envs.simulate(state, say("p", "q"))
    stepped = envs.step(say("p", "q"))
    assert_equal(simulated.obs, stepped.obs)
    assert_equal(envs.restore(state).obs, before.obs)
    assert_equal(envs.restore(after).obs, stepped.obs)


def test_batched_envs_are_padded(make):
    envs = make(SyncVectorEnv(env_fns(), autoreset_mode=SAME), max_sizes=sizes(SPACE))
    timesteps = [envs.reset(seed=0), *(envs.step(action) for action in PADDED)]
    assert_as_gymnasiums(envs, timesteps, oracle_steps(SAME, actions=ACTIONS))


def test_the_gymnasium_api_returns_gymnasiums_objects():
    ours, theirs = JaxvecSyncVectorEnv(env_fns()), SyncVectorEnv(env_fns())
    try:
        batch = concatenate(SPACE, ACTIONS[0], create_empty_array(SPACE, N))
        assert_equal(ours.reset(seed=0)[0], theirs.reset(seed=0)[0])
        assert_equal(ours.step(deepcopy(batch))[0], theirs.step(batch)[0])
    finally:
        ours.close()
        theirs.close()
