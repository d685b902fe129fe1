"""The program of a zygote, started by file path and with an empty environment as `python -I start.py SOURCE_ROOT FD`.

It is small: a script is compiled whenever it is started, and what that leaves in memory every box would be a copy of.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, sys.argv[1])

from ringfence.sandbox.process.zygote import main, worker

_channel = main.serve(int(sys.argv[2]))
try:
    _program = worker.program(_channel)
    try:
        exec(_program.code(), _program.namespace)  # noqa: S102 - this is what the box is for
        if _program.last is not None:
            _program.answer(eval(_program.last, _program.namespace))  # noqa: S307 - likewise
    except BaseException as _exc:  # the program's, whatever it is: it ends as it would outside
        sys.setprofile(None)
        sys.settrace(None)
        _program.failed(_exc)
    # What the program wanted to see of its own steps, it need not see of ours.
    sys.setprofile(None)
    sys.settrace(None)
    os._exit(_program.finish())
finally:
    os._exit(125)
