"""The one place that finds out whether MLX can run here.

On Linux the `mlx` wheel has no backend of its own: without one, importing `mlx.core` fails with
the loader's words about a shared library. Engine modules import `mx` from here, before anything
else of MLX, so that whoever starts an engine is told what to install.
"""

import sys

from headrace_replicas.contract.errors import BackendMissingError


def missing_backend(reason: str) -> BackendMissingError:
    """The error that tells how to get a backend.

    Args:
        reason: What failed, in the words of what failed.
    """
    if sys.platform == "darwin":
        remedy = "it needs a Mac with Apple silicon, macOS 14 or later and a native arm64 Python"
    else:
        remedy = (
            "install one of `pip install 'headrace[cpu]'` and, for an NVIDIA GPU, "
            "`pip install 'headrace[cuda13]'` (not both: they own the same library file)"
        )
    return BackendMissingError(
        f"MLX has no backend for this: {reason}. To run an engine, {remedy}."
    )


try:
    import mlx.core as mx
except ImportError as error:
    raise missing_backend(str(error)) from error

__all__ = ["missing_backend", "mx"]
