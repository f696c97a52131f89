"""`Adapter`: what the adapters have in common."""

from __future__ import annotations

from typing import Any

import gymnasium


class Adapter(gymnasium.Env[Any, Any]):
    """Is a Gymnasium env with an env of another kind inside, whose public attributes are its own too.

    Abstract: subclasses set `adapted` first, then the spaces, and step it.

    Attributes:
        adapted: the env inside.
    """

    adapted: Any

    def close(self) -> None:
        """Closes the env inside."""
        self.adapted.close()

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Sets an attribute of the env inside, unless it is one of the adapter's."""
        if name in vars(self):
            return super().set_wrapper_attr(name, value, force=force)
        if force or hasattr(self.adapted, name):
            setattr(self.adapted, name, value)
            return True
        return False

    def __getattr__(self, name: str) -> Any:
        # RequestName for `adapted` itself, there is no env inside yet.
        if name == "adapted" or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.adapted, name)
