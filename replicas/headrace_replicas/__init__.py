"""headrace's replica side: one MLX engine per process, and what crosses its boundary."""
