"""What joining reads and packing experts bring.

python -m tests.bench.pack [--misses 4] [--rounds 200] [--tokens 200]

Brings a few experts of a random layer into the pools, as a token that misses them does: from the
shards and from a pack, one call per tensor and with the calls joined. Then decodes the demo model.
Fails only when bytes, tokens or the number of calls are wrong, never for a time.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.engine.checkpoint import read_checkpoint
from headrace_replicas.engine.experts.pack_index import INDEX_FILE
from headrace_replicas.engine.experts.page_cache import PageCache
from headrace_replicas.engine.experts.reader import RangeReader, ReadJob, ReadRun
from headrace_replicas.engine.loading import DtypeChoice, LoadedModel, Streaming, load
from headrace_replicas.engine.packing import pack_checkpoint
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import DEMO_FOLDER

WORKERS: Final = 12
LAYERS: Final = 7
EXPERTS: Final = 32
WIDTH: Final = 1024
EXPERT_WIDTH: Final = 512


class ApartReader(RangeReader):
    """Reads every range by a call of its own, as before ranges were joined."""

    def _runs(self, jobs: Sequence[ReadJob]) -> list[ReadRun]:
        return [ReadRun(job.file, job.offset, (job.target,)) for job in jobs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to bring experts.

    Attributes:
        name: For the table.
        loaded: The model whose pools are filled.
        reader: What fills them.
        pages: What the system keeps of its files.
    """

    name: str
    loaded: LoadedModel
    reader: RangeReader
    pages: PageCache

    def bring(self, layer: int, experts: Sequence[int]) -> float:
        """Seconds to bring experts into slots."""
        assert self.loaded.streamed is not None
        pools = self.loaded.streamed.streams[layer]._pools
        jobs = [pool.job(expert, slot) for slot, expert in enumerate(experts) for pool in pools]
        began_s = time.perf_counter()
        self.reader.read(jobs)
        return time.perf_counter() - began_s

    def digest(self, layer: int, slots: int) -> int:
        """What lies in the slots, as one number."""
        assert self.loaded.streamed is not None
        pools = self.loaded.streamed.streams[layer]._pools
        return hash(tuple(bytes(pool._bytes[: slots * pool.slot_bytes]) for pool in pools))


