"""The record that `jaxvec.ports.compare_port` returns: differences per leaf, as a table and as a replay."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

import numpy as np

from jaxvec._ports.samples import SampleResult

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

    def describe(self) -> str:
        """Returns step, env, and the element with the largest error."""
        sides = [np.atleast_1d(side) for side in (self.port, self.original)]
        with np.errstate(invalid="ignore"):  # of infinities
            errors = np.abs(np.subtract(*sides, dtype=float))
        place = np.unravel_index(errors.argmax(), errors.shape)
        element = f", element {[int(index) for index in place]}" if np.ndim(self.port) else ""
        return (
            f"step {self.step} of env {self.env}{element}: port {sides[0][place]}, original {sides[1][place]}"
        )


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
    ones: tuple[int, int] | None = None  # of flags and reward, steps with True or not 0 in port and original
    worst: Case | None = None  # with the largest error; None if all are equal
    earliest: Case | None = None  # with the number `first_step`

    def describe(self) -> str:
        """Returns how often the leaf differs, with two cases."""
        cases = {"earliest": self.earliest, "largest": self.worst}
        texts = [f"{word}: {case.describe()}" for word, case in cases.items() if case is not None]
        return f"{self.different:,} of {self.compared:,} steps; {'; '.join(texts)}"


@dataclass(frozen=True)
class SpaceResult:
    """Texts of a property of the envs on both sides, such as the bounds of observations."""

    port: str
    original: str
    equal: bool  # also True if the port declares none

    def describe(self) -> str:
        """Returns both sides."""
        return f"port {self.port}, original {self.original}"


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
        leaves: Results of steps by path, such as `obs/speed`, or `state/fuel` after a step.
        resets: Results of two-sample tests between resets, such as `reset state/fuel` and `reset obs/speed`,
            the latter also given the states. A difference has a p-value of at most `reset_threshold`.
        reset_threshold: 0.0001, divided by the number of all tests of resets.
        episodes: Number of episodes that were started.
        parted: Number of episodes with a difference.
        parted_after: Mean number of steps until the first difference of these episodes; NaN without any.
        drifted: Number of free-running episodes that ended because rounding errors, which grow by less than a
            difference in each step, had reached 16 tolerances.
        untested: What the steps did not test, as names and reasons: flags that were never True, a reward that
            was always 0, a time limit that no episode reached, actions at or beyond the bounds.
        seconds: Time in s that the compiled program ran.

    Example:
        ```python
        def count(key, steps, action):
            obs = jnp.array([1, steps + 1, steps + 1, action])
            return steps + 1, {"obs": obs, "reward": steps + 1.0, "done": False}

        port = jaxvec.ports.Port(lambda key: (jnp.int32(0), jnp.zeros(4, int)), count)
        original = jaxvec.testing.CountingEnv
        result = jaxvec.ports.compare_port(port, original, mode="free_running", num_envs=2, num_steps=5)
        result.assert_equal(ignore=["obs", "done"])  # done was never True
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
    resets: Mapping[str, SampleResult]
    reset_threshold: float
    episodes: int
    parted: int
    parted_after: float
    drifted: int
    untested: Mapping[str, str]
    seconds: float

    @property
    def differences(self) -> list[str]:
        """Names of the properties, resets and leaves that differ by more than the tolerances."""
        spaces = [name for name, space in self.spaces.items() if not space.equal]
        resets = [name for name, reset in self.resets.items() if reset.p_value <= self.reset_threshold]
        return [*spaces, *resets, *(path for path, leaf in self.leaves.items() if leaf.different)]

    def assert_equal(self, *, ignore: Collection[str] = (), require: Collection[str] = ()) -> None:
        """Raises if there is a difference, and warns of what was not tested.

        Args:
            ignore: Names of accepted differences, as in `differences`, or gaps, as in `untested`.
            require: Names of gaps that are an error, such as `["truncated", "time limit"]`.

        Raises:
            AssertionError: A property, reset or leaf differs, or something required was not tested. The
                message has the earliest and the largest difference of each leaf, and a replay.
        """
        records = {**self.spaces, **self.resets, **self.leaves}
        known = {*records, *self.untested, "autoreset", "time limit", "transitions"}
        names = unexpected(self.differences, known, ignore)
        gaps = [name for name in self.untested if name not in ignore]
        untested = f"not tested: {', '.join(f'{name} ({self.untested[name]})' for name in gaps)}"
        if names:
            lines = [f"{name}: {records[name].describe()}" for name in names[:8]]
            leaves = [name for name in names if name in self.leaves]
            replay = self.replay(leaves[0]) if leaves else ""
            start = f"the port differs from its original in {', '.join(names)}"[:500]
            text = "\n".join([start, f"seed {self.seed}; {untested if gaps else 'all tested'}", *lines])[
                :_MAX_TEXT
            ]
            raise AssertionError(f"{text}\n\n{replay}" if len(text + replay) < _MAX_TEXT else text)
        if {*require} & {*gaps}:
            raise AssertionError(f"all steps are equal, but {untested}"[:_MAX_TEXT])
        if gaps:
            warnings.warn(untested, stacklevel=2)

    def to_dict(self) -> dict[str, Any]:
        """Returns the attributes and the differences as plain objects of Python, for JSON.

        Arrays are lists; NaN and infinities are texts.
        """
        record = {"differences": self.differences, **asdict(self)}
        text = json.dumps(record, default=lambda value: np.asarray(value).tolist())
        return json.loads(text, parse_constant=str)

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
        if self.drifted:
            heading += f", {self.drifted:,} ended as rounding errors had grown"
        gaps = [f"{name} ({reason})" for name, reason in self.untested.items()]
        verdict = (
            f"different: {', '.join(self.differences) or 'none'}; not tested: {', '.join(gaps) or 'none'}"
        )
        properties = [
            (name, space.port, space.original, "" if space.equal else "different")
            for name, space in self.spaces.items()
        ]
        leaves = [_COLUMNS, *(_cells(path, leaf) for path, leaf in self.leaves.items())]
        return "\n\n".join(
            [
                verdict,
                heading,
                table(leaves),
                samples_table(self.resets, self.reset_threshold),
                table([("property", "port", "original", ""), *properties]),
            ]
        )

    def replay(self, leaf: str | None = None) -> str:
        """Returns a few lines of Python that show the largest error of a leaf on both sides.

        The lines use `port`, `original`, `set_state`, `policy` and, for states, `get_state`, as they were
        passed to `compare_port`. Add `select_state`, if one was passed.

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
        if path.split("/")[0] == "state":
            arguments += ", get_state=get_state"
        lines = [
            f"# {path} in step {case.step} of an episode of env {case.env}: "
            f"port {_short(case.port)}, original {_short(case.original)}",
            "import jax, jaxvec, numpy",
            f"results = jaxvec.ports.replay({arguments})",
            f"for side in results: print(side[{path!r}])",
        ]
        return "\n".join(lines)


