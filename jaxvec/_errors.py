"""Every error that jaxvec raises: who failed, and whether the pool survives it."""

from __future__ import annotations

from typing import Any

__all__ = [
    "ActionError",
    "ActorDiedError",
    "EnvAttributeError",
    "EnvDataError",
    "EnvError",
    "EnvIdError",
    "EnvStateError",
    "EnvTimeoutError",
    "InFlightError",
    "JaxvecError",
    "NotPicklableError",
    "NotReadyError",
    "PoolBrokenError",
    "PoolClosedError",
    "ResetNeededError",
    "RolloutError",
    "SpaceMismatchError",
    "StaleHandleError",
    "StaleStateError",
    "StateFileError",
    "UnsupportedSpaceError",
    "WorkerDiedError",
]


class JaxvecError(Exception):
    """Base of all errors that jaxvec raises on purpose.

    Attributes:
        others: what failed at the same time, where several envs or workers did: an error of each.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 2) as envs:
            try:
                envs.step([0, 1])
            except jaxvec.JaxvecError as error:  # whatever it is
                print(type(error).__name__)  # ResetNeededError
        ```
    """

    others: tuple[JaxvecError, ...] = ()

    def __reduce__(self) -> Any:
        # Programs run in others' processes, too, such as trials of Ray's Tune, and their errors travel: by
        # default `__init__` would be called with `args`, which is not all that it takes.
        return _make_again, (type(self), self.args, self.__dict__)


def _make_again(kind: type[JaxvecError], args: tuple[Any, ...], attributes: dict[str, Any]) -> JaxvecError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


# --- the caller's mistakes: nothing was stepped, the pool stays usable -----------------------


class UnsupportedSpaceError(JaxvecError, TypeError):
    """A space has a leaf that cannot become a fixed-shape array; names the leaf's path.

    Example:
        ```python
        class Talker(gymnasium.Env):
            observation_space = gymnasium.spaces.Text(10)
            action_space = gymnasium.spaces.Discrete(2)

        try:
            jaxvec.make(Talker, 2)
        except jaxvec.UnsupportedSpaceError as error:
            print(error)  # obs…
        ```
    """


class SpaceMismatchError(JaxvecError, ValueError):
    """Envs of one pool have different spaces; names the env.

    Example:
        ```python
        try:
            jaxvec.make([lambda: gymnasium.make("CartPole-v1"), lambda: gymnasium.make("Pendulum-v1")])
        except jaxvec.SpaceMismatchError as error:
            print(error)  # env 1…
        ```
    """


class ActionError(JaxvecError, ValueError):
    """An action has the wrong structure, shape or dtype; names the leaf.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 2) as envs:
            envs.reset(seed=0)
            try:
                envs.step([0, 1, 1])
            except jaxvec.ActionError as error:
                print(error)  # action: expected int32 of shape (2,), env axis first; got int64 of shape (3,)
        ```
    """


class ResetNeededError(JaxvecError, RuntimeError):
    """An env was stepped before its first reset or, without autoreset, after its episode's end.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 2) as envs:
            try:
                envs.step([0, 1])
            except jaxvec.ResetNeededError:
                envs.reset(seed=0)
            print(envs.step([0, 1]).reward)  # [1. 1.]
        ```
    """


class EnvIdError(JaxvecError, ValueError):
    """A call names an env twice, an env that the pool does not have, or a part of a batched env.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 2) as envs:
            try:
                envs.call("has_wrapper_attr", "gravity", indices=[0, 0])
            except jaxvec.EnvIdError as error:
                print(error)  # indices: env 0 is named twice
        ```
    """


class NotPicklableError(JaxvecError, TypeError):
    """A function, value or option that is for the envs can't be pickled, and so not sent to their workers.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 2) as envs:
            numbers = (number for number in range(10))  # a generator can't be pickled
            try:
                envs.set_attr("numbers", numbers)
            except jaxvec.NotPicklableError:
                envs.set_attr("numbers", [list(numbers)] * 2)
        ```
    """


class InFlightError(JaxvecError, RuntimeError):
    """A call names an env that was sent and not received yet, or `recv` needs more such envs.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 2) as envs:
            envs.reset(seed=0)
            envs.send([0, 1])
            try:
                envs.send([0, 1])
            except jaxvec.InFlightError:
                print(envs.recv().reward)  # [1. 1.]
        ```
    """


