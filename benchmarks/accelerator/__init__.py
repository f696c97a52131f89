"""All that is to be known of jaxvec on a GPU, in ten minutes: `python -m benchmarks.accelerator`."""
