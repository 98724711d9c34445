"""The files in deploy/ are what their tools accept, and name metrics the server has."""

import json
import re
import shutil
import subprocess

import pytest

from conftest import ROOT
from models import base  # noqa: F401 (a fixture)
from serving import serving

DEPLOY = ROOT / "deploy"


@pytest.mark.skipif(not shutil.which("promtool"), reason="SKIP: promtool is not installed")
def test_prometheus_rules():
    done = subprocess.run(["promtool", "check", "rules", DEPLOY / "prometheus-rules.yml"],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not shutil.which("systemd-analyze"),
                    reason="SKIP: systemd-analyze is not installed")
def test_systemd_unit(tmp_path):
    # The program is not installed here; everything else must be right.
    text = (DEPLOY / "k3.service").read_text().replace("/usr/bin/k3", "/bin/true")
    unit = tmp_path / "k3.service"
    unit.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0 and "k3.service" not in done.stderr, done.stderr


def test_every_metric_that_is_named_exists(k3_bin, base):  # noqa: F811
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    assert len({p["id"] for p in dashboard["panels"]}) == len(dashboard["panels"])
    text = json.dumps(dashboard) + (DEPLOY / "prometheus-rules.yml").read_text()
    for source in (ROOT / "src/k3/serve/web").glob("*.js"):
        text += source.read_text()
    named = set(re.findall(r"\bk3_[a-z0-9_]+", text))
    with serving(k3_bin, base, "--sample-every", 1) as server:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        assert server.chat(body).status == 200
        known = set(re.findall(r"^# TYPE (\S+)", server.get("/metrics").body.decode(), re.M))
    known |= {f"{name}_bucket" for name in known}
    # Families without a sample yet are not on the page.
    assert named - known <= {"k3_drift_alert", "k3_drift_distance", "k3_drift_threshold"}
