"""Comparisons of JAX ports with their Python originals: wrong ports are found, and correct ones are equal."""

from __future__ import annotations

import importlib
from functools import partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import jaxvec
from jaxvec.ports import Port, as_port, compare_distributions, compare_port, replay

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


def make_port(
    *,
    limit=LIMIT,
    bound=BOUND,
    sign=1,
    late=False,
    order="first",
    space_high=4.0,
    start=1,
    resets=False,
    autoreset=None,
):
    """Returns a port of `Cart`, which has the given mistakes."""

    def observe(position, speed):
        third = jnp.float32(1 / 3)
        total = (position + speed) + third if order == "first" else position + (speed + third)
        return {"position": position, "weights": jnp.array([total, position, speed])}

    def reset(key):
        state = {
            "position": jax.random.uniform(key, minval=-1, maxval=start),
            "speed": jnp.float32(0),
            "steps": jnp.int32(0),
            "last_reward": jnp.float32(0),
        }
        return state, observe(state["position"], state["speed"])

    def step(key, state, action):
        speed = state["speed"] + jnp.float32(0.25) * sign * (action - 1)
        position = state["position"] + speed
        steps = state["steps"] + 1
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

    space = spaces.Dict(
        {
            "position": spaces.Box(-4, space_high, (), np.float32),
            "weights": spaces.Box(-9, 9, (3,), np.float32),
        }
    )
    return Port(reset, step, space, spaces.Discrete(3), limit, autoreset)


compare = partial(
    compare_port,
    original=make_cart,
    set_state=set_state,
    num_envs=4,
    num_steps=150,
    backend="serial",
)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("mode", ["one_step", "free_running"])
def test_a_correct_port_is_equal(mode):
    options = {"info": {"steps": int}, "backend": "process", "num_workers": 2}
    result = compare(make_port(), mode=mode, **options)
    assert result.differences == []
    assert {*result.leaves} == {
        "obs/position",
        "obs/weights",
        "reward",
        "terminated",
        "truncated",
        "info/steps",
    }
    assert all(each.compared == 600 and each.max_error == 0 for each in result.leaves.values())
    ends = result.leaves["truncated"].ones
    assert ends is not None
    assert ends[0] == ends[1] > 0
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
    "reset in a step": (
        {"resets": True},
        {"obs/position", "obs/weights", "autoreset"},
        {"obs/position", "obs/weights"},
    ),
}


@pytest.mark.parametrize(("mistake", "found", "at_ends"), MISTAKES.values(), ids=MISTAKES)
@pytest.mark.parametrize("mode", ["one_step", pytest.param("free_running", marks=pytest.mark.slow)])
def test_a_wrong_port_is_found_and_named(mistake, found, at_ends, mode):
    port = make_port(**mistake)
    result = compare(port, mode=mode)
    assert {*result.differences} <= found if mode == "free_running" else {*result.differences} == found
    assert result.differences
    with pytest.raises(AssertionError) as caught:
        result.assert_equal()
    assert result.differences[0] in str(caught.value)
    result.assert_equal(ignore=found)
    leaves = {path: result.leaves[path] for path in {*result.differences} & {*result.leaves}}
    if mode == "one_step":
        assert {path for path, leaf in leaves.items() if leaf.at_ends == leaf.different} == at_ends
        assert ("only ends" in str(result)) == bool(at_ends)
    for path, leaf in leaves.items():
        names = {"port": port, "original": make_cart, "set_state": set_state, "policy": None}
        exec(result.replay(path), names)
        ours, theirs = (np.asarray(side[path]) for side in names["results"])
        assert (ours != theirs).any()
        np.testing.assert_array_equal(ours, leaf.worst.port)
        np.testing.assert_array_equal(theirs, leaf.worst.original)
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

    result = compare(make_port(autoreset=ours), original=original)
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


def test_an_original_without_set_state_is_refused_in_one_step_mode():
    with pytest.raises(ValueError, match="needs set_state"):
        compare(make_port(), set_state=None)


def test_an_original_without_set_state_runs_from_its_own_resets():
    result = compare(make_port(), set_state=None, mode="free_running")
    assert not result.set_to_states
    assert "not set to states of the port" in str(result)
    assert result.leaves["obs/position"].first_step == 1  # its random generator is another one


