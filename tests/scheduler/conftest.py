"""Hypothesis profiles: HYPOTHESIS_PROFILE=deep searches for minutes instead of seconds."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("deep", max_examples=5000, deadline=None)

if os.environ.get("HYPOTHESIS_PROFILE"):
    settings.load_profile(os.environ["HYPOTHESIS_PROFILE"])
