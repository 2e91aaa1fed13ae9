"""Eight virtual CPU devices, set the way that overwrites nothing of the environment; the backend starts after this file."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


def pytest_terminal_summary(terminalreporter):
    """A compiler or browser that is missing is told at the end, one line each: what a run did not prove is never silent."""
    reasons = {str(report.longrepr[-1]) for report in terminalreporter.stats.get("skipped", [])}
    for line in sorted(reason.removeprefix("Skipped: ") for reason in reasons if "not proved" in reason):
        terminalreporter.write_line(line, yellow=True)
