"""Single keys from a terminal, which gets its old settings back on any exit."""

import asyncio
import atexit
import contextlib
import os
import sys
import termios
import tty
from types import TracebackType
from typing import Self


class Keys:
    """Puts every key pressed into a queue, without Enter."""

    def __init__(self) -> None:
        self._descriptor = sys.stdin.fileno()
        self._pressed: asyncio.Queue[str] = asyncio.Queue()
        self._before = termios.tcgetattr(self._descriptor)

    def __enter__(self) -> Self:
        atexit.register(self._restore)
        tty.setcbreak(self._descriptor)
        asyncio.get_running_loop().add_reader(self._descriptor, self._read)
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        self._restore()

    async def next(self) -> str:
        return await self._pressed.get()

    def _read(self) -> None:
        keys = os.read(self._descriptor, 64)
        if not keys:  # the terminal is gone
            asyncio.get_running_loop().remove_reader(self._descriptor)
            self._pressed.put_nowait("q")
        if keys.startswith(b"\x1b"):  # an arrow or a function key, several bytes long
            return
        for key in keys.decode(errors="ignore"):
            self._pressed.put_nowait(key.lower())

    def _restore(self) -> None:
        with contextlib.suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)
