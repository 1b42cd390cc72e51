"""The CPU thread pool: by itself (thread_pool_test.cpp, plain and under TSan) and inside Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tinyvllm import _C

ROOT = Path(__file__).resolve().parents[2]
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
CHECKS = (
    "coverage",
    "visibility",
    "exceptions",
    "nested",
    "callers",
    "forks",
    "exits",
    "idle",
    "quotas",
)


@pytest.fixture(scope="module", params=["plain", "thread-sanitizer"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    flags = ["-fsanitize=thread", "-g"] if request.param == "thread-sanitizer" else []
    path = tmp_path_factory.mktemp("thread_pool") / request.param
    command = [COMPILER, "-std=c++20", "-O1", *flags, "-pthread", "-I", str(ROOT / "csrc/cpu")]
    source = Path(__file__).with_name("thread_pool_test.cpp")
    built = subprocess.run([*command, str(source), "-o", str(path)], capture_output=True, text=True)
    if built.returncode and flags and "tsan" in built.stderr:
        pytest.skip("the compiler has no ThreadSanitizer runtime")
    assert built.returncode == 0, built.stderr
    return path


@pytest.mark.parametrize("check", CHECKS)
def test_pool(program: Path, check: str) -> None:
    command = [str(program), check]
    if setarch := shutil.which("setarch"):  # TSan's shadow memory wants the usual address layout
        command = [setarch, "-R", *command]
    environment = os.environ | {"TSAN_OPTIONS": "atexit_sleep_ms=0 die_after_fork=0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def run_python(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_default_number_of_threads_respects_affinity() -> None:
    script = """
        import os
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        from tinyvllm import _C
        print(_C.num_threads())
    """
    assert run_python(script, TINYVLLM_NUM_THREADS="") == "1"


def test_environment_sets_the_number_of_threads() -> None:
    script = "from tinyvllm import _C; print(_C.num_threads())"
    assert run_python(script, TINYVLLM_NUM_THREADS="3") == "3"


def test_set_num_threads() -> None:
    before = _C.num_threads()
    try:
        _C.set_num_threads(3)
        assert _C.num_threads() == 3
    finally:
        _C.set_num_threads(before)
    with pytest.raises(ValueError, match=r"set_num_threads: n: expected 1 or more, got 0"):
        _C.set_num_threads(0)


WORK = """
    import os, signal, sys, threading, torch
    from tinyvllm import _C

    torch.set_num_threads(1)  # torch's own pool does not survive a fork

    def work():
        x = torch.full((512, 1024), 3.0, dtype=torch.bfloat16)
        out = torch.zeros_like(x)
        with _C.Graph() as graph:
            for _ in range(50):
                _C.rms_norm(out, x, x[0], 1e-5)
        return graph, out

    _C.set_num_threads(4)
    graph, out = work()
    graph.replay()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_child_computes() -> None:
    script = """
    thread = threading.Thread(target=lambda: [graph.replay() for _ in range(20)])
    thread.start()
    import warnings
    warnings.simplefilter("ignore", DeprecationWarning)  # 3.12+: fork beside threads
    for _ in range(5):
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            graph, out = work()
            graph.replay()
            os._exit(0 if float(out[511, 1023]) == 3 else 1)
        assert os.waitpid(pid, 0)[1] == 0
    thread.join()
    print("ok")
    """
    assert run_python(WORK + script) == "ok"


def test_the_interpreter_ends_while_a_thread_replays() -> None:
    script = """
    started = threading.Event()
    def forever():
        while True:
            graph.replay()
            started.set()
    threading.Thread(target=forever, daemon=True).start()
    started.wait()
    print("ok")
    """
    assert run_python(WORK + script) == "ok"
