"""`make bench`: what streaming costs, beside what it could cost at least.

    python -m tests.bench.limits [--short] [--folder FOLDER] [--only MODEL]

The demo model and a generated one, resident and with slots for a half, a quarter and an eighth of
the experts, in one run and by turns: tokens a second warm and cold, bytes read beside the least
that any policy could read, time to the first token, memory beside the plan. Speeds are printed
with the targets that they meet or miss; only counts and equality make it fail.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Final

import psutil

from headrace_replicas.engine.checkpoint import read_checkpoint
from tests.bench.decoding import Feed, Load, MeasureDisk, Routing
from tests.bench.generated_model import kept_model
from tests.bench.limits_decode import (
    CLOSE_TOKENS,
    Text,
    check_cold,
    decode,
    judge,
    loaders,
    memory_of,
    split_lines,
    where_time_goes,
)
from tests.bench.limits_extent import FULL, SHARES, SHORT, TARGET_SHARE, Extent, slots_for
from tests.bench.limits_models import (
    GENERATED,
    GENERATED_SHORT,
    Model,
    demo_model,
    generated_model,
)
from tests.bench.limits_prompts import first_tokens, routing_lines
from tests.bench.limits_report import DECODE_HEAD, MEMORY_HEAD, Verdicts
from tests.bench.seats import Seat
from tests.support.engines import demo_checkpoint

# Of the first dozen texts one on which slots hit about as often as on thousands of tokens; with a
# few topics, some hit far more.
USUAL_TEXT: Final = 6
DEFAULT_FOLDER: Final = Path("out/bench")


def main() -> int:
    """Measure both models and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--short", action="store_true", help="a small model, few tokens")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="for generated models")
    parser.add_argument("--only", choices=["demo", "generated"], help="one of the models")
    options = parser.parse_args()
    began_s = time.perf_counter()
    verdicts = Verdicts()
    extent, shape = (SHORT, GENERATED_SHORT) if options.short else (FULL, GENERATED)
    print(f"{psutil.cpu_count()} cores, load {psutil.getloadavg()[0]:.1f}, MLX's CPU backend")
    if options.only != "generated":
        demo = demo_model(extent.longest_tokens(demo_checkpoint().context_tokens))
        measure(demo, extent, verdicts)
    if options.only != "demo":
        folder = options.folder / ("short" if options.short else "generated")
        building_s = time.perf_counter()
        built = "built now" if kept_model(folder, shape) else "kept from before"
        building_s = time.perf_counter() - building_s
        print(f"\n{folder}: {built} ({building_s:.0f} s), kept for the next run")
        measure(generated_model(folder, shape), extent, verdicts)
    print(f"\n{time.perf_counter() - began_s:.0f} s, load now {psutil.getloadavg()[0]:.1f}")
    return verdicts.print_all()


def measure(model: Model, extent: Extent, verdicts: Verdicts) -> None:
    """Everything about one model, in tables."""
    checkpoint = read_checkpoint(model.folder)
    print(
        f"\n== {model.name}: {checkpoint.tensor_bytes / 1e9:.3f} GB, {model.top_k} of "
        f"{model.experts} experts, context {model.context_tokens} tokens"
    )
    loaders(model, extent, verdicts)
    text = model.text(extent.tokens, USUAL_TEXT)
    with Seat(Load(folder=model.folder, records=True)) as resident:
        resident.do(Feed(tokens=text))
        trace = resident.do(Routing())
        print(f"\n{DECODE_HEAD}", flush=True)
        memory = [memory_of(model, resident, None, len(text), verdicts)]
        notes: list[str] = []
        for share in SHARES:
            slots = slots_for(model, share)
            with Seat(Load(folder=model.folder, slots=slots)) as streamed:
                disk = streamed.do(MeasureDisk())
                check_cold(disk, model, verdicts)
                rows = decode(Text(model, extent, text, trace), share, disk, (resident, streamed))
                for row in rows:
                    print(row, flush=True)
                    judge(row, model, verdicts)
                memory.append(memory_of(model, streamed, slots, len(text), verdicts))
                if share == TARGET_SHARE:
                    notes = where_time_goes(model, resident, streamed, disk)
        resident_split = split_lines("resident", resident, model.text(CLOSE_TOKENS, 7), cold=False)
    print("\n".join(["", MEMORY_HEAD, *memory, "", *notes, *resident_split]))
    print("\n".join(routing_lines(model, first_tokens(model, extent, verdicts))), flush=True)


if __name__ == "__main__":
    sys.exit(main())
