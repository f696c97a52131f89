"""What is compiled, where it was built: ordinary steps, the rows that they write, and states of envs."""

from __future__ import annotations

__all__ = ["compiled", "reason_unavailable"]

try:
    import jaxvec._stepper.compiled as compiled  # pyright: ignore[reportMissingModuleSource]
except ModuleNotFoundError:
    compiled = None
    reason_unavailable: str | None = (
        "it was not built; install jaxvec where there are a C++17 compiler and Python's headers"
    )
except ImportError as error:
    compiled = None
    reason_unavailable = f"it can't be loaded: {error}"
else:
    reason_unavailable = None
