"""Tests of the engine on MLX's CPU device."""
