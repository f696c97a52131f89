"""Where workers may run beside local processes: hosts that dial in, tasks of Ray, another Python."""
