"""The picture of the README: parts of a real run of the tour, as an SVG for light and dark pages.

python tests/screen.py                  writes tests/screen.svg
python tests/screen.py FILE.svg
"""

from __future__ import annotations

import re
import subprocess
import sys
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHOWN = (4, 6, 7, 10)  # steps of the tour: the first two layers, an edit, the answer
LONGEST = 22  # lines of a step
WIDTH, HEIGHT, MARGIN = 8.0, 18, 16  # pixels: of a character, of a line, around all
STYLE = """
rect { fill: #ffffff; stroke: #d0d7de } text { fill: #1f2328; font: 13px monospace }
.title { font-weight: bold } .layer { fill: #8250df } .call { fill: #0969da }
.added { fill: #1a7f37 } .gone { fill: #cf222e }
@media (prefers-color-scheme: dark) {
rect { fill: #0d1117; stroke: #30363d } text { fill: #e6edf3 }
.layer { fill: #d2a8ff } .call { fill: #79c0ff } .added { fill: #7ee787 } .gone { fill: #ff7b72 } }
"""
KINDS = {
    r"Step \d+": "title",
    r" *(\[(micro|auto)_compact|before|after)": "layer",
    r" *> ": "call",
    r" *\+ ": "added",
    r" *- ": "gone",
}


def tour() -> list[str]:
    """What a run of the tour prints."""
    command = [sys.executable, str(HERE / "demo.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def shown_lines(lines: list[str]) -> list[str]:
    """The steps that are shown, long ones cut."""
    chosen: list[str] = []
    for step in "\n".join(lines).split("\n\nStep ")[1:]:
        if int(step.split(" ")[0]) in SHOWN:
            rows = f"Step {step}".rstrip().split("\n")
            if len(rows) > LONGEST:
                rows[LONGEST:] = ["      ..."]
            chosen += [*rows, ""]
    return chosen[:-1]


def svg(lines: list[str]) -> str:
    rows = []
    for number, line in enumerate(lines, 1):
        kind = next((name for start, name in KINDS.items() if re.match(start, line)), "")
        y = MARGIN + number * HEIGHT - 4
        rows.append(
            f'<text class="{kind}" x="{MARGIN}" y="{y}" xml:space="preserve">{escape(line)}</text>'
        )
    width = int(80 * WIDTH + 2 * MARGIN)
    height = len(lines) * HEIGHT + 2 * MARGIN
    frame = f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6"/>'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><style>{STYLE}</style>{frame}'
    )
    return "\n".join([head, *rows, "</svg>"]) + "\n"


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "screen.svg"
    target.write_text(svg(shown_lines(tour())), encoding="utf-8")


if __name__ == "__main__":
    main()
