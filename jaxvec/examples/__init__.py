"""Programs to read and to run: `python -m jaxvec.examples.ppo`."""
