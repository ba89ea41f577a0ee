"""Evaluation of trained models; knows models and data, never the trainer."""
