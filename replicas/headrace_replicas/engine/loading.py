"""Loads a checked checkpoint into MLX: what is resident is in memory before this returns.

The order keeps one promise of the engine: no byte is read while a GPU command buffer waits for
it. Files are read, and mlx-lm's rearranging of them computed, on the CPU device; only then does
the GPU see an array.
"""

import glob
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.errors import CheckpointError, SettingsError
from headrace_replicas.contract.requests import CheckpointIdentity
from headrace_replicas.engine.backend import missing_backend, mx
from headrace_replicas.engine.checkpoint import Checkpoint
from headrace_replicas.engine.experts.install import StreamedModel, stream_experts
from headrace_replicas.engine.experts.packed_store import find_pack
from headrace_replicas.engine.experts.provenance import Provenance
from headrace_replicas.engine.experts.reader import READ_FAILURES
from headrace_replicas.engine.experts.seam import expert_layers
from headrace_replicas.engine.experts.storage import Storage
from headrace_replicas.engine.experts.store import ExpertStore
from headrace_replicas.engine.json_files import some_of
from headrace_replicas.engine.safetensors_header import read_header
from headrace_replicas.engine.weight_reads import OnRead, read_arrays

# isort: split
# These import MLX themselves: they come after the import that explains a missing backend.
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import load_model

_MLX_LM_VERSION = version("mlx-lm")
_MLX_VERSION = version("mlx")

DeviceChoice = Literal["auto", "cpu", "gpu"]
DtypeChoice = Literal["auto", "float32", "bfloat16", "float16"]

