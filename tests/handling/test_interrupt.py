"""Cancelling the statement of a thread past its limit stops no other thread, whatever the server does (LSN-13)."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own, because what is tested for would stop this one. The first line leads to the server; those
# after it are accepted and never answered, as by a server behind a network that went away.
PROGRAM = """
import os, socket, sys, threading, time
from urllib.parse import urlsplit, urlunsplit
import psycopg
from holdfast.postgres.driver_connection import PsycopgConnection
from holdfast.postgres.queries import Queries

parts = urlsplit(sys.argv[1])
listening = socket.create_server(("127.0.0.1", 0))

def pump(source, sink):
    while data := source.recv(65536):
        sink.sendall(data)

def serve():
    front, back = listening.accept()[0], socket.create_connection((parts.hostname, parts.port))
    for pair in ((front, back), (back, front)):
        threading.Thread(target=pump, args=pair, daemon=True).start()
    unanswered.append(listening.accept()[0])

unanswered = []
threading.Thread(target=serve, daemon=True).start()
netloc = parts.netloc.rpartition("@")[0] + f"@127.0.0.1:{listening.getsockname()[1]}"
connection = psycopg.connect(urlunsplit(parts._replace(netloc=netloc)))
threading.Thread(target=connection.execute, args=("SELECT pg_sleep(3)",), daemon=True).start()
driver = PsycopgConnection(connection, Queries("core"))
deadline = time.monotonic() + 20
while connection.info.transaction_status != psycopg.pq.TransactionStatus.ACTIVE:
    assert time.monotonic() < deadline
    time.sleep(0.01)
threading.Thread(target=driver.interrupt, daemon=True).start()
while not unanswered:
    assert time.monotonic() < deadline, "nobody has asked to cancel"
    time.sleep(0.01)
time.sleep(0.3)
print("goes on", flush=True)
os._exit(0)
"""


def test_a_cancel_that_is_not_answered_stops_no_other_thread(dsn: str) -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM, dsn], capture_output=True, text=True, timeout=40)
    assert (run.returncode, run.stdout) == (0, "goes on\n"), run.stderr
