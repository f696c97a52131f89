"""WorkerGroup that step the envs of a pool: processes of this machine, or this process."""
