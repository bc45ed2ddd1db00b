"""The README's Python block runs and prints what the README shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_python_block_prints_what_is_shown() -> None:
    code, shown = re.findall(r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)```", README, re.S)[0]
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == shown
