"""Configurations of single envs, episodes without autoreset, and further options of `make`."""

from __future__ import annotations

import functools
import runpy
import sys
from functools import partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from support import disasters, probe
from support.probe import pool_of

import jaxvec
from jaxvec.testing import CountingEnv

# --- Configs of each env's own, and episodes without autoreset -----------------------------------


def test_each_env_has_its_config_and_knows_its_worker(make):
    class Configured(CountingEnv):
        def __init__(self, index, worker_id, *, length, level=0):
            super().__init__(length)
            self.place = (index, worker_id)
            self.level = level

    envs = make(
        Configured, 4, num_workers=2, length=3, env_configs=[{}, {"level": 1}, {"level": 2}, {"length": 4}]
    )
    assert envs.get_attr("place") == ((0, 0), (1, 0), (2, 1), (3, 1))
    assert envs.get_attr("level") == (0, 1, 2, 0)
    gravities = make("CartPole-v1", env_configs=[{"sutton_barto_reward": True}, {}], num_envs=2)
    assert gravities.get_attr("_sutton_barto_reward") == (True, False)
    with pytest.raises(ValueError, match="env_configs has 1 configs, but there are 2 envs"):
        make("CartPole-v1", 2, env_configs=[{}])


class Reach(gymnasium.Env):
    """An env whose bounds depend on its goal, in many kinds of space."""

    action_space = spaces.Discrete(9)

    def __init__(self, goal, shift=0):
        self.goal, self.shift = goal, shift
        self.reward_space = spaces.Box(-goal, goal, (1,), np.float64)
        self.observation_space = spaces.Dict(
            {
                "z": spaces.Box(-1, goal, (2,), np.float32),
                "a": spaces.Tuple((spaces.Discrete(goal, start=-goal), spaces.MultiBinary(2))),
                "m": spaces.MultiDiscrete([goal, 2], start=[goal, 0]),
                "text": spaces.Text(4, min_length=goal - 3),
                "same": spaces.Box(0, 1, ()),
            }
        )

    def _observe(self):
        goal = self.goal
        place = np.full(2, goal + self.shift, np.float32)
        return {
            "z": place,
            "a": (np.int64(-goal), np.ones(2, np.int8)),
            "m": np.array([2 * goal - 1, 0]),
            "text": "a" * goal,
            "same": np.array(goal / 9, np.float32),
        }

    def reset(self, *, seed=None, options=None):
        return self._observe(), {}

    def step(self, action):
        return self._observe(), np.array([float(action)]), False, False, {}


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("check", ["structure", "strict"])
def test_bounds_of_observations_may_differ(make, backend, num_workers, check):
    goals = [{"goal": goal} for goal in (3, 4, 3)]
    num_workers = 1 if backend == "serial" else num_workers
    envs = make(Reach, 3, env_configs=goals, backend=backend, num_workers=num_workers, check=check)
    original = SyncVectorEnv([partial(Reach, 3), partial(Reach, 4)], observation_mode="different")
    expected = original.reset()[0]
    for timestep in (envs.reset(), envs.step(np.zeros(3, int))):
        for key in ("z", "m", "same"):
            np.testing.assert_array_equal(timestep.obs[key][:2], expected[key])
        np.testing.assert_array_equal(timestep.obs["a"][0][:2], expected["a"][0])
    space = envs.single_observation_space
    assert [*space.keys()] == [*Reach(3).observation_space.keys()]
    assert space["z"] == spaces.Box(-1, 4, (2,), np.float32)
    assert space["a"] == spaces.Tuple((spaces.Discrete(4, start=-4), spaces.MultiBinary(2)))
    assert space["m"] == spaces.MultiDiscrete([5, 2], start=[3, 0])
    for goal in (3, 4):
        assert space.contains(Reach(goal)._observe())
    assert envs.reward_space == spaces.Box(-4, 4, (1,), np.float64)


