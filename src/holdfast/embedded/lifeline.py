"""The process between us and the server: it makes the server die with us. Run as a script, never imported.

A parent-death signal set by us would not do: it is cleared when the child changes its user, needs code
between fork and exec in a program that may have threads, and fires when the *thread* that started the server
ends. So this small single-threaded parent starts the server instead. It holds the reading end of a pipe
whose only writer is us: when we end, in whatever way, the pipe closes and the server is told to stop. Should
this process be killed itself, the kernel signals the server, because here that signal is safe to set.

Orders come through the same pipe, a line each: `signal N` for the server, which is our child and therefore no other
process, and `keep` before an orderly end. What the server's user writes into its files is never asked whom to signal.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1
PATIENCE_SECONDS = 10.0


def main() -> int:
    order = json.loads(sys.argv[1])
    arguments = {} if order["uid"] is None else {"user": order["uid"], "group": order["gid"], "extra_groups": []}
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def die_with_lifeline() -> None:
        # Runs after the change of user, which would otherwise clear it again.
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)

    server = subprocess.Popen(
        order["command"],
        cwd="/",
        stdin=subprocess.DEVNULL,
        preexec_fn=die_with_lifeline,
        **arguments,
    )
    orphaned = threading.Event()
    os.write(order["report"], b"%d\n" % server.pid)
    os.close(order["report"])

    def obey() -> None:
        kept = False
        for line in sys.stdin.buffer:
            word, _, number = line.strip().partition(b" ")
            if word == b"signal":
                server.send_signal(int(number))
            kept = kept or word == b"keep"
        if not kept:
            orphaned.set()
        for sign in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
            server.send_signal(sign)
            try:
                server.wait(PATIENCE_SECONDS)
                return
            except subprocess.TimeoutExpired:
                continue

    threading.Thread(target=obey, daemon=True).start()
    code = server.wait()
    if orphaned.is_set():
        for directory in order["remove"]:
            shutil.rmtree(directory, ignore_errors=True)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    status = main()
    # The thread still reads orders: an orderly end of the interpreter would abort over the buffer that it holds.
    os._exit(status)
