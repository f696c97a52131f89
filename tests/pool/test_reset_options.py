"""Declared reset options: each episode starts with those that a model of plain Gymnasium envs foretells."""

import os
import signal
from functools import partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from support.oracle import canonical, stack

import jaxvec
from jaxvec.compat import gymnax
from jaxvec.compat.gymnasium import AsyncVectorEnv as VectorEnv
from jaxvec.testing import CountingEnv

SPACE = spaces.Dict(
    {
        "size": spaces.Discrete(5, start=1),
        "level": spaces.Box(0, 255, (2, 3), np.uint8),
        "physics": spaces.Dict({"gravity": spaces.Box(-9, 9, (1,), np.float64)}),
        "pair": spaces.Tuple((spaces.MultiBinary(2), spaces.Box(-1, 1, (2,), np.float32))),
    }
)
SAME, NEXT, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED
N, STEPS = 5, 40


class LevelEnv(gymnasium.Env):
    """Shows the options of its episode, which lasts as many steps as its `size`, or 2 without options."""

    observation_space = spaces.Box(-np.inf, np.inf, (13,), np.float64)
    action_space = spaces.Discrete(9)

    def __init__(self):
        self._episodes = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        assert options is None or SPACE.contains(options), options
        self._episodes, self._steps, self._length = self._episodes + 1, 0, 2
        self._shown = np.full(11, -7.0)
        if options is not None:
            level, pair = options["level"], options["pair"]
            self._length = int(options["size"])
            numbers = [options["size"], *options["physics"]["gravity"], *pair[0][:1], *pair[1]]
            self._shown = np.array([*numbers, *level.ravel()], np.float64)
            level[:] = 0  # the env's own copy
        return self._obs(), {}

    def step(self, action):
        if action == 8:
            raise RuntimeError("a fault")
        self._steps += 1
        return self._obs(), float(action), self._steps >= self._length, False, {}

    def _obs(self):
        return np.array([self._episodes, self._steps, *self._shown])


def sample(*shape):
    """Returns a pytree of options with leaves `[*shape, ...]`, as JAX holds them."""
    count = int(np.prod(shape))
    rows = stack([canonical(SPACE.sample()) for _ in range(count)])
    return jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), rows)


def at(tree, *index):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[index], tree)


ZEROS = jax.tree.map(lambda leaf: leaf * 0, sample(1))


class Model:
    """Plain envs, driven as the pool drives them; `given` are the options that the program gave last."""

    def __init__(self, mode, n=N):
        self.envs = [LevelEnv() for _ in range(n)]
        self.mode, self.given, self.running = mode, [None] * n, [None] * n
        self.over, self.obs = [False] * n, [None] * n
        self.reward = np.zeros(n, np.float32)
        self.returns, self.lengths = np.zeros(n, np.float32), np.zeros(n, np.int32)

    def give(self, options, ids):
        for place, i in enumerate(ids if options is not None else ()):
            self.given[i] = at(options, place)

    def begin(self, i):
        given, self.running[i] = self.given[i], self.given[i]
        if given is not None:
            given = {**given, "size": np.int64(given["size"]), "level": given["level"].copy()}
            given["physics"] = {"gravity": given["physics"]["gravity"].astype(np.float64)}
        self.obs[i], _ = self.envs[i].reset(options=given)

    def reset(self, options=None, mask=None):
        ids = np.arange(len(self.envs)) if mask is None else np.flatnonzero(mask)
        self.give(None if options is None else at(options, ids), ids)
        for i in ids:
            self.begin(i)
            self.over[i], self.reward[i], self.returns[i], self.lengths[i] = False, 0, 0, 0
        return self.timestep()

    def step(self, actions, options=None, ids=None):
        ids = range(len(self.envs)) if ids is None else ids
        self.give(options, ids)
        for place, i in enumerate(ids):
            self.reward[i], was_over = 0, self.over[i]
            if was_over:
                self.returns[i], self.lengths[i], self.over[i] = 0, 0, False
                if self.mode is NEXT:
                    self.begin(i)
                    continue
            self.obs[i], self.reward[i], self.over[i], _, _ = self.envs[i].step(actions[place])
            self.returns[i] += self.reward[i]
            self.lengths[i] += 1
            if self.over[i] and self.mode is SAME:
                self.begin(i)
        return self.timestep()

    def timestep(self):
        shown = [at(ZEROS, 0) if one is None else one for one in self.running]
        n = len(self.envs)
        return {
            "obs": np.stack(self.obs).astype(np.float32),
            "reward": self.reward.copy(),
            "terminated": np.array(self.over),
            "truncated": np.zeros(n, bool),
            "reset_options": stack(shown),
            "_reset_options": np.array([one is not None for one in self.running]),
            "episode_return": self.returns.copy(),
            "episode_length": self.lengths.copy(),
            "env_id": np.arange(n, dtype=np.int32),
        }


