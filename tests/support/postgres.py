"""A PostgreSQL server in a temporary folder, as an unprivileged user."""

import getpass
import os
import shutil
import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path

USER, DATABASE = "tuner", "studies"


def binaries():
    """The folder of initdb and pg_ctl: on PATH, or where Debian's packages have it; None where there is none."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return next((folder for folder in reversed(folders) if (folder / "pg_ctl").exists()), None)


@contextmanager
def server(folder):
    """Starts a server of its own, and gives the URL of an empty database."""
    port = free_port()
    account = "nobody" if os.geteuid() == 0 else getpass.getuser()  # PostgreSQL refuses to run as root
    data, sockets = folder / "data", folder / "run"
    for path in (folder, data, sockets):
        path.mkdir(exist_ok=True)
        if os.geteuid() == 0:
            shutil.chown(path, account)

    def run(program, *arguments):
        command = [binaries() / program, *arguments]
        subprocess.run(
            command,
            check=True,
            user=account if os.geteuid() == 0 else None,
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=60,
        )

    run("initdb", "-D", data, "--no-sync", "-A", "trust", "-U", USER)
    options = f"-p {port} -k {sockets} -c listen_addresses=127.0.0.1 -c fsync=off"
    run("pg_ctl", "-D", data, "-o", options, "-l", folder / "log", "-w", "start")
    try:
        run("createdb", "-h", "127.0.0.1", "-p", str(port), "-U", USER, DATABASE)
        yield f"postgresql://{USER}@127.0.0.1:{port}/{DATABASE}"
    finally:
        run("pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
