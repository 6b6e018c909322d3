"""A child on a pseudo-terminal."""

import os
import pty
import select
import signal
import time


class Terminal:
    def __init__(self, *args, env=None):
        self.seen = b""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            # without HOME nothing of a chat is kept
            env = {**os.environ, "TERM": "xterm", "HOME": "", "XDG_STATE_HOME": "", **(env or {})}
            os.execve(args[0], [str(a) for a in args], env)

    def read_until(self, enough, what, seconds=120):
        end = time.monotonic() + seconds
        while not enough():
            assert time.monotonic() < end, f"{what} did not come: {self.seen[-500:]}"
            if select.select([self.fd], [], [], 0.1)[0]:
                self.seen += os.read(self.fd, 65536)

    def wait_for(self, text):
        """Returns what came before it."""
        self.read_until(lambda: text in self.seen, text)
        before, self.seen = self.seen.split(text, 1)
        return before

    def wait_for_bytes(self, n):
        self.read_until(lambda: len(self.seen) >= n, f"{n} bytes")

    def send(self, data):
        os.write(self.fd, data)

    def end(self, seconds=120):
        """Waits for its end; returns the exit status."""
        end = time.monotonic() + seconds
        while True:  # what it still says
            if not select.select([self.fd], [], [], max(0, end - time.monotonic()))[0]:
                os.kill(self.pid, signal.SIGKILL)  # the status shows it
                break
            try:
                self.seen += os.read(self.fd, 65536)
            except OSError:  # its end of the terminal is closed
                break
        _, status = os.waitpid(self.pid, 0)
        os.close(self.fd)
        return os.waitstatus_to_exitcode(status)
