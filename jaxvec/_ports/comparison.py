"""The records that comparisons return: differences by name, as a table, as plain objects and as a replay."""

from __future__ import annotations

import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

import numpy as np

Mode = Literal["one_step", "free_running"]


@dataclass(frozen=True)
class Case:
    """A step in which a leaf differs."""

    step: int  # number in its episode, from 1
    env: int
    key: Any  # uint32 data of the episode's key, from which the keys of its reset and steps derive
    state: dict[str, Any]  # the port's state before the step, from path to array
    action: Any
    port: Any  # value of the leaf in the port
    original: Any
    error: float

    def __str__(self) -> str:
        sides = [np.nan_to_num(np.ravel(side) * 1.0, nan=1e30) for side in (self.port, self.original)]
        element = int(np.abs(sides[0] - sides[1]).argmax())
        port, original = (np.ravel(side)[element] for side in (self.port, self.original))
        return f"step {self.step} of env {self.env}, element {element}: port {port}, original {original}"


@dataclass(frozen=True)
class LeafResult:
    """How often a leaf of the results was different, in steps of single envs.

    Errors of floats are absolute for values of the original up to 1 in magnitude, and relative above.
    """

    equal: bool  # whether no error was above the tolerance
    compared: int
    different: int  # steps with an error above the tolerance
    at_ends: int  # of these, steps that end an episode of the port
    unequal: int  # steps with any error
    tolerance: float
    max_error: float
    first_step: int | None = None  # smallest number in an episode of a different step
    ones: tuple[int, ...] | None = None  # of flags and reward, steps with another value than 0 on both sides
    worst: Case | None = None  # with the largest error; None if all are equal
    earliest: Case | None = None  # with the number `first_step`

    def __str__(self) -> str:
        counts = f"{self.unequal:,} of {self.compared:,} steps unequal, {self.different:,} by more than"
        parts = {"not 0 in": self.ones, "earliest:": self.earliest, "largest:": self.worst}
        texts = [f"{word} {part}" for word, part in parts.items() if part is not None]
        ends = ", only ends" if 0 < self.different == self.at_ends else ""
        return "; ".join([f"{counts} {self.tolerance:g}{ends}", *texts])


@dataclass(frozen=True)
class SpaceResult:
    """Texts of a property of the envs on both sides, such as the bounds of observations."""

    port: str
    original: str
    equal: bool  # also True if the port declares none

    def __str__(self) -> str:
        return f"{self.port} · {self.original}"


@dataclass(frozen=True)
class SampleResult:
    """The tests of a variable: one per element that is not the same constant on both sides."""

    tests: int
    p_value: float  # the smallest; 1 without tests
    element: int  # flat index of the element with this p-value
    means: tuple[float, float]  # of this element in the port and in the original
    errors: tuple[float, float]  # half-widths of the 95 % confidence intervals of these means
    equal: bool = True  # whether the p-value is above the threshold

    def __str__(self) -> str:
        means = " · ".join(map("{:.5g} ± {:.2g}".format, self.means, self.errors))
        return f"p {self.p_value:.2g} in {self.tests} tests, least in element {self.element}: {means}"


