"""Other libraries' faces over a pool, each in its own module."""