# What mlx-lm's model classes raise about configs and tensors that they were not written for. Some
# of its modules end the process when a package of theirs is absent.
_LOAD_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SystemExit,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that is ready to compute.

    Attributes:
        model: mlx-lm's model; its parameters are evaluated.
        checkpoint: What it was loaded from.
        identity: What another replica must share for a stream to move there.
        device: Where it computes.
        dtype: What it computes in, as MLX names it (`float32`).
        streamed: What streams its experts; None when they are resident.
        draft: A smaller model that proposes tokens to it, if there is one.
    """

    model: Module
    checkpoint: Checkpoint
    identity: CheckpointIdentity
    device: Literal["cpu", "gpu"]
    dtype: str
    streamed: StreamedModel | None = None
    draft: "LoadedModel | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """How experts are streamed.

    Attributes:
        slots: Experts of a layer in memory at a time; layers with no more stay resident.
        workers: Reads under way at a time.
        clock: Time source.
        on_progress: Called on the engine thread whenever experts have arrived.
        pack_folders: Where a pack of the checkpoint may be, besides its own folder.
        storage: Where experts' bytes come from; None takes the operating system's files.
        read_failures: Failed batches of reads of one file after which it is reported lost.
    """

    slots: int
    workers: int
    clock: Clock
    on_progress: Callable[[], None]
    pack_folders: tuple[Path, ...] = ()
    storage: Storage | None = None
    read_failures: int = READ_FAILURES


def load(
    checkpoint: Checkpoint,
    *,
    device: DeviceChoice,
    dtype: DtypeChoice,
    streaming: Streaming | None = None,
    on_read: OnRead | None = None,
) -> LoadedModel:
    """Load all weights, and make the chosen device the calling thread's default.

    Args:
        checkpoint: A checked one.
        device: Where to compute.
        dtype: What to compute in.
        streaming: How experts are streamed; None reads them all now.
        on_read: Hears how reading the weights goes.

    Raises:
        CheckpointError: The tensors are not those that the model class wants; it names them. Or
            experts are to be streamed that cannot be read from the files as they are.
        BackendMissingError: A GPU is asked for and MLX has none.
        SettingsError: The environment asks for a mode of MLX that can hang a GPU.
    """
    refuse_spinning_sync(os.environ)
    chosen = choose_device(device)
    choice: DtypeChoice = "float32" if dtype == "auto" and chosen == "cpu" else dtype
    provenance = None if streaming is None else Provenance()
    model = load_lazily(checkpoint, provenance)
    streamed = None
    if streaming is not None and provenance is not None:
        streamed = _stream(model, checkpoint, streaming, provenance, choice)
        provenance.forget()
    read_weights(model, checkpoint, on_read)
    mx.set_default_device(mx.gpu if chosen == "gpu" else mx.cpu)
    computed = cast(model, choice)
    return LoadedModel(
        model=model,
        checkpoint=checkpoint,
        identity=identify(checkpoint, device=chosen, dtype=computed),
        device=chosen,
        dtype=computed,
        streamed=streamed,
    )


def _stream(
    model: Module,
    checkpoint: Checkpoint,
    streaming: Streaming,
    provenance: Provenance,
    dtype: DtypeChoice,
) -> StreamedModel:
    layers = expert_layers(model)
    folders = (checkpoint.path, *streaming.pack_folders)
    pack = find_pack(folders, checkpoint.fingerprint, layers, provenance)
    return stream_experts(
        layers,
        store=pack or ExpertStore([read_header(shard) for shard in checkpoint.shards]),
        provenance=provenance,
        slots=streaming.slots,
        dtype_of=computed_dtype(model, dtype),
        workers=streaming.workers,
        clock=streaming.clock,
        on_progress=streaming.on_progress,
        storage=streaming.storage,
        read_failures=streaming.read_failures,
    )


def refuse_spinning_sync(environment: Mapping[str, str]) -> None:
    """MLX_METAL_FAST_SYNCH=1 makes MLX wait by spinning on the GPU.

    When the other side dies in that wait the GPU spins until the machine is rebooted.

    Raises:
        SettingsError: It is set.
    """
    name = "MLX_METAL_FAST_SYNCH"
    if environment.get(name, "").strip() not in {"", "0"}:
        raise SettingsError(
            f"{name}={environment[name]} can leave the GPU spinning until a reboot. Unset it.", name
        )


def choose_device(device: DeviceChoice) -> Literal["cpu", "gpu"]:
    """The device to compute on; `auto` takes a GPU where MLX has one.

    Raises:
        BackendMissingError: A GPU is asked for and MLX has none.
    """
    has_gpu = mx.is_available(mx.gpu)
    if device == "gpu" and not has_gpu:
        raise missing_backend("engine.device is `gpu`, and this MLX sees no GPU")
    return "gpu" if has_gpu and device != "cpu" else "cpu"


def identify(checkpoint: Checkpoint, *, device: str, dtype: str) -> CheckpointIdentity:
    """What makes two engines give the same tokens."""
    return CheckpointIdentity(
        fingerprint=checkpoint.fingerprint,
        compute_dtype=dtype,
        engine=f"mlx {_MLX_VERSION} {device}, mlx-lm {_MLX_LM_VERSION}",
    )


def load_lazily(checkpoint: Checkpoint, provenance: Provenance | None = None) -> Module:
    """Build the model and bind every tensor to it; no tensor data is read yet.

    Args:
        checkpoint: A checked one.
        provenance: Filled with what each array was made of, if given.

    Raises:
        CheckpointError: Tensors are missing, unexpected or of another shape, or the config is
            not one that the model class can be built from.
    """
    try:
        with mx.stream(mx.cpu), _folder_for_mlx_lm(checkpoint) as folder:
            classes = partial(_model_classes, provenance=provenance)
            model: Module = load_model(folder, lazy=True, strict=True, get_model_classes=classes)[0]
    except _LOAD_ERRORS as error:
        raise CheckpointError(_explain(error, checkpoint)) from error
    return model


def _model_classes(
    config: dict[str, Any], *, provenance: Provenance | None
) -> tuple[type[Module], type]:
    """mlx-lm's choice of classes for a config, watched while it rearranges the tensors."""
    choose = signature(load_model).parameters["get_model_classes"].default
    model_class, arguments_class = choose(config)
    if provenance is None:
        return model_class, arguments_class
    sanitize = getattr(model_class, "sanitize", lambda _model, weights: weights)

    def watched(model: Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        provenance.note_checkpoint(weights)
        with provenance.watching_stacks():
            sanitized: dict[str, mx.array] = sanitize(model, weights)
        return sanitized

    return type(model_class.__name__, (model_class,), {"sanitize": watched}), arguments_class


def read_weights(model: Module, checkpoint: Checkpoint, on_read: OnRead | None = None) -> None:
    """Bring every array of the model into memory, constants that are no parameters too.

    Raises:
        CheckpointError: A file could not be read to the end that its header promised.
    """
    with explained_reads(checkpoint), mx.stream(mx.cpu):
        parameters = [array for _, array in _named_arrays(model)]
        read_arrays([*parameters, *_constants(model)], on_read)


@contextmanager
def explained_reads(checkpoint: Checkpoint) -> Iterator[None]:
    """While this lasts, MLX's complaint about a file that it reads names the checkpoint.

    Raises:
        CheckpointError: A file could not be read to the end that its header promised.
    """
    try:
        yield
    except RuntimeError as error:
        if "[read]" not in str(error):
            raise  # out of memory, say: no fault of the checkpoint
        raise CheckpointError(
            f"{checkpoint.path}: a shard became shorter while it was read ({error}). Is a "
            "download still running?"
        ) from error


def cast(model: Module, dtype: DtypeChoice) -> str:
    """Turn the real-valued parameters into one type, and evaluate them.

    As `Module.set_dtype`: packed weights (integers) stay, scales and biases of packed weights
    follow, and so does what a packed matrix multiplication gives. When the type has less range or
    precision than float32, parameters that the model class wants kept (`cast_predicate`) and
    nvfp4's float32 tensor scale stay too.

    Returns:
        The name of the type that the model computes in; with `auto`, nothing changes and it is
        the type of most parameters as shipped.

    Raises:
        CheckpointError: A weight does not fit into float16; it is named.
    """
    if dtype == "auto":
        return _most_common_dtype(model)
    wanted = computed_dtype(model, dtype)

    def convert(path: str, array: mx.array) -> mx.array:
        target = wanted(path, array.dtype)
        return array if target == array.dtype else array.astype(target)

    model.update(tree_map_with_path(convert, _parameters(model)))
    mx.eval(_parameters(model))
    if dtype == "float16":
        _refuse_overflow(model)
    return dtype


def computed_dtype(model: Module, dtype: DtypeChoice) -> Callable[[str, mx.Dtype], mx.Dtype]:
    """What `cast` turns a parameter into, by its path and its type as loaded."""
    if dtype == "auto":
        return lambda _path, loaded: loaded
    target: mx.Dtype = getattr(mx, dtype)
    narrow = target != mx.float32
    keep: Callable[[str], bool] = getattr(model, "cast_predicate", lambda _: True)

    def wanted(path: str, loaded: mx.Dtype) -> mx.Dtype:
        exempt = narrow and (path.endswith("global_scale") or not keep(path))
        return loaded if exempt or not mx.issubdtype(loaded, mx.floating) else target

    return wanted


def _refuse_overflow(model: Module) -> None:
    for path, array in _named_arrays(model):
        if array.dtype == mx.float16 and not mx.all(mx.isfinite(array)).item():
            raise CheckpointError(
                f"tensor {path!r} does not fit into float16. Set engine.dtype to bfloat16 or "
                "float32.",
                "engine.dtype",
            )


def _most_common_dtype(model: Module) -> str:
    counts: dict[str, int] = {}
    for _, array in _named_arrays(model):
        if mx.issubdtype(array.dtype, mx.floating):
            name = str(array.dtype).removeprefix("mlx.core.")
            counts[name] = counts.get(name, 0) + 1
    return max(counts, key=lambda name: counts[name], default="float32")


def _parameters(model: Module) -> dict[str, Any]:
    tree: dict[str, Any] = model.parameters()  # type: ignore[no-untyped-call] # MLX's own
    return tree


def _constants(model: Module) -> list[mx.array]:
    """Arrays that a module keeps under a leading underscore; they are no parameters."""
    modules: list[Module] = model.modules()  # type: ignore[no-untyped-call] # MLX's own
    hidden = [value for module in modules for name, value in module.items() if name.startswith("_")]
    return [array for _, array in _flat({"_": hidden}) if isinstance(array, mx.array)]


def _named_arrays(model: Module) -> list[tuple[str, mx.array]]:
    return _flat(_parameters(model))


def _flat(tree: dict[str, Any]) -> list[tuple[str, Any]]:
    named = tree_flatten(tree)
    return list(named.items()) if isinstance(named, dict) else named


@contextmanager
def _folder_for_mlx_lm(checkpoint: Checkpoint) -> Iterator[Path]:
    """A folder in which mlx-lm finds the checkpoint's shards and no others.

    It takes every `model*.safetensors`; where that is not the set of shards, a folder of links
    stands in. MLX keeps the files open, so the links may go once the model is built.
    """
    folder = checkpoint.path
    found = {Path(name) for name in glob.glob(f"{folder}/model*.safetensors")}  # noqa: PTH207 - mlx-lm's own call
    if found == set(checkpoint.shards):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="headrace-") as name:
        links = Path(name)
        for file in ("config.json", "generation_config.json", "hf_quant_config.json"):
            if (folder / file).exists():
                (links / file).symlink_to((folder / file).resolve())
        for number, shard in enumerate(checkpoint.shards):
            (links / f"model-{number:05d}.safetensors").symlink_to(shard.resolve())
        yield links


def _explain(error: BaseException, checkpoint: Checkpoint) -> str:
    """mlx-lm's error as a sentence with a remedy."""
    text = str(error)
    listed = [name.strip().rstrip(".") for name in text.partition("\n")[2].split(",")]
    if re.match(r"Missing \d+ parameters", text):
        return (
            f"{checkpoint.path} lacks {len(listed)} tensors that model type "
            f"{checkpoint.model_type!r} needs: {some_of(listed)}. Incomplete download or "
            "conversion? Download or convert it again."
        )
    if re.match(r"Received \d+ parameters not in model", text):
        return (
            f"{checkpoint.path} holds {len(listed)} tensors that model type "
            f"{checkpoint.model_type!r} has no place for: {some_of(listed)}. Its config.json "
            "belongs to another model or conversion; convert it again with mlx_lm.convert."
        )
    return (
        f"mlx-lm {_MLX_LM_VERSION} cannot build model type {checkpoint.model_type!r} from "
        f"{checkpoint.path}: {type(error).__name__}: {text}. Convert the checkpoint again with "
        "mlx_lm.convert, or upgrade mlx-lm."
    )
