"""Two-sample tests between episodes of a port and of its original, where equal seeds give other episodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxvec._ports.comparison import samples_table, unexpected
from jaxvec._ports.original import constructor
from jaxvec._ports.port import Port, advance, as_port, check_port, is_done, like
from jaxvec._ports.program import by_path, random_action, select
from jaxvec._ports.samples import SampleResult, compare_samples
from jaxvec.callbacks._functions import reset, step
from jaxvec.callbacks._make import make


@final
@dataclass(frozen=True)
class Distributions:
    """The result of `compare_distributions`. Printing it shows a table.

    Attributes:
        samples: Results by variable, such as `return`, `length` or `obs after 10 steps/speed`.
        num_episodes: Number of samples on each side, one per episode.
        alpha: Probability that any of the variables of equal envs is reported as different.
        threshold: Largest p-value that counts as a difference: `alpha` divided by the number of all tests.

    Example:
        ```python
        def count(key, steps, action):
            obs = jnp.array([1, steps + 1, steps + 1, action])
            return steps + 1, {"obs": obs, "reward": steps + 1.0, "done": steps + 1 >= 4}

        port = jaxvec.ports.Port(lambda key: (jnp.int32(0), jnp.array([1, 0, 0, -1])), count)
        original = lambda: jaxvec.testing.CountingEnv(episode_length=3)
        result = jaxvec.ports.compare_distributions(port, original, num_episodes=128)
        print("length" in result.differences)  # True
        ```
    """

    samples: Mapping[str, SampleResult]
    num_episodes: int
    alpha: float
    threshold: float

    @property
    def differences(self) -> list[str]:
        """Names of the variables whose distributions differ."""
        return [name for name, sample in self.samples.items() if sample.p_value <= self.threshold]

    def assert_equal(self, *, ignore: Collection[str] = ()) -> None:
        """Raises if the distribution of a variable differs that is not in `ignore`.

        Raises:
            AssertionError: A distribution differs. The message has the table.
        """
        if names := unexpected(self.differences, self.samples, ignore):
            raise AssertionError(f"the port differs from its original in {', '.join(names)}\n{self}")

    def __str__(self) -> str:
        heading = f"{self.num_episodes:,} episodes on each side; different if p <= {self.threshold:.2g}"
        return f"{heading}\n\n{samples_table(self.samples, self.threshold)}"


def compare_distributions(
    port: Any,
    original: Any,
    *,
    policy: Callable[[jax.Array, Any], Any] | None = None,
    num_episodes: int = 1024,
    max_steps: int = 200,
    probes: Sequence[int] = (1, 10),
    num_envs: int = 64,
    seed: int = 0,
    alpha: float = 0.01,
    **options: Any,
) -> Distributions:
    """Compares episodes of a port and of its original by two-sample tests, for envs with random levels.

    Each episode gives one sample of each variable, so that samples are independent: the first observation,
    the observations after the numbers of steps in `probes` (or the last one before), the return, the length
    and how it ended. A variable with up to 20 values is tested by a chi-squared test of its counts, others by
    the Kolmogorov-Smirnov test; also among the episodes with similar first actions. NaN or an infinity that
    only one side has is a difference, and so is a leaf that is missing or has another shape (`shape of obs`).
    Elements of observations are tested one by one, so a difference only in how they depend on each other is
    not found. With a policy that was trained on the port, the means of `return` show how it transfers to the
    original.

    Args:
        port: A `Port`, or an env that `as_port` converts.
        original: A Gymnasium id, an `EnvSpec`, or a function that makes the Python env.
        policy: Function `(key, obs) -> action` of one env. By default, actions are random, and half of those
            of an episode are its favourite action.
        num_episodes: Number of episodes on each side, rounded up to a multiple of `num_envs`.
        max_steps: Number of steps after which episodes are cut.
        probes: Numbers of steps after which observations are compared.
        num_envs: Number of envs.
        seed: Seed of both sides.
        alpha: Probability that equal envs are reported as different.
        **options: Further options of `make`.

    Returns:
        The results of the tests.

    Example:
        ```python
        def reset(key):
            return jnp.int32(0), jnp.array([1, 0, 0, -1])

        def count(key, steps, action):
            obs = jnp.array([1, steps + 1, steps + 1, action])
            return steps + 1, {"obs": obs, "reward": steps + 1.0, "done": steps + 1 >= 3}

        original = lambda: jaxvec.testing.CountingEnv(episode_length=3)
        port = jaxvec.ports.Port(reset, count)
        result = jaxvec.ports.compare_distributions(port, original, num_episodes=64, num_envs=64)
        print("length" in result.differences)  # False
        ```
    """
    port = as_port(port)
    rounds = -(-num_episodes // num_envs)
    with make(constructor(original), num_envs, autoreset_mode="EPISODIC", **options) as envs:
        random = partial(_favouring, envs.single_action_space)
        act = random if policy is None else lambda key, obs, _: policy(key, obs)
        given = check_port(port, lambda key, obs, _: act(key, obs, key))
        sides = _port_side(port, num_envs), _original_side(envs)

        @jax.jit
        def play(keys: jax.Array) -> list[Any]:
            pairs = zip(sides, keys, strict=True)
            return [_play(begin, move, act, max_steps, probes, key) for (begin, move), key in pairs]

        keys = jax.random.split(jax.random.key(seed), (rounds, 2))
        parts = [jax.device_get(play(pair)) for pair in keys]
    port_samples, original_samples = (
        jax.tree.map(lambda *each: np.concatenate(each), *side) for side in zip(*parts, strict=True)
    )
    first = [
        [side[path] for path in side if path.startswith(_FIRST)] for side in (port_samples, original_samples)
    ]
    results: dict[str, SampleResult] = {}
    undeclared = [name for name in _FLAGS if name not in given]  # of a port that says only `done`
    for name in [each for each in {**port_samples, **original_samples} if each not in undeclared]:
        sides = [samples.get(name) for samples in (port_samples, original_samples)]
        if len({None if side is None else side.shape for side in sides}) == 2:
            unknown = math.nan, math.nan
            results[f"shape of {name}"] = SampleResult(1, 0.0, 0, unknown, unknown)
            continue
        given_action = None if name.startswith("first") else first
        results[name] = compare_samples(sides[0], sides[1], conditions=given_action)
    threshold = alpha / max(1, sum(result.tests for result in results.values()))
    return Distributions(results, rounds * num_envs, alpha, threshold)


def _favouring(space: Any, key: jax.Array, obs: Any, episode: jax.Array) -> Any:
    """Returns the favourite action of an episode in half of the steps, so that episodes show its effect."""
    keys = jax.random.split(key)
    favours = jax.random.bernoulli(keys[0])
    return jax.tree.map(
        partial(jnp.where, favours), random_action(space, episode), random_action(space, keys[1])
    )


def _port_side(port: Port, num_envs: int) -> tuple[Any, Any]:
    """Returns functions `key -> (env, obs)` and `(env, action, key) -> (env, obs, reward, flags)`."""

    def begin(key: jax.Array) -> Any:
        return jax.vmap(port.reset)(jax.random.split(key, num_envs))

    def move(state: Any, action: Any, key: jax.Array) -> Any:
        state, results = advance(port, jax.random.split(key, num_envs), state, action)
        done = is_done(results)
        return state, results["obs"], results["reward"], {name: results.get(name, done) for name in _FLAGS}

    return begin, move


def _original_side(envs: Any) -> tuple[Any, Any]:
    def begin(key: jax.Array) -> Any:
        handle, timestep = reset(envs, seed=key)
        return handle, timestep.obs

    def move(handle: Any, action: Any, key: jax.Array) -> Any:
        handle, timestep = step(handle, action)
        return handle, timestep.obs, timestep.reward, {name: getattr(timestep, name) for name in _FLAGS}

    return begin, move


def _play(begin: Any, move: Any, act: Any, max_steps: int, probes: Sequence[int], key: jax.Array) -> Any:
    """Returns the samples of an episode in each env."""
    begin_key, key = jax.random.split(key)
    env, first = begin(begin_key)
    num_envs = len(jax.tree.leaves(first)[0])
    none = jnp.zeros(num_envs, jnp.float32)
    episodes = jax.random.split(jax.random.fold_in(key, 0), num_envs)

    def choose(number: Any, obs: Any) -> tuple[Any, jax.Array]:
        act_key, step_key = jax.random.split(jax.random.fold_in(key, number))
        return jax.vmap(act)(jax.random.split(act_key, num_envs), obs, episodes), step_key

    def body(carry: Any) -> Any:
        env, obs, live, returns, length, number, seen, ends = carry
        env, after, reward, flags = move(env, *choose(number, obs))
        after = select(live, like(obs, after), obs)
        ends = {name: jnp.where(live, flags[name], ends[name]) for name in _FLAGS}
        goes_on = live & ~(ends["terminated"] | ends["truncated"])
        seen = {at: select(jnp.full(num_envs, number == at), after, old) for at, old in seen.items()}
        sums = returns + jnp.where(live, reward, 0), length + live
        return env, *like(carry[1:], (after, goes_on, *sums, number + 1, seen, ends))

    def unfinished(carry: Any) -> Any:
        return carry[2].any() & (carry[5] <= max_steps) | (carry[5] <= max(probes, default=0))

    ends = dict.fromkeys(_FLAGS, none > 0)
    carry = env, first, none == 0, none, none, jnp.int32(1), dict.fromkeys(probes, first), ends
    *_, returns, length, _, seen, ends = jax.lax.while_loop(unfinished, body, carry)
    observed = {"first obs": first, **{f"obs after {at} steps": values for at, values in seen.items()}}
    action, _ = choose(1, first)
    return {**by_path({**observed, _FIRST: action}), "return": returns, "length": length, **ends}


_FIRST = "first action"
_FLAGS = ("terminated", "truncated")
