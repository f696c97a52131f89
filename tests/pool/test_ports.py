"""Comparisons of JAX ports with their Python originals: wrong ports are found, and correct ones are equal."""

import importlib
import json
import sys
from dataclasses import replace
from functools import partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from support.probe import main

import jaxvec
from jaxvec.ports import Port, as_port, compare_distributions, compare_port

LIMIT, BOUND = 12, 3.0
OBS = ("position", "weights")


class Cart(gymnasium.Env):
    """A cart on a line, in float32, so that a correct port is equal bit for bit."""

    observation_space = spaces.Dict(
        {"position": spaces.Box(-4, 4, (), np.float32), "weights": spaces.Box(-9, 9, (3,), np.float32)}
    )
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = np.float32(self.np_random.uniform(-1, 1))
        self.speed, self.steps = np.float32(0), 0
        return self._obs(), {}

    def step(self, action):
        self.speed = np.float32(self.speed + np.float32(0.25) * np.float32(int(action) - 1))
        self.position = np.float32(self.position + self.speed)
        self.steps += 1
        reward = float(self.position)
        over = bool(abs(self.position) > BOUND)
        return self._obs(), reward, over, False, {"steps": self.steps}

    def _obs(self):
        p, s, third = self.position, self.speed, np.float32(1 / 3)
        weights = np.array([(p + s) + third, p, s], np.float32)
        return {"position": p, "weights": weights}


def make_cart(limit=LIMIT):
    return gymnasium.wrappers.OrderEnforcing(gymnasium.wrappers.TimeLimit(Cart(), limit))


def set_state(env, state):
    cart = env.unwrapped
    cart.position, cart.speed, cart.steps = state["position"], state["speed"], int(state["steps"])


def get_state(env):
    return {name: getattr(env.unwrapped, name) for name in ("position", "speed", "steps")}


def make_port(
    *,
    limit=LIMIT,
    bound=BOUND,
    sign=1,
    late=False,
    order="first",
    space_high=4.0,
    start=1,
    start_speed=0,
    stale=False,
    counted=1,
    resets=False,
):
    """Returns a port of `Cart`, which has the given mistakes."""

    def observe(position, speed):
        third = jnp.float32(1 / 3)
        total = (position + speed) + third if order == "first" else position + (speed + third)
        return {"position": position, "weights": jnp.array([total, position, speed])}

    def reset(key):
        state = {
            "position": jax.random.uniform(key, minval=-1, maxval=start),
            "speed": jnp.float32(start_speed),
            "steps": jnp.int32(0),
            "last_reward": jnp.float32(0),
        }
        drawn = jax.random.uniform(jax.random.split(key)[0], minval=-1, maxval=1)
        return state, observe(drawn if stale else state["position"], jnp.float32(0))

    def step(key, state, action):
        speed = state["speed"] + jnp.float32(0.25) * sign * (action - 1)
        position = state["position"] + speed
        steps = state["steps"] + counted
        after = {"position": position, "speed": speed, "steps": steps, "last_reward": position}
        obs, terminated, truncated = observe(position, speed), jnp.abs(position) > bound, steps >= limit
        if resets:
            ended = terminated | truncated
            after, obs = jax.tree.map(partial(jnp.where, ended), reset(key), (after, obs))
        return after, {
            "obs": obs,
            "reward": state["last_reward"] if late else position,
            "terminated": terminated,
            "truncated": truncated,
            "info": {"steps": steps},
        }

    position = spaces.Box(-4, space_high, (), np.float32)
    space = spaces.Dict({**Cart.observation_space.spaces, "position": position})
    return Port(reset, step, space, spaces.Discrete(3), limit)


RIGHT, LATE = make_port(), make_port(late=True)
compare = partial(
    compare_port, original=make_cart, set_state=set_state, num_envs=4, num_steps=150, backend="serial"
)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("mode", ["one_step", "free_running"])
def test_a_correct_port_is_equal(mode):
    options = {"info": {"steps": int}, "backend": "process", "num_workers": 2}
    result = compare(make_port(), mode=mode, **options)
    assert result.differences == []
    assert {*result.leaves} == {"reward", "terminated", "truncated", "info/steps", *map("obs/{}".format, OBS)}
    assert all(leaf.compared == 600 and leaf.max_error == 0 for leaf in result.leaves.values())
    port_ends, original_ends = result.leaves["truncated"].ones
    assert port_ends == original_ends > 0
    result.assert_equal()
    with pytest.raises(ValueError, match="all values are equal"):
        result.replay()


