"""The memory that the processes of a pool share: its layout, its rows, and page-locking."""
