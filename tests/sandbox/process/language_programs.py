"""Small programs about the language: how they start, what they read and say, and how they end."""

from __future__ import annotations

from tests.sandbox.comparing import Honest

READING = (
    Honest("stdin_as_a_whole", "import sys\nprint(sys.stdin.read().upper())", stdin="héllo\nwörld".encode()),
    Honest("stdin_line_by_line", "import sys\nfor line in sys.stdin: print(repr(line))", stdin=b"a\nb\n\nc"),
    Honest("stdin_as_bytes", "import sys\nprint(sys.stdin.buffer.read())", stdin=bytes(range(256))),
    Honest("stdin_that_is_no_text", "print(input())", stdin=b"\xff\xfe\n"),
    Honest("input_to_the_end", "while True: print('>', input('? '))", stdin=b"one\ntwo"),
    Honest("argv", "import sys\nprint(sys.argv[1:], len(sys.argv))", argv=("a b", "ü", "", "-x", "--", "*")),
)

EXITS = (
    Honest("number", "import sys\nprint('before')\nsys.exit(3)"),
    Honest("message", "import sys\nprint('out', end='')\nsys.exit('a last word: ü')"),
    Honest("nothing", "raise SystemExit"),
    Honest("truth", "exit(True)"),
    Honest("large", "import sys\nsys.exit(256 + 7)"),
    Honest("negative", "import sys\nsys.exit(-2)"),
    Honest("tuple", "raise SystemExit(('a', 2))"),
    Honest("at_once", "import os\nprint('never written', end='')\nos._exit(9)"),
    Honest("in_a_thread", "import threading, sys\nt = threading.Thread(target=sys.exit)\nt.start(); t.join()"),
    Honest("in_atexit", "import atexit, sys\n@atexit.register\ndef last(): sys.exit(4)\nprint('end')"),
    Honest("subclass", "class Bye(SystemExit): code = 12\nraise Bye"),
    Honest("output_closed", "import sys\nprint('x')\nsys.stdout.close()\nsys.exit(3)"),
    Honest("without_any_stream", "import sys\ndel sys.stdout, sys.stderr, sys.stdin\nraise SystemExit('y')"),
    Honest(
        "at_no_depth", "import sys\nclass A:\n    def __del__(self): print('del')\na = A()\nsys.setrecursionlimit(7)"
    ),
    Honest("without_streams", "import sys\nsys.stdout = sys.stderr = None\nprint('x')\nraise SystemExit('y')"),
    Honest("output_full", "import os\nos.dup2(os.open('/dev/full', os.O_WRONLY), 1)\nprint('x')"),
    Honest(
        "after_atexit",
        """
        import atexit
        atexit.register(print, "first registered")
        @atexit.register
        def last():
            print("last registered")
            raise ValueError("in atexit")
        print("main")
        raise TypeError("main ends")
        """,
    ),
    Honest(
        "after_threads",
        """
        import atexit, threading, time
        atexit.register(print, "atexit comes after")
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread done"))).start()
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        file = open("output/f", "w")
        file.write("never closed, with a daemon left")
        print("main done")
        """,
    ),
    Honest(
        "files_never_closed",
        """
        f = open("output/a.txt", "w"); f.write("a")
        class Keeper: pass
        k = Keeper(); k.me = k; k.file = open("output/b.txt", "w"); k.file.write("b")
        def g(): return h
        h = open("output/c.txt", "wb"); h.write(b"c")
        cache = {"f": open("output/d.txt", "w")}; cache["f"].write("d"); cache["self"] = cache
        """,
    ),
    Honest(
        "finalizers",
        """
        import os, weakref
        class Loud:
            def __init__(self, name): self.name = name
            def __del__(self): print("del", self.name, os.path.basename("a/b"), helper())
        def helper(): return 7
        loud = Loud("global")
        cycle = Loud("cycle"); cycle.me = cycle
        del cycle
        weakref.finalize(loud, print, "finalize")
        print("end")
        """,
    ),
    Honest(
        "finalizers_of_a_module",
        r"""
        with open("other.py", "w") as file:
            print("import sys\nclass A:\n    def __del__(self): sys.stdout.write('del other\\n')\na = A()", file=file)
            print("f = open('output/o.txt', 'w'); f.write('o')", file=file)
        import other
        print("end")
        """,
    ),
    Honest("by_way_of_c", "import ctypes\nprint('python')\nctypes.CDLL(None).printf(b'buffered by C\\n')"),
    Honest("crash", "import ctypes\nprint('lost')\nctypes.string_at(0)"),
    Honest("abort", "import os\nos.abort()"),
)