# Independent mistakes share a port, as each comparison compiles for seconds: arguments of `make_port`, the
# names that must be found, and those of them that differ only where episodes end.
MISTAKES = {
    "sign": ({"sign": -1}, {"obs/position", "obs/weights", "reward", "terminated"}, set()),
    "time limit, bound and declared bound": (
        {"limit": LIMIT + 1, "bound": 2.5, "space_high": 5.0},
        {"time limit", "truncated", "terminated", "observation space position high"},
        {"terminated"},
    ),
    "late reward and order of a sum": ({"late": True, "order": "second"}, {"reward", "obs/weights"}, set()),
    "reset": ({"resets": True}, {*map("obs/{}".format, OBS), "autoreset"}, {*map("obs/{}".format, OBS)}),
    "hidden state": ({"counted": 0, "limit": 99}, {"state/steps", "time limit", "truncated"}, set()),
    "first speed": ({"start_speed": 0.1}, {"reset state/speed"}, set()),
    "stale observation": ({"stale": True}, {"reset obs/position", "reset obs/weights"}, set()),
}


@pytest.mark.parametrize(("mistake", "found", "at_ends"), MISTAKES.values(), ids=MISTAKES)
@pytest.mark.parametrize("mode", ["one_step", pytest.param("free_running", marks=pytest.mark.slow)])
def test_a_wrong_port_is_found_and_named(mistake, found, at_ends, mode):
    port = make_port(**mistake)
    states = found & {"state/steps", "reset state/speed", "reset obs/position"}
    # Resets are compared by tests, which need more samples.
    options = {"get_state": get_state, "num_steps": 600} if states else {}
    result = compare(port, mode=mode, **options)
    assert {*result.differences} <= found if mode == "free_running" else {*result.differences} == found
    assert result.differences
    with pytest.raises(AssertionError) as caught:
        result.assert_equal()
    assert result.differences[0] in str(caught.value)
    result.assert_equal(ignore={*found, *result.untested})
    leaves = {path: result.leaves[path] for path in {*result.differences} & {*result.leaves}}
    if mode == "one_step":
        assert {path for path, leaf in leaves.items() if leaf.at_ends == leaf.different} == at_ends
        assert ("only ends" in str(result)) == bool(at_ends)
    for path, leaf in leaves.items():
        names = {"port": port, "original": make_cart, "set_state": set_state, "get_state": get_state}
        exec(result.replay(path), names)
        case, worst = names["case"], leaf.worst
        assert (np.asarray(case.port) != case.original).any()
        assert case.step == worst.step
        np.testing.assert_array_equal(case.port, worst.port)
        np.testing.assert_array_equal(case.original, worst.original)
    if mode == "one_step" and "truncated" in leaves:
        assert leaves["truncated"].first_step == leaves["truncated"].worst.step == LIMIT


@pytest.mark.parametrize(
    ("ours", "wrapped", "found"),
    [
        ("SAME_STEP", True, ["autoreset"]),
        pytest.param("NEXT_STEP", True, [], marks=pytest.mark.slow),
        # A single env leaves autoreset to vector envs.
        pytest.param("SAME_STEP", False, [], marks=pytest.mark.slow),
        pytest.param(None, True, [], marks=pytest.mark.slow),
    ],
)
def test_autoreset_modes_are_compared(ours, wrapped, found):
    def original():
        return gymnasium.wrappers.Autoreset(make_cart()) if wrapped else make_cart()

    result = compare(replace(RIGHT, autoreset=ours), original=original)
    assert result.differences == found
    if ours is not None:
        theirs = "NEXT_STEP" if wrapped else "not declared"
        assert (result.spaces["autoreset"].port, result.spaces["autoreset"].original) == (ours, theirs)


@pytest.mark.slow
def test_a_sum_in_another_order_is_within_a_tolerance():
    result = compare(make_port(order="second"), tolerances={"obs": 1.0, "obs/weights": 1e-6})
    leaf = result.leaves["obs/weights"]
    assert (leaf.tolerance, result.leaves["obs/position"].tolerance) == (1e-6, 1.0)  # the longest path counts
    assert 0 < leaf.max_error < 1e-6
    assert leaf.unequal > leaf.different == 0
    result.assert_equal()


