"""The paper's findings tested again at a small size: `python -m aogpt_jax.findings`."""
