"""PettingZoo's envs through jaxvec.adapters.pettingzoo, compared with the envs stepped by hand."""

import importlib
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from support.pettingzoo_by_hand import assert_jitted_steps_are_those_by_hand, sample_actions, scan

import jaxvec
from jaxvec.testing import CountingEnv, check_env

pettingzoo = pytest.importorskip(
    "pettingzoo", reason="pettingzoo is not installed: the extra of its name has it"
)
from pettingzoo.utils.conversions import parallel_to_aec  # noqa: E402

from jaxvec.adapters.pettingzoo import INFO, PettingZooEnv  # noqa: E402

FATES = {  # agent to the step of its end, and how it ends
    "terminated": {"walker": (3, "terminated"), "seer": (5, "terminated"), "late": (4, "terminated")},
    "truncated": {"walker": (3, "terminated"), "seer": (5, "truncated"), "late": (4, "terminated")},
    "together": {"walker": (4, "truncated"), "seer": (4, "truncated"), "late": (4, "truncated")},
    "early": {"walker": (1, "truncated"), "seer": (3, "terminated"), "late": (9, "terminated")},
}


class Strangers(pettingzoo.ParallelEnv):
    """Agents of different kinds, each with its own end; `late` comes after two steps, if it is awaited."""

    metadata = {"name": "strangers_v0", "render_modes": ["rgb_array"], "render_fps": 4}
    render_mode = "rgb_array"
    possible_agents = ["walker", "seer", "late"]  # not in sorted order

    def __init__(self, fates, *, awaited=True):
        self.level = 1
        self._fates, self._awaited = fates, awaited
        self._random = np.random.default_rng()
        self._spaces = {
            "walker": spaces.Box(1, 2, (2,), np.float64),
            "seer": spaces.Dict(
                {"image": spaces.Box(0, 255, (2, 2), np.uint8), "sign": spaces.MultiBinary(2)}
            ),
            "late": spaces.Discrete(9, start=5),
        }
        self._actions = {
            "walker": spaces.Discrete(3),
            "seer": spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.Discrete(2))),
            "late": spaces.MultiDiscrete([2, 4]),
        }

    def observation_space(self, agent):
        return self._spaces[agent]

    def action_space(self, agent):
        return self._actions[agent]

    def _observe(self, agents):
        seeds = {agent: int(self._random.integers(2**31)) for agent in self.possible_agents}
        for agent in agents:
            self._spaces[agent].seed(seeds[agent])
        return {agent: self._spaces[agent].sample() for agent in agents}

    def reset(self, seed=None, options=None):
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._step = 0
        self.agents = ["walker", "seer"]
        return self._observe(self.agents), self._infos(self.agents)

    def step(self, actions):
        assert list(actions) == self.agents
        assert all(self._actions[agent].contains(action) for agent, action in actions.items())
        self._step += 1
        rewards = {agent: self._step * (1 + self.possible_agents.index(agent)) for agent in actions}
        flags = {
            kind: {agent: self._fates[agent] == (self._step, kind) for agent in actions}
            for kind in ("terminated", "truncated")
        }
        acted = self.agents
        self.agents = [agent for agent in acted if self._fates[agent][0] > self._step]
        if self._step == 2 and self._awaited:
            self.agents.append("late")
        observations = self._observe(sorted({*acted, *self.agents}))
        return observations, rewards, *flags.values(), self._infos(acted)

    def _infos(self, agents):
        return {agent: {"step": self._step, "level": self.level} for agent in agents}

    def state(self):
        return np.full(3, self._step * self.level, np.float64)

    def render(self):
        return np.full((4, 6, 3), self._step, np.uint8)


@jax.jit
@pytest.mark.filterwarnings("ignore")  # PettingZoo's test warns of agents that come late
def test_the_toy_env_is_one_by_pettingzoos_own_test():
    pytest.importorskip("pygame", reason="pettingzoo.test needs pygame: the group families has it")
    from pettingzoo.test import parallel_api_test

    parallel_api_test(Strangers(FATES["truncated"], awaited=False))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("fates", "expected"),
    [("terminated", (9, 0, 27)), ("truncated", (0, 9, 27)), ("together", (0, 12, 36)), ("early", (0, 3, 15))],
)
def test_jitted_steps_are_those_by_hand(make, fates, expected):
    got = assert_jitted_steps_are_those_by_hand(
        make, partial(Strangers, FATES[fates]), num_envs=3, num_steps=16
    )
    assert got == expected


