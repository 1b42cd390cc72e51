"""axe-core, the accessibility checker, from npm: fetched once into the ignored folder build/npm."""

from __future__ import annotations

import asyncio
import functools
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.chromium import Page

AXE = "axe-core@4.14.1"
_FOLDER = Path(__file__).parents[2] / "build" / "npm"


@functools.cache
def axe_source() -> str | None:
    """The script; None without npm, or where npm finds no registry."""
    script = _FOLDER / "node_modules" / "axe-core" / "axe.min.js"
    npm = shutil.which("npm")
    if not script.exists() and npm is not None:
        _FOLDER.mkdir(parents=True, exist_ok=True)
        command = [npm, "install", "--silent", "--no-audit", "--no-fund", "--no-save", AXE]
        subprocess.run(command, cwd=_FOLDER, timeout=90, check=False)
    return script.read_text() if script.exists() else None


async def violations(page: Page) -> list[str]:
    """What axe finds on a page: "rule: the elements, why" for each rule that is broken."""
    source = await asyncio.to_thread(axe_source)
    assert source is not None, "ask axe_source first"
    await page.evaluate(f"(() => {{ {source}; return true; }})()")
    found: list[str] = await page.evaluate(
        """axe.run(document, { resultTypes: ["violations"] }).then(({ violations }) =>
            violations.map(({ id, nodes }) => {
                const where = nodes.map((n) => `${n.target.join(" ")} (${n.failureSummary})`);
                return `${id}: ${where.join("; ").replaceAll("\\n", " ")}`;
            }))"""
    )
    return found
