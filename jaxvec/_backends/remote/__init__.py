"""Workers on other machines: hosts of workers that dial in to a pool, and the link to each of them."""
