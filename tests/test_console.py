"""Whatever stands in the place of sys.stdout and sys.stderr, a program that imports the package goes on."""

import subprocess
import sys

from flashladder.common import console

STREAMS = """
import io, os, sys

class Logger:  # as programs have it, which copy what is printed to a file
    def write(self, text): pass
    def flush(self): pass

class Writer:
    def write(self, text): pass

closed = io.StringIO()
closed.close()
full = open("/dev/full", "w")
for value in (None, closed, Logger(), Writer(), full):
    for name in ("stdout", "stderr"):
        for module in [module for module in sys.modules if module.startswith("flashladder")]:
            del sys.modules[module]
        own = getattr(sys, name)
        setattr(sys, name, value)
        try:
            from flashladder.common import console
            from flashladder.tools import commands
            console.warn("a note")
            console.LINE_SECONDS = 0
            with console.progress("searched") as update:
                update(1, 2)
            assert commands.main(["bnch"]) == 2
        finally:
            setattr(sys, name, own)
print("done", flush=True)
os._exit(0)  # what a full disk did not take is not tried again
"""


def test_a_stream_may_be_anything():
    done = subprocess.run([sys.executable, "-c", STREAMS], capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr


def test_a_program_whose_streams_are_closed():
    command = [sys.executable, "-m", "flashladder", "--help"]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command])
    assert done.returncode == 0


def test_a_note_is_told_once(capsys):
    console.warn("the first [note]")
    console.warn("the second")
    assert capsys.readouterr().err == "note: the first [note]\nnote: the second\n"