def assert_equal(timestep, expected, rows=slice(None)):
    for name, value in expected.items():
        got = getattr(timestep, name) if name in timestep._fields else timestep.info[name]
        assert jax.tree.structure(got) == jax.tree.structure(value), name
        for leaf, right in zip(jax.tree.leaves(got), jax.tree.leaves(value), strict=True):
            assert leaf.dtype == right.dtype, name
            np.testing.assert_array_equal(leaf, right[rows], name)


@pytest.fixture(autouse=True)
def seeded():
    SPACE.seed(3)


modes = pytest.mark.parametrize("mode", [SAME, NEXT], ids=lambda mode: mode.name)


@pytest.mark.slow(but=1)
@modes
@pytest.mark.parametrize("dispatch", ["native", "portable"])
@pytest.mark.parametrize("transport", ["ffi", "io_callback"])
def test_options_of_each_step_in_one_program(make, mode, transport, dispatch):
    envs = make(
        LevelEnv,
        N,
        num_workers=2,
        reset_options=SPACE,
        autoreset_mode=mode,
        transport=transport,
        dispatch=dispatch,
    )
    options, first = sample(STEPS, N), sample(N)
    given = np.random.default_rng(0).random(STEPS) < 0.6
    actions = np.random.default_rng(1).integers(8, size=(STEPS, N))

    @jax.jit
    def run(handle, given, actions, options):
        def body(handle, xs):
            give, action, options = xs
            return jax.lax.cond(
                give,
                lambda: jaxvec.step(handle, action, reset_options=options),
                lambda: jaxvec.step(handle, action),
            )

        return jax.lax.scan(body, handle, (given, actions, options))

    reset = jax.jit(lambda handle, options, mask: jaxvec.reset(handle, options=options, mask=mask))
    model = Model(mode)
    handle, timestep = jaxvec.reset(envs)
    assert_equal(timestep, model.reset())
    mask = np.array([True, False, True, True, False])
    handle, timestep = reset(handle, first, mask)
    assert_equal(timestep, model.reset(first, mask))
    _, trajectory = run(handle, given, actions, options)
    for t in range(STEPS):
        expected = model.step(actions[t], at(options, t) if given[t] else None)
        assert_equal(at(trajectory, t), expected)
    assert all(env._episodes > 5 for env in model.envs)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("mode", [SAME, NEXT, DISABLED], ids=lambda mode: mode.name)
def test_options_of_the_methods_on_the_host(make, backend, mode):
    workers = 1 if backend == "serial" else 2
    envs = make(LevelEnv, N, num_workers=workers, backend=backend, reset_options=SPACE, autoreset_mode=mode)
    model, random = Model(mode), np.random.default_rng(2)
    options = sample(N)
    assert_equal(envs.reset(options=options), model.reset(options))
    for t in range(STEPS):
        options, actions = sample(N), random.integers(8, size=N)
        given = options if t % 3 else None
        if t % 3 == 2:  # one dict per env
            given = [at(options, i) for i in range(N)]
        assert_equal(envs.step(actions, reset_options=given), model.step(actions, options if t % 3 else None))
        if mode is DISABLED and any(model.over):
            mask = np.array(model.over)
            assert_equal(envs.reset(mask=mask, options=options), model.reset(options, mask))
        if t == 20:
            envs.reset_async(options=options)
            assert_equal(envs.recv(), model.reset(options))


