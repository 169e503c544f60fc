"""Headless Chromium, led by its debugging protocol over two pipes: it opens pages, presses keys, says what it saw."""

import json
import os
import select
import shutil
import subprocess
import time

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 60  # seconds for an answer
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}


class Browser:
    """A window with one page. `complaints` has the errors since the last visit."""

    def __init__(self, profile):
        commands, self._into = os.pipe()
        self._out_of, answers = os.pipe()
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            f"--user-data-dir={profile}",
        ]

        def as_chromium_expects():
            for place, pipe in ((13, commands), (14, answers)):  # first out of the way of 3 and 4
                os.dup2(pipe, place)
            os.dup2(13, 3)
            os.dup2(14, 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *options, "--remote-debugging-pipe"],
            preexec_fn=as_chromium_expects,
            pass_fds=(3, 4),
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._read, self._number, self._session, self._events = b"", 0, None, []
        self.complaints = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self._call("Page.bringToFront")  # keys go there

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.terminate()
        self._process.wait()
        os.close(self._into)
        os.close(self._out_of)

    def visit(self, path, fragment=""):
        """Opens a file, and waits until it is loaded."""
        self.complaints.clear()
        self._events.clear()
        self._call("Page.navigate", url=path.as_uri() + fragment)
        end = time.monotonic() + PATIENCE
        while "Page.loadEventFired" not in self._events:
            self._receive(end)

    def resize(self, width, height=900, dark=False):
        """Another window, and another colour scheme of its user."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def see(self, expression):
        """What JavaScript finds on the page; a promise is waited for."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key):
        """A key, as a person presses it."""
        text = {"Enter": "\r", " ": " "}.get(key)
        words = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": KEYS[key]}
        self._call("Input.dispatchKeyEvent", type="keyDown", **words, **({"text": text} if text else {}))
        self._call("Input.dispatchKeyEvent", type="keyUp", **words)

    def _call(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._into, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + PATIENCE
        while True:
            answer = self._receive(end)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _receive(self, end):
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._out_of], [], [], max(0, end - time.monotonic()))
            assert ready, f"Chromium did not answer within {PATIENCE} s"
            self._read += os.read(self._out_of, 1 << 16)
        line, _, self._read = self._read.partition(b"\0")
        message = json.loads(line)
        self._events.append(method := message.get("method", ""))
        parameters = message.get("params", {})
        is_error = parameters.get("entry", {}).get("level") == "error" or parameters.get("type") == "error"
        if method == "Runtime.exceptionThrown" or (
            method in ("Log.entryAdded", "Runtime.consoleAPICalled") and is_error
        ):
            self.complaints.append(parameters)
        return message