@pytest.mark.slow
def test_free_running_episodes_end_at_their_first_difference():
    result = compare(make_port(late=True), mode="free_running")
    assert result.parted == result.leaves["reward"].different
    assert result.parted_after == 1
    assert result.episodes == 600


def test_states_that_are_not_set_or_do_not_fit_are_named():
    for wrong in (
        lambda env, _: env.no_such_method(),
        lambda env, state: set_state(env, {**state, "steps": 3}),
    ):
        with pytest.raises(jaxvec.EnvError, match="set_state could not set the original"):
            compare(RIGHT, set_state=wrong, get_state=get_state)
    for returned in ("last", "steps"):
        with pytest.raises(jaxvec.EnvError, match=f"'{returned}' 2.5, which does not fit the port's state"):
            compare(RIGHT, get_state=lambda env, path=returned: {path: 2.5})


def test_an_original_without_set_state_runs_from_its_own_resets():
    result = compare(make_port(), set_state=None, mode="free_running")
    assert not result.set_to_states
    assert "set to states of the port never" in str(result)
    assert result.leaves["obs/position"].first_step == 1  # its random generator is another one


FORM = "reset.key. -> .state, obs."


def changed(change):
    """Returns a correct port whose states and results after a step are changed."""
    return Port(RIGHT.reset, lambda *args: change(*RIGHT.step(*args)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "two_step"}, "mode must be one of one_step, free_running"),
        ({"set_state": None}, "needs set_state"),
        ({"tolerances": {"observation": 1}}, "has the path 'observation'; the paths are obs/position"),
        ({"tolerances": float("nan")}, "tolerances must be numbers of at least 0, not nan"),
        ({"tolerances": {"obs": "1e-3"}}, "tolerances must be numbers"),
        ({"num_steps": 2**31}, "too many to count"),
        ({"mode": "free_running", "draws": jax.random.normal}, "draws are for set_state in each step"),
        ({"num_steps": 0}, "num_steps must be an integer of at least 1"),
        ({"original": 3}, "original must be a Gymnasium id"),
        ({"port": object()}, "no env of gymnax"),
        ({"port": (RIGHT.reset, RIGHT.step)}, "no env of gymnax"),
        ({"port": changed(lambda state, _: ({**state, "steps": 0.5}, _))}, r"after reset, .*steps float32"),
        ({"port": changed(lambda _, results: (_, {"obs": results["obs"], "reward": 0}))}, "'terminated'"),
        ({"port": changed(lambda state, results: (results["obs"], state, 0.0, False, {}))}, FORM),
        ({"port": Port(lambda key: RIGHT.reset(key)[::-1], RIGHT.step)}, FORM),
        ({"port": Port(jax.vmap(RIGHT.reset), jax.vmap(RIGHT.step))}, FORM),
    ],
)
def test_wrong_arguments_are_named(options, text):
    with pytest.raises((TypeError, ValueError), match=text):
        compare(**{"port": make_port(), **options})


def test_what_was_not_tested_is_named():
    result = compare(RIGHT, num_envs=1, num_steps=1)
    assert result.untested["time limit"] == f"the longest episode has 1 of {LIMIT} steps"
    assert result.untested["actions"].count(", ") == 1  # of three, one was played
    assert "truncated (always 0)" in str(result)
    with pytest.raises(AssertionError, match="not tested: .*time limit"):
        result.assert_equal(require=["truncated"])
    with pytest.warns(UserWarning, match="not tested: .*time limit"):
        result.assert_equal()
    for ignored in ("time limit", ["no such name"]):
        with pytest.raises(ValueError, match="ignore must be a list of names"):
            result.assert_equal(ignore=ignored)


class Walk(gymnasium.Env):
    """A random walk with clipped actions, whose noise a port cannot repeat."""

    observation_space = action_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, noise=0.0, strict=False):
        self.noise, self.strict = noise, strict
        self.place = np.zeros(2, np.float32)  # also the observation, whose memory is reused

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place[:] = 0
        return self.place, {}

    def step(self, action):
        assert not self.strict or self.action_space.contains(action)
        noise = self.noise * self.np_random.normal(size=2)
        self.place[:] = self.place + np.clip(action, -1, 1) + noise
        return self.place, 0.0, bool(self.place[0] > 2), False, {}


