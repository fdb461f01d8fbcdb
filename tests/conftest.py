"""What all tests share."""

import os

from hypothesis import settings

# Elsewhere every run tries new examples; where a change must land, the same ones each time.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
