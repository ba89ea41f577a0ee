"""Training: the optimiser, the jitted step, checkpoints, metrics and the loop around them."""