class NotReadyError(JaxvecError, TimeoutError):
    """A caller's own `timeout` passed; the envs are still pending, and can be waited for again.

    Example:
        ```python
        import os
        import time

        class Patient(jaxvec.testing.CountingEnv):
            def step(self, action):
                while not os.path.exists("go.txt"):
                    time.sleep(0.01)
                return super().step(action)

        with jaxvec.make(Patient, 2) as envs:
            envs.reset(seed=0)
            envs.send([5, 6])
            try:
                envs.recv(timeout=0.1)
            except jaxvec.NotReadyError:
                open("go.txt", "w").close()
            print(envs.recv().reward)  # [1. 1.]
        ```
    """


class StaleHandleError(JaxvecError, ValueError):
    """A handle was used twice, after a step on the host, or with a foreign pool.

    Example:
        ```python
        try:
            with jaxvec.make("CartPole-v1", 2) as envs:
                handle, timestep = jaxvec.reset(envs, seed=0)
                envs.step([0, 1])  # on the host, so the handle is stale
                jax.block_until_ready(jaxvec.step(handle, jnp.array([0, 1])))
        except jaxvec.StaleHandleError as error:
            print(type(error).__name__)  # StaleHandleError
        ```
    """


class StaleStateError(JaxvecError, ValueError):
    """A saved state is gone: newer ones took its place, or its pool or worker ended; nothing was done.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 2, states=2) as envs:
            envs.reset(seed=0)
            old = envs.save()
            new = envs.save()  # takes the place of the old ones, as the pool keeps two
            try:
                envs.restore(old)
            except jaxvec.StaleStateError:
                print(envs.restore(new).obs.shape)  # (2, 4)
        ```
    """


class StateFileError(JaxvecError, ValueError):
    """A file or an array holds no saved states, damaged ones, or those of other envs; names it.

    Example:
        ```python
        with open("notes.txt", "w") as file:
            file.write("no states")

        with jaxvec.make("CartPole-v1", 2, states=10) as envs:
            try:
                envs.load_states("notes.txt")
            except jaxvec.StateFileError as error:
                print(error)  # …notes.txt…
        ```
    """


class PoolClosedError(JaxvecError, RuntimeError):
    """The pool was closed, or its `VectorEnv` was garbage collected.

    Example:
        ```python
        envs = jaxvec.make("CartPole-v1", 2)
        envs.close()
        try:
            envs.reset(seed=0)
        except jaxvec.PoolClosedError:
            envs = jaxvec.make("CartPole-v1", 2)
        envs.close()
        ```
    """


# --- failures of envs and workers: in `make`, `reset` and `step` they break the pool ----------


