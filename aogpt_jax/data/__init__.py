"""Text to batches: sources -> tokenizers -> packing -> loader; baselines are the numbers to beat."""
