"""Which nvcc a build takes, what it says about one that is of no use, and when make fetches one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.builds import ROOT, Environment

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(300)]

OLD = 'echo "Cuda compilation tools, release 11.8, V11.8.89"'
NEW = 'echo "Cuda compilation tools, release 13.0, V13.0.88"'
BROKEN = (
    f'if [ "$1" = --version ]; then {NEW}; else echo "unsupported GNU version!" >&2; exit 1; fi'
)
DEAD = "echo no such library; exit 127"


def fake_nvcc(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="ascii")
    path.chmod(0o755)
    return path


def configure(
    build: Path, wanted: str, python: str | Path = sys.executable, **environment: str
) -> tuple[int, str]:
    """CMake's exit status, and what it said, in one line."""
    import cmake
    import pybind11

    variables = {name: value for name, value in os.environ.items() if name != "CUDACXX"}
    done = subprocess.run(
        [
            Path(cmake.CMAKE_BIN_DIR) / "cmake",
            *("-S", ROOT / "csrc", "-B", build, f"-DTINYVLLM_CUDA={wanted}"),
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DPython_EXECUTABLE={python}",
        ],
        env=variables | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (OLD, "is of CUDA 11.8; 12.0 or newer is needed"),
        (BROKEN, "(CUDA 13.0) cannot compile an empty program: unsupported GNU version!"),
        (DEAD, "does not run: 127 no such library"),
    ],
)
def test_an_nvcc_of_no_use_is_named(script: str, message: str, tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path / "nvcc", script)
    status, said = configure(tmp_path / "build", "ON", CUDACXX=str(nvcc))
    assert status != 0
    assert f"no CUDA kernels can be built: {nvcc}" in said.replace("- ", "-") and message in said
    assert "cuda-toolkit[nvcc,cudart,cccl]==13.0.*" in said and "TINYVLLM_CUDA=OFF" in said


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there it is an error")
def test_without_a_gpu_it_is_a_warning(tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path / "nvcc", OLD)
    status, said = configure(tmp_path / "build", "AUTO", CUDACXX=str(nvcc))
    assert status == 0 and "building for the CPU only" in said and "CUDA 11.8" in said


@pytest.mark.parametrize("is_whole", [True, False])
def test_nvcc_of_the_environments_packages_comes_first(is_whole: bool, tmp_path: Path) -> None:
    """As PyPI's cuda-toolkit lays it out; without its headers it is not one to build with."""
    environment = Environment.create(tmp_path / "venv")
    (site_packages,) = (environment.path / "lib").glob("python*/site-packages")
    root = site_packages / "nvidia/cu13"
    nvcc = fake_nvcc(root / "bin/nvcc", OLD)
    wanted = ["lib/libcudart_static.a", "include/cuda_runtime.h", "include/cccl/nv/target"]
    for name in wanted if is_whole else wanted[:2]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    elsewhere = fake_nvcc(tmp_path / "bin/nvcc", DEAD)
    path = f"{elsewhere.parent}{os.pathsep}{os.environ['PATH']}"
    status, said = configure(tmp_path / "build", "ON", environment.python, PATH=path)
    assert status != 0
    assert ("is of CUDA 11.8" in said) == is_whole
    assert ("does not run: 127" in said) != is_whole
    assert nvcc.exists()


def make(tmp_path: Path, *variables: str, **environment: str) -> str:
    """What `make build` would do in a new environment."""
    command = ["make", "-n", "build", f"VENV={tmp_path}/venv", *variables]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        command, cwd=ROOT, env=clean | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("variables", "nvcc", "fetches"),
    [
        (["HAS_GPU=yes"], NEW, False),
        (["HAS_GPU=yes"], OLD, True),
        (["HAS_GPU=yes"], DEAD, True),
        (["HAS_GPU=yes", "TINYVLLM_CUDA=OFF"], DEAD, False),
        (["HAS_GPU="], DEAD, False),
        (["HAS_GPU=", "TINYVLLM_CUDA=ON"], DEAD, True),
    ],
)
def test_make_fetches_nvcc_where_there_is_a_gpu_and_none(
    variables: list[str], nvcc: str, fetches: bool, tmp_path: Path
) -> None:
    said = make(tmp_path, *variables, CUDACXX=str(fake_nvcc(tmp_path / "nvcc", nvcc)))
    assert "venv: core gateway build (" in said
    assert ("venv: cuda (" in said) == fetches
