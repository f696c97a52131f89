"""`python -m jaxvec`: the command line. Workers import from here, so nothing is imported here."""
