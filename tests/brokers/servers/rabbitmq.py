"""A RabbitMQ of the tests' own, from Debian's package: its own epmd, ports, cookie and data, all on loopback.

What the package itself may have started on this machine does not matter: it has another epmd and another port.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

SCRIPTS = Path("/usr/lib/rabbitmq/bin")
START_SECONDS = 60.0
# Enough for tests to go past with one event.
MAX_MESSAGE_BYTES = 1024 * 1024


class RabbitmqServer:
    """One node. It can be killed, frozen and started again with what it has on disk."""

    def __init__(self) -> None:
        if not (SCRIPTS / "rabbitmq-server").exists():
            raise FileNotFoundError("RabbitMQ is not on this machine: apt-get install rabbitmq-server")
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-rabbitmq-"))
        self.port, self._nodes, self._epmd_port = free_ports(3)
        self._epmd: subprocess.Popen[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_frozen = False

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    def start(self) -> None:
        """Start the node, or the one that was killed, and wait until it answers."""
        if self._epmd is None:
            self._write_settings()
            command = ["epmd", "-port", str(self._epmd_port), "-address", "127.0.0.1", "-relaxed_command_check"]
            self._epmd = subprocess.Popen(command, env=self._environment(), stderr=subprocess.DEVNULL)
            _until_it_listens(self._epmd_port)
        with open(self.folder / "output", "ab") as output:
            self._process = subprocess.Popen(
                [SCRIPTS / "rabbitmq-server", "-noinput"], env=self._environment(), stdout=output, stderr=output
            )
        try:
            _until_it_listens(self.port)
        except TimeoutError:
            raise TimeoutError((self.folder / "output").read_text(errors="replace")[-2000:]) from None

    def kill(self) -> None:
        """End the node as a power switch would, but for the page cache."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
            self._process = None
        self._is_frozen = False

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)
        self._is_frozen = True

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)
        self._is_frozen = False

    def stop(self) -> None:
        if self._is_frozen:
            self.thaw()
        self.kill()
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def control(self, *arguments: str) -> str:
        """Run `rabbitmqctl` against the node."""
        command = [SCRIPTS / "rabbitmqctl", "--node", "hf@localhost", *arguments]
        run = subprocess.run(command, env=self._environment(), capture_output=True, text=True, timeout=60)
        if run.returncode != 0:
            raise RuntimeError(run.stderr or run.stdout)
        return run.stdout

    def _signal(self, number: signal.Signals) -> None:
        # The script becomes the virtual machine by exec, so this is no shell between us and it.
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _write_settings(self) -> None:
        (self.folder / "home").mkdir()
        (self.folder / "plugins").write_text("[].\n")
        (self.folder / "rabbitmq.conf").write_text(
            f"max_message_size = {MAX_MESSAGE_BYTES}\n"
            # A full disk of the machine is no business of the tests.
            "disk_free_limit.absolute = 1MB\n"
        )

    def _environment(self) -> dict[str, str]:
        folder = self.folder
        return {
            **{name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ},
            # The cookie is made in the home directory.
            "HOME": str(folder / "home"),
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": "hf@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._nodes),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            # The script stays no parent of the node.
            "RABBITMQ_ALLOW_INPUT": "1",
        }


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _until_it_listens(port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with socket.socket() as attempt:
            if attempt.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(f"nobody listens on port {port}")
