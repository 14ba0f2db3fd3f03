"""Runs an ffmpeg that frames are piped to or from, and ends it whatever happens."""

import contextlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any

from pipeline.ffmpeg import find_ffmpeg

_QUIET = ("-hide_banner", "-nostdin", "-loglevel", "error", "-xerror")
_MOST_WORDS = 600


@contextlib.contextmanager
def running(
    stream: Any, *, stdin: int, stdout: int | IO[bytes]
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], str]]]:
    """Runs an ffmpeg, and kills it on leaving where it still runs.

    Args:
        stream: What it does: an output of ffmpeg-python.
        stdin: As `subprocess.Popen` takes it.
        stdout: The same.

    Yields:
        The process, and a function that returns the end of what it has complained of.

    Raises:
        RequestError: There is no ffmpeg here.
    """
    command = stream.global_args(*_QUIET).compile(cmd=find_ffmpeg().path)
    # A file: a pipe that nobody reads meanwhile would fill up.
    with tempfile.TemporaryFile() as words:

        def said() -> str:
            words.seek(0)
            text = words.read().decode(errors="replace").strip()
            return text[-_MOST_WORDS:] or "ffmpeg gave no reason"

        process = subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=words)
        try:
            yield process, said
        finally:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
            process.wait()
