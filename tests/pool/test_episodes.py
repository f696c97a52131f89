"""The record of episodes alone, without envs: every field of every row, in all modes, whatever happens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.probe import ENDED, IDLE, LOST, UNRESET, Autoreset, EpisodeTracker

FAULT = "fault"  # in place of what a step returned

FIELDS = ("reward", "terminated", "truncated", "episode_return", "episode_length", "fault", "idle")


def make_rows(count, shape=()):
    """Returns rows as a segment has them, full of what others have left there."""
    rows: dict[Any, Any] = {("reward",): np.full((count, *shape), 7, np.float32)}
    rows["info", "episode_return"] = np.full((count, *shape), 7, np.float32)
    rows["info", "episode_length"] = np.full(count, 7, np.int32)
    for path in (("terminated",), ("truncated",), ("info", "fault"), ("info", "idle")):
        rows[path] = np.ones(count, np.bool_)
    return rows


def read(rows, index):
    """Returns the fields of one row."""
    paths = {name: (name,) if (name,) in rows else ("info", name) for name in FIELDS}
    return {name: rows[path][index].tolist() for name, path in paths.items()}


class Player:
    """Tells episodes what a slice would tell them of one env after the other, whose outcomes it is given."""

    def __init__(self, mode, count, shape=(), *, rows=None):
        self.rows = make_rows(count, shape) if rows is None else rows
        self.episodes = EpisodeTracker(self.rows, Autoreset[mode], lost=rows is not None)
        self.delivered: dict[int, Any] = {}

    def deliver(self, index):
        """Remembers what the row says: the program has it now."""
        row = read(self.rows, index)
        over = row["terminated"] or row["truncated"]
        shape = self.rows["reward",].shape[1:]
        episode = np.asarray(row["episode_return"]), row["episode_length"]
        self.delivered[index] = (np.zeros(shape), 0) if over else episode, over

    def reset(self, index):
        self.episodes.begin(index)
        self.deliver(index)

    def step(self, index, outcome, failures=0):
        """Asks for steps until there is a row; of the resets, so many fail before."""
        while not self._try(index, outcome, failures):
            failures -= self.episodes.state[index] != LOST
        self.deliver(index)

    def _try(self, index, outcome, failures):
        episodes, state = self.episodes, self.episodes.state
        if state[index] == LOST:
            episode, over = self.delivered[index]
            if episodes.cut(index, episode, over=over):
                return self._reset_in_step(index, failures)
        if state[index] == ENDED and failures <= 0:
            episodes.begin(index)
        elif state[index] == ENDED:
            return False
        elif state[index] == IDLE:
            episodes.idle(index)
        elif state[index] == UNRESET:
            return self._reset_in_step(index, failures)
        elif outcome == FAULT:
            episodes.lose(index)
            return False
        else:
            reward, terminated, truncated = outcome
            episodes.row_rewards[index] = reward
            episodes.returns[index] = episodes.row_returns[index] = episodes.returns[index] + reward
            episodes.lengths[index] = episodes.row_lengths[index] = episodes.lengths[index] + 1
            if terminated or truncated or state[index]:
                assert episodes.mark(index, terminated, truncated) == (terminated or truncated)
                return self._reset_in_step(index, failures)
        return True

    def _reset_in_step(self, index, failures):
        if self.episodes.state[index] == UNRESET:
            if failures > 0:
                return False
            self.episodes.reset_in_step(index)
        return True


@dataclass
class Model:
    """What the program has of an env, from which its next row follows."""

    mode: str
    zero: Any
    over: bool = False
    total: Any = 0.0  # as it adds up, and as the row says
    said: Any = 0.0
    length: int = 0
    row: dict[str, Any] = field(default_factory=dict)

    def reset(self):
        self.over, self.total, self.said, self.length = False, self.zero, self.zero, 0
        self.row = self._row(self.zero)

    def step(self, outcome):
        if self.over and self.mode == "NEXT_STEP":
            return self.reset()
        if self.over and self.mode == "EPISODIC":
            self.row = {**self.row, "reward": self.zero.tolist(), "idle": True}
            return None
        if self.over:  # and another has begun
            self.total, self.said, self.length = self.zero, self.zero, 0
        if outcome == FAULT:
            self.over = True
            self.row = self._row(self.zero, truncated=True, fault=True)
            return None
        reward, terminated, truncated = outcome
        self.total, self.length = self.total + reward, self.length + 1
        self.said = self.total.astype(np.float32)
        self.over = terminated or truncated
        self.row = self._row(np.float32(reward), terminated=terminated, truncated=truncated)
        return None

    def _row(self, reward, **flags):
        return {
            **dict.fromkeys(("terminated", "truncated", "fault", "idle"), False),
            "reward": reward.tolist(),
            "episode_return": self.said.tolist(),
            "episode_length": self.length,
            **flags,
        }


COUNT = 3


@given(st.sampled_from([mode.name for mode in Autoreset]), st.sampled_from([(), (2,)]), st.data())
def test_every_field_is_foretold(mode, shape, data):
    """Whatever order steps, ends, faults, deaths of the process and failing resets come in."""
    player = Player(mode, COUNT, shape)
    models = [Model(mode, np.zeros(shape)) for _ in range(COUNT)]

    def reset(index):
        player.reset(index)
        models[index].reset()

    for index in range(COUNT):
        reset(index)
    lost: set[int] = set()
    rewards = (
        st.floats(-9, 9) if not shape else st.lists(st.floats(-9, 9), min_size=2, max_size=2).map(np.array)
    )
    outcomes = st.tuples(rewards, st.booleans(), st.booleans()) | st.just(FAULT)
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.sampled_from([False] * 5 + [True])):  # another process finds the rows
            delivered = player.delivered
            player = Player(mode, COUNT, shape, rows=player.rows)
            player.delivered = delivered
            lost = set(range(COUNT))
        for index in data.draw(st.lists(st.sampled_from(range(COUNT)), unique=True)):
            needs_reset = mode == "DISABLED" and models[index].over
            if needs_reset or data.draw(st.sampled_from([False] * 4 + [True])):
                reset(index)
            else:
                outcome = data.draw(outcomes)
                player.step(index, outcome, data.draw(st.integers(0, 2)))
                models[index].step(FAULT if index in lost else outcome)
            lost.discard(index)
        assert [read(player.rows, index) for index in range(COUNT)] == [model.row for model in models]


def test_a_pool_without_faults_and_idle_envs_has_no_such_fields():
    rows = {path: array for path, array in make_rows(1).items() if path[-1] not in ("fault", "idle")}
    episodes = EpisodeTracker(rows, Autoreset.NEXT_STEP)
    episodes.begin(0)
    assert episodes.mark(0, False, True)
    assert rows["truncated",].tolist() == [True]
    assert set(rows) == {path for path in make_rows(1) if path[-1] not in ("fault", "idle")}
