"""Subsystems beside the core: `SliceExtension` is their door in a worker, `PoolExtension` in the program."""
