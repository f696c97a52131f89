"""The compiled program of a comparison, and what it gives to both sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from jaxvec._leaves import full_box
from jaxvec._ports.comparison import Case, LeafResult, SpaceResult
from jaxvec._ports.original import GetState, Original, SetState, constructor
from jaxvec._ports.port import FLAGS, Port, advance, by_path, dtype_name, is_done, is_float, like, shape_of
from jaxvec.callbacks._functions import reset, step


@dataclass(frozen=True)
class Adapter:
    """Connects a port with its original, by functions of one env.

    The first two run in the workers, and the others in the program.

    Attributes:
        set_state: Sets the original to a state.
        get_state: Returns the original's state.
        select_state: Returns the part of the port's state that these two use; `None` for all of it.
        draws: Returns the random numbers of a step of the port, of the step's key.
        actions: Returns the original's action for one of the port.
        observe: Returns the original's observation in the form of the port's.
    """

    set_state: SetState | None = None
    get_state: GetState | None = None
    select_state: Callable[[Any], Any] | None = None
    draws: Callable[[jax.Array], Any] | None = None
    actions: Callable[[Any], Any] | None = None
    observe: Callable[[Any], Any] | None = None

    def selected(self, state: Any) -> dict[str, Any]:
        """Returns the arrays of a state that both sides share, by path."""
        if self.set_state is None and self.get_state is None:
            return {}
        leaves = by_path(state if self.select_state is None else self.select_state(state))
        return {path or "state": leaf for path, leaf in leaves.items()}

    def sent(self, key: jax.Array, state: Any) -> dict[str, Any]:
        """Returns the arrays that the workers get for a step of the port with this key, by path."""
        return self.selected(state) | by_path({"draws": self.draws(key) if self.draws else {}})

    def asked(self, step: jax.Array, seed: jax.Array, state: Any, action: Any) -> dict[str, Any]:
        """Returns the actions of several originals, of which each starts with the state of a port."""
        return {
            "action": action if self.actions is None else jax.vmap(self.actions)(action),
            "step": step,
            "seed": seed,
            "state": state,
        }

    def observed(self, results: dict[str, Any]) -> dict[str, Any]:
        """Returns the results of several originals, with observations in the port's form."""
        observe = jax.vmap(self.observe) if self.observe else lambda obs: obs
        return {**results, "obs": observe(results["obs"])}

    def env_fn(self, port: Port, original: Any, *, each_step: bool) -> Callable[[], Original]:
        """Returns the function that makes the original of a port as an env for the workers."""
        shapes = shape_of(lambda key: self.sent(key, port.reset(key)[0]))
        space = spaces.Dict({path: full_box(shape.shape, shape.dtype) for path, shape in shapes.items()})
        return partial(
            Original, constructor(original), self.set_state, self.get_state, space, each_step=each_step
        )


