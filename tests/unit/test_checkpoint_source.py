"""Where a checkpoint comes from: the package, a folder, or the hub and its cache."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from headrace_replicas.contract.errors import CheckpointError
from headrace_replicas.engine.checkpoint import DEMO, resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """A hub with one repository, one that is gated, and no other."""

    FILES = ("config.json", "weights.safetensors", "pytorch_model.bin", "README.md")

    def do_GET(self) -> None:
        """Answer the three calls that a download makes."""
        path = self.path.partition("?")[0]
        if path.startswith(("/api/models/org/gated", "/org/gated")):
            self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif path.startswith("/api/models/org/model/revision/absent"):
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith("/api/models/org/model/tree"):
            tree = [{"type": "file", "path": f, "size": 2, "oid": f} for f in self.FILES]
            self._answer(200, json.dumps(tree).encode(), {})
        elif path.startswith("/api/models/org/model"):
            answer = {"id": "org/model", "sha": COMMIT, "siblings": []}
            self._answer(200, json.dumps(answer).encode(), {})
        elif path.startswith(f"/org/model/resolve/{COMMIT}/"):
            self._answer(200, b"{}", {"ETag": '"abc"', "X-Repo-Commit": COMMIT})
        else:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET  # noqa: N815 - the name is the base class's

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's library."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def point_at(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Use another hub; the library reads HF_ENDPOINT only when it is imported."""
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    """A hub on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    point_at(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache, with the hub out of reach by choice."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return cache


def refusal(path: str, revision: str | None = None) -> str:
    """The message, which belongs to the setting."""
    with pytest.raises(CheckpointError) as caught:
        resolve(path, revision)
    assert caught.value.param == "model.path"
    return caught.value.message


def test_demo_is_the_packaged_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where a folder of that name lies in the working directory."""
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert (resolve(DEMO, None) / "config.json").is_file()


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absolute, relative to the working directory, or to the home folder."""
    folder = tmp_path / "models" / "mine"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (str(folder), "models/mine", "./models/mine", "~/models/mine"):
        assert resolve(path, None) == folder


@pytest.mark.parametrize("path", ["/no/such", "./no", "~/no", "../no", "", "a/b/c", "a b", "a--b"])
def test_what_is_neither_folder_nor_repository_id_is_no_such_folder(
    offline: Path, path: str
) -> None:
    """Nothing is asked of the hub, and the three kinds of answers are named."""
    assert "no such folder" in refusal(path)
    assert "owner/name" in refusal(path)


def test_a_file_or_an_impossible_path_is_refused(tmp_path: Path) -> None:
    """The folder is asked for."""
    (tmp_path / "model.gguf").touch()
    assert "is a file" in refusal(str(tmp_path / "model.gguf"))
    assert "is no path" in refusal("/" + "x" * 5000)
    assert "is no path" in refusal("~nobody-here/model")


def test_a_repository_is_downloaded_and_pinned(hub: ThreadingHTTPServer) -> None:
    """Only what a checkpoint consists of; weights under another name when there are no usual."""
    folder = resolve("org/model", None)
    assert folder.name == COMMIT
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "weights.safetensors"]
    assert resolve("org/model", COMMIT) == folder


def test_a_repository_that_may_not_or_cannot_be_read_is_refused(hub: ThreadingHTTPServer) -> None:
    """Gated, unknown, and an unknown revision: each with its own remedy."""
    assert "is gated" in refusal("org/gated")
    assert "HF_TOKEN" in refusal("org/gated")
    assert "neither a folder nor a Hugging Face repository 'org/other'" in refusal("org/other")
    assert "at revision 'absent' does not exist" in refusal("org/model", "absent")


def test_offline_the_cached_copy_serves(offline: Path) -> None:
    """A branch is looked up in the cache; what is not there is refused with what to do."""
    assert "is not whole in the local cache" in refusal("org/model")
    snapshot = offline / "models--org--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").touch()
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    assert resolve("org/model", None) == snapshot
    assert resolve("org/model", COMMIT) == snapshot
    assert "at revision 'v2' is not whole" in refusal("org/model", "v2")


def test_an_unreachable_hub_is_refused_with_what_to_do(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No connection is no crash."""
    point_at(monkeypatch, "http://127.0.0.1:9")
    assert "the hub cannot be reached" in refusal("org/model")
