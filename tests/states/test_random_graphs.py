"""Random object graphs and programs: states are exact, or refused, and a save changes nothing.

The reference is an env that no state is taken of. Envs that save and restore, in any order, have to show
the same after the same number of steps, and so has a process that is forked at a save.
"""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections import Counter

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.env_states import copied
from support.graph_env import GraphEnv
from support.graphs import KINDS
from support.probe import StatefulEnv

import jaxvec

pytestmark = pytest.mark.filterwarnings("ignore")

NUM_STEPS = 12
PATHS = st.lists(st.integers(0, 7), min_size=1, max_size=4).map(tuple)
BUILDS = st.tuples(st.sampled_from([*KINDS]), PATHS, PATHS, st.integers(0, 30))
CHANGES = st.tuples(
    st.sampled_from([*["change"] * 7, "alias", "wrap", "drop"]), PATHS, PATHS, st.integers(0, 30)
)
STEPS = st.lists(
    st.lists(st.one_of(CHANGES, CHANGES, CHANGES, BUILDS), max_size=4).map(tuple), min_size=4, max_size=8
)
PROGRAMS = st.tuples(
    st.lists(BUILDS, min_size=3, max_size=12).map(tuple), STEPS.map(tuple), st.sampled_from([0, 0, 0, 3, 300])
)
# The number of an env, what to do with it, and the number of the state to restore.
COMMANDS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from(["step", "step", "save", "restore", "unpickle"]),
        st.integers(0, 20),
    ),
    min_size=12,
    max_size=50,
)
ACTIONS = [2, 0, 4, 1, 3, 3, 0, 2, 1, 4, 7, 5]

refused: Counter[str] = Counter()
done: Counter[str] = Counter()


def reference(program):
    """Returns what an env shows at the start and after each step."""
    env = GraphEnv(observes=False)
    env.reset(seed=0, options={"program": program})
    seen = [env.describe()]
    for number in range(program[2] + NUM_STEPS):
        env.step(action_at(number))
        seen.append(env.describe() if number + 1 >= program[2] else "")
    return seen


def action_at(number):
    return ACTIONS[number % len(ACTIONS)]


