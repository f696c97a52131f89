"""Other libraries' faces over a pool: thin, and each tested with that library's own code."""
