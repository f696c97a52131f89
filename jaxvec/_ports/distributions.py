"""Two-sample tests between episodes of a port and of its original, where equal seeds give other episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from jaxvec._ports.comparison import SampleResult, SpaceResult, Verdict
from jaxvec._ports.original import SetState
from jaxvec._ports.port import FLAGS, advance, as_port, by_path, check_port, is_done, like
from jaxvec._ports.port_spaces import random_action
from jaxvec._ports.program import Adapter, select
from jaxvec._settings import check_count
from jaxvec.callbacks._functions import reset, step
from jaxvec.callbacks._make import make

_MAX_CONDITIONS = 32  # elements of a condition; an element with as many values or fewer has a group for each
_GROUPS = 4  # of samples in which a condition has similar values, if it has more values
_RESET_ALPHA = 1e-4  # probability that equal resets are reported as different


@final
@dataclass(frozen=True, kw_only=True)
class Distributions(Verdict):
    """The result of `compare_distributions`. Printing it shows a table.

    Attributes:
        samples: Results by variable, such as `return`, `length` or `obs after 10 steps/speed`.
        mismatches: Results by name of variables that one side lacks, or that have other shapes there.
        heading: Summary of what was played.
        seed: Seed of both sides.
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
    mismatches: Mapping[str, SpaceResult]
    num_episodes: int
    alpha: float
    threshold: float

    @property
    def records(self) -> dict[str, Any]:
        """Results by name."""
        return {**self.mismatches, **self.samples}


