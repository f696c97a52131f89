"""The compiled program of a comparison, and the functions that a replay shares with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from jaxvec._ports.comparison import Case, LeafResult, SpaceResult
from jaxvec._ports.original import is_bounded
from jaxvec._ports.port import FLAGS, Port, advance, by_path, dtype_name, is_done, is_key, like
from jaxvec.callbacks._functions import reset, step


@dataclass
class Program:
    """The compiled comparison: a scan whose carry has the running episodes, and cases of each leaf.

    Each step of the scan also returns the errors of all leaves, which `result` counts.
    """

    port: Port
    policy: Callable[[jax.Array, Any, Any], Any]
    sent: Callable[[Any], dict[str, Any]]  # returns what workers get of a state, by path
    each_step: bool  # whether the original is set to the port's state before each step
    num_envs: int
    num_steps: int
    tolerances: Mapping[str, float]
    infos: tuple[str, ...]
    # Differences of the structure, shapes and dtypes of results, found while tracing.
    mismatches: dict[str, SpaceResult] = field(default_factory=dict)

    def __call__(self, envs: Any, seed: Any) -> tuple[Any, Any, Any]:
        """Returns the cases by path, samples of resets on both sides, and data of all steps."""
        root = jax.random.key(seed)
        playing = self.begin(root, 0)
        handle, timestep = reset(envs, seed=seed)
        action, _, port = self.step_port(playing)
        original = self.results_of(timestep)
        cases = {}
        for path in self.shared_paths(port, original):
            case = self.case(path, 0, jnp.float32(0), playing, action, port, original)
            cases[path] = {"worst": case, "earliest": {**case, "step": jnp.int32(_NEVER)}}
        samples = jax.tree.map(
            lambda leaf: jnp.zeros((_MAX_RESETS, *leaf.shape[1:]), leaf.dtype),
            self.first_results(playing, timestep),
        )
        carry = handle, playing, cases, samples, jnp.int32(0)
        (_, _, cases, samples, _), steps = jax.lax.scan(
            partial(self.body, root), carry, jnp.arange(1, self.num_steps + 1)
        )
        return cases, samples, steps

    def begin(self, root: jax.Array, number: Any) -> dict[str, Any]:
        """Returns new episodes of all envs: the port's side, and `time`, the number of the next step."""
        keys = jax.random.split(jax.random.fold_in(root, number), self.num_envs)
        state, obs = jax.vmap(lambda key: self.port.reset(jax.random.fold_in(key, 0)))(keys)
        return {
            "keys": keys,
            "state": state,
            "obs": obs,
            "time": jnp.ones(self.num_envs, jnp.int32),
            "parted": jnp.zeros(self.num_envs, bool),
            "twin": state,  # a copy of the state with rounding errors
            "drift": jnp.zeros(self.num_envs, jnp.float32),  # largest error of the twin until now
        }

    def step_port(self, playing: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        """Returns the actions of all envs, the port's next states, its results by path, and its drift."""
        keys = jax.vmap(step_keys)(playing["keys"], playing["time"])
        action = jax.vmap(self.policy)(keys[:, 0], playing["obs"], playing["state"])
        after, results = advance(self.port, keys[:, 1], playing["state"], action)
        going = {**playing, "state": after, "obs": results["obs"], "time": playing["time"] + 1}
        # Rounding errors may add up. Those of a twin tell the drift of a correct port from a fault.
        if not self.each_step and any(self.tolerances.values()):
            twin, twin_results = advance(self.port, keys[:, 1], playing["twin"], action)
            errors = jax.tree.map(errors_of, twin_results["obs"], results["obs"])
            going["drift"] = jnp.stack([playing["drift"], *jax.tree.leaves(errors)]).max(0)
            going["twin"] = jax.tree.map(_perturb, twin)
        return action, like(playing, going), by_path({**results, "state": jax.vmap(self.sent)(after)})

    def first_results(self, playing: Any, timestep: Any) -> list[dict[str, Any]]:
        """Returns the observations and states of the last resets of both sides, by path."""
        port = by_path({"obs": playing["obs"], "state": jax.vmap(self.sent)(playing["state"])})
        original = by_path(timestep.obs["reset"])
        paths = [path for path in original if path in port and port[path].shape == original[path].shape]
        return [{path: side[path] for path in paths} for side in (port, original)]

    def results_of(self, timestep: Any) -> dict[str, Any]:
        """Returns the original's results by path, named as those of the port."""
        return by_path(
            {
                **timestep.obs,
                "reset": {},
                "reward": timestep.reward,
                "done": timestep.obs["terminated"] | timestep.obs["truncated"],
                "info": {name: timestep.info[name] for name in self.infos},
            }
        )

    def shared_paths(self, port: Any, original: Any) -> list[str]:
        """Returns the paths to compare, and records the others, and other shapes or dtypes."""
        paths = [path for path in port if path in original and port[path].shape == original[path].shape]
        for path in {**port, **original}:
            sides = [results[path] for results in (port, original) if path in results]
            texts = {
                "result": ["given" if path in results else "none" for results in (port, original)],
                "shape of": [str(leaf.shape[1:]) for leaf in sides],
                "dtype of": [dtype_name(leaf) for leaf in sides],
            }
            # The original may declare only a part of infos and states.
            optional = path.split("/")[0] in (("info", "state") if path in port else (*FLAGS, "done"))
            for name, pair in texts.items():
                if len({*pair}) == 2 and not (name == "result" and optional):
                    self.mismatches[f"{name} {path}"] = SpaceResult(*pair, equal=False)
        for prefix in self.tolerances:
            if not any(_is_below(path, prefix) for path in paths):
                raise ValueError(
                    f"tolerances: no leaf has the path {prefix!r}; the paths are {', '.join(paths)}"
                )
        return paths

    def body(self, root: jax.Array, carry: Any, number: jax.Array) -> tuple[Any, Any]:
        handle, playing, cases, samples, episodes = carry
        time = playing["time"]
        action, going, port = self.step_port(playing)
        asked = {"action": action, "step": time, "seed": jax.vmap(seed_of)(playing["keys"])}
        handle, timestep = step(handle, asked | {"state": jax.vmap(self.sent)(playing["state"])})
        original = self.results_of(timestep)
        errors = {path: errors_of(port[path], original[path]) for path in cases}
        different = {path: error > self.tolerance(path, going["drift"]) for path, error in errors.items()}
        for path, kept in cases.items():
            error = errors[path]
            times = jnp.where(different[path], time, _NEVER)
            better = {
                "worst": (error.argmax(), error.max() > kept["worst"]["error"]),
                "earliest": (times.argmin(), times.min() < kept["earliest"]["step"]),
            }
            for name, (env, replaces) in better.items():
                case = partial(self.case, path, env, error[env], playing, action, port, original)
                kept[name] = jax.lax.cond(replaces, case, lambda old=kept[name]: old)
        begun = time == 1
        places = jnp.where(begun, episodes + jnp.cumsum(begun) - 1, _MAX_RESETS)  # the last are dropped
        samples = jax.tree.map(
            lambda old, new: old.at[places].set(new, mode="drop"),
            samples,
            self.first_results(playing, timestep),
        )
        done = is_done(port)
        differs = jnp.stack([*different.values()]).any(0)
        drifted = going["drift"] > _MAX_DRIFT
        going["parted"] = playing["parted"] | differs
        ended = done if self.each_step else done | original["done"] | differs | drifted
        going = jax.lax.cond(
            ended.any(), lambda: select(ended, self.begin(root, number), going), lambda: going
        )
        steps = {
            "time": time,
            "done": done,
            "parted": differs & ~playing["parted"],
            "drifted": drifted & ~differs,
            "action": action,
            "errors": errors,
            "different": different,
            "flags": {path: [port[path] != 0, original[path] != 0] for path in cases if port[path].ndim == 1},
        }
        return (handle, going, cases, samples, episodes + begun.sum(dtype=jnp.int32)), steps

    def case(
        self, path: str, env: Any, error: Any, playing: Any, action: Any, port: Any, original: Any
    ) -> Any:
        """Returns the arrays of a `Case`."""
        arrays = {
            "step": playing["time"],
            "key": jax.random.key_data(playing["keys"]),
            "state": by_path(playing["state"]),
            "action": action,
            "port": port[path],
            "original": original[path],
        }
        return {"env": jnp.int32(env), "error": error, **jax.tree.map(lambda leaf: leaf[env], arrays)}

    def tolerance(self, path: str, drift: Any = 0.0) -> Any:
        """Returns the tolerance of the longest path that includes this one, and of the drift; 0 without."""
        prefixes = [prefix for prefix in self.tolerances if _is_below(path, prefix)]
        tolerance = self.tolerances[max(prefixes, key=len)] if prefixes else 0.0
        return tolerance and tolerance + _MAX_GROWTH * drift

    def result(self, path: str, cases: Any, steps: Any) -> LeafResult:
        """Returns the record of a leaf."""
        different = steps["different"][path]
        worst = Case(**cases["worst"])
        earliest = Case(**cases["earliest"])
        counted = path == "reward" or (path in steps["flags"] and worst.original.dtype == np.bool_)
        return LeafResult(
            equal=not different.any(),
            compared=different.size,
            different=int(different.sum()),
            at_ends=int((different & steps["done"]).sum()),
            unequal=int((steps["errors"][path] > 0).sum()),
            tolerance=self.tolerance(path),
            max_error=float(worst.error),
            first_step=int(earliest.step) if different.any() else None,
            ones=tuple(int(side.sum()) for side in steps["flags"][path]) if counted else None,
            worst=worst if worst.error else None,
            earliest=earliest if different.any() else None,
        )


_NEVER = np.iinfo(np.int32).max
_MAX_RESETS = 1024  # number of resets whose observations and states are compared
_ROUNDING = 2.0**-23  # relative error in each step: the least one of float32
_MAX_GROWTH = 16  # error of a correct port, in those of its copy with rounding errors
_MAX_DRIFT = 1e-4  # error of this copy at which an episode ends


def _perturb(leaf: jax.Array) -> jax.Array:
    """Adds rounding errors to floats, but not to whole numbers, which may count something."""
    is_whole = not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf == jnp.round(leaf)
    return jnp.where(is_whole, leaf, leaf * (1 + _ROUNDING))


def _is_below(path: str, prefix: str) -> bool:
    return prefix in ("", path) or path.startswith(f"{prefix}/")


def restored(old: Any, leaves: Mapping[str, Any]) -> Any:
    """Returns the pytree with the structure of `old` whose `by_path` is `leaves`."""
    tree = jax.tree.unflatten(jax.tree.structure(old), [leaves[path] for path in by_path(old)])
    return jax.tree.map(lambda a, b: jax.random.wrap_key_data(b) if is_key(a) else jnp.asarray(b), old, tree)


def sent_state(select_state: Callable[[Any], Any] | None, state: Any) -> dict[str, Any]:
    """Returns the arrays of the state that the workers get, by path."""
    selected = by_path(state if select_state is None else select_state(state))
    return {path or "state": leaf for path, leaf in selected.items()}


def is_of_reset(port: Port, path: str, case: Case) -> bool:
    """Returns whether the port's obs in a step are those of a reset by a key that it probably used."""
    key = step_keys(jax.random.wrap_key_data(case.key), case.step)[1]
    keys = jnp.stack([key, *jax.random.split(key), *jax.random.split(key, 3)])
    obs = np.asarray(by_path({"obs": jax.vmap(port.reset)(keys)[1]})[path])
    return bool(np.isclose(obs, case.port, equal_nan=True).reshape(len(keys), -1).all(1).any())


def seed_of(key: jax.Array) -> jax.Array:
    """Returns the original's seed for an episode."""
    return (jax.random.key_data(key)[-1] >> 1).astype(jnp.int32)


def step_keys(key: jax.Array, number: Any) -> Any:
    """Returns the keys of the policy and of the port for a step of an episode."""
    return jax.random.split(jax.random.fold_in(key, number))


def select(mask: jax.Array, new: Any, old: Any) -> Any:
    return jax.vmap(lambda chosen, *both: jax.tree.map(partial(jnp.where, chosen), *both))(mask, new, old)


def errors_of(port: jax.Array, original: jax.Array) -> jax.Array:
    """Returns the largest error of each env. Unequal values have an error above 0."""
    dtype = jnp.promote_types(port.dtype, original.dtype)
    equal = (port == original) | (jnp.isnan(port) & jnp.isnan(original))
    port, original = (side.astype(jnp.promote_types(dtype, jnp.float32)) for side in (port, original))
    error = jnp.abs(port - original)
    is_float = jnp.issubdtype(dtype, jnp.floating)
    # float32 may not tell large integers apart.
    error = error / jnp.maximum(1, jnp.abs(original)) if is_float else jnp.maximum(1, error)
    error = jnp.where(equal, 0, jnp.where(jnp.isnan(error), jnp.inf, error)).astype(jnp.float32)
    return error.reshape(len(error), -1).max(1, initial=0)


def random_action(space: Any, key: jax.Array, *_: Any, beyond: bool = False) -> Any:
    """Returns a random action of a space; of a `Box`, one in ten at its bounds, or also beyond them."""
    match space:
        case spaces.Discrete():
            return jax.random.randint(key, (), int(space.start), int(space.start + space.n))
        case spaces.MultiDiscrete():
            return jax.random.randint(key, space.shape, space.start, space.start + space.nvec)
        case spaces.MultiBinary():
            return jax.random.bernoulli(key, shape=space.shape).astype(jnp.int8)
        case _ if is_bounded(space):
            dtype = jax.dtypes.canonicalize_dtype(space.dtype)
            inside = jax.random.uniform(key, space.shape, dtype, space.low, space.high)
            margin = (space.high - space.low) / 4 if beyond else 0
            edges = [space.low, space.high, space.low - margin, space.high + margin]
            draws = jax.random.randint(jax.random.fold_in(key, 0), space.shape, 0, 40)
            return jnp.choose(draws, [*jnp.array(edges, dtype), inside], mode="clip")
        case _:
            raise ValueError(
                f"there are no random actions for {space}; pass policy=lambda key, obs, state: ..."
            )


def find_unplayed(space: Any, actions: Any, beyond: bool) -> str:
    """Returns the kinds of actions that were not among these, or `""`."""
    cases: dict[str, Any] = {}
    if isinstance(space, spaces.Discrete):
        cases = {str(value + space.start): actions == value + space.start for value in range(space.n)}
    elif is_bounded(space):
        cases = {
            "the lowest": actions <= space.low,
            "the highest": actions >= space.high,
            "beyond the bounds": (actions < space.low) | (actions > space.high) | (not beyond),
        }
    return ", ".join(name for name, played in cases.items() if not played.any())