def test_strict_checks_each_env_against_its_own_space(make, backend):
    configs = [{"goal": 4, "shift": -1}, {"goal": 3, "shift": 1}]  # in the bounds of the pool
    envs = make(Reach, 2, env_configs=configs, backend=backend, check="strict", num_workers=1)
    with pytest.raises(jaxvec.EnvDataError, match=r"^env 1 .*obs\['z'\]: .* is not in Box\(-1.0, 3.0"):
        envs.reset()


def test_other_differences_of_spaces_are_refused(make, backend):
    class Env(CountingEnv):
        def __init__(self, observation, action=spaces.Discrete(9)):  # noqa: B008
            super().__init__()
            self.observation_space, self.action_space = observation, action

    box = spaces.Box(0, 1, (2,))
    for one, other in (
        ([box], [spaces.Box(0, 2, (3,))]),
        ([box], [spaces.Box(0, 2, (2,), np.float64)]),
        ([spaces.Dict(a=box)], [spaces.Dict(b=box)]),
        ([spaces.Tuple([box])], [spaces.Tuple([box, box])]),
        ([spaces.Discrete(2)], [spaces.MultiDiscrete([2])]),
        ([spaces.Sequence(box)], [spaces.Sequence(box, stack=True)]),
        ([spaces.Text(3)], [spaces.Text(4)]),
        ([box, box], [box, spaces.Box(0, 2, (2,))]),
    ):
        kind = "observation" if len(one) == 1 else "action"
        with pytest.raises(jaxvec.SpaceMismatchError, match=rf"^env 1 has {kind} space .* the envs before"):
            make([partial(Env, *one), partial(Env, *other)], backend=backend, max_sizes={"obs": 2})


def test_constructor_parameters_get_the_env_or_worker_index(make, backend):
    class Placed(CountingEnv):
        def __init__(self, place):
            super().__init__()
            self.place = place

    def optional(env_id=None, worker_id=None):
        return Placed((env_id, worker_id))

    def number(index, worker_id=-1, *, env_id: int):
        return Placed((index, worker_id, env_id))

    def required_first(env_id, worker_id):
        return Placed((env_id, worker_id))

    @functools.wraps(required_first)
    def wrapper(*args, **kwargs):
        return required_first(*args, **kwargs)

    def positional(first, /, env_id: int | None = None):
        return Placed((first, env_id))

    def of_an_id(env_id="CartPole-v1", worker_id=None):
        return Placed((env_id, worker_id))

    def annotated(env_id: str | None = None):
        return Placed(env_id)

    def others(**env_id):
        return Placed(env_id)

    at = [0, 1, 1] if backend == "process" else [0, 0, 0]
    start = partial(make, num_envs=3, backend=backend, num_workers=max(at) + 1)
    for function, expected in (
        (optional, [(i, at[i]) for i in range(3)]),
        ([optional, partial(optional, env_id=7), partial(optional, 5)], [(0, 0), (7, at[1]), (5, at[2])]),
        (partial(optional, worker_id="mine"), [(i, "mine") for i in range(3)]),
        (number, [(i, at[i], i) for i in range(3)]),
        (required_first, [(i, at[i]) for i in range(3)]),
        (wrapper, [(i, at[i]) for i in range(3)]),
        (positional, [(i, i) for i in range(3)]),
        (of_an_id, [("CartPole-v1", at[i]) for i in range(3)]),
        (annotated, [None] * 3),
        (others, [{}] * 3),
    ):
        assert start(function).get_attr("place") == tuple(expected), function
    assert start(optional, env_id="mine").get_attr("place") == tuple(("mine", at[i]) for i in range(3))
    with pytest.raises(TypeError, match=r"requires the arguments \['level', 'env_id'\]"):
        start(lambda level, env_id: Placed((level, env_id)))


