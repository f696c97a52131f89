"""Where the programs and tests of other projects are: in checkouts, which environment variables name."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Checkout:
    """A checkout of another project.

    Attributes:
        repository: its owner and name, on GitHub.
        revision: the commit or tag with which the tests were last run.
        needs: the distributions that its programs import, as `pip install` takes them.
        file: one of it, to tell that a folder is a checkout.
    """

    repository: str
    revision: str
    needs: tuple[str, ...]
    file: str

    @property
    def variable(self) -> str:
        """The environment variable that names the checkout."""
        return f"JAXVEC_{self.repository.partition('/')[2].upper()}"

    @property
    def folder(self) -> Path | None:
        """Where it is; `None` if nothing says so."""
        named = os.environ.get(self.variable)
        return Path(named) if named else None

    @property
    def missing(self) -> str:
        """Why the tests can't run, and what to do; empty if they can."""
        if self.folder is None:
            return f"{self.variable} names no checkout of https://github.com/{self.repository}"
        if not (self.folder / self.file).is_file():
            return f"{self.variable}: there is no {self.folder / self.file}"
        return ""


PUREJAXQL = Checkout(
    "mttga/purejaxql",
    "47af6d7b35c89ddfe633aaf7341bdb8964cb7cce",
    (
        "gym==0.23.1",
        "gymnax==0.0.9",
        "six",
        "flax",
        "optax",
        "hydra-core",
        "omegaconf",
        "safetensors",
        "wandb",
    ),
    "purejaxql/pqn_atari.py",
)
