"""Where the programs and tests of other projects are: in checkouts, which environment variables name.

python tests/conformance/checkouts.py    # says which are missing, and how to get and run them
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from dataclasses import dataclass
from pathlib import Path

PAGES = Path(__file__).resolve().parents[2] / "docs/porting"


@dataclass(frozen=True)
class Checkout:
    """A checkout of another project.

    Attributes:
        repository: its owner and name, on GitHub.
        revision: the commit or tag that the tests are for.
        needs: the distributions that its programs import, as `pip install` takes them; its page has the same.
        file: one of it, to tell that a folder is a checkout.
        page: of docs/porting/, which tells of it, and has the names that it misses in today's JAX.
    """

    repository: str
    revision: str
    needs: str
    file: str
    page: str

    @property
    def name(self) -> str:
        """The repository's, without its owner."""
        return self.repository.partition("/")[2]

    @property
    def variable(self) -> str:
        """The environment variable that names the checkout."""
        return f"JAXVEC_{self.name.upper().replace('-', '_')}"

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
        absent = [need for need in self.needs.split() if not _installed(re.split(r"[=<>]", need)[0])]
        return f"{self.name} needs {', '.join(absent)}: not installed" if absent else ""

    @property
    def install(self) -> str:
        """The line that installs what its programs import."""
        return f"pip install {self.needs}"

    @property
    def recipe(self) -> str:
        """The lines of a shell that get it, and what its programs import."""
        return "\n".join(
            (
                f"git clone https://github.com/{self.repository}",
                f"git -C {self.name} checkout -q {self.revision}",
                self.install,
                f"export {self.variable}=$PWD/{self.name}",
            )
        )

    @property
    def shims(self) -> str:
        """The block of its page that is to be run before its programs."""
        text = (PAGES / self.page).read_text()
        (block,) = re.findall(r"^```python\n(# shims\.py.*?)^```$", text, re.MULTILINE | re.DOTALL)
        return block


CLEANRL = Checkout(
    "vwxyzjn/cleanrl",
    "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb",
    "jax==0.10.2 flax==0.12.8 optax==0.2.8 gym==0.23.1 tyro==1.0.17 ale-py opencv-python-headless",
    "cleanrl/ppo_atari_envpool_xla_jax.py",
    "envpool.md",
)
GYMNASIUM = Checkout(
    "Farama-Foundation/Gymnasium",
    "v1.4.0",
    "gymnasium==1.4.0 moviepy",
    "tests/vector/test_async_vector_env.py",
    "gymnasium.md",
)
PUREJAXQL = Checkout(
    "mttga/purejaxql",
    "47af6d7b35c89ddfe633aaf7341bdb8964cb7cce",
    (
        "jax==0.10.2 flax==0.12.8 optax==0.2.8 gym==0.23.1 gymnax==0.0.9 six hydra-core omegaconf "
        "safetensors wandb ale-py opencv-python-headless"
    ),
    "purejaxql/pqn_atari.py",
    "gymnax.md",
)
PUREJAXRL = Checkout(
    "luchris429/purejaxrl",
    "31756b197773a52db763fdbe6d635e4b46522a73",
    ("jax==0.10.2 flax==0.12.8 optax==0.2.8 gymnax==0.0.9 six distrax==0.1.9 tfp-nightly brax==0.14.2"),
    "purejaxrl/ppo.py",
    "gymnax.md",
)
STABLE_BASELINES3 = Checkout(
    "DLR-RM/stable-baselines3",
    "e05d2dbe6eda0acd0ef2e316e3e4065677add3eb",
    "stable-baselines3",
    "tests/test_vec_envs.py",
    "stable_baselines3.md",
)
STOIX = Checkout(
    "EdanToledo/Stoix",
    "8fff19c94a478c1e1ff75fbf10396d488aa25d70",
    (
        "jax==0.10.2 flax==0.12.8 optax==0.2.8 stoa-env==0.1.2 distrax==0.1.9 tfp-nightly "
        "flashbax==0.1.3 rlax==0.1.9 jumanji==1.1.2 hydra-core colorama tensorboard-logger wandb "
        "pandas"
    ),
    "stoix/utils/make_env.py",
    "gymnax.md",
)
ALL = (CLEANRL, GYMNASIUM, PUREJAXQL, PUREJAXRL, STABLE_BASELINES3, STOIX)


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main() -> None:
    """Prints for each project whether its tests can run, and how to make them."""
    for checkout in ALL:
        print(f"{checkout.repository}: {checkout.missing or f'in {checkout.folder}'}")
        if checkout.missing:
            print("\n".join(f"    {line}" for line in checkout.recipe.splitlines()))
    print("\nThen: python -m pytest tests/conformance")


if __name__ == "__main__":
    main()