def walk(clips=True, noise=0.0):
    def step(key, place, action):
        after = place + (jnp.clip(action, -1, 1) if clips else action) + noise * jax.random.normal(key, (2,))
        return after, {"obs": after, "reward": 0.0, "terminated": after[0] > 2, "truncated": False}

    return Port(lambda key: (jnp.zeros(2), jnp.zeros(2)), step)


@pytest.mark.parametrize(
    ("port", "original", "found"),
    [
        (walk(), Walk, []),
        (walk(), partial(Walk, strict=True), []),
        (replace(walk(), max_episode_steps=99), Walk, []),
        (walk(clips=False), Walk, ["obs", "terminated"]),
        (walk(noise=1.0), partial(Walk, 1.0), ["obs", "terminated", "transitions"]),
        (walk(noise=1e-5), partial(Walk, 1e-5), ["obs", "transitions"]),
    ],
    ids=["equal", "strict", "undeclared limit", "without a clip", "random", "a little random"],
)
def test_actions_at_and_beyond_bounds_and_random_originals(port, original, found):
    options = {"set_state": lambda env, state: np.copyto(env.place, state["state"]), "num_envs": 16}
    result = compare(port, original=original, **options)
    assert result.differences == found
    assert result.untested == {"reward": "always 0", "truncated": "always 0"}
    if found:
        with pytest.raises(AssertionError) as caught:
            result.assert_equal()
        assert len(str(caught.value)) < 3000
        assert all(text in str(caught.value) for text in ("seed 0", "earliest: step", "largest: step"))


@pytest.mark.parametrize(
    ("port", "num_steps", "code"),
    [("LATE", 20, 1), ("RIGHT", 2, 3), ("NONE", 2, 2), ("RIGHT --observe port:OBS.index", 2, 2)],
)
def test_the_command_compares_and_its_replay_runs(port, num_steps, code, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "port", sys.modules[__name__])  # also the name of an argument
    file = tmp_path / "out.json"
    program = tmp_path / "replay.py"
    arguments = (
        f"port:{port} port:make_cart --set-state port:set_state --num-envs 2 --json {file} --replay {program}"
    )
    assert main(["compare", *arguments.split(), "--num-steps", str(num_steps)]) == code
    assert file.exists() == (code != 2)
    if code == 1:
        record = json.loads(file.read_text())
        assert record["differences"] == [*record["replays"]] == ["reward"]
        capsys.readouterr()
        assert program.read_text() == record["replays"]["reward"]
        exec(program.read_text(), {})
        ours, theirs = map(float, capsys.readouterr().out.split())
        assert ours != theirs


def test_comparisons_run_with_x64():
    with jax.enable_x64(True):
        compare(make_port(), get_state=get_state, tolerances=1e-6).assert_equal()
        assert compare(make_port(sign=-1), mode="free_running").differences
        compare_distributions(make_port(), make_cart, num_episodes=64, backend="serial").assert_equal()


def test_results_of_other_shapes_and_dtypes_are_named():
    def observe(obs):
        return {"position": obs["position"][None], "extra": jnp.float32(0)}

    def step(key, state, action):
        state, results = RIGHT.step(key, state, action)
        reward = results["reward"].astype(jnp.float16)
        return state, {**results, "obs": observe(results["obs"]), "reward": reward}

    def reset(key):
        state, obs = RIGHT.reset(key)
        return state, observe(obs)

    result = compare(Port(reset, step))
    names = {"shape of obs/position", "result obs/extra", "result obs/weights", "dtype of reward"}
    assert {*result.differences} >= names
    assert result.spaces["shape of obs/position"].port == "(1,)"


def test_a_state_with_a_key_and_a_selected_part_is_sent():
    def reset(key):
        state, obs = RIGHT.reset(key)
        return (key, state), obs

    def step(key, both, action):
        state, results = RIGHT.step(key, both[1], action)
        return (jax.random.split(both[0])[0], state), results

    def set_part(env, state):
        set_state(env, {path[2:]: value for path, value in state.items()})

    port = Port(reset, step)
    compare(port, set_state=set_part).assert_equal()
    compare(port, select_state=lambda both: both[1]).assert_equal()


