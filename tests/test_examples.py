"""The examples run as their first lines say, with the real model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}

pytestmark = pytest.mark.slow


def command(name: str, model: Path, *arguments: str) -> list[str]:
    script = str(ROOT / "examples" / name)
    return [sys.executable, "-W", "error", script, "--model", str(model), *arguments]


def run(arguments: list[str], stdin: str = "") -> tuple[str, str]:
    done = subprocess.run(
        arguments,
        input=stdin,
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_generate(smollm2_dir: Path) -> None:
    arguments = ("--max-tokens", "12", "--temperature", "0", "The capital of France is", "1, 2, 3,")
    out, _ = run(command("generate.py", smollm2_dir, *arguments))
    assert "--- The capital of France is\n Paris" in out
    assert "--- 1, 2, 3,\n 4, 5" in out
    assert out.count("[12 tokens, length]") == 2


def test_stream(smollm2_dir: Path) -> None:
    out, _ = run(command("stream.py", smollm2_dir, "--max-tokens", "200"))
    lines = out.splitlines()
    cancelled = [line for line in lines if ": abort after " in line]
    assert len(cancelled) == 1
    name, _, rest = cancelled[0].partition(":")
    shown = [line for line in lines[:-2] if line.startswith(name)]
    assert len(shown) <= int(rest.split()[2]) < 200
    assert any(line.endswith("tokens") and ": abort" not in line for line in lines[-2:])


def test_chat_remembers_the_conversation(smollm2_dir: Path) -> None:
    questions = "My name is Ada.\nWhat is my name?\n"
    out, err = run(command("chat.py", smollm2_dir, "--max-tokens", "24"), questions)
    assert out.count("> ") == 3
    assert err.count("tokens/s") == 2


def test_chat_ctrl_c_stops_the_answer(smollm2_dir: Path) -> None:
    with subprocess.Popen(
        command("chat.py", smollm2_dir, "--max-tokens", "2000"),
        cwd=ROOT,
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline().endswith("ask away.\n")
        process.stdin.write("Write a very long story about the sea, of at least 2000 words.\n")
        process.stdin.flush()
        begin = process.stdout.read(40)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate("Say hello.\n", timeout=100)
    assert process.returncode == 0, err
    assert begin.startswith("> ")
    assert err.count("abort]") == 1 and err.count("tokens/s") == 2, err
    assert "Traceback" not in err
    assert out.count("> ") == 2
