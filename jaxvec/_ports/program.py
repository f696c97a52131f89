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
from jaxvec._ports.original import is_bounded, space_like
from jaxvec._ports.port import Port, advance, explained, is_done, like
from jaxvec.callbacks._functions import reset, step


@dataclass
class Program:
    """The compiled comparison: a scan whose carry has the running episodes, and a tally for each leaf."""

    port: Port
    policy: Callable[[jax.Array, Any, Any], Any]
    sent: Callable[[Any], dict[str, Any]]  # returns what workers get of a state, by path
    compares_states: bool  # whether the original also returns its state
    each_step: bool  # whether the original is set to the port's state before each step
    num_envs: int
    num_steps: int
    tolerances: Mapping[str, float]
    infos: tuple[str, ...]
    action_space: Any  # of the original
    # Differences of the structure, shapes and dtypes of results, found while tracing.
    mismatches: dict[str, SpaceResult] = field(default_factory=dict)

    def __call__(self, envs: Any, seed: Any) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
        root = jax.random.key(seed)
        time = jnp.ones(self.num_envs, jnp.int32)  # the number of the next step in its episode
        # The largest error in tolerances that earlier steps of the episode left, if the original runs freely.
        drift = jnp.zeros(self.num_envs, jnp.float32)
        playing = {**self.begin(root, 0), "time": time, "parted": time < 0, "drift": drift}
        handle, timestep = reset(envs, seed=seed)
        handle, resets = self.sample_resets(handle, jax.random.fold_in(root, _RESETS))
        original_result = self.results_of(timestep)
        action, _, port_result = jax.eval_shape(self.step_port, playing)
        none = jnp.int32(0)
        tallies = {}
        for path in self.shared_paths(by_path(port_result), original_result):
            case = partial(self.case, 0, path)
            shapes = jax.eval_shape(case, playing, action, port_result, original_result)
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            tallies[path] = {
                **dict.fromkeys(("unequal", "different", "at_ends", "port", "original"), none),
                "error": jnp.float32(0),
                "worst": zeros,
                "earliest": {**zeros, "step": jnp.int32(_NEVER)},
            }
        counts = dict.fromkeys(("episodes", "parted", "drifted", "longest"), none)
        cases = jax.eval_shape(partial(action_cases, self.action_space), action)
        counts |= {"parted_steps": jnp.float32(0), "actions": dict.fromkeys(cases, jnp.bool_(False))}
        carry = handle, playing, tallies, counts
        (_, _, tallies, counts), _ = jax.lax.scan(
            partial(self.body, root), carry, jnp.arange(1, self.num_steps + 1)
        )
        return tallies, counts, resets

    def sample_resets(self, handle: Any, root: jax.Array) -> tuple[Any, list[Any]]:
        """Returns first observations and states of the port and of the original, by path."""

        def body(handle: Any, number: Any) -> tuple[Any, list[Any]]:
            begun = self.begin(root, number)
            handle, timestep = reset(handle, seed=jax.random.fold_in(root, number))
            sides = [{"obs": begun["obs"], **self.states(begun["state"])}, timestep.obs]
            return handle, [
                by_path({name: side.get(name, {}) for name in ("obs", "state")}) for side in sides
            ]

        rounds = jnp.arange(-(-_MIN_RESETS // self.num_envs))
        handle, sides = jax.lax.scan(body, handle, rounds)
        return handle, [{path: jnp.concatenate(each) for path, each in side.items()} for side in sides]

    def states(self, states: Any) -> dict[str, Any]:
        """Returns the states of all envs as a part of results, if states are compared."""
        return {"state": jax.vmap(self.sent)(states)} if self.compares_states else {}

    def begin(self, root: jax.Array, number: Any) -> dict[str, Any]:
        """Returns new episodes of all envs."""
        keys = jax.random.split(jax.random.fold_in(root, number), self.num_envs)
        state, obs = jax.vmap(lambda key: self.port.reset(jax.random.fold_in(key, 0)))(keys)
        return {"keys": keys, "state": state, "obs": obs}

    def step_port(self, playing: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        """Returns the actions of all envs, the port's states after them, and its results."""
        keys = jax.vmap(step_keys)(playing["keys"], playing["time"])
        action = jax.vmap(self.policy)(keys[:, 0], playing["obs"], playing["state"])
        after, results = advance(self.port, keys[:, 1], playing["state"], action)
        return action, after, {**results, **self.states(after)}

    def results_of(self, timestep: Any) -> dict[str, Any]:
        """Returns the original's results by path, named as those of the port."""
        results = {**timestep.obs, "reward": timestep.reward}
        results["done"] = results["terminated"] | results["truncated"]
        return by_path({**results, "info": {name: timestep.info[name] for name in self.infos}})

    def shared_paths(self, ours: Any, theirs: Any) -> list[str]:
        """Returns the paths to compare, and records the others, and other shapes or dtypes."""
        optional = "info", "state"  # the original may return only a part of them
        missing = [path for path in ours if path not in theirs and path.split("/")[0] not in optional]
        missing += [path for path in theirs if path not in ours and path not in _ENDS]
        for path in missing:
            texts = ["given" if path in results else "none" for results in (ours, theirs)]
            self.mismatches[f"result {path}"] = SpaceResult(*texts, equal=False)
        paths = [path for path in ours if path in theirs]
        for path in paths:
            both = ours[path], theirs[path]
            described = {"shape": [str(array.shape[1:]) for array in both]}
            if not _is_below(path, "state"):  # which Python envs keep in any numbers
                # With x64, a port may have 64 bits for 32.
                described["dtype"] = [str(array.dtype).replace("64", "32") for array in both]
            for name, texts in described.items():
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
        action, after, port_result = self.step_port(playing)
        states = jax.vmap(self.sent)(playing["state"])
        seeds = jax.vmap(seed_of)(playing["keys"])
        asked = {"action": action, "step": time, "seed": seeds, "state": states}
        handle, timestep = step(handle, asked)
        original_result = self.results_of(timestep)
        differs = jnp.zeros(self.num_envs, bool)
        drift = jnp.zeros(self.num_envs, jnp.float32)
        counted = {}
        for path, tally in tallies.items():
            tolerance = self.tolerance(path)
            error = _errors(by_path(port_result)[path], original_result[path])
            # Rounding errors of earlier steps may have grown; a fault is a larger error in a single step.
            different = error > tolerance * (1 + _MAX_GROWTH * playing["drift"])
            differs |= different
            if tolerance > 0 and not self.each_step:
                drift = jnp.maximum(drift, error / tolerance)
            results = playing, action, port_result, original_result
            counted[path] = self.count(path, tally, error, different, *results)
        parted = differs & ~playing["parted"]
        drifted = ~differs & (drift > _MAX_DRIFT)
        after_counts = {
            "episodes": counts["episodes"] + (time == 1).sum(),
            "parted": counts["parted"] + parted.sum(),
            "drifted": counts["drifted"] + drifted.sum(),
            "longest": jnp.maximum(counts["longest"], time.max()),
            "parted_steps": counts["parted_steps"] + jnp.where(parted, time, 0).sum(),
            "actions": jax.tree.map(
                jnp.logical_or, counts["actions"], action_cases(self.action_space, action)
            ),
        }
        ended = is_done(port_result)
        if not self.each_step:
            ended |= original_result["done"] | differs | drifted
        old = {name: playing[name] for name in ("keys", "state", "obs")}
        going = like(old, {"keys": playing["keys"], "state": after, "obs": port_result["obs"]})
        begun = jax.lax.cond(
            ended.any(), lambda: select(ended, self.begin(root, number), going), lambda: going
        )
        begun["time"] = jnp.where(ended, 1, time + 1)
        begun["parted"] = (parted | playing["parted"]) & ~ended
        begun["drift"] = jnp.where(ended, 0, drift)
        return (handle, *like(carry[1:], (begun, counted, after_counts))), None

    def count(
        self,
        path: str,
        tally: Any,
        error: Any,
        different: Any,
        playing: Any,
        action: Any,
        ours: Any,
        theirs: Any,
    ) -> dict[str, Any]:
        """Returns the tally of a leaf with this step."""
        port = by_path(ours)[path]
        original = theirs[path]
        flags = _is_flag(path, original[0])
        times = jnp.where(different, playing["time"], _NEVER)
        counted = {
            "unequal": tally["unequal"] + (error > 0).sum(),
            "different": tally["different"] + different.sum(),
            "at_ends": tally["at_ends"] + (different & is_done(ours)).sum(),
            "port": tally["port"] + (port.astype(bool).sum() if flags else 0),
            "original": tally["original"] + (original.astype(bool).sum() if flags else 0),
            "error": jnp.maximum(tally["error"], error.max()),
        }
        kept = {
            "worst": (error.argmax(), error.max() > tally["error"]),
            "earliest": (times.argmin(), times.min() < tally["earliest"]["step"]),
        }
        for name, (env, better) in kept.items():
            case = partial(self.case, env, path, playing, action, ours, theirs)
            counted[name] = jax.lax.cond(better, case, lambda old=tally[name]: old)
        return counted

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
        case = _case(tally["worst"])
        earliest = _case(tally["earliest"])
        different = int(tally["different"])
        flags = _is_flag(path, np.asarray(case.original))
        return LeafResult(
            compared=self.num_envs * self.num_steps,
            different=different,
            at_ends=int(tally["at_ends"]),
            unequal=int(tally["unequal"]),
            tolerance=self.tolerance(path),
            max_error=float(tally["error"]),
            first_step=earliest.step if different else None,
            ones=(int(tally["port"]), int(tally["original"])) if flags else None,
            worst=case if tally["unequal"] else None,
            earliest=earliest if different else None,
        )


_NEVER = np.iinfo(np.int32).max
_MIN_RESETS = 512  # number of resets whose observations and states are compared
_RESETS = np.uint32(2**32 - 1)  # folded into the key of resets that start no episode
_MAX_GROWTH = 4  # of the errors of earlier steps, in a step of an original that runs freely
_MAX_DRIFT = 16  # error in tolerances after which such an episode ends, before flags differ
_ENDS = ("terminated", "truncated", "done")


def _case(arrays: dict[str, Any]) -> Case:
    arrays = {**arrays, "step": int(arrays["step"]), "env": int(arrays["env"])}
    return Case(**arrays)


def _is_flag(path: str, value: Any) -> bool:
    """Returns whether to count steps with a leaf other than 0: if it is a single flag, or the reward."""
    return path == "reward" or (value.ndim == 0 and value.dtype == np.bool_)


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


def state_space(port: Port, sent: Callable[[Any], dict[str, Any]]) -> spaces.Dict:
    """Returns the space of the states that the workers get."""
    with explained():
        shapes = jax.eval_shape(lambda key: sent(port.reset(key)[0]), jax.random.key(0))
    return spaces.Dict({path: space_like(shape.shape, shape.dtype) for path, shape in shapes.items()})


def is_of_reset(port: Port, path: str, case: Case) -> bool:
    """Returns whether the port's obs in a step are those of a reset by a key that it probably used."""
    episode = jax.random.wrap_key_data(case.key)
    key = step_keys(episode, case.step)[1]
    keys = jnp.stack([key, *jax.random.split(key), *jax.random.split(key, 3), jax.random.fold_in(episode, 0)])
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
            keys = jax.random.split(key, 3)
            inside = jax.random.uniform(keys[0], space.shape, dtype, space.low, space.high)
            outside = (space.high - space.low) / 4 if beyond else 0
            ends = jnp.array([space.low, space.high, space.low - outside, space.high + outside], dtype)
            chosen = jax.random.randint(keys[1], (1, *space.shape), 0, 4)
            edge = jnp.take_along_axis(ends, chosen, axis=0)[0]
            return jnp.where(jax.random.bernoulli(keys[2], 0.1), edge, inside)
        case _:
            raise ValueError(
                f"there are no random actions for {space}; pass policy=lambda key, obs, state: ..."
            )


def action_cases(space: Any, action: Any) -> dict[str, Any]:
    """Returns by name whether actions have a case that a comparison should have; none but for a `Box`."""
    if not is_bounded(space):
        return {}
    beyond = (action < space.low) | (action > space.high)
    at_bounds = {"lowest action": action <= space.low, "highest action": action >= space.high}
    return {
        name: jnp.any(cases) for name, cases in {**at_bounds, "actions beyond the bounds": beyond}.items()
    }
