"""What the engines of a process have to agree on: a GPU's memory has one allocator, torch's."""

from __future__ import annotations

import threading

import torch

capture_lock = threading.Lock()
"""Held while graphs are captured: torch's allocator gives nothing back to the driver meanwhile."""


def release_unused() -> None:
    """Gives the driver what torch keeps for later. Waits for captures."""
    with capture_lock:
        torch.cuda.empty_cache()