def compare_distributions(
    port: Any,
    original: Any,
    *,
    set_state: SetState | None = None,
    select_state: Callable[[Any], Any] | None = None,
    actions: Callable[[Any], Any] | None = None,
    observe: Callable[[Any], Any] | None = None,
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
    and how it ended. They are tested by the Kolmogorov-Smirnov test, also among the episodes with equal or
    similar first actions. NaN or an infinity that only one side has is a difference, and so is a leaf that is
    missing or has another shape (`shape of obs`). Elements of observations are tested one by one, so a
    difference only in how they depend on each other is not found. With a policy that was trained on the port,
    the means of `return` show how it transfers to the original.

    Args:
        port: A `Port`, or an env that `as_port` converts.
        original: A Gymnasium id, an `EnvSpec`, or a function that makes the Python env.
        set_state: As for `compare_port`. Then the original's episodes start from states of the port's resets,
            and tests are also among those with similar first observations.
        select_state: As for `compare_port`.
        actions: As for `compare_port`.
        observe: As for `compare_port`.
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
    rounds = -(-check_count("num_episodes", num_episodes, 1) // check_count("num_envs", num_envs, 1))
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be a probability between 0 and 1, not {alpha!r}")

    def begin_port(key: jax.Array) -> Any:
        return jax.vmap(port.reset)(jax.random.split(key, num_envs))

    def step_port(state: Any, action: Any, key: jax.Array) -> Any:
        return advance(port, jax.random.split(key, num_envs), state, action)

    def begin_original(key: jax.Array) -> Any:
        handle, timestep = reset(envs, seed=key)
        state, obs = begin_port(key)
        obs = adapter.observed(timestep.obs)["obs"] if set_state is None else obs
        # The first of an episode's steps sets the state, and resets the original again before it does.
        number = jnp.full(num_envs, 2 if set_state is None else 1, jnp.int32)
        return (handle, number, jax.vmap(adapter.selected)(state)), obs

    def step_original(env: Any, action: Any, key: jax.Array) -> Any:
        handle, number, state = env
        seed = jax.random.randint(key, (num_envs,), 0, 2**31 - 1)
        handle, timestep = step(handle, adapter.asked(number, seed, state, action))
        return (handle, number + 1, state), {**adapter.observed(timestep.obs), "reward": timestep.reward}

    sides = (begin_port, step_port), (begin_original, step_original)
    adapter = Adapter(set_state, None, select_state, None, actions, observe)
    with make(adapter.env_fn(port, original, each_step=False), num_envs, **options) as envs:
        own = port.action_space if actions else envs.single_action_space["action"]  # pyright: ignore[reportIndexIssue]
        act = partial(_favouring, own) if policy is None else lambda key, obs, _: policy(key, obs)
        results = check_port(port, lambda key, obs, _: act(key, obs, key))

        play = jax.jit(
            lambda pair: [
                _play(*side, act, check_count("max_steps", max_steps, 1), probes, key)
                for side, key in zip(sides, pair, strict=True)
            ]
        )
        parts = [jax.device_get(play(keys)) for keys in jax.random.split(jax.random.key(seed), (rounds, 2))]
    port_samples, original_samples = (
        jax.tree.map(lambda *leaves: np.concatenate(leaves), *side) for side in zip(*parts, strict=True)
    )
    # A port may say only `done`.
    undeclared = [name for name in FLAGS if name not in results]
    pairs = {
        name: (port_samples.get(name), original_samples.get(name))
        for name in {**port_samples, **original_samples}
        if name not in undeclared
    }
    shapes = {
        name: ["none" if values is None else str(values.shape[1:]) for values in pair]
        for name, pair in pairs.items()
    }
    mismatches = {
        f"shape of {name}": SpaceResult(*texts, equal=False)
        for name, texts in shapes.items()
        if texts[0] != texts[1]
    }
    given = ("first action",) if set_state is None else ("first action", "first obs")
    conditions = [pair for name, pair in pairs.items() if name.startswith(given)]
    samples = {
        name: compare_samples(*pair, conditions=[] if name.startswith("first") else conditions)
        for name, pair in pairs.items()
        if f"shape of {name}" not in mismatches and (set_state is None or not name.startswith("first obs"))
    }
    coverage = {
        **{name: "" if original_samples[name].any() else "always 0" for name in ("return", *FLAGS)},
        "first obs": "" if set_state is None else "set_state sets the original to the port's",
    }
    samples, threshold = with_thresholds(samples, alpha)
    return Distributions(
        samples=samples,
        mismatches=mismatches,
        coverage=coverage,
        heading=f"{rounds * num_envs:,} episodes on each side; different if p <= {threshold:.2g}",
        seed=seed,
        num_episodes=rounds * num_envs,
        alpha=alpha,
        threshold=threshold,
    )


def _favouring(space: Any, key: jax.Array, obs: Any, episode: jax.Array) -> Any:
    """Returns the favourite action of an episode in half of the steps, so that episodes show its effect."""
    favours, other = jax.random.split(key)
    return random_action(space, jnp.where(jax.random.bernoulli(favours), episode, other))


def _play(begin: Any, move: Any, act: Any, max_steps: int, probes: Sequence[int], key: jax.Array) -> Any:
    """Returns the samples of an episode in each env.

    `begin` is a function `key -> (env, obs)`, and `move` one `(env, action, key) -> (env, results)`.
    """
    begin_key, key = jax.random.split(key)
    env, first = begin(begin_key)
    num_envs = len(jax.tree.leaves(first)[0])
    probe_names = {f"obs after {at} steps": at for at in probes}
    episodes = jax.random.split(jax.random.fold_in(key, 0), num_envs)

    def choose(number: Any, obs: Any) -> tuple[Any, jax.Array]:
        act_key, step_key = jax.random.split(jax.random.fold_in(key, number))
        return jax.vmap(act)(jax.random.split(act_key, num_envs), obs, episodes), step_key

    def body(carry: Any) -> Any:
        env, number, live, old = carry
        env, results = move(env, *choose(number, old["obs"]))
        new = {
            "obs": results["obs"],
            "return": old["return"] + results["reward"],
            "length": old["length"] + 1,
            **{name: results.get(name, is_done(results)) for name in FLAGS},
            # An episode that ends before a probe keeps its last observation.
            **{
                name: jax.tree.map(partial(jnp.where, number <= at), results["obs"], old[name])
                for name, at in probe_names.items()
            },
        }
        new = select(live, like(old, new), old)
        return env, number + 1, live & ~is_done(results), new

    def unfinished(carry: Any) -> Any:
        _, number, live, _ = carry
        return live.any() & (number <= max_steps)

    zeros = jnp.zeros(num_envs, jnp.float32)
    new = {
        "obs": first,
        "return": zeros,
        "length": zeros,
        **dict.fromkeys(FLAGS, zeros > 0),
        **dict.fromkeys(probe_names, first),
    }
    *_, last = jax.lax.while_loop(unfinished, body, (env, jnp.int32(1), zeros == 0, new))
    last.pop("obs")
    return by_path({**last, "first obs": first, "first action": choose(1, first)[0]})


def with_thresholds(
    results: Mapping[str, SampleResult], alpha: float
) -> tuple[dict[str, SampleResult], float]:
    """Shares the probability `alpha` of a false difference among all tests."""
    threshold = alpha / max(1, sum(result.tests for result in results.values()))
    return {
        name: replace(result, equal=result.p_value > threshold) for name, result in results.items()
    }, threshold


def compare_resets(
    port: Any, original: Any, number: int, tolerance: Callable[[str], float]
) -> dict[str, SampleResult]:
    """Tests the first observations and states of a number of episodes on both sides, by path."""
    # An observation of another state than that of the reset can have the right distribution.
    pairs = {path: (values[:number], original[path][:number]) for path, values in port.items()}
    states = [pair for path, pair in pairs.items() if path.startswith("state")]
    results = {
        f"reset {path}": compare_samples(*pair, tolerance(path), states if path.startswith("obs") else ())
        for path, pair in pairs.items()
    }
    return with_thresholds(results, _RESET_ALPHA)[0]


def compare_samples(port: Any, original: Any, tolerance: float = 0.0, conditions: Any = ()) -> SampleResult:
    """Tests each element of a variable.

    Args:
        port: The port's samples, `[samples, ...]`.
        original: The original's samples, of the same shape.
        tolerance: Distance of values that count as equal; relative for elements with values above 1. Values
            within rounding also count as equal.
        conditions: Further variables of the same samples, as pairs of both sides. Tests are then also among
            the samples in which one of these has similar values. This finds sides where variables are
            distributed equally, but depend on each other differently.
    """
    both = _stack(port, original)
    odd: Any = np.stack([np.isnan(both), np.isposinf(both), np.isneginf(both)]).any(2)
    # Integers are not rounded.
    largest = np.abs(np.where(np.isfinite(both), both, 0)).max((0, 1)) * (
        np.result_type(port, original).kind == "f"
    )
    finite = np.nan_to_num(both, nan=1e30, posinf=1e31, neginf=-1e31)
    # Sums that are rounded in another order are the same value.
    distance = np.maximum.reduce([2e-6 * largest, tolerance * np.maximum(1, largest), 0 * largest + 2e-7])
    varied = np.flatnonzero(np.ptp(finite, axis=(0, 1)) > distance)
    groups = [group for condition in conditions for group in _groups(_stack(*condition), tolerance)]
    p_values = np.where((odd[:, 0] != odd[:, 1]).any(0), 0.0, 1.0)
    for element in varied:
        column = finite[..., element]
        for mask in [np.ones(column.shape, bool), *groups]:
            p_value = _p_value(column[0][mask[0]], column[1][mask[1]], distance[element])
            p_values[element] = min(p_values[element], p_value)
    least = int(p_values.argmin()) if p_values.size else 0
    chosen = finite[..., least] if p_values.size else np.zeros((2, 1))
    errors = 1.96 * chosen.std(1) / chosen.shape[1] ** 0.5
    return SampleResult(
        tests=len(varied) * (1 + len(groups)),
        p_value=float(p_values.min(initial=1)),
        element=least,
        means=tuple(chosen.mean(1).tolist()),
        errors=tuple(errors.tolist()),
    )


def _stack(port: Any, original: Any) -> Any:
    """Returns both sides as `[2, samples, elements]`."""
    return np.stack([port, original]).astype(np.float64).reshape(2, len(port), -1)


def _groups(condition: Any, tolerance: float) -> Iterator[Any]:
    """Yields masks `[2, samples]` of the samples in which an element of a condition has similar values."""
    varied = np.flatnonzero(np.ptp(condition, axis=(0, 1)))
    for element in varied[:_MAX_CONDITIONS]:
        values = condition[..., element]
        starts = np.unique(values)
        if len(starts) > _MAX_CONDITIONS:
            starts = np.unique(np.quantile(values, np.arange(_GROUPS) / _GROUPS))
        # Equal values may be rounded differently.
        edges = starts - np.clip(tolerance, 2e-6, 0.1) * np.maximum(0.1, np.abs(starts))
        labels = np.searchsorted(edges, values, side="right")
        groups = [labels == label for label in range(1, len(starts) + 1)]
        yield from (group for group in groups if group.any(1).all())


def _p_value(port: Any, original: Any, distance: float) -> float:
    """Returns the p-value of the Kolmogorov-Smirnov test for values that may be off by `distance`."""
    values = np.concatenate([port, original])

    def shares(side: Any, shift: float) -> Any:
        return np.searchsorted(np.sort(side), values + shift, side="right") / len(side)

    gaps = shares(port, 0) - shares(original, distance), shares(original, 0) - shares(port, distance)
    number = len(port) * len(original) / len(values)
    return float(special.kolmogorov(np.max(gaps, initial=0) * number**0.5))