@pytest.mark.slow(but=1)
@modes
@pytest.mark.parametrize("transport", ["ffi", "io_callback"])
def test_options_of_send_go_to_the_sent_envs(make, mode, transport):
    envs = make(
        LevelEnv,
        6,
        num_workers=3,
        batch_size=2,
        recv_order="sent",
        reset_options=SPACE,
        autoreset_mode=mode,
        transport=transport,
    )
    model, random, first = Model(mode, 6), np.random.default_rng(2), sample(6)
    send = jax.jit(lambda h, a, ids, o: jaxvec.send(h, a, ids, reset_options=o))
    handle, timestep = jaxvec.reset(envs, options=first)
    whole = model.reset(first)
    ids = np.asarray(timestep.info["env_id"])
    assert_equal(timestep, whole, ids)
    for t in range(STEPS):
        actions, options = random.integers(8, size=2), sample(2)
        model.step(actions, options if t % 2 else None, ids)
        if t % 2:
            handle = send(handle, actions, ids, options)
        else:
            envs_ids = jnp.asarray(ids)
            handle = jaxvec.send(handle, actions, envs_ids)
        handle, timestep = jaxvec.recv(handle)
        ids = np.asarray(timestep.info["env_id"])
        assert_equal(timestep, model.timestep(), ids)
    envs.send(actions, ids, reset_options=options)
    model.step(actions, options, ids)
    ids = np.concatenate([envs.recv().info["env_id"] for _ in range(3)])
    assert sorted(ids) == list(range(6))


def test_options_under_vmap_and_shard_map(make):
    envs = make(LevelEnv, 4, num_workers=2, reset_options=SPACE)
    model = Model(SAME, 4)
    first, options = sample(4), sample(STEPS, 4)
    split = partial(jax.tree.map, lambda leaf: leaf.reshape(2, 2, *leaf.shape[1:]))
    join = partial(jax.tree.map, lambda leaf: leaf.reshape(4, *leaf.shape[2:]))
    reset = jax.vmap(lambda options: jaxvec.reset(envs, num_envs=2, options=options))
    handle, timestep = reset(split(first))
    assert_equal(join(timestep), model.reset(first))
    step = jax.jit(jax.vmap(lambda h, a, o: jaxvec.step(h, a, reset_options=o)))
    one = jax.jit(jax.vmap(lambda h, a, o: jaxvec.step(h, a, reset_options=o), (0, 0, None)))
    for t in range(10):
        actions = np.full(4, t % 8)
        handle, timestep = step(handle, split(actions), split(at(options, t)))
        assert_equal(join(timestep), model.step(actions, at(options, t)))
    # One for all envs: the same for each vmapped instance, and without an env axis.
    handle, timestep = one(handle, split(actions), at(options, 0, 0))
    same = stack([at(options, 0, 0)] * 4)
    assert_equal(join(timestep), model.step(actions, same))
    mesh = Mesh(jax.devices()[:2], "d")
    sharded = jax.shard_map(
        lambda h, a, o: jaxvec.step(h, a, reset_options=o), mesh=mesh, in_specs=P("d"), out_specs=P("d")
    )
    handle = join(handle)
    for t in range(10, 20):
        handle, timestep = jax.jit(sharded)(handle, actions, at(options, t))
        assert_equal(timestep, model.step(actions, at(options, t)))
    replicated = jax.shard_map(
        lambda h, a, o: jaxvec.step(h, a, reset_options=o),
        mesh=mesh,
        in_specs=(P("d"), P("d"), P()),
        out_specs=P("d"),
    )
    _, timestep = jax.jit(replicated)(handle, actions, at(options, 0, 0))
    assert_equal(timestep, model.step(actions, same))


@pytest.mark.slow(but=3)
@modes
@pytest.mark.parametrize("retry", ["reset", "rebuild"])
def test_rebuilt_envs_keep_their_options(make, backend, mode, retry):
    restart = jaxvec.Restart(retry=retry, max_restarts=None, rate=None)
    workers = 1 if backend == "serial" else 2
    envs = make(
        LevelEnv,
        2,
        num_workers=workers,
        backend=backend,
        reset_options=SPACE,
        autoreset_mode=mode,
        on_fault=restart,
    )
    first, second = sample(2), sample(2)
    envs.reset(options=first)
    timestep = envs.step([0, 8], reset_options=second)
    assert timestep.info["fault"].tolist() == [False, True]
    if mode is NEXT:  # the row still shows the episode that the fault has ended
        np.testing.assert_array_equal(at(timestep.info["reset_options"], 1)["level"], first["level"][1])
        timestep = envs.step([0, 0])
    np.testing.assert_array_equal(at(timestep.info["reset_options"], 1)["level"], second["level"][1])
    np.testing.assert_array_equal(timestep.obs[1, 7:], second["level"][1].ravel())


