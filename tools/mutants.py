"""`make mutants`: deletes or inverts, one at a time, the lines that keep the six promises; each must turn a test red.

The mutants are the rows of tools/mutants.toml. One line is printed for each, with the test that went red. The exit code is 1
when one survives, when a line is not found, when a mutant does not parse, or when the tests are not green to begin with. The
working tree is never touched: every mutant lives in a temporary copy.
"""

from __future__ import annotations

import argparse
import ast
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).resolve().parent / "mutants.toml"
PROMISES = (1, 2, 3, 4, 5, 6)
LEAST = 4  # mutants a promise
LIMIT_S = 240


class TableError(Exception):
    """The table and the tree do not fit; the message names the entry and the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One line less, or one line the other way round.

    Attributes:
        promise: Which of the six promises the line keeps.
        file: Where it stands, from the root of the tree.
        line: The line without its indentation; it occurs exactly once in the file.
        replacement: What stands there instead; empty to delete it.
        tests: What pytest is asked to run; at least one of them must fail.
        why: What goes wrong for a user without the line.
    """

    promise: int
    file: str
    line: str
    tests: tuple[str, ...]
    why: str
    replacement: str = ""


def read_table(path: Path) -> list[Mutant]:
    """The mutants of a table.

    Raises:
        TableError: an entry with an unknown or missing key, or with no such promise.
    """
    mutants = []
    for number, entry in enumerate(tomllib.loads(path.read_text())["mutant"], start=1):
        try:
            mutant = Mutant(**{**entry, "tests": tuple(entry["tests"])})
        except (TypeError, KeyError) as error:
            msg = (
                f"Entry {number} of {path.name}: {error}. Expected promise, file, line, tests, why, maybe replacement."
            )
            raise TableError(msg) from error
        if mutant.promise not in PROMISES:
            msg = f"Entry {number} of {path.name}: promise {mutant.promise}, expected one of {PROMISES}."
            raise TableError(msg)
        mutants.append(mutant)
    return mutants


def too_few(mutants: list[Mutant]) -> list[str]:
    """Promises that fewer than four mutants put to the proof."""
    counts = {promise: sum(mutant.promise == promise for mutant in mutants) for promise in PROMISES}
    return [
        f"promise {promise} has {count} mutants, it needs {LEAST}" for promise, count in counts.items() if count < LEAST
    ]


def mutate(text: str, mutant: Mutant) -> tuple[str, int]:
    """The file's text with the one line changed, and the line's number.

    Raises:
        TableError: the line is not there exactly once, nothing would change, or the result is not Python.
    """
    lines = text.splitlines(keepends=True)
    places = [number for number, line in enumerate(lines) if line.strip() == mutant.line.strip()]
    if len(places) != 1:
        msg = f"{mutant.file}: found {len(places)} lines that read `{mutant.line}`, expected exactly one."
        raise TableError(msg)
    if mutant.replacement.strip() == mutant.line.strip():
        msg = f"{mutant.file}: the replacement of `{mutant.line}` is the line itself."
        raise TableError(msg)
    (place,) = places
    indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
    # A deleted statement may have been the only one of its block.
    candidates = [f"{indent}{mutant.replacement.strip()}\n"] if mutant.replacement else ["", f"{indent}pass\n"]
    for candidate in candidates:
        changed = "".join([*lines[:place], candidate, *lines[place + 1 :]])
        if not mutant.file.endswith(".py") or parses(changed):  # a page's script is read by the browser alone
            return changed, place + 1
    msg = f"{mutant.file}:{place + 1}: without `{mutant.line}` the file is not Python. Give a replacement."
    raise TableError(msg)


