"""Agents that read text and graphs learn within one compiled program."""

from __future__ import annotations

from functools import partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import GraphInstance

import jaxvec

NUM_ENVS = 16


def train(envs, params, policy, *, updates, horizon, rate, discount, entropy=0.01):
    """Trains by advantage actor-critic in one jit; returns the mean reward per episode of each update.

    `policy(params, obs)` returns the logits and the value of one env.
    """
    act = jax.vmap(policy, (None, 0))

    def rollout(params, handle, timestep, key):
        def step(carry, key):
            handle, timestep = carry
            logits, _ = act(params, timestep.obs)
            action = jax.random.categorical(key, logits)
            handle, after = jaxvec.step(handle, action)
            return (handle, after), (timestep.obs, action, after.reward, after.terminated | after.truncated)

        return jax.lax.scan(step, (handle, timestep), jax.random.split(key, horizon))

    def loss(params, steps, last):
        obs, action, reward, over = steps
        logits, value = jax.vmap(act, (None, 0))(params, obs)
        _, bootstrap = act(params, last)

        def back(after, step):
            reward, over = step
            now = reward + discount * after * (1 - over)
            return now, now

        _, returns = jax.lax.scan(back, jax.lax.stop_gradient(bootstrap), (reward, over), reverse=True)
        chosen = jax.nn.log_softmax(logits)
        taken = jnp.take_along_axis(chosen, action[..., None], -1)[..., 0]
        advantage = returns - value
        spread = -(jnp.exp(chosen) * chosen).sum(-1)
        gain = taken * jax.lax.stop_gradient(advantage) + entropy * spread
        return jnp.mean(0.5 * advantage**2 - gain)

    def update(carry, key):
        params, moments, count, handle, timestep = carry
        (handle, timestep), steps = rollout(params, handle, timestep, key)
        grads = jax.grad(loss)(params, steps, timestep.obs)
        count += 1
        moments = jax.tree.map(  # Adam
            lambda m, g: (0.9 * m[0] + 0.1 * g, 0.99 * m[1] + 0.01 * g**2),
            moments,
            grads,
            is_leaf=lambda one: isinstance(one, tuple),
        )
        params = jax.tree.map(
            lambda p, m: p - rate * m[0] / (1 - 0.9**count) / (jnp.sqrt(m[1] / (1 - 0.99**count)) + 1e-8),
            params,
            moments,
        )
        episodes = jnp.maximum(steps[3].sum(), 1)
        return (params, moments, count, handle, timestep), steps[2].sum() / episodes

    @jax.jit
    def run(params, handle, timestep, key):
        moments = jax.tree.map(lambda p: (jnp.zeros_like(p), jnp.zeros_like(p)), params)
        carry = params, moments, 0, handle, timestep
        return jax.lax.scan(update, carry, jax.random.split(key, updates))[1]

    handle, timestep = jaxvec.reset(envs, seed=0)
    return np.asarray(run(params, handle, timestep, jax.random.key(0)))


def dense(key, *sizes):
    return jax.random.normal(key, sizes) / np.sqrt(sizes[0])


def ends(curve):
    """Returns the mean of the first and of the last tenth of the updates."""
    part = len(curve) // 10
    return curve[:part].mean(), curve[-part:].mean()


# --- Text ---------------------------------------------------------------------------------------


def read(table, text):
    """Tokenizes a text into pairs of characters, and returns the mean of their embeddings."""
    chars = text["chars"].astype(jnp.int32)
    tokens = (chars[:-1] * 31 + chars[1:]) % len(table)
    used = jnp.arange(len(tokens)) < text["length"] - 1
    return jnp.where(used[:, None], table[tokens], 0).sum(0) / 8


class OrderEnv(gymnasium.Env):
    """Asks in words for one of four things; the reward is 1 for its number."""

    THINGS = ("apple", "bread", "candle", "door")
    observation_space = spaces.Text(40, charset="abcdefghijklmnopqrstuvwxyz ")
    action_space = spaces.Discrete(4)

    def _ask(self):
        self._wanted = int(self.np_random.integers(4))
        verb = self.np_random.choice(["bring me the", "i want a", "go to that"])
        return f"{verb} {self.THINGS[self._wanted]}"

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._ask(), {}

    def step(self, action):
        reward = float(action == self._wanted)
        return self._ask(), reward, True, False, {}