def test_an_aec_env_is_converted_by_pettingzoo(make):
    def aec():
        return parallel_to_aec(Strangers(FATES["truncated"], awaited=False))

    class Wrapped(pettingzoo.utils.BaseWrapper):
        """Hides from PettingZoo that the env was parallel once."""

    env = PettingZooEnv(Wrapped(aec()))
    assert type(env.adapted).__name__ == "aec_to_parallel_wrapper"
    by_hand = partial(Strangers, FATES["truncated"], awaited=False)
    envs = [make(lambda e=e: PettingZooEnv(e()), 2, info=INFO) for e in (lambda: Wrapped(aec()), by_hand)]
    got = []
    for pool in envs:
        actions = sample_actions(pool.single_action_space, 12, 2)
        got.append(scan(jaxvec.reset(pool, seed=0)[0], actions))
    assert got[0].truncated.sum() == 4
    jax.tree.map(np.testing.assert_array_equal, *got)


def test_rock_paper_scissors_is_played_in_jit(make):
    pytest.importorskip("pygame", reason="pygame is not installed: the group families has it")

    def rps():
        from pettingzoo.classic.rps import rps

        return pettingzoo.utils.aec_to_parallel(rps.env(num_actions=3, max_cycles=6))

    ended = assert_jitted_steps_are_those_by_hand(make, rps, num_envs=3, num_steps=20)
    assert ended == (0, 9, 18)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "name", ["connect_four.connect_four", "tictactoe.tictactoe", "rlcard_envs.leduc_holdem"]
)
def test_turn_based_games_are_those_of_an_aec_loop(make, name):
    """A policy in jit takes legal moves from the observations' masks, also across ends of games."""
    pytest.importorskip("pygame", reason="pygame is not installed: the group families has it")
    if name.endswith("leduc_holdem"):
        pytest.importorskip("rlcard", reason="rlcard is not installed: the group families has it")

    def game():
        return importlib.import_module(f"pettingzoo.classic.{name}").env()

    envs = make(lambda: PettingZooEnv(game()), 3, num_workers=2, info=INFO)

    @jax.jit
    def play(handle, timestep, key):
        def body(carry, key):
            handle, timestep = carry
            masks = {agent: obs["action_mask"] for agent, obs in timestep.obs.items()}
            action = {
                agent: jax.random.categorical(key, jnp.where(mask, 0.0, -1e9))
                for agent, mask in masks.items()
            }
            handle, following = jaxvec.step(handle, action)
            return (handle, following), (timestep, action, following)

        return jax.lax.scan(body, (handle, timestep), jax.random.split(key, 60))[1]

    before, actions, after = play(*jaxvec.reset(envs, seed=7), jax.random.key(0))
    if not name.endswith(
        "leduc_holdem"
    ):  # the cards of later episodes are drawn by a generator of the env's own
        assert after.terminated.sum() > 3
    for n in range(3):
        env = game()
        env.reset(seed=7 + n)
        for t in range(60):
            agent, agents = env.agent_selection, env.possible_agents
            assert before.info["turn"][t, n].tolist() == [one == agent for one in agents]
            assert before.info["alive"][t, n].all()
            for one in agents:
                seen = jax.tree.map(lambda leaf, t=t, n=n: np.asarray(leaf[t, n]), before.obs[one])
                jax.tree.map(np.testing.assert_array_equal, seen, dict(env.observe(one)))
            env.step(int(actions[agent][t, n]))
            assert after.reward[t, n].tolist() == [env.rewards[one] for one in agents]
            over = all(env.terminations.values())
            assert after.terminated[t, n] == over
            assert not after.truncated[t, n]
            if over:
                env.reset()


def test_what_an_agent_says_is_declared_under_its_name(make):
    said = {
        agent: spaces.Dict({"step": spaces.Discrete(100), "level": spaces.Discrete(9)})
        for agent in ("seer", "late")
    }
    envs = make(
        lambda: PettingZooEnv(Strangers(FATES["terminated"])), 2, info=said, autoreset_mode="DISABLED"
    )
    envs.set_attr("level", [3, 4])
    handle, first = jaxvec.reset(envs)
    assert first.info["seer"]["level"].tolist() == [3, 4]
    assert not first.info["_late"].any()
    info = scan(handle, sample_actions(envs.single_action_space, 5, 2)).info
    assert info["seer"]["step"][:, 0].tolist() == [1, 2, 3, 4, 5]
    assert info["late"]["step"][:, 0].tolist() == [0, 0, 3, 4, 0]
    assert info["_late"][:, 0].tolist() == [False, False, True, True, False]


def test_state_render_and_the_envs_own_attributes(make):
    envs = make(lambda: PettingZooEnv(Strangers(FATES["terminated"])), 3)
    assert envs.metadata["name"] == "strangers_v0"
    assert envs.render_mode == "rgb_array"
    handle, _ = jaxvec.reset(envs, seed=0)
    envs.set_attr("level", [1, 2, 3])

    @jax.jit
    def state_after_a_step(handle, action):
        handle, _ = jaxvec.step(handle, action)
        return jaxvec.get_attr(handle, "state", jax.ShapeDtypeStruct((3,), np.float32))

    action = jax.tree.map(lambda leaf: leaf[0], sample_actions(envs.single_action_space, 1, 3))
    assert state_after_a_step(handle, action).tolist() == [[1] * 3, [2] * 3, [3] * 3]
    assert [state.tolist() for state in envs.call("state")] == [[1] * 3, [2] * 3, [3] * 3]
    assert envs.render().shape == (3, 4, 6, 3)
    assert envs.get_attr("agents") == (["walker", "seer"],) * 3


