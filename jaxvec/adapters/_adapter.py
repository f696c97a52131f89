"""The base class of the adapters."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import gymnasium


class Adapter(gymnasium.Env[Any, Any]):
    """A Gymnasium env around an env of another kind, with the inner env's public attributes. Abstract.

    Subclasses set `adapted` first, then the spaces.

    Attributes:
        adapted: The inner env.
    """

    adapted: Any

    def close(self) -> None:
        self.adapted.close()

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Sets an attribute of the inner env, unless the adapter has it."""
        if name in vars(self):
            return super().set_wrapper_attr(name, value, force=force)
        if force or hasattr(self.adapted, name):
            setattr(self.adapted, name, value)
            return True
        return False

    def _optional(self, name: str, kind: type) -> Any:
        """Returns an attribute of the inner env, or `None` if it has none of this type; dotted names work.

        It asks the object, because wrappers forward names by `__getattr__`. An env may raise any exception
        there, or answer every name with a stub.
        """
        try:
            value = attrgetter(name)(self.adapted)
        except Exception:
            return None
        return value if isinstance(value, kind) else None

    def __getattr__(self, name: str) -> Any:
        # Before `adapted` is set, looking it up below would call this method again without end.
        if name == "adapted" or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.adapted, name)
