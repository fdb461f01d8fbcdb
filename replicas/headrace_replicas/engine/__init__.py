"""The inference engine: the only package of the project that imports MLX."""
