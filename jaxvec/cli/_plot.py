"""The picture of a measurement; for it matplotlib is needed, and nowhere else."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from jaxvec import _util
from jaxvec.cli._command import UsageError
from jaxvec.cli._records import Measurement
from jaxvec.cli._verdict import Verdict

_KINDS = (".png", ".pdf", ".svg")


def reason_unavailable() -> str | None:
    """Says why there can't be plots; `None` if there can."""
    if importlib.util.find_spec("matplotlib") is None:
        return f"matplotlib is not installed: {_util.install_command('demo')}"
    return None


def require(path: Path) -> None:
    """Raises `UsageError` if a plot can't be drawn to `path`."""
    reason = reason_unavailable()
    if reason is not None:
        raise UsageError(f"--plot: {reason}")
    if path.suffix not in _KINDS:
        raise UsageError(f"--plot: {path} should end in one of {', '.join(_KINDS)}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot: there is no folder {path.parent}")


def draw(found: Measurement, verdict: Verdict, path: Path) -> None:
    """Draws rates over worker counts, and what a step is made of."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    rates, step = figure.subplots(1, 2, width_ratios=[3, 1])
    for number, num_envs in enumerate(dict.fromkeys(sample.num_envs for sample in found.samples)):
        mine = [sample for sample in found.samples if sample.num_envs == num_envs]
        workers = [sample.num_workers for sample in mine]
        colour = f"C{number}"
        rates.plot(workers, [s.scan for s in mine], "o-", color=colour, label=f"{num_envs} envs, lax.scan")
        rates.plot(workers, [s.host for s in mine], "s--", color=colour, label=f"{num_envs} envs, envs.step")
    rates.axhline(found.bare.all, color="grey", label=f"{found.bare.copies} bare loops")
    rates.axhline(found.bare.one, color="grey", linestyle=":", label="one bare loop")
    rates.set(title=found.env, xlabel="workers", ylabel="env steps a second", ylim=(0, None))
    rates.set_xticks(sorted({sample.num_workers for sample in found.samples}))
    rates.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    bottom = 0.0
    for name, us in verdict.parts.items():
        step.bar([0], [us], bottom=bottom, label=name)
        bottom += us
    pool = found.breakdown
    step.set(
        title=f"a step of {pool.num_envs} envs\non {pool.num_workers} workers",
        ylabel="us",
        xlim=(-0.5, 1.5),
        xticks=[],
    )
    step.legend(fontsize="small", loc="center right")
    figure.savefig(path, dpi=120)
