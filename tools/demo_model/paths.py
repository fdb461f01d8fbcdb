"""Where the demo model lies that ships with headrace."""

from __future__ import annotations

from pathlib import Path
from typing import Final

MODEL_DIR: Final = Path(__file__).parents[2] / "replicas" / "headrace_replicas" / "demo_model"
"""Weights, tokenizer, chat template, model card and the licence of the WordNet part."""
