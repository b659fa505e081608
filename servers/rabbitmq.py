"""RabbitMQ from Debian's package: its own epmd, ports, cookie and data, all on loopback.

What the package itself may have started on this machine does not matter: it has another epmd and another port.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

from servers.processes import ServerProcess, die_with_parent, free_port

SCRIPTS = Path("/usr/lib/rabbitmq/bin")
# The largest message, small enough for a test to exceed it with one event.
MAX_MESSAGE_BYTES = 1024 * 1024


class RabbitmqServer(ServerProcess):
    """One node, which can be started again with what it has on disk. `stop` ends it for good."""

    def __init__(self, folder: Path) -> None:
        assert (SCRIPTS / "rabbitmq-server").exists(), (
            "RabbitMQ is not on this machine: apt-get install rabbitmq-server"
        )
        (folder / "home").mkdir(parents=True, exist_ok=True)
        (folder / "plugins").write_text("[].\n")
        (folder / "rabbitmq.conf").write_text(
            f"max_message_size = {MAX_MESSAGE_BYTES}\n"
            # RabbitMQ would block when the machine's disk is nearly full, which is not what tests are about.
            "disk_free_limit.absolute = 1MB\n"
        )
        self._epmd_port, self._nodes_port = free_port(), free_port()
        self._epmd: subprocess.Popen[bytes] | None = None
        super().__init__([str(SCRIPTS / "rabbitmq-server"), "-noinput"], free_port(), folder)
        self.environment = self._environment()
        self.address = f"amqp://guest:guest@127.0.0.1:{self.port}/"

    def spawn(self) -> None:
        if self._epmd is None:
            epmd = ["epmd", "-port", str(self._epmd_port), "-address", "127.0.0.1", "-relaxed_command_check"]
            self._epmd = subprocess.Popen(
                epmd,
                env=self.environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
                preexec_fn=die_with_parent,
            )
        # The script becomes the virtual machine by exec, so that a signal to it reaches the node.
        super().spawn()

    def wait_until_listening(self) -> None:
        """Wait until the node runs: longer than for others, as it takes about six seconds on an idle machine."""
        for _ in range(2):
            with contextlib.suppress(AssertionError):
                return super().wait_until_listening()
        return super().wait_until_listening()

    def stop(self) -> None:
        self.kill()
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait(timeout=10)
            self._epmd = None

    def __exit__(self, *_: object) -> None:
        self.stop()

    def control(self, *arguments: str) -> str:
        """Run `rabbitmqctl` against the node."""
        command = [SCRIPTS / "rabbitmqctl", "--node", "hf@localhost", *arguments]
        run = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, run.stderr or run.stdout
        return run.stdout

    def _environment(self) -> dict[str, str]:
        folder = self.folder
        return {
            **{name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ},
            # RabbitMQ makes its cookie in the home directory.
            "HOME": str(folder / "home"),
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": "hf@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._nodes_port),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            # Otherwise the script stays the parent of the node.
            "RABBITMQ_ALLOW_INPUT": "1",
        }
