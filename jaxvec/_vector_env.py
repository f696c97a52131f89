"""`VectorEnv`, the pool that `jaxvec.make` returns, with methods for Python loops.

Each method checks its arguments, and calls the `Pool` of `_pool/pool.py`, which JAX programs use, too.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import wraps
from pathlib import Path
from typing import Any, Self, TypeVar, cast, final

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from jaxvec import _arguments, _extension, _results
from jaxvec._engine.move import Caller, Move, Verb
from jaxvec._envs.constructors import Description
from jaxvec._errors import JaxvecError
from jaxvec._leaves import limit
from jaxvec._memory.segment import CopyToDevice, copies, placed, views
from jaxvec._pool.pool import Pool
from jaxvec._results import EnvState, TimeStep
from jaxvec._settings import check_count
from jaxvec._spec import PoolSpec
from jaxvec._stats import Stats
from jaxvec._util import run_in_thread

_NUM_CHECKED = 10  # calls of a pool that look for a program: a check of each would cost a step 1 µs
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _on_host(method: _Method) -> _Method:
    """Makes an error of a method leave out jaxvec's own frames, and explains traced arguments."""
    name = method.__name__
    inside = Verb[name.upper()].traits.in_program if name.upper() in Verb.__members__ else ""
    advice = f"Inside jit, write: {inside}" if inside else "Call it outside jit"

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._unchecked and inside:
            self._unchecked -= 1
            primitive: Any = sys.modules.get("jaxvec.callbacks._primitive")  # only if the program has JAX
            if primitive is not None and primitive.in_program() and not _is_traced((args, kwargs)):
                raise TypeError(
                    f"VectorEnv.{name} was called while JAX traces a program. It would run now, once, and "
                    f"not when the program runs. {advice}"
                )
        try:
            return method(self, *args, **kwargs)
        except (JaxvecError, TypeError, ValueError) as error:
            if _is_traced((args, kwargs)):
                raise TypeError(
                    f"VectorEnv.{name} got a traced array: this method runs in Python, once, while JAX "
                    f"traces the program, and needs numbers. {advice}"
                ) from None
            if isinstance(error, JaxvecError):
                error.with_traceback(None)
            raise

    return cast("_Method", call)


def _is_traced(values: Any) -> bool:
    """Returns True if arguments contain a traced array of JAX, which this module does not import."""
    jax: Any = sys.modules.get("jax")
    return jax is not None and any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


