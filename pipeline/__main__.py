"""`python -m pipeline`: the same as the command `tilereel`.

Written so that an old Python can read it and say that it is too old.
"""

import signal
import sys


def main():
    """Runs the command line and ends the process."""
    if sys.version_info < (3, 11):
        found = "%d.%d" % sys.version_info[:2]
        sys.exit("tilereel: Python %s is too old; it takes 3.11" % found)
    # At once, so that Ctrl-C while Python imports is no traceback; `render` sees to
    # the rest of its time itself.
    signal.signal(signal.SIGINT, _interrupted)
    try:
        from pipeline import cli
    except ModuleNotFoundError as error:
        sys.exit("tilereel: %s is not installed; run `make setup`" % error.name)
    cli.main()


def _interrupted(number, frame):
    print("Interrupted.", file=sys.stderr)
    sys.exit(130)


if __name__ == "__main__":
    main()