def test_of_a_class_only_a_parameter_that_means_the_index_is_filled(make, backend):
    class Trader(CountingEnv):
        def __init__(self, fee, env_id=None):
            super().__init__()
            self.place = (fee, env_id)

    class Ranked(CountingEnv):
        def __init__(self, rank):
            super().__init__()
            self.place = rank

    class Named(CountingEnv):
        def __init__(self, index: str):
            super().__init__()

    def from_text(level: str):
        return Ranked(level)

    start = partial(make, num_envs=3, backend=backend)
    for env, missing in ((Trader, "fee"), (partial(Trader, env_id=1), "fee"), ([Trader] * 3, "fee")):
        with pytest.raises(
            TypeError, match=rf"Trader.* requires the arguments \['{missing}'\]; pass them as"
        ):
            start(env)
    for env, missing in ((Named, "index"), (from_text, "level")):
        with pytest.raises(TypeError, match=rf"requires the arguments \['{missing}'\]"):
            start(env)
    assert start(Trader, fee=0.5).get_attr("place") == ((0.5, 0), (0.5, 1), (0.5, 2))
    assert start(lambda fee: Trader(fee)).get_attr("place") == ((0, None), (1, None), (2, None))
    assert start(Ranked).get_attr("place") == (0, 1, 2)


def test_in_episodes_finished_envs_idle_until_all_are_done(make, backend):
    envs = make(
        [partial(CountingEnv, length) for length in (1, 2, 3)], autoreset_mode="EPISODIC", backend=backend
    )
    assert envs.autoreset_mode is AutoresetMode.DISABLED
    with pytest.raises(jaxvec.ResetNeededError):
        envs.step([0, 0, 0])

    @jax.jit
    def episode():
        handle, timestep = jaxvec.reset(envs)

        def step(carry):
            handle, timestep, total = carry
            handle, timestep = jaxvec.step(handle, jnp.array([5, 6, 7]))
            return handle, timestep, total + timestep.reward

        def going_on(carry):
            return ~(carry[1].terminated | carry[1].truncated).all()

        return jax.lax.while_loop(going_on, step, (handle, timestep, jnp.zeros(3)))

    for _ in range(2):  # a reset begins another
        handle, timestep, total = episode()
        assert total.tolist() == [1, 1 + 2, 1 + 2 + 3]
        assert timestep.obs[:, 2:].tolist() == [[1, 5], [2, 6], [3, 7]]
        assert timestep.info["idle"].tolist() == [True, True, False]
        assert timestep.info["episode_return"].tolist() == total.tolist()
        assert timestep.info["episode_length"].tolist() == [1, 2, 3]
    assert envs.stats().total.steps == 2 * (1 + 2 + 3)
    _, timestep = jaxvec.reset(handle, mask=np.array([True, False, False]))
    assert timestep.terminated.tolist() == [False, True, True]
    timestep = envs.step([1, 1, 1])
    assert timestep.info["idle"].tolist() == [False, True, True]
    assert timestep.reward.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    "env", ["CartPole-v1", gymnasium.spec("CartPole-v1"), CountingEnv, [CountingEnv] * 2]
)
def test_a_misspelt_option_is_named_with_what_was_meant(env):
    for name, meant in {"num_worker": "num_workers", "seeds": "seed", "timeout": "timeouts"}.items():
        with pytest.raises(TypeError, match=f"unexpected option '{name}' .*Did you mean '{meant}'"):
            jaxvec.make(env, 2, **{name: 1})


class Overlapping(CountingEnv):
    """Has arguments with names of options of `make`."""

    def __init__(self, batch_size=1, *, info=False, device="cpu", timeouts=60, workers=None):
        super().__init__()
        self.given = (batch_size, device)


class Forwarding(Overlapping):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)


class Hiding(Overlapping):
    def __init__(self, level=0):
        super().__init__()


@pytest.mark.parametrize("env", [Overlapping, Forwarding, [CountingEnv, Overlapping], "Overlapping-v0"])
def test_an_option_that_the_env_takes_too_is_warned_of(make, env):
    gymnasium.register("Overlapping-v0", Overlapping)
    try:
        with pytest.warns(
            UserWarning, match=r"^batch_size is .* env_configs=\[{'batch_size': \.\.\.}\]"
        ) as caught:
            envs = make(env, 2, batch_size=1, num_workers=1, backend="serial", workers=jaxvec.Workers())
        assert (len(caught), caught[0].filename) == (1, disasters.__file__)
        assert envs.batch_size == 1
    finally:
        del gymnasium.registry["Overlapping-v0"]