def unexpected(differences: Collection[str], known: Collection[str], ignore: Collection[str]) -> list[str]:
    """Returns the differences that are not ignored. Refuses names of no variable, which are misspelt."""
    unknown = [name for name in ignore if name not in known and name.split(" ")[-1] not in known]
    if isinstance(ignore, str) or unknown:
        raise ValueError(
            f"ignore: {ignore if isinstance(ignore, str) else unknown} must be a list of names of {[*known]}"[
                :_MAX_TEXT
            ]
        )
    return [name for name in differences if name not in ignore]


_MAX_TEXT = 2900  # characters of an error message

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
    flags = "" if result.ones is None or path == "reward" else "{:,} · {:,}".format(*result.ones)
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


def samples_table(samples: Mapping[str, SampleResult], threshold: float) -> str:
    """Returns the table of two-sample tests."""
    rows = [("variable", "tests", "smallest p", "", "mean of this element in port · original")]
    for name, sample in samples.items():
        verdict = "different" if sample.p_value <= threshold else ""
        pairs = zip(sample.means, sample.errors, strict=True)
        means = " · ".join(f"{mean:.5g} ± {error:.2g}" for mean, error in pairs)
        rows.append((name, str(sample.tests), f"{sample.p_value:.2g}", verdict, means))
    return table(rows)


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Returns a Markdown table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])