class EnvError(JaxvecError, RuntimeError):
    """An env's own code raised an exception.

    `__cause__` is the original exception wherever that could be pickled and built again.

    Attributes:
        env_id: index of the env in the pool.
        worker: index of the worker process, `None` for the serial backend.
        operation: `"constructor"`, `"reset"`, `"step"`, `"close"` or the name of the method called; for
            `"worker_init"`, `env_id` is the worker's first env.
        action: `repr` of the action that the env was given, shortened; `None` outside `step`.
        remote_traceback: the traceback's text as the worker saw it.

    Example:
        ```python
        class Fragile(jaxvec.testing.CountingEnv):
            def step(self, action):
                return 1 // 0

        with jaxvec.make(Fragile, 2, num_workers=1) as envs:
            envs.reset(seed=0)
            try:
                envs.step([5, 6])
            except jaxvec.EnvError as error:
                print(error.env_id, error.operation, error.action)  # 0 step np.int64(5)
        ```
    """

    def __init__(
        self,
        message: str,
        *,
        env_id: int,
        worker: int | None,
        operation: str,
        action: str | None = None,
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.env_id = env_id
        self.worker = worker
        self.operation = operation
        self.action = action
        self.remote_traceback = remote_traceback


class EnvDataError(EnvError):
    """An env returned data of the wrong structure, shape or dtype; names env and leaf.

    Example:
        ```python
        class Wrong(jaxvec.testing.CountingEnv):
            def step(self, action):
                return np.zeros(3), 0.0, False, False, {}

        with jaxvec.make(Wrong, 2, num_workers=1) as envs:
            envs.reset(seed=0)
            try:
                envs.step([5, 6])
            except jaxvec.EnvDataError as error:
                print(error)  # env 0…obs…
        ```
    """


class EnvAttributeError(EnvError, AttributeError):
    """An env has no attribute of the name that was asked for, or it can't be set.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 2) as envs:
            try:
                envs.get_attr("friction")
            except jaxvec.EnvAttributeError:
                print(envs.get_attr("gravity"))  # (9.8, 9.8)
        ```
    """


class EnvStateError(JaxvecError, RuntimeError):
    """The state of an env can't be saved, or is not put back as it was; says what to do.

    Attributes:
        env_id: index of the env in the pool; `None` where no env is named.
        worker: index of its worker process, `None` for the serial backend.

    Example:
        ```python
        import os

        class Lines(jaxvec.testing.CountingEnv):
            def __init__(self):
                super().__init__()
                self.lines = iter(open(os.devnull))  # an open file is no state that can be copied

        with jaxvec.make(Lines, 1, states=10) as envs:
            envs.reset(seed=0)
            try:
                envs.save()
            except jaxvec.EnvStateError as error:
                print(error)  # …the state of Lines can't be taken: of Lines.lines, it is an open file…
        ```
    """

    def __init__(self, message: str, *, env_id: int | None = None, worker: int | None = None) -> None:
        super().__init__(message)
        self.env_id = env_id
        self.worker = worker


class WorkerDiedError(JaxvecError, RuntimeError):
    """A worker process ended by itself.

    Attributes:
        worker: index of the worker process.
        env_ids: the envs that it held.
        exitcode: its exit code, negative for a signal's number; `None` if it could not be read.

    Example:
        ```python
        import os

        class Crash(jaxvec.testing.CountingEnv):
            def step(self, action):
                os._exit(3)

        with jaxvec.make(Crash, 2, num_workers=1) as envs:
            envs.reset(seed=0)
            try:
                envs.step([5, 6])
            except jaxvec.WorkerDiedError as error:
                print(error.worker, error.env_ids, error.exitcode)  # 0 (0, 1) 3
        ```
    """

    def __init__(self, message: str, *, worker: int, env_ids: tuple[int, ...], exitcode: int | None) -> None:
        super().__init__(message)
        self.worker = worker
        self.env_ids = env_ids
        self.exitcode = exitcode


class EnvTimeoutError(JaxvecError, TimeoutError):
    """Envs did not finish in time.

    Attributes:
        env_ids: the late workers' envs that were running, or waiting behind a running one, when time was up.

    Example:
        ```python
        import time

        class Hang(jaxvec.testing.CountingEnv):
            def step(self, action):
                time.sleep(3600)

        with jaxvec.make(Hang, 2, num_workers=1, timeouts=jaxvec.Timeouts(step=0.1)) as envs:
            envs.reset(seed=0)
            try:
                envs.step([5, 6])
            except jaxvec.EnvTimeoutError as error:
                print(error.env_ids)  # (0, 1)
        ```
    """

    def __init__(self, message: str, *, env_ids: tuple[int, ...]) -> None:
        super().__init__(message)
        self.env_ids = env_ids


class PoolBrokenError(JaxvecError, RuntimeError):
    """The pool failed earlier; `__cause__` is the first failure. Close the pool and make another.

    Example:
        ```python
        import contextlib

        class Fragile(jaxvec.testing.CountingEnv):
            def step(self, action):
                return 1 // 0

        with jaxvec.make(Fragile, 2) as envs:
            envs.reset(seed=0)
            with contextlib.suppress(jaxvec.EnvError):
                envs.step([5, 6])
            try:
                envs.step([5, 6])
            except jaxvec.PoolBrokenError as error:
                print(type(error.__cause__).__name__)  # EnvError
        ```
    """


# --- failures of actors that make rollouts: they break the `Rollouts` -------------------------


class RolloutError(JaxvecError, RuntimeError):
    """The rollout of an actor raised an exception, or its envs did, or `make` in it.

    `__cause__` is the original exception wherever that could be pickled and built again.

    Attributes:
        actor: index of the actor.
        node: where it is, in words.
        remote_traceback: the traceback's text as the actor saw it.

    Example:
        ```python
        def rollout(params, handle, timestep, key):
            raise ValueError("no rollout")

        with jaxvec.Rollouts(rollout, "CartPole-v1", 2, num_actors=1, params=None) as rollouts:
            try:
                rollouts.get()
            except jaxvec.RolloutError as error:
                print(error.actor, type(error.__cause__).__name__)  # 0 ValueError
        ```
    """

    def __init__(self, message: str, *, actor: int, node: str, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.actor = actor
        self.node = node
        self.remote_traceback = remote_traceback


class ActorDiedError(JaxvecError, RuntimeError):
    """An actor that makes rollouts was lost, with its node or alone, or was not ready in time.

    Attributes:
        actor: index of the actor.
        node: where it was, in words.

    Example:
        ```python
        import os

        def rollout(params, handle, timestep, key):
            jax.debug.callback(lambda: os._exit(3))
            return handle, timestep, ()

        with jaxvec.Rollouts(rollout, "CartPole-v1", 2, num_actors=1, params=None) as rollouts:
            try:
                rollouts.get()
            except jaxvec.ActorDiedError as error:
                print(error.actor)  # 0
        ```
    """

    def __init__(self, message: str, *, actor: int, node: str) -> None:
        super().__init__(message)
        self.actor = actor
        self.node = node
