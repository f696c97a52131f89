"""The envs of one worker or of this process, and their steps."""
