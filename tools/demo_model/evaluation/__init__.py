"""Accuracy per skill on held-out prompts: in training, of the exported file, and with MLX."""