def play_in_fork(env, expected):
    """Plays the rest of a program in a forked process, and returns the first difference, or an empty text."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        try:
            os.write(writer, (rest_differs(env, expected) or "same")[:4000].encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        result = file.read().decode()
    os.waitpid(child, 0)
    return result


def rest_differs(env, expected):
    for number in range(env.count, len(expected) - 1):
        env.step(action_at(number))
        if env.describe() != expected[number + 1]:
            return differences(env.describe(), expected[number + 1])
    return ""


def differences(one, other):
    lines = zip(one.split("\n"), other.split("\n"), strict=False)
    return "\n".join(f"{mine}   expected: {its}" for mine, its in lines if mine != its)[:2000] or "length"


class Player:
    """An env and its state, at some step of a program."""

    def __init__(self, program, expected):
        self.env = GraphEnv(observes=False)
        self.stateful = StatefulEnv(self.env)
        self.env.reset(seed=0, options={"program": program})
        self.expected = expected

    def check(self):
        seen, expected = self.env.describe(), self.expected[self.env.count]
        if expected:
            assert seen == expected, differences(seen, expected)

    def step(self):
        if self.env.count < len(self.expected) - 1:
            self.env.step(action_at(self.env.count))
            self.check()

    def save(self):
        try:
            state = self.stateful.save()
        except (jaxvec.EnvStateError, jaxvec.StateFileError) as error:
            refused[str(error).partition(". If")[0].partition(": attribute ")[2]] += 1
            state = None
        done["save" if state else "refusal"] += 1
        self.check()
        return state

    def restore(self, state):
        done["restore"] += 1
        self.stateful.restore(state)
        self.check()


@pytest.fixture(scope="module", autouse=True)
def unfrozen():
    yield
    gc.unfreeze()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()  # graphs contain open files, which would fail a later test


@settings(max_examples=50)
@given(PROGRAMS, COMMANDS, st.booleans())
def test_random_graphs_in_one_process(program, commands, forks):
    gc.freeze()  # so that collections in the test are fast
    expected = reference(program)
    players = Player(program, expected), Player(program, expected)
    for number in range(program[2]):
        for player in players:
            player.step()
            if number % 60 == 50:
                player.save()
    states = []
    for which, what, number in commands:
        player = players[which]
        if what == "step":
            player.step()
        elif what == "save":
            state = player.save()
            if state is not None:
                states.append(state)
                if forks:
                    done["fork"] += 1
                    assert play_in_fork(player.env, expected) == "same"
        elif states:
            state = states[number % len(states)]
            if what == "unpickle":
                try:
                    state = copied(state)
                except jaxvec.EnvStateError as error:
                    refused[f"pickle: {error}"[:150]] += 1
                    continue
            player.restore(state)
    for player in players:
        assert rest_differs(player.env, expected) == ""


class Owner:
    """An object that refers to a set which contains it."""


class Cyclic(gymnasium.Env):
    def __init__(self):
        self.owner = Owner()
        self.members, self.numbers = {self.owner}, [1, 2, 3]
        self.owner.members, self.owner.method = self.members, self.owner.__init__


def test_a_set_of_its_owner_stays_one_set():
    env = Cyclic()
    stateful = StatefulEnv(env)
    state = stateful.save()
    for each in (state, copied(state)):
        env.members = None
        stateful.restore(each)
        assert env.owner.members is env.members
        assert env.members == {env.owner}


def test_two_long_lists_share_a_row():
    env = Cyclic()
    row = [0]
    env.one, env.other = [*range(20), row], [row, *range(20)]
    stateful = StatefulEnv(env)
    state = stateful.save()
    for each in (state, copied(state)):
        env.one = None
        stateful.restore(each)
        assert env.one[-1] is env.other[0]


@pytest.mark.parametrize("container", [dict, list])
def test_a_save_keeps_no_discarded_container_alive(container):
    env = Cyclic()
    env.table = dict.fromkeys(range(20)) if container is dict else [None] * 20
    stateful = StatefulEnv(env)
    stateful.save()
    env.table[5] = Owner()
    env.owner_of_it = weakref.ref(env.table[5])
    del env.table
    gc.collect()
    assert env.owner_of_it() is None


def test_an_iterator_in_its_own_list_is_refused():
    env = Cyclic()
    numbers = vars(env).pop("numbers")
    env.iterator = iter(numbers)
    numbers.append(env.iterator)
    with pytest.raises(jaxvec.EnvStateError, match=r"Cyclic\.iterator.*contains itself"):
        StatefulEnv(env).save()


MOVES = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from(["step", "step", "save", "restore", "swap", "pack", "file"]),
        st.integers(0, 20),
    ),
    min_size=8,
    max_size=25,
)


@pytest.fixture(scope="module")
def pools():
    """Yields two pools of two workers."""
    with (
        jaxvec.make(GraphEnv, 2, num_workers=2, states=200) as one,
        jaxvec.make(GraphEnv, 2, num_workers=2, states=200) as other,
    ):
        yield one, other


@pytest.mark.slow
@settings(max_examples=50)
@given(program=PROGRAMS, moves=MOVES)
def test_random_graphs_in_workers_pools_and_files(pools, tmp_path_factory, program, moves):
    env = GraphEnv()
    expected = [env.reset(options={"program": program})[0]]
    expected += [env.step(action_at(number))[0] for number in range(program[2] + NUM_STEPS)]
    path = tmp_path_factory.getbasetemp() / "graphs.states"
    counts = np.zeros((2, 2), int)
    for pool in pools:
        pool.reset(seed=0, options={"program": program})
    for _ in range(program[2]):
        step(0, pools, counts, expected)
        step(1, pools, counts, expected)
    states = []
    for which, what, number in moves:
        if what == "step":
            step(which, pools, counts, expected)
            continue
        try:
            if what == "save":
                states.append((which, pools[which].save(), counts[which].copy()))
            elif states:
                move(what, which, states[number % len(states)], pools, counts, expected, path)
        except (jaxvec.EnvStateError, jaxvec.StateFileError) as error:
            if "did not reproduce" in str(error):
                raise
            refused[str(error).partition(": attribute ")[2][:60]] += 1
            for each in range(2):  # a restore may have changed one of the envs
                pools[each].reset(seed=0, options={"program": program})
                counts[each] = 0


def move(what, which, saved, pools, counts, expected, path):
    """Restores a state in its pool, with its envs swapped, or in the other pool from an array or a file."""
    owner, state, saved_counts = saved
    pool = pools[which]
    if what == "pack":
        state = pool.unpack_states(pools[owner].pack_states(state))
    elif what == "file":
        pools[owner].save_states(path, state)
        state = pool.load_states(path)
    else:
        which, pool = owner, pools[owner]
    order = slice(None, None, -1 if what == "swap" else 1)
    timestep = pool.restore(state[order])
    counts[which] = saved_counts[order]
    done[what] += 1
    assert timestep.obs.tolist() == [expected[count].tolist() for count in counts[which]]


def step(which, pools, counts, expected):
    """Steps the envs of a pool, if none of them is at the end of the program."""
    if counts[which].max() < len(expected) - 1:
        timestep = pools[which].step([action_at(count) for count in counts[which]])
        counts[which] += 1
        assert timestep.obs.tolist() == [expected[count].tolist() for count in counts[which]]
