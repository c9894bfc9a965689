"""Shows what a checkup found, as text for a terminal and as one HTML file."""

import html
import textwrap

from kvblocks.verify.server.cases import CASES
from kvblocks.verify.server.checkup import Checkup
from kvblocks.verify.server.finding import Finding
from kvblocks.verify.server.target import printable

_WIDTH = 100
_COLD = {
    "server": "from a server without a cache",
    "salt": "by a new cache_salt for each",
    "reset": "by resets of the cache",
    "traffic": "by other prompts that displace what is cached",
    "never": "none",
}


def as_text(checkup: Checkup) -> str:
    """Return a report of a few lines, followed by one paragraph for each finding."""
    patient, target = checkup.patient, checkup.patient.target
    lines = [
        f"{target.url}, model {printable(target.model)}: {target.num_requests} requests in {checkup.seconds:.0f} s.",
        f"Seed: {checkup.options.seed}. Cold answers: {_COLD[patient.coldness.by]}.",
        f"Tolerance: {patient.tolerance.nats:.4f} nats; equal requests were up to {patient.tolerance.noise:.6f} apart.",
        *(f"Note: {note}." for note in patient.notes),
    ]
    for name, number in checkup.num_tries.items():
        found = [finding for finding in checkup.findings if finding.case == name]
        result = f"FAULT ({found[0].how_sure})" if found else "no fault"
        measured = f": {patient.measured[name]}" if name in patient.measured else ""
        lines.append(f"  {name:<10} {number:>3} tries  {result}{measured}")
    if checkup.not_tried:
        lines.append(f"Not tried with this server: {', '.join(checkup.not_tried)}.")
    for finding in checkup.findings:
        lines += ["", *_paragraph(finding)]
    number = len(checkup.findings)
    verdict = (
        ("1 fault was found." if number == 1 else f"{number} faults were found.") if number else "No fault was found."
    )
    return "\n".join([*lines, "", verdict])


def as_html(checkup: Checkup) -> str:
    """Return the same report as one HTML file that loads nothing else."""
    found = "".join(_section(finding) for finding in checkup.findings)
    summary = html.escape(as_text(checkup).partition("\n\n")[0])
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>kvblocks verify</title><style>{_STYLE}</style><h1>kvblocks verify</h1><pre>{summary}</pre>"
        f"{found or '<p>No fault was found.</p>'}</html>\n"
    )


def _paragraph(finding: Finding) -> list[str]:
    texts = {
        "should hold": CASES[finding.case].shows,
        "but": finding.what,
        "expected": finding.expected,
        "got": finding.got,
        "how sure": finding.how_sure,
        "repeat": finding.repeat,
    }
    lines = [f"{finding.case}:"]
    for name, value in texts.items():
        lines += textwrap.wrap(
            str(value), _WIDTH, initial_indent=f"  {name + ':':<13}", subsequent_indent=" " * 15, break_long_words=False
        )
    return lines


def _section(finding: Finding) -> str:
    prompts = "".join(
        f"<details><summary>the prompt</summary><p>{html.escape(p)}</p></details>" for p in finding.prompts
    )
    return (
        f"<h2>{html.escape(finding.case)}</h2><p>{html.escape(CASES[finding.case].shows)}</p>"
        f"<p><b>But:</b> {html.escape(finding.what)} ({html.escape(finding.how_sure)}).</p>"
        f"<div class=sides><div><h3>expected</h3><pre>{html.escape(finding.expected)}</pre></div>"
        f"<div><h3>got</h3><pre>{html.escape(finding.got)}</pre></div></div>"
        f"<p><code>{html.escape(finding.repeat)}</code></p>{prompts}"
    )


_STYLE = (
    ":root{color-scheme:light dark}body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "pre{white-space:pre-wrap;overflow-wrap:anywhere}.sides{display:grid;gap:1rem;"
    "grid-template-columns:repeat(auto-fit,minmax(16rem,1fr))}code{overflow-wrap:anywhere}"
)