class Draws(gymnasium.Env):
    """Walks left or right by what it draws; its position is hidden in a flat observation."""

    observation_space = spaces.Box(-9, 9, (2,), np.float32)
    action_space = spaces.Dict(
        {"sign": spaces.MultiBinary(2), "size": spaces.MultiDiscrete([1, 2], start=[3, 0])}
    )
    drawn = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = np.float32(0)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        noise = np.float32(self.np_random.random()) if self.drawn is None else self.drawn
        self.position += noise * np.float32(action["size"][1]) * np.float32(2 * action["sign"][0] - 1)
        return np.array([self.position, 0], np.float32), 0.0, False, False, {}


def make_draws(sign=1, scale=1.0):
    """Returns a port of `Draws` with one action, from -1 to 1, and a scalar observation."""

    def step(key, position, action):
        position += scale * sign * action * jax.random.uniform(key)
        return position, {"obs": position, "reward": 0.0, "done": False}

    start = jnp.float32(0)
    return Port(lambda key: (start, start), step, spaces.Box(-9, 9, (1,)), spaces.Discrete(3, start=-1))


MAPS = {
    "actions": lambda action: {"sign": jnp.array([action > 0, 0]), "size": jnp.array([3, jnp.abs(action)])},
    "observe": lambda obs: obs[0],
}


def set_draws(env, state):
    env.position, env.drawn = np.float32(state["state"]), state.get("draws/uniform")


@pytest.mark.parametrize(("scale", "found"), [(1.0, []), (0.5, ["obs"])])
def test_maps_and_draws_compare_a_random_port_of_another_form(scale, found):
    draws = {"draws": lambda key: {"uniform": jax.random.uniform(key)}}
    result = compare(make_draws(scale=scale), original=Draws, set_state=set_draws, **MAPS, **draws)
    assert result.differences == found
    assert "actions" not in result.untested
    if found:
        names = {"port": make_draws(scale=scale), "original": Draws, "set_state": set_draws, **MAPS, **draws}
        exec(result.replay(), names)
        assert names["case"].original == result.leaves["obs"].worst.original
    with pytest.raises(TypeError, match="no random actions for None"):
        compare(replace(make_draws(), action_space=None), original=Draws, set_state=set_draws, **MAPS)


@pytest.mark.parametrize(("sign", "differs"), [(1, False), (-1, True)])
def test_random_steps_from_equal_states_have_equal_distributions(sign, differs):
    options = {"num_episodes": 512, "backend": "serial", "set_state": set_draws, "max_steps": 2, **MAPS}
    result = compare_distributions(make_draws(sign=sign), Draws, **options)
    assert ("obs after 1 steps" in result.differences) == differs
    assert "first obs" not in result.differences


def test_unplayed_parts_of_actions_are_named():
    result = compare(
        Port(
            lambda key: (jnp.float32(0),) * 2,
            lambda key, state, action: (state, {"obs": state, "reward": 0.0, "done": False}),
        ),
        original=Draws,
        observe=lambda obs: obs[0],
        set_state=set_draws,
        policy=lambda key, obs, state: {"sign": jnp.array([1, 0]), "size": jnp.array([3, 1])},
    )
    assert result.untested["actions"] == "0 of sign[0], 1 of sign[1], 0 of size[1]"


class Tenths(gymnasium.Env):
    """Adds tenths in float64, whose tenth sum is below 1, and in float32 is not."""

    observation_space = spaces.Box(0, 9, (), np.float32)
    action_space = spaces.Discrete(1)

    def reset(self, *, seed=None, options=None):
        self.sum = 0.0
        return np.float32(0), {}

    def step(self, action):
        self.sum += 0.1
        return np.float32(self.sum), float(self.sum >= 1), self.sum >= 1, False, {}


class Fuel(gymnasium.Env):
    """Moves to the right on a grid until its fuel is used, and keeps the array of its state."""

    observation_space = spaces.Dict(
        cell=spaces.Box(0, 99, (), np.int32), angle=spaces.Box(-9, 9, (), np.float32)
    )
    action_space = spaces.Discrete(1)

    def reset(self, *, seed=None, options=None):
        self.state = np.zeros(2, np.float32)  # position and used fuel
        return self._obs(), {}

    def step(self, action):
        self.state += [0.25 * (self.state[1] < 1), 0.25]
        return self._obs(), float(self.state[0]), bool(self.state[1] >= 3), False, {}

    def _obs(self):
        return {"cell": np.int32(self.state[0]), "angle": np.arccos(np.float32(1 - 1e-7) - 0 * self.state[0])}


