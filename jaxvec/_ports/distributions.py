"""Two-sample tests between episodes of a port and of its original, where equal seeds give other episodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from jaxvec._ports.comparison import table
from jaxvec._ports.original import constructor
from jaxvec._ports.port import Port, advance, as_port, is_done
from jaxvec._ports.program import by_path, random_action, select
from jaxvec.callbacks._functions import reset, step
from jaxvec.callbacks._make import make

_MAX_VALUES = 20  # of a variable that is compared by its counts
_ROUNDING = 2e-6  # smallest distance of different values; relative above 1


@dataclass(frozen=True)
class SampleResult:
    """The tests of a variable: one per element that is not the same constant on both sides."""

    tests: int
    p_value: float  # the smallest; 1 without tests
    element: int  # flat index of the element with this p-value
    means: tuple[float, float]  # of this element in the port and in the original
    errors: tuple[float, float]  # half-widths of the 95 % confidence intervals of these means


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
        if names := [name for name in self.differences if name not in ignore]:
            raise AssertionError(f"the port differs from its original in {', '.join(names)}\n{self}")

    def __str__(self) -> str:
        rows = [("variable", "tests", "smallest p", "", "mean of this element in port · original")]
        for name, sample in self.samples.items():
            verdict = "different" if name in self.differences else ""
            pairs = zip(sample.means, sample.errors, strict=True)
            means = " · ".join(f"{mean:.5g} ± {error:.2g}" for mean, error in pairs)
            rows.append((name, str(sample.tests), f"{sample.p_value:.2g}", verdict, means))
        heading = f"{self.num_episodes:,} episodes on each side; different if p <= {self.threshold:.2g}"
        return f"{heading}\n\n{table(rows)}"


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
    the observations after the numbers of steps in `probes` (or the last one before), the return and the
    length. A variable with up to 20 values is tested by a chi-squared test of its counts, others by the
    Kolmogorov-Smirnov test. Elements of observations are tested one by one, so a difference only in how they
    depend on each other is not found. With a policy that was trained on the port, the means of `return` show
    how it transfers to the original.

    Args:
        port: A `Port`, or an env that `as_port` converts.
        original: A Gymnasium id, an `EnvSpec`, or a function that makes the Python env.
        policy: Function `(key, obs) -> action` of one env. By default, actions are random.
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
        act = policy or partial(random_action, envs.single_action_space)
        sides = _port_side(port, num_envs), _original_side(envs)

        @jax.jit
        def play(keys: jax.Array) -> list[Any]:
            return [_play(*side, act, max_steps, probes, key) for side, key in zip(sides, keys, strict=True)]

        keys = jax.random.split(jax.random.key(seed), (rounds, 2))
        parts = [jax.device_get(play(pair)) for pair in keys]
    port_samples, original_samples = (
        jax.tree.map(lambda *each: np.concatenate(each), *side) for side in zip(*parts, strict=True)
    )
    names = [
        name
        for name in port_samples
        if name in original_samples and port_samples[name].shape == original_samples[name].shape
    ]
    results = {name: _test(port_samples[name], original_samples[name]) for name in names}
    threshold = alpha / max(1, sum(result.tests for result in results.values()))
    return Distributions(results, rounds * num_envs, alpha, threshold)


def _port_side(port: Port, num_envs: int) -> tuple[Any, Any]:
    """Returns functions `key -> (env, obs)` and `(env, action, key) -> (env, obs, reward, done)`."""

    def begin(key: jax.Array) -> Any:
        return jax.vmap(port.reset)(jax.random.split(key, num_envs))

    def move(state: Any, action: Any, key: jax.Array) -> Any:
        state, results = advance(port, jax.random.split(key, num_envs), state, action)
        return state, results["obs"], results["reward"], is_done(results)

    return begin, move


def _original_side(envs: Any) -> tuple[Any, Any]:
    def begin(key: jax.Array) -> Any:
        handle, timestep = reset(envs, seed=key)
        return handle, timestep.obs

    def move(handle: Any, action: Any, key: jax.Array) -> Any:
        handle, timestep = step(handle, action)
        return handle, timestep.obs, timestep.reward, timestep.done

    return begin, move


def _play(begin: Any, move: Any, act: Any, max_steps: int, probes: Sequence[int], key: jax.Array) -> Any:
    """Returns the samples of an episode in each env."""
    begin_key, key = jax.random.split(key)
    env, first = begin(begin_key)
    num_envs = len(jax.tree.leaves(first)[0])
    none = jnp.zeros(num_envs)

    def body(carry: Any) -> Any:
        env, obs, live, returns, length, number, seen = carry
        act_key, step_key = jax.random.split(jax.random.fold_in(key, number))
        env, after, reward, done = move(
            env, jax.vmap(act)(jax.random.split(act_key, num_envs), obs), step_key
        )
        obs = select(live, after, obs)
        returns = returns + jnp.where(live, reward, 0)
        length = length + live
        seen = {at: select(jnp.full(num_envs, number == at), obs, old) for at, old in seen.items()}
        return env, obs, live & ~done, returns, length, number + 1, seen

    def unfinished(carry: Any) -> Any:
        return carry[2].any() & (carry[5] <= max_steps) | (carry[5] <= max(probes, default=0))

    carry = env, first, none == 0, none, none, jnp.int32(1), dict.fromkeys(probes, first)
    *_, returns, length, _, seen = jax.lax.while_loop(unfinished, body, carry)
    observed = {"first obs": first, **{f"obs after {at} steps": values for at, values in seen.items()}}
    return {**by_path(observed), "return": returns, "length": length}


def _test(ours: Any, theirs: Any) -> SampleResult:
    """Tests each element of a variable."""
    ours, theirs = (np.asarray(values, np.float64).reshape(len(values), -1) for values in (ours, theirs))
    p_values = np.ones(ours.shape[1])
    constant = ((ours == ours[0]) & (theirs == ours[0])).all(0)
    for element in np.flatnonzero(~constant):
        p_values[element] = _p_value(ours[:, element], theirs[:, element])
    least = int(p_values.argmin()) if p_values.size else 0
    sides = ours[:, least], theirs[:, least]
    means = float(sides[0].mean()), float(sides[1].mean())
    errors = [1.96 * float(side.std()) / len(side) ** 0.5 for side in sides]
    return SampleResult(int((~constant).sum()), float(p_values[least]), least, means, (errors[0], errors[1]))


def _p_value(ours: Any, theirs: Any) -> float:
    values, places = np.unique(np.concatenate([ours, theirs]), return_inverse=True)
    # Sums that are rounded in another order are the same value, else a speed of 0.3 would have one per side.
    apart = np.diff(values) > _ROUNDING * np.maximum(1, np.abs(values[1:]))
    ranks = np.concatenate([[0], np.cumsum(apart)])[places]
    ours, theirs = np.split(ranks, [len(ours)])
    tests: Any = stats
    if (number := int(ranks.max()) + 1) > _MAX_VALUES:
        return float(tests.ks_2samp(ours, theirs).pvalue)
    counts = np.array([np.bincount(part, minlength=number) for part in (ours, theirs)])
    rare = counts.sum(0) < 10  # the test needs about 5 expected samples of each value
    counts = np.column_stack([counts[:, ~rare], counts[:, rare].sum(1)])
    counts = counts[:, counts.sum(0) > 0]
    return float(tests.chi2_contingency(counts).pvalue) if counts.shape[1] > 1 else 1.0
