"""HTTP: the only package of the project that imports FastAPI."""
