"""Workers and whole rollouts on other nodes of a Ray cluster."""
