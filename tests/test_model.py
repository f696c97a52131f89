"""A pool against a small model of it, through random sequences of everything that can happen to one."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import jaxvec
from jaxvec._memory._layout import split
from jaxvec.testing import CountingEnv

LENGTH = 4  # steps of an episode
HARM = 7  # the action at which an env raises
FREE = jaxvec.Restart(max_restarts=None, interval=0)


class FragileEnv(CountingEnv):
    def step(self, action):
        if action == HARM:
            raise ValueError("bad luck")
        return super().step(action)


@dataclass
class ModelEnv:
    """What a `FragileEnv` of the pool should look like."""

    resets: int = 0
    steps: int = 0
    episode_steps: int = 0
    action: int = -1
    lost: bool = False  # its process died since its last row

    @property
    def obs(self):
        return [self.resets, self.steps, self.episode_steps, self.action]

    def reset(self):
        if self.lost:
            self.__init__()
        self.resets, self.episode_steps, self.action = self.resets + 1, 0, -1

    def step(self, action):
        """Returns whether the step terminated, and whether a fault cut it short."""
        if self.lost or action == HARM:
            self.reset()
            return False, True
        self.steps, self.episode_steps, self.action = self.steps + 1, self.episode_steps + 1, action
        over = self.episode_steps == LENGTH
        if over:
            self.reset()
        return over, False


class PoolMachine(RuleBasedStateMachine):
    """`dead` are workers that were killed, and whose death has not been met with yet."""

    envs: jaxvec.VectorEnv | None = None

    @initialize(
        num_envs=st.integers(1, 5),
        num_workers=st.integers(1, 3),
        handoff=st.sampled_from(["auto", "portable"]),
        first_ready=st.booleans(),
    )
    def make(self, num_envs, num_workers, handoff, first_ready):
        self.slices = split(num_envs, min(num_workers, num_envs))
        self.batch_size = max(num_envs // 2, 1) if first_ready else num_envs
        self.envs = jaxvec.make(
            FragileEnv,
            num_envs,
            num_workers=len(self.slices),
            batch_size=self.batch_size,
            recv_order="sent",
            handoff=handoff,
            episode_length=LENGTH,
            on_fault=FREE,
        )
        self.model = [ModelEnv() for _ in range(num_envs)]
        self.started = False
        self.sent: list[tuple[int, int | None]] = []  # env and action; a reset has none
        self.dead: set[int] = set()
        self.faults = 0
        self.closed = False

    def check(self, timestep):
        ids = timestep.info["env_id"].tolist()
        for row, env_id in enumerate(ids):
            action = dict(self.sent)[env_id]
            env = self.model[env_id]
            over, fault = (env.reset(), False)[0:2] if action is None else env.step(action)
            env.lost = False
            self.faults += fault
            assert timestep.obs[row].tolist() == env.obs
            assert timestep.terminated[row] == bool(over)
            assert timestep.truncated[row] == timestep.info["fault"][row] == fault
            assert timestep.reward[row] == (
                LENGTH if over else env.episode_steps if action is not None else 0
            )
        received = self.sent[: len(ids)]
        assert [env_id for env_id, _ in received] == ids
        self.sent = self.sent[len(ids) :]
        self.dead -= {w for w, (first, stop) in enumerate(self.slices) if any(first <= i < stop for i in ids)}

    usable = precondition(lambda self: not self.closed)
    idle = precondition(lambda self: not self.closed and not self.sent)

    @usable
    @rule(seed=st.none() | st.integers(0, 9))
    def reset(self, seed):
        if self.sent and self.started:
            for env_id, action in self.sent:  # they land before they are reset
                if action is not None:
                    self.faults += self.model[env_id].step(action)[1]
                else:
                    self.model[env_id].reset()
                self.model[env_id].lost = False
        self.started = True
        order = range(len(self.model))
        if self.batch_size < len(self.model):
            turns = -(-len(self.model) // self.batch_size)
            order = [i for first in range(turns) for i in range(first, len(self.model), turns)]
        self.sent = [(env_id, None) for env_id in order]
        self.check(self.envs.reset(seed=seed))

    @usable
    @precondition(lambda self: self.started)
    @rule(data=st.data())
    def send(self, data):
        flying = {env_id for env_id, _ in self.sent}
        free = [env_id for env_id in range(len(self.model)) if env_id not in flying]
        if not free:
            with pytest.raises(jaxvec.InFlightError):
                self.envs.send([0], [0])
            return
        ids = data.draw(st.lists(st.sampled_from(free), min_size=1, unique=True))
        actions = data.draw(st.lists(st.integers(0, HARM), min_size=len(ids), max_size=len(ids)))
        self.envs.send(actions, ids)
        self.sent += zip(ids, actions, strict=True)

    @usable
    @precondition(lambda self: self.started)
    @rule()
    def recv(self):
        if len(self.sent) < self.batch_size:
            with pytest.raises(jaxvec.InFlightError):
                self.envs.recv()
            return
        if self.batch_size == len(self.model):  # comes in env order
            self.sent.sort()
        self.check(self.envs.recv())

    @idle
    @precondition(lambda self: self.started and self.batch_size == len(self.model))
    @rule(data=st.data())
    def step(self, data):
        count = len(self.model)
        actions = data.draw(st.lists(st.integers(0, HARM), min_size=count, max_size=count))
        self.sent = list(enumerate(actions))
        self.check(self.envs.step(actions))

    @idle
    @rule(data=st.data())
    def kill(self, data):
        worker = data.draw(st.integers(0, len(self.slices) - 1))
        process = psutil.Process(self.envs.pool._workers.supervisor._processes[worker].pid)
        if worker in self.dead:
            return
        process.kill()
        self.dead.add(worker)
        first, stop = self.slices[worker]
        for env in self.model[first:stop]:
            env.__init__(lost=True)

    @idle
    @rule()
    def call(self):
        if self.dead:
            with pytest.raises(jaxvec.WorkerDiedError, match="was killed by SIGKILL"):
                self.envs.call("steps")
            self.dead.clear()
        assert self.envs.call("steps") == tuple(env.steps for env in self.model)

    @rule()
    def close(self):
        self.envs.close()
        self.closed = True

    @precondition(lambda self: self.closed)
    @rule()
    def use_after_close(self):
        for use in (self.envs.reset, self.envs.recv, self.envs.stats, lambda: self.envs.call("steps")):
            with pytest.raises(jaxvec.PoolClosedError):
                use()

    @invariant()
    def the_pool_is_whole(self):
        if self.envs is not None and not self.closed:
            assert self.envs.pool.broken_by is None
            assert self.envs.stats().total.faults >= self.faults

    def teardown(self):
        if self.envs is not None:
            self.envs.close()


PoolMachine.TestCase.settings = settings(
    max_examples=settings.default.max_examples // 2,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestPool = PoolMachine.TestCase