def test_a_warning_that_is_an_error_leaves_no_worker(make, new_workers):
    with pytest.raises(UserWarning, match="^batch_size is ") as caught:
        make(Overlapping, 2, batch_size=1)
    assert new_workers() == [], caught  # its traceback refers to the pool


def test_an_option_is_not_warned_of_if_the_env_is_sure_to_lack_it(make):
    make(Hiding, 2, batch_size=1)
    make(lambda batch_size=3: CountingEnv(), 2, backend="serial")
    make(gymnasium.spec("CartPole-v1"), 2, batch_size=1)
    make(lambda **kwargs: CountingEnv(), 2, batch_size=1)
    given = make(Overlapping, 2, batch_size=1, env_configs=[{"batch_size": 5, "device": "here"}, {}])
    assert given.get_attr("given") == ((5, "here"), (1, "cpu"))


@pytest.mark.parametrize(
    "option", [{"info": True}, {"device": "cuda"}, {"timeouts": 30}, {"batch_size": 8}], ids=str
)
def test_errors_of_options_that_the_env_takes_name_env_configs(option):
    (name,) = option
    with pytest.raises((TypeError, ValueError), match=rf"env_configs=\[{{'{name}': "):
        jaxvec.make(Overlapping, 2, backend="serial", **option)
    with pytest.raises((TypeError, ValueError), match=name) as caught:
        jaxvec.make(CountingEnv, 2, backend="serial", **option)
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("env", ["CartPole-v1", CountingEnv])
@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("asynchronous", 'backend="serial"'),
        ("wrappers", r"lambda: Wrapper\(gymnasium.make"),
        ("observation_space", "make reads the spaces from the envs"),
        ("shared_memory", "always in shared memory"),
        ("context", "start_method=..."),
        ("num_threads", "as num_workers"),
        ("env_kwargs", "env_configs"),
        ("seed", r"reset\(seed=\.\.\.\)"),
    ],
)
def test_an_argument_of_other_libraries_names_what_takes_its_place(env, name, instead):
    with pytest.raises(TypeError, match=f"unexpected option '{name}' .*{instead}"):
        jaxvec.make(env, 2, **{name: 1})


def test_a_misspelt_option_is_not_passed_on_as_any_keyword(make):
    class Base(CountingEnv):
        def __init__(self, num_worker=0):
            super().__init__()
            self.given = num_worker

    class Env(Base):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)

    with pytest.raises(TypeError, match="Did you mean 'num_workers'"):
        jaxvec.make(lambda **kwargs: CountingEnv(**kwargs), 2, num_worker=1)
    assert make(Env, 1, num_worker=3).get_attr("given") == (3,)
    assert make(lambda **kwargs: Base(**kwargs), 1, env_configs=[{"num_worker": 3}]).get_attr("given") == (3,)


def test_config_is_read_by_each_make(make):
    with jaxvec.config.override(transport="io_callback"):
        envs = make(CountingEnv, 1)
    assert envs.transport == "io_callback" != jaxvec.make(CountingEnv, 1, backend="serial").transport
    with pytest.raises(ValueError, match=r"config.transport must be one of auto, ffi, io_callback, not 'x'"):
        jaxvec.config.transport = "x"
    with pytest.raises(
        AttributeError, match="no setting 'handoff', only transport, dispatch, wrapper_bypass"
    ):
        jaxvec.config.handoff = "auto"


