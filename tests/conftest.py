"""Fixtures for all tests: event loops, models, and a check that no test leaves anything behind."""

from __future__ import annotations

import gc
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Pools that outlive their user by design: trio's idle workers, tqdm's monitor.
_KNOWN_THREADS = ("Trio thread", "tqdm")
# A thread that is ending when its test ends.
_GRACE_SECONDS = 5.0


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
        pytest.param(("trio", {}), id="trio"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """What a test marked `anyio` runs on: all three."""
    return request.param


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The default model, fetched and converted on first use."""
    from tinyvllm import hub

    return hub.resolve(hub.DEFAULT_MODEL)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama in bfloat16 with an odd vocabulary."""
    from support.tiny_models import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def process_wide_descriptors() -> None:
    """Opened once per process and never closed: libuv's signal pipe, CUDA's context."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.zeros(1, device="cuda")
    try:
        import uvloop
    except ImportError:
        return
    uvloop.new_event_loop().close()


@pytest.fixture(autouse=True)
def no_leaks(monkeypatch: pytest.MonkeyPatch, process_wide_descriptors: None) -> Iterator[None]:
    """Fails a test that leaves a thread, a file descriptor or an open engine, or whose engines
    closed with a block still in use."""
    threads = set(threading.enumerate())
    files = _open_files()
    engines: list[Any] = []
    device_bytes = _device_bytes()
    module = sys.modules.get("tinyvllm.engine")
    if module is not None:
        start = module.Engine.start

        def recorded(self: Any) -> None:
            engines.append(self)
            start(self)

        monkeypatch.setattr(module.Engine, "start", recorded)
    yield
    if any(engine.is_running for engine in engines):
        gc.collect()  # dropped, perhaps, but in a cycle
    left = [t for t in threading.enumerate() if t not in threads and not _is_known(t)]
    for thread in left:
        thread.join(_GRACE_SECONDS)
    left = [t for t in left if t.is_alive()]
    assert not left, f"threads left: {left}"
    for engine in engines:
        stats, died = engine._final_stats, engine.health().error
        if stats is not None and died is None:
            assert stats.num_free_blocks == stats.num_blocks, stats
            assert (stats.num_running, stats.num_waiting, stats.num_paused) == (0, 0, 0), stats
    if engines:  # tests of ops keep tensors in fixtures of their module
        engines.clear()
        if _device_bytes() > device_bytes:
            gc.collect()
        assert _device_bytes() <= device_bytes, "device memory is left"
    if _open_files() - files:
        gc.collect()
    left_open = _open_files() - files
    assert not left_open, f"file descriptors left: {left_open}"


def _device_bytes() -> int:
    """What torch has allocated on the GPU; 0 without one."""
    torch = sys.modules.get("torch")
    return torch.cuda.memory_allocated() if torch is not None and torch.cuda.is_initialized() else 0


def _is_known(thread: threading.Thread) -> bool:
    return thread.name.startswith(_KNOWN_THREADS)


def _open_files() -> set[tuple[str, str]]:
    """(descriptor, target) of what is open, devices aside; empty where there is no /proc."""
    found = set()
    try:
        descriptors = os.listdir("/proc/self/fd")
    except OSError:
        return found
    for descriptor in descriptors:
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:  # the listing's own
            continue
        if not target.startswith(("/dev/", "/proc/")):
            found.add((descriptor, target))
    return found
