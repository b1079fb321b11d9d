"""The deployment page against the server: its options, paths, ports and times; the unit by systemd itself."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.cli.serve import serve
from headway.serve.app import OPEN

PAGE = (Path(__file__).parents[1] / "docs" / "deploy.md").read_text()
DEFAULTS = {name: one.default for name, one in inspect.signature(serve).parameters.items()}


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found
    return found[1]


def test_every_option_is_one_of_the_server() -> None:
    commands = [block("dockerfile").partition("ENTRYPOINT")[2], block("ini"), block("yaml")]
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", " ".join(commands)))
    assert {flag[2:].replace("-", "_") for flag in flags} <= {*DEFAULTS, "config"}
    assert flags >= {"--host", "--api-key-file", "--config"}


def test_the_unit_is_one_and_gives_time_to_stop(tmp_path: Path) -> None:
    unit = block("ini")
    assert int(re.findall(r"TimeoutStopSec=(\d+)", unit)[0]) > DEFAULTS["shutdown_timeout"]
    assert int(re.findall(r"--stop-timeout (\d+)", PAGE)[0]) > DEFAULTS["shutdown_timeout"]
    systemd = shutil.which("systemd-analyze")
    if systemd is None:
        pytest.skip("no systemd here")
    path = tmp_path / "headway.service"
    path.write_text(unit.replace("/opt/headway/bin/headway", sys.executable))
    shown = subprocess.run([systemd, "verify", "--man=no", path], capture_output=True, text=True)
    if "Operation not permitted" in shown.stderr or "Failed to initialize" in shown.stderr:
        pytest.skip("systemd cannot run here")
    assert [line for line in shown.stderr.splitlines() if "headway.service" in line] == []


def test_probes_and_ports_are_those_of_the_server() -> None:
    yaml = pytest.importorskip("yaml")
    deployment, service = yaml.safe_load_all(block("yaml"))
    pod = deployment["spec"]["template"]["spec"]
    container: dict[str, Any] = pod["containers"][0]
    (port,) = container["ports"]
    assert port["containerPort"] == DEFAULTS["port"]
    assert f"EXPOSE {DEFAULTS['port']}" in block("dockerfile")
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        get = container[probe]["httpGet"]
        assert get["path"] in OPEN and get["port"] == port["name"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert pod["terminationGracePeriodSeconds"] > DEFAULTS["shutdown_timeout"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(re.findall(r'"--api-key-file", "(.*?)"', block("dockerfile"))) <= mounts
    (config,) = re.findall(r'"--config", "(.*?)"', block("dockerfile"))
    assert f":{config}:ro" in PAGE, "the file of options is mounted"
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]


def test_the_proxy_streams_and_takes_what_the_server_takes() -> None:
    conf = block("nginx")
    assert conf.count("{") == conf.count("}")
    assert "proxy_buffering off;" in conf and 'proxy_set_header Connection "";' in conf
    assert f"server 127.0.0.1:{DEFAULTS['port']};" in conf
    assert int(re.findall(r"client_max_body_size (\d+)m;", conf)[0]) == DEFAULTS["max_body_mib"]


def test_nginx_takes_the_configuration(tmp_path: Path) -> None:
    nginx, openssl = shutil.which("nginx"), shutil.which("openssl")
    if nginx is None or openssl is None:
        pytest.skip("no nginx here, or no certificate for it")
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    made = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=llm.example.com", "-days", "1"]
    subprocess.run([openssl, *made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    site = block("nginx").replace("/etc/ssl/llm.example.com.pem", str(certificate))
    site = site.replace("/etc/ssl/llm.example.com.key", str(key))
    conf = tmp_path / "nginx.conf"
    conf.write_text(f"pid {tmp_path}/pid; error_log stderr; events {{}} http {{ access_log off; {site} }}")
    shown = subprocess.run([nginx, "-t", "-p", tmp_path, "-c", conf], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
