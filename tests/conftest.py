"""What all tests share."""

import os

from hypothesis import settings

# A busy machine makes no law of the code false, so that no example has a deadline. Elsewhere every
# run tries new examples; where a change must land, the same ones each time.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")
