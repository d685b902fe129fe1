"""Small programs about processes, threads and signals."""

from __future__ import annotations

from tests.sandbox.comparing import Honest

PROCESSES = (
    Honest(
        "subprocess",
        """
        import subprocess, sys
        print(subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True))
        print(subprocess.run("echo $0 $HOME; exit 3", shell=True, capture_output=True, text=True))
        print(subprocess.run(["cat"], input=b"piped", capture_output=True))
        print(subprocess.check_output([sys.executable, "-c", "import sys; print(sys.flags, sys.path)"]))
        try: subprocess.run(["sleep", "60"], timeout=0.2)
        except subprocess.TimeoutExpired as exc: print(exc.cmd)
        try: subprocess.run(["no-such-program"])
        except FileNotFoundError as exc: print(exc)
        with subprocess.Popen(["sort"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as p:
            print(p.communicate("b\\na\\n"))
        print(subprocess.run(["sh", "-c", "kill -9 $$"]).returncode)
        subprocess.check_call(["false"])
        """,
    ),
    Honest(
        "child_that_has_our_streams",
        """
        import subprocess, sys
        print("first", flush=True)
        subprocess.run([sys.executable, "-c", "import sys; print(sys.stdin.read()); 1/0"])
        print("last")
        """,
        stdin=b"for the child",
    ),
    Honest(
        "multiprocessing_fork",
        """
        import multiprocessing as mp
        def square(x): return x * x
        if __name__ == "__main__":
            context = mp.get_context("fork")
            with context.Pool(2) as pool: print(pool.map(square, range(5)))
            queue = context.Queue(); child = context.Process(target=queue.put, args=("from the child",))
            child.start(); print(queue.get(), child.join(), child.exitcode)
            with context.Manager() as manager: print(manager.list([1, 2]), dict(manager.dict(a=1)))
            lock, value = context.Lock(), context.Value("i", 5)
            with lock: print(value.value)
        """,
    ),
    Honest(
        "multiprocessing_spawn",
        """
        import multiprocessing as mp, sys
        def square(x): return x * x, __name__, sys.argv
        if __name__ == "__main__":
            with mp.get_context("spawn").Pool(2) as pool: print(pool.map(square, range(3)))
        """,
        argv=("x",),
    ),
    Honest(
        "multiprocessing_forkserver",
        """
        import multiprocessing as mp
        def square(x): return x * x, __name__
        if __name__ == "__main__":
            with mp.get_context("forkserver").Pool(2) as pool: print(pool.map(square, range(3)))
        """,
    ),
    Honest(
        "shared_memory",
        """
        from multiprocessing import Process, shared_memory
        def write(name):
            other = shared_memory.SharedMemory(name); other.buf[:5] = b"hello"; other.close()
        if __name__ == "__main__":
            memory = shared_memory.SharedMemory(create=True, size=100)
            child = Process(target=write, args=(memory.name,)); child.start(); child.join()
            print(bytes(memory.buf[:5])); memory.close(); memory.unlink()
        """,
    ),
    Honest(
        "executors",
        """
        from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
        def work(n):
            if n == 3: raise ValueError("three")
            return n + 1
        if __name__ == "__main__":
            with ThreadPoolExecutor(4) as threads: print(list(threads.map(work, range(3))))
            with ProcessPoolExecutor(2) as processes:
                print(list(processes.map(work, range(3))))
                try: processes.submit(work, 3).result()
                except ValueError as exc: print(repr(exc))
        """,
    ),
    Honest(
        "fork_and_exec",
        """
        import os, sys
        print("parent", flush=True)
        read, write = os.pipe()
        if not (child := os.fork()):
            os.dup2(write, 1); os.execv("/bin/sh", ["sh", "-c", "echo from sh; exit 5"])
        os.close(write)
        print(os.read(read, 100), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print(os.waitstatus_to_exitcode(os.system("exit 7")), os.popen("echo popen").read())
        print(os.posix_spawn("/bin/true", ["true"], {}) > 0, os.wait()[1])
        sys.stdout.flush()
        os.execlp(sys.executable, "python", "-c", "import sys; print('replaced', sys.argv); sys.exit(6)", "arg")
        """,
    ),
    Honest(
        "fork_and_go_on",
        """
        import os
        print("both", flush=True)
        child = os.fork()
        if child: os.waitpid(child, 0)
        print("end", child > 0)
        """,
    ),
    Honest(
        "a_script_made_at_run_time",
        """
        import os, subprocess
        python = "#!/usr/bin/env python3\\nimport sys; print(sys.argv[1:])\\n"
        for name, text in (("s.sh", "#!/bin/sh\\necho script $1\\n"), ("s.py", python)):
            with open(name, "w") as file: file.write(text)
            os.chmod(name, 0o755)
            print(subprocess.run(["./" + name, "arg"], capture_output=True))
        os.chmod("s.sh", 0o644)
        subprocess.run(["./s.sh"])
        """,
    ),
    Honest(
        "environment_of_children", "import os\nos.environ['N'] = 'ü'\ndel os.environ['USER']\nos.system('env | sort')"
    ),
    Honest(
        "virtual_environment",
        """
        import subprocess, venv
        venv.create("v", with_pip=False)
        print(subprocess.run(["v/bin/python", "-c", "import sys; print(sys.prefix != sys.base_prefix)"]))
        """,
    ),
    Honest(
        "threads",
        """
        import queue, threading
        lines, lock = queue.Queue(), threading.Lock()
        def work(n):
            for i in range(100):
                with lock: lines.put((n, i))
        threads = [threading.Thread(target=work, args=(n,)) for n in range(20)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(lines.qsize(), threading.active_count())
        event = threading.Event(); timer = threading.Timer(0.05, event.set); timer.start()
        print(event.wait(20), threading.Barrier(1).wait(), threading.stack_size(1 << 20))
        """,
    ),
)

SIGNALS = (
    Honest(
        "handled",
        """
        import os, signal, time
        got = []
        def handler(number, frame): got.append(signal.Signals(number).name)
        for number in (signal.SIGALRM, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM): signal.signal(number, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        while not got: time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT); signal.raise_signal(signal.SIGUSR1)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        os.kill(os.getpid(), signal.SIGUSR2); print(signal.sigwait([signal.SIGUSR2]), got)
        read, write = os.pipe(); os.set_blocking(write, False); signal.set_wakeup_fd(write)
        os.kill(os.getpid(), signal.SIGTERM); print(os.read(read, 1)); signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGALRM, lambda *a: 1 / 0)
        signal.alarm(1)
        try: time.sleep(60)
        except ZeroDivisionError: print("woken")
        """,
    ),
    Honest(
        "to_a_child",
        """
        import os, signal, time
        if not (child := os.fork()): time.sleep(60)
        os.kill(child, signal.SIGSTOP); print(os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1]))
        os.kill(child, signal.SIGCONT); os.kill(child, signal.SIGTERM); print(os.waitpid(child, 0)[1])
        handle = os.pidfd_open(os.getpid()); signal.pidfd_send_signal(handle, 0); os.close(handle)
        """,
    ),
    Honest("terminated", "import os\nprint('buffered and lost')\nos.kill(os.getpid(), 15)"),
    Honest("alarm", "import signal, time\nsignal.alarm(1)\ntime.sleep(9)"),
    Honest("broken_pipe", "import os\nr, w = os.pipe(); os.close(r)\nos.write(w, b'x')"),
    Honest(
        "file_too_large", "import resource as r\nr.setrlimit(r.RLIMIT_FSIZE, (9, 9))\nopen('f', 'wb').write(b'x' * 20)"
    ),
)
