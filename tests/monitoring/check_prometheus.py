"""A real Prometheus against a real service: the rules load, and no expression of alerts and dashboards fails.

    python -m tests.monitoring.check_prometheus

Each query of the dashboards is evaluated, of panels and of variables, with the values that Grafana would fill in.
Grafana itself has not opened them: no package of Debian, PyPI or npm has its server.

Needs `prometheus` on the path, such as Debian's package. Takes half a minute.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.monitoring.expressions import ALERTS, expressions, variables
from tests.monitoring.service import watched_service

_SCRAPE = "1s"


class Prometheus:
    """The HTTP API of a Prometheus."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer. Raises RuntimeError with the error of Prometheus."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["error"]) from None

    def wait(self, query: str, seconds: float = 60.0) -> None:
        """Until a query has a result."""
        end = time.monotonic() + seconds
        while True:
            try:
                if self.get("query", query=query)["result"]:
                    return
            except OSError:
                pass  # it has not started yet
            if time.monotonic() > end:
                raise RuntimeError(f"{query} has no result after {seconds:.0f} s")
            time.sleep(0.5)

    def rules(self) -> list[Any]:
        return [rule for group in self.get("rules")["groups"] for rule in group["rules"]]

    def wait_for_rules(self, seconds: float = 60.0) -> None:
        """Until each has been evaluated."""
        end = time.monotonic() + seconds
        while any(rule["health"] == "unknown" for rule in self.rules()) and time.monotonic() < end:
            time.sleep(0.5)


@contextmanager
def running_prometheus(program: str, target: str) -> Iterator[Prometheus]:
    """Scrapes `target` as a pod, with our rules, while the context lasts."""
    labels = {"namespace": "check", "pod": "draftwood-0"}
    config = {
        "global": {"scrape_interval": _SCRAPE, "evaluation_interval": _SCRAPE},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [{"job_name": "draftwood", "static_configs": [{"targets": [target], "labels": labels}]}],
    }
    with tempfile.TemporaryDirectory(prefix="prometheus-") as folder:
        file = Path(folder, "prometheus.yml")
        file.write_text(yaml.safe_dump(config))
        flags = [f"--config.file={file}", f"--storage.tsdb.path={folder}/data", "--web.listen-address=127.0.0.1:0"]
        log = Path(folder, "log")
        with log.open("wb") as output:
            process = subprocess.Popen([program, *flags], stdout=output, stderr=output)
        try:
            yield Prometheus(_address(log))
        finally:
            process.terminate()
            process.wait(30)


def _address(log: Path, seconds: float = 60.0) -> str:
    """Where a starting Prometheus listens, as it logs."""
    end = time.monotonic() + seconds
    while not (found := re.findall(r'"Listening on" address=(\S+)', log.read_text(encoding="utf-8"))):
        if time.monotonic() > end:
            raise RuntimeError(f"Prometheus does not listen\n{log.read_text(encoding='utf-8')}")
        time.sleep(0.1)
    return str(found[0])


def check(program: str) -> list[str]:
    """What is wrong; prints what was asked."""
    wrong: list[str] = []
    with watched_service() as service, running_prometheus(program, service.metrics) as prometheus:
        prometheus.wait("draftwood_serving == 1")
        for _ in range(5):
            service.ask("acme")
            time.sleep(1)
        service.audited()
        prometheus.wait("count_over_time(draftwood_audit_answers_total[5m]) > 3")  # enough for rates
        prometheus.wait_for_rules()
        empty = []
        for place, expression in expressions().items():
            try:
                if not prometheus.get("query", query=expression)["result"]:
                    empty.append(place)
            except RuntimeError as error:
                wrong.append(f"{place}: {error}")
        for place, (series, label) in variables().items():
            if not prometheus.get(f"label/{label}/values", **{"match[]": series}):
                wrong.append(f"{place}: no values")
        rules = prometheus.rules()
        wrong += [f"rule {rule['name']}: {rule.get('lastError')}" for rule in rules if rule["health"] != "ok"]
        firing = [rule["name"] for rule in rules if rule["state"] == "firing"]
        wrong += [f"alert {name} fires for a service that is well" for name in firing]
        wrong += [f"{place}: no series" for place in empty if _should_have_series(place)]
    counts = f"{len(expressions())} expressions, {len(variables())} variables, {len(rules)} rules"
    print(f"{counts}; without a series: {', '.join(empty)}")
    return wrong


def _should_have_series(place: str) -> bool:
    """Alerts that do not fire have none; nothing was asked a week ago, and no quota was reached."""
    return not place.startswith("alert ") and not any(part in place for part in ("last week", "over a quota"))


def main() -> None:
    program = shutil.which("prometheus")
    if program is None:
        sys.exit("prometheus is not installed: apt-get install prometheus, or https://prometheus.io/download")
    if wrong := check(program):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
