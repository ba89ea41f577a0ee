"""Generation from trained models; knows models, never the trainer.

`generate` draws texts and `stream_generate` yields them as they grow. Below them, `sample` and `stream` draw tokens along a plan
of `make_plan`, and `decode_logits` gives the logits that they draw from.
"""

from aogpt_jax.sampling.decode import decode_logits
from aogpt_jax.sampling.decode import sample
from aogpt_jax.sampling.decode import stream
from aogpt_jax.sampling.entries import Samples
from aogpt_jax.sampling.filters import Filters
from aogpt_jax.sampling.plan import make_plan
from aogpt_jax.sampling.plan import Plan
from aogpt_jax.sampling.prompts import Prompt
from aogpt_jax.sampling.texts import generate
from aogpt_jax.sampling.texts import stream_generate
from aogpt_jax.sampling.texts import Text

__all__ = ["decode_logits", "Filters", "generate", "make_plan", "Plan", "Prompt", "sample", "Samples", "stream",
           "stream_generate", "Text"]
