"""Any-Order GPT as Masked Diffusion Model (arXiv 2506.19935) in JAX."""

from aogpt_jax.models import build_model
from aogpt_jax.training.checkpoints import load_model
from aogpt_jax.training.checkpoints import load_tokenizer

__all__ = ["build_model", "load_model", "load_tokenizer"]
__version__ = "0.1.0"