@pytest.mark.parametrize(
    ("mode", "fuel", "found"),
    [("one_step", 1, []), ("free_running", 1, []), ("free_running", 99, ["obs/cell"])],
)
def test_discrete_observations_nan_and_kept_arrays_hide_nothing(mode, fuel, found):
    def observe(state):
        return {"cell": state[0].astype(int), "angle": jnp.arccos(jnp.float32(1 - 1e-7) - 0 * state[0])}

    def step(key, state, action):
        state += jnp.array([0.25 * (state[1] < fuel), 0.25])
        return state, {
            "obs": observe(state),
            "reward": state[0],
            "terminated": state[1] >= 3,
            "truncated": False,
        }

    start = jnp.zeros(2)
    options = {
        "set_state": lambda env, state: setattr(env, "state", state["state"]),
        "tolerances": {"": 1e-5, "reward": 9.0},  # which tells the repeated steps apart
        "backend": "process",
    }
    result = compare(Port(lambda key: (start, observe(start)), step), original=Fuel, mode=mode, **options)
    assert result.differences == found


@pytest.mark.parametrize(("limit", "found"), [(1.0, []), (0.95, ["reward", "terminated"])])
def test_a_flag_that_rounding_flips_is_no_difference(limit, found):
    def step(key, total, action):
        total = total + jnp.float32(0.1)
        over = total >= limit
        return total, {"obs": total, "reward": over.astype(float), "terminated": over, "truncated": False}

    port = Port(lambda key: (jnp.float32(0),) * 2, step)
    options = {"set_state": None, "mode": "free_running", "tolerances": 1e-5}
    result = compare(port, original=Tenths, **options)
    assert result.differences == found
    assert ("drift" in result.untested) == (found == [])


def test_nan_equals_nan_and_large_integers_are_compared_exactly():
    class Original(gymnasium.Env):
        integer = spaces.Box(0, 2**31 - 1, (), np.int32)
        observation_space = spaces.Dict(
            {"float": spaces.Box(-1, 1, (2,), np.float32), "int": integer, "other": integer}
        )
        action_space = spaces.MultiDiscrete([2, 3])

        def reset(self, *, seed=None, options=None):
            return self._obs(), {}

        def step(self, action):
            return self._obs(), 0.0, False, False, {}

        def _obs(self):
            large = np.int32(2**30)
            return {"float": np.array([np.nan, np.inf], np.float32), "int": large, "other": large}

    large = jnp.int32(2**30)
    obs = {"float": jnp.array([jnp.nan, jnp.inf]), "int": large, "other": large + 1}
    results = {"obs": obs, "reward": 0.0, "done": False}
    port = Port(lambda key: (0, obs), lambda key, state, action: (state, results))
    result = compare(port, original=Original, set_state=lambda env, state: None)
    assert result.differences == ["obs/other"]


def test_the_envs_of_gymnax_are_ports():
    gymnax = pytest.importorskip("gymnax", reason="gymnax is not installed: the group compat has it")

    def set_leaves(leaves, env, state):
        env.unwrapped.state = np.array([float(state[leaf]) for leaf in leaves.split()])

    states = {"CartPole-v1": "x x_dot theta theta_dot", "Pendulum-v1": "theta theta_dot"}
    states["Acrobot-v1"] = "joint_angle1 joint_angle2 velocity_1 velocity_2"
    for name, leaves in states.items():
        port = as_port(*gymnax.make(name))
        for mode in ("one_step", "free_running"):
            options = {"set_state": partial(set_leaves, leaves), "tolerances": 1e-5, "num_steps": 400}
            result = compare(port, original=name, mode=mode, **options)
            assert result.differences == []


def play(port, action, num_steps):
    """Returns the results of the first episode, with the same action in each step."""
    state, obs = jax.jit(port.reset)(jax.random.key(0))
    step, results = jax.jit(port.step), [{"obs": obs}]
    for number in range(num_steps):
        state, last = step(jax.random.key(number), state, action)
        results.append(last)
        if last["terminated"] or last["truncated"]:
            break
    return results