@dataclass
class Program:
    """The compiled comparison: a scan whose carry has the running episodes, and cases of each leaf.

    Each step of the scan also returns the errors of all leaves, which `result` counts.
    """

    port: Port
    policy: Callable[[jax.Array, Any, Any], Any]
    adapter: Adapter
    each_step: bool  # whether the original is set to the port's state before each step
    num_envs: int
    num_steps: int
    tolerances: Mapping[str, float]
    infos: tuple[str, ...]
    episode: Any  # uint32 data of the key of the episode that all envs play; `None` for others in each
    # Differences of the structure, shapes and dtypes of results, found while tracing.
    mismatches: dict[str, SpaceResult] = field(default_factory=dict)

    def __call__(self, envs: Any, seed: Any) -> tuple[Any, Any, Any]:
        """Returns the cases by path, samples of resets on both sides, and data of all steps."""
        root = jax.random.key(seed)
        playing = self.begin(root, 0)
        handle, timestep = reset(envs, seed=seed)
        action, _, _, port = self.step_port(playing)
        original = self.results_of(timestep)
        case = partial(self.case, 0, jnp.float32(0), playing, action, port, original)
        cases = {
            path: {"worst": case(path), "earliest": {**case(path), "step": jnp.int32(_NEVER)}}
            for path in self.shared_paths(port, original)
        }
        samples = jax.tree.map(
            lambda leaf: jnp.zeros((_MAX_RESETS, *leaf.shape[1:]), leaf.dtype),
            self.first_results(playing, timestep),
        )
        carry = handle, playing, cases, samples, jnp.int32(0)
        (_, _, cases, samples, _), steps = jax.lax.scan(
            partial(self.body, root), carry, jnp.arange(1, self.num_steps + 1)
        )
        return cases, samples, steps

    @property
    def may_drift(self) -> bool:
        """Whether rounding errors add up, and some are accepted."""
        return not self.each_step and any(self.tolerances.values())

    def begin(self, root: jax.Array, number: Any) -> dict[str, Any]:
        """Returns new episodes of all envs: the port's side, and `time`, the number of the next step."""
        keys = (
            jax.random.split(jax.random.fold_in(root, number), self.num_envs)
            if self.episode is None
            else jax.random.wrap_key_data(jnp.tile(np.array(self.episode, np.uint32), (self.num_envs, 1)))
        )
        state, obs = jax.vmap(lambda key: self.port.reset(jax.random.fold_in(key, 0)))(keys)
        return {
            "keys": keys,
            "state": state,
            "obs": obs,
            "time": jnp.ones(self.num_envs, jnp.int32),
            "parted": jnp.zeros(self.num_envs, bool),
            "twins": [state, state] if self.may_drift else [],  # copies of the state with rounding errors
            "drift": jnp.zeros(self.num_envs, jnp.float32),  # largest error of the twins until now
        }

    def step_port(self, playing: dict[str, Any]) -> tuple[Any, Any, Any, dict[str, Any]]:
        """Returns the actions, what the original is asked to do, the next states, and the results by path."""
        keys = jax.vmap(step_keys)(playing["keys"], playing["time"])
        action = jax.vmap(self.policy)(keys[:, 0], playing["obs"], playing["state"])
        after, results = advance(self.port, keys[:, 1], playing["state"], action)
        sent = jax.vmap(self.adapter.sent)(keys[:, 1], playing["state"])
        seed = (jax.random.key_data(playing["keys"])[:, -1] >> 1).astype(jnp.int32)
        asked = self.adapter.asked(playing["time"], seed, sent, action)
        going = {**playing, "state": after, "obs": results["obs"], "time": playing["time"] + 1}
        state = jax.vmap(self.adapter.selected)(after)
        return action, asked, like(playing, going), by_path({**results, "state": state})

    def step_twins(self, playing: Any, going: Any, action: Any, port: dict[str, Any]) -> dict[str, Any]:
        """Returns by path the errors that rounding may cause, which tell the drift of a port from a fault.

        The twins of a state are rounded in each step, one up and one down. Results such as flags may jump if
        they do so for a twin.
        """
        keys = jax.vmap(step_keys)(playing["keys"], playing["time"])[:, 1]
        allowed: dict[str, Any] = dict.fromkeys(port, playing["drift"])
        going["twins"] = []
        for scale, twin in zip((1 - _ROUNDING, 1 + _ROUNDING), playing["twins"], strict=True):
            after, results = advance(self.port, keys, twin, action)
            going["twins"].append(jax.tree.map(partial(_scale, scale), after))
            for path, leaf in by_path(results).items():
                error = jnp.nan_to_num(errors_of(leaf, port[path]), posinf=0.0)  # a twin may leave a domain
                allowed[path] = jnp.maximum(allowed[path], error)
        floats = [allowed[path] for path in port if _is_below(path, "obs") and is_float(port[path])]
        going["drift"] = jnp.stack([playing["drift"], *floats]).max(0)
        # Floats without a tolerance have to be equal.
        return {
            path: error for path, error in allowed.items() if self.tolerance(path) or not is_float(port[path])
        }

    def first_results(self, playing: Any, timestep: Any) -> list[dict[str, Any]]:
        """Returns the observations and states of the last resets of both sides, by path."""
        port = by_path({"obs": playing["obs"], "state": jax.vmap(self.adapter.selected)(playing["state"])})
        original = by_path(self.adapter.observed(timestep.obs["reset"]))
        paths = [path for path in original if path in port and port[path].shape == original[path].shape]
        return [{path: side[path] for path in paths} for side in (port, original)]

    def results_of(self, timestep: Any) -> dict[str, Any]:
        """Returns the original's results by path, named as those of the port."""
        return by_path(
            {
                **self.adapter.observed(timestep.obs),
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
        action, asked, going, port = self.step_port(playing)
        handle, timestep = step(handle, asked)
        original = self.results_of(timestep)
        errors = {path: errors_of(port[path], original[path]) for path in cases}
        allowed = self.step_twins(playing, going, action, port) if self.may_drift else {}
        different = {
            path: error > self.tolerance(path) + allowed.get(path, 0.0) for path, error in errors.items()
        }
        for path, kept in cases.items():
            error = errors[path]
            times = jnp.where(different[path], time, _NEVER)
            better = {
                "worst": (error.argmax(), error.max() > kept["worst"]["error"]),
                "earliest": (times.argmin(), times.min() < kept["earliest"]["step"]),
            }
            for name, (env, replaces) in better.items():
                case = partial(self.case, env, error[env], playing, action, port, original, path)
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
        flips = [(errors[path] > 0) & ~different[path] for path in (*FLAGS, "done") if path in cases]
        drifted = jnp.stack([going["drift"] > _MAX_DRIFT, *flips]).any(0)
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
        self, env: Any, error: Any, playing: Any, action: Any, port: Any, original: Any, path: str
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

    def tolerance(self, path: str) -> float:
        """Returns the tolerance of the longest path that includes this one."""
        longest_first = sorted(self.tolerances, key=len, reverse=True)
        return next((self.tolerances[prefix] for prefix in longest_first if _is_below(path, prefix)), 0.0)

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
_ROUNDING = 16 * 2.0**-23  # relative error of a twin in each step: 16 times the least one of float32
_MAX_DRIFT = 1.6e-3  # error of a twin at which an episode ends


def _scale(scale: float, leaf: jax.Array) -> jax.Array:
    """Adds a rounding error to floats, but not to whole numbers, which may count something."""
    return jnp.where(leaf == jnp.round(leaf), leaf, leaf * scale) if is_float(leaf) else leaf


def _is_below(path: str, prefix: str) -> bool:
    return prefix in ("", path) or path.startswith(f"{prefix}/")


def is_of_reset(port: Port, path: str, case: Case) -> bool:
    """Returns whether the port's obs in a step are those of a reset by a key that it probably used."""
    key = step_keys(jax.random.wrap_key_data(case.key), case.step)[1]
    keys = jnp.stack([key, *jax.random.split(key), *jax.random.split(key, 3)])
    obs = np.asarray(by_path({"obs": jax.vmap(port.reset)(keys)[1]})[path])
    return bool(np.isclose(obs, case.port, equal_nan=True).reshape(len(keys), -1).all(1).any())


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
    is_relative = jnp.issubdtype(dtype, jnp.floating)
    # float32 may not tell large integers apart.
    error = error / jnp.maximum(1, jnp.abs(original)) if is_relative else jnp.maximum(1, error)
    error = jnp.where(equal, 0, jnp.where(jnp.isnan(error), jnp.inf, error)).astype(jnp.float32)
    return error.reshape(len(error), -1).max(1, initial=0)