@pytest.mark.parametrize(
    ("make_record", "error", "said"),
    [
        (lambda: jaxvec.Timeouts(step=0), ValueError, r"Timeouts\(step=...\) must be above 0"),
        (lambda: jaxvec.Timeouts(start=1e300), ValueError, r"Timeouts\(start=...\) .*at most 2,000,000 s"),
        (lambda: jaxvec.Timeouts(reset=float("nan")), ValueError, r"Timeouts\(reset=...\) .*not nan"),
        (lambda: jaxvec.Timeouts(step="3"), TypeError, r"Timeouts\(step=...\) must be a number .*'3'"),
        (lambda: jaxvec.Timeouts(step=True), TypeError, r"Timeouts\(step=...\) must be a number .*True"),
        (lambda: jaxvec.States(-1), ValueError, r"States\(max=...\) must be an integer of at least 0"),
        (lambda: jaxvec.States(1, 3), TypeError, r"States\(functions=...\) must be two functions"),
    ],
)
def test_records_check_themselves(make_record, error, said):
    with pytest.raises(error, match=said):
        make_record()


def test_infinite_timeouts_are_none_and_long_ones_work(make, backend):
    assert jaxvec.Timeouts(*[float("inf")] * 3) == jaxvec.Timeouts(None, None, None)
    for seconds in (float("inf"), 2_000_000, np.float32(60)):
        envs = make(CountingEnv, 1, backend=backend, timeouts=jaxvec.Timeouts(*[seconds] * 3))
        envs.reset(options={})
        assert envs.step([3]).obs.tolist() == [[1, 1, 1, 3]]
        assert envs.call("get_wrapper_attr", "steps") == (1,)


def test_an_env_may_have_such_an_argument(make):
    class Env(CountingEnv):
        def __init__(self, seed, **kwargs):
            super().__init__()
            self.given = (seed, kwargs)

    assert make(Env, 1, seed=3, wrappers=4).get_attr("given") == ((3, {"wrappers": 4}),)


def test_callables_may_come_from_a_generator(make, backend):
    envs = make((partial(CountingEnv, length) for length in (2, 3)), backend=backend)
    envs.reset()
    envs.step([0, 0])
    assert envs.step([0, 0]).terminated.tolist() == [True, False]
    assert make(map(partial, [CountingEnv] * 3), 3, backend=backend).num_envs == 3
    with pytest.raises(ValueError, match="num_envs is 3, but the list has 2 callables"):
        make((CountingEnv for _ in range(2)), 3)
    with pytest.raises(TypeError, match="unexpected option 'num_worker'.*Did you mean 'num_workers'"):
        make((CountingEnv for _ in range(2)), num_worker=1)


class OldEnv(CountingEnv):
    def reset(self):
        return super().reset()[0]


class OldStep(CountingEnv):
    def step(self, action):
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, terminated, info


class Outer(gymnasium.Wrapper):
    """Passes on what it gets."""


class NoOptions(gymnasium.Wrapper):
    def reset(self, *, seed=None):
        return self.env.reset(seed=seed)


@pytest.mark.parametrize(
    ("env", "named"),
    [
        (OldEnv, "OldEnv"),
        (lambda: Outer(OldEnv()), "OldEnv"),
        (lambda: NoOptions(CountingEnv()), "NoOptions"),
    ],
)
def test_a_reset_that_takes_no_seed_or_options_names_the_way_out(make, backend, env, named):
    envs = make(env, 2, backend=backend)
    with pytest.raises(
        jaxvec.EnvError, match=rf"(?s){named}.reset must accept.*seed=None, options=None.*shimmy"
    ) as caught:
        envs.reset(seed=0)
    assert caught.value.operation == "reset"


def test_a_type_error_of_another_kind_says_nothing_of_it(make):
    class Env(CountingEnv):
        def reset(self, *, seed=None, options=None):
            return 1 + "1"

    with pytest.raises(jaxvec.EnvError) as caught:
        make(Env, 1).reset()
    assert "shimmy" not in str(caught.value)


def test_a_step_of_four_values_names_the_way_out(make, backend):
    envs = make(OldStep, 1, backend=backend)
    envs.reset()
    with pytest.raises(jaxvec.EnvDataError, match="got a tuple of 4.*shimmy.GymV21"):
        envs.step([0])


