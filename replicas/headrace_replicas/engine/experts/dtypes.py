"""Element types of expert tensors: safetensors' names, MLX's types, and what numpy can hold."""

from collections.abc import Mapping
from typing import Final

from headrace_replicas.engine.backend import mx

DTYPES: Final[Mapping[str, mx.Dtype]] = {
    "BF16": mx.bfloat16,
    "F16": mx.float16,
    "F32": mx.float32,
    "I32": mx.int32,
    "U8": mx.uint8,
    "U16": mx.uint16,
    "U32": mx.uint32,
}
"""safetensors' names of the types that expert tensors come in."""

# The buffer of a bfloat16 array has a format that numpy and memoryview refuse, so that arrays are
# looked at as unsigned integers of the same size; both share one buffer.
CONTAINERS: Final[Mapping[int, mx.Dtype]] = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}
"""Bytes per element -> the unsigned integer of that size."""


def name_of(dtype: mx.Dtype) -> str | None:
    """How safetensors spells a type, or None when expert tensors do not come in it."""
    return next((name for name, known in DTYPES.items() if known == dtype), None)
