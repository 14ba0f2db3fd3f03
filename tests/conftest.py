"""What holds for all tests."""

import os

import hypothesis

from tests.clusters import ray_cluster

__all__ = ["ray_cluster"]

# What someone has set for their own renders must not reach the tests.
for name in ("RAY_ADDRESS", "TILEREEL_MODELS"):
    os.environ.pop(name, None)

# Other work on the machine slows single examples; a test's time is bounded anyway.
hypothesis.settings.register_profile("tilereel", deadline=None)
hypothesis.settings.load_profile("tilereel")
