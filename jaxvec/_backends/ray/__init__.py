"""WorkerGroup on other nodes of a Ray cluster."""
