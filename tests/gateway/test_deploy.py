"""examples/deploy: what the unit and the Containerfile name exists, and fits together."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tinyvllm import EngineConfig
from tinyvllm.gateway.flags import build_parser, engine_config, limits, read_token

ROOT = Path(__file__).parents[2]
UNIT = (ROOT / "examples/deploy/tinyvllm.service").read_text()
CONTAINERFILE = (ROOT / "examples/deploy/Containerfile").read_text()
NOT_FLAGS = {"TINYVLLM_HOME"}
"""Read by the library itself (`tinyvllm.hub`)."""


def unit_values(key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", UNIT, re.MULTILINE)


def instructions(name: str) -> list[str]:
    """The arguments of every instruction of that name, continued lines joined."""
    joined = re.sub(r"\\\n\s*", " ", CONTAINERFILE)
    return re.findall(rf"^{name}\s+(.*)$", joined, re.MULTILINE)


def assignments(lines: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for line in lines for word in line.split())


@pytest.mark.parametrize(
    "environ",
    [assignments(unit_values("Environment")), assignments(instructions("ENV"))],
    ids=["unit", "container"],
)
def test_the_environment_is_the_commands_own(environ: dict[str, str], tmp_path: Path) -> None:
    parser = build_parser({})
    known = {f"TINYVLLM_{action.dest.upper()}" for action in parser._actions} | NOT_FLAGS
    assert environ and set(environ) <= known
    (tmp_path / "token").write_text("a-token-of-some-length\n")
    environ = {name: value.replace("%d", str(tmp_path)) for name, value in environ.items()}
    # The container's reader is told to give a token.
    args = build_parser({"TINYVLLM_TOKEN": "a-token-of-some-length"} | environ).parse_args([])
    if "TINYVLLM_TOKEN_FILE" in environ:
        args.token = None
    assert read_token(args) == "a-token-of-some-length"
    assert isinstance(engine_config(args), EngineConfig)
    assert limits(args).max_connections > 0


def test_every_name_in_the_files_is_known() -> None:
    """Also those in comments and commands."""
    text = UNIT + CONTAINERFILE
    known = {f"TINYVLLM_{action.dest.upper()}" for action in build_parser({})._actions}
    assert set(re.findall(r"TINYVLLM_[A-Z_]+", text)) <= known | NOT_FLAGS
    commands = re.findall(r"-m tinyvllm\.gateway(.*)", text)
    flags = {flag for action in build_parser({})._actions for flag in action.option_strings}
    assert {flag for rest in commands for flag in re.findall(r"--[a-z-]+", rest)} <= flags


def test_there_is_time_to_drain() -> None:
    drain = float(assignments(unit_values("Environment"))["TINYVLLM_DRAIN_SECONDS"])
    assert drain < float(unit_values("TimeoutStopSec")[0])
    container_stop = re.search(r"--stop-timeout (\d+)", CONTAINERFILE)
    assert container_stop is not None
    assert build_parser({}).parse_args([]).drain_seconds < float(container_stop[1])


def test_sockets_and_ports() -> None:
    defaults = build_parser({}).parse_args([])
    assert instructions("EXPOSE") == [str(defaults.port)]
    assert f":{defaults.port}/readyz" in instructions("HEALTHCHECK")[0]
    assert int(unit_values("LimitNOFILE")[0]) > 2 * defaults.max_connections


def test_what_the_image_copies_is_here() -> None:
    copied = [line.split()[:-1] for line in instructions("COPY") if not line.startswith("--from")]
    assert copied and all((ROOT / name).exists() for names in copied for name in names)
    assert all((ROOT / "pyproject.toml").read_text().count(f"\n{extra} = [") for extra in extras())


def extras() -> list[str]:
    return re.findall(r"pip install.*'(?:\.|tinyvllm)\[(\w+)\]'", UNIT + CONTAINERFILE)


def test_commands_in_brackets_are_json() -> None:
    for name in ("HEALTHCHECK", "ENTRYPOINT"):
        (line,) = instructions(name)
        command = json.loads(line[line.index("[") :])
        assert command[0] == "/opt/tinyvllm/bin/python"
        if command[1] == "-c":
            compile(command[2], name, "exec")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze in PATH")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    file = tmp_path / "tinyvllm.service"
    file.write_text(UNIT.replace("/opt/tinyvllm/bin/python", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(file)], capture_output=True, text=True, timeout=60
    )
    problems = [line for line in done.stderr.splitlines() if file.name in line]
    assert not problems, done.stderr
