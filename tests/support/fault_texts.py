"""Texts of real faults, as MLX, Metal and dying processes wrote them in public reports."""

from headrace_replicas.contract.faults import FaultKind

_MLX = "[METAL] Command buffer execution failed: "

FAULT_TEXTS: tuple[tuple[str, FaultKind], ...] = (
    (
        _MLX + "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout).",
        FaultKind.TIMEOUT,
    ),
    (
        _MLX + "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)",
        FaultKind.TIMEOUT,
    ),
    (
        "libc++abi: terminating due to uncaught exception of type std::runtime_error: "
        + _MLX
        + "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)",
        FaultKind.TIMEOUT,
    ),
    ("Execution of the command buffer was aborted (IOAF code 2)", FaultKind.TIMEOUT),
    (
        "Caused GPU Timeout Error (IOAF code 2)\nkIOAccelCommandBufferCallbackErrorTimeout",
        FaultKind.TIMEOUT,
    ),
    (
        _MLX + "Impacting Interactivity "
        "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity).",
        FaultKind.IMPACTING_INTERACTIVITY,
    ),
    (_MLX + "Internal Error (0000000e:Internal Error)", FaultKind.IMPACTING_INTERACTIVITY),
    (
        _MLX + "Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang).",
        FaultKind.HANG,
    ),
    (
        _MLX + "Ignored (for causing prior/excessive GPU errors) "
        "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored).",
        FaultKind.SUBMISSIONS_IGNORED,
    ),
    (
        _MLX + "Discarded (victim of GPU error/recovery) "
        "(00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim).",
        FaultKind.INNOCENT_VICTIM,
    ),
    (
        _MLX + "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory).",
        FaultKind.OUT_OF_MEMORY,
    ),
    (
        _MLX + "Invalid Resource (00000009:kIOGPUCommandBufferCallbackErrorInvalidResource).",
        FaultKind.INVALID_RESOURCE,
    ),
    (
        _MLX + "Caused GPU Address Fault Error "
        "(0000000b:kIOGPUCommandBufferCallbackErrorPageFault).",
        FaultKind.PAGE_FAULT,
    ),
    (_MLX + "Something New (0000010c:kIOGPUSomethingNew).", FaultKind.UNKNOWN_METAL),
    (_MLX + "kIOGPUCommandBufferCallbackErrorBrandNew", FaultKind.UNKNOWN_METAL),
    ("[METAL] something went wrong", FaultKind.UNKNOWN_METAL),
    ("[metal::malloc] Resource limit (499000) exceeded.", FaultKind.RESOURCE_LIMIT),
    (
        (
            "[metal::malloc] Attempting to allocate 18433048576 bytes which is greater than the "
            "maximum allowed buffer size of 14318764032 bytes."
        ),
        FaultKind.RESOURCE_LIMIT,
    ),
    ("[malloc] Unable to allocate 4294967296 bytes.", FaultKind.RESOURCE_LIMIT),
    ("EngineFaultError: non-finite logits at output position 12", FaultKind.NOT_FINITE),
    ("KeyError: 'model.layers.3'", FaultKind.OTHER),
    ("the request took too long: timeout", FaultKind.OTHER),
    ("cannot listen on port 8000 (00000002)", FaultKind.OTHER),
    ("", FaultKind.OTHER),
    (
        _MLX
        + "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout).\n"
        + _MLX
        + "Ignored (for causing prior/excessive GPU errors) "
        "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored).\n"
        "Traceback (most recent call last):",
        FaultKind.SUBMISSIONS_IGNORED,
    ),
)
"""(text, kind) pairs."""
