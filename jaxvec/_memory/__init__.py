"""The memory that a pool's processes share: what lies where, and how rows get in and out."""
