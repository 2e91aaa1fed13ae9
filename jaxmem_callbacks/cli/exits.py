"""What the command line's exit codes mean."""

from __future__ import annotations

OK = 0
FAILED = 1
"""The script itself failed; its traceback is on stderr."""
FINDINGS = 1
"""``jaxmem doctor`` looked, and something is wrong."""
REFUSED = 2
"""Wrong arguments, a wrong preset, a script that never reaches a step, or a plan in which nothing fits."""
BROKEN_PIPE = 141
"""The reader of the output went away, as in ``jaxmem presets | head -1``; what a shell reports for SIGPIPE."""