def test_an_id_whose_package_is_not_imported_says_which_to_name():
    with pytest.raises(
        gymnasium.error.NamespaceNotFound, match=r'jaxvec.make\("the_package:Nowhere/Env-v0", …\)'
    ):
        jaxvec.make("Nowhere/Env-v0", 1)
    if "ale_py" not in sys.modules:
        with pytest.raises(
            gymnasium.error.NamespaceNotFound, match=r'jaxvec.make\("ale_py:ALE/Pong-v5", …\)'
        ):
            jaxvec.make("ALE/Pong-v5", 1)


def test_a_module_that_workers_can_not_import_is_explained(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("""
from support import disasters
import jaxvec
from jaxvec.testing import CountingEnv

class Env(CountingEnv):
    pass

try:
    jaxvec.make(Env, 1)
except jaxvec.EnvError as error:
    said = str(error)
""")
    said = runpy.run_path(str(path), run_name="another_name")["said"]
    assert "No module named 'another_name'" in said
    assert "pickled by reference to module 'another_name', which this worker can't import" in said


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_program_that_does_not_know_its_interpreter_says_so(monkeypatch, method):
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(
        jaxvec.WorkerDiedError, match=r"worker 0 .*not be started: .* sys.executable is empty"
    ):
        jaxvec.make(CountingEnv, 1, workers=jaxvec.Workers(start_method=method))


def test_only_infos_that_say_something_are_asked_for(make, backend, monkeypatch):
    class Rare(CountingEnv):
        def reset(self, **kwargs):
            obs, _ = super().reset(**kwargs)
            return obs, {"begun": self.action} if self.action > 8 else {}

        def step(self, action):
            self.action = int(action)
            obs, reward, *_ = super().step(action)
            return obs, reward, bool(action > 6), False, {"said": int(action)} if action % 2 else {}

        action = 0

    num_workers = 2 if backend == "process" else 1
    envs = make(Rare, 5, num_workers=num_workers, backend=backend, autoreset_mode="SAME_STEP")
    envs.reset(seed=0)
    asked = []
    request = type(probe.workers(envs)).request

    def spy(self, name, arguments, **kwargs):
        asked.extend(arguments(0, 5))
        return request(self, name, arguments, **kwargs)

    monkeypatch.setattr(type(probe.workers(envs)), "request", spy)
    envs.step([0, 5, 8, 0, 3])  # env 2 ends an episode, and nothing is said of it
    assert envs.infos() == ({}, {"said": 5}, {"final_info": {}}, {}, {"said": 3})
    assert envs.infos([4, 2]) == ({"said": 3}, {"final_info": {}})
    assert envs.infos([0, 2]) == ({}, {"final_info": {}})
    assert asked == [[1, 4], [4]]
    assert pool_of(envs).env_calls.known_infos() is None
    envs.step([7, 9, 10, 8, 0])
    assert envs.infos() == (
        {"final_info": {"said": 7}},
        {"begun": 9, "final_info": {"said": 9}},
        {"begun": 10, "final_info": {}},
        {"final_info": {}},
        {},
    )
    assert asked[2:] == [[0, 1, 2]]
    envs.step([2, 8, 2, 8, 2])
    assert pool_of(envs).env_calls.known_infos() == [{}, {"final_info": {}}] * 2 + [{}]
    assert asked[3:] == []


def test_config_override_ends_with_its_block_also_after_errors():
    before = repr(jaxvec.config)
    with pytest.raises(ValueError, match=r"config.dispatch must be one of auto, native, portable, not 'x'"):
        with jaxvec.config.override(transport="io_callback", dispatch="x"):
            pass
    assert repr(jaxvec.config) == before
    with jaxvec.config.override(transport="io_callback"), jaxvec.config.override(dispatch="portable"):
        assert (jaxvec.config.transport, jaxvec.config.dispatch) == ("io_callback", "portable")
    assert repr(jaxvec.config) == before
