"""How many files the three ways of data pass, and how often they change file: a bound is raised only by an edit that says why.

A way is the order in which functions of the package are called for the first time. What a process has done before is not
called again, so each way is followed in a process of its own: `python tools/ways.py plan` shows it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("way", "files", "changes"),
    [
        # Segments have a file of their own. A loss asks for its step's policy, of which another loss may obey what it cannot.
        ("gradient", 16, 84),
        # A CPU's cuts are moved, and chosen among several. Compiles run in threads: one change more or less.
        ("plan", 65, 360),
        ("reading", 38, 140),  # in threads too
    ],
)
def test_a_way_gets_no_longer(way, files, changes):
    done = subprocess.run(
        [sys.executable, "tools/ways.py", way, "--json"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    passed, changed = json.loads(done.stdout.splitlines()[-1])
    assert 3 < passed <= files
    assert changed <= changes