def test_a_killed_workers_envs_keep_their_options(make):
    class Killed(LevelEnv):
        def step(self, action):
            if action == 7:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step(action)

    policy = jaxvec.Restart(rate=None)
    envs = make(Killed, 2, num_workers=2, reset_options=SPACE, on_fault=policy)
    first, second = sample(2), sample(2)
    envs.reset(options=first)
    timestep = envs.step([0, 7], reset_options=second)
    assert timestep.info["fault"].tolist() == [False, True]
    np.testing.assert_array_equal(timestep.obs[1, 7:], second["level"][1].ravel())
    envs.step([0, 7])
    timestep = envs.reset(options=first, mask=np.array([False, True]))
    np.testing.assert_array_equal(timestep.obs[1, 7:], first["level"][1].ravel())


@pytest.mark.parametrize("mode", [SAME, NEXT, DISABLED], ids=lambda mode: mode.name)
def test_states_contain_the_options(make, backend, mode):
    workers = 1 if backend == "serial" else 2
    envs = make(
        LevelEnv, N, num_workers=workers, backend=backend, reset_options=SPACE, autoreset_mode=mode, states=99
    )
    first, second, third = sample(N), sample(N), sample(N)
    envs.reset(options=first)
    before = envs.step(np.arange(N), reset_options=second)  # those of the next episodes

    def play():
        steps = []
        for t in range(12):
            steps.append(envs.step(np.full(N, t % 8)))
            over = steps[-1].terminated
            if mode is DISABLED and over.any():
                steps.append(envs.reset(mask=over))
        return steps

    if mode is DISABLED and before.terminated.any():
        before = envs.reset(mask=before.terminated)
    state = envs.save()
    steps = play()
    envs.reset(options=third)
    again = envs.restore(state)
    assert jax.tree.all(jax.tree.map(np.array_equal, again, before))
    assert jax.tree.all(jax.tree.map(np.array_equal, play(), steps))
    if mode is DISABLED:
        return
    envs.restore(state)
    simulated = []
    for t in range(12):
        state, timestep = envs.simulate(state, np.full(N, t % 8))
        simulated.append(timestep)
    assert jax.tree.all(jax.tree.map(np.array_equal, simulated, steps))


def test_options_in_the_gymnasium_api():
    envs = VectorEnv([LevelEnv] * 2, reset_options=SPACE)
    try:
        one, both = at(sample(1), 0), sample(2)
        obs, _ = envs.reset(options=one)  # as in Gymnasium: one dict for all envs
        np.testing.assert_array_equal(obs[:, 7:], [one["level"].ravel()] * 2)
        obs, _ = envs.reset(options=both)
        np.testing.assert_array_equal(obs[:, 7:], both["level"].reshape(2, -1))
    finally:
        envs.close()


@pytest.mark.slow
def test_options_in_gymnax_params():
    first, second = sample(3), sample(3)
    first["size"][:] = 1
    env, params = gymnax.make(LevelEnv, reset_options=SPACE)
    keys, actions = jax.random.split(jax.random.key(0), 3), jnp.zeros(3, int)
    with env:
        reset = jax.jit(jax.vmap(lambda key, o: env.reset(key, params.replace(reset_options=o))))
        obs, state = reset(keys, first)
        np.testing.assert_array_equal(obs[:, 7:], first["level"].reshape(3, -1))
        step = jax.vmap(lambda key, s, a, o: env.step(key, s, a, params.replace(reset_options=o)))
        obs, state, _, done, info = jax.jit(step)(keys, state, actions, second)
        assert done.all()  # the size 1 is the length
        np.testing.assert_array_equal(obs[:, 7:], second["level"].reshape(3, -1))
        np.testing.assert_array_equal(info["reset_options"]["level"], second["level"])
        obs, *_ = jax.vmap(env.reset, in_axes=(0, None))(keys, params)  # without options, the last ones stay
        np.testing.assert_array_equal(obs[:, 7:], second["level"].reshape(3, -1))
    env, params = gymnax.make(LevelEnv)
    with env, pytest.raises(TypeError, match=r"params: declare reset_options with make\(reset_options="):
        env.reset(keys[0], params.replace(reset_options=at(first, 0)))


