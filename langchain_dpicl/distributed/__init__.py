"""Independent jobs on other processes or machines: executors, workers, Ray. Private records travel only inside jobs."""
