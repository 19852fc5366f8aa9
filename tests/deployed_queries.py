"""Every query that a deployment asks of Prometheus: in rules, triggers and dashboards."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import yaml


@dataclass(frozen=True)
class Query:
    where: str
    expression: str
    texts: tuple[str, ...] = ()  # that name labels of its result
    record: str | None = None  # the series that it makes, and its labels
    record_labels: frozenset[str] = frozenset()


def queries(files: dict[str, str]) -> list[Query]:
    """Return all of them, from the files that are deployed. Recording rules come first."""
    rules = yaml.safe_load(files["prometheus/prometheusrule.yaml"])["spec"]["groups"]
    found = [
        *_rules("prometheusrule", rules),
        *_rules("compose", yaml.safe_load(files["compose/prometheus/rules.yml"])["groups"]),
    ]
    found += _triggers(yaml.safe_load(files["keda/scaledobject.yaml"]))
    for path in ("grafana/penstock.json", "compose/grafana/penstock.json"):
        found += _panels(path, json.loads(files[path]))
    return found


def _rules(where: str, groups: list[dict]) -> Iterator[Query]:
    for rule in (rule for group in groups for rule in group["rules"]):
        name = rule.get("alert") or rule["record"]
        yield Query(
            f"{where}: {name}",
            rule["expr"],
            tuple(rule.get("annotations", {}).values()),
            rule.get("record"),
            frozenset(rule.get("labels", ())),
        )


def _triggers(scaled_object: dict) -> Iterator[Query]:
    for trigger in scaled_object["spec"]["triggers"]:
        yield Query(f"scaledobject: {trigger['name']}", trigger["metadata"]["query"])


def _panels(path: str, dashboard: dict) -> Iterator[Query]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield Query(f"{path}: {panel['title']}", target["expr"], (target["legendFormat"],))
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            selector, label = variable["query"].removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
            yield Query(f"{path}: variable {variable['name']}", selector, ("{{" + label + "}}",))
