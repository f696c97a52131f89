"""Snapshots of the object graphs that envs consist of."""