def test_a_set_state_that_raises_is_named():
    def wrong(env, state):
        env.unwrapped.no_such_method(state)

    with pytest.raises(jaxvec.EnvError, match="set_state could not set the original"):
        compare(make_port(), set_state=wrong)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "two_step"}, "mode must be"),
        (
            {"tolerances": {"observation": 1}},
            "no leaf has the path 'observation'; the paths are obs/position",
        ),
        ({"num_steps": 2**31}, "too many to count"),
        ({"original": 3}, "original must be a Gymnasium id"),
        ({"port": object()}, "no env of gymnax"),
    ],
)
def test_wrong_arguments_are_named(options, text):
    with pytest.raises((TypeError, ValueError), match=text):
        compare(**{"port": make_port(), **options})


def test_results_of_other_shapes_and_dtypes_are_named():
    right = make_port()

    def step(key, state, action):
        state, results = right.step(key, state, action)
        obs = {"position": results["obs"]["position"][None], "extra": jnp.float32(0)}
        return state, {**results, "obs": obs, "reward": results["reward"].astype(jnp.float16)}

    def reset(key):
        state, obs = right.reset(key)
        return state, {"position": obs["position"][None], "extra": jnp.float32(0)}

    result = compare(Port(reset, step))
    assert {*result.differences} >= {
        "shape of obs/position",
        "result obs/extra",
        "result obs/weights",
        "dtype of reward",
    }
    assert result.spaces["shape of obs/position"].port == "(1,)"


def test_a_state_with_a_key_and_a_selected_part_is_sent():
    right = make_port()

    def reset(key):
        state, obs = right.reset(key)
        return (key, state), obs

    def step(key, both, action):
        state, results = right.step(key, both[1], action)
        return (jax.random.split(both[0])[0], state), results

    port = Port(reset, step)
    result = compare(
        port, set_state=lambda env, state: set_state(env, {key[2:]: x for key, x in state.items()})
    )
    result.assert_equal()
    compare(port, select_state=lambda both: both[1]).assert_equal()


def test_nan_equals_nan_and_large_integers_are_compared_exactly():
    class Original(gymnasium.Env):
        observation_space = spaces.Dict(
            {
                "float": spaces.Box(-1, 1, (2,), np.float32),
                "int": spaces.Box(0, 2**31 - 1, (), np.int32),
                "other": spaces.Box(0, 2**31 - 1, (), np.int32),
            }
        )
        action_space = spaces.MultiDiscrete([2, 3])

        def reset(self, *, seed=None, options=None):
            return self._obs(), {}

        def step(self, action):
            return self._obs(), 0.0, False, False, {}

        def _obs(self):
            large = np.int32(2**30)
            return {"float": np.array([np.nan, np.inf], np.float32), "int": large, "other": large}

    obs = {
        "float": jnp.array([jnp.nan, jnp.inf]),
        "int": jnp.int32(2**30),
        "other": jnp.int32(2**30 + 1),
    }
    port = Port(
        lambda key: (0, obs),
        lambda key, state, action: (state, {"obs": obs, "reward": 0.0, "done": False}),
    )
    result = compare(port, original=Original, set_state=lambda env, state: None)
    assert result.differences == ["obs/other"]


def test_the_envs_of_gymnax_are_ports():
    gymnax = pytest.importorskip("gymnax", reason="gymnax is not installed: the group compat has it")

    def set_cart(env, state):
        env.unwrapped.state = [float(state[name]) for name in ("x", "x_dot", "theta", "theta_dot")]

    port = as_port(*gymnax.make("CartPole-v1"))
    result = compare(port, original="CartPole-v1", set_state=set_cart, tolerances={"obs": 1e-6})
    assert [name for name in result.differences if "space" not in name] == []
    ours, theirs = replay(port, "CartPole-v1", key=jax.random.key(0), step=3)
    assert ours["obs"].shape == theirs["obs"].shape


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
    right = make_port()

    def step(key, state, action):  # a discrete speed, with the rounding of another order of sums
        state, results = right.step(key, state, action)
        obs = {**results["obs"], "weights": results["obs"]["weights"] + 1e-7}
        return state, {**results, "obs": obs}

    result = compare_distributions(Port(right.reset, step), make_cart, num_episodes=512, backend="serial")
    result.assert_equal()
    assert {*result.samples} == {
        *(
            f"{when}/{name}"
            for when in ("first obs", "obs after 1 steps", "obs after 10 steps")
            for name in OBS
        ),
        "return",
        "length",
    }
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
        ({"bound": 2.0}, "length"),
        ({"start": 0.7}, "first obs/position"),
    ],
)
def test_other_distributions_are_found_and_named(mistake, found):
    result = compare_distributions(make_port(**mistake), make_cart, num_episodes=512, backend="serial")
    assert found in result.differences
    with pytest.raises(AssertionError, match=found):
        result.assert_equal()