ERRORS = (
    Honest(
        "uncaught",
        """
        def outer():
            inner({"a": 1})

        def inner(d):
            return d["b"] + 1  # here

        print("start")
        outer()
        """,
    ),
    Honest(
        "chained",
        """
        try:
            try:
                1 / 0
            except ZeroDivisionError as exc:
                raise KeyError("k") from exc
        except KeyError as exc:
            try:
                raise ValueError("v") from None
            except ValueError:
                raise exc
        """,
    ),
    Honest(
        "chained_implicitly",
        """
        class Mine(Exception):
            def __str__(self): return "two\\nlines"
        try:
            [][1]
        except IndexError:
            error = Mine()
            error.add_note("a note")
            raise error
        """,
    ),
    Honest(
        "group",
        """
        def fail(n):
            raise OSError(n, "no")
        errors = []
        for n in (2, 13):
            try: fail(n)
            except OSError as exc: errors.append(exc)
        raise ExceptionGroup("both", [*errors, ExceptionGroup("more", [ValueError(1)])])
        """,
    ),
    Honest("syntax", "print('never')\nfor x in range(3)\n    print(x)\n"),
    Honest("indentation", "if True:\nprint(1)\n"),
    Honest("tabs", "if True:\n        x = 1\n\ty = 2\n"),
    Honest("unclosed_bracket", "x = (1,\n"),
    Honest("unclosed_string", "x = 'abc\n"),
    Honest("recursion", "def down(n): return down(n + 1)\ndown(0)\n"),
    Honest("depth", "def down(n): return n and down(n - 1)\nprint(down(985))"),
    Honest("syntax_in_an_import", "open('other.py', 'w').write('def f(:\\n')\nimport other\n"),
    Honest("in_eval", "eval('1 +')"),
    Honest("in_exec", "exec(compile('def f():\\n  raise ValueError(3)\\nf()', 'made-up.py', 'exec'))"),
    Honest("interrupted", "print('x', end='')\nraise KeyboardInterrupt"),
    Honest("interrupted_by_a_signal", "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('no')\n"),
    Honest("generator_exit", "raise GeneratorExit('x')"),
    Honest("own_excepthook", "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__, a[1])\n1/0"),
    Honest("no_excepthook", "import sys\ndel sys.excepthook\n1/0"),
    Honest("broken_excepthook", "import sys\ndef hook(*a): raise RuntimeError('worse')\nsys.excepthook = hook\n1/0"),
    Honest("exit_in_excepthook", "import sys\nsys.excepthook = lambda *a: sys.exit(6)\n1/0"),
    Honest("last_error", "import atexit, sys\natexit.register(lambda: print(repr(sys.last_value)))\n1/0"),
    Honest("in_a_thread", "import threading\nt = threading.Thread(target=lambda: 1/0, name='t')\nt.start(); t.join()"),
    Honest("in_del", "class A:\n    def __del__(self): raise ValueError('del')\nA()\nprint('on')"),
    Honest("import_nothing", "import nonesuch.module"),
    Honest("not_a_coroutine", "import asyncio\nasyncio.run(3)"),
    Honest("never_awaited", "async def f(): pass\nf()\nprint('x')"),
)

