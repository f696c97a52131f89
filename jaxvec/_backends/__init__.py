"""Backends with workers on other machines."""

from __future__ import annotations

from jaxvec._workers.backend import Backend


def named(name: str) -> Backend | None:
    """Returns the backend that `make(backend=name)` means, with its default options; `None` if none does."""
    if name != "ray":
        return None
    from jaxvec._backends.ray.backend import Ray

    return Ray()
