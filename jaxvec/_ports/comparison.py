"""The record that `jaxvec.ports.compare_port` returns: differences per leaf, as a table and as a replay."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np

Mode = Literal["one_step", "free_running"]


@dataclass(frozen=True)
class Case:
    """The step with the largest error of a leaf."""

    step: int  # number in its episode, from 1
    env: int
    key: Any  # uint32 data of the episode's key, from which the keys of its reset and steps derive
    state: dict[str, Any]  # the port's state before the step, from path to array
    action: Any
    port: Any  # value of the leaf in the port
    original: Any


@dataclass(frozen=True)
class LeafResult:
    """How often a leaf of the results was different, in steps of single envs.

    Errors of floats are absolute for values of the original up to 1 in magnitude, and relative above.
    """

    compared: int
    different: int  # steps with an error above the tolerance
    at_ends: int  # of these, steps that end an episode of the port
    unequal: int  # steps with any error
    tolerance: float
    max_error: float
    first_step: int | None = None  # smallest number in an episode of a different step
    ones: tuple[int, int] | None = None  # of flags, steps with True in the port and in the original
    worst: Case | None = None  # None if all are equal


@dataclass(frozen=True)
class SpaceResult:
    """Texts of a property of the envs on both sides, such as the bounds of observations."""

    port: str
    original: str
    equal: bool  # also True if the port declares none


@final
@dataclass(frozen=True)
class Comparison:
    """The differences between a port and its original. Printing it shows a table.

    Attributes:
        mode: `"one_step"` or `"free_running"`.
        set_to_states: Whether the original was set to states of the port. Otherwise, its episodes start from
            its own resets, with seeds that derive from the port's keys.
        seed: Seed of the comparison.
        num_envs: Number of envs.
        num_steps: Number of steps of each env.
        spaces: Results by property.
        leaves: Results by path, such as `obs/speed`.
        episodes: Number of episodes that were started.
        parted: Number of episodes with a difference.
        parted_after: Mean number of steps until the first difference of these episodes; NaN without any.
        seconds: Time in s that the compiled program ran.

    Example:
        ```python
        def count(key, steps, action):
            obs = jnp.array([1, steps + 1, steps + 1, action])
            return steps + 1, {"obs": obs, "reward": steps + 1.0, "done": False}

        port = jaxvec.ports.Port(lambda key: (jnp.int32(0), jnp.zeros(4, int)), count)
        original = jaxvec.testing.CountingEnv
        result = jaxvec.ports.compare_port(port, original, mode="free_running", num_envs=2, num_steps=5)
        result.assert_equal(ignore=["obs"])
        print(result.leaves["reward"].different)  # 0
        ```
    """

    mode: Mode
    set_to_states: bool
    seed: int
    num_envs: int
    num_steps: int
    spaces: Mapping[str, SpaceResult]
    leaves: Mapping[str, LeafResult]
    episodes: int
    parted: int
    parted_after: float
    seconds: float

    @property
    def differences(self) -> list[str]:
        """Names of the properties and paths of the leaves that differ by more than the tolerances."""
        spaces = [name for name, space in self.spaces.items() if not space.equal]
        return [*spaces, *(path for path, leaf in self.leaves.items() if leaf.different)]

    def assert_equal(self, *, ignore: Collection[str] = ()) -> None:
        """Raises if there is a difference.

        Args:
            ignore: Names of accepted differences, as in `differences`.

        Raises:
            AssertionError: A property or a leaf differs. The message has the table, and a replay of the first
                leaf that differs.
        """
        if names := [name for name in self.differences if name not in ignore]:
            leaves = [name for name in names if name in self.leaves]
            replay = f"\n\n{self.replay(leaves[0])}" if leaves else ""
            raise AssertionError(f"the port differs from its original in {', '.join(names)}\n{self}{replay}")

    def __str__(self) -> str:
        start = "set to the port's state before each step"
        if self.mode == "free_running":
            start = "set to the port's state when an episode starts"
        if not self.set_to_states:
            start = "not set to states of the port: each episode starts from its own reset"
        parted = f"{self.parted:,} of {self.episodes:,} episodes differ"
        if self.parted:
            parted += f", first after {self.parted_after:.1f} steps on average"
        steps = f"{self.num_envs * self.num_steps:,} steps in {self.seconds:.3g} s"
        heading = f"{steps} ({self.num_envs} envs, seed {self.seed}), original {start}; {parted}"
        properties = [
            (name, space.port, space.original, "" if space.equal else "different")
            for name, space in self.spaces.items()
        ]
        leaves = [_COLUMNS, *(_cells(path, leaf) for path, leaf in self.leaves.items())]
        return "\n\n".join(
            [heading, table(leaves), table([("property", "port", "original", ""), *properties])]
        )

    def replay(self, leaf: str | None = None) -> str:
        """Returns a few lines of Python that show the largest error of a leaf on both sides.

        The lines use `port`, `original`, `set_state` and `policy`, as they were passed to `compare_port`. Add
        `select_state`, if one was passed.

        Args:
            leaf: Path of the leaf; by default, the first one that differs.

        Raises:
            ValueError: All values of the leaf are equal.
        """
        unequal = [path for path, leaf in self.leaves.items() if leaf.worst is not None]
        different = [path for path in unequal if self.leaves[path].different]
        path = leaf if leaf is not None else next(iter(different or unequal), None)
        if path not in unequal:
            raise ValueError(f"{path or 'leaf'}: all values are equal, so there is nothing to replay")
        case: Any = self.leaves[path].worst
        set_state = "set_state" if self.set_to_states else "None"
        key = f"key=jax.random.wrap_key_data({_code(case.key)})"
        arguments = f"port, original, {set_state}, policy, step={case.step}, {key}"
        if self.mode == "one_step":
            arguments += f", state={_code(case.state)}, action={_code(case.action)}"
        lines = [
            f"# {path} in step {case.step} of an episode of env {case.env}: "
            f"port {_short(case.port)}, original {_short(case.original)}",
            "import jax, jaxvec, numpy",
            f"results = jaxvec.ports.replay({arguments})",
            f"for side in results: print(side[{path!r}])",
        ]
        return "\n".join(lines)


_COLUMNS = (
    "leaf",
    "equal",
    "within tolerance",
    "largest error",
    "tolerance",
    "first step",
    "True in port · original",
)


def _cells(path: str, result: LeafResult) -> tuple[str, ...]:
    shares = [
        _share(result.compared - count, result.compared) for count in (result.unequal, result.different)
    ]
    first = "" if result.first_step is None else str(result.first_step)
    if result.different and result.at_ends == result.different:
        first += ", only ends"
    flags = "" if result.ones is None else "{:,} · {:,}".format(*result.ones)
    return path, *shares, f"{result.max_error:.3g}", f"{result.tolerance:.3g}", first, flags


def _share(part: int, total: int) -> str:
    """Returns a percentage that is 100 % only if `part` is `total`."""
    if part == total:
        return "100 %"
    digits = max(2, len(str(total)) - 2)
    return f"{100 * part / max(total, 1):.{digits}f} %"


def _short(value: Any) -> str:
    return np.array2string(np.asarray(value), threshold=16, separator=", ").replace("\n", "")


def _code(value: Any) -> str:
    """Returns an expression for a pytree of arrays, with full precision."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_code(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + "".join(f"{_code(item)}, " for item in value) + ")"
    array = np.asarray(value)
    values = repr(array.tolist()).replace("nan", "numpy.nan").replace("inf", "numpy.inf")
    return f"numpy.array({values}, {array.dtype.name!r})"


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Returns a Markdown table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])
