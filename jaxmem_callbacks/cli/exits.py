"""What the command line's exit codes mean."""

from __future__ import annotations

OK = 0
REFUSED = 2
"""Wrong arguments, a wrong preset or a script that never reaches a step; the reason is on stderr."""
BROKEN_PIPE = 141
"""The reader of the output went away, as in ``jaxmem presets | head -1``; what a shell reports for SIGPIPE."""
