"""Builds of tinyvllm, and environments to install them into.

The builds are unoptimized (cmake.build-type=Debug): what is tested is what lands where.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """The output of a command; the test fails with all of it if the command does."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | {"PIP_NO_INPUT": "1", "PIP_NO_INDEX": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


def settings(cuda: bool = False) -> list[str]:
    return ["-Ccmake.build-type=Debug", f"-Ccmake.define.TINYVLLM_CUDA={'ON' if cuda else 'OFF'}"]


def build_wheel(source: Path, out: Path, *, cuda: bool = False) -> Path:
    """The wheel of a source tree or an sdist; with CUDA for one architecture."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
    run(*command, *settings(cuda), "-w", out, source, cwd=out, CUDAARCHS="90a-real")
    (wheel,) = out.glob("*.whl")
    return wheel


@dataclass(frozen=True)
class Environment:
    """A virtual environment that sees this one's packages, but not its tinyvllm."""

    path: Path

    @classmethod
    def create(cls, path: Path) -> Environment:
        run(sys.executable, "-m", "venv", "--without-pip", path, cwd=path.parent)
        (site_packages,) = (path / "lib").glob("python*/site-packages")
        # A path line, unlike a site directory, has no .pth files of its own processed: an editable
        # tinyvllm that is installed there stays unseen.
        (site_packages / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
        return cls(path)

    @property
    def python(self) -> Path:
        return self.path / "bin/python"

    def install(self, *arguments: str | Path) -> None:
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "--no-deps"]
        run(*pip, *arguments, cwd=self.path)

    def describe(self) -> dict[str, Any]:
        """What `import tinyvllm` gives there, from a directory that holds nothing."""
        script = ROOT / "tests/packaging/describe_install.py"
        empty = self.path / "empty"
        empty.mkdir(exist_ok=True)
        # -P: neither the script's directory nor the working directory is on the path.
        described: dict[str, Any] = json.loads(run(self.python, "-P", script, cwd=empty))
        return described
