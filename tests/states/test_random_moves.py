"""Random moves of an env that holds several of the objects of `test_exact_objects.py`: states are exact.

The reference is an env that no state is taken of. Envs that save and restore, in any order, have to return
the same after the same number of steps.
"""

import random

import gymnasium
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.env_states import copied
from support.probe import StatefulEnv
from test_exact_objects import CASES, Holder

pytestmark = pytest.mark.filterwarnings("ignore")

NUM_STEPS = 20
# The number of an env, what to do with it, and the number of the state to restore.
MOVES = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from(["step", "step", "save", "restore", "unpickle", "clear"]),
        st.integers(0, 20),
    ),
    min_size=12,
    max_size=50,
)


class Several(gymnasium.Env):
    """Steps several objects in changing order; an attribute of one of them is elsewhere at times."""

    def __init__(self, names, seed):
        self.count = 0
        self.random = random.Random(seed)
        self.holders = [Holder(name) for name in names]
        self.lent = []

    def step(self, action):
        self.count += 1
        if self.lent:
            holder, name, value = self.lent
            setattr(holder, name, value)
            self.lent = []
        self.random.shuffle(self.holders)
        if self.random.random() < 0.5:
            holder = self.holders.pop()
            name = self.random.choice(sorted(vars(holder)))
            self.lent = [holder, name, vars(holder).pop(name)]
        seen = [holder.step(action)[0][0] for holder in self.holders]
        if self.lent:
            self.holders.append(self.lent[0])
        return seen


def action_at(count):
    return count * count % 5


@given(
    names=st.lists(st.sampled_from([*CASES]), min_size=1, max_size=6), seed=st.integers(0, 99), moves=MOVES
)
def test_random_moves_of_several_objects(names, seed, moves):
    straight = Several(names, seed)
    expected = [straight.step(action_at(count)) for count in range(NUM_STEPS)]
    players = [StatefulEnv(Several(names, seed)) for _ in range(2)]
    states = []

    def step(env):
        if env.count < NUM_STEPS:
            assert env.step(action_at(env.count)) == expected[env.count - 1]

    for index, move, number in moves:
        player = players[index]
        if move == "step":
            step(player.env)
        elif move == "save":
            states.append(player.save())
        elif states:
            state = states[number % len(states)]
            if move == "clear":
                vars(player.env).clear()  # all objects are made anew
            player.restore(copied(state) if move == "unpickle" else state)
    for player in players:
        while player.env.count < NUM_STEPS:
            step(player.env)
