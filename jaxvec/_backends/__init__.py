"""Who does a pool's work: worker processes, which are started, watched and replaced; or this process."""
