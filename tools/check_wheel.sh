#!/usr/bin/env bash
# Build the wheel, install it alone into a fresh environment, and see that it is whole: the command
# runs, the demo model and the templates are inside, and nothing else is.
set -euo pipefail
uv=${UV:-uv}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"$uv" build --quiet --wheel --out-dir "$folder" .
wheel=$(ls "$folder"/*.whl)
"$uv" venv --quiet "$folder/venv"
"$uv" export --frozen --no-dev --no-hashes --no-emit-project --quiet >"$folder/requirements.txt"
"$uv" pip install --quiet --python "$folder/venv" --no-deps -r "$folder/requirements.txt" "$wheel"
cd "$folder" # not the clone: what is imported now comes from the wheel
"$folder/venv/bin/headrace" --version
"$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import files
from importlib.resources import files as resource

import headrace_deploy, headrace_replicas, headrace_serve  # noqa: E401
from headrace_deploy.serve_config import template_text
from headrace_replicas.engine.checkpoint import read_checkpoint, resolve

for package in (headrace_deploy, headrace_replicas, headrace_serve):
    assert "site-packages" in package.__file__, package.__file__
    assert (resource(package.__name__) / "py.typed").is_file(), package
checkpoint = read_checkpoint(resolve("demo", None))
assert "import_path: headrace_serve.app:build" in template_text()
for name in ("MODEL_CARD.md", "WORDNET_LICENSE.txt", "canary.json"):
    assert (checkpoint.path / name).is_file(), name
tops = {str(file).split("/")[0] for file in files("headrace")}
packages = {top for top in tops if not top.endswith(".dist-info") and top != ".."}
assert packages == {"headrace_deploy", "headrace_replicas", "headrace_serve"}, packages
print(f"wheel: {len(files('headrace'))} files, demo model of {checkpoint.tensor_bytes / 1e6:.1f} MB")
PYTHON
