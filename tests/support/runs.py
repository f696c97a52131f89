"""Functions that read the files of training programs."""

import pickletools
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp


def _load(folder, item):
    with ocp.CheckpointManager((Path(folder) / "checkpoints").absolute()) as manager:
        args = ocp.args.Composite(**{item: ocp.args.StandardRestore()})
        return manager.restore(None, args=args)[item]


def load_params(folder):
    """Returns the newest parameters of a run folder, without knowing their structure."""
    return _load(folder, "params")


def load_state(folder):
    """Returns the env steps, the packed envs and the leaves by name of the newest checkpoint."""
    return _load(folder, "state")


def assert_same_params(one, other):
    jax.tree.map(np.testing.assert_array_equal, load_params(one), load_params(other))


def assert_same_leaves(one, other):
    """Compares the saved states of two runs bit by bit, except for those of the envs."""
    states = [load_state(folder) for folder in (one, other)]
    assert states[0]["env_steps"] == states[1]["env_steps"]
    jax.tree.map(np.testing.assert_array_equal, *(state["leaves"] for state in states))


def assert_same_state(one, other):
    """Compares the saved states of two runs bit by bit, except for which equal strings are one object."""
    assert_same_leaves(one, other)
    envs = [load_state(folder)["envs"] for folder in (one, other)]
    envs = [b"" if each is None else each.tobytes() for each in envs]
    if envs[0] != envs[1]:
        pickles = [data[data.index(b"\x80\x05\x95") :] for data in envs]
        assert _operations(pickles[0]) == _operations(pickles[1])


def _operations(data):
    """Returns the operations of a pickle, and of those inside it, with strings in place of their numbers."""
    found, memo = [], []
    for operation, argument, _ in pickletools.genops(data):
        name, entry = operation.name, (operation.name, argument)
        if name == "FRAME":
            continue
        if name == "MEMOIZE":
            memo.append(found[-1] if found[-1][0] == "string" else ("earlier", len(found) - 1))
            continue
        if "UNICODE" in name:
            entry = "string", argument
        elif "BINBYTES" in name and argument.startswith(b"\x80\x05\x95"):
            entry = "pickle", _operations(argument)
        elif name in ("BINGET", "LONG_BINGET"):
            entry = memo[argument]
        found.append(entry)
    return found