def test_options_of_stable_baselines3():
    options = sample(2)
    pytest.importorskip("stable_baselines3", reason="the extra sb3 has stable-baselines3")
    from jaxvec.compat.stable_baselines3 import SubprocVecEnv

    envs = SubprocVecEnv([LevelEnv] * 2, reset_options=SPACE)
    try:
        envs.set_options([at(options, i) for i in range(2)])
        np.testing.assert_array_equal(envs.reset()[:, 7:], options["level"].reshape(2, -1))
        np.testing.assert_array_equal(envs.reset()[:, 7:], options["level"].reshape(2, -1))
    finally:
        envs.close()


def test_options_in_the_stoa_api():
    pytest.importorskip("stoa", reason="the extra stoix has stoa")
    from jaxvec.compat.stoix import EnvFactory

    envs, options = EnvFactory(LevelEnv, reset_options=SPACE)(2), sample(2)
    try:
        timestep = envs.reset(options=options)
        np.testing.assert_array_equal(timestep.observation[:, 7:], options["level"].reshape(2, -1))
    finally:
        envs.close()


def test_wrong_options_name_the_leaf(make):
    envs = make(LevelEnv, 2, num_workers=1, reset_options=SPACE)
    handle, _ = jaxvec.reset(envs)
    right, actions = sample(2), np.zeros(2, int)
    missing = {key: value for key, value in right.items() if key != "size"}
    wrong = {**right, "level": right["level"][:1]}
    floats = {**right, "size": right["size"] + 0.5}
    for options, match in (
        (missing, r"reset_options: expected a dict with keys"),
        (wrong, r"reset_options\['level'\]: .*\(1, 2, 3\)"),
        (floats, r"reset_options\['size'\]: expected int32"),
    ):
        with pytest.raises(ValueError, match=match):
            jaxvec.reset(handle, options=options)
        with pytest.raises(ValueError, match=match):
            jaxvec.step(handle, actions, reset_options=options)
        with pytest.raises(ValueError, match=match):
            envs.reset(options=options)
        with pytest.raises(ValueError, match=match):
            envs.step(actions, reset_options=options)
    handle, _ = jaxvec.step(handle, actions)  # nothing has happened
    plain = make(LevelEnv, 2, num_workers=1)
    for options in (lambda level: {"level": level}, lambda level: [{"level": level}] * 2):
        with pytest.raises(TypeError, match=r"^reset_options: declare them with make\(reset_options="):
            jax.jit(lambda level: jaxvec.reset(plain, options=options(level)))(np.int32(1))
    handle, _ = jaxvec.reset(plain)
    for step in (partial(jaxvec.step, handle), plain.step):
        with pytest.raises(TypeError, match=r"make\(reset_options="):
            step(actions, reset_options=right)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"spare_envs": 1}, "a spare env is reset before the options"),
        ({"envs_per_instance": 2}, "a batched env"),
        ({"reset_options": {"size": 3}}, r"must be a gymnasium\.spaces\.Dict"),
        (
            {"reset_options": spaces.Dict({"name": spaces.Sequence(spaces.Text(3))})},
            r"reset_options\['name'\]: Sequence",
        ),
        ({"info": {"reset_options": int}}, "'reset_options' is reserved"),
    ],
)
def test_what_can_not_go_with_declared_options(make, kwargs, match):
    with pytest.raises((ValueError, TypeError), match=match):
        make(LevelEnv, 2, **{"num_workers": 1, "reset_options": SPACE} | kwargs)


def test_options_of_zero_reach_the_env(make, backend):
    levels = spaces.Dict({"level": spaces.Discrete(3)})
    envs = make(CountingEnv, 2, backend=backend, episode_length=1, reset_options=levels)
    envs.reset(options={"level": 0})
    assert [info["options"] for info in envs.infos()] == [{"level": 0}] * 2
