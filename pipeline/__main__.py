"""`python -m pipeline`: the same as the command `tilereel`.

Written so that an old Python can read it and say that it is too old.
"""

import sys

if sys.version_info < (3, 11):
    sys.exit("tilereel: Python %d.%d is too old; it takes 3.11" % sys.version_info[:2])

try:
    from pipeline.cli import main
except ModuleNotFoundError as error:
    sys.exit("tilereel: %s is not installed; run `make setup`" % error.name)

main()