@dataclass(frozen=True, kw_only=True)
class Verdict(ABC):
    """The differences by name, and what was tested: the base of the results of all comparisons."""

    heading: str
    seed: int
    coverage: Mapping[str, str]

    @property
    @abstractmethod
    def records(self) -> Mapping[str, Any]:
        """Results by name."""

    @property
    def differences(self) -> list[str]:
        """Names of the results that differ."""
        return [name for name, record in self.records.items() if not record.equal]

    @property
    def untested(self) -> dict[str, str]:
        """Names of what was not tested, with the reasons."""
        return {name: reason for name, reason in self.coverage.items() if reason}

    def assert_equal(self, *, ignore: Collection[str] = (), require: Collection[str] = ()) -> None:
        """Raises if there is a difference, and warns of what was not tested.

        Args:
            ignore: Names of accepted differences, as in `differences`, or of gaps, as in `untested`.
            require: Names in `coverage` of what must have been tested, such as `["truncated", "time limit"]`.

        Raises:
            AssertionError: A result differs, or something required was not tested. The message has the
                earliest and the largest difference of each leaf.
            ValueError: A name is unknown.
        """
        results = {*self.records, *self.coverage}
        for argument, names, words in (("ignore", ignore, results), ("require", require, {*self.coverage})):
            # A leaf also has differences such as "shape of obs".
            known = words | {
                f"{kind} {word}" for kind in ("shape of", "dtype of", "result") for word in words
            }
            if isinstance(names, str) or not {*names} <= known:
                raise ValueError(
                    f"{argument} must be a list of names, not {names!r}; the names are {sorted(words)}"[
                        :_MAX_TEXT
                    ]
                )
        different = [name for name in self.differences if name not in ignore]
        gaps = [name for name in self.untested if name not in ignore]
        untested = f"not tested: {', '.join(f'{name} ({self.untested[name]})' for name in gaps) or 'nothing'}"
        if different:
            lines = [
                f"the port differs from its original in {', '.join(different)}",
                f"seed {self.seed}; {untested}",
                *(f"{name}: {self.records[name]}" for name in different[:4]),
            ]
            raise AssertionError("\n".join(line[:_MAX_TEXT] for line in lines))
        if {*require} & {*gaps}:
            raise AssertionError(f"no difference was found, but {untested}"[:_MAX_TEXT])
        if gaps:
            warnings.warn(untested, stacklevel=2)

    def __str__(self) -> str:
        gaps = ", ".join(f"{name} ({reason})" for name, reason in self.untested.items())
        verdict = f"different: {', '.join(self.differences) or 'nothing'}; not tested: {gaps or 'nothing'}"
        lines = [
            f"{name:36}  {'equal    ' if record.equal else 'DIFFERENT'}  {record}"
            for name, record in self.records.items()
        ]
        return "\n".join([verdict, self.heading, "", *lines])

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as plain objects of Python, for JSON. NaN and infinities are texts."""
        text = json.dumps(
            {"differences": self.differences, "untested": self.untested, **asdict(self)},
            default=lambda value: np.asarray(value).tolist(),
        )
        return json.loads(text, parse_constant=str)


@final
@dataclass(frozen=True, kw_only=True)
class Comparison(Verdict):
    """The differences between a port and its original. Printing it shows a table.

    Attributes:
        mode: `"one_step"` or `"free_running"`.
        set_to_states: Whether the original was set to states of the port. Otherwise, its episodes start from
            its own resets, with seeds that derive from the port's keys.
        arguments: Names of further arguments that were passed, such as `set_state`, for replays.
        heading: Summary of what was played.
        seed: Seed of the comparison.
        num_envs: Number of envs.
        num_steps: Number of steps of each env.
        spaces: Results by property.
        leaves: Results of steps by path, such as `obs/speed`, or `state/fuel` after a step.
        resets: Results of two-sample tests between resets, such as `reset obs/speed` and `reset state/fuel`.
        coverage: What a comparison should test, from name to the reason why it did not, `""` if it did: flags
            that are True, rewards other than 0, the time limit, all actions, and resets.
        episodes: Number of episodes that were started.
        parted: Number of episodes with a difference.
        parted_after: Mean number of steps until the first difference of these episodes; NaN without any.
        drifted: Number of free-running episodes that ended since rounding errors had grown too large.

    Example:
        ```python
        def count(key, steps, action):
            obs = jnp.array([1, steps + 1, steps + 1, action])
            return steps + 1, {"obs": obs, "reward": steps + 1.0, "done": False}

        port = jaxvec.ports.Port(lambda key: (jnp.int32(0), jnp.zeros(4, int)), count)
        original = jaxvec.testing.CountingEnv
        result = jaxvec.ports.compare_port(port, original, mode="free_running", num_envs=2, num_steps=5)
        result.assert_equal(ignore=["obs", *result.untested])
        print(result.untested["done"])  # always 0
        ```
    """

    mode: Mode
    set_to_states: bool
    arguments: list[str]
    num_envs: int
    num_steps: int
    spaces: Mapping[str, SpaceResult]
    leaves: Mapping[str, LeafResult]
    resets: Mapping[str, SampleResult]
    episodes: int
    parted: int
    parted_after: float
    drifted: int

    @property
    def records(self) -> dict[str, Any]:
        """Results by name: leaves, resets and properties."""
        return {**self.leaves, **self.resets, **self.spaces}

    def replay(self, leaf: str | None = None) -> str:
        """Returns a few lines of Python that play the episode with the largest error of a leaf again.

        They print its values on both sides. They use `port`, `original` and the `arguments`, such as
        `set_state`, by these names.

        Args:
            leaf: Path of the leaf; by default, the first one that differs.

        Raises:
            ValueError: All values of the leaf are equal.
        """
        unequal = [path for path, leaf in self.leaves.items() if leaf.worst is not None]
        path = leaf or min(unequal, key=lambda path: self.leaves[path].equal, default=None)
        if path not in unequal:
            raise ValueError(f"{path or 'leaf'}: all values are equal, so there is nothing to replay")
        case: Any = self.leaves[path].worst
        options = {
            "mode": self.mode,
            "num_envs": self.num_envs,
            "num_steps": int(case.step),
            "tolerances": {path: leaf.tolerance for path, leaf in self.leaves.items() if leaf.tolerance},
            "episode": case.key.tolist(),
        }
        texts = [f"{name}={name}" for name in self.arguments]
        texts += [f"{name}={value!r}" for name, value in options.items()]
        return (
            f"# {path} in {case}\n"
            "import jaxvec\n"
            f"result = jaxvec.ports.compare_port(port, original, {', '.join(texts)})\n"
            f"case = result.leaves[{path!r}].worst\n"
            "print(case.port, case.original, sep='\\n')"
        )


_MAX_TEXT = 500  # characters of a part of an error message
