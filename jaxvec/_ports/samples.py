"""Two-sample tests between values of a port and of its original, where each side draws its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special, stats

_MAX_VALUES = 20  # of a variable that is compared by its counts
_MAX_PAIRED = 32  # elements of a condition, and elements that are tested under each
_GROUPS = 8  # of samples in which a condition has similar values
_ALL = slice(None), slice(None)
_MIN_SAMPLES = 8  # of a group on each side
_RESET_ALPHA = 1e-4  # probability that any variable of equal resets is reported as different


@dataclass(frozen=True)
class SampleResult:
    """The tests of a variable: one per element that is not the same constant on both sides."""

    tests: int
    p_value: float  # the smallest; 1 without tests
    element: int  # flat index of the element with this p-value
    means: tuple[float, float]  # of this element in the port and in the original
    errors: tuple[float, float]  # half-widths of the 95 % confidence intervals of these means

    def describe(self) -> str:
        """Returns the p-value and the means on both sides."""
        pairs = zip(self.means, self.errors, strict=True)
        means = " · ".join(f"{mean:.5g} ± {error:.2g}" for mean, error in pairs)
        return f"p {self.p_value:.2g}, means of element {self.element} in port and original {means}"


def compare_resets(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], tolerance: Callable[[str], float]
) -> tuple[dict[str, SampleResult], float]:
    """Tests first observations and initial states, and returns the largest p-value of a difference."""
    paths = [path for path in ours if path in theirs and ours[path].shape == theirs[path].shape]
    states = [[side[path] for path in paths if not path.startswith("obs")] for side in (ours, theirs)]
    results: dict[str, SampleResult] = {}
    for path in paths:
        both = ours[path], theirs[path]
        # An observation of another state than that of the reset can have the right distribution.
        conditions = states if states[0] and path.startswith("obs") else None
        results[f"reset {path}"] = compare_samples(*both, tolerance(path), conditions)
    return results, _RESET_ALPHA / max(1, sum(result.tests for result in results.values()))


def compare_samples(ours: Any, theirs: Any, tolerance: float = 0.0, conditions: Any = None) -> SampleResult:
    """Tests each element of a variable.

    Args:
        ours: The port's samples, `[samples, ...]`.
        theirs: The original's samples.
        tolerance: Distance of values that count as equal; relative for variables with values above 1. Values
            within rounding also count as equal.
        conditions: Further variables of the same samples, as a list for each side. Tests are then also among
            the samples in which one of these has similar values. This finds sides where variables are
            distributed equally, but depend on each other differently.
    """
    sides = [_flat([side]) for side in (ours, theirs)]
    largest = max(float(np.abs(side[np.isfinite(side)]).max(initial=0)) for side in sides)
    # Sums that are rounded in another order are the same value: near zero, float32 values of which larger
    # ones cancelled each other.
    distance = max(2e-7, 2e-6 * largest, tolerance * max(1.0, largest))
    finite = [np.nan_to_num(side, nan=largest + 2, posinf=largest + 1, neginf=-largest - 1) for side in sides]
    varied = np.flatnonzero(np.ptp(np.concatenate(finite), axis=0) > distance)
    groups = [] if conditions is None else [*_groups(*map(_flat, conditions))]
    stride = 1 + len(varied) // _MAX_PAIRED
    p_values = np.ones(sides[0].shape[1])
    for number, element in enumerate(varied):
        columns = [side[:, element] for side in finite]
        masks = [_ALL, *groups] if number % stride == 0 else [_ALL]
        p_values[element] = min(_p_value(columns[0][a], columns[1][b], distance) for a, b in masks)
    for test in (np.isnan, np.isposinf, np.isneginf):
        p_values[test(sides[0]).any(0) != test(sides[1]).any(0)] = 0
    least = int(p_values.argmin()) if p_values.size else 0
    chosen = [side[:, least] if p_values.size else np.zeros(1) for side in sides]
    with np.errstate(invalid="ignore"):  # of infinities
        means = float(chosen[0].mean()), float(chosen[1].mean())
        errors = [1.96 * float(side.std()) / len(side) ** 0.5 for side in chosen]
    p_value = float(p_values.min(initial=1))
    tests = len(varied) + len(varied[::stride]) * len(groups)
    return SampleResult(tests, p_value, least, means, (errors[0], errors[1]))


def _flat(variables: Any) -> Any:
    """Returns several variables as one, `[samples, elements]`."""
    arrays = [np.asarray(each, np.float64) for each in variables]
    return np.concatenate([array.reshape(len(array), -1) for array in arrays], axis=1)


def _groups(ours: Any, theirs: Any) -> Iterator[tuple[Any, Any]]:
    """Yields masks of the samples on both sides in which an element has similar values."""
    both = np.concatenate([ours, theirs])
    varied = np.flatnonzero((both != both[0]).any(0))
    for element in varied[:: 1 + len(varied) // _MAX_PAIRED]:
        starts = np.unique(np.quantile(both[:, element], np.arange(_GROUPS) / _GROUPS))
        labels = [np.searchsorted(starts, side[:, element], side="right") for side in (ours, theirs)]
        for label in range(1, len(starts) + 1):
            masks = labels[0] == label, labels[1] == label
            if min(mask.sum() for mask in masks) >= _MIN_SAMPLES:
                yield masks


def _p_value(ours: Any, theirs: Any, distance: float) -> float:
    """Tests a variable with few values by their counts, and others by the Kolmogorov-Smirnov test."""
    both = np.sort(np.concatenate([ours, theirs]))
    starts = both[np.concatenate([[True], np.diff(both) > distance])]
    labels = [np.searchsorted(starts, side, side="right") - 1 for side in (both, ours, theirs)]
    if len(starts) > _MAX_VALUES or (both - starts[labels[0]]).max() > 2 * distance:
        return _kolmogorov_smirnov(np.sort(ours), np.sort(theirs), distance)
    counts = np.array([np.bincount(side, minlength=len(starts)) for side in labels[1:]])
    rare = counts.sum(0) < 10  # the test needs about 5 expected samples of each value
    counts = np.column_stack([counts[:, ~rare], counts[:, rare].sum(1)])
    counts = counts[:, counts.sum(0) > 0]
    tests: Any = stats
    return float(tests.chi2_contingency(counts).pvalue) if counts.shape[1] > 1 else 1.0


def _kolmogorov_smirnov(ours: Any, theirs: Any, distance: float) -> float:
    """Returns the p-value for sorted values that may be off by `distance`."""

    def excess(values: Any, others: Any) -> float:
        shares = np.searchsorted(others, values + distance, side="right") / len(others)
        return float((np.arange(1, len(values) + 1) / len(values) - shares).max())

    largest = max(excess(ours, theirs), excess(theirs, ours), 0.0)
    number = len(ours) * len(theirs) / (len(ours) + len(theirs))
    return float(special.kolmogorov(largest * number**0.5))
