"""A store is closed while other threads read it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

READING = """
import sqlite3, sys, threading
from pathlib import Path
from ringfence.store.schema import connect

folder = Path(sys.argv[1])
for _ in range(300):
    connection = connect(folder, read_only=True)
    begun = threading.Event()

    def read():
        text = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300) SELECT i FROM n, records"
        try:
            while True:
                connection.execute(text).fetchall()
                begun.set()
        except sqlite3.Error:
            pass

    reading = threading.Thread(target=read)
    reading.start()
    begun.wait()
    connection.close()
    reading.join()
print("all closed")
"""


def test_a_connection_that_is_closed_amid_a_query_is_an_error_and_no_crash(store: object, folder: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", READING, str(folder)], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "all closed\n"), ended.stderr
