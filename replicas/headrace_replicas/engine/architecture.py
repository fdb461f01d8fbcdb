"""Which model types the installed mlx-lm can build, told from its source files.

Importing mlx-lm would load MLX, which a gateway must not do. So its `models` folder is listed and
its files are parsed, never run. Where the source leaves room for doubt the answer is "cannot
tell", and loading decides.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from headrace_replicas.contract.errors import BackendMissingError, CheckpointError
from headrace_replicas.engine.json_files import JsonObject, some_of

EXPERT_COUNT_KEYS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
    "num_moe_experts",
)
"""How model families spell the number of routed experts."""


def check_architecture(config: JsonObject) -> str:
    """The model type of a config that the installed mlx-lm can build.

    Raises:
        CheckpointError: The model type is missing or unknown, custom code is asked for, or
            config.json lacks a key that the model needs.
        BackendMissingError: mlx-lm is not installed.
    """
    if config.get("model_file") is not None:
        raise CheckpointError(
            f"config.json asks to run the checkpoint's own code (model_file "
            f"{config['model_file']!r:.80}), which headrace never does. Use a model type that "
            "mlx-lm knows."
        )
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise CheckpointError("config.json names no model_type. Download the checkpoint again.")
    folder = _mlx_lm_folder()
    module = _module_of(model_type, config.get("architectures"), folder)
    if module not in _model_modules(folder):
        raise CheckpointError(
            f"config.json: model_type {model_type!r:.80} is not known to the installed mlx-lm "
            f"{version('mlx-lm')}. Upgrade mlx-lm, or serve another model."
        )
    needed = required_keys(module, folder / "models")
    if needed is not None and (lacking := sorted(needed - config.keys())):
        raise CheckpointError(
            f"config.json has no {some_of(lacking)}, which model type {model_type!r} needs"
            f"{_hint(config, lacking)}. Convert the checkpoint again with mlx_lm.convert, or add "
            "the key."
        )
    return model_type


def required_keys(module: str, folder: Path) -> frozenset[str] | None:
    """Keys without a default in the `ModelArgs` of one module of mlx-lm's `models` folder.

    Returns:
        None when it cannot be told: the class reads its config by code of its own, or inherits
        from something other than mlx-lm's plain base.
    """
    found = [
        node
        for node in _parse(folder / f"{module}.py").body
        if isinstance(node, ast.ClassDef) and node.name == "ModelArgs"
    ]
    if len(found) != 1 or [ast.unparse(base) for base in found[0].bases] != ["BaseModelArgs"]:
        return None
    keys: set[str] = set()
    for node in found[0].body:
        if isinstance(node, ast.FunctionDef) and node.name in {"from_dict", "__init__"}:
            return None
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if node.value is None and "ClassVar" not in ast.unparse(node.annotation):
                keys.add(node.target.id)
            elif isinstance(node.value, ast.Call):
                keys |= _required_field(node.target.id, node.value)
    return frozenset(keys)


def _required_field(name: str, call: ast.Call) -> set[str]:
    """`name` when `field(...)` gives it no default."""
    given = {keyword.arg for keyword in call.keywords}
    if ast.unparse(call.func).endswith("field") and not given & {
        "default",
        "default_factory",
        "init",
    }:
        return {name}
    return set()


def _mlx_lm_folder() -> Path:
    # Finding a top-level package runs none of its code.
    spec = find_spec("mlx_lm")
    if spec is None or not spec.submodule_search_locations:
        raise BackendMissingError("mlx-lm is not installed. Install headrace again.")
    return Path(spec.submodule_search_locations[0])


def _module_of(model_type: str, architectures: object, folder: Path) -> str:
    """The module for a model type, as `mlx_lm.utils._get_classes` picks it."""
    by_type, by_architecture = _remappings(folder)
    if isinstance(architectures, str):
        architectures = [architectures]
    for architecture in architectures if isinstance(architectures, list) else []:
        pair = (model_type, architecture)
        if isinstance(architecture, str) and pair in by_architecture:
            return by_architecture[pair]
    return by_type.get(model_type, model_type)


@cache
def _remappings(folder: Path) -> tuple[dict[str, str], dict[tuple[str, str], str]]:
    tables: dict[str, object] = {}
    for node in _parse(folder / "utils.py").body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in {"MODEL_REMAPPING", "MODEL_ARCHITECTURE_REMAPPING"}:
                tables[name] = ast.literal_eval(node.value)
    by_type, by_architecture = (
        table if isinstance(table := tables.get(name), dict) else {}
        for name in ("MODEL_REMAPPING", "MODEL_ARCHITECTURE_REMAPPING")
    )
    return by_type, by_architecture


@cache
def _model_modules(folder: Path) -> frozenset[str]:
    """Modules that bring both classes a model consists of.

    A listing, not a lookup: on a file system that ignores case `QWEN3` would be found.
    """
    patterns = [
        re.compile(rf"^(?:class {name}\b|from .+ import .*\b{name}\b)", re.MULTILINE)
        for name in ("Model", "ModelArgs")
    ]
    return frozenset(
        file.stem
        for file in (folder / "models").glob("*.py")
        if all(pattern.search(file.read_text("utf-8")) for pattern in patterns)
    )


@cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"), filename=str(file))


def _hint(config: JsonObject, lacking: list[str]) -> str:
    """Where a missing number is written under another name, or in a nested object."""
    wanted = set(lacking)
    if wanted & set(EXPERT_COUNT_KEYS):
        wanted |= set(EXPERT_COUNT_KEYS)
    elsewhere = [path for path, key in _paths(config) if key in wanted]
    return f" (there is {some_of(elsewhere)} instead)" if elsewhere else ""


def _paths(config: JsonObject) -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        yield key, key
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", inner) for inner in value)