@final
class VectorEnv:
    """A pool of envs that are stepped together.

    Create it with `jaxvec.make`. It is closed by `close()`, by `with`, or when garbage-collected. Its methods
    are for Python loops on NumPy; the functions of the same names, such as `jaxvec.step`, are for JAX. Both
    step the same envs: a step by a method makes the handles of the functions stale.

    Attributes:
        num_envs: Number of envs.
        num_workers: Number of worker processes.
        batch_size: Number of envs that `recv` returns.
        single_observation_space: Observation space of one env; if bounds differ, those that include all.
        single_action_space: Action space of one env.
        observation_space: Observation space of all envs, as Gymnasium batches spaces.
        action_space: Action space of all envs, batched likewise.
        reward_space: Reward space of one env, `None` for a scalar reward.
        autoreset_mode: The pool's `AutoresetMode`.
        metadata: Metadata of env 0.
        render_mode: Render mode of env 0.
        spec: Shapes and dtypes of the pool's data.
        transport: Transport of compiled programs to the pool.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 2) as envs:
            timestep = envs.reset(seed=0)
            for _ in range(10):
                timestep = envs.step(envs.action_space.sample())
            print(timestep.obs.shape, envs.single_observation_space.shape)  # (2, 4) (4,)
        ```
    """

    def __init__(
        self,
        pool: Pool,
        description: Description,
        *,
        slices: tuple[tuple[int, int], ...],
        transport: str,
        place: CopyToDevice | None,
    ) -> None:
        spaces = deepcopy(description.spaces)  # the program may change its own
        self._pool = pool
        self._placed = None if place is None else placed(place)
        self._deliver = self._placed or copies
        self._slices = slices
        self._unchecked = _NUM_CHECKED
        self.spec: PoolSpec = pool.spec
        self.num_envs: int = pool.spec.num_envs
        self.batch_size: int = pool.spec.batch_size
        self.num_workers: int = len(slices)
        self.single_observation_space: Space[Any] = limit(spaces.observation, pool.spec.obs)
        self.single_action_space: Space[Any] = limit(spaces.action, pool.spec.action)
        self.observation_space: Space[Any] = batch_space(self.single_observation_space, self.num_envs)
        self.action_space: Space[Any] = batch_space(self.single_action_space, self.num_envs)
        self.reward_space: Space[Any] | None = spaces.reward
        self.autoreset_mode: AutoresetMode = pool.spec.autoreset.as_gymnasium
        self.metadata: dict[str, Any] = {**description.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode: str | None = description.render_mode
        self.transport = transport
        # Closes the pool at garbage collection or at the interpreter's exit. Must not refer to `self`.
        weakref.finalize(self, pool.finalizer.close)

    @property
    def closed(self) -> bool:
        """True after `close`.

        Example:
            ```python
            envs = jaxvec.make("CartPole-v1", 2)
            envs.close()
            print(envs.closed)  # True
            ```
        """
        return self._pool.closed

    @_on_host
    def reset(self, *, seed: Any = None, mask: Any = None, options: Any = None) -> TimeStep[NDArray[Any]]:
        """Resets all envs, or those of `mask`, with the arguments and errors of `jaxvec.reset`.

        `seed` may also be a list with an int or `None` per env, but not a JAX key.

        Returns:
            The time step, which later calls don't overwrite. Its arrays are NumPy arrays, or JAX arrays if
            the pool was made with a `device`.

        Example:
            ```python
            with jaxvec.make("CartPole-v1", 2) as envs:
                envs.reset(seed=0)
                envs.step([0, 1])
                timestep = envs.reset(mask=[True, False], options={"low": -0.01, "high": 0.01})
                print(timestep.info["episode_length"])  # [0 1]
            ```
        """
        seeds = _arguments.expand_seeds(seed, self.num_envs)
        mask = _arguments.check_mask(mask, self.num_envs)
        move = self._pool.move_all(Verb.RESET, Caller.HOST)
        rows = self._pool.reset(move, seeds=seeds, mask=mask, options=options, deliver=self._deliver)
        return self.spec.build_timestep(rows)

    @_on_host
    def step(self, action: Any, *, reset_options: Any = None) -> TimeStep[NDArray[Any]]:
        """Steps every env once, with the arguments and errors of `jaxvec.step`.

        A list with one dict per env may replace a dict of arrays.

        Example:
            ```python
            with jaxvec.make("CartPole-v1", 2) as envs:
                envs.reset(seed=0)
                obs, reward, terminated, truncated, info = envs.step(np.array([0, 1]))
                print(obs.shape, reward)  # (2, 4) [1. 1.]
            ```
        """
        actions = _arguments.check_action(self.spec, action, self.num_envs)
        actions += _arguments.check_options(self.spec, reset_options, self.num_envs)
        rows = self._pool.step(self._pool.move_all(Verb.STEP, Caller.HOST), actions, deliver=self._deliver)
        return self.spec.build_timestep(rows)

    @_on_host
    def send(self, action: Any, env_id: Any = None, *, reset_options: Any = None) -> None:
        """Starts a step of some envs, with the arguments and errors of `jaxvec.send`. Any thread may call it.

        Example:
            ```python
            with jaxvec.make("CartPole-v1", 4, batch_size=2) as envs:
                timestep = envs.reset(seed=0)  # the two envs that are ready first
                envs.send([0, 1], timestep.info["env_id"])
                print(envs.recv().obs.shape)  # (2, 4)
            ```
        """
        slots = _arguments.check_env_id(env_id, self.num_envs)
        batch: dict[str, Any] = {"num_envs": len(slots), "name_row": lambda row: f"env {slots[row]}"}
        actions = _arguments.check_action(self.spec, action, **batch)
        actions += _arguments.check_options(self.spec, reset_options, **batch)
        self._pool.send(self._pool.move_all(Verb.SEND, Caller.HOST), slots, actions)

    @_on_host
    def reset_async(self, *, seed: Any = None, mask: Any = None, options: Any = None) -> None:
        """Starts a `reset` without waiting for it; `recv` returns the results and raises the envs' errors.

        Example:
            ```python
            with jaxvec.make("CartPole-v1", 2) as envs:
                envs.reset_async(seed=0)
                # … other work, while the envs reset
                print(envs.recv().obs.shape)  # (2, 4)
            ```
        """
        seeds = _arguments.expand_seeds(seed, self.num_envs)
        mask = _arguments.check_mask(mask, self.num_envs)
        move = self._pool.move_all(Verb.RESET, Caller.HOST)
        self._pool.reset_async(move, seeds=seeds, mask=mask, options=options)

    @_on_host
    def recv(
        self, *, timeout: float | None = None, copy: bool = True, at_least: int | None = None
    ) -> TimeStep[NDArray[Any]]:
        """Waits for pending envs, like `jaxvec.recv`. Any thread may call it.

        Args:
            timeout: Seconds after which `NotReadyError` is raised, or `None`. The envs stay pending.
            copy: `False` returns read-only views into shared memory if the envs are evenly spaced, such as
                all envs. The views are valid until their envs are sent. JAX arrays are always copies.
            at_least: Number of envs to wait for in place of `batch_size`. Then all ready envs are returned,
                in the order of `recv_order`. Batched envs are received all at once.

        Raises:
            ValueError: `at_least` is not from 1 to `num_envs`.
            JaxvecError: `NotReadyError`, or an error of `jaxvec.recv`.

        Example:
            ```python
            with jaxvec.make("CartPole-v1", 4, batch_size=2, recv_order="sent") as envs:
                print(envs.reset(seed=0).info["env_id"])  # [0 2]
                print(envs.recv(timeout=60).info["env_id"])  # [1 3]
            ```
        """
        if at_least is not None:
            at_least = check_count("at_least", at_least, 1, self.num_envs)
        # With `device`, results are copied there in any case.
        deliver = self._deliver if copy else self._placed or views
        move = self._pool.move_all(Verb.RECV, Caller.HOST)
        rows = self._pool.recv(move, deliver=deliver, timeout=timeout, at_least=at_least)
        return self.spec.build_timestep(rows)

    @_on_host
    def save(self, *, indices: Any = None) -> EnvState:
        """Saves and returns the states `[k]` of all envs, or of those of `indices`; see `jaxvec.save`.

        Example:
            ```python
            with jaxvec.make("CartPole-v1", 2, states=10) as envs:
                before = envs.reset(seed=0)
                state = envs.save()
                envs.step([0, 1])
                print((envs.restore(state).obs == before.obs).all())  # True
            ```
        """
        slots = _arguments.check_indices(indices, self.num_envs)
        return EnvState(*self._pool.perform(Move(Verb.SAVE, slots), []))

    @_on_host
    def restore(self, state: EnvState, *, indices: Any = None, mask: Any = None) -> TimeStep[NDArray[Any]]:
        """Restores all envs, or those of `indices`, to the states `[k]`; see `jaxvec.restore`.

        With `mask`, bool `[k]`, the others of these envs stay as they are.

        Example:
            ```python
            with jaxvec.make("CartPole-v1", 2, states=10) as envs:
                envs.reset(seed=0)
                state = envs.save(indices=[0])
                timestep = envs.restore(state, indices=[1])  # env 1 continues from env 0's state
                print(timestep.obs.shape, timestep.info["env_id"])  # (1, 4) [1]
            ```
        """
        slots = _arguments.check_indices(indices, self.num_envs)
        ids = _results.check_states(state, len(slots))
        mask = np.ones(len(slots), np.bool_) if mask is None else _arguments.check_mask(mask, len(slots))
        move = Move(Verb.RESTORE, slots, caller=Caller.HOST)
        return self.spec.build_timestep(self._pool.perform(move, [ids, mask], self._deliver))

    @_on_host
    def simulate(self, state: EnvState, action: Any) -> tuple[EnvState, TimeStep[NDArray[Any]]]:
        """Steps copies of envs from the states `[n]` with actions `[n, ...]`; see `jaxvec.simulate`.

        Example:
            ```python
            with jaxvec.make("CartPole-v1", 2, states=10) as envs:
                envs.reset(seed=0)
                state = envs.save(indices=[0])
                after, timestep = envs.simulate(state[[0, 0]], [0, 1])  # both actions, from one state
                print(timestep.obs[0, 1] < timestep.obs[1, 1])  # True
            ```
        """
        ids = _results.check_states(state)
        actions = _arguments.check_action(self.spec, action, len(ids), name_row="state {}".format)
        move = Move(Verb.SIMULATE, self._pool.all)
        ids, *rows = self._pool.perform(move, [ids, *actions], self._deliver)
        return EnvState(ids), self.spec.build_timestep(rows)

    def save_states(self, path: str | Path, state: EnvState | None = None) -> None:
        """Writes the states `[n]`, by default the current ones of all envs, to a file for `load_states`.

        The file is replaced atomically, even if the process is killed.

        Raises:
            EnvStateError: A state can't be saved or pickled.
            OSError: The file can't be written.

        Example:
            ```python
            with jaxvec.make("CartPole-v1", 2, states=10) as envs:
                envs.reset(seed=0)
                envs.save_states("cartpole.states")

            with jaxvec.make("CartPole-v1", 2, states=10) as envs:  # perhaps another day
                timestep = envs.restore(envs.load_states("cartpole.states"))
                print(timestep.obs.shape)  # (2, 4)
            ```
        """
        self._pack_states(state, Path(path))

    def load_states(self, path: str | Path) -> EnvState:
        """Reads the states in a file of `save_states`, for envs of this pool.

        The pool must have the same kind of envs; the numbers of envs and workers may differ. Load only files
        that you trust: they contain pickles, which can run any code when loaded.

        Raises:
            StateFileError: The file is damaged, is not a file of `save_states`, or has states of other envs.
            ValueError: The pool keeps fewer states than the file has.
            OSError: The file can't be read.

        Example:
            ```python
            with jaxvec.make("CartPole-v1", 2, states=10) as envs:
                envs.reset(seed=0)
                envs.save_states("cartpole.states")
                state = envs.load_states("cartpole.states")
                print(len(state.ids))  # 2
            ```
        """
        return self.unpack_states(Path(path))

    def pack_states(self, state: EnvState | None = None) -> NDArray[np.uint8]:
        """Returns states as an array of bytes, for checkpoints such as Orbax's; see `save_states`.

        Example:
            ```python
            with jaxvec.make("CartPole-v1", 2, states=10) as envs:
                envs.reset(seed=0)
                checkpoint = {"step": 1000, "envs": envs.pack_states()}
                print(checkpoint["envs"].dtype)  # uint8
            ```
        """
        return self._pack_states(state, None)

    def unpack_states(self, data: Any) -> EnvState:
        """Returns the states in an array of `pack_states`; see `load_states`.

        Example:
            ```python
            with jaxvec.make("CartPole-v1", 2, states=10) as envs:
                envs.reset(seed=0)
                packed = envs.pack_states()
                envs.step([0, 1])
                timestep = envs.restore(envs.unpack_states(packed))
                print(timestep.info["episode_length"])  # [0 0]
            ```
        """
        return EnvState(*self._pool.perform(Move(Verb.UNPACK_STATES, self._pool.all), [data]))

    def stats(self) -> Stats:
        """Returns counters and times of each worker, and their totals, unless the pool is closed.

        Example:
            ```python
            with jaxvec.make("CartPole-v1", 2) as envs:
                envs.reset(seed=0)
                envs.step([0, 1])
                print(envs.stats().total.steps)  # 2
            ```
        """
        return self._pool.stats()

    @_on_host
    def infos(self, indices: Any = None) -> tuple[dict[str, Any], ...]:
        """Returns the raw info dict of each env's last reset or step.

        If same-step autoreset has started a new episode, it is the info of the reset, with the last step's
        info under `final_info`, as in Gymnasium. Only infos that are not empty are fetched from the workers.

        Args:
            indices: Index of an env or a list of indices; negative ones count from the end; `None` for all.

        Raises:
            EnvIdError: An index is duplicated or out of range.

        Example:
            ```python
            with jaxvec.make(jaxvec.testing.CountingEnv, 2, episode_length=1) as envs:
                envs.reset(seed=0)
                timestep = envs.step([5, 6])
                print(envs.infos([1])[0]["final_info"])  # {'steps': 1}
            ```
        """
        slots = self._pool.all if indices is None else _arguments.check_indices(indices, self.num_envs)
        return tuple(self._pool.env_calls.infos(slots))

    @_on_host
    def call(self, name: str, *args: Any, indices: Any = None, **kwargs: Any) -> tuple[Any, ...]:
        """Calls a method of every env or its wrappers, or reads an attribute.

        Args:
            name: Name of the method. A dotted name, such as `"simulator.pause"`, also works.
            *args: Positional arguments of each call. Each env gets its own copy.
            indices: Envs to call, as in `infos`.
            **kwargs: Keyword arguments of each call; copied, too.

        Returns:
            One result per env, in the order of `indices`.

        Raises:
            EnvAttributeError, EnvError: An env has no such attribute, or raised. The pool stays usable.
            EnvIdError: An index is duplicated or out of range.
            NotPicklableError: An argument can't be sent to the workers. Nothing was called.

        Example:
            ```python
            with jaxvec.make("Pendulum-v1", 2) as envs:
                print(envs.call("has_wrapper_attr", "g", indices=[0]))  # (True,)
            ```
        """
        return self._call(name, args, kwargs, indices)

    @_on_host
    def call_async(
        self, name: str, *args: Any, indices: Any = None, **kwargs: Any
    ) -> Future[tuple[Any, ...]]:
        """Starts a `call` without waiting for it, and returns a future of its result.

        Later calls and steps of the same workers wait until this call is done.

        Example:
            ```python
            with jaxvec.make("Pendulum-v1", 2) as envs:
                future = envs.call_async("has_wrapper_attr", "g")
                print(future.result(timeout=60))  # (True, True)
            ```
        """
        return run_in_thread(lambda on_started: self._call(name, args, kwargs, indices, on_started))

    @_on_host
    def map(self, fn: Callable[..., Any], *args: Any, indices: Any = None) -> tuple[Any, ...]:
        """Runs `fn(env, *args)` on each env with its wrappers, inside its worker.

        The function is sent to the workers by cloudpickle, so lambdas and closures work; with
        `backend="serial"` it runs in this process. It may read and change the env, but must not step or reset
        it. A batched env is passed once, as a `gymnasium.vector.VectorEnv`; a result with one entry per env
        is split.

        Returns:
            One result per env, in the order of `indices`.

        Raises:
            EnvError: The function raised; `env_id` is the index of the env. The pool stays usable.
            EnvIdError, NotPicklableError: As in `call`.

        Example:
            ```python
            with jaxvec.make("Pendulum-v1", 2) as envs:
                envs.map(lambda env, g: setattr(env.unwrapped, "g", g), 9.81)
                print(envs.map(lambda env: env.unwrapped.g))  # (9.81, 9.81)
            ```
        """
        if not callable(fn):
            raise TypeError(f"fn must be a function that takes an env, not {fn!r}")
        return tuple(self._pool.env_calls.map(_arguments.check_indices(indices, self.num_envs), fn, args))

    @_on_host
    def get_attr(self, name: str, *, indices: Any = None) -> tuple[Any, ...]:
        """Returns an attribute of each env, in the order of `indices`. Raises the errors of `call`.

        As in Gymnasium's vector envs, a callable attribute is called, and its result returned.

        Example:
            ```python
            with jaxvec.make("Pendulum-v1", 2, env_configs=[{"g": 9.81}, {"g": 1.62}]) as envs:
                print(envs.get_attr("g"))  # (9.81, 1.62)
            ```
        """
        return self._call(name, (), {}, indices, verb=Verb.GET_ATTR)

    @_on_host
    def set_attr(self, name: str, values: Any, *, indices: Any = None) -> None:
        """Sets an attribute of each env, in the outermost wrapper that has it or in the env.

        A new attribute is set on the outermost wrapper, as by Gymnasium's `set_wrapper_attr`. To set it
        elsewhere, use `envs.map(lambda env: setattr(env.unwrapped, name, value))`.

        Args:
            name: Name of the attribute.
            values: One value, of which each env gets a copy, or a list or tuple with one value per env. To
                set a list as the value, pass `[[1, 2]] * envs.num_envs`.
            indices: Envs, as in `infos`.

        Raises:
            ValueError: The list does not have one value per env.
            JaxvecError: `EnvAttributeError` if the attribute can't be set, or any error of `call`.

        Example:
            ```python
            with jaxvec.make("Pendulum-v1", 2) as envs:
                envs.set_attr("g", [9.81, 1.62])
                print(envs.get_attr("g"))  # (9.81, 1.62)
            ```
        """
        _arguments.check_name(name)
        slots = _arguments.check_indices(indices, self.num_envs)
        of_envs: Sequence[Any] = values if isinstance(values, (list, tuple)) else [values] * len(slots)
        if len(of_envs) != len(slots):
            raise ValueError(
                f"set_attr: got {len(of_envs)} values for {len(slots)} envs; pass one value, or one per env. "
                f"To set the list itself as the value, pass [{values!r}] * {len(slots)}"
            )
        self._pool.env_calls.set_attr(slots, name, of_envs)

    def render(self, *, indices: Any = None) -> Any:
        """Returns each env's frame: an array `[num_envs, H, W, 3]` if all have the same shape, else a tuple.

        Raises:
            ValueError: The envs were made without `render_mode`.
            JaxvecError: Any error of `call`.

        Example:
            ```python
            with jaxvec.make("CartPole-v1", 2, num_workers=1, render_mode="rgb_array") as envs:
                envs.reset(seed=0)
                print(envs.render().shape)  # (2, 400, 600, 3)
                print(envs.render(indices=[1]).shape)  # (1, 400, 600, 3)
            ```
        """
        frames = self.call("render", indices=indices)
        # Not checked before the call: an env without a render_mode may still return frames.
        if self.render_mode is None and all(frame is None for frame in frames):
            raise ValueError(
                "render needs envs with a render_mode; pass one to jaxvec.make, for example "
                'render_mode="rgb_array"'
            )
        alike = len({frame.shape if isinstance(frame, np.ndarray) else None for frame in frames}) == 1
        return np.stack(frames) if alike and isinstance(frames[0], np.ndarray) else frames

    def trace(self, path: str | Path, *, max_events: int = 100_000) -> AbstractContextManager[Path]:
        """Records a timeline of the pool during a `with` block. Open the file at https://ui.perfetto.dev.

        It has one track per worker, with steps, resets, other requests, and waits for the program. It also
        has one track per thread of the program, with its calls of the pool, including those of compiled
        programs. Wait for programs before the block ends: `jax.block_until_ready`. An event costs about 1 µs.
        For JAX's own events, run the block inside `jax.profiler.trace(log_dir)`. `with` yields the path.

        Args:
            path: Path of the file, which is written at the end of the block, even if the block raises. It has
                Chrome's JSON format, with times in µs since the start of the block. `otherData` has the start
                in ns, by the wall clock and the monotonic clock. A name that ends in `.gz` compresses the
                file.
            max_events: Number of the latest events to keep for each worker, and for each transport of
                programs. The file has the number of dropped ones.

        Raises:
            FileNotFoundError, IsADirectoryError: The path can't be written to. The block was not run.
            RuntimeError: The pool is already being traced.
            ValueError: `max_events` is less than 1.
            JaxvecError: The pool is broken or closed. The file then has the earlier events.

        Example:
            ```python
            with jaxvec.make("CartPole-v1", 2) as envs:
                envs.reset(seed=0)
                with envs.trace("envs.json") as path:
                    envs.step([0, 1])
                print(path)  # envs.json
            ```
        """
        return _extension.tracer(self._pool, self._slices, path, max_events)

    def raise_if_failed(self) -> None:
        """Raises the typed error of the last failed program, once, or the error that broke the pool.

        Example:
            ```python
            with jaxvec.make("CartPole-v1", 2) as envs:
                handle, timestep = jaxvec.reset(envs, seed=0)
                envs.step([0, 1])  # makes the handle stale
                try:
                    jax.block_until_ready(jax.jit(jaxvec.step)(handle, jnp.array([0, 1])))
                except jax.errors.JaxRuntimeError:
                    try:
                        envs.raise_if_failed()
                    except jaxvec.StaleHandleError as error:
                        print(type(error).__name__)  # StaleHandleError
            ```
        """
        error = self._pool.state.take_error() or self._pool.state.broken_by
        if error is not None:
            raise error

    def close(self, timeout: float | None = 5) -> None:
        """Closes the envs and ends the workers. May be called more than once.

        A step that another thread waits for is interrupted. So is the `close` of an env that exceeds
        `timeout`; the log names these envs.

        Args:
            timeout: Seconds for the envs' `close`, or `None` for no limit. In a broken pool at most one
                second is allowed. With `backend="serial"` there is no limit.

        It first waits for the programs that this thread has started, unless an exception is being handled.

        Raises:
            ValueError: `timeout` is negative. Nothing was closed.
            JaxvecError: A program that nobody waited for failed because of the pool, which is closed now.

        Example:
            ```python
            envs = jaxvec.make("CartPole-v1", 2)
            try:
                envs.reset(seed=0)
            finally:
                envs.close()
            ```
        """
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout must be at least 0 seconds, or None, not {timeout!r}")
        error = self._unseen_error() if sys.exc_info()[0] is None else None
        self._pool.close(timeout)
        if error is not None:
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Closes the pool. If a program failed because of the pool, raises the typed error, not JAX's."""
        state = self._pool.state
        cause = None
        if kind is None:
            # On a device, JAX may report a failed program only after this block.
            cause = self._unseen_error() or (state.take_error() if state.errors_late else None)
        elif kind.__module__.partition(".")[0] in ("jax", "jaxlib"):
            cause = state.take_error()
        self._pool.close(timeout=5)
        if cause is not None:
            # Shows the frames of the user's program, instead of the pool's frames and JAX's copy of the text.
            raise cause.with_traceback(trace) from cause.__cause__

    def _unseen_error(self) -> BaseException | None:
        """Waits for the programs that this thread has started; returns the pool's error if one has failed.

        With several devices, or on a GPU, the call that starts a program returns before the program ends. So
        the error may also be one that the caller has met and caught. Others are not in JAX's tokens.
        """
        jax: Any = sys.modules.get("jax")
        if jax is not None and not self.closed:
            try:
                jax.effects_barrier()
            except RuntimeError:  # of JAX, which has only the text of the error
                error = self._pool.state.take_error()
                # Other devices may have met the broken pool after the error that broke it.
                return error and (self._pool.state.broken_by or error)
        return None

    def __repr__(self) -> str:
        state = "closed" if self.closed else "broken" if self._pool.state.broken_by else "open"
        return (
            f"VectorEnv(num_envs={self.num_envs}, num_workers={self.num_workers}, "
            f"autoreset_mode={self.autoreset_mode.name}, {state})"
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            "a VectorEnv can't be pickled: it owns processes and memory; call jaxvec.make where it is needed"
        )

    def _pack_states(self, state: EnvState | None, path: Path | None) -> NDArray[np.uint8]:
        states = _results.check_states(self.save() if state is None else state)
        (data,) = self._pool.perform(Move(Verb.PACK_STATES, self._pool.all), [states, path])
        return data

    def _call(
        self, name: str, args: Any, kwargs: Any, indices: Any, on_started: Any = None, verb: Verb = Verb.CALL
    ) -> tuple[Any, ...]:
        _arguments.check_name(name)
        slots = _arguments.check_indices(indices, self.num_envs)
        of_envs = [args] * len(slots)
        return tuple(
            self._pool.env_calls.call(Move(verb, slots), name, of_envs, kwargs, on_started=on_started)
        )


def pool_of(envs: VectorEnv) -> Pool:
    """Returns the pool of a `VectorEnv`, for jaxvec's own modules."""
    return envs._pool  # pyright: ignore[reportPrivateUsage]
