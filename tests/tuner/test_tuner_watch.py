"""Watching a study with optuna-dashboard, by `flashladder studies --serve`."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from contextlib import closing

import pytest

from flashladder.common.packages import requirements
from flashladder.common.paths import ROOT
from flashladder.tests.support.postgres import free_port
from flashladder.tuner.ledger import Ledger
from flashladder.tuner.storage import default_url

PAGE = (ROOT / "docs" / "tuner.md").read_text()


def test_the_page_names_the_extra_that_brings_it():
    extra = re.search(r"pip install -e '\.\[(\w+)\]'", PAGE)[1]
    assert ("optuna-dashboard", extra) in requirements()


def test_it_shows_what_was_measured(tmp_path):
    pytest.importorskip("optuna_dashboard", reason="pip install -e '.[watch]'")
    with closing(
        Ledger(default_url(tmp_path / "results"), "a study", {"gpu": "h100"}, {"block_m": [64, 128]})
    ) as study:
        study.finish(study.claim("code", {"block_m": 128}, {}), {"verdict": "measured"}, 1.25)

    port = free_port()
    command = [sys.executable, "-m", "flashladder", "studies", "--serve", "--port", str(port)]
    process = subprocess.Popen(command, env={**os.environ, "FLASHLADDER_RESULTS": str(tmp_path / "results")})
    try:
        (summary,) = fetch(f"http://127.0.0.1:{port}/api/studies")["study_summaries"]
        (trial,) = fetch(f"http://127.0.0.1:{port}/api/studies/{summary['study_id']}?after=0")["trials"]
    finally:
        process.kill()
        process.wait()
    assert summary["study_name"] == "a study"
    assert (trial["state"], trial["values"]) == ("Complete", [1.25])
    assert [(each["name"], each["param_external_value"]) for each in trial["params"]] == [("block_m", "128")]


def fetch(url, patience=30):
    """What the server answers, once it is there."""
    end = time.monotonic() + patience
    while True:
        try:
            with urllib.request.urlopen(url) as answer:
                return json.load(answer)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
