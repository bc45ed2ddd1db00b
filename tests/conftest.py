"""Settings every test shares: one thread a process, so that ranks do not fight for the cores."""

from __future__ import annotations

import os

# Read when torch is imported, here and in the worker processes, so they come before any import.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

from hypothesis import settings

# The same examples on every run: a red test must be red for the next person too.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("repeatable")
