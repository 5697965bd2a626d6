"""Sends alerts to a webhook, or passes them to a command."""

import os
import shlex
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import urlsplit

from atoll.errors import ConfigError
from atoll.version import __version__

POST_S: Final = 5.0
"""Seconds for a webhook to answer."""
COMMAND_S: Final = 30.0
"""Seconds for a command to end, before it is killed."""
Send = Callable[[bytes, Mapping[str, str]], None]
"""Sends JSON, with variables for a command; OSError says why it could not."""


def target_of(setting: str, environment: Mapping[str, str] = os.environ) -> tuple[str, Send]:
    """Returns a name for a target without secrets, and how to send to it.

    Args:
        setting: `log.alert`: an address, a command, or $NAME of a variable that holds one.
        environment: The variables.

    Raises:
        ConfigError: The variable is not set, or the target is neither an address nor a command of this machine.
    """
    target = setting
    if setting.startswith("$"):
        target = environment.get(setting[1:], "")
        if not target:
            problem = f"the environment variable {setting[1:]} is not set; set it, or write an address or a command"
            raise ConfigError(f"log.alert: {problem}", setting="log.alert")
    try:
        if target.lower().startswith(("http://", "https://")):
            return f"the webhook at {urlsplit(target).hostname}", lambda body, _: _post(target, body)
        words = shlex.split(target)
    except ValueError:  # an open quote or bracket
        words = []
    if not words or shutil.which(words[0]) is None:
        found = f"{setting} holds" if setting.startswith("$") else f"{setting!r} is"  # a variable may hold a secret
        problem = f"{found} neither an http(s):// address nor a command of this machine; correct it"
        raise ConfigError(f"log.alert: {problem}", setting="log.alert")
    return f"the command {words[0]}", lambda body, variables: _run(words, body, variables)


class _Stay(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: they would turn the POST into a GET without the alert."""

    def redirect_request(self, *_: object) -> None:
        """Follows none; the status becomes an error."""


def _post(address: str, body: bytes) -> None:
    """POST to a webhook; the whole of it takes at most `POST_S`, also if the server answers byte by byte."""
    headers = {"Content-Type": "application/json", "User-Agent": f"atoll/{__version__}"}
    request = urllib.request.Request(address, body, headers, method="POST")
    problems: list[str] = []

    def post() -> None:
        try:
            with urllib.request.build_opener(_Stay).open(request, timeout=2 * POST_S):
                pass
        except urllib.error.HTTPError as refused:
            refused.close()
            problems.append(f"it answered with status {refused.code}")
        except Exception as fault:  # whatever a server may do
            said = str(fault) if isinstance(fault, OSError) else ""  # others may quote the address, which is a secret
            problems.append(said or type(fault).__name__)

    posting = threading.Thread(target=post, name="atoll webhook", daemon=True)
    posting.start()
    posting.join(POST_S)
    if posting.is_alive():
        raise TimeoutError(f"it did not answer within {POST_S:g} s")
    if problems:
        raise OSError(problems[0])


def _run(words: list[str], body: bytes, variables: Mapping[str, str]) -> None:
    """Run a command without a shell, with JSON on its standard input."""
    process = subprocess.Popen(
        words,
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the run
    )
    try:
        process.communicate(body, timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        raise TimeoutError(f"it did not end within {COMMAND_S:g} s, and was killed") from None
    if process.returncode:
        raise OSError(f"it ended with status {process.returncode}")
