"""Checkpoints in the formats of the PyTorch code and of Hugging Face."""
