"""TensorBoard's tab **Memory**: the memory page of the runs below the log folder.

TensorBoard finds the plugin by its entry point and loads it in its own process. Nothing here imports JAX, raises, writes, follows
a link or reads outside the log folder. What the tab shows comes from ``memory.jsonl`` alone, so TensorBoard's data server is
neither needed nor in the way.
"""

from __future__ import annotations

import gzip
import json
import shlex
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from tensorboard.plugins import base_plugin
from werkzeug.wrappers import Request, Response

import jaxmem_callbacks
from jaxmem_callbacks.readers.following import FollowedFolder, LogFolder, log_folders
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.page import tab_module
from jaxmem_callbacks.records.terminal import shown
from jaxmem_callbacks.writers.report import story_model

_READ_S = 0.6  # of one answer; a long run is read in several
_LISTED_S = 5.0  # a list of folders is as old as that at most
_FOLDERS = 8  # that are kept read
_RUNS = 8  # of one folder that are sent, the latest
_EMPTY = (
    "There is no memory.jsonl in the log folder yet. "
    "The monitor writes one into its logdir at the first step that it is called for."
)


@final
class MemoryPlugin(base_plugin.TBPlugin):
    """The tab's server.

    Args:
        context: TensorBoard's; of it the log folder alone is used.
    """

    plugin_name = "jaxmem"

    def __init__(self, context: base_plugin.TBContext) -> None:
        self._roots, self._notes = _roots_of(context)
        self._lock = threading.Lock()
        self._listed: tuple[float, Mapping[str, LogFolder]] = (-_LISTED_S, {})
        self._followed: dict[str, FollowedFolder] = {}

    def get_plugin_apps(self) -> dict[str, Callable[..., Any]]:
        """Route -> what answers it."""
        routes = {"/page.js": self._page, "/runs": self._runs, "/run": self._run}
        return {route: _answering(answer) for route, answer in routes.items()}

    def is_active(self) -> bool:
        """Whether there is a run to show, or a sentence on why there can be none."""
        try:
            return bool(self._notes or self._folders())
        except Exception:  # noqa: BLE001 - TensorBoard asks before it shows anything at all
            return False

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """Which module draws the tab."""
        return base_plugin.FrontendMetadata(es_module_path="/page.js", tab_name="Memory")

    def _folders(self) -> Mapping[str, LogFolder]:
        now = time.monotonic()
        listed_s, folders = self._listed
        if now - listed_s >= _LISTED_S:
            folders = {}
            for label, root in self._roots.items():
                for folder in log_folders(root):
                    folders["/".join(part for part in (label, folder.name) if part not in ("", ".")) or "."] = folder
            self._listed = now, folders
        return folders

    def _page(self, request: Request) -> Response:
        return _sent(request, tab_module(), "text/javascript; charset=utf-8")

    def _runs(self, request: Request) -> Response:
        folders = sorted(self._folders().items(), key=lambda each: -each[1].changed_s)
        listed = {
            "folders": [{"name": name, "changed_s": folder.changed_s} for name, folder in folders],
            "notes": self._notes,
            "empty": _EMPTY,
            "footer": f"Read by jaxmem_callbacks {jaxmem_callbacks.__version__} from memory.jsonl. Bytes are those that the "
            "source reported; what a platform does not report is unknown, with its reason.",
        }
        return _sent(request, _as_json(listed), "application/json")

    def _run(self, request: Request) -> Response:
        name, known = request.args.get("folder", ""), request.args.get("version", "")
        folder = self._folders().get(name)
        if folder is None:
            return Response("There is no such folder with a run.", status=404)
        with self._lock:
            followed = self._follow(name, folder)
            followed.advance(_READ_S)
            share, version = followed.share, followed.version
            is_partial = share < 1 and bool(known)
            stories = [] if known == version or is_partial else followed.runs()[-_RUNS:]
            newest = followed.runs()[-1:]
            ended = bool(newest) and newest[0].ended
            answer = {
                "share": share,
                "version": known if is_partial else version,
                "closed": ended,
                "runs": [story_model(story, name if story is stories[-1] else None) for story in stories],
                "remark": shown(" ".join(followed.remarks[:3])) or "No line of a run was read here.",
            }
        return _sent(request, _as_json(answer), "application/json")

    def _follow(self, name: str, folder: LogFolder) -> FollowedFolder:
        """The folder's reader; the one that was asked for longest ago is let go."""
        followed = self._followed.pop(name, None) or FollowedFolder(folder.path)
        self._followed[name] = followed
        while len(self._followed) > _FOLDERS:
            del self._followed[next(iter(self._followed))]
        return followed


def _roots_of(context: base_plugin.TBContext) -> tuple[dict[str, Path], list[str]]:
    """Label -> local log folder, and a sentence for each that is not local."""
    flags = getattr(context, "flags", None)
    given = getattr(context, "logdir", None) or getattr(flags, "logdir", None) or ""
    parts = {"": given} if given else _specified(getattr(flags, "logdir_spec", None) or "")
    roots: dict[str, Path] = {}
    notes: list[str] = []
    for label, place in parts.items():
        if "\0" in place:
            continue
        if "://" in place:
            command = advise("command.typed", typed=f"report {shlex.quote(place)}")
            notes.append(
                shown(
                    f"{place} is no local folder, and the Memory tab reads local folders only. In a terminal `{command}` writes "
                    "this page of its runs. TensorBoard's other pages have their pictures and scalars."
                )
            )
        else:
            try:
                roots[label] = Path(place).expanduser().resolve()
            except (OSError, RuntimeError) as error:  # such as no home of that name, or links in a ring
                notes.append(shown(f"{place} cannot be read: {error}"))
    return roots, notes


def _specified(text: str) -> dict[str, str]:
    """TensorBoard's ``--logdir_spec``: folders, each with a name before a colon or without, between commas."""
    found: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        label, colon, place = part.partition(":")
        is_named = bool(colon) and not place.startswith("//") and "/" not in label and label != "~"
        found[label if is_named else part] = place if is_named else part
    return found


def _as_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _answering(answer: Callable[[Request], Response]) -> Callable[..., Any]:
    """The application of a route: whatever goes wrong is a sentence in the answer."""

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        try:
            response = answer(Request(environ))
        except Exception as error:  # noqa: BLE001 - a fault in one view must not become TensorBoard's
            response = Response(shown(f"{type(error).__name__}: {error}"), status=500, mimetype="text/plain")
        return response(environ, start_response)

    return application


def _sent(request: Request, text: str, mimetype: str) -> Response:
    data = text.encode()
    headers = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        data = gzip.compress(data, compresslevel=5)
        headers["Content-Encoding"] = "gzip"
    return Response(data, mimetype=mimetype, headers=headers)
