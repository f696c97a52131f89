"""Who may touch a slot now: between processes the hand-off, between threads the engine."""
