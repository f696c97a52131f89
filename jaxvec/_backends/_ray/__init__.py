"""Worker processes on the nodes of a Ray cluster, in the care of actors."""
