"""A page that shows a run, or compares several: `python -m aogpt_jax.report WORKDIR ...`."""