def generated(folder: Path) -> Path:
    """A random Qwen3-MoE of 200 MB: 7 layers of 32 experts of 0.9 MB, 4-bit as mlx-lm saves."""
    make_checkpoint(folder, random_seed=1, layers=1, bits=4)
    for shard in folder.glob("model*"):
        shard.unlink()
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "hidden_size": WIDTH,
        "moe_intermediate_size": EXPERT_WIDTH,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 4,
        "num_hidden_layers": LAYERS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    heads, head_width = config["num_attention_heads"], config["head_dim"]
    weights = {
        "model.embed_tokens.weight": mx.random.normal((config["vocab_size"], WIDTH)),
        "model.norm.weight": mx.ones((WIDTH,)),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("q", "k", "v"):
            weights[f"{prefix}self_attn.{name}_proj.weight"] = mx.random.normal(
                (heads * head_width, WIDTH)
            )
            weights[f"{prefix}self_attn.{name}_norm.weight"] = mx.ones((head_width,))
        del weights[f"{prefix}self_attn.v_norm.weight"]
        weights[f"{prefix}self_attn.o_proj.weight"] = mx.random.normal((WIDTH, heads * head_width))
        weights[f"{prefix}input_layernorm.weight"] = mx.ones((WIDTH,))
        weights[f"{prefix}post_attention_layernorm.weight"] = mx.ones((WIDTH,))
        weights[f"{prefix}mlp.gate.weight"] = mx.random.normal((EXPERTS, WIDTH))
        for name in ("gate", "up", "down"):
            shape = (WIDTH, EXPERT_WIDTH) if name == "down" else (EXPERT_WIDTH, WIDTH)
            where = f"{prefix}mlp.switch_mlp.{name}_proj."
            words = (EXPERTS, shape[0], shape[1] // 8)
            groups = (EXPERTS, shape[0], shape[1] // 64)
            weights[f"{where}weight"] = mx.random.randint(0, 1 << 31, words).astype(mx.uint32)
            weights[f"{where}scales"] = mx.random.normal(groups).astype(mx.bfloat16)
            weights[f"{where}biases"] = mx.random.normal(groups).astype(mx.bfloat16)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


@contextmanager
def _no_bar(_title: str, _total: int) -> Iterator[Callable[[int], None]]:
    yield lambda _count: None


def _streamed(folder: Path, slots: int, dtype: DtypeChoice, *, pack: Path | None) -> LoadedModel:
    """The model, streaming from a pack or from its shards."""
    streaming = Streaming(
        slots=slots,
        workers=WORKERS,
        clock=SystemClock(),
        on_progress=lambda: None,
        pack_folders=() if pack is None else (pack,),
    )
    return load(read_checkpoint(folder), device="cpu", dtype=dtype, streaming=streaming)


def ways(folder: Path, pack: Path, slots: int) -> list[Way]:
    """Shards or pack, apart or joined; in the file's own types, so that nothing is converted."""
    found: list[Way] = []
    for source, place in (("shards", None), ("pack", pack)):
        loaded = _streamed(folder, slots, "bfloat16", pack=place)
        assert loaded.streamed is not None
        joined = loaded.streamed.reader
        pages = PageCache(joined.files)
        apart = ApartReader(joined.files, workers=WORKERS, clock=SystemClock())
        for name, reader in (("a call per tensor", apart), ("joined", joined)):
            found.append(Way(name=f"{source}, {name}", loaded=loaded, reader=reader, pages=pages))
    return found


def measure_reads(title: str, folder: Path, pack: Path, misses: int, rounds: int) -> None:
    """Print the time of bringing experts in each way, warm and cold.

    Raises:
        SystemExit: The ways disagree on the bytes, or a pack needs more calls than it should.
    """
    found = ways(folder, pack, misses)
    draw = random.Random(3)  # noqa: S311 - a benchmark
    assert found[0].loaded.streamed is not None
    layers = len(found[0].loaded.streamed.streams)
    experts = 32
    picks = [(draw.randrange(layers), draw.sample(range(experts), misses)) for _ in range(rounds)]
    record = sum(pool.read_bytes for pool in found[0].loaded.streamed.streams[0]._pools)
    sys.stdout.write(f"\n{title}: {misses} misses of {record / 1e6:.2f} MB, {rounds} rounds\n")
    sys.stdout.write(f"  {'':28s} {'calls':>6s} {'warm us':>9s} {'':>6s} {'cold us':>9s}\n")
    for way in found:
        for pick in picks:
            way.bring(*pick)  # warms the page cache, and counts
    # In turns, so that whatever else the machine does meets all of them.
    warm = [[way.bring(*pick) for way in found] for pick in picks]
    cold = [[_cold(way, pick) for way in found] for pick in picks]
    for number, way in enumerate(found):
        line = f"  {way.name:28s} {way.reader.totals.runs / (3 * rounds):6.1f}"
        for times in (warm, cold):
            base = statistics.median(row[0] for row in times) * 1e6
            mine = statistics.median(row[number] for row in times) * 1e6
            line += f" {mine:9.0f} {base / mine:5.2f}x"
        sys.stdout.write(line + "\n")
    _check(found, misses, picks[0])


def _cold(way: Way, pick: tuple[int, Sequence[int]]) -> float:
    way.pages.drop()
    return way.bring(*pick)


def _check(found: Sequence[Way], misses: int, pick: tuple[int, Sequence[int]]) -> None:
    seen: set[int] = set()
    for way in found:
        way.bring(*pick)
        seen.add(way.digest(pick[0], misses))
    if len(seen) != 1:
        raise SystemExit("the ways bring different bytes")
    joined = found[-1].reader
    before = joined.totals
    found[-1].bring(*pick)
    runs, jobs = joined.totals.runs - before.runs, joined.totals.jobs - before.jobs
    if runs * 3 > jobs:
        raise SystemExit(f"{runs} calls for {jobs} ranges that touch")


def measure_decode(folder: Path, pack: Path, tokens: int) -> None:
    """Print the speed of decoding the demo model with a quarter of its experts in memory.

    The better of three runs each, in turns.

    Raises:
        SystemExit: The tokens differ.
    """
    sys.stdout.write(f"\ndemo model, {tokens} tokens, 8 of 32 experts in memory\n")
    answers: list[mx.array] = []
    best: dict[str, tuple[float, str]] = {}
    for _ in range(3):
        for name, place in (("shards", None), ("pack", pack)):
            loaded = _streamed(folder, 8, "auto", pack=place)
            said, took_s = _decode(loaded, tokens)
            answers.append(mx.stack(said))
            assert loaded.streamed is not None
            totals = loaded.streamed.reader.totals
            line = f"{totals.runs} calls for {totals.jobs} ranges, {totals.busy_s:.2f} s in reads"
            best[name] = min(best.get(name, (took_s, line)), (took_s, line))
    for name, (took_s, line) in best.items():
        sys.stdout.write(f"  {name:28s} {tokens / took_s:6.1f} tok/s, {line}\n")
    if not all(mx.array_equal(answers[0], answer).item() for answer in answers):
        raise SystemExit("the tokens differ")


def _decode(loaded: LoadedModel, tokens: int) -> tuple[list[mx.array], float]:
    """What the model would say after each token of a random text, which asks for many experts."""
    draw = random.Random(5)  # noqa: S311 - a benchmark
    cache = make_prompt_cache(loaded.model)
    said: list[mx.array] = []
    began_s = time.perf_counter()
    for _ in range(tokens):
        logits: mx.array = loaded.model(mx.array([[draw.randrange(6000)]]), cache=cache)
        said.append(mx.argmax(logits[0, -1]))
        mx.eval(said[-1])
    return said, time.perf_counter() - began_s


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="What joining reads and packing bring.")
    parser.add_argument("--misses", type=int, default=4, help="experts brought at a time")
    parser.add_argument("--rounds", type=int, default=200, help="times that they are brought")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to decode")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        place = Path(name)
        folders = {
            "demo model": Path(shutil.copytree(DEMO_FOLDER, place / "demo")),
            "200 MB model": generated(place / "generated"),
        }
        for title, folder in folders.items():
            pack = place / f"{folder.name}-pack"
            pack.mkdir()
            began_s = time.perf_counter()
            report = pack_checkpoint(read_checkpoint(folder), pack, workers=2, bar=_no_bar)
            took_s = time.perf_counter() - began_s
            sys.stdout.write(
                f"\n{title}: packed {report.size_bytes / 1e6:.0f} MB "
                f"({report.padding_bytes / report.size_bytes:.1%} zeros) in {took_s:.1f} s\n"
            )
            assert (pack / INDEX_FILE).exists()
            measure_reads(title, folder, pack, options.misses, options.rounds)
        measure_decode(folders["demo model"], place / "demo-pack", options.tokens)


if __name__ == "__main__":
    main()
