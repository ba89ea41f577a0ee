"""Ahead of time: what a run's programs need on devices that are not there; `python -m aogpt_jax.main --mode=aot`."""
