"""What crosses a process: requests, chunks, states, notices, errors, settings and the clock.

Everything here is plain, immutable and picklable. Nothing here imports MLX, Ray or FastAPI.
"""
