"""Programs that a test interrupts, wherever the tests run."""

import signal
import subprocess


def start(command, **options):
    """The program, with pipes for what it prints; SIGINT means to it what it does in a terminal.

    A child takes over that SIGINT is ignored, as it is under nohup and in a shell's background jobs.
    """
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )
