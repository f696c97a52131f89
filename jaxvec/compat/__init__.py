"""APIs of other libraries over a pool, one module per library, tested with that library's own code."""
