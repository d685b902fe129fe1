"""Small programs about the language: how they start, what they read and say, and how they end."""

from __future__ import annotations

from tests.sandbox.comparing import Honest

PROGRAMS = (
    Honest("stdin_as_a_whole", "import sys\nprint(sys.stdin.read().upper())", stdin="héllo\nwörld".encode()),
    Honest("stdin_line_by_line", "import sys\nfor n, line in enumerate(sys.stdin): print(n, repr(line))", stdin=b"a\nb\n\nc"),
    Honest("stdin_as_bytes", "import sys\nprint(sys.stdin.buffer.read())", stdin=bytes(range(256))),
    Honest("stdin_that_is_no_text", "print(input())", stdin=b"\xff\xfe\n"),
    Honest("input_to_the_end", "while True: print('>', input('? '))", stdin=b"one\ntwo"),
    Honest("argv", "import sys\nprint(sys.argv[1:], len(sys.argv))", argv=("a b", "ü", "", "-x", "--", "*")),
    Honest("exit_number", "import sys\nprint('before')\nsys.exit(3)"),
    Honest("exit_message", "import sys\nprint('out', end='')\nsys.exit('a last word: ü')"),
    Honest("exit_none", "raise SystemExit"),
    Honest("exit_true", "exit(True)"),
    Honest("exit_large", "import sys\nsys.exit(256 + 7)"),
    Honest("exit_negative", "import sys\nsys.exit(-2)"),
    Honest("exit_huge", "import sys\nsys.exit(2**70)"),
    Honest("exit_tuple", "raise SystemExit(('a', 2))"),
    Honest("exit_at_once", "import os\nprint('never written', end='')\nos._exit(9)"),
    Honest("exit_in_a_thread", "import threading, sys\nt = threading.Thread(target=sys.exit, args=(5,))\nt.start(); t.join()"),
    Honest("exit_in_atexit", "import atexit, sys\natexit.register(sys.exit, 4)\nprint('end')"),
    Honest("exit_subclass", "class Bye(SystemExit): code = 12\nraise Bye"),
    Honest("exit_with_output_closed", "import sys\nprint('x')\nsys.stdout.close()\nsys.exit(3)"),
    Honest("exit_without_streams", "import sys\nsys.stdout = sys.stderr = None\nprint('x')\nraise SystemExit('y')"),
    Honest(
        "uncaught",
        "def outer():\n    inner({'a': 1})\n\ndef inner(d):\n    return d['b'] + 1  # here\n\nprint('start')\nouter()\n",
    ),
    Honest(
        "chained",
        """
        try:
            try:
                1 / 0
            except ZeroDivisionError as exc:
                raise KeyError("k") from exc
        except KeyError:
            raise ValueError("v") from None
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
    Honest("syntax_error", "print('never')\nfor x in range(3)\n    print(x)\n"),
    Honest("indentation_error", "if True:\nprint(1)\n"),
    Honest("tab_error", "if True:\n        x = 1\n\ty = 2\n"),
    Honest("unclosed_bracket", "x = (1,\n"),
    Honest("unclosed_string", "x = 'abc\n"),
    Honest("source_that_is_no_text", b"x = '\xff'\n"),
    Honest("source_in_another_encoding", "# coding: latin-1\nprint('\xe4', ascii('\xe4'))\n".encode("latin-1")),
    Honest("source_in_no_encoding", "# coding: nonesuch\nprint(1)\n"),
    Honest("source_with_a_byte_order_mark", b"\xef\xbb\xbfprint('x')\n"),
    Honest("source_with_carriage_returns", b"x = 1\r\nprint(x)\r\n1/0\r\n"),
    Honest("source_without_a_last_newline", "1/0"),
    Honest("empty_source", ""),
    Honest("future", "from __future__ import annotations\ndef f(x: Nonesuch): pass\nprint(f.__annotations__)"),
    Honest("recursion", "def down(n): return down(n + 1)\ndown(0)\n"),
    Honest(
        "syntax_error_in_an_import", "open('other.py', 'w').write('def f(:\\n')\nimport other\n"
    ),
    Honest("error_in_eval", "eval('1 +')"),
    Honest("error_in_exec", "exec(compile('def f():\\n  raise ValueError(3)\\nf()', 'made-up.py', 'exec'))"),
    Honest("interrupted", "print('x', end='')\nraise KeyboardInterrupt"),
    Honest("interrupted_by_a_signal", "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('no')\n"),
    Honest("generator_exit", "raise GeneratorExit('x')"),
    Honest("own_excepthook", "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__, a[1])\n1/0"),
    Honest("broken_excepthook", "import sys\ndef hook(*a): raise RuntimeError('worse')\nsys.excepthook = hook\n1/0"),
    Honest("error_in_a_thread", "import threading\nt = threading.Thread(target=lambda: 1/0, name='t')\nt.start(); t.join(); print('on')"),
    Honest("error_in_del", "class A:\n    def __del__(self): raise ValueError('del')\nA()\nprint('on')"),
    Honest(
        "atexit",
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
        "threads_are_waited_for",
        """
        import threading, time, atexit
        atexit.register(print, "atexit comes after")
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread done"))).start()
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
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
        "finalizers_at_the_end",
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
        """
        open("other.py", "w").write("import sys\\nclass A:\\n    def __del__(self): sys.stdout.write('del other\\\\n')\\na = A()\\nf = open('output/o.txt', 'w'); f.write('o')\\n")
        import other
        print("end")
        """,
    ),
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
        "source_of_main",
        "import inspect\ndef f(x):\n    return x  # this\nprint(inspect.getsource(f), open(__file__).read().count('\\n'))",
    ),
    Honest("docstring", "'''What I am.'''\nprint(__doc__)"),
    Honest("flags", "import sys\nprint(sys.flags)\nprint(sys.warnoptions, sys._xoptions, sys.dont_write_bytecode)"),
    Honest(
        "streams",
        """
        import sys, os
        for s in (sys.stdin, sys.stdout, sys.stderr):
            print(s.encoding, s.errors, s.isatty(), s.line_buffering, s.name, s.mode, s.fileno(), s.newlines)
            print(s.write_through, s.buffer.name)
        print(sys.__stdout__ is sys.stdout, sys.getfilesystemencoding(), sys.getfilesystemencodeerrors())
        """,
    ),
    Honest(
        "surroundings",
        """
        import os, sys, locale, gc, signal, threading
        print(sorted(os.environ.items()), os.getcwd(), locale.getpreferredencoding(), locale.getlocale())
        print(gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() >= 0, sys.getrecursionlimit(), sys.getswitchinterval())
        print([(s.name, signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM, signal.SIGCHLD, signal.SIGXFSZ)])
        print(threading.current_thread(), threading.active_count(), threading.current_thread() is threading.main_thread())
        print(signal.pthread_sigmask(signal.SIG_BLOCK, []), oct(os.umask(0)), os.listdir("/proc/self/fd")[:3])
        print(sys.executable, sys.prefix, sys.path[1:], os.path.basename(__file__), sys.gettrace(), sys.getprofile())
        print(sys.meta_path, sys.path_hooks, sys.excepthook is sys.__excepthook__, sys.platform, sys.stdin.closed)
        """,
    ),
    Honest("import_a_sibling", "open('made.py', 'w').write('value = 42\\n')\nimport made\nprint(made.value, made.__file__)"),
    Honest("import_a_package", "import os\nos.makedirs('p/q')\nopen('p/q/m.py', 'w').write('print(__name__)')\nimport p.q.m"),
    Honest("import_nothing", "import nonesuch.module"),
    Honest("import_main", "open('o.py', 'w').write('import __main__\\nprint(__main__.x)')\nx = 5\nimport o"),
    Honest(
        "pickle",
        """
        import pickle, copy
        class Point:
            def __init__(self, x): self.x = x
        def f(): return 1
        print(pickle.loads(pickle.dumps(Point(3))).x, pickle.loads(pickle.dumps(f)) is f, copy.deepcopy(Point(4)).x)
        """,
    ),
    Honest("warnings", "import warnings\nwarnings.warn('old', DeprecationWarning)\nwarnings.warn('mind')\nopen('prog.py')\nassert (1, 'x')\n"),
    Honest("unicode", "print('ünïcödé 漢字 🎉', ascii('🎉'))\nimport sys\nprint('\\ud800')"),
    Honest("much_output", "import sys\nfor n in range(60000): print(n, 'x' * 60)\nsys.stderr.write('e' * 100000)"),
    Honest("output_mixed", "import os, sys\nprint('buffered')\nos.write(1, b'raw\\n')\nsys.stdout.buffer.write(b'bytes\\n')\nsys.stdout.flush()\nprint('x', end='')"),
    Honest("crash", "import ctypes\nprint('lost')\nctypes.string_at(0)"),
    Honest("crash_with_faulthandler", "import faulthandler, ctypes\nfaulthandler.enable()\nctypes.string_at(0)"),
    Honest("abort", "import os\nos.abort()"),
    Honest("reload", "import importlib, json\nprint(importlib.reload(json).loads('[1]'))"),
    Honest("tracing", "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\nprint('traced')"),
    Honest("asyncio_run", "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return 3\nprint(asyncio.run(f()))\nasyncio.run(f)"),
    Honest("unawaited", "import asyncio\nasync def f(): pass\nf()\nprint('x')"),
)