@pytest.mark.slow
def test_an_agent_learns_to_read(make):
    envs = make(OrderEnv, NUM_ENVS)
    keys = jax.random.split(jax.random.key(1), 2)
    params = {"table": dense(keys[0], 256, 16), "out": dense(keys[1], 16, 5) * 0}

    def policy(params, text):
        out = read(params["table"], text) @ params["out"]
        return out[:4], out[4]

    first, last = ends(train(envs, params, policy, updates=120, horizon=8, rate=0.03, discount=0.0))
    print(f"text: {first:.2f} to {last:.2f}")
    assert first < 0.6
    assert last > 0.9


# --- Graphs -------------------------------------------------------------------------------------

MAX_NODES = 8


class ChainEnv(gymnasium.Env):
    """Shows chains with shuffled nodes; the reward is 1 for the node two edges after the marked one."""

    observation_space = spaces.Graph(spaces.Box(0, 1, (1,)), spaces.Box(0, 1, (1,)))
    action_space = spaces.Discrete(MAX_NODES)

    def _show(self):
        count = int(self.np_random.integers(4, MAX_NODES + 1))
        order = self.np_random.permutation(count)
        start = int(self.np_random.integers(count - 2))
        self._goal = int(order[start + 2])
        nodes = np.zeros((count, 1), np.float32)
        nodes[order[start]] = 1
        links = np.stack([order[:-1], order[1:]], 1).astype(np.int32)
        return GraphInstance(nodes, np.ones((count - 1, 1), np.float32), links)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._show(), {}

    def step(self, action):
        reward = float(action == self._goal)
        return self._show(), reward, True, False, {}


def pass_messages(params, graph):
    """Returns the features of each node after two rounds of messages along the edges."""
    sources, targets = graph["edge_links"].T
    used = (jnp.arange(len(sources)) < graph["n_edge"])[:, None]
    hidden = graph["nodes"] @ params["in"]
    for weights in params["rounds"]:
        messages = jnp.where(used, hidden[sources], 0) @ weights["message"]
        received = jax.ops.segment_sum(messages, targets, num_segments=len(hidden))
        hidden = jnp.tanh(hidden @ weights["self"] + received)
    return hidden


@pytest.mark.slow
def test_an_agent_learns_to_follow_edges(make):
    envs = make(ChainEnv, NUM_ENVS, max_sizes={"obs": {"nodes": MAX_NODES, "edges": MAX_NODES - 1}})
    keys = iter(jax.random.split(jax.random.key(1), 9))
    layer = lambda: {"self": dense(next(keys), 16, 16), "message": dense(next(keys), 16, 16)}  # noqa: E731
    params = {"in": dense(next(keys), 1, 16), "rounds": [layer(), layer()], "out": jnp.zeros((16, 2))}

    def policy(params, graph):
        out = pass_messages(params, graph) @ params["out"]
        exists = jnp.arange(MAX_NODES) < graph["n_node"]
        return jnp.where(exists, out[:, 0], -1e9), jnp.where(exists, out[:, 1], 0).sum()

    first, last = ends(train(envs, params, policy, updates=150, horizon=8, rate=0.01, discount=0.0))
    print(f"graph: {first:.2f} to {last:.2f}")
    assert first < 0.6
    assert last > 0.9


# --- MiniGrid -----------------------------------------------------------------------------------


@pytest.mark.nightly
def test_an_agent_reads_the_missions_of_minigrid(make):
    pytest.importorskip("minigrid")
    envs = make("minigrid:MiniGrid-Fetch-5x5-N2-v0", NUM_ENVS, max_sizes={"mission": 40}, max_steps=30)
    keys = iter(jax.random.split(jax.random.key(1), 9))
    params = {
        "table": dense(next(keys), 256, 32),
        "cell": dense(next(keys), 20, 32) * 3,
        "text": dense(next(keys), 32, 32) * 3,
        "hidden": dense(next(keys), 7 * 7 * 64, 64),
        "out": dense(next(keys), 64, 8) * 0.01,
    }

    def policy(params, obs):
        kind, colour = jax.nn.one_hot(obs["image"][..., 0], 11), jax.nn.one_hot(obs["image"][..., 1], 9)
        cells = jnp.concatenate([kind, colour], -1) @ params["cell"]
        text = read(params["table"], obs["mission"]) @ params["text"]
        hidden = jax.nn.relu(jnp.concatenate([cells, cells * text], -1).reshape(-1) @ params["hidden"])
        out = hidden @ params["out"]
        return out[:7], out[7]

    train_it = partial(train, rate=0.002, discount=0.95, entropy=0.02)
    first, last = ends(train_it(envs, params, policy, updates=800, horizon=16))
    print(f"minigrid: {first:.2f} to {last:.2f}")
    assert first < 0.3
    assert last > 0.55
