"""The workers that step the envs of a pool: processes of this machine or a cluster, or this process."""
