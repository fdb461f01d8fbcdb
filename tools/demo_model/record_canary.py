"""Record the canary that ships with the demo model: a prompt and the ids it must be answered with.

    python -m tools.demo_model.record_canary

Run it after the demo model was made anew, on MLX's CPU device. It asks the model in its own chat
format, because sharp answers survive small differences between devices.
"""

import json
import os
import queue
from importlib import resources
from pathlib import Path

from headrace_replicas.canary import QUESTION, canary_request
from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.errors import HeadraceError
from headrace_replicas.contract.requests import TokenChunk
from headrace_replicas.contract.settings import EngineSettings
from headrace_replicas.engine.checkpoint import read_checkpoint
from headrace_replicas.engine.loading import load
from headrace_replicas.engine.steps import Engine
from headrace_serve.text.tokenizer import TextTokenizer


def main() -> None:
    """Ask the demo model and write `canary.json` beside it."""
    folder = Path(str(resources.files("headrace_replicas") / "demo_model"))
    checkpoint = read_checkpoint(folder)
    tokenizer = TextTokenizer.from_folder(folder)
    prompt_ids = tokenizer.render_chat([{"role": "user", "content": QUESTION}])
    engine = Engine(
        load=lambda: load(checkpoint, device="cpu", dtype="float32"),
        settings=EngineSettings(device="cpu"),
        clock=SystemClock(),
    )
    loaded = engine.start()
    arrived: queue.SimpleQueue[TokenChunk | HeadraceError] = queue.SimpleQueue()
    request = canary_request("record", prompt_ids, loaded.identity)
    engine.submit(request, arrived.put)
    got: list[int] = []
    finished = False
    while not finished:
        item = arrived.get()
        if isinstance(item, HeadraceError):
            raise item
        got.extend(item.ids)
        finished = item.finish_reason is not None
    engine.stop()
    text = b"".join(map(tokenizer.token_bytes, got)).decode()
    record = {
        "fingerprint": checkpoint.fingerprint,
        "compute_dtypes": ["float32"],
        "prompt": QUESTION,
        "answer": text,
        "prompt_ids": list(prompt_ids),
        "expected_ids": got,
    }
    (folder / "canary.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"{folder / 'canary.json'}: {QUESTION} -> {text}", flush=True)
    # MLX's state of the engine thread is torn down when that thread really ends, and aborts if
    # the interpreter is being finalised meanwhile.
    os._exit(0)


if __name__ == "__main__":
    main()