SOURCES = (
    Honest("in_another_encoding", "# coding: latin-1\nprint('\xe4', ascii('\xe4'))\n".encode("latin-1")),
    Honest("with_a_byte_order_mark", b"\xef\xbb\xbfprint('x')\n"),
    Honest("with_carriage_returns", b"x = 1\r\nprint(x)\r\n1/0\r\n"),
    Honest("without_a_last_newline", "1/0"),
    Honest("empty", ""),
    Honest("long", "x = 0\n" + "x += 1\n" * 20_000 + "print(x)\n"),
    Honest("future", "from __future__ import annotations\ndef f(x: Nonesuch): pass\nprint(f.__annotations__)"),
    Honest("docstring", "'''What I am.'''\nprint(__doc__)"),
    Honest(
        "names_of_main",
        """
        import sys
        print(sorted(globals()), __name__, __file__, __doc__, __package__, __spec__, type(__loader__).__name__)
        print(sys.modules["__main__"].__dict__ is globals(), __builtins__.__name__, repr(sys.modules["__main__"]))
        print(sys.argv, sys.path[0], sys.orig_argv[1:])
        """,
    ),
    Honest(
        "of_main", "import inspect\ndef f(x):\n    return x  # this\nprint(inspect.getsource(f), open(__file__).read())"
    ),
    Honest(
        "flags",
        """
        import subprocess, sys
        print(sys.flags, sys.warnoptions, sys._xoptions, sys.dont_write_bytecode)
        print(subprocess._args_from_interpreter_flags())
        """,
    ),
    Honest(
        "streams",
        """
        import sys
        for s in (sys.stdin, sys.stdout, sys.stderr):
            print(s.encoding, s.errors, s.isatty(), s.line_buffering, s.name, s.mode, s.fileno(), s.newlines)
            print(s.write_through, s.buffer.name)
        print(sys.__stdout__ is sys.stdout, sys.getfilesystemencoding(), sys.getfilesystemencodeerrors())
        """,
    ),
    Honest(
        "surroundings",
        """
        import gc, locale, os, signal, sys, threading
        print(sorted(os.environ.items()), os.getcwd(), locale.getpreferredencoding(), locale.getlocale())
        print(gc.isenabled(), gc.get_threshold(), sys.getswitchinterval(), signal.pthread_sigmask(signal.SIG_BLOCK, []))
        print([(s, signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM, signal.SIGCHLD, 25)])
        print(threading.active_count(), threading.current_thread() is threading.main_thread(), oct(os.umask(0)))
        print(sys.executable, sys.prefix, sys.path[1:], sys.gettrace(), sys.getprofile())
        print(sys.meta_path, sys.path_hooks, sys.excepthook is sys.__excepthook__, sorted(os.listdir("/proc/self/fd")))
        """,
    ),
    Honest("a_sibling", "open('made.py', 'w').write('value = 42\\n')\nimport made\nprint(made.value, made.__file__)"),
    Honest("a_package", "import os\nos.makedirs('p/q')\nopen('p/q/m.py', 'w').write('print(__name__)')\nimport p.q.m"),
    Honest("import_main", "open('o.py', 'w').write('import __main__\\nprint(__main__.x)')\nx = 5\nimport o"),
    Honest(
        "cached",
        "import os\nopen('m.py', 'w').write('x = 1')\nimport m\nprint(os.listdir('__pycache__'), m.__cached__)",
    ),
    Honest("reload", "import importlib, json\nprint(importlib.reload(json).loads('[1]'))"),
    Honest(
        "pickle",
        """
        import copy, pickle
        class Point:
            def __init__(self, x): self.x = x
        def f(): return 1
        print(pickle.loads(pickle.dumps(Point(3))).x, pickle.loads(pickle.dumps(f)) is f, copy.deepcopy(Point(4)).x)
        """,
    ),
    Honest(
        "tracing",
        """
        import sys
        def note(frame, event, argument):
            sys.stdout.write(f"{event} {frame.f_code.co_name}\\n")
            return note
        sys.settrace(note)
        def f(): return 1
        f()
        """,
    ),
    Honest(
        "profiling",
        """
        import sys
        def note(frame, event, argument):
            if event in ("call", "return"): sys.stdout.write(f"{event} {frame.f_code.co_name}\\n")
        sys.setprofile(note)
        def f(): return abs(-1)
        f()
        """,
    ),
    Honest(
        "warnings",
        """
        import warnings
        warnings.warn("old", DeprecationWarning)
        warnings.warn("mind", stacklevel=1)
        open("prog.py")
        assert (1, "x")
        """,
    ),
    Honest(
        "doctest", "def f():\n    '''\n    >>> f()\n    1\n    '''\n    return 2\nimport doctest\ndoctest.testmod()"
    ),
    Honest(
        "unittest",
        """
        import unittest
        class T(unittest.TestCase):
            def test_a(self): pass
            def test_b(self): self.fail("no")
        result = unittest.main(exit=False, verbosity=2).result
        print(result)
        """,
    ),
)

OUTPUT = (
    Honest("unicode", "print('ünïcödé 漢字 🎉', ascii('🎉'))\nprint('\\ud800')"),
    Honest("much", "import sys\nfor n in range(60000): print(n, 'x' * 60)\nsys.stderr.write('e' * 100000)"),
    Honest(
        "mixed",
        """
        import os, sys
        print("buffered")
        os.write(1, b"raw\\n")
        sys.stdout.buffer.write(b"bytes\\n")
        sys.stdout.flush()
        print("x", end="")
        """,
    ),
    Honest(
        "replaced", "import io, sys\nsys.stdout = io.StringIO()\nprint('kept')\nsys.stderr.write(sys.stdout.getvalue())"
    ),
    Honest("reconfigured", "import sys\nsys.stdout.reconfigure(encoding='latin-1', newline='\\r\\n')\nprint('ü')"),
)
