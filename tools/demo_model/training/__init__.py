"""Training and export of the demo model, in PyTorch."""