def parses(text: str) -> bool:
    """Whether it is Python at all."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def copy_tree(target: Path) -> None:
    """The working tree as it is now, without what git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    # Compiled once for all mutants. By the hash of the source: two mutants may be of one second and of one size.
    compile_all = ["-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "jaxmem_callbacks", "tests"]
    subprocess.run([sys.executable, *compile_all], cwd=target, check=True)


def run_tests(tree: Path, tests: list[str], *options: str, limit_s: float | None) -> tuple[int, list[str], str]:
    """The exit code of pytest, the tests that went red, and its output; exit code -1 when it ran past the limit."""
    variables = dict(os.environ, PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="1")
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-rfE", "--tb=short", "--hypothesis-seed=0"]
    command += ["-p", "no:cacheprovider", *options, *tests]
    try:
        answer = subprocess.run(
            command,
            cwd=tree,
            env=variables,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, [], ""
    red = [line.split(" - ")[0] for line in answer.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return answer.returncode, [line.partition(" ")[2] for line in red], answer.stdout + answer.stderr


def try_mutant(mutant: Mutant, trees: queue.SimpleQueue[Path]) -> tuple[bool, str]:
    """Whether a test went red, and the line to print."""
    tree = trees.get()
    path = tree / mutant.file
    original = path.read_text()
    start = time.monotonic()
    try:
        changed, number = mutate(original, mutant)
        path.write_text(changed)
        code, red, output = run_tests(tree, list(mutant.tests), "-x", limit_s=LIMIT_S)
    finally:
        path.write_text(original)
        trees.put(tree)
    what = f"promise {mutant.promise}  {mutant.file}:{number}  {time.monotonic() - start:.0f} s"
    if code == -1:
        return True, f"red       {what}  ran past {LIMIT_S} s"
    if code == 1 and red:
        return True, f"red       {what}  {red[0]}"
    if code == 0:
        return (
            False,
            f"SURVIVED  {what}\n  `{mutant.line}` -> `{mutant.replacement}`\n  {mutant.why}\n  {' '.join(mutant.tests)}",
        )
    return False, f"NO PROOF  {what}: pytest ended with exit code {code}, no test ran\n{output[-3000:]}"


def baseline(mutants: list[Mutant], tree: Path, jobs: int) -> bool:
    """Whether every named test is green as the tree stands; prints what is not."""
    where = [sys.executable, "-c", "import jaxmem_callbacks; print(jaxmem_callbacks.__file__)"]
    variables = dict(os.environ, PYTHONPATH=str(tree))
    package = subprocess.run(where, cwd=tree, env=variables, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(package).is_relative_to(tree):
        print(f"The copy is not what gets imported: {package}. Unset what puts another one first.")
        return False
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    files = {test for test in tests if "::" not in test}
    once = [test for test in tests if test in files or test.split("::")[0] not in files]
    code, red, output = run_tests(tree, once, "-n", str(jobs), "--dist", "loadfile", limit_s=None)
    if code:
        print(output[-4000:])
        print(
            f"The tests are not green without mutants ({', '.join(red) or f'exit code {code}'}): nothing can be proved."
        )
    return code == 0


def main(arguments: list[str]) -> int:
    """The command line; 0 when every mutant turned a test red."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--promise", type=int, choices=PROMISES, help="only this promise's mutants")
    parser.add_argument("--file", default="", help="only mutants of files whose name contains this")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1))
    options = parser.parse_args(arguments)
    whole = read_table(options.table)
    mutants = [mutant for mutant in whole if options.promise in (None, mutant.promise) and options.file in mutant.file]
    for mutant in mutants:
        mutate((ROOT / mutant.file).read_text(), mutant)  # a table that does not fit fails before anything runs
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jaxmem-mutants-") as folder:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        copies = [Path(folder).resolve() / str(number) for number in range(options.jobs)]
        for copy in copies:
            copy_tree(copy)
            trees.put(copy)
        if not baseline(mutants, copies[0], options.jobs):
            return 1
        print(f"green without mutants in {time.monotonic() - start:.0f} s; now {len(mutants)} mutants", flush=True)
        alive = 0
        with ThreadPoolExecutor(options.jobs) as pool:
            for dead, line in pool.map(lambda mutant: try_mutant(mutant, trees), mutants):
                alive += not dead
                print(line, flush=True)
    few = too_few(whole)
    print(f"{len(mutants) - alive} of {len(mutants)} mutants turned a test red, in {time.monotonic() - start:.0f} s")
    print(*few, sep="\n", end="\n" if few else "")
    return 1 if alive or few else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TableError as error:
        sys.exit(str(error))