def test_seeds_options_and_close_are_passed_on():
    asked = []

    class Passing(Strangers):
        def reset(self, seed=None, options=None):
            asked.append((seed, options))
            return super().reset(seed, options)

        def close(self):
            asked.append("close")

    env = PettingZooEnv(Passing(FATES["terminated"]))
    env.reset(seed=3, options={"map": 2})
    env.close()
    assert asked == [(3, {"map": 2}), "close"]


def test_the_adapted_env_keeps_jaxvecs_contract():
    # Who is away has zeros for an observation, also where its space has no zero.
    check_env(lambda: PettingZooEnv(Strangers(FATES["early"])), num_steps=20, check="structure")


def test_without_agents_there_is_no_step():
    env = PettingZooEnv(Strangers(dict.fromkeys(Strangers.possible_agents, (1, "terminated"))))
    action = env.action_space.sample()
    with pytest.raises(ResetNeeded):
        env.step(action)
    env.reset()
    assert env.step(action)[2:4] == (True, False)
    with pytest.raises(ResetNeeded):
        env.step(action)


def test_the_last_end_of_an_agent_that_came_back_counts():
    class Returning(Strangers):
        def step(self, actions):
            observations, *rest = super().step(actions)
            if self._step == 4:
                self.agents.append("walker")
                self._fates = self._fates | {"walker": (6, "truncated")}
                observations["walker"] = self._spaces["walker"].sample()
            return observations, *rest

    env = PettingZooEnv(Returning(FATES["terminated"]))
    env.reset(seed=0)
    steps = [env.step(env.action_space.sample()) for _ in range(6)]
    assert [bool(info["alive"][0]) for *_, info in steps] == [True, True, False, True, True, False]
    assert [flags for _, _, *flags, _ in steps] == [[False, False]] * 5 + [[False, True]]


def test_who_is_away_gets_no_reward():
    class Generous(Strangers):
        def step(self, actions):
            observations, _, *rest = super().step(actions)
            return observations, dict.fromkeys(self.possible_agents, 1), *rest

    env = PettingZooEnv(Generous(FATES["early"]))
    env.reset(seed=0)
    assert [env.step(env.action_space.sample())[1].tolist() for _ in range(2)] == [[1, 1, 0], [0, 1, 0]]


def test_an_episode_ends_by_the_fates_of_its_own_agents():
    env = PettingZooEnv(Strangers(FATES["terminated"] | {"late": (4, "truncated")}))
    ends = []
    for awaited in (True, False):
        env.adapted._awaited = awaited
        env.reset(seed=0)
        ends += [env.step(env.action_space.sample())[2:4] for _ in range(5)][-1:]
    assert ends == [(False, True), (True, False)]


def test_what_is_no_env_of_pettingzoo_is_refused(make):
    class Nameless(Strangers):
        possible_agents = property()  # as of an env that makes up its agents as it goes

    with pytest.raises(TypeError, match=r"must be a ParallelEnv or an AECEnv, not CountingEnv"):
        PettingZooEnv(CountingEnv())
    with pytest.raises(TypeError, match="Nameless has no possible_agents"):
        PettingZooEnv(Nameless(FATES["early"]))
    with pytest.raises(
        jaxvec.EnvError,
        match="got Strangers. .* in jaxvec.adapters.pettingzoo.PettingZooEnv",
    ):
        make(lambda: Strangers(FATES["early"]), 2)


def test_text_is_padded_also_for_agents_that_are_gone(make):
    class Talking(Strangers):
        def observation_space(self, agent):
            return spaces.Text(9) if agent == "seer" else super().observation_space(agent)

    adapter = PettingZooEnv(Talking(FATES["early"]))
    assert adapter._zeros("seer") == ""
    envs = make(lambda: PettingZooEnv(Talking(FATES["early"])), 2)
    assert {leaf.path[-1] for leaf in envs.spec.timestep_leaves} >= {"chars", "length"}


@pytest.mark.parametrize("answer", [None, KeyError])
def test_envs_may_refuse_or_answer_every_attribute(answer):
    class Env(pettingzoo.ParallelEnv):
        possible_agents = agents = ["a", "b"]

        def __getattr__(self, name):
            if answer is None:
                return mock.Mock()
            raise answer(name)

        def observation_space(self, agent):
            return spaces.Discrete(2)

        action_space = observation_space

        def reset(self, seed=None, options=None):
            return {"a": 0, "b": 1}, {"a": {}, "b": {}}

    env = PettingZooEnv(Env())
    assert (env.metadata, env.render_mode) == ({}, None)
    assert env.reset(seed=0)[0] == {"a": 0, "b": 1}