@pytest.mark.filterwarnings("ignore")  # of Brax's imports
def test_the_envs_of_brax_are_ports():
    brax = pytest.importorskip("brax.envs", reason="Brax is not installed: the group compat has it")
    env = brax.create("inverted_pendulum", episode_length=3, auto_reset=False, backend="generalized")
    wrapped = brax.create("inverted_pendulum", episode_length=3, backend="generalized")
    port, of_wrapped = as_port(env), as_port(wrapped)
    assert (port.max_episode_steps, port.autoreset, of_wrapped.autoreset) == (3, "DISABLED", "SAME_STEP")
    state = jax.jit(env.reset)(jax.random.key(0))
    for number, results in enumerate(play(of_wrapped, jnp.zeros(1), 5)):
        np.testing.assert_array_equal(results["obs"], state.obs)
        assert number == 0 or bool(results["truncated"]) == (number == 3)
        state = jax.jit(env.step)(state, jnp.zeros(1))
    assert number == 3


@pytest.mark.filterwarnings("ignore")  # of Jumanji's imports
def test_the_envs_of_jumanji_are_ports():
    jumanji = pytest.importorskip("jumanji", reason="Jumanji is not installed: pip install jumanji")
    wrappers = importlib.import_module("jumanji.wrappers")
    env = jumanji.make("Snake-v1")
    port, of_wrapped = as_port(env), as_port(wrappers.AutoResetWrapper(env))
    assert (port.autoreset, of_wrapped.autoreset) == ("DISABLED", "SAME_STEP")
    state, timestep = jax.jit(env.reset)(jax.random.key(0))
    for results in play(of_wrapped, jnp.int32(1), 20):
        np.testing.assert_array_equal(results["obs"].grid, timestep.observation.grid)
        last = bool(timestep.last())
        assert bool(results.get("terminated", False)) == last
        state, timestep = jax.jit(env.step)(state, jnp.int32(1))
    assert last


def test_equal_distributions_are_not_reported():
    def step(key, state, action):  # a discrete speed, with the rounding of another order of sums
        state, results = RIGHT.step(key, state, action)
        obs = {**results["obs"], "weights": results["obs"]["weights"] + 1e-7}
        return state, {**results, "obs": obs}

    result = compare_distributions(Port(RIGHT.reset, step), make_cart, num_episodes=512, backend="serial")
    result.assert_equal()
    times = ("first obs", "obs after 1 steps", "obs after 10 steps")
    samples = {f"{when}/{name}" for when in times for name in OBS}
    assert {*result.samples} - samples == {"first action", "return", "length", "terminated", "truncated"}
    assert samples < {*result.samples}
    assert "512 episodes on each side" in str(result)
    for half_width in result.samples["first obs/position"].errors:  # of 512 draws between -1 and 1
        assert half_width == pytest.approx(1.96 / (3 * 512) ** 0.5, rel=0.1)


def test_a_policy_transfers_with_its_mean_return_on_both_sides():
    def right(key, obs):
        return jnp.int32(2)

    port = make_port(limit=3, bound=99.0)
    original = partial(make_cart, 2)
    result = compare_distributions(port, original, policy=right, num_episodes=512, backend="serial")
    length, returns = result.samples["length"], result.samples["return"]
    assert (length.means, length.errors) == ((3, 2), (0, 0))
    # From position x, the rewards are x + 0.25, x + 0.75 and x + 1.5, and x is between -1 and 1.
    for mean, half_width, expected in zip(returns.means, returns.errors, (2.5, 1.0), strict=True):
        assert mean == pytest.approx(expected, abs=2 * half_width)


@pytest.mark.parametrize(
    ("mistake", "found"),
    [
        pytest.param({"limit": LIMIT + 1}, "length", marks=pytest.mark.slow),
        ({"sign": -1}, "obs after 1 steps/position"),  # equally distributed, but for the action
        ({"bound": 2.0}, "length"),
        ({"start": 0.7}, "first obs/position"),
    ],
)
def test_other_distributions_are_found_and_named(mistake, found):
    result = compare_distributions(make_port(**mistake), make_cart, num_episodes=512, backend="serial")
    assert found in result.differences
    with pytest.raises(AssertionError, match=found):
        result.assert_equal()
