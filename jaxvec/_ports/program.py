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
from jaxvec._ports.port import Port, advance, is_done
from jaxvec.callbacks._functions import reset, step


@dataclass
class Program:
    """The compiled comparison: a scan whose carry has the running episodes, and a tally for each leaf."""

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

    def __call__(self, envs: Any, seed: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        root = jax.random.key(seed)
        time = jnp.ones(self.num_envs, jnp.int32)  # the number of the next step in its episode
        playing = {**self.begin(root, 0), "time": time, "parted": time < 0}
        handle, timestep = reset(envs, seed=seed)
        original_result = self.results_of(timestep)
        action, _, port_result = jax.eval_shape(self.step_port, playing)
        none = jnp.int32(0)
        tallies = {}
        for path in self.shared_paths(by_path(port_result), original_result):
            case = jax.eval_shape(partial(self.case, 0, path), playing, action, port_result, original_result)
            tallies[path] = {
                **dict.fromkeys(("unequal", "different", "at_ends", "port", "original"), none),
                "first": jnp.int32(_NEVER),
                "error": jnp.float32(0),
                "worst": jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), case),
            }
        counts = dict.fromkeys(("episodes", "parted"), none) | {"parted_steps": jnp.float32(0)}
        carry = handle, playing, tallies, counts
        (_, _, tallies, counts), _ = jax.lax.scan(
            partial(self.body, root), carry, jnp.arange(1, self.num_steps + 1)
        )
        return tallies, counts

    def begin(self, root: jax.Array, number: Any) -> dict[str, Any]:
        """Returns new episodes of all envs."""
        keys = jax.random.split(jax.random.fold_in(root, number), self.num_envs)
        state, obs = jax.vmap(lambda key: self.port.reset(jax.random.fold_in(key, 0)))(keys)
        return {"keys": keys, "state": state, "obs": obs}

    def step_port(self, playing: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        """Returns the actions of all envs, the port's states after them, and its results."""
        keys = jax.vmap(step_keys)(playing["keys"], playing["time"])
        action = jax.vmap(self.policy)(keys[:, 0], playing["obs"], playing["state"])
        return action, *advance(self.port, keys[:, 1], playing["state"], action)

    def results_of(self, timestep: Any) -> dict[str, Any]:
        """Returns the original's results by path, named as those of the port."""
        results = {**timestep.obs, "reward": timestep.reward}
        results["done"] = results["terminated"] | results["truncated"]
        return by_path({**results, "info": {name: timestep.info[name] for name in self.infos}})

    def shared_paths(self, ours: Any, theirs: Any) -> list[str]:
        """Returns the paths to compare, and records the others, and other shapes or dtypes."""
        missing = [path for path in ours if path not in theirs and not path.startswith("info")]
        missing += [path for path in theirs if path not in ours and path not in _ENDS]
        for path in missing:
            texts = ["given" if path in results else "none" for results in (ours, theirs)]
            self.mismatches[f"result {path}"] = SpaceResult(*texts, equal=False)
        paths = [path for path in ours if path in theirs]
        for path in paths:
            both = ours[path], theirs[path]
            shapes = [str(array.shape[1:]) for array in both]
            dtypes = [str(array.dtype) for array in both]
            for name, texts in (("shape", shapes), ("dtype", dtypes)):
                if texts[0] != texts[1]:
                    self.mismatches[f"{name} of {path}"] = SpaceResult(*texts, equal=False)
        paths = [path for path in paths if ours[path].shape == theirs[path].shape]
        for prefix in self.tolerances:
            if not any(_is_below(path, prefix) for path in paths):
                raise ValueError(
                    f"tolerances: no leaf has the path {prefix!r}; the paths are {', '.join(paths)}"
                )
        return paths

    def body(self, root: jax.Array, carry: Any, number: jax.Array) -> tuple[Any, None]:
        handle, playing, tallies, counts = carry
        time = playing["time"]
        begun = playing["time"] == 1
        action, after, port_result = self.step_port(playing)
        states = jax.vmap(self.sent)(playing["state"])
        seeds = jax.vmap(seed_of)(playing["keys"])
        asked = {"action": action, "step": time, "seed": seeds, "state": states}
        handle, timestep = step(handle, asked)
        original_result = self.results_of(timestep)
        differs = jnp.zeros(self.num_envs, bool)
        counted = {}
        for path, tally in tallies.items():
            different, counted[path] = self.count(path, tally, playing, action, port_result, original_result)
            differs |= different
        parted = differs & ~playing["parted"]
        counts = {
            "episodes": counts["episodes"] + begun.sum(),
            "parted": counts["parted"] + parted.sum(),
            "parted_steps": counts["parted_steps"] + jnp.where(parted, time, 0).sum(),
        }
        ended = is_done(port_result) | (False if self.each_step else original_result["done"] | differs)
        going = {"keys": playing["keys"], "state": after, "obs": port_result["obs"]}
        playing = jax.lax.cond(
            ended.any(), lambda: select(ended, self.begin(root, number), going), lambda: going
        )
        playing["time"] = jnp.where(ended, 1, time + 1)
        playing["parted"] = (parted | carry[1]["parted"]) & ~ended
        return (handle, playing, counted, counts), None

    def count(
        self, path: str, tally: dict[str, Any], playing: Any, action: Any, ours: Any, theirs: Any
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Returns the envs in which a leaf differs, and the tally with this step."""
        port = by_path(ours)[path]
        original = theirs[path]
        error = _errors(port, original)
        different = error > self.tolerance(path)
        worst = jnp.argmax(error)
        flags = jnp.issubdtype(original.dtype, jnp.bool_) and original.ndim == 1
        counted = {
            "unequal": tally["unequal"] + (error > 0).sum(),
            "different": tally["different"] + different.sum(),
            "at_ends": tally["at_ends"] + (different & is_done(ours)).sum(),
            "port": tally["port"] + (port.astype(bool).sum() if flags else 0),
            "original": tally["original"] + (original.sum() if flags else 0),
            "first": jnp.minimum(tally["first"], jnp.where(different, playing["time"], _NEVER).min()),
            "error": jnp.maximum(tally["error"], error[worst]),
        }
        counted["worst"] = jax.lax.cond(
            error[worst] > tally["error"],
            lambda: self.case(worst, path, playing, action, ours, theirs),
            lambda: tally["worst"],
        )
        return different, counted

    def case(self, env: Any, path: str, playing: Any, action: Any, ours: Any, theirs: Any) -> dict[str, Any]:
        """Returns the arrays of a `Case`."""
        arrays = {
            "step": playing["time"],
            "key": jax.random.key_data(playing["keys"]),
            "state": by_path(playing["state"]),
            "action": action,
            "port": by_path(ours)[path],
            "original": theirs[path],
        }
        return {"env": jnp.int32(env), **jax.tree.map(lambda leaf: leaf[env], arrays)}

    def tolerance(self, path: str) -> float:
        """Returns the tolerance of the longest path that includes this one; 0 without."""
        prefixes = [prefix for prefix in self.tolerances if _is_below(path, prefix)]
        return self.tolerances[max(prefixes, key=len)] if prefixes else 0.0

    def result(self, path: str, tally: dict[str, Any]) -> LeafResult:
        """Returns the record of a tally."""
        arrays = tally["worst"]
        first = int(tally["first"])
        case = Case(step=int(arrays.pop("step")), env=int(arrays.pop("env")), **arrays)
        flags = np.ndim(case.original) == 0 and np.asarray(case.original).dtype.kind == "b"
        return LeafResult(
            compared=self.num_envs * self.num_steps,
            different=int(tally["different"]),
            at_ends=int(tally["at_ends"]),
            unequal=int(tally["unequal"]),
            tolerance=self.tolerance(path),
            max_error=float(tally["error"]),
            first_step=None if first == _NEVER else first,
            ones=(int(tally["port"]), int(tally["original"])) if flags else None,
            worst=case if tally["unequal"] else None,
        )


_NEVER = np.iinfo(np.int32).max
_ENDS = ("terminated", "truncated", "done")


def _is_below(path: str, prefix: str) -> bool:
    return prefix in ("", path) or path.startswith(f"{prefix}/")


def by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a pytree as a dict from path to array; keys as their data."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {_path(path): jax.random.key_data(leaf) if _is_key(leaf) else leaf for path, leaf in leaves}


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def restored(like: Any, leaves: Mapping[str, Any]) -> Any:
    """Returns the pytree with the structure of `like` whose `by_path` is `leaves`."""

    def leaf(path: Any, old: Any) -> Any:
        value = jnp.asarray(leaves[_path(path)])
        return jax.random.wrap_key_data(value) if _is_key(old) else value

    return jax.tree_util.tree_map_with_path(leaf, like)


def sent_state(select_state: Callable[[Any], Any] | None, used: bool, state: Any) -> dict[str, Any]:
    """Returns the arrays of the state that the workers get; none without `set_state`."""
    if not used:
        return {}
    selected = by_path(state if select_state is None else select_state(state))
    return {path or "state": leaf for path, leaf in selected.items()}


def seed_of(key: jax.Array) -> jax.Array:
    """Returns the original's seed for an episode."""
    return (jax.random.key_data(key)[-1] >> 1).astype(jnp.int32)


def step_keys(key: jax.Array, number: Any) -> Any:
    """Returns the keys of the policy and of the port for a step of an episode."""
    return jax.random.split(jax.random.fold_in(key, number))


def select(mask: jax.Array, new: Any, old: Any) -> Any:
    return jax.vmap(lambda chosen, *both: jax.tree.map(partial(jnp.where, chosen), *both))(mask, new, old)


def _errors(port: jax.Array, original: jax.Array) -> jax.Array:
    """Returns the largest error of each env. Unequal values have an error above 0."""
    dtype = jnp.promote_types(port.dtype, original.dtype)
    equal = port == original
    if jnp.issubdtype(dtype, jnp.floating):
        equal |= jnp.isnan(port) & jnp.isnan(original)
        error = jnp.abs(port - original) / jnp.maximum(1, jnp.abs(original))
        error = jnp.where(jnp.isnan(error), jnp.inf, error)
    else:  # float32 may not tell large integers apart
        error = jnp.maximum(1, jnp.abs(port.astype(jnp.float32) - original.astype(jnp.float32)))
    error = jnp.where(equal, 0, error).astype(jnp.float32)
    return error.reshape(len(error), -1).max(1, initial=0)


def random_action(space: Any, key: jax.Array, *_: Any) -> Any:
    """Returns a random action of a space."""
    match space:
        case spaces.Discrete():
            return jax.random.randint(key, (), int(space.start), int(space.start + space.n))
        case spaces.MultiDiscrete():
            return jax.random.randint(key, space.shape, space.start, space.start + space.nvec)
        case spaces.MultiBinary():
            return jax.random.bernoulli(key, shape=space.shape).astype(jnp.int8)
        case spaces.Box() if space.is_bounded() and space.dtype.kind == "f":
            return jax.random.uniform(key, space.shape, jnp.float32, space.low, space.high)
        case _:
            raise ValueError(
                f"there are no random actions for {space}; pass policy=lambda key, obs, state: ..."
            )
