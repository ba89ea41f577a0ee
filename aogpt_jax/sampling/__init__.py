"""Generation from trained models; knows models, never the trainer."""
